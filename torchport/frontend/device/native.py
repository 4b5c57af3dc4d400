"""Use torchport's C++ functions instead of the device's Python functions, as soon as the libraries are built."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ... import native
from ...backend.host import attention_at_once, cpu_attention
from ...backend.infer import observed
from ...backend.interface import VIEWS, BackendData, TensorData
from ...backend.interpret import How
from ...backend.lowering import view_form
from ...backend.normal_form import is_view
from ...core.specs import TensorSpec
from ...core.threads import native_arguments
from ...dispatch import Functionality
from ...native.twins import twins
from ...run import direct, regions, values
from ...run.device_runtime import DeviceRuntime
from ...run.future import Future
from ...trace import pool, trace, trie
from ...trace.handle import LazyTensor, make_handle, make_template
from ...trace.kernels import Kernel, letters
from ...trace.threads import threads
from ...trace.wrapping import use_shown
from . import composites, copies, fake, routes
from .writes import Checked

__all__ = ["install", "use_flush"]

log: Final = logging.getLogger("torchport.native")


def _use_guard(library: ctypes.PyDLL) -> None:
    library.torchport_use_guard.restype = None
    library.torchport_use_guard()


_OBJECTS: Final = (LazyTensor, trace.Trace, trie.Node, BackendData)
"""The types whose slots and attributes C++ reads."""


def _functions(library: ctypes.PyDLL, **arguments: int) -> list[Any]:
    """Functions of a library that take and return Python objects, by name and number of arguments."""
    found: list[Any] = []
    for name, count in arguments.items():
        function = getattr(library, f"torchport_{name}")
        function.argtypes, function.restype = [ctypes.py_object] * count, ctypes.py_object
        found.append(function)
    return found


_FLUSH: Final = {
    "alive": 1, "sweep": 3, "pending": 1, "forget": 1, "unshared": 2, "own_gradients": 1, "draw": 3, "make_each": 3,
    "give": 3, "leaf_values": 3,
}  # fmt: skip
"""The functions of ``native/flush.cpp`` that stand for Python's, and their numbers of arguments."""


def use_flush(library: ctypes.PyDLL) -> None:
    """Use the functions of ``native/flush.cpp``, if they count references as the Python functions do."""
    (start,) = _functions(library, flush_start=6)
    start(*_OBJECTS, Future, pool.release)
    functions = dict(zip(_FLUSH, _functions(library, **_FLUSH), strict=True))
    if _counted(functions) == _counted(twins.in_python):
        twins.use(**functions)
    else:
        log.warning("flush.cpp counts references otherwise than this Python does, which does its work")


def _counted(functions: Mapping[str, Callable[..., Any]]) -> tuple[int, frozenset[int]]:
    """The answers of ``alive`` and ``unshared``, which read reference counts, for probes; a name holds one of each."""
    spec = TensorSpec((), torch.float32, ())
    handles = [make_handle(spec, 0), make_handle(spec, 0)]
    held = handles[1]
    alive = functions["alive"](handles)
    device: Any = None
    values = [BackendData(device, spec) for _ in range(3)]
    given, kept = values[:2], values[1]
    unshared = functions["unshared"](given, values)
    del kept
    return (0 if alive == [] else 1 if len(alive) == 1 and alive[0] is held else 2), unshared


def _use_follow(
    library: ctypes.PyDLL, kernels: Sequence[Kernel], forms: Mapping[Any, Any], checked: Sequence[Checked]
) -> None:
    (start,) = _functions(library, follow_start=10)
    follow, same_value, same = library.torchport_follow, library.torchport_follow_same_value, library.torchport_same
    follow.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.c_char_p]
    same_value.argtypes = same.argtypes = [ctypes.c_char_p]
    out = library.torchport_follow_out
    out.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.py_object]
    follow.restype = same_value.restype = same.restype = out.restype = ctypes.py_object
    start(
        *_OBJECTS, threads, (trie.FLOATS, trie.LIMITS), trace.COPIES_UNDER_GRAD, trie.LEAF, trie.SPAN,
        trace.CHECKPOINT_EVERY,
    )  # fmt: skip
    for kernel in kernels:
        kinds = letters(kernel)
        if kinds is None or kernel.is_factory:  # factories give new tensors
            continue
        name = kernel.op._schema.name
        overload = kernel.op._schema.overload_name
        in_place = forms[kernel.op]._schema.name if kernel.op in forms else ""
        follow(name.encode(), overload.encode(), kinds.encode(), kernel.serial, in_place.encode())
    copy = copies.kernels[torch.ops.aten.copy.default]
    library.torchport_follow_copy.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
    library.torchport_follow_copy.restype = ctypes.py_object
    kinds = letters(copy)
    assert kinds is not None, "copy has arguments that C++ cannot compare"
    library.torchport_follow_copy(kinds.encode(), copy.serial)
    _use_direct(library, kernels)
    _use_views(library, kernels)
    _use_attention(library)
    _use_composites(library)
    from_host, read_number = _functions(library, from_host=2, read_number=1)
    from_host(fake.stock_lift(), values.note_copied)
    read_number(values.note_read)
    for op in copies.SAME_VALUE:
        same_value(op._schema.name.encode())
        same(view_form(op)._schema.name.encode())
    for op, outs, original in checked:
        out(op._schema.name.encode(), op._schema.overload_name.encode(), outs, original)


def _use_direct(library: ctypes.PyDLL, kernels: Sequence[Kernel]) -> None:
    """Have C++ interpret operators at once, in the plain case."""
    limit = library.torchport_thread_limit
    limit.argtypes, limit.restype = [ctypes.c_void_p] * 3, None
    limit(*native_arguments())
    (start,) = _functions(library, direct_start=9)
    copy, to_copy = (copies.kernels[op] for op in (torch.ops.aten.copy.default, torch.ops.aten._to_copy.default))
    by_serial = {kernel.serial: kernel for kernel in (*kernels, copy, to_copy)}

    def decide(trace: Any, serial: int) -> None:
        runtime = trace.runtime
        if serial not in runtime.manners:
            direct.decide(runtime, by_serial[serial])

    start(TensorData, TensorSpec, trace.Trace, How, _template_of, observed.append, VIEWS, direct.reopen, decide)
    (shown,) = _functions(library, shown=1)
    use_shown(shown)
    register = library.torchport_direct
    register.argtypes = [
        ctypes.py_object, ctypes.py_object, ctypes.c_char_p, ctypes.c_char_p, ctypes.py_object,
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p,
    ]  # fmt: skip
    register.restype = ctypes.py_object
    left = {kernel for kernel in kernels if letters(kernel) is not None} | {copy, to_copy}
    _use_factories(library, [kernel for kernel in left if kernel.is_factory], to_copy)

    def interpreted(kernel: Kernel, how: How) -> None:
        callee = kernel.op if kernel in (copy, to_copy) or how.is_blank else how.at_once
        if callee is None or kernel not in left:
            return
        schema = callee._schema
        keywords = tuple(a.name if a.kwarg_only else "" for a in kernel.arguments)
        kinds = "".join(_IN_CPP.get(argument.kind, "?") for argument in kernel.arguments)
        observed_kinds = b"" if how.rule is None or "?" in kinds or kernel is to_copy else kinds.encode()
        name, overload = schema.name.encode(), schema.overload_name.encode()
        shares = how.shares and kernel is not to_copy and not how.is_blank
        register(
            kernel.serial, how.rule, name, overload, keywords, shares, kernel.is_factory, how.varying, how.but_wide,
            how.is_blank, observed_kinds,
        )  # fmt: skip

    anchor, forget, settle = _functions(library, direct_anchor=2, direct_forget=0, settle=1)
    direct.on_interpreted.append(interpreted)
    direct.on_forgotten.append(forget)
    if not direct.settle:  # the device may be installed once more
        direct.settle.append(settle)
        # Before hooks run in the opposite order: OpenMP's threads are needed, and end after this (backend/registry.py).
        after = functools.partial(settle, -1)
        os.register_at_fork(before=functools.partial(settle, 1), after_in_parent=after, after_in_child=after)
    regions.on_anchor.append(anchor)
    for kernel, how in list(direct.interpreted.items()):  # before the library was there
        interpreted(kernel, how)
    for serial, shapes in list(regions.begun_with):
        anchor(serial, shapes)


def _use_views(library: ctypes.PyDLL, kernels: Sequence[Kernel]) -> None:
    """Have C++ take views, of those operators whose copying form handles know (``native/views.h``)."""
    view = library.torchport_view
    view.argtypes, view.restype = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong], ctypes.py_object
    for kernel in kernels:
        form = view_form(kernel.op)
        if form is not kernel.op and is_view(form) and letters(kernel) is not None:
            view(form._schema.name.encode(), form._schema.overload_name.encode(), kernel.serial)


def _use_factories(library: ctypes.PyDLL, factories: Sequence[Kernel], to_copy: Kernel) -> None:
    """Have C++ interpret factories and copies to another dtype at once."""
    factory, copy = library.torchport_direct_factory, library.torchport_direct_to_copy
    factory.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong]
    copy.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
    factory.restype = copy.restype = ctypes.py_object
    for kernel in factories:
        schema, kinds = kernel.op._schema, letters(kernel)
        assert kinds is not None, "a factory that draws was left out before"
        factory(schema.name.encode(), schema.overload_name.encode(), kinds.encode(), kernel.serial)
    kinds = letters(to_copy)
    assert kinds is not None, "a copy draws nothing"
    copy(kinds.encode(), to_copy.serial)


_ATTENTION: Final = torch.ops.aten.scaled_dot_product_attention.default
_AUTOGRAD: Final = "AutogradPrivateUse1"


def _attends(runtime: DeviceRuntime) -> int:
    """When a runtime's attention is the CPU's fused operator: 0 for never, 1 where it is interpreted, 2 for always."""
    kernel = runtime.kernels.kernel(_ATTENTION, Functionality.AutogradFunctionality)
    return 2 if kernel is cpu_attention else 1 if kernel is attention_at_once else 0


def _use_attention(library: ctypes.PyDLL) -> None:
    """Have C++ choose the CPU's attention, once a backend has a kernel for it, which has a router before it."""
    (attention,) = _functions(library, attention=1)

    def routed(op: Any, key: str) -> None:
        if op is _ATTENTION and key == _AUTOGRAD:
            attention(_attends)

    routes.on_routed.append(routed)
    if routes.is_routed(_ATTENTION, _AUTOGRAD):
        attention(_attends)


def _use_composites(library: ctypes.PyDLL) -> None:
    """Have C++ take composite operators apart where autograd is off, but for those that a backend has a kernel of."""
    composite, has_kernel = library.torchport_composite, library.torchport_composite_routed
    composite.argtypes = has_kernel.argtypes = [ctypes.c_char_p] * 2
    composite.restype = has_kernel.restype = ctypes.py_object

    def names(op: Any) -> tuple[bytes, bytes]:
        return op._schema.name.encode(), op._schema.overload_name.encode()

    def routed(op: Any, key: str) -> None:
        if key == _AUTOGRAD:
            has_kernel(*names(op))

    for op in composites.apart:
        composite(*names(op))
        if routes.is_routed(op, _AUTOGRAD):
            routed(op, _AUTOGRAD)
    routes.on_routed.append(routed)


def _template_of(dtype: torch.dtype) -> torch.Tensor:
    return make_template(TensorSpec((), dtype, ()))


_SAME_IN_PYTHON: Final = (
    "Tensor", "Optional[Tensor]", "List[Tensor]", "int", "Optional[int]", "bool", "Optional[bool]", "float", "number",
    "Optional[number]", "SymInt", "Optional[SymInt]", "List[int]", "List[SymInt]", "Optional[List[int]]",
    "Optional[List[SymInt]]", "List[bool]", "Device", "Optional[Device]", "Optional[float]",
)  # fmt: skip
_IN_CPP: Final = {
    **dict.fromkeys(_SAME_IN_PYTHON, "p"),
    **dict.fromkeys(("ScalarType", "Optional[ScalarType]"), "d"),
    **dict.fromkeys(("MemoryFormat", "Optional[MemoryFormat]"), "m"),
}
"""Kinds of arguments that C++ can turn into Python objects, by letter; dtypes and memory formats are numbers in C++."""


def install(kernels: Sequence[Kernel], forms: Mapping[Any, Any], checked: Sequence[Checked]) -> None:
    """Use each library as soon as it is built.

    Called once the device is registered: before, the guard could take another device's place.
    ``kernels``: generated kernels that PyTorch's dispatcher calls directly. ``forms``: functional operator → the
    in-place form that has a kernel of this device. ``checked``: operators with ``out=``.
    """
    native.guard.when_there(_use_guard)
    native.follow.when_there(lambda library: _use_follow(library, kernels, forms, checked))
    native.flush.when_there(use_flush)
