"""``torchport.core.metrics``: counters and timers, from many threads and from finalizers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.core.metrics import KEEP, Metrics, Timer


def test_counting() -> None:
    metrics = Metrics()
    metrics.count("Execute")
    metrics.count("Execute", 4)
    assert metrics.counter("Execute") == 5
    assert metrics.counter("NeverCounted") == 0
    assert "NeverCounted" not in metrics.snapshot()["counters"]


def test_a_timer_records_also_when_the_block_raises() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError), metrics.timer("CompileTime"):
        raise KeyError
    assert metrics.snapshot()["samples"] == {"CompileTime": 1}
    assert metrics.snapshot()["seconds"]["CompileTime"] >= 0


def test_the_snapshot_is_plain_and_a_copy() -> None:
    metrics = Metrics()
    metrics.count("Flush", 2)
    metrics.add_time("ExecuteTime", 0.25)
    metrics.add_time("ExecuteTime", 0.5)
    taken = metrics.snapshot()
    metrics.count("Flush")
    metrics.add_time("ExecuteTime", 1.0)
    assert json.loads(json.dumps(taken)) == {
        "counters": {"Flush": 2},
        "seconds": {"ExecuteTime": 0.75},
        "samples": {"ExecuteTime": 2},
    }


def test_reset() -> None:
    metrics = Metrics()
    metrics.count("Flush")
    metrics.add_time("ExecuteTime", 0.1)
    metrics.reset()
    assert metrics.snapshot() == {"counters": {}, "seconds": {}, "samples": {}}
    assert metrics.report() == "nothing counted yet"


def test_the_report_has_a_line_for_each() -> None:
    metrics = Metrics()
    metrics.count("UncachedCompile", 1234)
    metrics.add_time("CompileTime", 0.002)
    first, second = metrics.report().splitlines()
    assert first.split() == ["UncachedCompile", "1,234"]
    assert second.split()[:4] == ["CompileTime", "1", "total=0.002s", "p1=2.000"]


def test_threads_lose_no_count() -> None:
    metrics = Metrics()

    def work(_: int) -> None:
        for _ in range(500):
            metrics.count("Execute")
            metrics.add_time("ExecuteTime", 1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert metrics.counter("Execute") == 4000
    assert metrics.snapshot()["seconds"]["ExecuteTime"] == 4000.0


def test_counting_from_a_finalizer_inside_a_locked_section_does_not_deadlock() -> None:
    metrics = Metrics()

    class Key(str):
        """Counts while it is being looked up, as a finalizer run by garbage collection might."""

        def __hash__(self) -> int:
            if metrics.counter("Destroy") == 0:
                metrics.count("Destroy")
            return super().__hash__()

    worker = threading.Thread(target=metrics.count, args=(Key("Execute"),), daemon=True)
    worker.start()
    worker.join(timeout=30)
    assert not worker.is_alive()
    assert (metrics.counter("Destroy"), metrics.counter("Execute")) == (1, 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_samples_in_order(seconds: list[float]) -> None:
    timer = Timer()
    for value in seconds:
        timer.add(value)
    shown = [timer.percentile(percent) for percent in (0, 1, 50, 99, 100)]
    assert shown == sorted(shown)
    assert set(shown) <= set(seconds)
    assert (shown[0], shown[-1]) == (min(seconds), max(seconds))


def test_a_timer_without_samples_has_percentile_zero() -> None:
    assert Timer().percentile(50) == 0.0


def test_a_timer_keeps_only_the_newest_samples() -> None:
    timer = Timer()
    for number in range(KEEP + 10):
        timer.add(float(number))
    assert timer.count == KEEP + 10
    assert sorted(timer.samples) == [float(number) for number in range(10, KEEP + 10)]
