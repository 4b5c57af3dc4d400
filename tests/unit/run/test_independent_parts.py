"""Splitting a trace: a value that is read while the device is busy need not wait for what it has nothing to do with."""

from __future__ import annotations

import torch
from helpers_traces import FakeRunner, Overlapping, Recorder, Recording, aten

from torchport.run.future import Future
from torchport.run.independent_parts import parts_to_compute


class _Job:
    """The job of a future that is still running."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runtime = runner


def _in_flight(recording: Recording, *shape: int) -> torch.Tensor:
    handle = recording.leaf(*shape)
    assert handle.value is not None
    handle.value = Future(_Job(recording.runner), handle.value.spec)  # type: ignore[arg-type]
    handle.value.info = recording.runner  # type: ignore[union-attr]
    return handle


def _two_computations(backend: Recorder, running: int) -> tuple[Recording, int, int]:
    """A value of what is in flight, and one of what is there already."""
    recording = Recording(FakeRunner(backend))
    recording.runner.queue.running = running
    waits = recording.call(aten.neg.default, _in_flight(recording, 4))
    ready = recording.call(aten.sin.default, recording.leaf(4))
    return recording, waits.value_id, ready.value_id


def test_what_can_run_at_once_is_computed_apart_from_what_waits() -> None:
    recording, waits, ready = _two_computations(Overlapping(), running=1)
    assert parts_to_compute(recording.trace, (waits, ready), ready) == ((ready,), (waits,))


def test_a_trace_that_was_taken_apart_once_always_is() -> None:
    recording, waits, ready = _two_computations(Overlapping(), running=1)
    first = parts_to_compute(recording.trace, (waits, ready), ready)
    recording.runner.queue.running = 0
    assert parts_to_compute(recording.trace, (waits, ready), ready) == first


def test_it_stays_whole_while_nothing_runs_or_the_backend_runs_one_at_a_time() -> None:
    for backend, running in ((Overlapping(), 0), (Recorder(), 1)):
        recording, waits, ready = _two_computations(backend, running)
        assert parts_to_compute(recording.trace, (waits, ready), ready) == ((waits, ready),)


def test_it_stays_whole_where_the_value_read_waits_itself_or_nothing_is_read() -> None:
    recording, waits, ready = _two_computations(Overlapping(), running=1)
    assert parts_to_compute(recording.trace, (waits, ready), waits) == ((waits, ready),)
    assert parts_to_compute(recording.trace, (waits, ready), None) == ((waits, ready),)


def test_values_with_an_operator_in_common_stay_together() -> None:
    recording = Recording(FakeRunner(Overlapping()))
    recording.runner.queue.running = 1
    common = recording.call(aten.neg.default, _in_flight(recording, 4))
    one = recording.call(aten.sin.default, common)
    other = recording.call(aten.cos.default, common)
    value_ids = (one.value_id, other.value_id)
    assert parts_to_compute(recording.trace, value_ids, one.value_id) == (value_ids,)


def test_few_integers_are_computed_for_each_part() -> None:
    recording = Recording(FakeRunner(Overlapping()))
    recording.runner.queue.running = 1
    counted = recording.call(aten.add.Tensor, recording.leaf(4, dtype=torch.int64), 1)
    ready = recording.call(aten.mul.Tensor, counted, 2)
    waits = recording.call(aten.add.Tensor, _in_flight(recording, 4), counted)
    value_ids = (ready.value_id, waits.value_id)
    assert parts_to_compute(recording.trace, value_ids, ready.value_id) == ((ready.value_id,), (waits.value_id,))
