"""Linear algebra: factorisations, solvers and what PyTorch makes of them, batched, in the last two dimensions.

LAPACK computes them on the CPU, as it does for PyTorch; ``info`` counts from 1 as LAPACK's does and is computed from
the factors. XLA cannot raise: a decomposition that does not converge is NaN. Results follow
``aten/src/ATen/native/BatchLinearAlgebra.cpp`` and ``LinearAlgebra.cpp``.
"""

from __future__ import annotations

import torch
from jax.scipy import linalg as scipy

from .support import Any, Array, Call, broadcast, cast, fx, jax, jnp, lax, lowers, math, np, out_shape

aten = torch.ops.aten

_INT32 = np.dtype(np.int32)


def _refuse_halves(node: fx.Node) -> str | None:
    for source in node.all_input_nodes:
        dtype = source.meta["val"].dtype
        if dtype.itemsize < 4 and dtype.is_floating_point:
            return f"LAPACK has no {dtype}"
    return None


def _adjoint(x: Array) -> Array:
    return lax.conj(jnp.swapaxes(x, -1, -2)) if x.dtype.kind == "c" else jnp.swapaxes(x, -1, -2)


def _eye(size: int, dtype: np.dtype[Any], batch: Any = ()) -> Array:
    return broadcast(jnp.eye(size, dtype=dtype), (*batch, size, size))


def _batched(*matrices: Array) -> list[Array]:
    """Matrices with their batch dimensions broadcast."""
    batch = np.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    return [broadcast(matrix, (*batch, *matrix.shape[-2:])) for matrix in matrices]


def _zeros(call: Call, position: int, dtype: np.dtype[Any]) -> Array:
    return jnp.zeros(out_shape(call, position), dtype)


# -- LU ----------------------------------------------------------------------------------------------
def _lu(a: Array) -> tuple[Array, Array]:
    """The factors of ``P A = L U`` in one matrix, and LAPACK's pivots from 1."""
    rank = min(a.shape[-2:])
    if not a.size:
        return a, jnp.zeros((*a.shape[:-2], rank), _INT32)
    factors, pivots, _ = lax.linalg.lu(a)
    return factors, cast(pivots, _INT32) + 1


def _singular(factors: Array) -> Array:
    """``info`` of an LU factorisation: the first zero on the diagonal from 1, 0 where there is none."""
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    if not diagonal.shape[-1]:
        return jnp.zeros(diagonal.shape[:-1], _INT32)
    zero = diagonal == 0
    return cast(jnp.where(jnp.any(zero, axis=-1), jnp.argmax(zero, axis=-1) + 1, 0), _INT32)


def _permutation(pivots: Array, size: int) -> Array:
    """``perm`` with ``(P b)[i] = b[perm[i]]`` for the ``P`` of ``P A = L U``."""
    if not pivots.size:
        return broadcast(lax.iota(_INT32, size), (*pivots.shape[:-1], size))
    return lax.linalg.lu_pivots_to_permutation(cast(pivots, _INT32) - 1, size)


def _rows(b: Array, order: Array) -> Array:
    return jnp.take_along_axis(b, order[..., None], axis=-2)


def _triangular(
    a: Array, b: Array, lower: bool, unit: bool = False, transpose: bool = False, left: bool = True
) -> Array:
    """``op(A) X = B`` or ``X op(A) = B``; ``transpose`` conjugates, too."""
    a, b = _batched(a, b)
    if not b.size or not a.size:
        return jnp.zeros_like(b)
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=transpose, conjugate_a=transpose, unit_diagonal=unit
    )


def _lu_solve(factors: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    """``A X = B`` from the factors of ``A``; with ``adjoint`` its conjugate transpose, without ``left`` ``X A = B``."""
    if not left:
        return _adjoint(_lu_solve(factors, pivots, _adjoint(b), True, not adjoint))
    order = _permutation(pivots, factors.shape[-1])
    batch = np.broadcast_shapes(factors.shape[:-2], b.shape[:-2])
    order, b = broadcast(order, (*batch, order.shape[-1])), broadcast(b, (*batch, *b.shape[-2:]))
    if not b.size:
        return b
    if not adjoint:
        return _triangular(factors, _triangular(factors, _rows(b, order), True, unit=True), False)
    found = _triangular(factors, b, False, transpose=True)
    found = _triangular(factors, found, True, unit=True, transpose=True)
    return _rows(found, jnp.argsort(order, axis=-1))


def _refuse_without_pivots(node: fx.Node) -> str | None:
    if node.kwargs.get("pivot", True) is not True:
        return "an LU factorisation without pivots: LAPACK has none"
    return _refuse_halves(node)


@lowers(aten.linalg_lu_factor_ex.default, refuses=_refuse_without_pivots)
def lu_factor(call: Call, a: Array, **kwargs: Any) -> tuple[Array, Array, Array]:
    factors, pivots = _lu(a)
    return factors, pivots, _singular(factors)


@lowers(aten.linalg_lu_solve.default, refuses=_refuse_halves)
def lu_solve(call: Call, factors: Array, pivots: Array, b: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    return _lu_solve(factors, pivots, b, left, adjoint)


def _unpacked(factors: Array) -> tuple[Array, Array]:
    """``L`` (unit lower) and ``U`` (upper) of the matrix that holds both."""
    rows, columns = factors.shape[-2:]
    rank = min(rows, columns)
    lower = jnp.tril(factors[..., :, :rank], -1) + jnp.eye(rows, rank, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :rank, :])


def _permutation_matrix(pivots: Array, size: int, dtype: np.dtype[Any]) -> Array:
    """``P`` of ``A = P L U``."""
    order = _permutation(pivots, size)
    return cast(order[..., None, :] == lax.iota(_INT32, size)[:, None], dtype)


@lowers(aten.lu_unpack.default)
def lu_unpack(
    call: Call, factors: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    lower, upper = _unpacked(factors) if unpack_data else (_zeros(call, k, factors.dtype) for k in (1, 2))
    if not unpack_pivots:
        return _zeros(call, 0, factors.dtype), lower, upper
    return _permutation_matrix(pivots, factors.shape[-2], factors.dtype), lower, upper


@lowers(aten.linalg_lu.default, refuses=_refuse_without_pivots)
def lu(call: Call, a: Array, **kwargs: Any) -> tuple[Array, Array, Array]:
    factors, pivots = _lu(a)
    return (_permutation_matrix(pivots, a.shape[-2], a.dtype), *_unpacked(factors))


def _transposed(call: Call, a: Array) -> bool:
    """Whether PyTorch factors the transpose for a determinant: rows of a real row-major matrix are LAPACK's columns.

    The factors are results that the backward pass goes on with, so they must be the same matrix's.
    """
    return call.arg(0).is_contiguous() and a.dtype.kind != "c"


def _factored(call: Call, a: Array) -> tuple[Array, Array]:
    return _lu(jnp.swapaxes(a, -1, -2) if _transposed(call, a) else a)


@lowers(aten._linalg_solve_ex.default, refuses=_refuse_halves)
def solve(
    call: Call, a: Array, b: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    factors, pivots = _lu(a)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    found = _lu_solve(factors, pivots, b[..., None] if vector else b, left or vector)
    return lax.reshape(found, out_shape(call, 0)), factors, pivots, _singular(factors)


@lowers(aten.linalg_inv_ex.default, refuses=_refuse_halves)
def inv(call: Call, a: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    factors, pivots = _lu(a)
    return _lu_solve(factors, pivots, _eye(a.shape[-1], a.dtype, a.shape[:-2])), _singular(factors)


def _swaps(pivots: Array) -> Array:
    """The determinant of a permutation: 1 or -1 (int32)."""
    moved = cast(pivots != lax.iota(_INT32, pivots.shape[-1]) + 1, _INT32)
    return 1 - 2 * (jnp.sum(moved, axis=-1, dtype=_INT32) % 2)


@lowers(aten._linalg_det.default, refuses=_refuse_halves)
def det(call: Call, a: Array) -> tuple[Array, Array, Array]:
    factors, pivots = _factored(call, a)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, axis=-1) * cast(_swaps(pivots), a.dtype), factors, pivots


@lowers(aten._linalg_slogdet.default, refuses=_refuse_halves)
def slogdet(call: Call, a: Array) -> tuple[Array, Array, Array, Array]:
    factors, pivots = _factored(call, a)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    sign = jnp.prod(jnp.sign(diagonal), axis=-1) * cast(_swaps(pivots), a.dtype)
    return sign, jnp.sum(lax.log(lax.abs(diagonal)), axis=-1), factors, pivots


# -- triangular and Cholesky -------------------------------------------------------------------------
@lowers(aten.linalg_solve_triangular.default, refuses=_refuse_halves)
def solve_triangular(
    call: Call, a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    return _triangular(a, b, not upper, unit=unitriangular, left=left)


@lowers(aten.triangular_solve.default, refuses=_refuse_halves)
def triangular_solve(
    call: Call, b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    """The older name: the arguments change places, and the matrix is a result, too."""
    a, b = _batched(a, b)
    if not transpose:
        return _triangular(a, b, not upper, unit=unitriangular), a
    return _triangular(jnp.swapaxes(a, -1, -2), b, upper, unit=unitriangular), a


def _step_by_step(a: Array) -> tuple[Array, Array]:
    """Cholesky's factor as far as it goes, column by column, and the order of the minor that is not positive."""
    size = a.shape[-1]
    places = lax.iota(_INT32, size)

    def column(k: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, info = state
        pivot = lax.real(rest[..., k, k]) if a.dtype.kind == "c" else rest[..., k, k]
        info = jnp.where((info == 0) & ~(pivot > 0), cast(k, _INT32) + 1, info)
        going = (info == 0)[..., None]
        root = lax.sqrt(jnp.where(pivot > 0, pivot, 1))[..., None]
        below = jnp.where(places > k, rest[..., :, k], 0)
        new = below / cast(root, a.dtype)
        diagonal = jnp.where(places == k, cast(root, a.dtype), new)
        written = jnp.where(going & (places >= k), diagonal, rest[..., :, k])
        rest = rest - jnp.where(
            going[..., None],
            new[..., :, None] * lax.conj(new)[..., None, :]
            if a.dtype.kind == "c"
            else new[..., :, None] * new[..., None, :],
            0,
        )
        return rest.at[..., :, k].set(written), info

    return lax.fori_loop(0, size, column, (a, jnp.zeros(a.shape[:-2], _INT32)))


def _cholesky(a: Array, upper: bool) -> tuple[Array, Array]:
    """The triangular factor and ``info``: of a matrix that is not positive definite as LAPACK leaves it."""
    if not a.size:
        return a, jnp.zeros(a.shape[:-2], _INT32)
    lower = jnp.tril(_adjoint(a) if upper else a)
    factor = jnp.tril(lax.linalg.cholesky(lower, symmetrize_input=False))
    failed = jnp.any(factor != factor, axis=(-2, -1))

    def look(_: None) -> tuple[Array, Array]:
        partial, info = _step_by_step(lower)
        return jnp.where(failed[..., None, None], jnp.tril(partial), factor), jnp.where(failed, info, 0)

    def done(_: None) -> tuple[Array, Array]:
        return factor, jnp.zeros(failed.shape, _INT32)

    found, info = lax.cond(jnp.any(failed), look, done, None)
    return _adjoint(found) if upper else found, info


@lowers(aten.linalg_cholesky_ex.default, refuses=_refuse_halves)
def cholesky(call: Call, a: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    return _cholesky(a, upper)


def _cholesky_solved(factor: Array, b: Array, upper: bool) -> Array:
    first = _triangular(factor, b, not upper, transpose=upper)
    return _triangular(factor, first, not upper, transpose=not upper)


@lowers(aten.cholesky_solve.default, aten._cholesky_solve_helper.default, refuses=_refuse_halves)
def cholesky_solve(call: Call, b: Array, factor: Array, upper: bool = False) -> Array:
    return _cholesky_solved(factor, b, upper)


@lowers(aten.cholesky_inverse.default, refuses=_refuse_halves)
def cholesky_inverse(call: Call, factor: Array, upper: bool = False) -> Array:
    return _cholesky_solved(factor, _eye(factor.shape[-1], factor.dtype, factor.shape[:-2]), upper)


# -- orthogonal --------------------------------------------------------------------------------------
@lowers(aten.linalg_qr.default, refuses=_refuse_halves)
def qr(call: Call, a: Array, mode: str = "reduced") -> tuple[Array, Array]:
    rows = a.shape[-2]
    if not a.size:
        q = _zeros(call, 0, a.dtype)
        # Without columns the complete Q is the identity.
        return (_eye(rows, a.dtype, a.shape[:-2]) if mode == "complete" else q), _zeros(call, 1, a.dtype)
    q, r = lax.linalg.qr(a, full_matrices=mode == "complete")
    return (_zeros(call, 0, a.dtype) if mode == "r" else q), r


@lowers(aten.geqrf.default, refuses=_refuse_halves)
def geqrf(call: Call, a: Array) -> tuple[Array, Array]:
    """Householder's reflectors below the diagonal, R above it, and the reflectors' factors."""
    if not a.size:
        return a, _zeros(call, 1, a.dtype)
    found: Any = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(found[0], -1, -2), found[1]


@lowers(aten.linalg_householder_product.default, refuses=_refuse_halves)
def householder_product(call: Call, a: Array, tau: Array) -> Array:
    if not a.size:
        return a
    return lax.linalg.householder_product(a, tau)


@lowers(aten.ormqr.default, refuses=_refuse_halves)
def ormqr(call: Call, a: Array, tau: Array, b: Array, left: bool = True, transpose: bool = False) -> Array:
    """``b`` times the whole of Q, which is made first: as many columns as rows, the further reflectors empty."""
    if not b.size:
        return b
    rows = a.shape[-2]
    square = jnp.concatenate([a, jnp.zeros((*a.shape[:-1], max(rows - a.shape[-1], 0)), a.dtype)], -1)[..., :rows]
    q = lax.linalg.householder_product(square, tau) if tau.size else _eye(rows, a.dtype, a.shape[:-2])
    q = _adjoint(q) if transpose else q
    return jnp.matmul(q, b) if left else jnp.matmul(b, q)


# -- eigenvalues and singular values -----------------------------------------------------------------
def _asked(node: fx.Node, name: str, position: int) -> bool:
    """An argument that is on unless it is given as off."""
    return bool(node.kwargs.get(name, node.args[position] if len(node.args) > position else True))


def _refuse_eigenvectors(node: fx.Node) -> str | None:
    if _asked(node, "compute_v", 2):
        return "eigenvectors have no definite sign: XLA's LAPACK chooses another than PyTorch's"
    return _refuse_halves(node)


@lowers(aten._linalg_eigh.default, refuses=_refuse_eigenvectors)
def eigh(call: Call, a: Array, uplo: str = "L", compute_v: bool = False) -> tuple[Array, Array]:
    """Eigenvalues of a Hermitian matrix, ascending; the eigenvectors are an empty tensor."""
    real = np.dtype(a.real.dtype)
    if not a.size:
        return jnp.zeros(out_shape(call, 0), real), _zeros(call, 1, a.dtype)
    _, values = lax.linalg.eigh(a, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, _zeros(call, 1, a.dtype)


@lowers(aten._linalg_eigvals.default, aten.linalg_eigvals.default, refuses=_refuse_halves)
def eigvals(call: Call, a: Array) -> Array:
    if not a.size:
        return jnp.zeros(out_shape(call), np.result_type(a.dtype, np.complex64))
    (values,) = lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)
    return values


@lowers(aten.linalg_eigvalsh.default, refuses=_refuse_halves)
def eigvalsh(call: Call, a: Array, uplo: str = "L") -> Array:
    if not a.size:
        return jnp.zeros(out_shape(call), a.real.dtype)
    return lax.linalg.eigh(a, lower=uplo.upper() == "L", symmetrize_input=False)[1]


@lowers(aten.linalg_svdvals.default, refuses=_refuse_halves)
def svdvals(call: Call, a: Array, *, driver: str | None = None) -> Array:
    return lax.linalg.svd(a, compute_uv=False) if a.size else jnp.zeros(out_shape(call), a.real.dtype)


def _refuse_singular_vectors(node: fx.Node) -> str | None:
    if _asked(node, "compute_uv", 2):
        return "singular vectors have no definite sign: XLA's LAPACK chooses another than PyTorch's"
    return _refuse_halves(node)


@lowers(aten._linalg_svd.default, refuses=_refuse_singular_vectors)
def svd(
    call: Call, a: Array, full_matrices: bool = False, compute_uv: bool = False, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    """Singular values, descending; the vectors are empty tensors."""
    values = lax.linalg.svd(a, compute_uv=False) if a.size else jnp.zeros(out_shape(call, 1), a.real.dtype)
    return _zeros(call, 0, a.dtype), values, _zeros(call, 2, a.dtype)


@lowers(aten.linalg_pinv.atol_rtol_tensor, refuses=_refuse_halves)
def pinv(
    call: Call, a: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False
) -> Array:
    """By singular values, or eigenvalues of a Hermitian matrix; what is below the tolerances counts as zero."""
    if not a.size:
        return jnp.zeros(out_shape(call), a.dtype)
    real = np.dtype(a.real.dtype)
    default = float(np.finfo(real).eps) * max(a.shape[-2:])
    if rtol is None:
        relative: Any = default if atol is None else jnp.where(atol > 0, 0.0, default)
    else:
        relative = rtol
    absolute: Any = 0.0 if atol is None else atol
    absolute, relative = (cast(jnp.asarray(t), real)[..., None] for t in (absolute, relative))
    if hermitian:
        right, values = lax.linalg.eigh(a, lower=True, symmetrize_input=False)
        left = _adjoint(right)
    else:
        u, values, v = lax.linalg.svd(a, full_matrices=False)
        right, left = _adjoint(v), _adjoint(u)
    sizes = lax.abs(values)
    limit = jnp.maximum(absolute, relative * jnp.max(sizes, axis=-1, keepdims=True))
    inverse = jnp.where(sizes > limit, 1 / values, jnp.zeros((), real))
    return jnp.matmul(right * cast(inverse, a.dtype)[..., None, :], left)


@lowers(aten.linalg_matrix_exp.default, refuses=_refuse_halves)
def matrix_exp(call: Call, a: Array) -> Array:
    if not a.size:
        return a
    if a.shape[-1] == 1:
        return lax.exp(a)
    rows = math.prod(a.shape[:-2])
    flat = lax.reshape(a, (rows, *a.shape[-2:]))
    return lax.reshape(jax.vmap(scipy.expm)(flat) if rows > 1 else scipy.expm(flat[0])[None], a.shape)
