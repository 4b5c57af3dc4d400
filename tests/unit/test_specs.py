"""``torchport.core.specs``: what a tensor looks like, and what a compiler is told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchport.core.errors import ConfigError
from torchport.core.specs import CompileSpec, CompileSpecs, TensorSpec, contiguous_strides

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@given(shapes)
def test_contiguous_strides_are_pytorchs(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@given(shapes, st.randoms(use_true_random=False))
def test_a_spec_is_the_tensors(shape: tuple[int, ...], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty(shape).permute(order)
    spec = TensorSpec.of(tensor)
    assert (spec.shape, spec.strides, spec.dtype) == (tuple(tensor.shape), tensor.stride(), torch.float32)
    assert spec.is_contiguous == (tensor.stride() == contiguous_strides(tensor.shape))
    assert torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).stride() == tensor.stride()


def test_specs_are_values() -> None:
    spec = TensorSpec.of(torch.zeros(2, 3))
    assert spec == TensorSpec.of(torch.ones(2, 3))
    assert len({spec, TensorSpec.of(torch.ones(2, 3)), TensorSpec.of(torch.ones(2, 3, dtype=torch.int64))}) == 2
    with pytest.raises(AttributeError):
        spec.shape = (1,)  # type: ignore[misc]


def test_a_spec_as_text() -> None:
    assert str(TensorSpec.of(torch.zeros(2, 3, dtype=torch.bfloat16))) == "bfloat16[2, 3]"
    assert str(TensorSpec.of(torch.zeros(2, 3).t())) == "float32[3, 2] strides [1, 3]"
    assert str(TensorSpec.of(torch.tensor(True))) == "bool[]"


def test_fake_tensors_have_specs() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4, 2).t()
    assert TensorSpec.of(fake) == TensorSpec.of(torch.empty(4, 2).t())


keys = st.text(max_size=8)
items = st.dictionaries(keys, st.binary(max_size=8), max_size=5)


@given(items)
def test_compile_specs_are_a_mapping(given_items: dict[str, bytes]) -> None:
    specs = CompileSpecs(given_items)
    assert dict(specs) == given_items
    assert list(specs) == list(given_items)
    assert specs == CompileSpecs(CompileSpec(key, value) for key, value in given_items.items())
    assert dict(CompileSpecs(specs)) == given_items


@given(items, items)
def test_fingerprints_tell_specs_apart_and_ignore_order(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    same = CompileSpecs(one).fingerprint() == CompileSpecs(other).fingerprint()
    assert same == (one == other)
    backwards = dict(reversed(one.items()))
    assert CompileSpecs(backwards).fingerprint() == CompileSpecs(one).fingerprint()


def test_fingerprints_do_not_confuse_key_and_value() -> None:
    assert CompileSpecs({"a": b"bc"}).fingerprint() != CompileSpecs({"ab": b"c"}).fingerprint()
    assert CompileSpecs({"a": b"1:b1:c"}).fingerprint() != CompileSpecs({"a": b"", "b": b"c"}).fingerprint()


def test_text_values() -> None:
    specs = CompileSpecs({"mode": "schnell ü"})
    assert specs["mode"] == "schnell ü".encode()
    assert specs.text("mode") == "schnell ü"
    assert specs.text("absent") == ""
    assert specs.text("absent", "default") == "default"


def test_a_repeated_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' is given twice"):
        CompileSpecs([CompileSpec("a", b"1"), CompileSpec("a", b"1")])


@pytest.mark.parametrize("value", [3, None, 1.5, ["x"]])
def test_a_value_that_is_not_bytes_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="must be bytes"):
        CompileSpecs({"level": value})  # type: ignore[dict-item]
