"""Operators that are interpreted at once, because the program has not called them here before (tier 0).

A path that the trie does not know may never come back: an initialisation, a length in ``generate``, a notebook's cell.
So from its first unknown operator to the next flush a trace is *direct*: each operator is computed on CPU tensors
(:mod:`..backend.interpret`), its result is a handle with a value, and nothing is recorded, inferred or compiled. A path
is recorded once its runs have cost enough for it to be compiled (:func:`.tiers.is_worth_recording`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ..backend.host import computes_at_once
from ..backend.infer import observe
from ..backend.interface import VIEWS, TensorData
from ..backend.interpret import How, how, interpret, settled
from ..core import metrics
from ..core.default_state import default_state, is_default
from ..core.errors import TorchportError, UnsupportedOp
from ..core.frames import user_line
from ..core.specs import TensorSpec
from ..core.threads import FewerThreads
from ..trace.decide import draws_on_the_host
from ..trace.handle import IndexedLazyTensor, LazyTensor, make_handle, make_unnamed
from ..trace.layouts import kind_of, refusal
from ..trace.record import mismatch
from ..trace.threads import threads
from ..trace.trace import Trace
from ..trace.trie import Node, Sights
from ..trace.wrapping import call_above, is_bypassed, unwrap, wrap
from .flush import flush
from .host_forms import as_tensor, keep_tensor
from .regions import Anchor, Log, Rounds
from .values import any_value_of

if TYPE_CHECKING:
    from ..trace.kernels import Kernel
    from .device_runtime import DeviceRuntime

__all__ = [
    "begin", "decide", "enter_region", "interpreted", "on_forgotten", "on_interpreted", "reopen", "run", "settle",
]  # fmt: skip

_CPU: Final = torch.device("cpu")
_NO_TENSOR: Final = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.memory_format, torch.layout}
)


interpreted: Final[dict[Kernel, How]] = {}
"""Every operator that some device has interpreted, and how."""
on_interpreted: Final[list[Callable[[Kernel, How], None]]] = []
"""Called with an operator before it is interpreted for the first time in this process."""
settle: Final[list[Callable[[int], object]]] = []
"""What computes the operators that C++ has put off (``native/put_off.h``); Python puts none off. The argument is 1
where the process is about to fork, -1 when it has, 0 otherwise."""
on_forgotten: Final[list[Callable[[], object]]] = []
"""Called when a device has forgotten how it interprets operators."""


class _OtherStrides(Exception):
    """A value has other strides than its handle, by which the program goes: it was a view, and is one no longer."""


class _Bypassed(Exception):
    """An argument is what the user holds of a handle, and functionalization is switched off."""


class _OtherIndex(Exception):
    """An argument in a wrapper is of another device index, ``index``: PyTorch looks for it at index 0's kernel."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def _is_unnoted(index: int) -> bool:
    """Whether the calling thread's operators on a device index are interpreted at once and nobody compares paths."""
    trace = threads.of(index)
    return trace.direct > 0 and not trace.observing


computes_at_once.append(_is_unnoted)


def begin(trace: Trace, sights: Sights) -> None:
    """Compute what is pending in a trace of the calling thread, and interpret what follows."""
    region, node = trace.region, trace.cursor
    flush(trace, "new operator")
    if region is not None:
        region.note(node)
    _begin_round(trace, node, sights)


def _begin_round(trace: Trace, node: Node, sights: Sights) -> None:
    """Interpret what follows in an empty trace: a round of a path that goes on at ``node``."""
    trace.direct = 1
    sights.times += 1
    sights.ops = 0
    # In eager mode nothing is ever recorded, so nothing need be known of what operators give.
    trace.sights, trace.observing, trace.began = sights, sights.observed and not trace.eager, time.thread_time()
    if sights.times == 1 and not trace.eager:  # else the path may have come back as a whole
        if node.rounds is None:
            node.rounds = Rounds()
        trace.rounds = node.rounds
        runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
        trace.observing = runtime.regions.begin_round(node.rounds, runtime.is_worth_comparing) or sights.observed
    threads.hide(trace)


def reopen(trace: Trace, sights: Sights) -> bool:
    """Interpret another round of a path that begins at the trie's root, unless it is to be recorded or is a part of one
    that is. Nothing is pending in the trace (``native/openings.h``)."""
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    if trace.recording or trace.region is not None or not runtime.interprets or runtime.is_worth_recording(sights):
        return False
    _begin_round(trace, trace.root, sights)
    return True


def run(trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator's result on values of a device that keeps them in host memory. Raises what the CPU raises."""
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    manner = runtime.manners.get(kernel.serial)
    if manner is None:
        manner = decide(runtime, kernel)
    if manner.__class__ is not How:
        return _recorded(trace, kernel, args, kwargs)
    if kernel.serial in runtime.regions.serials and not trace.eager:
        region = runtime.regions.anchor(kernel, args, kwargs)
        if region is not None and region.is_ready():
            trace.end_direct()
            return _entered(trace, region, kernel, args, kwargs)
    if trace.observing.__class__ is Log:
        trace.observing.add(kernel, args, kwargs)  # type: ignore[union-attr]
    given = dict(kwargs)
    if kernel.takes_device and (moved := _placed(trace, kernel, args, given)) is not None:
        return moved[0]
    try:
        if is_default():
            result = _run(trace, runtime, manner, args, given)
        elif any(map(is_bypassed, tree_leaves((args, given)))):  # asked here: the default state switches it on again
            raise _Bypassed
        else:
            with default_state():
                result = _run(trace, runtime, manner, args, given)
    except _OtherStrides:
        return _recorded(trace, kernel, args, kwargs)
    except _Bypassed:
        return call_above(kernel.op, args, kwargs)
    except _OtherIndex as other:
        return kernel.indexed(threads.of(other.index), *args, **kwargs)
    except Exception as error:
        if not isinstance(error, TorchportError):
            error.add_note(f"torchport: while running {kernel.op}")
            error.add_note(f"torchport: called at {user_line()}")
        raise
    return wrap(result) if kernel.is_factory else result


def decide(runtime: DeviceRuntime, kernel: Kernel) -> Any:
    """How a device interprets an operator, which C++ is told, too; ``False`` where somebody else runs it."""
    manner = _manner(runtime, kernel)
    if manner.__class__ is How and kernel not in interpreted:
        for tell in on_interpreted:
            tell(kernel, manner)
        interpreted[kernel] = manner
    runtime.manners[kernel.serial] = manner  # last: an interrupt before leaves nothing half done
    return manner


def _manner(runtime: DeviceRuntime, kernel: Kernel) -> Any:
    op = kernel.op
    returns = op._schema.returns
    if len(returns) > 1 and any(str(one.type) == "List[Tensor]" for one in returns):
        return False  # lists beside tensors: no graph holds such results
    if runtime.kernels.kernel(op) is not None or draws_on_the_host(op):
        return False
    if op in runtime.capture.decompositions and op.namespace != "aten":
        return False  # it may mean nothing to the CPU; PyTorch's own operators are what they are, however rewritten
    return how(op)


def enter_region(trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute what is pending, and begin a path with an operator that a region begins with; its result.

    While the region is being compiled, its operators are interpreted.
    """
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    region = runtime.regions.anchor(kernel, args, kwargs)
    assert region is not None
    if not region.is_ready():
        begin(trace, Sights())
        return run(trace, kernel, args, kwargs)
    flush(trace, "region")
    return _entered(trace, region, kernel, args, kwargs)


def _entered(trace: Trace, region: Anchor, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record from here on, as far as a region goes, beginning with this operator."""
    trace.direct = 0
    trace.recording, trace.region, trace.spent = True, region, region.seconds
    metrics.count("RegionEntered")
    return kernel.fast(*args, **kwargs) if trace.index == 0 else kernel.indexed(trace, *args, **kwargs)


def _recorded(trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one operator the usual way, in a trace of its own."""
    trace.end_direct()
    was_direct, trace.direct = trace.direct, 0
    trace.recording = True
    try:
        return kernel.fast(*args, **kwargs) if trace.index == 0 else kernel.indexed(trace, *args, **kwargs)
    finally:
        trace.direct = was_direct
        if was_direct:
            trace.began = time.thread_time()
            threads.hide(trace)


def _placed(trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """The result of a call for another device, in a tuple; ``None`` for this one, and ``kwargs`` say the CPU."""
    device = kwargs.get("device")
    if device is not None:
        index = device.index
        if kernel.is_factory:
            if index and index != trace.index and (there := threads.of(index)).index != trace.index:
                return (kernel.indexed(there, *args, **kwargs),)
        elif not (device.type == "port" and index in (None, trace.index)):
            return (kernel.elsewhere(trace, kernel, args, kwargs),)
    if kwargs.get("generator") is not None:
        return (kernel.with_generator(trace, kernel, args, kwargs),)
    kwargs.pop("generator", None)
    kwargs.pop("pin_memory", None)
    if kernel.is_factory or device is not None:
        kwargs["device"] = _CPU
    return None


def _run(trace: Trace, runtime: DeviceRuntime, manner: How, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    used: list[Any] = []
    specs: list[Any] = []
    real_args: list[Any] = []
    for value in args:
        if value.__class__ in _NO_TENSOR:
            real_args.append(value)
            specs.append(value)
        else:
            real, spec = _real(trace, manner, value, used)
            real_args.append(real)
            specs.append(spec)
    for name, value in kwargs.items():
        if value.__class__ not in _NO_TENSOR:
            kwargs[name], _ = _real(trace, manner, value, used)
    trace.direct += 1
    random_key = runtime.next_key() if manner.draws else 0
    with FewerThreads():
        result = interpret(manner, real_args, kwargs, random_key)
    shares: bool | str = False
    if manner.shares:
        shares = VIEWS
        for data in used:
            if not data.exported:
                data.exported = VIEWS
            elif data.exported != VIEWS:
                shares = True
    if result.__class__ is torch.Tensor:
        handle = _handle(trace, runtime, result, shares)
        if trace.observing and manner.rule is not None:
            observe(manner.rule, specs, kwargs, handle.value.spec)  # type: ignore[union-attr]
        return handle
    made = [None if one is None else _handle(trace, runtime, one, shares) for one in result]
    if trace.observing and manner.rule is not None:
        described = [None if one is None else one.value.spec for one in made]  # type: ignore[union-attr]
        observe(manner.rule, specs, kwargs, described if isinstance(result, list) else tuple(described))
    return made if isinstance(result, list) else tuple(made)


def _real(trace: Trace, manner: How, value: Any, used: list[Any]) -> tuple[Any, Any]:
    """An argument as the CPU takes it, and with specs for tensors; the values it is made of are added to ``used``."""
    cls = value.__class__
    if cls is LazyTensor or cls is IndexedLazyTensor:
        runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
        if (value.get_device() if cls is IndexedLazyTensor else 0) != trace.index:
            raise mismatch(trace, manner.op, value)
        data: Any = value.value
        if data.__class__ is not TensorData or data.info is not trace.runtime:
            data = any_value_of(value, trace)
            if runtime.holds_shared_tensors and data.__class__ is not TensorData:
                data = keep_tensor(runtime, value, data)
        if value.stride() != data.spec.strides:
            raise _OtherStrides
        used.append(data)
        return as_tensor(runtime.backend, data), data.spec
    if isinstance(value, (list, tuple)):
        if value and value[0].__class__ is int:
            return value, value
        pairs = [_real(trace, manner, one, used) for one in value]
        return [real for real, _ in pairs], [spec for _, spec in pairs]
    if not isinstance(value, torch.Tensor):
        return (_CPU, _CPU) if cls is torch.device else (value, value)
    inner = unwrap(value)
    if inner is not value:
        if is_bypassed(value):
            raise _Bypassed
        if isinstance(inner, LazyTensor) and inner.get_device() != trace.index:
            raise _OtherIndex(inner.get_device())
        return _real(trace, manner, inner, used)
    if inner.dim() == 0 and inner.device.type == "cpu":
        return inner, inner
    raise mismatch(trace, manner.op, inner)


def _handle(trace: Trace, runtime: DeviceRuntime, value: torch.Tensor, shares: bool | str) -> LazyTensor:
    """A handle of a result that is there. ``shares``: who else may see its memory (:attr:`.BackendData.exported`)."""
    if value.layout is not torch.strided:
        raise UnsupportedOp(refusal(kind_of(value.layout)), source=user_line())
    if shares or value.dtype.is_complex:
        value = settled(value)
    spec = TensorSpec(tuple(value.shape), value.dtype, value.stride())
    handle = make_unnamed(spec) if trace.index == 0 else make_handle(spec, trace.index)
    data = TensorData(runtime.device, spec, value)
    data.info, data.exported = runtime, shares
    handle.value = data
    return handle
