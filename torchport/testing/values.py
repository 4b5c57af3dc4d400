"""Whether two results agree, how far apart they are, and what to hold random ones to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["Mismatch", "compare", "tolerance"]

_TOLERANCE: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
    torch.complex32: (2e-3, 2e-3),
    torch.complex64: (2e-5, 2e-5),
    torch.complex128: (1e-7, 1e-7),
}
"""(rtol, atol): ``torch.testing.assert_close``'s, with room for another summation order, as a fused kernel has.
PyTorch's own comparison of a device with the CPU (test_ops.py, ``test_compare_cpu``) allows 1e-3 for all dtypes."""
_DEVIATIONS: Final = 8.0
"""Random values may differ in their mean by this many standard deviations of the CPU's own means of a few draws."""


class Mismatch(AssertionError):
    """Two results differ; ``largest_abs`` and ``largest_rel`` say by how much where values do."""

    def __init__(self, message: str, largest_abs: float | None = None, largest_rel: float | None = None) -> None:
        super().__init__(message)
        self.largest_abs = largest_abs
        self.largest_rel = largest_rel


def tolerance(dtype: torch.dtype, own: tuple[tuple[float, float], ...] = ()) -> tuple[float, float]:
    """(rtol, atol) for a dtype: the loosest of ours and of the operator's own; zero for what is exact."""
    base = _TOLERANCE.get(dtype, (0.0, 0.0))
    if base == (0.0, 0.0):
        return base
    return max(base[0], *(r for r, _ in own), 0.0), max(base[1], *(a for _, a in own), 0.0)


def compare(
    actual: Any,
    expected: Any,
    own: tuple[tuple[float, float], ...] = (),
    *,
    how: str = "values",
    device: str = "",
    draws: Sequence[Any] = (),
) -> None:
    """Raise :class:`Mismatch` unless two nested results agree in structure, shape, dtype and ``how``.

    ``how``: ``"values"``, ``"statistics"`` (the mean against the CPU's several ``draws``, for random numbers) or
    ``"shapes"``. ``device`` is the device type that tensors must be on, if any.
    """
    got, want = tree_leaves(actual), tree_leaves(expected)
    if len(got) != len(want):
        raise Mismatch(f"{len(got)} results instead of {len(want)}")
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or (how == "values" and a != b and not (a != a and b != b)):
                raise Mismatch(f"{_short(a)} instead of {_short(b)}")
            continue
        if not isinstance(a, torch.Tensor):
            raise Mismatch(f"a {type(a).__name__} instead of a tensor")
        if device and a.device.type != device:
            raise Mismatch(f"a result is on {a.device}, not on {device}")
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Mismatch(f"{_short(a)} instead of {_short(b)}")
        host = a.detach().cpu()
        if how == "values":
            _same_values(host, b.detach(), own)
        elif how == "statistics":
            _same_statistics(host, [tree_leaves(draw)[position] for draw in draws])


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    return repr(value)[:80]


def _same_values(a: torch.Tensor, b: torch.Tensor, own: tuple[tuple[float, float], ...]) -> None:
    rtol, atol = tolerance(b.dtype, own)
    if b.dtype == torch.complex32:  # the CPU cannot compare these
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    try:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        largest_abs, largest_rel = _largest(a, b)
        first = " ".join(str(error).split())
        raise Mismatch(first[:300], largest_abs, largest_rel) from None


def _largest(a: torch.Tensor, b: torch.Tensor) -> tuple[float | None, float | None]:
    """The largest absolute and relative error; infinity where one is not finite and the other is another value."""
    if b.layout is not torch.strided or a.is_quantized or not b.numel():
        return None, None
    wide = torch.complex128 if b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    gap = torch.where(same, torch.zeros((), dtype=torch.float64), (x - y).abs())
    gap = torch.nan_to_num(gap, nan=math.inf, posinf=math.inf)
    relative = torch.where(same, torch.zeros((), dtype=torch.float64), gap / y.abs())
    return float(gap.max()), float(torch.nan_to_num(relative, nan=math.inf, posinf=math.inf).max())


def _same_statistics(a: torch.Tensor, draws: Sequence[torch.Tensor]) -> None:
    """The mean of the drawn values lies where the CPU's means of several draws do.

    Draws need not be independent within a tensor (``dropout3d`` draws once per channel), so the spread of the mean is
    taken from the draws themselves; samples that seed their own calls give no spread, but the elements' standard error.
    """
    means = torch.tensor([float(draw.detach().double().nanmean().abs()) for draw in draws], dtype=torch.float64)
    if a.numel() < 16 or a.is_complex() or not means.isfinite().all():
        return
    first = draws[0].detach().double()
    alone = float(first.nan_to_num(0.0, 0.0, 0.0).std()) / math.sqrt(first.numel())
    spread, centre = max(float(means.std()), alone), float(means.mean())
    gap = abs(float(a.double().nanmean().abs()) - centre)
    if gap > _DEVIATIONS * spread + 1e-6:
        raise Mismatch(f"the mean of the drawn values is off by {gap:.3g}; the CPU's means spread by {spread:.3g}", gap)
