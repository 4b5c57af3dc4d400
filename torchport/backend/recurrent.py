"""Recurrent layers as one operator, for backends whose data is host memory: LSTM, GRU and RNN by the CPU's kernels.

PyTorch writes a recurrent layer out step by step for every device it does not know: three layers over 60 steps are 914
operators. Its kernels for the CPU have a loop of their own, and for an LSTM oneDNN's layer. So the layer is called on
the host as a whole, forward and backward, between two computations of the device. For a GRU there is a quicker way,
whose sums have another order (:mod:`.gated`); a backend says whether it may be taken.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .gated import gated_layers, takes_gated
from .interface import KernelRegistrar

__all__ = ["register_recurrent_layers"]

_KINDS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class _Unrolled(threading.local):
    on = False
    """Whether layers are written out step by step on the calling thread, as PyTorch does it."""


_unrolled: Final = _Unrolled()


@contextmanager
def _written_out() -> Iterator[None]:
    before, _unrolled.on = _unrolled.on, True
    try:
        yield
    finally:
        _unrolled.on = before


def register_recurrent_layers(registrar: KernelRegistrar, exact: bool = True) -> None:
    """Have a backend of host memory run ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` as CPU eager does.

    Tensors and packed sequences, both directions, projections, dropout between layers; gradients, also of gradients.
    ``exact``: values are CPU eager's to the last bit.
    """
    for kind in _KINDS:
        for overload in ("input", "data"):
            op = getattr(getattr(torch.ops.aten, kind), overload)
            quick = not exact and (kind, overload) == ("gru", "input")
            registrar.impl(op, "Autograd", _layer_kernel(op, overload == "data", _quick_gru if quick else op))


def _quick_gru(*args: Any) -> Any:
    return gated_layers(*args) if takes_gated(args) else torch.ops.aten.gru.input(*args)


def _layer_kernel(op: torch._ops.OpOverload, packed: bool, on_host: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator of recurrent layers.

    ``packed``: its sequence is packed, with sizes of batches. ``on_host``: the same on CPU tensors, where it is
    differentiated.
    """
    before = 2 if packed else 1  # arguments that come before the first states

    def kernel(*given: Any, **named: Any) -> Any:
        # From here on all arguments go by position: what the schema has defaults for is never left out.
        args = [*given, *(named[argument.name] for argument in op._schema.arguments[len(given) :])]
        if not _is_taken(args, packed):
            return op(*args)
        states, weights, has_biases, layers, dropout, train, bidirectional = args[before : before + 7]
        if not (train and dropout > 0.0 and layers > 1):
            return _as_one(op, on_host, args)
        return _layer_by_layer(
            op, on_host, args[:before], states, weights, has_biases, layers, dropout, bidirectional, args[before + 7 :]
        )

    return kernel


def _is_taken(args: Sequence[Any], packed: bool) -> bool:
    """Whether the layer runs on the host: its tensors are plain ones of one device, and nothing records the call.

    A compiler that traces and the transforms of ``torch.func`` need the layer written out.
    """
    if _unrolled.on or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return False
    leaves, _ = tree_flatten([args[0], *args[2:]] if packed else list(args))  # sizes of batches are on the CPU
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return all(type(tensor) in _PLAIN and tensor.device == tensors[0].device for tensor in tensors)


def _layer_by_layer(
    op: torch._ops.OpOverload,
    on_host: Callable[..., Any],
    sequence: Sequence[Any],
    states: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    bidirectional: bool,
    rest: Sequence[Any],
) -> Any:
    """The layers one after another: between them the device drops out, so that its own random numbers are drawn."""
    directions, per_layer = 1 + bidirectional, len(weights) // layers
    several = isinstance(states, (list, tuple))
    data, *sizes = sequence
    last: list[tuple[Any, ...]] = []
    for layer in range(layers):
        part = slice(layer * directions, (layer + 1) * directions)
        first = [state[part] for state in states] if several else states[part]
        own = list(weights[layer * per_layer : (layer + 1) * per_layer])
        given = [data, *sizes, first, own, has_biases, 1, 0.0, True, bidirectional, *rest]
        data, *ended = _as_one(op, on_host, given)
        last.append(tuple(ended))
        if layer < layers - 1:
            data = torch.dropout(data, dropout, True)
    return (data, *(torch.cat(parts) for parts in zip(*last, strict=True)))


def _as_one(op: torch._ops.OpOverload, on_host: Callable[..., Any], args: Sequence[Any]) -> Any:
    leaves, structure = tree_flatten(list(args))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[at] for at in places]

    def call(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for at, value in zip(places, values, strict=True):
            filled[at] = value
        return function(*tree_unflatten(filled, structure))

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _OnHost.apply(functools.partial(call, on_host), functools.partial(call, op), *tensors)
    return _to_device(call(op, [tensor.detach().cpu() for tensor in tensors]), tensors[0].device)


def _to_device(results: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(result.detach().to(device) for result in results)


class _OnHost(torch.autograd.Function):
    """A function of tensors, run on their host copies. CPU's own autograd records it, and gives its gradients."""

    @staticmethod
    def forward(ctx: Any, on_host: Callable[..., Any], on_device: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        given = [one.detach().cpu().requires_grad_(needs) for one, needs in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            results = on_host(given)
        ctx.on_device, ctx.given, ctx.results = on_device, given, results
        ctx.save_for_backward(*tensors)
        return _to_device(results, tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        sources = ctx.saved_tensors  # raises if one of them was written to since
        if torch.is_grad_enabled():  # gradients of gradients: the layer is written out on the device
            with _written_out():
                results = ctx.on_device(sources)
            found = _gradients(results, sources, needed, gradients, create_graph=True)
            return None, None, *found
        on_host = [gradient.cpu() for gradient in gradients]
        found = _gradients(ctx.results, ctx.given, needed, on_host, retain_graph=True)
        device = gradients[0].device
        return None, None, *(None if one is None else one.to(device) for one in found)


def _gradients(
    results: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    needed: Sequence[bool],
    gradients: Sequence[torch.Tensor],
    **options: bool,
) -> list[torch.Tensor | None]:
    """Of each source the gradient, or ``None`` where none is needed."""
    asked = [source for source, needs in zip(sources, needed, strict=True) if needs]
    found = iter(torch.autograd.grad(results, asked, gradients, allow_unused=True, **options))
    return [next(found) if needs else None for needs in needed]
