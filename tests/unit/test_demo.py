"""``torchport.demo``: the programs, what is measured about them, and what is printed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from torchport import metrics
from torchport.core.errors import BackendNotFound, TorchportError
from torchport.demo import main as demo
from torchport.demo import report
from torchport.demo.job import JOBS, DemoJob, Outcome, Steps, load_job
from torchport.demo.measure import Measured, measure
from torchport.demo.text import paragraphs, sentences


def outcome_of(running: Steps) -> tuple[list[str], Outcome]:
    said: list[str] = []
    try:
        while True:
            said.append(next(running))
    except StopIteration as stop:
        return said, stop.value


def ignore(_: str) -> None:
    pass


def counting(device: str, steps: int) -> Steps:
    """A job that traces 10 ops per step and compiles in the first two."""
    for step in range(steps):
        metrics.metrics.count("TracedOps", 10)
        if step < 2:
            metrics.metrics.count("UncachedCompile")
            metrics.metrics.add_time("CompileTime", 1.5)
        yield f"step {step}"
    return Outcome(torch.tensor([1.0, 2.0]), "counted")


def job(run: Callable[[str, int], Steps] = counting) -> DemoJob:
    return DemoJob("Counting", "count", run, steps=8, quick_steps=2)


# -- the text ------------------------------------------------------------------------------------------------------


def test_the_text_is_prose() -> None:
    assert len(paragraphs()) > 300
    assert sum(map(len, paragraphs())) > 100_000
    assert len(sentences()) > 300
    assert all(50 <= len(sentence) <= 140 and "\n" not in sentence for sentence in sentences())
    assert len(set(sentences())) == len(sentences())


# -- the programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_a_job_runs_on_the_cpu_and_is_repeatable(name: str) -> None:
    said, first = outcome_of(load_job(name).run("cpu", 2))
    _, second = outcome_of(load_job(name).run("cpu", 2))
    assert len(said) == 2
    assert first.result
    assert report.difference(first.values, second.values) < 1e-5
    assert torch.isfinite(first.values).all()


def test_minilm_is_the_trained_model() -> None:
    _, outcome = outcome_of(load_job("minilm").run("cpu", 1))
    assert outcome.passed
    assert outcome.values.shape[1] == 384
    torch.testing.assert_close(outcome.values.norm(dim=1), torch.ones(len(outcome.values)))


@pytest.mark.slow
def test_the_conv_net_learns() -> None:
    _, outcome = outcome_of(load_job("digits").run("cpu", load_job("digits").steps))
    assert outcome.passed
    assert outcome.values[-20:].mean() < 0.1 * outcome.values[0]


# -- measuring -----------------------------------------------------------------------------------------------------


def test_measuring_counts_steps_ops_and_compiles() -> None:
    heard: list[str] = []
    measured = measure("count", job(), "reference", "cpu", 8, heard.append)
    assert heard == [f"step {step}" for step in range(8)]
    assert (measured.error, measured.compiles, measured.compile_seconds) == ("", 2, 3.0)
    assert measured.ops_per_step == 10
    assert measured.ms_per_step is not None
    assert measured.trace_us_per_op is not None
    assert measured.outcome is not None
    assert measured.first_result == measured.steps[0].seconds
    assert measured.full_speed == sum(step.seconds for step in measured.steps[:2])


def test_full_speed_is_reached_when_nothing_is_interpreted_any_more() -> None:
    def interpreted(device: str, steps: int) -> Steps:
        for step in range(steps):
            if step < 5:
                metrics.metrics.count("InterpretedOps", 10)
            yield "one"
        return Outcome(torch.ones(1), "done")

    measured = measure("count", job(interpreted), "reference", "cpu", 8, ignore)
    assert measured.full_speed == sum(step.seconds for step in measured.steps[:5])
    assert measured.ms_per_step is not None
    assert measure("count", job(interpreted), "reference", "cpu", 5, ignore).full_speed is None


def test_a_step_in_which_compiled_code_was_tried_is_not_the_steady_one() -> None:
    def tries(device: str, steps: int) -> Steps:
        for step in range(steps):
            if step != 3:
                metrics.metrics.count("InterpretedRun")
            yield "one"
        return Outcome(torch.ones(1), "done")

    measured = measure("count", job(tries), "reference", "cpu", 8, ignore)
    assert measured.full_speed is None
    assert measured._steady == measured.steps[4:]


def test_too_few_steps_have_no_steady_state() -> None:
    measured = measure("count", job(), "reference", "cpu", 2, ignore)
    assert (measured.ms_per_step, measured.ops_per_step, measured.trace_us_per_op) == (None, None, None)


def test_a_failure_is_kept_with_what_came_before() -> None:
    def fails(device: str, steps: int) -> Steps:
        yield "one"
        raise ValueError("chip on fire\nand a long table")

    measured = measure("count", job(fails), "chip", "cpu", 8, ignore)
    assert (measured.error, measured.outcome, len(measured.steps)) == ("ValueError: chip on fire", None, 1)


# -- printing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=report.PLAIN_WIDTH, highlight=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_of(engine: str, *values: float, error: str = "") -> Measured:
    return Measured("count", engine, None if error else Outcome(torch.tensor(values), "fine"), error)


def test_the_summary_shows_differences_and_failures(console: Console) -> None:
    late = [2.0] * (report.EARLY_STEPS + 5)
    runs = [run_of("CPU eager", *late), run_of("reference", *late[:-1], 2.5), run_of("chip", error="ValueError: no")]
    report.show_summary(console, [(job(), runs)])
    lines = printed(console).splitlines()
    (reference,) = [line for line in lines if "reference" in line]
    assert any(line.split()[:4] == ["count", "CPU", "eager", "fine"] for line in lines)
    assert reference.split()[:4] == ["reference", "fine", "0e+00", "2e-01"]
    assert any("chip" in line and "failed, see below" in line for line in lines)


def test_outcomes_are_printed_as_they_are(console: Console) -> None:
    rows = (("A [b]cat[/b]", "1.00"),)
    outcome = Outcome(torch.ones(1), "2 of 2", tables=(("Title", ("", "1"), rows),), text="[red] text")
    report.show_outcome(console, job(), "reference", outcome)
    for part in ("A [b]cat[/b]", "1.00", "[red] text", "Counting on reference: 2 of 2"):
        assert part in printed(console)


def test_progress_without_a_terminal_says_little(console: Console) -> None:
    with report.progress(console, "Counting", 100) as on_step:
        for _ in range(100):
            on_step("fine")
    lines = printed(console).splitlines()
    assert lines[0] == "Counting: 100 steps"
    assert lines[-1].startswith("Counting: 100 steps in ")
    assert len(lines) < 10


def test_progress_on_a_terminal_is_a_bar() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with report.progress(console, "Counting", 3) as on_step:
        for _ in range(3):
            on_step("fine")
    assert "3/3" in printed(console)
    assert "fine" in printed(console)


# -- the whole -----------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said() -> None:
    good = run_of("CPU eager", 1.0, 2.0)
    missed = Measured("count", "c", Outcome(torch.tensor([1.0, 2.0]), "60 %", passed=False))
    runs = [good, run_of("a", 1.0, 2.0), run_of("b", 1.0, 2.1), missed, run_of("d", error="OSError: gone")]
    assert demo._wrong(job(), runs) == [
        "Counting on b differs from CPU eager by 5.0e-02",
        "Counting on c missed its goal: 60 %",
        "Counting on d failed: OSError: gone",
    ]
    assert demo._wrong(job(), [good, run_of("nan", 1.0, float("nan"))])


def test_unknown_backends_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendNotFound, match="'chip'"):
        demo._backends(["chip"])
    monkeypatch.setattr(demo, "PACKAGES", ("rich", "no_such_package"))
    with pytest.raises(TorchportError, match=r'\(no_such_package\): pip install "torchport\[demo\]"'):
        demo.run_demo()


@pytest.mark.parametrize("only", JOBS)
def test_the_demo_on_the_reference_backend(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = demo.run_demo(backends=["reference"], only=only, steps=4)
    out = capsys.readouterr().out
    assert code == 0, out
    rows: list[Any] = [line.split() for line in out.splitlines() if " reference " in f" {line} "]
    assert rows
    assert load_job(only).title in out


@pytest.mark.slow
@pytest.mark.parametrize("only", JOBS)
def test_the_demo_on_the_inductor_backend(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    from torchport import registry

    if registry.get_optional("inductor") is None:
        pytest.skip("inductor cannot run here")
    code = demo.run_demo(backends=["inductor"], only=only, steps=4)
    assert code == 0, capsys.readouterr().out
