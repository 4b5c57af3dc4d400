"""The lowering table: aten overload → a function of ``jax.lax``, one module per topic. Importing this imports JAX."""

from . import (
    activations,
    binary,
    control_flow,
    convolution,
    factories,
    fourier,
    histograms,
    indexing,
    linalg,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    reductions,
    resizing,
    sampling,
    sorting,
    special,
    views,
)
from .support import TABLE

__all__ = ["TABLE"]

del (
    activations,
    binary,
    control_flow,
    convolution,
    factories,
    fourier,
    histograms,
    indexing,
    linalg,
    losses,
    matmul,
    normalization,
)
del pointwise, pooling, reductions, resizing, sampling, sorting, special, views
