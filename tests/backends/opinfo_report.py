"""Text around OpInfo results: failures grouped by message, and the table of known failures."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opinfo_engine import Case

TABLE = Path(__file__).with_name("opinfo_expected.txt")


@dataclass(frozen=True)
class Known:
    """One row of the table: which cases fail (``samples`` empty: all of the operator in that mode), and why."""

    op: str
    mode: str
    samples: frozenset[int]
    reason: str

    def covers(self, case: Case) -> bool:
        return case.op == self.op and case.mode == self.mode and (not self.samples or case.sample in self.samples)


def read_table(path: Path = TABLE) -> list[Known]:
    """Rows ``operator | mode | * or sample numbers | reason``; ``#`` starts a comment line."""
    rows: list[Known] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split("|", 3)]
        if len(cells) != 4 or not cells[3]:
            raise ValueError(f"{path.name}:{number}: expected 'operator | mode | samples | reason', got {line!r}")
        samples = frozenset() if cells[2] == "*" else frozenset(int(n) for n in cells[2].split(","))
        rows.append(Known(cells[0], cells[1], samples, cells[3]))
    return rows


def unlisted(cases: Iterable[Case], table: list[Known]) -> list[Case]:
    """Failed cases that no row covers."""
    return [case for case in cases if case.failed and not any(row.covers(case) for row in table)]


def stale(cases: list[Case], table: list[Known]) -> list[Known]:
    """Rows of which no case fails any more, among those that were run."""
    rows: list[Known] = []
    for row in table:
        covered = [case for case in cases if row.covers(case)]
        if covered and not any(case.failed for case in covered):
            rows.append(row)
    return rows


def pass_rate(cases: Iterable[Case]) -> float:
    """Passed cases over those with a truth to compare with."""
    counts = Counter(case.status for case in cases)
    judged = sum(counts.values()) - counts["skip"]
    return counts["pass"] / judged if judged else 1.0


def kind(case: Case) -> str:
    """The case's message without its particulars."""
    text = re.sub(r"0x[0-9a-f]+", "ADDR", case.message)
    text = re.sub(r"aten[:.]+[\w.]+", "aten::OP", text)
    text = re.sub(r"[\[(][^\[\]()]*\d[^\[\]()]*[\])]", "[..]", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text)
    return f"{case.status}: {text[:150]}"


def grouped(cases: list[Case], examples: int = 6, details: bool = False) -> str:
    """Failures grouped by kind of message, the most frequent first."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.failed:
            groups[kind(case)].append(case)
    lines: list[str] = []
    for name, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        ops = Counter(f"{case.op}.{case.mode}" for case in members)
        lines.append(f"\n{len(members):6d} cases, {len(ops):4d} operators  {name}")
        lines.append(f"        e.g. {members[0].message[:300]}")
        shown = ", ".join(f"{op} ({count})" for op, count in ops.most_common(examples))
        more = f", and {len(ops) - examples} more" if len(ops) > examples else ""
        lines.append(f"        {shown}{more}")
        if details:
            lines.extend("        " + line for line in members[0].detail.splitlines())
    return "\n".join(lines)


def summary(cases: list[Case]) -> str:
    """Counts by mode and status, and the share that passes."""
    lines: list[str] = []
    for mode in sorted({case.mode for case in cases}):
        counts = Counter(case.status for case in cases if case.mode == mode)
        shown = "  ".join(f"{status} {count}" for status, count in sorted(counts.items()))
        lines.append(f"{mode:<10} {pass_rate(c for c in cases if c.mode == mode):8.2%}  {shown}")
    lines.append(f"{'all':<10} {pass_rate(cases):8.2%}")
    return "\n".join(lines)


def table_rows(cases: list[Case]) -> str:
    """Rows for the table of known failures, the message in the place of the reason."""
    failing: dict[tuple[str, str], list[Case]] = defaultdict(list)
    total: Counter[tuple[str, str]] = Counter()
    for case in cases:
        total[case.op, case.mode] += case.status != "skip"
        if case.failed:
            failing[case.op, case.mode].append(case)
    lines: list[str] = []
    for (op, mode), members in sorted(failing.items()):
        numbers = ",".join(str(case.sample) for case in members)
        samples = "*" if len(members) == total[op, mode] else numbers
        lines.append(f"{op} | {mode} | {samples} | {members[0].message[:160]}")
    return "\n".join(lines)
