"""Fourier transforms, with PyTorch's three ways to normalise."""

from __future__ import annotations

import torch

from .support import Array, Call, Sequence, jnp, lax, literal, lowers, math, normalise_dim, np, out_shape

aten = torch.ops.aten


def _scaled(x: Array, normalization: int, count: int) -> Array:
    """0: as it is; 1: divided by √n; 2: divided by n."""
    if not normalization:
        return x
    factor = 1 / math.sqrt(count) if normalization == 1 else 1 / count
    return x * literal(factor, np.dtype(x.real.dtype))


def _axes(x: Array, dim: Sequence[int]) -> tuple[int, ...]:
    return tuple(normalise_dim(d, x.ndim) for d in dim)


@lowers(aten._fft_c2c.default)
def fft_c2c(call: Call, x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    axes = _axes(x, dim)
    for axis in axes:
        x = jnp.fft.fft(x, axis=axis, norm="backward" if forward else None) if forward else _inverse(x, axis)
    return _scaled(x, normalization, math.prod(x.shape[axis] for axis in axes))


def _inverse(x: Array, axis: int) -> Array:
    """The inverse transform without its factor 1/n."""
    return jnp.fft.ifft(x, axis=axis, norm="forward")


@lowers(aten._fft_r2c.default)
def fft_r2c(call: Call, x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    axes = _axes(x, dim)
    count = math.prod(x.shape[axis] for axis in axes)
    last = axes[-1]
    if onesided:
        result = jnp.fft.rfft(x, axis=last)
        for axis in reversed(axes[:-1]):
            result = jnp.fft.fft(result, axis=axis)
    else:
        result = jnp.fft.fftn(x, axes=axes)
    return _scaled(result, normalization, count)


@lowers(aten._fft_c2r.default)
def fft_c2r(call: Call, x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    axes = _axes(x, dim)
    for axis in axes[:-1]:
        x = _inverse(x, axis)
    result = jnp.fft.irfft(x, n=last_dim_size, axis=axes[-1], norm="forward")
    result = _scaled(result, normalization, math.prod(result.shape[axis] for axis in axes))
    return lax.reshape(result, out_shape(call))
