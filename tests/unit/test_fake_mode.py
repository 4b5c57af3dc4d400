"""The fake tensor mode that is made without Dynamo is the one that PyTorch makes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchport.backend.fake_mode import make_fake_mode
from torchport.backend.infer import fake_tensor
from torchport.core.specs import TensorSpec

SPECS = [
    TensorSpec((2, 3), torch.float32, (3, 1)),
    TensorSpec((2, 3), torch.bool, (1, 2)),
    TensorSpec((), torch.complex64, ()),
    TensorSpec((0, 4), torch.int64, (4, 1)),
    TensorSpec((4, 5), torch.bfloat16, (0, 1)),
]


def test_it_has_the_attributes_that_pytorch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = vars(FakeTensorMode(allow_non_fake_inputs=True))
    monkeypatch.delitem(sys.modules, "torch._dynamo.config")
    ours = vars(make_fake_mode())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name == "fake_tensor_converter":
            assert vars(value).keys() == vars(theirs[name]).keys()
        elif name != "_stack_trace":
            assert value == theirs[name], name


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_fake_tensor_is_as_the_mode_makes_it(spec: TensorSpec) -> None:
    ours: Any = fake_tensor(spec)
    with FakeTensorMode():
        theirs: Any = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu")
    assert ours.__class__ is theirs.__class__ is FakeTensor
    assert TensorSpec.of(ours) == TensorSpec.of(theirs) == spec
    assert ours.device == theirs.device
    assert vars(ours).keys() == vars(theirs).keys()
    assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(theirs)


def test_a_fake_tensor_is_made_under_any_mode() -> None:
    with FakeTensorMode(), torch.inference_mode():
        made: Any = fake_tensor(SPECS[0])
    assert TensorSpec.of(made) == SPECS[0]
