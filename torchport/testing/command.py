"""``torchport conform``, ``compare`` and ``minimise``: options, progress, files, exit codes."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import testing as kit  # its names come when they are used: PyTorch's database of operators takes seconds
from ..core.errors import TorchportError
from .difference import changes, difference_text
from .page import write_page
from .plan import DEFAULT_SEED, DTYPES, FAILED, PASSED, VARIANTS, Case, Plan
from .report import Report, failures_by_kind, read_report
from .target import load_backend

__all__ = ["add_commands", "load_backend"]

_QUICK_SECONDS = 165.0
"""Three minutes, less loading PyTorch's databases and writing the report."""
_SPOKEN_EVERY = 15.0


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = known if text == "all" else tuple(name.strip() for name in text.split(",") if name.strip())
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong) or text!r} is not among {', '.join(known)}")
        return names

    return parse


def _frontends(text: str) -> tuple[str, ...]:
    return () if text == "all" else tuple(name.strip() for name in text.split(",") if name.strip())


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def add_commands(commands: Any) -> None:
    """Add the three subcommands to the command line."""
    p = commands.add_parser("conform", help="how much of PyTorch works on a backend, compared with the CPU")
    p.add_argument("backend", metavar="BACKEND", help="a name, or package.module:Class, or file.py:Class")
    p.add_argument("--quick", action="store_true", help="a seeded choice of cases, within three minutes on two cores")
    p.add_argument("--ops", default="", metavar="REGEX", help="operators by name: '^add$', '^nn.functional', '^optim:'")
    p.add_argument("--dtypes", type=_names(DTYPES), default=("float32",), metavar="A,B|all", help="default: float32")
    p.add_argument("--frontends", type=_frontends, default=("lazy",), metavar="A,B|all", help="default: lazy")
    p.add_argument("--variants", type=_names(VARIANTS), default=VARIANTS, metavar="A,B", help=", ".join(VARIANTS))
    p.add_argument("--samples", type=_count, default=0, metavar="N", help="at most so many per operator and variant")
    p.add_argument("--models", action="store_true", help="the model suite too (needs transformers)")
    p.add_argument("--strict", action="store_true", help="no host fallback: what needs it counts as not supported")
    p.add_argument("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="of the samples and of the choice")
    p.add_argument("-n", "--jobs", type=_count, default=2, metavar="N", help="worker processes (default: 2)")
    p.add_argument("--case-seconds", type=_seconds, default=120.0, metavar="S", help="a case that takes longer hangs")
    p.add_argument("--budget", type=_seconds, default=0.0, metavar="S", help="stop after so long; the rest is not run")
    p.add_argument("--limits", action="append", default=[], metavar="FILE", help="table of known limits with reasons")
    p.add_argument("--baseline", metavar="FILE", help="an earlier report.json: fail on regressions only")
    p.add_argument("--out", metavar="DIR", help="where reports go (default: conformance-BACKEND)")
    p.add_argument("--resume", action="store_true", help="go on with an interrupted run in the same --out")
    p.set_defaults(run=_conform)

    p = commands.add_parser("compare", help="two conformance reports, regressions first")
    p.add_argument("old", metavar="OLD.json")
    p.add_argument("new", metavar="NEW.json")
    p.add_argument("--html", metavar="FILE", help="write the new report's page with the changes on top")
    p.set_defaults(run=_compare)

    p = commands.add_parser("minimise", help="reduce a failing case or program to the smallest graph that fails")
    p.add_argument("backend", metavar="BACKEND", help="a name, or package.module:Class, or file.py:Class")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", metavar="OP/VARIANT/DTYPE/SAMPLE/FRONTEND", help="a case, named as in a report")
    what.add_argument("--script", metavar="FILE", help="a Python program that computes on torch.device('port')")
    p.add_argument("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="of the report's run")
    p.add_argument("--seconds", type=_seconds, default=60.0, metavar="S", help="a graph that takes longer hangs")
    p.add_argument("--out", metavar="FILE", default="minimised.py", help="the program to write (default: minimised.py)")
    p.set_defaults(run=_minimise)


# -- conform -------------------------------------------------------------------------------------------------------
class _Progress:
    """One line that changes on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.spoken = self.started
        self.terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int, report: Report, name: str) -> None:
        now = time.monotonic()
        if now - self.spoken < (0.1 if self.terminal else _SPOKEN_EVERY) and done < total:
            return
        self.spoken = now
        counts = report.totals()
        failed = sum(counts[status] for status in FAILED)
        cases = sum(counts[status] for status in (*PASSED, *FAILED))
        said = f"{done}/{total} units, {cases:,} cases, {failed} failed, {now - self.started:.0f} s"
        if not self.terminal:
            print(said, file=sys.stderr, flush=True)
            return
        columns = shutil.get_terminal_size().columns
        width = max(10, min(30, columns - len(said) - 24))
        bar = "█" * round(width * done / max(total, 1))
        print(f"\r\x1b[K{bar:░<{width}} {said}  {name}"[: columns + 4], end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        given.backend,
        given.ops,
        given.dtypes,
        given.frontends,
        given.variants,
        given.samples,
        given.models,
        given.quick,
        given.strict,
        given.seed,
        given.jobs,
        given.case_seconds,
        given.budget or (_QUICK_SECONDS if given.quick else 0.0),
        tuple(given.limits),
    )


def _conform(given: argparse.Namespace) -> int:
    baseline = read_report(given.baseline) if given.baseline else None
    name = "".join(c if c.isalnum() else "-" for c in Path(given.backend).name).strip("-")
    folder = Path(given.out or f"conformance-{name}")
    progress = _Progress()
    try:
        report = kit.conform(_plan(given), folder / "journal.jsonl", given.resume, progress)
    except KeyboardInterrupt:
        progress.end()
        if (folder / "journal.jsonl").exists():
            print(f"what was run is kept; go on with --resume --out {folder}", file=sys.stderr)
        raise
    progress.end()
    found = changes(baseline, report) if baseline is not None else []
    report.write(folder / "report.json")
    write_page(folder / "report.html", report, found)
    if report.failures:
        print(failures_by_kind(report.failures) + "\n")
    print(report.summary())
    print(
        f"\n{folder / 'report.html'} and report.json, {report.seconds:.0f} s, of processors {report.cpu_seconds:.0f} s"
    )
    if baseline is None:
        return int(report.failed)
    print(difference_text(baseline, report, found))
    return int(any(change.kind == "regression" for change in found))


# -- compare -------------------------------------------------------------------------------------------------------
def _compare(given: argparse.Namespace) -> int:
    old, new = read_report(given.old), read_report(given.new)
    found = changes(old, new)
    print(difference_text(old, new, found))
    if given.html:
        write_page(Path(given.html), new, found)
    return int(any(change.kind == "regression" for change in found))


# -- minimise ------------------------------------------------------------------------------------------------------
def _minimise(given: argparse.Namespace) -> int:
    if given.script and not Path(given.script).is_file():
        raise TorchportError(f"there is no file {given.script}")
    out = Path(given.out)
    if given.case:
        found = kit.minimise_case(given.backend, Case.parse(given.case), out, seed=given.seed, seconds=given.seconds)
    else:
        found = kit.minimise_script(given.backend, Path(given.script), out, seconds=given.seconds)
    print(found.text())
    return 0
