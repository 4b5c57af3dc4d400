"""Operators computed at once on CPU tensors, with the meaning that they have in a graph.

A computation that was never seen is cheaper to compute than to compile, and even than to infer. Here an operator's
lowering (:class:`.builder.Builder`) is called with tensors instead of graph nodes: same rewrites, same random numbers,
same order of operations. On ``reference`` the results are equal bit for bit to the compiled computation's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ..core.errors import UnsupportedOp
from ..core.frames import user_line
from ..core.specs import TensorSpec
from ..native.twins import twins
from .builder import Builder, is_factory, scalar_places
from .decompositions import DECOMPOSE
from .infer import infer_as_on_cpu
from .lowering import LOWER, foreach_target, scalar_role, view_form
from .normal_form import is_view
from .probe import depends_on_values
from .random import RANDOM

__all__ = ["How", "as_it_is", "how", "interpret", "refuse_repetition", "settled"]

aten = torch.ops.aten
_WIDE: Final = frozenset({torch.float64, torch.complex128})
_FLOATS: Final = frozenset({torch.float32, torch.float64})
_CPU: Final = torch.device("cpu")


class ValueBuilder(Builder):
    """A builder whose things are CPU tensors: what it is asked to add, it computes."""

    @staticmethod
    def is_node(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    @staticmethod
    def val(node: Any) -> torch.Tensor:
        return node

    def item(self, node: Any, position: int) -> Any:
        return node[position]

    def inline(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], known_as: Any = None
    ) -> Any:
        return fn(*args, **kwargs)

    def drawn(self, key: Any, shape: Sequence[int], dtype: torch.dtype, draw: int) -> torch.Tensor:
        numbers = torch.empty(tuple(shape), dtype=dtype, device=_CPU)
        twins.draw(numbers, int(key), draw * numbers.numel())
        return numbers

    def _emit(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return op(*args, **kwargs)
        except RuntimeError:
            if op is not aten.view.default:
                raise
            # A rewrite gave the input other strides than the program saw; a contiguous copy always has a view.
            return op(args[0].contiguous(), *args[1:], **kwargs)


_builder: Final = ValueBuilder()


def _exact() -> dict[Any, str]:
    """Operators, most of them on lists, that give each element what their lowering gives, with numbers as inputs.

    ``"scalar"``: whatever number they are given; ``"wide"``: the same, where every tensor is of float32 or float64 and
    of one shape (:func:`_is_wide`); ``"list"``: unless they are given a float.
    """
    found: dict[Any, str] = {}
    for name in ("add", "sub", "mul", "div"):
        packet = getattr(aten, f"_foreach_{name}")
        found.update({getattr(packet, kind): "scalar" for kind in ("Scalar", "ScalarList")})
        found[packet.List] = "wide" if name in ("add", "sub") else "list"
    for name in ("sqrt", "neg", "reciprocal", "abs", "exp", "sign"):
        found[getattr(aten, f"_foreach_{name}").default] = "scalar"
    for name in ("addcmul", "addcdiv"):
        packet = getattr(aten, f"_foreach_{name}")
        found.update({packet.Scalar: "wide", packet.ScalarList: "wide", getattr(aten, name).default: "wide"})
    same = (aten.lerp.Scalar, aten.add.Tensor, aten.sub.Tensor, aten.mul.Scalar, aten.div.Scalar)
    return found | dict.fromkeys((aten._foreach_lerp.Scalar, *same), "wide")


_EXACT: Final = _exact()


class How:
    """How one operator is interpreted; settled once per operator.

    ``call`` is the operator to call on the tensors as they are, or ``None`` where its lowering has more to say.
    ``at_once`` is the same for tensors with the strides that the program sees, which a view can go by; a graph's values
    may have others, so that lowerings copy first.
    ``varying``: floats in places of numbers become tensors, because the graph's do; ``but_wide``: unless every tensor
    is of float32 or float64 and of one shape, where it makes no difference; ``tensor_places``: where tensors are
    wanted. ``shares``: results may share memory with arguments. ``no_generator``: the argument that says so, where the
    operator wants one. ``rule``: what shape inference is asked for calls of it, if a call with arguments like these
    always gives results like these; else ``None``. ``is_blank``: results have no contents of their own, and are zeros.
    """

    __slots__ = (
        "at_once", "but_wide", "call", "draws", "is_blank", "is_factory", "no_generator", "op", "rule", "scalars",
        "shares", "tensor_places", "varying",
    )  # fmt: skip

    def __init__(self, op: Any) -> None:
        self.op = op
        self.draws = op in RANDOM
        wanted = [one for one in op._schema.arguments if one.name == "generator" and not one.has_default_value()]
        self.no_generator = {one.name: None for one in wanted}
        self.is_factory = is_factory(op)
        self.is_blank = op in _BLANK
        lowered = self.draws or op in LOWER or op in DECOMPOSE or (foreach_target(op) is not None and op not in _EXACT)
        form = view_form(op)
        self.call = None if lowered else form
        self.at_once = form if is_view(form) or op is aten._unsafe_view.default else self.call
        self.varying = scalar_role(op) == "scalar" and _EXACT.get(op) != "scalar"
        self.but_wide = _EXACT.get(op) == "wide"
        self.scalars = scalar_places(op)
        given = enumerate(op._schema.arguments)
        self.tensor_places = tuple(at for at, one in given if str(one.type) == "Tensor" and not one.kwarg_only)
        self.rule = None if depends_on_values(op) else DECOMPOSE.get(op) or form
        self.shares = op in LOWER or op in DECOMPOSE or is_view(form)


@functools.cache
def how(op: Any) -> How:
    """How an operator is interpreted."""
    return How(op)


def as_it_is(how: How, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the CPU's operator on these arguments gives what a graph gives, in which some numbers are inputs."""
    if not how.varying or not _has_float(how, args, kwargs):
        return True
    return how.but_wide and _is_wide(how, args, kwargs)


def interpret(
    how: How,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    random_key: int = 0,
    specs: Sequence[TensorSpec | None] | None = None,
) -> Any:
    """An operator's result or results on CPU tensors. Raises what PyTorch raises for wrong arguments.

    ``kwargs`` has a ``device`` only if it is the CPU. ``random_key``: what a random operator draws with. ``specs``:
    those of its results, where they are known.
    """
    call = how.at_once if specs is None else how.call
    if call is not None and as_it_is(how, args, kwargs):
        if specs is None or call is not aten.view.default:
            return call(*args, **kwargs)
        return _builder.call(call, args, kwargs)  # of a value that may have other strides than the program saw
    if how.draws:
        specs = specs or _specs_of_random(how.op, args, {**how.no_generator, **kwargs})
        kept = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_FORMULAS}
        return RANDOM[how.op](_builder, torch.tensor(random_key), specs[0], *args, **kept)
    if how.varying and how.call is not None and not _computes_with_floats(args, kwargs):
        return how.call(*args, **kwargs)  # integers, which the CPU refuses to add a fraction of
    if how.varying:
        args, kwargs = _with_numbers_as_tensors(how.op, args, kwargs)
    elif specs is None and how.op is aten._efficientzerotensor.default:
        return torch.zeros(*args, **kwargs)  # PyTorch's own has no memory, which a value needs
    elif specs is None and how.is_blank:
        blank = view_form(how.op)(*args, **kwargs)
        refuse_repetition(how.op, blank.shape, blank.stride())
        return blank.zero_()
    elif specs is None and how.op in _AS_IT_IS:
        # Their lowerings go by the specs of what they give; without, the CPU's own operator has the right strides.
        kept = {name: value for name, value in kwargs.items() if name in _OF_COPIES and value is not None}
        return view_form(how.op)(*args, **kept)
    if specs is None and foreach_target(how.op) is not None:
        specs = [None] * len(args[0] if isinstance(args[0], (list, tuple)) else args[1])
    return _builder.lower(how.op, specs or (), args, kwargs)


_NOT_FOR_FORMULAS: Final = frozenset({"device", "layout", "pin_memory", "generator"})


def _has_float(how: How, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there is a finite float where the operator takes a number: in a graph it is an input."""
    for position, name in how.scalars:
        value: Any = args[position] if position < len(args) else kwargs.get(name)
        if value.__class__ is float and value - value == 0.0:
            return True
    return False


def _is_wide(how: How, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors of a call are of float32 or float64, of one shape, and have memory for each element.

    In lists those at one place are of one shape. With others, and with a number where a tensor may be, the CPU computes
    as with numbers, and rounds otherwise.
    """
    if any(position < len(args) and not isinstance(args[position], torch.Tensor) for position in how.tensor_places):
        return False
    first: Sequence[torch.Tensor] | None = None
    for value in (*args, *kwargs.values()):
        as_list = isinstance(value, (list, tuple))
        if not as_list and not isinstance(value, torch.Tensor):
            continue
        items: Sequence[Any] = value if as_list else (value,)
        if not all(isinstance(one, torch.Tensor) for one in items):
            continue  # numbers
        first = items if first is None else first
        if len(items) != len(first) or not all(map(_is_dense, items)) or not (as_list or items[0].dim()):
            return False
        if any(one.shape != other.shape for one, other in zip(items, first, strict=True)):
            return False
    return True


def _computes_with_floats(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether any tensor of a call is of floating point or complex numbers."""
    return any(
        isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())
        for value in (*args, *kwargs.values())
        for one in (value if isinstance(value, (list, tuple)) else (value,))
    )


def _is_dense(value: torch.Tensor) -> bool:
    if value.dtype not in _FLOATS:
        return False
    return all(stride or size == 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _with_numbers_as_tensors(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with each finite float as a graph gets it: a 0-dim tensor, float64 where tensors are."""
    given = [*args, *kwargs.values()]
    flat = [one for value in given for one in (value if isinstance(value, (list, tuple)) else (value,))]
    wide = any(isinstance(value, torch.Tensor) and value.dtype in _WIDE for value in flat)
    dtype = torch.float64 if wide else torch.float32

    def number(value: Any) -> Any:
        if value.__class__ is float and value - value == 0.0:
            return torch.tensor(value, dtype=dtype)
        if value.__class__ in (list, tuple) and value and value[0].__class__ is float:
            return [number(one) for one in value]
        return value

    return [number(value) for value in args], {name: number(value) for name, value in kwargs.items()}


def refuse_repetition(op: Any, sizes: Sequence[int], strides: Sequence[int]) -> None:
    """Raise :class:`UnsupportedOp` for a tensor made with elements that share memory.

    On the device such a tensor is a view, and here there is nothing it could be a view of.
    """
    if any(step == 0 and size > 1 for size, step in zip(sizes, strides, strict=False)):
        raise UnsupportedOp(
            "a tensor that shows an element more than once is a view of one that holds it; write "
            "torch.empty(…).expand(…)",
            op=str(op),
            source=user_line(),
        )


_BLANK: Final = frozenset(
    {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.empty_permuted.default,
     aten.new_empty.default, aten.new_empty_strided.default,
     aten._new_zeros_with_same_feature_meta.default}
)  # fmt: skip
"""Operators whose results are zeros on every backend, because nobody may rely on what they are."""


_AS_IT_IS: Final = frozenset({aten.copy.default, aten._to_copy.default})
_OF_COPIES: Final = frozenset({"dtype", "memory_format"})


def _spec(value: Any) -> Any:
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value


def _specs_of_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[TensorSpec | None]:
    """The specs of a random operator's results; raises what the CPU raises for such dtypes and numbers."""
    first = args[0] if args else None
    if op not in _LIKE_THE_FIRST or not isinstance(first, torch.Tensor) or first.dim() == 0:
        specs = [_spec(value) for value in args]
        return infer_as_on_cpu(op, specs, {name: _spec(value) for name, value in kwargs.items()}).specs
    # What is refused does not depend on the sizes: a few elements tell, once.
    few = [TensorSpec((2,), value.dtype, (1,)) if isinstance(value, torch.Tensor) else value for value in args]
    infer_as_on_cpu(op, few, kwargs)
    return (TensorSpec.of(first),)


_LIKE_THE_FIRST: Final = frozenset(
    {aten.native_dropout.default, aten.bernoulli.default, aten.bernoulli.p, aten.uniform.default,
     aten.normal_functional.default, aten.exponential.default}
)  # fmt: skip
"""Random operators whose first result has the shape and dtype of the first argument."""


def settled(value: torch.Tensor) -> torch.Tensor:
    """The value without what PyTorch has put off: a conjugation or a negation that only a flag stands for."""
    if value.is_conj():
        value = value.resolve_conj()
    return value.resolve_neg() if value.is_neg() else value
