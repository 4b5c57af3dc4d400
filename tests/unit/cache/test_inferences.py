"""What shape inference and decompositions gave, as bytes for other processes."""

from __future__ import annotations

import io

import pytest
import torch

from torchport.backend.infer import exact_key, infer, remembered
from torchport.backend.inferences import _CallUnpickler, _written
from torchport.backend.inlined import Inlined, Ref

aten = torch.ops.aten


def _read(data: bytes) -> object:
    return _CallUnpickler(io.BytesIO(data)).load()


def test_a_factory_s_call_is_kept_though_it_names_a_device() -> None:
    infer(aten.ones.default, ([2, 3],), {"device": torch.device("cpu")})
    key, found = next(item for item in reversed(remembered()[0].items()) if item[0][0] is aten.ones.default)
    assert _read(_written((key, found))) == (key, found)


def test_what_a_decomposition_calls_is_kept() -> None:
    made = Inlined(((aten.mul.Tensor, (Ref(0), 2.0), {}), (None, (Ref(1), 0), {})), (Ref(2), None))
    item = exact_key(("core", aten.addcmul.default), (1, 1.0, True), {"dtype": torch.float32}), made
    assert _read(_written(item)) == item


def test_calls_that_differ_in_a_number_s_type_are_told_apart() -> None:
    assert len({exact_key("f", (one,), {}) for one in (1, 1.0, True, 2)}) == 4
    with pytest.raises(TypeError):
        exact_key("f", ({},), {})
