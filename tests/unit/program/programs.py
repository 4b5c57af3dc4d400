"""Programs written by hand, and a backend that records what is done to it: the runtime's tests need no lowering."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchport import runtime
from torchport.backend.interface import (
    ArrayData,
    Backend,
    BackendData,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    Processed,
)
from torchport.backend.registry import Registry
from torchport.backends.add_sub import AddSubBackend
from torchport.core.specs import CompileSpecs, TensorSpec
from torchport.program.archive import write_archive
from torchport.program.document import (
    CallRecord,
    Constant,
    DebugInfo,
    DelegateRecord,
    Document,
    Dynamic,
    Input,
    KernelRecord,
    MethodRecord,
    Origin,
    Output,
    Spec,
    StateUpdate,
    Symbol,
)
from torchport.program.schema import Extent, OutputForm
from torchport.program.writer import BLOBS, ROOT, digest, program_entries

F2 = Spec("float32", (2,), (1,))


class Recording(Backend):
    """Adds its inputs and constants; ``log`` has every call. What ``fails`` names raises."""

    name = "recording"
    version = "7"

    def __init__(self, name: str = "recording", binds: bool = False) -> None:
        self.name = name  # type: ignore[misc]
        self.capabilities = Capabilities(torch_free=True, binds_constants=binds)
        self.log: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.available = True
        self.free_in_init = False
        self.handle_is_buffer = False
        self.null_handle = False
        self.temporary = 0
        self.held: list[FreeableBuffer] = []
        self.contexts: list[Any] = []
        self.before_execute: Any = None
        self._alive = 0

    def is_available(self) -> bool:
        self.log.append(("is_available",))
        return self.available

    def unavailable_reason(self) -> str:
        return "the accelerator is unplugged"

    def preprocess(self, graph: Any, specs: CompileSpecs) -> Processed:
        return Processed(b"sum")

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        tag = bytes(processed.data).decode()
        self.log.append(("init", tag, dict(specs), context.method, dict(context.options)))
        self.contexts.append(context)
        self.held.append(processed)
        if self.free_in_init:
            processed.free()
            processed.free()
        if "init" in self.fails and self.fails["init"].args[-1:] in ((tag,), ()):
            raise self.fails["init"]
        self._alive += 1
        if self.null_handle:
            return None
        return processed if self.handle_is_buffer else ("handle", tag, context.constants)

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        if self.handle_is_buffer:
            assert bytes(handle.data)
        self.log.append(("execute", len(args), context.method, dict(context.options)))
        if self.before_execute is not None:
            self.before_execute(context)
        if self.temporary:
            assert context.temporary.used == 0, "scratch memory was not given back"
            context.temporary.allocate(self.temporary)
        if "execute" in self.fails:
            raise self.fails["execute"]
        bound = [] if handle is None or isinstance(handle, FreeableBuffer) else list(handle[2].values())
        arrays = [arg.array for arg in (*args, *bound) if isinstance(arg, ArrayData)]
        total = sum(arrays[1:], arrays[0]) if arrays else np.zeros(2, np.float32)
        if context.tracer is not None:
            context.tracer.event("sum", 1.0, 2.0, "all", "meta")
            context.tracer.memory("result", total.nbytes)
        spec = context.outputs[0]
        return [ArrayData(context.device, TensorSpec(spec.shape, spec.dtype, spec.strides), np.asarray(total))]

    def destroy(self, handle: Any) -> None:
        self._alive -= 1
        self.log.append(("destroy", handle[1] if isinstance(handle, tuple) else handle))
        if "destroy" in self.fails:
            raise self.fails["destroy"]

    @property
    def alive(self) -> int:
        """Handles that were made and not destroyed."""
        return self._alive

    def names(self) -> list[str]:
        """The calls by name, in order, without questions for availability."""
        return [entry[0] for entry in self.log if entry[0] != "is_available"]


def registry_of(*backends: Backend) -> Registry:
    """A registry with these backends and nothing else."""
    registry = Registry()
    for backend in backends:
        registry.register(backend)
    return registry


def delegate(backend: str = "recording", tag: str = "d0", inputs: int = 2, **more: Any) -> DelegateRecord:
    """A delegate of ``inputs`` float32 vectors of two; its bytes are its tag."""
    fields: dict[str, Any] = {"specs": CompileSpecs({"level": b"3"}), "version": "7", **more}
    return DelegateRecord(backend, entry=f"{BLOBS}{tag}", inputs=(F2,) * inputs, outputs=(F2,), **fields)


def summing(
    delegates: Sequence[DelegateRecord], name: str = "forward", constants: Mapping[int, int] | None = None
) -> MethodRecord:
    """``x, y → …``: each delegate adds ``y`` (and the constants) to what the one before it gave."""
    given = dict(constants or {})
    first = 2 + len(given)
    steps = []
    value = 0
    for position, one in enumerate(delegates):
        wanted = len(one.inputs) - len(one.constants)
        args = (value, 1, *given)[:wanted]
        steps.append(CallRecord(position, args, (first + position,)))
        value = first + position
    inputs = (Input("x", F2), Input("y", F2))
    return MethodRecord(
        name, first + len(delegates), inputs, (Output(value, F2),), given, (), tuple(delegates), tuple(steps)
    )


def counter() -> MethodRecord:
    """A method with a buffer ``total``, to which it adds ``x``; returns the new total and the old one."""
    one = delegate(tag="d0")
    values = MethodRecord("forward", 3, (Input("x", F2),), (), {1: 0}, (StateUpdate(0, 1, 2),), (one,), ())
    return replace(values, instructions=(CallRecord(0, (0, 1), (2,)),), outputs=(Output(2, F2), Output(1, F2)))


def kernels() -> MethodRecord:
    """Leftover operators around a delegate: ``relu(x)``, the delegate, ``split`` with one result unused."""
    relu = KernelRecord("aten.relu.default", ({"n": 0},), {}, (2,), False, 1)
    split = KernelRecord("aten.split.Tensor", ({"n": 3}, 1), {}, (4, None), True, 2)
    one = Spec("float32", (1,), (1,))
    inputs = (Input("x", F2), Input("y", F2))
    steps = (relu, CallRecord(0, (2, 1), (3,)), split)
    return MethodRecord("forward", 5, inputs, (Output(4, one), Output(None, None, 3)), {}, (), (delegate(),), steps)


def weight(values: Sequence[float] = (10.0, 20.0)) -> tuple[Constant, dict[str, bytes]]:
    """A constant of two numbers, and its entry."""
    return Constant("w", F2, "data/weights/w"), {"data/weights/w": struct.pack("<2f", *values)}


def entries_of(
    methods: Sequence[MethodRecord],
    constants: Sequence[Constant] = (),
    blobs: Mapping[str, bytes] | None = None,
    debug: DebugInfo | None = None,
    dynamic: Mapping[str, Dynamic] | None = None,
) -> list[tuple[str, Any]]:
    """All entries of a program; delegates' bytes are their tags unless ``blobs`` has them."""
    found = dict(blobs or {})
    for method in methods:
        for one in method.delegates:
            found.setdefault(one.entry, one.entry.removeprefix(BLOBS).encode())
    digests = {name: digest(data) for name, data in found.items()}
    named = {method.name: method for method in methods}
    document = Document(named, list(constants), digests, {"torchport": "test"}, dict(dynamic or {}))
    default = DebugInfo({1: Origin("layer.act", "model.py:3 in forward"), 2: Origin("layer", "model.py:4 in forward")})
    default.maps = {method.name: [{"all": (1, 2)} for _ in method.delegates] for method in methods}
    return [*found.items(), *program_entries(document, default if debug is None else debug)]


def packed(entries: Sequence[tuple[str, Any]]) -> bytes:
    """Entries as the bytes of a file."""
    file = io.BytesIO()
    write_archive(file, ROOT, entries)
    return file.getvalue()


def program_bytes(
    *methods: MethodRecord, constants: Sequence[Constant] = (), blobs: Mapping[str, bytes] | None = None
) -> bytes:
    """The bytes of a program file."""
    return packed(entries_of(methods, constants, blobs))


def real_program() -> bytes:
    """A program of ``add_sub``, whose results are real: ``x + y`` and then ``- w``, with ``w`` a constant."""
    constant, blobs = weight()
    adding = delegate("add_sub", "adding", 2, version="1", specs=CompileSpecs())
    taking = delegate("add_sub", "taking", 2, version="1", specs=CompileSpecs())
    blobs |= {adding.entry: b"aten::add(%0,%1)<debug_handle>1|%2", taking.entry: b"aten::sub(%0,%1)<debug_handle>2|%2"}
    method = MethodRecord(
        "forward", 5, (Input("x", F2), Input("y", F2)), (Output(4, F2),), {2: 0}, (), (adding, taking),
        (CallRecord(0, (0, 1), (3,)), CallRecord(1, (3, 2), (4,))),
    )  # fmt: skip
    debug = DebugInfo({1: Origin("a", "model.py:3 in forward"), 2: Origin("b", "model.py:4 in forward")})
    return packed(entries_of([method], [constant], blobs, debug))


def padding(
    sizes: Sequence[int] = (3, 5), backend: str = "recording", **more: Any
) -> tuple[list[MethodRecord], dict[str, Dynamic], dict[str, bytes]]:
    """``x, y → x + y`` for ``n`` numbers, padded up to ``sizes``: its variants, its section, its delegates' bytes."""
    methods: list[MethodRecord] = []
    blobs: dict[str, bytes] = {}
    for size in sizes:
        spec, true = Spec("float32", (size,), (1,)), Spec("float32", (), ())
        one = replace(delegate(backend, f"padded{size}", 2, **more), inputs=(spec, spec), outputs=(spec,))
        blobs[one.entry] = b"aten::add(%0,%1)<debug_handle>1|%2"
        inputs = (Input("x", spec), Input("y", spec), Input("true_size_0", true))
        steps = (CallRecord(0, (0, 1), (3,)),)
        methods.append(MethodRecord(f"forward@{size}", 4, inputs, (Output(3, spec),), {}, (), (one,), steps))
    form = OutputForm((((0, 0),),))
    dims: tuple[Extent, ...] = ((0, 1, 0),)
    symbols = (Symbol("n", 1, max(sizes)),)
    section = Dynamic(symbols, (dims, dims), (form,), tuple((size,) for size in sizes), True)
    return methods, {"forward": section}, blobs


def add_sub_registry() -> Registry:
    """A registry with ``add_sub`` alone."""
    return registry_of(AddSubBackend())


def load(data: Any, *backends: Recording, **more: Any) -> runtime.Program:
    """A program from bytes, with these backends and no others."""
    return runtime.load(data, registry=registry_of(*backends), **more)


def two(backend: Recording, **more: Any) -> runtime.Program:
    """A program of two delegates of one backend."""
    return load(program_bytes(summing([delegate(tag="d0"), delegate(tag="d1")])), backend, **more)
