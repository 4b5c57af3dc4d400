"""``torchport.worker.service``: what comes back is what compiling here gives, and trouble stays over there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_support import a_trace, family, gone, run, traces_of, wait_until

import torchport
from torchport.backend.compiler import computations
from torchport.backend.interface import Backend
from torchport.backend.prepare import prepare
from torchport.backend.registry import registry
from torchport.backend.serialize import fingerprint
from torchport.core.config import config
from torchport.core.errors import CompileError
from torchport.core.specs import CompileSpecs
from torchport.worker import service as services
from torchport.worker.paths import NotSendable
from torchport.worker.request import Answer, graph_request, warming_request
from torchport.worker.service import Cancelled, Service

LONG = 240.0
"""Seconds to wait for a result on a machine that does much else."""


def step(device: torch.device, width: int = 7) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.GELU(), torch.nn.Linear(width, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(4, 5).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# -- what comes back ---------------------------------------------------------------------------------------------------
def test_what_comes_back_is_what_compiling_here_gives(shared: Service) -> None:
    reference = registry.get("reference")
    traces = traces_of(step)
    tickets = [shared.submit(traced.request(("step", at), reference)) for at, traced in enumerate(traces)]
    for traced, ticket in zip(traces, tickets, strict=True):
        answer = ticket.result(LONG)
        mark = fingerprint(traced.made.module)
        here = prepare(reference, CompileSpecs(), traced.made.module, mark)
        for name in ("inputs", "outputs", "names", "mark", "ops", "label", "source", "data"):
            assert getattr(answer, name) == getattr(here, name), name
        assert answer.sources is not None
        assert answer.sources.leaves == traced.made.leaves
        for got, want in zip(run(reference, answer), run(reference, here), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        taken = computations.take(reference, reference.devices()[0], CompileSpecs(), answer)
        assert computations.find(reference, reference.devices()[0], CompileSpecs(), mark) is taken
    assert shared.idle()


def test_a_graph_of_torch_compile_comes_back_the_same(shared: Service) -> None:
    reference = registry.get("reference")
    traced = traces_of(lambda device: step(device, width=8))[-1]
    answer = shared.submit(graph_request("graph", reference, CompileSpecs(), traced.made.module)).result(LONG)
    here = prepare(reference, CompileSpecs(), traced.made.module)
    assert answer.sources is None
    assert answer.names == here.names
    for got, want in zip(run(reference, answer), run(reference, here), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_settings_go_with_the_request(shared: Service) -> None:
    before = torch.get_default_dtype()
    reference = registry.get("reference")
    # The graph of a path is written over there, where default dtypes decide what an integer divided becomes.
    torch.set_default_dtype(torch.float64)
    try:
        traced = traces_of(lambda device: torch.arange(7, device=device) / 3)[-1]
        request = traced.request("dtype", reference)
    finally:
        torch.set_default_dtype(before)
    assert shared.submit(request).result(LONG).outputs[-1].dtype is torch.float64
    plain = traces_of(lambda device: torch.arange(7, device=device) / 3)[-1]
    assert shared.submit(plain.request("dtype", reference)).result(LONG).outputs[-1].dtype is torch.float32


def test_an_operator_of_a_module_is_imported_over_there(shared: Service) -> None:
    import worker_engines  # noqa: F401 - it defines the operator
    from helpers_graphs import build

    reference = registry.get("reference")
    graph = build(
        lambda graph, inputs: [graph.call_function(torch.ops.worker_engines.halved.default, (inputs[0],))],
        [torch.ones(2, 3)],
    )
    answer = shared.submit(graph_request("custom", reference, CompileSpecs(), graph)).result(LONG)
    assert answer.label == "worker_engines.halved.default"


def test_settings_of_the_engine_go_with_the_request(shared: Service, troubled: Any) -> None:
    troubled.level = 3
    ticket = shared.submit(a_trace().request("level 3", troubled, how="tells"))
    troubled.level = 0
    with pytest.raises(CompileError, match="at level 3"):
        ticket.result(LONG)
    with pytest.raises(CompileError, match="at level 0"):
        shared.submit(a_trace().request("level 0", troubled, how="tells")).result(LONG)


# -- tickets -----------------------------------------------------------------------------------------------------------
def test_the_same_key_is_compiled_once(shared: Service, troubled: Backend, tmp_path: Path) -> None:
    began = tmp_path / "began"
    request = a_trace().request("same", troubled, how="slow", file=str(began))
    first = shared.submit(request)
    assert shared.submit(request) is first
    first.result(LONG)
    assert first.done()
    assert len(began.read_text().splitlines()) == 1
    shared.submit(request).result(LONG)
    assert len(began.read_text().splitlines()) == 2, "what is done is asked for anew"


def test_an_answer_is_made_runnable_on_a_thread_of_the_service(shared: Service) -> None:
    reference, traced = registry.get("reference"), a_trace()
    where: list[int] = []

    def load(answer: Answer) -> str:
        where.append(threading.get_ident())
        assert not torch.is_grad_enabled()
        return answer.label

    ticket = shared.submit(traced.request("loaded", reference), load)
    answer = ticket.result(LONG)
    assert ticket.loaded == answer.label
    assert where
    assert where[0] != threading.get_ident()

    def fails(answer: Answer) -> None:
        raise CompileError("the engine does not take it")

    ticket = shared.submit(traced.request("not loaded", reference), fails)
    assert ticket.result(LONG).mark == answer.mark, "it was prepared all the same"
    assert str(ticket.loaded) == "the engine does not take it"


def test_a_cancelled_request_is_not_begun_and_a_begun_one_is_dropped(
    shared: Service, troubled: Backend, tmp_path: Path
) -> None:
    began = [tmp_path / f"began {n}" for n in range(3)]
    tickets = [
        shared.submit(a_trace().request(("cancel", n), troubled, how="slow", file=str(began[n]), seconds="0.5"))
        for n in range(3)
    ]
    wait_until(began[0].exists, LONG)
    assert [ticket.began is not None for ticket in tickets] == [True, False, False]
    tickets[1].cancel()
    tickets[0].cancel()
    for ticket in tickets[:2]:
        assert ticket.done()
        with pytest.raises(Cancelled, match="was cancelled"):
            ticket.result()
    assert shared.pending() == tickets[2:]
    tickets[2].result(LONG)
    assert not began[1].exists()
    assert shared.wait(LONG)


@pytest.mark.slow
def test_what_the_program_asks_about_is_served_before_what_it_has_left(
    shared: Service, troubled: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_BEGUN", 0.0)
    monkeypatch.setattr(services, "_STARTS", 0)
    began = [tmp_path / f"began {n}" for n in range(4)]
    tickets = [
        shared.submit(a_trace().request(("left", n), troubled, how="slow", file=str(began[n]), seconds=seconds))
        for n, seconds in enumerate(("8", "0", "0", "0"))
    ]
    given_way = torchport.metrics.counter("CompileGaveWay")
    wait_until(began[0].exists, LONG)
    wait_until(tickets[3].done, LONG)  # which asks, of the last one alone
    assert tickets[3].result().sources is not None
    assert torchport.metrics.counter("CompileGaveWay") == given_way + 1
    assert shared.wait(LONG)
    for ticket in tickets:  # what was left is compiled, too, when there is nothing else to do
        assert ticket.result().sources is not None
    assert [len(file.read_text().splitlines()) for file in began] == [2, 1, 1, 1]


def test_what_has_just_begun_is_not_ended(shared: Service, troubled: Backend, tmp_path: Path) -> None:
    """A program of many short phases gets some of them compiled, and not one worker after the other."""
    began = tmp_path / "began"
    left = shared.submit(a_trace().request("short", troubled, how="slow", file=str(began), seconds="4"))
    wait_until(began.exists, LONG)
    asked = shared.submit(a_trace().request("asked", troubled))
    wait_until(asked.done, LONG)
    assert left.result().sources is not None
    assert len(began.read_text().splitlines()) == 1


def test_who_waits_has_not_left(shared: Service, troubled: Backend, tmp_path: Path) -> None:
    began = tmp_path / "began"
    slow = shared.submit(a_trace().request("waited for", troubled, how="slow", file=str(began), seconds="4"))
    other = shared.submit(a_trace().request("beside", troubled))
    waiting = threading.Thread(target=slow.result, args=(LONG,))
    waiting.start()
    wait_until(other.done, LONG)
    waiting.join()
    assert len(began.read_text().splitlines()) == 1


def test_waiting_has_a_bound(shared: Service, troubled: Backend) -> None:
    ticket = shared.submit(a_trace().request("bound", troubled, how="slow", seconds="1"))
    with pytest.raises(TimeoutError):
        ticket.result(0.01)
    assert not shared.wait(0.01)
    ticket.result(LONG)


# -- what is not sent --------------------------------------------------------------------------------------------------
def test_a_backend_of_this_process_alone_is_refused() -> None:
    class Local(type(registry.get("reference"))):  # type: ignore[misc]
        name = "worker_local"

    torchport.register(Local)
    try:
        with pytest.raises(NotSendable, match="known in this process only"):
            a_trace().request("local", torchport.get_backend("worker_local"))
    finally:
        torchport.registry.unregister("worker_local")


def test_a_backend_that_was_registered_as_an_instance_is_refused() -> None:
    from worker_engines import Troubled

    made = Troubled()
    torchport.register(made, name="worker_instance")
    try:
        with pytest.raises(NotSendable):
            a_trace().request("instance", torchport.get_backend("worker_instance"))
    finally:
        torchport.registry.unregister("worker_instance")


def test_switched_off_nothing_is_started(fresh: Service) -> None:
    with config.override(compile_workers=0):
        assert fresh.off
        ticket = fresh.submit(warming_request(registry.get("reference"), CompileSpecs()))
        assert ticket.done()
        with pytest.raises(Cancelled, match="compile_workers is 0"):
            ticket.result()
    assert fresh.pids() == []


# -- trouble -----------------------------------------------------------------------------------------------------------
def test_what_a_backend_raises_is_raised_here(shared: Service, troubled: Backend) -> None:
    traced = a_trace()
    with pytest.raises(CompileError, match="ZeroDivisionError: the engine divides by nothing") as caught:
        shared.submit(traced.request("raises", troubled, how="raises")).result(LONG)
    with pytest.raises(CompileError) as here:
        prepare(troubled, CompileSpecs({"how": "raises"}), traced.made.module)
    assert str(caught.value) == str(here.value), "operator and line are those of compiling here"
    assert "worker_engines.py" in str(caught.value.__cause__)


def test_out_of_memory_is_said(shared: Service, troubled: Backend) -> None:
    with pytest.raises(CompileError, match="ran out of memory"):
        shared.submit(a_trace().request("hungry", troubled, how="hungry")).result(LONG)
    shared.submit(a_trace().request("after", troubled)).result(LONG)


@pytest.mark.slow
def test_a_worker_that_dies_takes_one_request_with_it(
    fresh: Service, troubled: Backend, capfd: pytest.CaptureFixture[str]
) -> None:
    hows = ["crashes", "fine", "exits", "fine", "hangs", "fine"]
    with config.override(compile_timeout=20):
        tickets = [fresh.submit(a_trace().request(("dies", n), troubled, how=how)) for n, how in enumerate(hows)]
        said: dict[str, str] = {}
        for how, ticket in zip(hows, tickets, strict=True):
            if how == "fine":
                ticket.result(LONG)
            else:
                with pytest.raises(CompileError) as caught:
                    ticket.result(LONG)
                said[how] = str(caught.value)
    assert "was ended by signal SIGSEGV while it compiled" in said["crashes"]
    assert "the engine is about to crash" in said["crashes"]
    assert "worker_engines.py" in said["crashes"], "the Python stack of the crash"
    assert "ended with exit code 3 while it compiled" in said["exits"]
    assert "did not end within 20 s (torchport.config.compile_timeout)" in said["hangs"]
    for text in said.values():
        assert "test_service.py" in text or "worker_support.py" in text, "the user's line"
    assert not fresh.off
    assert capfd.readouterr().err == ""


def test_after_three_deaths_in_a_row_the_service_is_off(
    fresh: Service, troubled: Backend, capfd: pytest.CaptureFixture[str]
) -> None:
    tickets = [fresh.submit(a_trace().request(("off", n), troubled, how="exits")) for n in range(4)]
    for ticket in tickets[:3]:
        with pytest.raises(CompileError, match="exit code 3"):
            ticket.result(LONG)
    with pytest.raises(Cancelled, match="failed 3 times in a row"):
        tickets[3].result(LONG)
    assert "failed 3 times in a row" in fresh.off
    assert fresh.submit(a_trace().request("later", troubled)).done()
    wait_until(lambda: not fresh.pids())
    assert capfd.readouterr().err.count("no more compiling in other processes") == 1


def kill_at_random(service: Service, backend: Backend, times: int, seed: int) -> None:
    """Each time one process of the worker's is killed at some moment of a compile; what follows is right."""
    draw = random.Random(seed)
    traced = a_trace()
    want = run(backend, prepare(backend, CompileSpecs(), traced.made.module))
    for turn in range(times):
        ticket = service.submit(traced.request(("kill", turn), backend, how="slow"))
        (pid,) = wait_until(service.pids, LONG)
        time.sleep(draw.choice([0, 0, draw.uniform(0, 0.05), draw.uniform(0, 4)]))
        victims = family(pid)
        victim = draw.choice(victims[:2])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        ended = ""
        try:
            ticket.result(LONG)
        except CompileError as error:
            ended = str(error)
        assert not ended or "SIGKILL" in ended
        assert gone(victims) == [], "the watcher and the worker end together"
        answer = service.submit(traced.request(("after", turn), backend)).result(LONG)
        for got, expected in zip(run(backend, answer), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not service.off


def test_a_worker_is_killed_at_random_moments(fresh: Service, troubled: Backend) -> None:
    kill_at_random(fresh, troubled, 5, seed=1)


@pytest.mark.slow
def test_a_worker_is_killed_at_many_random_moments(fresh: Service, troubled: Backend) -> None:
    kill_at_random(fresh, troubled, 200, seed=2)
