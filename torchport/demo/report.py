"""What the demo prints: progress while it works, each job's results, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .job import DemoJob, Outcome
from .measure import Measured

__all__ = ["EARLY_STEPS", "difference", "make_console", "progress", "show_outcome", "show_summary"]

EARLY_STEPS = 20
QUIET_SECONDS = 15.0
PLAIN_WIDTH = 140


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for the table where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


@contextmanager
def progress(console: Console, what: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Show how far a job is: a bar on a terminal, else a line now and then. Yields what to call after each step."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[said]}"), console=console) as bar:
            task = bar.add_task(what, total=steps, said="first step: loads and compiles")
            yield lambda said: bar.update(task, advance=1, said=said)
            bar.update(task, completed=steps)
        return
    done, spoken, began = 0, time.monotonic(), time.monotonic()
    console.print(f"{what}: {steps} steps")

    def step(said: str) -> None:
        nonlocal done, spoken
        done += 1
        if time.monotonic() - spoken > QUIET_SECONDS:
            spoken = time.monotonic()
            console.print(f"{what}: step {done} of {steps}, {spoken - began:.0f} s, {said}")

    yield step
    console.print(f"{what}: {done} steps in {time.monotonic() - began:.1f} s")


def show_outcome(console: Console, job: DemoJob, engine: str, outcome: Outcome) -> None:
    """Print what a job computed, for people."""
    for title, columns, rows in outcome.tables:
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(Text(column), overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    console.print(Text(outcome.text))
    console.print(Text(f"{job.title} on {engine}: {outcome.result}"))


def difference(reference: torch.Tensor, values: torch.Tensor) -> float:
    """The largest absolute difference, over the largest absolute value of the reference."""
    return ((values - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()


def _differences(reference: Outcome | None, outcome: Outcome) -> tuple[str, str]:
    if reference is None or reference.values.shape != outcome.values.shape:
        return "?", "?"
    if reference.values.dim() > 1:
        shown = f"{difference(reference.values, outcome.values):.0e}"
        return shown, shown
    early = difference(reference.values[:EARLY_STEPS], outcome.values[:EARLY_STEPS])
    return f"{early:.0e}", f"{difference(reference.values, outcome.values):.0e}"


def _cell(value: float | None, pattern: str) -> str:
    return "–" if value is None else pattern.format(value)


def show_summary(console: Console, rows: Sequence[tuple[DemoJob, Sequence[Measured]]]) -> None:
    """Print the table: one row per job and engine, CPU eager first."""
    table = Table(title="CPU eager and the backends of the port device", title_justify="left", box=SIMPLE_HEAD)
    for column in ("job", "engine", "result"):
        table.add_column(column, no_wrap=True)
    differences = (f"differs,\nfirst {EARLY_STEPS}", "differs,\nall")
    times = ("first\nresult s", "full\nspeed s", "ms per\nstep", "÷ CPU\neager", "ops per\nstep", "µs per\nop")
    for column in (*differences, *times, "compiles", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for job, runs in rows:
        eager = runs[0]
        for run in runs:
            first = job.short if run is eager else ""
            if run.outcome is None:
                table.add_row(first, run.engine, Text("failed, see below", style="red"), *[""] * 10)
                continue
            early, late = ("", "") if run is eager else _differences(eager.outcome, run.outcome)
            ratio = run.ms_per_step / eager.ms_per_step if run.ms_per_step and eager.ms_per_step else None
            table.add_row(
                first,
                run.engine,
                run.outcome.result,
                early,
                late,
                _cell(run.first_result, "{:.1f}"),
                _cell(run.full_speed, "{:.1f}"),
                _cell(run.ms_per_step, "{:.1f}"),
                _cell(ratio, "{:.2f}"),
                _cell(run.ops_per_step, "{:.0f}"),
                _cell(run.trace_us_per_op, "{:.1f}"),
                str(run.compiles),
                f"{run.compile_seconds:.1f}",
                end_section=run is runs[-1],
            )
    console.print(table)
    console.print(
        "differs: largest difference from CPU eager's embeddings or losses, relative to the largest of them; "
        f"for losses in the first {EARLY_STEPS} steps, and in all, as training lets rounding errors grow\n"
        "first result: to the end of the first step, which loads data and makes the model, too; full speed: until all "
        "of a step ran compiled (–: not by the end)\n"
        "µs per op: a step's time outside the engine (tracing and the program's own Python) per traced op\n"
        "ms and µs are medians of the steady steps; seconds are those spent compiling"
    )
