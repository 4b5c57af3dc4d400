"""Matrix products. Half precision accumulates in float32; float32 uses the precision the context asks for."""

from __future__ import annotations

import torch

from .support import (
    Any,
    Array,
    Call,
    Sequence,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    merged,
    np,
    operands,
    out_dtype,
    out_shape,
    unmerged,
)

aten = torch.ops.aten


def contract(call: Call, x: Array, y: Array, dims: Any, wide: bool = False) -> Array:
    """``lax.dot_general`` with an accumulator as wide as PyTorch's; ``wide`` keeps the accumulator's type."""
    dtype = compute_dtype(call)
    if dtype.kind == "b":
        dtype = np.dtype(np.int32)
        x, y = cast(x, dtype), cast(y, dtype)
    # The CPU's bfloat16 product rounds once at the end either way; asked for float32 it need not round at all.
    return lax.dot_general(x, y, dims, preferred_element_type=dtype if wide or x.dtype == dtype else out_dtype(call))


@lowers(aten.mm.default)
def mm(call: Call, x: Array, y: Array) -> Array:
    return contract(call, x, y, (((1,), (0,)), ((), ())))


@lowers(aten.bmm.default)
def bmm(call: Call, x: Array, y: Array) -> Array:
    a, b = (unmerged(call, position) for position in (0, 1))
    if a is not None and b is not None and a.shape[:2] == b.shape[:2]:
        product = contract(call, a, b, (((3,), (2,)), ((0, 1), (0, 1))))
        return merged(call, product)
    return contract(call, x, y, (((2,), (1,)), ((0,), (0,))))


@lowers(aten.mv.default)
def mv(call: Call, x: Array, y: Array) -> Array:
    return contract(call, x, y, (((1,), (0,)), ((), ())))


@lowers(aten.dot.default, aten.vdot.default)
def dot(call: Call, x: Array, y: Array) -> Array:
    if call.node.target is aten.vdot.default and x.dtype.kind == "c":
        x = lax.conj(x)
    return contract(call, x, y, (((0,), (0,)), ((), ())))


def _scaled_sum(call: Call, x: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """``beta * x + alpha * product``; a zero ``beta`` ignores even NaN."""
    dtype = compute_dtype(call)
    product = cast(product, dtype)
    if alpha != 1:
        product = product * literal(alpha, dtype)
    if beta == 0:
        return product
    a, b = operands(dtype, x, product)
    return lax.add(b, a if beta == 1 else a * literal(beta, dtype))


@lowers(aten.addmm.default)
def addmm(call: Call, x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _scaled_sum(call, x, contract(call, a, b, (((1,), (0,)), ((), ())), wide=True), beta, alpha)


@lowers(aten.baddbmm.default)
def baddbmm(call: Call, x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _scaled_sum(call, x, contract(call, a, b, (((2,), (1,)), ((0,), (0,))), wide=True), beta, alpha)


@lowers(aten.addbmm.default)
def addbmm(call: Call, x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    product = jnp.sum(contract(call, a, b, (((2,), (1,)), ((0,), (0,))), wide=True), axis=0)
    return _scaled_sum(call, x, product, beta, alpha)


@lowers(aten.addmv.default)
def addmv(call: Call, x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return _scaled_sum(call, x, contract(call, a, b, (((1,), (0,)), ((), ())), wide=True), beta, alpha)


@lowers(aten.addr.default)
def addr(call: Call, x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    dtype = compute_dtype(call)
    product = cast(a, dtype)[:, None] * cast(b, dtype)[None, :]
    return _scaled_sum(call, x, product, beta, alpha)


@lowers(aten._cdist_forward.default)
def cdist(call: Call, x: Array, y: Array, p: float, mode: int | None) -> Array:
    shape = out_shape(call)
    a, b = (jnp.broadcast_to(v, (*shape[:-2], *v.shape[-2:])) for v in (x, y))
    if not x.shape[-1]:
        return lax.full(shape, literal(0, x.dtype))
    difference = abs(a[..., :, None, :] - b[..., None, :, :])
    return _norm(difference, p)


def _norm(difference: Array, p: float) -> Array:
    """The p-norm of absolute differences along the last dimension."""
    if p == 0:
        return jnp.sum((difference != 0).astype(difference.dtype), axis=-1)
    if p == 1:
        return jnp.sum(difference, axis=-1)
    if p == 2:
        return lax.sqrt(jnp.sum(difference * difference, axis=-1))
    if p == float("inf"):
        return jnp.max(difference, axis=-1)
    return jnp.sum(difference**p, axis=-1) ** (1 / p)


@lowers(aten._pdist_forward.default)
def pdist(call: Call, x: Array, p: float = 2) -> Array:
    rows, columns = np.triu_indices(x.shape[0], 1)
    if not len(rows) or not x.shape[1]:
        return lax.full(out_shape(call), literal(0, x.dtype))
    return _norm(abs(x[rows] - x[columns]), p)


@lowers(aten._trilinear.default)
def trilinear(
    call: Call,
    first: Array,
    second: Array,
    third: Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Array:
    """The product of three tensors, each expanded in its own dimensions, summed over ``sumdim``."""
    rank = first.ndim + len(expand1)
    dtype = compute_dtype(call)
    given: list[Any] = []
    for x, expand in ((first, expand1), (second, expand2), (third, expand3)):
        given += [cast(x, dtype), [d for d in range(rank) if d not in expand]]
    return jnp.einsum(*given, [d for d in range(rank) if d not in sumdim])
