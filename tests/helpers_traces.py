"""Traces without a device: a runner that computes nothing, and calls of kernels on handles made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchport.backend.builder import capture_of
from torchport.backend.interface import Backend, BackendData, BackendDevice, Capabilities
from torchport.backend.registrar import BackendRegistrar
from torchport.core.specs import TensorSpec
from torchport.trace.handle import LazyTensor, make_template
from torchport.trace.kernels import Kernel, make_kernel
from torchport.trace.trace import Trace, owners
from torchport.trace.trie import SPAN, Sights

aten = torch.ops.aten


class Recorder(Backend):
    """A backend that takes every operator and is never asked to run one."""

    name = "recorder"

    def preprocess(self, graph: Any, specs: Any) -> Any:
        raise AssertionError("nothing is compiled in these tests")

    def execute(self, handle: Any, args: Any, context: Any) -> Any:
        raise AssertionError("nothing is run in these tests")


class AddsOnly(Recorder):
    """A backend that takes ``add`` and nothing else."""

    name = "adds-only"

    def supports(self, node: Any) -> Any:
        from torchport.backend.interface import Support

        return Support.yes() if node.target is aten.add.Tensor else Support.no("adds only")


class Overlapping(Recorder):
    """A backend whose computations run beside each other and may take the memory of their arguments."""

    name = "overlapping"
    capabilities = Capabilities(concurrent=True, donation=True)


class Queue:
    """What a split asks of a queue: whether a computation is running."""

    def __init__(self) -> None:
        self.running = 0

    def poll(self) -> int:
        return self.running


class FakeRunner:
    """A runner of one device index that notes what a trace asks of it (see :class:`torchport.trace.trace.Runner`)."""

    def __init__(self, backend: Backend | None = None, interprets: bool = False) -> None:
        self.index = 0
        self.generation = 0
        self.backend = backend or Recorder()
        self.device = BackendDevice("cpu", 0)
        self.capture = capture_of(self.backend)
        self.kernels = BackendRegistrar(self.backend)
        self.interprets = interprets
        self.holds_shared_tensors = self.is_lost = False
        self.queue = Queue()
        self.flushes: list[str] = []
        self.direct: list[Any] = []
        self.barriers: list[Any] = []
        self.region: Any = None
        self.share = 1_000
        self.keys_drawn = 0
        self.keys_returned: list[int] = []

    def is_worth_recording(self, sights: Sights) -> bool:
        return sights.times > 1

    def share_to_record(self, sights: Sights) -> int:
        return self.share

    def begins_region(self, kernel: Kernel, args: Sequence[Any], kwargs: Any) -> bool:
        return self.region is not None and self.region.begins(kernel)

    def enter_region(self, trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Any) -> Any:
        self.flush(trace, "region")
        trace.recording, trace.region = True, self.region
        return kernel.fast(*args, **kwargs)

    def begin_direct(self, trace: Trace, sights: Sights) -> None:
        sights.times += 1
        trace.direct = 1

    def run_direct(self, trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Any) -> Any:
        self.direct.append(kernel.op)
        trace.direct += 1
        return "interpreted"

    def next_key(self) -> int:
        self.keys_drawn += 1
        return 100 + self.keys_drawn

    def take_back(self, key: int) -> None:
        self.keys_returned.append(key)

    def settle(self, trace: Trace, handle: LazyTensor) -> None:
        if handle.failure is not None:
            raise handle.failure
        handle.value = data(self, TensorSpec.of(handle))

    def flush(self, trace: Trace, cause: str, read: int | None = None) -> None:
        self.flushes.append(cause)
        trace.live()
        trace.restart()

    def barrier(self, node: Any, decision: Any) -> Any:
        self.barriers.append((node.op, decision))
        return lambda trace, node, args, kwargs: ("ran at once", node.op)


def data(runner: FakeRunner, spec: TensorSpec) -> BackendData:
    """A value of a runner's backend that nothing is behind."""
    made = BackendData(runner.device, spec)
    made.info = runner  # type: ignore[assignment]
    return made


class OneThread:
    """The traces of a thread, of which there is one."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def of(self, index: int) -> Trace:
        assert index == 0
        return self.trace


class Recording:
    """A trace on a fake runner, and the kernels that record into it."""

    def __init__(self, runner: FakeRunner | None = None) -> None:
        self.runner = runner or FakeRunner()
        self.trace = Trace(self.runner)  # type: ignore[arg-type]
        owners.pop(self.trace.base // SPAN)  # nobody else is to find it: its runner computes nothing
        self.kernels: dict[Any, Kernel] = {}

    def kernel(self, op: Any) -> Kernel:
        found = self.kernels.get(op)
        if found is None:
            found = self.kernels[op] = make_kernel(op, OneThread(self.trace), _unexpected, _unexpected, id)
        return found

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an operator's kernel as PyTorch's dispatcher does."""
        return self.kernel(op).fast(*args, **kwargs)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> LazyTensor:
        """A handle that has a value from before the trace."""
        handle = make_template(contiguous(shape, dtype))
        handle.value = data(self.runner, contiguous(shape, dtype))
        return handle

    def ops(self) -> list[str]:
        """The names of the operators on the path to the cursor."""
        return [node.op.name() for node in self.trace.cursor.path()]


def _unexpected(*args: Any) -> Any:
    raise AssertionError("no generator and no other device is asked for in these tests")


def contiguous(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> TensorSpec:
    """The spec of a contiguous tensor."""
    return TensorSpec.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))
