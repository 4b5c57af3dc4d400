"""A kernel's code is written when it is first called, into the function that PyTorch's dispatcher already has."""

from __future__ import annotations

import torch
from helpers_traces import Recording

aten = torch.ops.aten


def test_a_kernel_gets_its_code_at_its_first_call_and_stays_the_same_function() -> None:
    recording = Recording()
    kernel = recording.kernel(aten.add.Tensor).fast
    before = kernel.__code__
    x = recording.leaf(2, 3)
    kernel(x, x, alpha=2)
    assert recording.kernel(aten.add.Tensor).fast is kernel
    assert kernel.__code__ is not before
    assert kernel.__code__.co_filename == "<torchport kernel aten.add.Tensor>"
    assert kernel.__kwdefaults__ == {"alpha": 1}
    written = kernel.__code__
    kernel(x, x)
    assert kernel.__code__ is written
