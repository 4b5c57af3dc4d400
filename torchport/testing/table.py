"""Reports as Markdown: ``python -m torchport.testing.table REPORT.json … > results.md``.

The page has a table of all runs, then for each backend its runs by variant and dtype, the operators that ran on the
host, and the limits with their reasons.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .plan import DEFAULT_SEED, FAILED, PASSED, STATUSES, VARIANTS
from .report import Report, percent, read_report

__all__ = ["command_of", "markdown"]

_INTRO: Final = """\
# Results

What `torchport conform` found on the backends that ship. [Conformance](../conformance.md) says what is run and what the
words mean. `python -m torchport.testing.table REPORT.json …` writes this page; the commands stand with the tables.

"Passed" is the share of the cases that could be judged. Limits count neither as passed nor as failed; each has its
reason below. "Skipped" is what the CPU cannot run, so there is nothing to compare with. "Not run" counts an operator's
variants that were left when a run's time was up. Times are of a machine with two cores that did other work meanwhile;
the processors' time is what a run costs.
"""
_LISTED: Final = 12
"""Operators named with a reason; of more, the number."""


def command_of(report: Report) -> str:
    """The command that makes this report again."""
    s = report.settings
    given = ["torchport conform", s["backend"]]
    given += ["--quick"] if s["quick"] else []
    given += [f"--ops '{s['ops']}'"] if s["ops"] else []
    given += [f"--dtypes {','.join(s['dtypes'])}"] if s["dtypes"] != ["float32"] else []
    given += [f"--frontends {','.join(s['frontends']) or 'all'}"] if s["frontends"] != ["lazy"] else []
    given += [f"--variants {','.join(s['variants'])}"] if s["variants"] != list(VARIANTS) else []
    given += [f"--samples {s['samples']}"] if s["samples"] else []
    given += ["--models"] if s["models"] else []
    given += ["--strict"] if s["strict"] else []
    given += [f"--seed {s['seed']}"] if s["seed"] != DEFAULT_SEED else []
    return " ".join(given)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return [*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _counted(title: str, rows: Sequence[tuple[str, Mapping[str, int]]]) -> list[str]:
    """A table of named counts, without the statuses that none has."""
    used = [status for status in STATUSES if any(counts.get(status) for _, counts in rows)]
    return _table(
        [title, "passed", *used],
        ([name, percent(Report.rate(c)), *(f"{c.get(s, 0):,}" for s in used)] for name, c in rows),
    )


def _judged(counts: Mapping[str, int]) -> int:
    return sum(counts.get(status, 0) for status in (*PASSED, *FAILED, "unsupported"))


def _run(report: Report) -> list[str]:
    about = report.backend
    lines = ["", f"`{command_of(report)}`", ""]
    lines.append(
        f"{about.get('date', '')}, version {about['version']}, torch {about['torch']}, Python {about['python']}, "
        f"{about['machine']}: {report.seconds:,.0f} s, of processors {report.cpu_seconds:,.0f} s".removeprefix(", ")
    )
    lines.append("")
    frontends = list(dict.fromkeys(key[1] for key in report.cells))
    rows: list[tuple[str, Mapping[str, int]]] = []
    for frontend in frontends:
        for variant in (v for v in VARIANTS if any(key[1] == frontend and key[3] == v for key in report.cells)):
            rows.append((f"{frontend}, {variant}", report.totals({"frontend": frontend, "variant": variant})))
    lines += _counted("frontend, variant", rows)
    dtypes = list(dict.fromkeys(key[2] for key in report.cells))
    if len(dtypes) > 1:
        lines += ["", *_counted("dtype", [(dtype, report.totals({"dtype": dtype})) for dtype in dtypes])]
    if report.models:
        lines += ["", *_models(report.models)]
    return lines


def _models(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def figure(row: Mapping[str, Any], name: str) -> str:
        return f"{1e3 * row[name]:.1f} ms" if name in row else ""

    return _table(
        ("model", "frontend", "variant", "result", "second run", "CPU eager", "compiles again", "on the host"),
        (
            (
                *(row[name] for name in ("model", "frontend", "variant", "status")),
                figure(row, "seconds"),
                figure(row, "eager_seconds"),
                f"{row['compiles']:.0f}" if "compiles" in row else "",
                ", ".join(row.get("host", ())),
            )
            for row in rows
        ),
    )


def _names(names: Iterable[str]) -> str:
    known = sorted(set(names))
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(f"`{name}`" for name in known[:_LISTED]) + more


def _reasons(reports: Sequence[Report], status: str) -> list[tuple[str, int, str]]:
    """(reason, cases, operators) of the limits, or of what the backend does not take; the most frequent first."""
    cases: Counter[str] = Counter()
    ops: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        for key, cell in report.cells.items():
            if cell.counts[status] and cell.reason:
                reason = _cell(cell.reason.split(" [")[0]).replace("<", "&lt;")
                cases[reason] += cell.counts[status]
                ops[reason].add(key[0])
    return [(reason, n, _names(ops[reason])) for reason, n in cases.most_common()]


def _host(reports: Sequence[Report]) -> list[tuple[str, int, str]]:
    """(operator on the host, cells, whose operators) over all runs."""
    cells: Counter[str] = Counter()
    ops: dict[str, set[str]] = defaultdict(set)
    for report in reports:
        for key, cell in report.cells.items():
            for name in cell.host_ops:
                cells[name] += 1
                ops[name].add(key[0])
    return [(f"`{name}`" if "::" in name else name, n, _names(ops[name])) for name, n in sorted(cells.items())]


def _failures(reports: Sequence[Report]) -> list[tuple[str, str, str]]:
    return [
        (f"`{r.case}`", r.status, _cell(r.message[:160]).replace("<", "&lt;"))
        for report in reports
        for r in sorted(report.failures, key=lambda r: r.case)
    ]


def markdown(reports: Sequence[Report]) -> str:
    """The page: a table of all runs, then every backend with its runs, host operators, limits and failures."""
    lines = [_INTRO]
    totals = [(f"`{_cell(command_of(r).removeprefix('torchport conform '))}`", r.totals()) for r in reports]
    used = [s for s in STATUSES if any(c[s] for _, c in totals)]
    lines += _table(
        ["run", "judged", "passed", *used],
        ([name, f"{_judged(c):,}", percent(Report.rate(c)), *(f"{c[s]:,}" for s in used)] for name, c in totals),
    )
    for name in dict.fromkeys(report.backend["name"] for report in reports):
        members = [report for report in reports if report.backend["name"] == name]
        lines += ["", f"## {name}"]
        for report in members:
            lines += _run(report)
        sections: tuple[tuple[str, Sequence[str], Sequence[Sequence[object]]], ...] = (
            ("Failures", ("case", "result", "message"), _failures(members)),
            ("On the host", ("what", "cells", "when running"), _host(members)),
            (
                "Not taken, by the backend's own word",
                ("reason", "cases", "operators"),
                _reasons(members, "unsupported"),
            ),
            ("Limits", ("reason", "cases", "operators"), _reasons(members, "limit")),
        )
        for title, head, rows in sections:
            if rows:
                lines += ["", f"### {title}: {name}", "", *_table(head, rows)]
    return "\n".join(lines) + "\n"


def main(paths: Sequence[str]) -> int:
    """Print the page for the reports of these paths."""
    if not paths:
        print("usage: python -m torchport.testing.table REPORT.json …", file=sys.stderr)
        return 2
    print(markdown([read_report(path) for path in paths]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
