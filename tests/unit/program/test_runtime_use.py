"""The runtime on a recording backend: run-time options, state, threads, profile, and what it opens."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from programs import (
    F2,
    Recording,
    counter,
    delegate,
    entries_of,
    kernels,
    load,
    packed,
    program_bytes,
    summing,
    two,
    weight,
)

from torchport import runtime
from torchport.core.errors import DelegateError, ErrorCode, MethodError, ProgramError

X = np.array([1.0, 2.0], np.float32)
Y = np.array([10.0, 20.0], np.float32)


# -- options -------------------------------------------------------------------------------------------------------
def test_options_before_init_after_init_and_between_calls() -> None:
    backend = Recording()
    program = two(backend, backend_options={"recording": {"threads": 1, "mode": "a"}})
    program.set_options("recording", mode="b")
    method = program.load_method(backend_options={"recording": {"fast": True}})
    assert backend.log[-1][-1] == {"threads": 1, "mode": "b", "fast": True}
    method.set_options("recording", threads=2)
    method(X, Y)
    assert backend.log[-1][-1] == {"threads": 2, "mode": "b", "fast": True}
    method.set_options("recording", fast=False)
    method(X, Y)
    assert backend.log[-1][-1] == {"threads": 2, "mode": "b", "fast": False}
    assert program.load_method() is not method
    assert backend.log[-1][-1] == {"threads": 1, "mode": "b"}, "a method's own options are its own"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"absent": {"a": 1}}, ErrorCode.NOT_FOUND),
        ({"x" * 65: {"a": 1}}, ErrorCode.INVALID_ARGUMENT),
        ({3: {"a": 1}}, ErrorCode.INVALID_ARGUMENT),
        ({"recording": {"k" * 65: 1}}, ErrorCode.INVALID_ARGUMENT),
        ({"recording": {"": 1}}, ErrorCode.INVALID_ARGUMENT),
        ({"recording": {"k": [1]}}, ErrorCode.INVALID_ARGUMENT),
        ({"recording": {"k": "v" * 5000}}, ErrorCode.INVALID_ARGUMENT),
        ({"recording": 3}, ErrorCode.INVALID_ARGUMENT),
    ],
)
def test_wrong_options_are_refused_and_change_nothing(options: Any, code: ErrorCode) -> None:
    backend = Recording()
    with pytest.raises(MethodError) as caught:
        two(backend, backend_options=options)
    assert caught.value.code == code
    program = two(backend)
    with pytest.raises(MethodError) as caught:
        program.load_method(backend_options=options)
    assert caught.value.code == code
    assert backend.names() == []
    method = program.load_method()
    assert backend.log[-1][-1] == {}
    with pytest.raises(MethodError):
        method.set_options("absent", a=1)


# -- state ---------------------------------------------------------------------------------------------------------
def state_program(*backends: Recording) -> runtime.Program:
    constant, blobs = weight((0.0, 5.0))
    return load(program_bytes(counter(), constants=[constant], blobs=blobs), *backends)


def test_buffers_keep_their_values_and_an_error_changes_none() -> None:
    backend = Recording()
    program = state_program(backend)
    method = program.load_method()
    new, old = method(X)
    np.testing.assert_array_equal(new, [1, 7])
    np.testing.assert_array_equal(old, [0, 5])
    new += 100
    np.testing.assert_array_equal(method.state["w"], [1, 7])
    backend.fails["execute"] = RuntimeError("power")
    with pytest.raises(DelegateError):
        method(X)
    backend.fails.clear()
    np.testing.assert_array_equal(method(X)[0], [2, 9])
    method.set_inputs(X)
    method.step()
    method.reset()
    np.testing.assert_array_equal(method.state["w"], [2, 9])
    other = program.load_method()
    np.testing.assert_array_equal(other(X)[0], [1, 7])
    shared = program.load_method(state=method.state)
    np.testing.assert_array_equal(shared(X)[0], [3, 11])
    np.testing.assert_array_equal(method(X)[0], [4, 13])
    method.state.reset()
    np.testing.assert_array_equal(method(X)[0], [1, 7])


# -- threads -------------------------------------------------------------------------------------------------------
def test_one_method_is_run_by_one_thread_at_a_time_and_methods_side_by_side() -> None:
    backend = Recording()
    inside: list[int] = []
    most: list[int] = []

    def watch(context: Any) -> None:
        inside.append(1)
        most.append(len(inside))
        barrier.wait(0.001) if barrier.parties == 1 else None
        inside.pop()

    barrier = threading.Barrier(1)
    backend.before_execute = watch
    method = two(backend).load_method()
    results: list[Any] = []

    def run(target: runtime.Method) -> None:
        results.extend(target(X, Y)[0].tolist() for _ in range(50))

    threads = [threading.Thread(target=run, args=(method,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[21.0, 42.0]] * 200
    assert max(most) == 1
    # Two methods of one program: each waits inside its delegate for the other.
    meeting = threading.Barrier(2)
    backend.before_execute = lambda context: meeting.wait(timeout=30)
    program = load(program_bytes(summing([delegate()])), backend)
    pair = [program.load_method(), program.load_method()]
    results.clear()
    once = [threading.Thread(target=lambda one=one: results.append(one(X, Y)[0].tolist())) for one in pair]
    for thread in once:
        thread.start()
    for thread in once:
        thread.join()
    assert results == [[11.0, 22.0]] * 2


def test_methods_are_loaded_from_many_threads() -> None:
    backend = Recording()
    program = state_program(backend)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(program.load_method()(X)[0].tolist())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1.0, 7.0]] * 8


# -- profile -------------------------------------------------------------------------------------------------------
def test_the_profile_has_load_init_execute_delegates_events_and_memory() -> None:
    import json

    program = load(program_bytes(kernels()), Recording(), profile=True)
    method = program.load_method()
    method(torch.tensor(X), torch.tensor(Y))
    profile = method.profile()
    kinds = [event.kind for event in profile.events]
    assert kinds == ["load", "init", "load", "kernel", "op", "memory", "delegate", "kernel", "execute"]
    op = next(event for event in profile.events if event.kind == "op")
    assert (op.name, op.handles, op.seconds, op.metadata, op.backend) == ("sum", (1, 2), 1.0, "meta", "recording")
    assert {row.name for row in profile.by_module()} >= {"layer.act", "layer", "<recording>"}
    assert {row.name for row in profile.by_line()} >= {"model.py:3 in forward"}
    assert sum(row.share for row in profile.by_module()) == pytest.approx(1)
    table = profile.table().splitlines()
    assert table[0].split() == ["event", "count", "total", "ms", "mean", "ms", "where"]
    assert any(line.startswith("memory result") and "+8 B" in line for line in table)
    trace = json.loads(profile.chrome_trace())["traceEvents"]
    assert {event["ph"] for event in trace} == {"X", "C"}
    assert any(
        event["name"] == "aten.relu.default" and event["args"]["line"] == "model.py:3 in forward" for event in trace
    )
    with pytest.raises(MethodError, match="profile=True"):
        load(program_bytes(kernels()), Recording()).load_method().profile()


# -- files ---------------------------------------------------------------------------------------------------------
def test_verification_levels() -> None:
    data = bytearray(program_bytes(summing([delegate(tag="d0")])))
    at = data.index(b"d0", data.index(b"PK", 0) + 80)
    position = next(i for i in range(len(data)) if data[i : i + 2] == b"d0" and i % 64 == 0)
    assert at
    data[position] ^= 1
    with pytest.raises(ProgramError, match="checksum") as caught:
        load(bytes(data), Recording())
    assert caught.value.entry == "data/torchport/d0"
    assert caught.value.code == ErrorCode.INVALID_PROGRAM
    assert load(bytes(data), Recording(), verification="header").methods == ("forward",)
    with pytest.raises(ProgramError, match='"full" or "header"') as caught:
        load(bytes(data), Recording(), verification="none")
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT


def test_check_header() -> None:
    entries = entries_of([summing([delegate()])])
    data = packed(entries)
    assert runtime.check_header(data) == "compatible"
    assert runtime.check_header(data[:40]) == "short_data"
    assert runtime.check_header(data[:-1]) == "not_present"
    assert runtime.check_header(b"x" * 4096) == "not_present"
    newer = [
        (name, value.replace(b'"oldest":1', b'"oldest":3').replace(b'"torchport":2', b'"torchport":3'))
        if name.endswith("program.json") else (name, value)
        for name, value in entries
    ]  # fmt: skip
    assert runtime.check_header(packed(newer)) == "incompatible"
    with pytest.raises(ProgramError, match="reads versions 1 to 2") as caught:
        runtime.load(packed(newer))
    assert caught.value.code == ErrorCode.DELEGATE_INVALID_COMPATIBILITY == 0x30


def test_a_program_from_a_file_outlives_the_file(tmp_path: Any) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(program_bytes(summing([delegate()])))
    program = load(path, Recording())  # type: ignore[arg-type]
    path.unlink()
    np.testing.assert_array_equal(program.load_method()(X, Y)[0], [11, 22])


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty", "nul"])
def test_what_is_not_a_file(kind: str, tmp_path: Any) -> None:
    import os

    path: Any = tmp_path / "m.pt2"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind == "nul":
        path = "a\0b"
    with pytest.raises(ProgramError) as caught:
        runtime.load(path)
    expected = ErrorCode.INVALID_PROGRAM if kind == "empty" else ErrorCode.ACCESS_FAILED
    assert caught.value.code == expected
    with pytest.raises(ProgramError):
        runtime.load(3)  # type: ignore[arg-type]


def test_specs_of_programs() -> None:
    assert F2.nbytes == 8
    assert str(F2) == "float32[2]"
