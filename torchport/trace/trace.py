"""The trace: a cursor on the trie, and the live values of the path that leads to it.

An operator makes a key of itself, the ids of its tensor arguments and its other arguments (:mod:`.keys`). If the
cursor's node has a child under that key, shapes, dtypes and the dispatch decision are known already; making the
output handle and moving the cursor is all that is left. Only a first-time operator does more (:mod:`.record`).

Ids: a trace has the span ``[base, base + SPAN)`` of them for itself. Results count up from its base along the path;
leaves (values that exist before the trace) count up from ``base + LEAF``. A handle that belongs to no pending trace has
the id ``NONE``; any other id outside the span is of another thread's trace.

A trace knows nothing of running. What it needs of whoever runs it is :class:`Runner`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..core import metrics
from ..core.config import config
from ..native.twins import twins
from .handle import LazyTensor
from .trie import NONE, SPAN, Node, Sights

if TYPE_CHECKING:
    from ..backend.builder import Capture
    from ..backend.interface import Backend, BackendDevice
    from ..backend.registrar import BackendRegistrar
    from ..core.errors import TorchportError
    from .decide import AtOnce
    from .kernels import Kernel

__all__ = ["CHECKPOINT_EVERY", "COPIES_UNDER_GRAD", "Runner", "Trace", "lock", "owners"]

CHECKPOINT_EVERY: Final = 256
"""Every so many ops the trace forgets dead values and looks at the op bound, so that flushing stays cheap."""

COPIES_UNDER_GRAD: Final = 4
"""While gradients are recorded the optimizer ends a step, and a copy after the forward is likely the batch's labels:
only the fourth such copy counts as a new batch. Without gradients the first one does."""

_epochs = itertools.count()


class Region(Protocol):
    """A part of a path that comes back, though what is before and after it never does."""

    def goes_on(self, node: Node, serial: int) -> bool:
        """Whether an operator that is new after the path to ``node`` is one of the region's, and is to be recorded."""
        ...

    def note(self, node: Node) -> None:
        """It has ended at ``node``, and was run."""
        ...


class Costs(Protocol):
    """What operators that are interpreted have cost since they began at one node."""

    seconds: float
    ops: int


class Runner(Protocol):
    """What a trace needs of whoever runs it: one device index, bound to a backend.

    ``generation`` changes when remembered decisions no longer hold; traces then start from an empty trie.
    """

    index: int
    generation: int
    backend: Backend
    device: BackendDevice
    capture: Capture
    kernels: BackendRegistrar
    is_lost: bool
    """Whether this is a forked child, where the backend's engine does not work."""

    @property
    def interprets(self) -> bool:
        """Whether operators seen for the first time are to be interpreted at once, rather than recorded."""
        ...

    def is_worth_recording(self, sights: Sights) -> bool:
        """Whether what was seen so often, without being recorded, is to become part of the trie."""
        ...

    def share_to_record(self, sights: Sights) -> int:
        """How many operators of that are to be recorded at one time."""
        ...

    def enter_region(self, trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute what is pending, and begin a path with an operator that a region begins with; its result."""
        ...

    def begins_region(self, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a part that comes back in paths that do not begins with an operator."""
        ...

    def begin_direct(self, trace: Trace, sights: Sights) -> None:
        """Compute what is pending, and interpret the operators that follow at once, until the next flush."""
        ...

    def run_direct(self, trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Interpret an operator at once; its results have values. Raises what the CPU raises."""
        ...

    def next_key(self) -> int:
        """The key of the next random operator."""
        ...

    def take_back(self, key: int) -> None:
        """The operator that drew this key was refused."""
        ...

    def settle(self, trace: Trace, handle: LazyTensor) -> None:
        """Give a handle from elsewhere data of this runner's backend. Raises the error its computation ended in."""
        ...

    def flush(self, trace: Trace, cause: str, read: int | None = None) -> TorchportError | None:
        """Compute what is live and begin an empty trace; the first error."""
        ...

    def barrier(self, node: Node, decision: AtOnce) -> Callable[..., Any]:
        """What runs a node's operator at once. Raises :class:`UnsupportedOp` where the policy forbids it."""
        ...


class Trace:
    """One thread's pending ops on one device.

    ``made`` are handles made since the last flush: those in no pool, and those of pools up to the node ``swept`` that
    were held when the trace came by; ``computed`` are those that another thread has given a value. ``leaves`` are the
    values the trace starts from in order of first use, ``scalar_inputs`` and ``random_keys`` in
    order. ``fresh`` tells whether one of the leaves came from the host for this trace, ``copies`` how many copies from
    the host came after that leaf was used. ``direct`` is above 0 while operators are interpreted at once and nothing is
    recorded: one more than how many were; ``sights`` says what is known of those, ``began`` when they did, and
    ``rounds`` what the paths have cost that go on at the same node and never came back. ``observing``: what they give
    is noted for when they are recorded, or the log that they are noted in. ``region``: the part of a path that is
    recorded, up to where it ends. ``bypassed``: a key with :data:`.WRAPPED` was made. ``recording``: what is new to the
    trie becomes part of it, until a flush; before, it has cost ``spent`` seconds. ``share``: how many operators are
    recorded until then at most, of which ``left`` are left.
    """

    eager = False
    """Whether each op is computed at once."""

    __slots__ = (
        "__weakref__",
        "base",
        "began",
        "bypassed",
        "computed",
        "copies",
        "cursor",
        "direct",
        "fresh",
        "generation",
        "index",
        "keep",
        "leaf_ids",
        "leaves",
        "left",
        "made",
        "nodes",
        "observing",
        "random_keys",
        "recording",
        "region",
        "root",
        "rounds",
        "runtime",
        "scalar_inputs",
        "share",
        "sights",
        "spent",
        "swept",
    )

    def __init__(self, runtime: Runner) -> None:
        self.runtime = runtime
        self.index = runtime.index
        self.made: list[LazyTensor] = []
        self.computed: list[LazyTensor] = []
        self.keep: Callable[[LazyTensor], None] = self.made.append
        epoch = next(_epochs)
        self.base = epoch * SPAN
        self.generation = runtime.generation
        self.nodes = 0
        self.root = self.cursor = self.swept = Node.root(self.base)
        self.leaves: list[LazyTensor] = []
        self.leaf_ids: dict[int, int] = {}
        self.scalar_inputs: list[float] = []
        self.random_keys: list[int] = []
        self.fresh = False
        self.copies = 0
        self.direct = 0
        self.recording = False
        self.share = self.left = sys.maxsize
        self.spent = 0.0
        self.sights: Sights | None = None
        self.began = 0.0
        self.observing: Any = False
        self.rounds: Costs | None = None
        self.region: Region | None = None
        self.bypassed = False
        owners[epoch] = self

    def restart(self) -> None:
        """Begin an empty trace. Handles of the former one belong to no trace from now on."""
        if self.swept is not self.cursor:  # a flush has looked already
            self.sweep()
        twins.forget(self.made)
        twins.forget(self.leaves)
        for handle in self.computed:
            if self.holds(handle.value_id):
                handle.value_id = NONE
        self.computed.clear()
        if self.generation != self.runtime.generation or self.nodes > config.max_trace_nodes:
            self.generation = self.runtime.generation
            self.root, self.nodes = Node.root(self.base), 0
        self.cursor = self.swept = self.root
        self.leaves = []
        self.leaf_ids = {}
        self.scalar_inputs = []
        self.random_keys = []
        self.fresh = False
        self.copies = 0
        self.recording = False
        self.share = self.left = sys.maxsize
        self.region = None
        self.spent = 0.0
        self.made.clear()

    def end_direct(self) -> None:
        """Record again from the next operator on."""
        if self.direct > 1:
            metrics.count("InterpretedOps", self.direct - 1)
        if self.sights is not None:
            now = time.thread_time()
            self.sights.ops += max(self.direct - 1, 0)
            self.sights.seconds += now - self.began
            if self.rounds is not None:
                self.rounds.seconds += now - self.began
                self.rounds.ops += max(self.direct - 1, 0)
                self.rounds = None
            self.began = now
        self.direct = 1 if self.eager and self.runtime.interprets else 0

    def holds(self, value_id: int) -> bool:
        """Whether a value id is of this trace's span."""
        return self.base <= value_id < self.base + SPAN

    def sweep(self) -> None:
        """Look which handles are still held, of the nodes since the last sweep and of those that were held then."""
        twins.sweep(self.made, self.cursor, self.swept)
        self.swept = self.cursor

    def live(self) -> list[LazyTensor]:
        """The handles that somebody holds and that have no value yet, oldest first; their nodes let go of them."""
        self.sweep()
        return twins.pending(self.made)


owners: Final[weakref.WeakValueDictionary[int, Trace]] = weakref.WeakValueDictionary()
"""Epoch → trace, so that a thread can find the trace a pending handle belongs to."""

lock: Final = threading.RLock()
"""Held while a trace is flushed or recorded into; never on the steady-state path."""
