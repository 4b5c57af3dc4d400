"""Random operators as plain integer arithmetic, so that every backend draws the same numbers.

Each random op of a trace has a key: a 64-bit function of the device's seed and of how many random ops came before
(:meth:`DeviceRuntime.next_key`). Keys are inputs of the computation, so a new seed compiles nothing. Element ``i`` is
SplitMix64's finaliser of ``(key + i) * golden`` (Steele, Lea and Flood, OOPSLA 2014): a counter-based generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ..native.twins import twins

if TYPE_CHECKING:
    from torch import fx

    from .builder import Builder

__all__ = ["RANDOM", "draw", "is_random"]

aten = torch.ops.aten

_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2: Final = 0x94D049BB133111EB - (1 << 64)


_DRAWN: Final = frozenset({torch.float32, torch.float64})
"""The dtypes of floats that :func:`draw` fills tensors of."""


@twins.python
def draw(numbers: torch.Tensor, key: int, first: int) -> None:
    """Fill a contiguous tensor with the numbers from ``first`` on of a key, as the formulas below give them.

    Of int64, 64 bits each; of float32 and float64, uniform on [0, 1).
    """
    bits = torch.arange(first, first + numbers.numel(), dtype=torch.int64, device=numbers.device).add_(key)
    bits.mul_(_GOLDEN)
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    if numbers.dtype is not torch.int64:
        significand = 53 if numbers.dtype is torch.float64 else 24
        bits = (bits >> (64 - significand)).bitwise_and_((1 << significand) - 1)
        torch.mul(bits.to(numbers.dtype), 2.0**-significand, out=numbers.view(-1))
    else:
        numbers.view(-1).copy_(bits)


def _shift_right(b: Builder, x: fx.Node, bits: int) -> fx.Node:
    """Logical shift: torch's is arithmetic on int64, so the sign's copies are masked off."""
    shifted = b(aten.__rshift__.Scalar, x, bits)
    return b(aten.bitwise_and.Scalar, shifted, (1 << (64 - bits)) - 1)


def _bits(b: Builder, key: fx.Node, shape: Sequence[int], draw: int = 0) -> fx.Node:
    """64 random bits per element as int64. ``draw`` tells apart the draws of one op."""
    made = b.drawn(key, shape, torch.int64, draw)
    if made is not None:
        return made
    count = math.prod(shape)
    index = b(aten.arange.start, draw * count, (draw + 1) * count, dtype=torch.int64, device=torch.device("cpu"))
    # The key comes first: a compiler that folds index arithmetic would not fold it modulo 2**64.
    x = b(aten.mul.Tensor, b(aten.add.Tensor, index, key), _GOLDEN)
    x = b(aten.mul.Tensor, b(aten.bitwise_xor.Tensor, x, _shift_right(b, x, 30)), _MIX1)
    x = b(aten.mul.Tensor, b(aten.bitwise_xor.Tensor, x, _shift_right(b, x, 27)), _MIX2)
    x = b(aten.bitwise_xor.Tensor, x, _shift_right(b, x, 31))
    return b(aten.view.default, x, list(shape))


def _unit(b: Builder, key: fx.Node, shape: Sequence[int], dtype: torch.dtype, draw: int = 0) -> fx.Node:
    """Uniform on [0, 1) with as many random bits as the dtype's significand holds."""
    made = b.drawn(key, shape, dtype, draw) if dtype in _DRAWN else None
    if made is not None:
        return made
    significand = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    top = _shift_right(b, _bits(b, key, shape, draw), 64 - significand)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    unit = b(aten.mul.Tensor, b.cast(top, wide), 2.0**-significand)
    return b.cast(unit, dtype)


def _normal(b: Builder, key: fx.Node, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
    """Standard normal (Box and Muller 1958), computed in at least single precision."""
    if dtype.is_complex:
        real = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}[dtype]
        pair = b(aten.mul.Tensor, _normal(b, key, [*shape, 2], real), math.sqrt(0.5))
        return b(aten.view_as_complex.default, pair)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    radius = b(aten.neg.default, b(aten.log1p.default, b(aten.neg.default, _unit(b, key, shape, wide))))
    radius = b(aten.sqrt.default, b(aten.mul.Tensor, radius, 2.0))
    angle = b(aten.mul.Tensor, _unit(b, key, shape, wide, draw=1), 2 * math.pi)
    return b.cast(b(aten.mul.Tensor, radius, b(aten.cos.default, angle)), dtype)


def _float_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _scaled(b: Builder, unit: fx.Node, low: Any, high: Any) -> fx.Node:
    if (low, high) == (0.0, 1.0):
        return unit
    dtype = b.val(unit).dtype
    return b.cast(b(aten.add.Tensor, b(aten.mul.Tensor, unit, high - low), low), dtype)


# -- one lowering per operator: (builder, key, output spec, *args, **kwargs) -> node ------------------------------
def _uniform(b: Builder, key: fx.Node, spec: Any, x: Any, low: float = 0.0, high: float = 1.0) -> fx.Node:
    dtype = spec.dtype
    if dtype.is_complex:
        real = torch.float64 if dtype is torch.complex128 else torch.float32
        pair = _scaled(b, _unit(b, key, [*spec.shape, 2], real), low, high)
        return b.cast(b(aten.view_as_complex.default, pair), dtype)
    unit = _unit(b, key, spec.shape, dtype)
    if dtype.itemsize > 2 or (low, high) == (0.0, 1.0):
        return _scaled(b, unit, low, high)
    # Scaled in half precision, numbers would be rounded twice; and rounded once they may reach the bound they must not.
    drawn = b.cast(_scaled(b, b.cast(unit, torch.float32), low, high), dtype)
    return b(aten.masked_fill.Scalar, drawn, b(aten.ge.Scalar, drawn, high), low)


def _rand(b: Builder, key: fx.Node, spec: Any, *args: Any, **kwargs: Any) -> fx.Node:
    if spec.dtype.is_complex:
        real = torch.float64 if spec.dtype is torch.complex128 else torch.float32
        return b(aten.view_as_complex.default, _unit(b, key, [*spec.shape, 2], real))
    return _unit(b, key, spec.shape, spec.dtype)


def _randn(b: Builder, key: fx.Node, spec: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return _normal(b, key, spec.shape, spec.dtype)


def _normal_functional(b: Builder, key: fx.Node, spec: Any, x: Any, mean: float = 0.0, std: float = 1.0) -> fx.Node:
    z = _normal(b, key, spec.shape, spec.dtype)
    return b.cast(b(aten.add.Tensor, b(aten.mul.Tensor, z, std), mean), spec.dtype)


def _normal_of(b: Builder, key: fx.Node, spec: Any, mean: Any, std: Any = 1.0, *rest: Any) -> fx.Node:
    z = _normal(b, key, spec.shape, spec.dtype)
    return b.cast(b(aten.add.Tensor, b(aten.mul.Tensor, z, std), mean), spec.dtype)


def _randint_range(b: Builder, key: fx.Node, spec: Any, low: int, high: int) -> fx.Node:
    positive = b(aten.bitwise_and.Scalar, _bits(b, key, spec.shape), (1 << 62) - 1)
    drawn = b(aten.remainder.Scalar, positive, high - low)
    return b.cast(b(aten.add.Tensor, drawn, low) if low else drawn, spec.dtype)


def _randint(b: Builder, key: fx.Node, spec: Any, high: int, *args: Any, **kwargs: Any) -> fx.Node:
    return _randint_range(b, key, spec, 0, high)


def _randint_low(b: Builder, key: fx.Node, spec: Any, low: int, high: int, *args: Any, **kwargs: Any) -> fx.Node:
    return _randint_range(b, key, spec, low, high)


def _randint_like(b: Builder, key: fx.Node, spec: Any, x: Any, high: int, *args: Any, **kwargs: Any) -> fx.Node:
    return _randint_range(b, key, spec, 0, high)


def _randint_like_low(b: Builder, key: fx.Node, spec: Any, x: Any, low: int, high: int, **kwargs: Any) -> fx.Node:
    return _randint_range(b, key, spec, low, high)


_INTEGER_BITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.bool: 1}


def _random(b: Builder, key: fx.Node, spec: Any, x: Any, *bounds: Any) -> fx.Node:
    if not bounds:
        bits = _INTEGER_BITS.get(spec.dtype)
        high = (
            (1 << bits) + 1 if bits and bits > 1 else 2 if bits else min(torch.iinfo(spec.dtype).max, (1 << 62) - 1) + 1
        )
        return _randint_range(b, key, spec, 0, high)
    if len(bounds) == 1:
        return _randint_range(b, key, spec, 0, bounds[0])
    low, high = bounds
    return _randint_range(b, key, spec, low, (1 << 62) - 1 if high is None else high)


def _randperm(b: Builder, key: fx.Node, spec: Any, n: int, *args: Any, **kwargs: Any) -> fx.Node:
    order = b(aten.sort.stable, _bits(b, key, [n]), stable=True, dim=0)
    return b.cast(b.item(order, 1), spec.dtype)


def _below(b: Builder, key: fx.Node, shape: Sequence[int], p: Any) -> fx.Node:
    dtype = torch.float64 if not isinstance(p, (int, float)) and b.val(p).dtype is torch.float64 else torch.float32
    unit = _unit(b, key, shape, dtype)
    return b(aten.lt.Scalar, unit, p) if isinstance(p, (int, float)) else b(aten.lt.Tensor, unit, b.cast(p, dtype))


def _bernoulli(b: Builder, key: fx.Node, spec: Any, p: fx.Node) -> fx.Node:
    return b.cast(_below(b, key, spec.shape, p), spec.dtype)


def _bernoulli_p(b: Builder, key: fx.Node, spec: Any, x: Any, p: Any = 0.5) -> fx.Node:
    return b.cast(_below(b, key, spec.shape, p), spec.dtype)


def _native_dropout(b: Builder, key: fx.Node, spec: Any, x: fx.Node, p: float, train: Any) -> list[fx.Node]:
    val = b.val(x)
    if train is False or p == 0.0:
        ones = b(aten.full.default, list(val.shape), True, dtype=torch.bool, device=torch.device("cpu"))
        return [b(aten.clone.default, x), ones]
    keep = b(aten.logical_not.default, _below(b, key, val.shape, p))
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return [b(aten.mul.Tensor, b(aten.mul.Tensor, x, b.cast(keep, val.dtype)), scale), keep]


def _from_unit(formula: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
    """A distribution given as a function of (builder, u in [0, 1), parameters), computed in at least float32."""

    def lower(b: Builder, key: fx.Node, spec: Any, x: Any, *parameters: Any) -> fx.Node:
        wide = torch.float64 if spec.dtype in (torch.float64, torch.int64) else torch.float32
        return b.cast(formula(b, _unit(b, key, spec.shape, wide), *parameters), spec.dtype)

    return lower


def _log_complement(b: Builder, u: fx.Node) -> fx.Node:
    """log(1 - u), finite for every u that is drawn."""
    return b(aten.log1p.default, b(aten.neg.default, u))


def _exponential(b: Builder, u: fx.Node, rate: float = 1.0) -> fx.Node:
    return b(aten.div.Tensor, b(aten.neg.default, _log_complement(b, u)), rate)


def _cauchy(b: Builder, u: fx.Node, median: float = 0.0, sigma: float = 1.0) -> fx.Node:
    tangent = b(aten.tan.default, b(aten.mul.Tensor, b(aten.sub.Tensor, u, 0.5), math.pi))
    return b(aten.add.Tensor, b(aten.mul.Tensor, tangent, sigma), median)


def _geometric(b: Builder, u: fx.Node, p: float) -> fx.Node:
    if p == 1.0:
        return b(aten.add.Tensor, b(aten.mul.Tensor, u, 0.0), 1.0)
    trials = b(aten.div.Tensor, _log_complement(b, u), math.log1p(-p))
    return b(aten.clamp.default, b(aten.ceil.default, trials), 1.0)


def _log_normal(b: Builder, key: fx.Node, spec: Any, x: Any, mean: float = 1.0, std: float = 2.0) -> fx.Node:
    return b(aten.exp.default, _normal_functional(b, key, spec, x, mean, std))


def _multinomial(
    b: Builder, key: fx.Node, spec: Any, weights: fx.Node, count: int, replacement: bool = False
) -> fx.Node:
    """Exponential races: the category with the smallest exponential of rate ``weight`` wins (Efraimidis 2006)."""
    val = b.val(weights)
    repeats = [count] if replacement and count > 1 else []
    shape = [*val.shape[:-1], *repeats, val.shape[-1]]
    if repeats:
        weights = b(aten.expand.default, b(aten.unsqueeze.default, weights, -2), shape)
    race = b(aten.div.Tensor, weights, _exponential(b, _unit(b, key, shape, torch.float64), 1.0))
    if replacement and count > 1:
        return b(aten.argmax.default, race, -1)
    if count == 1:
        return b(aten.argmax.default, race, -1, True)
    return b.item(b(aten.topk.default, race, count, -1), 1)


RANDOM: Final[dict[Any, Callable[..., Any]]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.normal.float_float: lambda b, key, spec, mean, std, *a, **k: _normal_functional(b, key, spec, None, mean, std),
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal_functional.default: _normal_functional,
    aten.uniform.default: _uniform,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.random.default: _random,
    aten.random.to: _random,
    getattr(aten.random, "from"): _random,
    aten.randperm.default: _randperm,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: lambda b, key, spec, x, p: b.cast(_below(b, key, spec.shape, p), spec.dtype),
    aten.bernoulli.p: _bernoulli_p,
    aten.native_dropout.default: _native_dropout,
    aten.exponential.default: _from_unit(_exponential),
    aten.cauchy.default: _from_unit(_cauchy),
    aten.geometric.default: _from_unit(_geometric),
    aten.log_normal.default: _log_normal,
    aten.multinomial.default: _multinomial,
    aten.rand.generator: _rand,
    aten.rand_like.generator: _rand,
    aten.randn.generator: _randn,
    aten.randn_like.generator: _randn,
    aten.randint.generator: _randint,
    aten.randint.low_generator: _randint_low,
    aten.randint_like.generator: _randint_like,
    aten.randint_like.low_generator_dtype: _randint_like_low,
    aten.randperm.generator: _randperm,
}
"""Operator → lowering. Random operators that are not here run on the host, with a generator seeded by their key."""


def is_random(op: Any) -> bool:
    """Whether the op takes a key of the device's generator as an input of the computation."""
    return op in RANDOM
