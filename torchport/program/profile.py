"""What a program did and how long it took: load, init, execute, delegates' own events, memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .schema import Origin

__all__ = ["DelegateTracer", "Event", "Profile", "Recorder"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time. ``kind``: ``load``, ``init``, ``execute``, ``delegate``, ``kernel``, ``op`` (inside a
    delegate), ``memory`` (``nbytes``, no duration). ``start`` and ``end`` are seconds of ``time.perf_counter()``."""

    kind: str
    name: str
    start: float
    end: float
    backend: str = ""
    handles: tuple[int, ...] = ()
    module: str = ""
    source: str = ""
    nbytes: int = 0
    metadata: str = ""
    thread: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


Where = Callable[[Sequence[int]], Origin]
"""From debug handles to where their operators come from."""


@dataclass(slots=True)
class Recorder:
    """Collects events. Safe to use from several threads."""

    where: Where
    events: list[Event] = field(default_factory=list[Event])
    values: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])

    def add(self, kind: str, name: str, start: float, end: float, **more: Any) -> None:
        """Record one event; ``more`` are further fields of :class:`Event`."""
        place = self.where(more.get("handles", ()))
        thread = threading.get_ident()
        event = Event(kind, name, start, end, module=place.module, source=place.source, thread=thread, **more)
        self.events.append(event)

    @contextmanager
    def span(self, kind: str, name: str, **more: Any) -> Iterator[None]:
        """Record how long the block took, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, name, start, time.perf_counter(), **more)


@dataclass(slots=True)
class DelegateTracer:
    """What a delegate sees of a :class:`Recorder`: translates its own ids to debug handles."""

    recorder: Recorder
    backend: str
    handles: Callable[[int | str | None], tuple[int, ...]]

    def event(self, name: str, start: float, end: float, ident: int | str | None = None, metadata: str = "") -> None:
        """One operator of the delegate."""
        self.recorder.add("op", name, start, end, backend=self.backend, handles=self.handles(ident), metadata=metadata)

    def memory(self, name: str, nbytes: int) -> None:
        """Memory the delegate allocated; negative if released."""
        now = time.perf_counter()
        self.recorder.add("memory", name, now, now, backend=self.backend, nbytes=nbytes)

    def value(self, ident: int | str, value: object) -> None:
        """An intermediate result."""
        self.recorder.values[self.handles(ident)] = value


_CONTAINERS = ("load", "init", "execute")


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Durations of events that belong together, in seconds."""

    name: str
    count: int
    total: float
    share: float


class Profile:
    """Recorded events, as a table (:meth:`table`), a trace (:meth:`chrome_trace`), and sums."""

    def __init__(self, events: Sequence[Event], values: Mapping[tuple[int, ...], Any] | None = None) -> None:
        self.events = tuple(events)
        self.values = dict(values or {})
        """Intermediate results that delegates reported last, by debug handles."""

    def _leaves(self) -> list[Event]:
        """Events that contain no others: operators where a delegate reports them, else the delegate's call."""
        inner = [event for event in self.events if event.kind == "op"]

        def covered(event: Event) -> bool:
            return any(event.start <= op.start and op.end <= event.end and op.thread == event.thread for op in inner)

        found = [event for event in self.events if event.kind in ("kernel", "op")]
        return found + [event for event in self.events if event.kind == "delegate" and not covered(event)]

    def _sums(self, key: Callable[[Event], str], events: Sequence[Event]) -> list[ProfileRow]:
        groups: dict[str, list[float]] = {}
        for event in events:
            groups.setdefault(key(event), []).append(event.seconds)
        total = sum(map(sum, groups.values())) or 1.0
        rows = [ProfileRow(name, len(found), sum(found), sum(found) / total) for name, found in groups.items()]
        return sorted(rows, key=lambda row: -row.total)

    def by_module(self) -> list[ProfileRow]:
        """Execution time per ``nn.Module`` path; what cannot be told apart is under its backend's name."""
        return self._sums(lambda event: event.module or f"<{event.backend or event.name}>", self._leaves())

    def by_line(self) -> list[ProfileRow]:
        """Execution time per line of the user's program."""
        return self._sums(lambda event: event.source or f"<{event.backend or event.name}>", self._leaves())

    def by_name(self) -> list[ProfileRow]:
        """Time per kind and name."""
        timed = [event for event in self.events if event.kind != "memory"]
        return self._sums(lambda event: f"{event.kind} {event.name}", timed)

    def table(self) -> str:
        """Every kind and name with count, total and mean in milliseconds, and memory, as text."""
        rows = [("event", "count", "total ms", "mean ms", "where")]
        places: dict[str, Event] = {f"{event.kind} {event.name}": event for event in self.events}
        for row in self.by_name():
            event = places[row.name]
            place = event.module or event.backend
            mean = row.total / row.count
            rows.append((row.name, str(row.count), f"{row.total * 1e3:.3f}", f"{mean * 1e3:.3f}", place))
        for event in self.events:
            if event.kind == "memory":
                rows.append((f"memory {event.name}", "", "", f"{event.nbytes:+,} B", event.backend))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                cell.ljust(width) if at in (0, 4) else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

    def chrome_trace(self) -> str:
        """JSON for ``chrome://tracing`` and Perfetto (Trace Event Format: complete events, and a counter of memory)."""
        found: list[dict[str, Any]] = []
        in_use: dict[str, int] = {}
        for event in sorted(self.events, key=lambda event: (event.start, -event.end)):
            common = {"pid": 1, "tid": event.thread, "ts": event.start * 1e6, "cat": event.kind}
            if event.kind == "memory":
                in_use[event.backend] = in_use.get(event.backend, 0) + event.nbytes
                args: dict[str, Any] = {"bytes": in_use[event.backend]}
                found.append({**common, "ph": "C", "name": f"memory of {event.backend}", "args": args})
                continue
            args = {
                "backend": event.backend,
                "debug_handles": list(event.handles),
                "module": event.module,
                "line": event.source,
                "metadata": event.metadata,
            }
            shown = {key: value for key, value in args.items() if value}
            found.append({**common, "ph": "X", "name": event.name, "dur": event.seconds * 1e6, "args": shown})
        return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})
