"""How an operator is called: one function per variant, the same for the CPU and for the device under test.

Each takes (``OpInfo``, sample, :class:`Place`, seed) and returns nested results to compare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from .frontends import Place
from .torch_api import default_generators_seeded, is_alias

__all__ = ["ACCEPTED", "RAISED", "RUNNERS", "arguments", "put"]

ACCEPTED: Final = "accepted"
RAISED: Final = "raised"
_ARGUMENTS_ON_CPU = {"tensor_split"}
"""Operators that read an argument tensor on the host: only their input moves, as on CUDA."""


def put(value: Any, device: torch.device) -> Any:
    """A copy of nested arguments with tensors, and device arguments that say CPU, on ``device``."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            there = leaf.detach().clone() if device.type == "cpu" else leaf.detach().to(device)
            return there.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.nn.Module):
            return copy.deepcopy(leaf).to(device)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return device
        return leaf

    return tree_map(move, value)


def arguments(op: Any, sample: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """A sample's input, positional and keyword arguments on a device."""
    if op.name in _ARGUMENTS_ON_CPU:
        return put(sample.input, device), sample.args, sample.kwargs
    return put((sample.input, sample.args, sample.kwargs), device)


def _forward(op: Any, sample: Any, place: Place, seed: int) -> Any:
    input_, args, kwargs = arguments(op, sample, place.device)
    default_generators_seeded(seed)
    return place.call(op.op, input_, *args, **kwargs)


def _backward(op: Any, sample: Any, place: Place, seed: int) -> Any:
    input_, args, kwargs = arguments(op, sample, place.device)
    leaves = [t for t in tree_leaves((input_, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    default_generators_seeded(seed)
    result = place.call(op.op, input_, *args, **kwargs)
    result = sample.output_process_fn_grad(result)
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        return []
    seeds = [torch.full_like(t, 0.5) for t in outputs]
    return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)


def _forward_ad(op: Any, sample: Any, place: Place, seed: int) -> Any:
    input_, args, kwargs = arguments(op, sample, place.device)
    with forward_ad.dual_level():

        def dual(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                primal = leaf.detach()
                return forward_ad.make_dual(primal, torch.full_like(primal, 0.5))
            return leaf

        input_, args, kwargs = tree_map(dual, (input_, args, kwargs))
        default_generators_seeded(seed)
        result = sample.output_process_fn_grad(place.call(op.op, input_, *args, **kwargs))
        return [tuple(forward_ad.unpack_dual(t)) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def _inplace(op: Any, sample: Any, place: Place, seed: int) -> Any:
    input_, args, kwargs = arguments(op, sample, place.device)
    default_generators_seeded(seed)
    returned = place.call(op.get_inplace(), input_, *args, **kwargs)
    return returned, input_


def _out(op: Any, sample: Any, place: Place, seed: int) -> Any:
    shapes = op(sample.input, *sample.args, **sample.kwargs)
    out = tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=place.device), shapes)
    input_, args, kwargs = arguments(op, sample, place.device)
    default_generators_seeded(seed)
    place.call(op.op, input_, *args, **kwargs, out=out)
    return out


def _strided(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor as every other element of a larger one on the device."""
    if tensor.layout is not torch.strided:
        return tensor.to(device)
    if tensor.dim() == 0:
        return torch.stack([tensor, tensor]).to(device)[1]
    base = tensor.detach().repeat_interleave(2, -1).to(device)
    return base[..., ::2]


def _noncontiguous(op: Any, sample: Any, place: Place, seed: int) -> Any:
    def move(leaf: Any) -> Any:
        return _strided(leaf, place.device) if isinstance(leaf, torch.Tensor) else put(leaf, place.device)

    given = (sample.input, sample.args, sample.kwargs)
    if op.name in _ARGUMENTS_ON_CPU:
        input_, args, kwargs = tree_map(move, sample.input), sample.args, sample.kwargs
    else:
        input_, args, kwargs = tree_map(move, given)
    default_generators_seeded(seed)
    return place.call(op.op, input_, *args, **kwargs)


def _view(op: Any, sample: Any, place: Place, seed: int) -> Any:
    """The input is a slice of a larger tensor; a view that comes out is written to, and the larger tensor compared."""
    first, args, kwargs = arguments(op, sample, place.device)
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided or first.dim() == 0:
        return _forward(op, sample, place, seed)
    padded = torch.cat([sample.input.detach(), sample.input.detach(), sample.input.detach()])
    base = put(padded, place.device)
    length = first.shape[0]
    input_ = base.narrow(0, length, length)
    default_generators_seeded(seed)
    result = place.call(op.op, input_, *args, **kwargs)
    shown = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, result)
    if _gives_a_view(op, sample):
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == base.dtype:
                with torch.no_grad():
                    tensor.zero_()
                break
    return shown, base


def _gives_a_view(op: Any, sample: Any) -> bool:
    """Whether the CPU's result shares the input's memory, and people may write to it (not so for ``unsafe_…``)."""
    if op.name.startswith("unsafe_"):
        return False
    input_, args, kwargs = arguments(op, sample, torch.device("cpu"))
    result = tree_leaves(op.op(input_, *args, **kwargs))
    return any(isinstance(t, torch.Tensor) and is_alias(t, input_) for t in result)


def _error(op: Any, sample: Any, place: Place, seed: int) -> Any:
    try:
        result = _forward(op, sample, place, seed)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                leaf.cpu()
    except Exception:
        return RAISED
    return ACCEPTED


RUNNERS: Final[Mapping[str, Callable[[Any, Any, Place, int], Any]]] = {
    "forward": _forward,
    "backward": _backward,
    "forward_ad": _forward_ad,
    "inplace": _inplace,
    "out": _out,
    "view": _view,
    "noncontiguous": _noncontiguous,
    "edge": _forward,
    "error": _error,
}
