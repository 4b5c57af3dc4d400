"""What a flush costs as the trace grows, against the C++ lazy core: 100 to 100,000 traced ops, one live result.

    python -m benchmarks.flush [--quick] [--peer-limit N]

``port`` is bound to a backend that computes nothing, so that only its own cost is seen. The first flush builds and
compiles the graph and must be linear; a known one must cost the same whatever the trace's length. The C++ core walks
and hashes its graph at every ``mark_step`` and then computes it; it is measured up to ``--peer-limit`` ops, as it
recurses along the graph when it frees it. Intermediate results are dead, as in most programs. A long trace also sweeps
the processor's caches, which makes whatever follows slower; so each length is also measured with caches swept anyway.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from time import perf_counter

import torch

import torchport

from .common import LazyCore, Samples, new_trace, table, use_null

__all__ = ["main"]

_SWEEP = torch.zeros(64 << 20, dtype=torch.uint8)
"""Writing all of it leaves nothing else in the caches."""

LENGTHS = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


def _chain(length: int, width: int, device: str) -> Callable[[], torch.Tensor]:
    # A shape of its own makes every op of the trace one the trie has not seen.
    x, y = torch.ones(width).to(device), torch.ones(width).to(device)

    def run() -> torch.Tensor:
        value = x
        with torch.no_grad():
            for _ in range(length):
                value = value + y
        return value

    return run


def _once(run: Callable[[], object], flush: Callable[[], object]) -> tuple[float, float]:
    """Seconds of tracing and of flushing."""
    start = perf_counter()
    kept = run()
    middle = perf_counter()
    flush()
    end = perf_counter()
    del kept
    return middle - start, end - middle


class Line:
    """What was measured at one length; seconds."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.first_trace = self.first_flush = self.peer_first = math.nan
        self.trace, self.flush, self.cold, self.peer_flush = Samples(), Samples(), Samples(), Samples()


def _measure(length: int, core: LazyCore | None, batches: int) -> Line:
    line = Line(length)
    width = 2 + LENGTHS.index(length)
    ours = _chain(length, width, "port")
    new_trace()
    line.first_trace, line.first_flush = _once(ours, torchport.sync)
    theirs = None
    if core is not None:
        theirs = _chain(length, width, "lazy")
        core.mark()
        line.peer_first = _once(theirs, core.mark)[1]
    for _ in range(batches):
        seconds = _once(ours, torchport.sync)
        line.trace.seconds.append(seconds[0])
        line.flush.seconds.append(seconds[1])
        line.cold.seconds.append(_once(lambda: (ours(), _SWEEP.add_(1)), torchport.sync)[1])
        if core is not None and theirs is not None:
            line.peer_flush.seconds.append(_once(theirs, core.mark)[1])
    return line


def _slope(lines: list[Line], value: Callable[[Line], float]) -> float:
    """Exponent of growth: the least-squares slope of log seconds over log ops; 0 is constant, 1 is linear."""
    points = [(math.log(line.length), math.log(value(line))) for line in lines if value(line) > 0]
    mean_x, mean_y = (sum(p[axis] for p in points) / len(points) for axis in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def _cell(value: float, per: float = 1.0) -> str:
    return "—" if math.isnan(value) else f"{value * per:.2f}"


def _print(lines: list[Line]) -> None:
    rows = []
    for line in lines:
        n = line.length
        rows.append(
            [
                f"{n:,}",
                _cell(line.first_trace, 1e6 / n),
                _cell(line.first_flush, 1e6 / n),
                _cell(line.trace.best, 1e6 / n),
                line.flush.cell(1e6),
                line.cold.cell(1e6),
                _cell(line.first_flush / line.peer_first),
                _cell(line.peer_flush.best, 1e6),
                _cell(line.flush.best / line.peer_flush.best, 1.0) if line.peer_flush.seconds else "—",
            ]
        )
    header = (
        "ops", "first: trace µs/op", "first: flush µs/op", "known: trace µs/op", "known: flush µs", "the same, cold µs",
        "first flush, port ÷ lazy", "known flush, lazy µs", "known flush, port ÷ lazy",
    )  # fmt: skip
    table("Flush (best / median where there are two)", header, rows)
    small, large = lines[0], lines[-1]
    print(f"\ngrowth of the first flush, ops^{_slope(lines, lambda line: line.first_flush):.2f} (1 is linear)")
    for name in ("flush", "cold"):
        slope = _slope(lines, lambda line, name=name: getattr(line, name).best)
        times = getattr(large, name).best / getattr(small, name).best
        what = "a known flush" if name == "flush" else "a known flush, caches cold"
        print(f"growth of {what}, ops^{slope:.2f} (0 is constant); {large.length:,} ops: {times:.1f} × {small.length}")


def main(argv: list[str] | None = None) -> None:
    """Print the table and how the costs grow."""
    parser = argparse.ArgumentParser(description="flush cost over the number of traced ops")
    parser.add_argument("--quick", action="store_true", help="up to 10,000 ops")
    parser.add_argument("--peer-limit", type=int, default=10_000, help="most ops for the C++ core (default 10,000)")
    parser.add_argument("--batches", type=int, default=8, help="known flushes per length (default 8)")
    options = parser.parse_args(argv)
    use_null()
    core = LazyCore()
    _once(_chain(64, 1, "port"), torchport.sync)  # what is imported and compiled once per process
    lengths = [n for n in LENGTHS if not options.quick or n <= 10_000]
    with torchport.config.override(max_trace_ops=4 * max(lengths), max_trace_nodes=16 * max(lengths)):
        lines = []
        for length in lengths:
            print(f"{length:,} ops …", file=sys.stderr, flush=True)
            lines.append(_measure(length, core if length <= options.peer_limit else None, options.batches))
        _print(lines)


if __name__ == "__main__":
    main()
