"""Complex values for Inductor, whose own code has none: its C++ calls PyTorch's kernels for them.

That C++ hands kernels no complex numbers, and orders no read after a write through a view that such a kernel gave
(torch 2.13). So numbers become tensors here, and what is written into a part of a tensor is written to real values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

_aten = torch.ops.aten


def scatters(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions of what writes into a part of a complex tensor, and the ``table``'s own for other tensors.

    Inductor writes such a part in place, through a view. It takes a complex view for a tensor of its own, so that what
    reads the whole later may run before the write.
    """

    def at_last(src: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(src.resolve_conj())

    def decomposition(op: Any, write: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        original = table.get(op)

        def decomposed(x: torch.Tensor, src: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not x.is_complex():
                return original(x, src, *args, **kwargs) if original else NotImplemented
            real = write(at_last(x), at_last(src.to(x.dtype)), x.dim(), *args, **kwargs)
            return torch.view_as_complex(real)

        return decomposed

    return {op: decomposition(op, write) for op, write in _WRITES.items()}


def _select(x: torch.Tensor, src: torch.Tensor, rank: int, dim: int, index: int) -> torch.Tensor:
    return _aten.select_scatter(x, src, dim % rank, index)


def _slice(
    x: torch.Tensor, src: torch.Tensor, rank: int, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    return _aten.slice_scatter(x, src, dim % rank, start, end, step)


def _diagonal(
    x: torch.Tensor, src: torch.Tensor, rank: int, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    return _aten.diagonal_scatter(x, src.transpose(-1, -2), offset, dim1 % rank, dim2 % rank)


def _as_strided(
    x: torch.Tensor, src: torch.Tensor, rank: int, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    at = None if storage_offset is None else 2 * storage_offset
    return _aten.as_strided_scatter(x, src, [*size, 2], [*(2 * one for one in stride), 1], at)


_WRITES: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    _aten.select_scatter.default: _select,
    _aten.slice_scatter.default: _slice,
    _aten.diagonal_scatter.default: _diagonal,
    _aten.as_strided_scatter.default: _as_strided,
}
"""Writes to the real and imaginary parts: (tensor, what is written, rank of the complex tensor, further arguments)."""


def give_complex_tensors(graph: fx.GraphModule, mode: Any) -> None:
    """Replace the numbers that operators with complex values take for tensors by tensors, in place.

    Inductor calls PyTorch's own kernels for complex values. Its C++ hands them tensors only, no complex numbers, and
    miscounts the other integers where one is left out, such as ``alpha`` of a difference (torch 2.13).
    """
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        values = [node.meta.get("val"), *(value.meta.get("val") for value in node.all_input_nodes)]
        dtype = next((value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_complex()), None)
        if dtype is None:
            continue
        with graph.graph.inserting_before(node):
            if node.target in (_aten.full.default, _aten.scalar_tensor.default):
                shape, number = node.args if node.target is _aten.full.default else ((), node.args[0])
                node.replace_all_uses_with(_complex_tensor(graph.graph, mode, number, dtype, shape))
                graph.graph.erase_node(node)
                continue
            args, kwargs = list(node.args), dict(node.kwargs)
            for at, parameter in enumerate(node.target._schema.arguments):
                held: Any = args if at < len(args) else kwargs
                key: Any = at if at < len(args) else parameter.name
                value = held[key] if at < len(args) or key in kwargs else parameter.default_value
                if not isinstance(value, (int, float, complex)):
                    continue
                if isinstance(parameter.type, torch.TensorType):
                    held[key] = _complex_tensor(graph.graph, mode, value, dtype)
                elif isinstance(parameter.type, torch.NumberType) and isinstance(value, int):
                    held[key] = float(value)
            node.args, node.kwargs = tuple(args), kwargs


def _complex_tensor(graph: fx.Graph, mode: Any, number: Any, dtype: torch.dtype, shape: Any = ()) -> fx.Node:
    """Nodes for a complex tensor that holds one number, made of real ones; gives the last."""
    value = complex(number)
    of_dtype: dict[str, Any] = {"dtype": dtype.to_real(), "device": torch.device("cpu")}
    parts = [graph.call_function(_aten.full.default, (list(shape), x), of_dtype) for x in (value.real, value.imag)]
    made = graph.call_function(_aten.complex.default, tuple(parts))
    with mode:
        for part in parts:
            part.meta["val"] = torch.empty(list(shape), **of_dtype)
        made.meta["val"] = torch.empty(list(shape), dtype=dtype, device="cpu")
    return made
