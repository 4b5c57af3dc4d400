"""Small backends that count, refuse or fail on purpose."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import fx

import torchport
from torchport import (
    BackendData,
    BackendDevice,
    Capabilities,
    CompileSpecs,
    ExecutionContext,
    Processed,
    Support,
    TensorData,
)
from torchport.backends.reference import ReferenceBackend
from torchport.run.device_runtime import rebind

_numbers = itertools.count()
FRESH = 32
_FIRST: dict[int, str] = {}
"""The names of the fakes that the indices are bound to."""


class Fake(ReferenceBackend):
    """The reference backend under a fresh name, on its own ``port`` index."""

    name: ClassVar[str] = "fake"
    device: torch.device

    @classmethod
    def install(cls, **attributes: Any) -> Any:
        """Register a new subclass of this fake; the instance, with the ``device`` that stands for it.

        ``attributes`` are the subclass's; those that are capabilities change the parent's.
        """
        number = next(_numbers)
        changed = {one.name: attributes.pop(one.name) for one in fields(Capabilities) if one.name in attributes}
        attributes["capabilities"] = replace(cls.capabilities, **changed)
        kind = type(cls.__name__, (cls,), {"name": f"{cls.name}_{number}", **attributes})
        torchport.register(kind)
        backend = torchport.get_backend(kind.name)
        assert isinstance(backend, cls)
        _FIRST.setdefault(number % FRESH, "reference")  # stays where the backend cannot be bound
        if number < FRESH:
            backend.device = torchport.device(kind.name)
        else:
            # PyTorch has 128 indices per device type: those of fakes of long ago are bound again.
            index = torchport.device(_FIRST[number % FRESH]).index
            rebind(backend, 0, index)
            backend.device = torch.device("port", index)
        _FIRST[number % FRESH] = kind.name
        return backend


def stays_near(gate: threading.Event, run: Callable[[], None], done: list[int]) -> None:
    """A program on a thread of its own, which notes the steps it has done, does not run far ahead of a closed gate."""
    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 60
    while (gate.is_set() or len(done) < 3) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)
    assert len(done) <= 4, "one runs, two wait, and one more was handed over"
    gate.set()
    thread.join(60)


class CountingBackend(Fake):
    """Counts the operators it executes, and the bytes of the values that are alive."""

    name = "counting"

    def __init__(self) -> None:
        self.executed: Counter[str] = Counter()
        self.bytes = 0
        self.passed = 0
        self._lock = threading.Lock()
        self._texts: dict[int, Counter[str]] = {}

    def count(self, op: str) -> int:
        """How often an operator was executed, all work done."""
        torchport.sync()
        return self.executed[op]

    def _watch(self, data: BackendData) -> BackendData:
        assert isinstance(data, TensorData)
        assert data.tensor is not None
        size = data.tensor.numel() * data.tensor.element_size()
        self._add(size)
        weakref.finalize(data, self._add, -size)
        return data

    def _add(self, size: int) -> None:
        with self._lock:
            self.bytes += size
            self.passed += max(size, 0)

    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        return self._watch(super().to_device(tensor, device))

    def init(self, processed: Any, specs: CompileSpecs, context: Any) -> Any:
        run = super().init(processed, specs, context)
        graph = run.__self__.graph
        return run, Counter(str(node.target) for node in graph.nodes if node.op == "call_function")

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        run, ops = handle
        self.executed.update(ops)
        return [self._watch(result) for result in super().execute(run, args, context)]


class Failing(Fake):
    """Raises ``RuntimeError`` in the named method, for graphs that hold the operator ``op``."""

    name = "failing"
    where: ClassVar[str] = "preprocess"
    op: ClassVar[str] = "aten.sin"

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        self._hit = any(str(node.target).startswith(self.op) for node in graph.graph.nodes)
        self._fail("preprocess", self._hit)
        return super().preprocess(graph, specs)

    def init(self, processed: Any, specs: CompileSpecs, context: Any) -> Any:
        run = super().init(processed, specs, context)
        hit = any(str(node.target).startswith(self.op) for node in run.__self__.graph.nodes)
        self._fail("init", hit)
        return run, hit

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        run, hit = handle
        self._fail("execute", hit)
        return super().execute(run, args, context)

    def _fail(self, where: str, hit: bool) -> None:
        if hit and where == self.where:
            raise RuntimeError(f"the engine broke in {where}")


class Refusing(Fake):
    """Does not take the operator ``op``."""

    name = "refusing"
    op: ClassVar[str] = "aten.sin.default"

    def supports(self, node: fx.Node) -> Support:
        if str(node.target) == self.op:
            return Support.no("this engine has no trigonometry")
        return Support.yes()


class WrongResults(Fake):
    """Returns results of another number, shape or dtype than asked for."""

    name = "wrong"
    how: ClassVar[str] = "count"

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        results = list(super().execute(handle, args, context))
        if self.how == "count":
            return results[:-1]
        first = results[0]
        assert isinstance(first, TensorData)
        assert first.tensor is not None
        wrong = first.tensor.double() if self.how == "dtype" else first.tensor.reshape(-1)[:1]
        results[0] = TensorData(first.device, torchport.TensorSpec.of(wrong), wrong)
        return results
