"""What the lowerings share: the table, dtypes of a call, numbers as arrays, broadcasting.

Lowerings compute as PyTorch's CPU kernels do: in the type PyTorch promotes to, half precision in float32 and rounded
once at the end. The context casts what they return to the dtype of ``meta["val"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx

from torchport.backend.lowering_context import Call, LoweringTable

from ..dtypes import jax_dtype, wide_dtype

__all__ = [
    "TABLE",
    "Any",
    "Array",
    "Call",
    "Sequence",
    "Unary",
    "broadcast",
    "cast",
    "compute_dtype",
    "countable",
    "fx",
    "jax",
    "jax_dtype",
    "jnp",
    "lax",
    "literal",
    "lowers",
    "math",
    "merged",
    "normalise_dim",
    "normalise_dims",
    "np",
    "operands",
    "out_dtype",
    "out_shape",
    "promoted",
    "unmerged",
    "wide",
    "wide_dtype",
]

Array = jax.Array
TABLE: Final = LoweringTable()
lowers: Final = TABLE
"""``@lowers(aten.sin.default)`` enters a function in the table."""


def merged(call: Call, whole: Array) -> Array:
    """A value with its first two dimensions in one, as a batched product has them; noted with both of them.

    A product of such values, and a view with both dimensions again, go by what is noted. Where heads lie on different
    devices, a dimension of heads and batch in one lies on none.
    """
    vars(call.context).setdefault("unmerged", {})[call.node] = whole
    return lax.reshape(whole, (whole.shape[0] * whole.shape[1], *whole.shape[2:]))


def unmerged(call: Call, position: int) -> Array | None:
    """An argument with two dimensions for its first, where that is noted."""
    return vars(call.context).get("unmerged", {}).get(call.node.args[position])


def out_dtype(call: Call, position: int | None = None) -> np.dtype[Any]:
    """The dtype of a call's result (of one of its results)."""
    return jax_dtype((call.val if position is None else call.val[position]).dtype)


def out_shape(call: Call, position: int | None = None) -> tuple[int, ...]:
    """The shape of a call's result (of one of its results)."""
    return tuple((call.val if position is None else call.val[position]).shape)


def compute_dtype(call: Call, position: int | None = None) -> np.dtype[Any]:
    """What a floating-point operator computes its result in."""
    return wide_dtype(out_dtype(call, position))


def promoted(call: Call, *positions: int) -> np.dtype[Any]:
    """The dtype PyTorch promotes some positional arguments to: for operators whose result has another dtype."""
    values = [call.arg(position) for position in positions or range(len(call.node.args))]
    dtype: Any = None
    for value in values[1:]:
        # Tensor beside tensor, and number beside tensor, weigh differently: torch knows how.
        dtype = torch.result_type(values[0], value)
        values[0] = torch.empty((), dtype=dtype, device="meta") if len(values) > 2 else value
    return jax_dtype(dtype if dtype is not None else values[0].dtype)


def literal(value: Any, dtype: np.dtype[Any]) -> Any:
    """A Python number as a 0-dim constant; integers wrap around as C's do."""
    if dtype.kind in "iu" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return np.asarray(int(value) & ((1 << (8 * dtype.itemsize)) - 1), f"uint{8 * dtype.itemsize}").view(dtype)
    if isinstance(value, complex) and dtype.kind != "c":
        value = value.real
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)


def cast(x: Any, dtype: np.dtype[Any]) -> Any:
    """An array or a number in a dtype. As PyTorch: complex drops its imaginary part, bool is ``x != 0``."""
    if isinstance(x, (bool, int, float, complex)):
        return literal(x, dtype)
    if x.dtype == dtype:
        return x
    if x.dtype.kind == "c" and dtype.kind != "c":
        x = (x != 0) if dtype.kind == "b" else lax.real(x)
    if x.dtype.kind == "b" and dtype.kind not in "biu":
        # XLA makes of a bool's number times x a choice between x and 0, also where x is infinite or not a number.
        x = lax.convert_element_type(x, np.dtype(np.uint8))
    return lax.convert_element_type(x, dtype)


def countable(x: Any) -> Any:
    """An array that can be added up: of bools as bytes, where any that is not 0 is true; halves in float32."""
    return cast(x, np.dtype(np.int32)) if x.dtype.kind == "b" else wide(x)


def wide(x: Any) -> Any:
    """An array of half precision in float32; any other as it is."""
    return cast(x, wide_dtype(x.dtype))


def broadcast(x: Any, shape: Sequence[int]) -> Any:
    """An array expanded to a shape, trailing dimensions aligned."""
    shape = tuple(shape)
    if tuple(x.shape) == shape:
        return x
    return lax.broadcast_in_dim(x, shape, tuple(range(len(shape) - len(x.shape), len(shape))))


def operands(dtype: np.dtype[Any], *values: Any) -> list[Any]:
    """Arrays and numbers in one dtype and one shape, ready for ``jax.lax``."""
    arrays = [cast(value, dtype) for value in values]
    shapes = {tuple(array.shape) for array in arrays}
    if len(shapes) == 1:
        return arrays
    shape = np.broadcast_shapes(*shapes)
    return [broadcast(array, shape) for array in arrays]


def normalise_dim(dim: int, rank: int) -> int:
    """A dimension from 0; a 0-dim tensor has a dimension 0 (and -1)."""
    return dim % max(rank, 1)


def normalise_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Several dimensions from 0, ascending; ``None`` means all of them. None are left of a 0-dim tensor's."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({normalise_dim(dim, rank) for dim in listed})) if rank else ()


Unary = Callable[[Any], Any]
