"""Shape inference of a first-time op, with fake tensors: shapes, dtypes and strides as CPU eager would give them.

Private torch APIs used here: ``torch._subclasses.fake_tensor.FakeTensor`` and its module's two exceptions for results
whose shape or value depends on data; the mode is made in :mod:`.fake_mode`.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..core.specs import TensorSpec
from .fake_mode import make_fake_mode
from .lowering import scalar_role
from .probe import cpu_result

__all__ = [
    "DataDependent",
    "Inferred",
    "NoShapeRule",
    "depends_on_data",
    "exact_key",
    "fake_mode",
    "fake_tensor",
    "infer",
    "infer_as_on_cpu",
    "infer_example",
    "learn",
    "observe",
    "observed",
    "quiet",
    "remembered",
]


@dataclass(frozen=True, slots=True)
class Inferred:
    """An op's results: one spec per tensor (``None`` for an undefined one), and the sequence type around several."""

    container: type | None
    specs: tuple[TensorSpec | None, ...]


class DataDependent(Exception):
    """The shape of a result depends on values, so the op cannot be part of a graph of static shapes."""


class NoShapeRule(Exception):
    """PyTorch has no shape inference for the op."""


class _Thread(threading.local):
    mode: Any = None


_here: Final = _Thread()


def fake_mode() -> Any:
    """The thread's one fake tensor mode; scalars that stand beside fake tensors may be real.

    A mode notes on itself that it is inside of a kernel, so two threads cannot use one.
    """
    if _here.mode is None:
        _here.mode = make_fake_mode()
    return _here.mode


def fake_tensor(spec: TensorSpec) -> torch.Tensor:
    """A fake CPU tensor with this spec."""
    from torch._subclasses.fake_tensor import FakeTensor

    # As the factory function under the mode would make it, but without a dispatch through Python.
    mode = fake_mode()
    with _disable_current_modes():
        memory = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
        return FakeTensor(mode, memory, torch.device("cpu"))


def _describe(result: Any) -> Inferred:
    if isinstance(result, torch.Tensor):
        return Inferred(None, (_spec(result),))
    if isinstance(result, (list, tuple)):
        return Inferred(list if isinstance(result, list) else tuple, tuple(_spec(item) for item in result))
    raise NoShapeRule(f"the op returns a {type(result).__name__}")


def _spec(value: Any) -> TensorSpec | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise NoShapeRule(f"the op returns a {type(value).__name__}")
    if value.layout is not torch.strided:
        raise NoShapeRule(f"the op returns a tensor of layout {value.layout}")
    sizes: tuple[Any, ...] = tuple(value.shape)
    if any(not isinstance(size, int) for size in sizes):
        raise DataDependent("the shape of the result depends on values")
    return TensorSpec.of(value)


_remembered: Final[OrderedDict[Any, Inferred]] = OrderedDict()
_remembered_as_on_cpu: Final[OrderedDict[Any, Inferred]] = OrderedDict()
_REMEMBER: Final = 16_384


def remembered() -> tuple[OrderedDict[Any, Inferred], ...]:
    """What :func:`infer` and :func:`infer_as_on_cpu` remember, by call."""
    return _remembered, _remembered_as_on_cpu


def _key(value: Any) -> Any:
    """A hashable form of an argument; numbers keep their type, since 1, 1.0 and True mean different dtypes."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, (int, float, complex)):
        return (value.__class__, repr(value))
    if isinstance(value, torch.Tensor):
        raise TypeError("a real tensor")
    return value


_SMALL: Final = 127.0
"""Numbers up to this fit every dtype that floats can become; of larger ones the CPU refuses some."""


def _key_of_varying(value: Any) -> Any:
    """The same for an operator to which it makes no difference which small float it is given."""
    if value.__class__ is float and -_SMALL <= value <= _SMALL:
        return float
    return tuple([_key_of_varying(item) for item in value]) if value.__class__ in (list, tuple) else _key(value)


@functools.lru_cache(maxsize=4_096)
def _takes_any_float(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and scalar_role(op) != "constant"


def _key_of(op: Any, default: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call's inferred results are remembered by. Raises ``TypeError`` for what cannot be."""
    key = _key_of_varying if _takes_any_float(op) else _key
    named = [(name, key(value)) for name, value in kwargs.items() if value is not None and name != "pin_memory"]
    return op, default, key(args), tuple(named)


def exact_key(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What tells a call from any other, whatever number it has where. Raises ``TypeError`` for what has no hash."""
    key = op, torch.get_default_dtype(), _key(args), tuple([(name, _key(value)) for name, value in kwargs.items()])
    hash(key)
    return key


def _bound_fake_cache() -> None:
    """PyTorch's fake tensors remember every operator with every shape, without a bound."""
    mode = type(fake_mode())
    if mode.cache_info().size > _REMEMBER:
        mode.cache_clear()


def infer(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inferred:
    """What the op returns for these arguments, specs standing for tensors. Results are remembered.

    Raises :class:`DataDependent`, :class:`NoShapeRule`, or what PyTorch raises for wrong arguments.
    """
    return _recall(_remembered, _infer, op, args, kwargs)


def infer_example(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inferred:
    """:func:`infer` for arguments that nobody has called the operator with, and that may be wrong for it.

    No kernel runs: few check what they are given, and some crash. Raises what shape inference itself raises.
    """
    return _recall(_remembered, functools.partial(_infer, ask=False), op, args, kwargs)


def infer_as_on_cpu(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inferred:
    """:func:`infer` for a call of a program: raises, too, what only the CPU's own kernel refuses."""
    return _recall(_remembered_as_on_cpu, _confirmed, op, args, kwargs)


observed: Final[deque[tuple[Any, Any, Any, Any, Any]]] = deque(maxlen=1 << 11)
"""What :func:`observe` noted and nothing has looked at yet: the last calls. A path may be noted for many rounds before
it is recorded; all of their calls, five objects each, would set off a full collection of Python's garbage, 0.3 s."""


def observe(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note what an operator gave on the CPU: a call with the same specs need not be inferred.

    ``args`` and ``kwargs`` hold specs where the operator has tensors; ``result`` is its spec, or a list or tuple of
    specs. Noting takes little, because most calls never come again; remembering is left to the next inference.
    """
    observed.append((op, args, kwargs, result, torch.get_default_dtype()))


def learn() -> None:
    """Remember what was observed; to be called before inferring for calls of a program."""
    while observed:
        try:
            op, args, kwargs, result, default = observed.pop()
        except IndexError:  # another thread has taken the last
            return
        try:
            key = _key_of(op, default, args, kwargs)
        except TypeError:  # a real tensor stands for a number
            continue
        several = isinstance(result, (list, tuple))
        inferred = Inferred(type(result) if several else None, tuple(result) if several else (result,))
        _remembered_as_on_cpu.setdefault(key, inferred)
    while len(_remembered_as_on_cpu) > _REMEMBER:
        _remembered_as_on_cpu.popitem(last=False)


def _recall(
    table: OrderedDict[Any, Inferred],
    make: Callable[..., Inferred],
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Inferred:
    try:
        key = _key_of(op, torch.get_default_dtype(), args, kwargs)
        found = table.get(key)
    except TypeError:  # something unhashable among the arguments
        return make(op, args, kwargs)
    if found is None:
        found = table[key] = make(op, args, kwargs)
        if len(table) > _REMEMBER:
            table.popitem(last=False)
            _bound_fake_cache()
    return found


def _confirmed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inferred:
    """What is inferred, if the CPU's own kernel takes the arguments and gives such results; raises what it raises.

    Strides are the kernel's: of dimensions of size 1, PyTorch's rules know them no better than anybody, but whether
    a result counts as channels-last can depend on them. Raises :class:`NoShapeRule` where the kernel gives other shapes
    or dtypes: it is right, as on the CPU.
    """
    inferred = infer(op, args, kwargs)
    result = cpu_result(op, args, kwargs, inferred.specs)
    if not isinstance(result, (torch.Tensor, list, tuple)):
        return inferred
    specs = list(inferred.specs)
    for at, (got, rule) in enumerate(zip(_describe(result).specs, specs, strict=False)):
        if got is None or rule is None:
            continue
        if (got.shape, got.dtype) != (rule.shape, rule.dtype):
            raise NoShapeRule(f"PyTorch's shape rule of {op} says {rule}, and its CPU kernel gives {got}")
        specs[at] = got
    return inferred if tuple(specs) == inferred.specs else Inferred(inferred.container, tuple(specs))


_WRONG_RULES: Final = frozenset({torch.ops.aten.multilabel_margin_loss_forward.default})
"""torch 2.13 gives the unreduced loss of a vector one dimension there; the CPU's kernel gives it none."""


def _infer(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ask: bool = True) -> Inferred:
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    if op in _WRONG_RULES:
        raise NoShapeRule(f"PyTorch's shape rule of {op} is wrong")

    def to_fake(value: Any) -> Any:
        return fake_tensor(value) if isinstance(value, TensorSpec) else value

    check = _CHECKS.get(op)
    if check is not None and not check(*args, **kwargs):
        misfit = RuntimeError(f"{op}: the shapes of its arguments do not fit together")
        if ask:
            return _ask_the_cpu(op, args, kwargs, misfit)
        raise misfit
    fake_args, fake_kwargs = _with_tensors(to_fake, args, kwargs)
    try:
        with fake_mode(), torch.no_grad(), quiet():
            return _describe(op(*fake_args, **fake_kwargs))
    except UnsupportedOperatorException as error:
        raise NoShapeRule(f"no shape rule for {op}") from error
    except NotImplementedError as error:
        raise NoShapeRule(f"no shape rule for {op}: {error}") from error
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError) as error:
        if depends_on_data(error):
            raise DataDependent("the shape of its result depends on values") from error
        if ask:
            return _ask_the_cpu(op, args, kwargs, error)
        raise


def depends_on_data(error: Exception) -> bool:
    """Whether fake tensors raised an error because a value, or the shape of a result, depends on data."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def _slices_fit(x: Any, dim: Any, index: Any, source: Any, **_: Any) -> bool:
    """Whether slices to be added have the shape that they go to; PyTorch's rule does not ask, and engines broadcast."""
    shapes = [value.shape for value in (x, index, source) if isinstance(value, TensorSpec)]
    if len(shapes) < 3 or not shapes[2] or not -len(shapes[0]) <= dim < len(shapes[0]):
        return True
    wanted = list(shapes[0])
    wanted[dim] = math.prod(shapes[1])
    return tuple(wanted) == shapes[2]


def _is_within(x: Any, *rest: Any, storage_offset: Any = None) -> bool:
    """Whether what ``as_strided`` is to show lies in the memory of its input."""
    size, stride, *offset = rest[1:] if isinstance(rest[0], TensorSpec) else rest
    if not isinstance(x, TensorSpec) or 0 in size:
        return True
    memory = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)) if 0 not in x.shape else 0
    start = (offset[0] if offset else storage_offset) or 0
    return start + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) <= memory


def _is_a_view(x: Any, size: Any, **_: Any) -> bool:
    """Whether memory can be shown in another shape; PyTorch's rule errs where sizes of 1 stand beside strides of 0."""
    if not isinstance(x, TensorSpec):
        return True
    with _disable_current_modes():
        memory = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
        try:
            memory.view(size)
        except RuntimeError:
            return False
    return True


def _is_a_list_of_boundaries(x: Any, boundaries: Any, **_: Any) -> bool:
    return not isinstance(boundaries, TensorSpec) or len(boundaries.shape) == 1


_CHECKS: Final[Mapping[Any, Callable[..., bool]]] = {
    torch.ops.aten.index_add.default: _slices_fit,
    torch.ops.aten.as_strided_scatter.default: _is_within,
    torch.ops.aten.as_strided_copy.default: _is_within,
    torch.ops.aten.bucketize.Tensor: _is_a_list_of_boundaries,
    torch.ops.aten.view.default: _is_a_view,
}
"""What the CPU's kernels refuse and PyTorch's shape rules let pass; engines broadcast, or read what lies beside."""


def _with_tensors(make: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    return tree_map(make, (list(args), dict(kwargs)), is_leaf=_is_spec)


@contextmanager
def quiet() -> Iterator[None]:
    """Fake tensors log an error before they raise it; the user sees the exception."""
    from torch._subclasses.fake_tensor import log

    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


_LARGEST_PROBE = 1 << 24


def _ask_the_cpu(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> Inferred:
    """Shape inference refused the arguments: raise what CPU eager raises for them, on zeros of the same shapes.

    If eager does not refuse, the shape rule was too strict: :class:`NoShapeRule`. Large arguments are not tried.
    """
    if not _run_on_zeros(op, args, kwargs):
        raise error
    raise NoShapeRule(f"no shape rule for these arguments of {op}: {error}") from error


def _run_on_zeros(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Run an operator on the CPU, on zeros; returns whether it was tried. Raises what eager raises."""
    specs = [v for v in tree_leaves((list(args), dict(kwargs)), is_leaf=_is_spec) if isinstance(v, TensorSpec)]
    if sum(math.prod(spec.shape) for spec in specs) > _LARGEST_PROBE or not isinstance(op, torch._ops.OpOverload):
        return False

    def to_zeros(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty_strided(value.shape, value.strides, dtype=value.dtype).zero_()
        return value

    real_args, real_kwargs = _with_tensors(to_zeros, args, kwargs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op(*real_args, **real_kwargs)
    return True


def _is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec)
