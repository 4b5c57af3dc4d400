"""The report of a run: counts per operator, frontend, dtype and variant; every failure; totals. JSON in and out."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..core.errors import TorchportError
from ..core.files import writing
from .plan import FAILED, PASSED, STATUSES, Case, Plan, Result, Unit

__all__ = ["SCHEMA", "Cell", "Report", "percent", "read_report"]

SCHEMA: Final = 1
"""Version of the JSON. A reader takes this one and says so about others."""
MOST_HOSTS: Final = 12
"""Operators that ran on the host which a summary names."""
_KEPT_PER_CELL: Final = 12
"""Failures of one cell that are kept whole; of the others the number is."""

Key = tuple[str, str, str, str]
"""Operator, frontend, dtype, variant."""


@dataclass
class Cell:
    """The cases of one operator, frontend, dtype and variant: how many of each status, and what ran on the host."""

    counts: Counter[str] = field(default_factory=Counter[str])
    host_ops: set[str] = field(default_factory=set[str])
    failed_samples: list[int] = field(default_factory=list[int])
    reason: str = ""
    """Of the first limit, unsupported or skipped case."""

    @property
    def worst(self) -> str:
        """The status to show for the whole cell: a failure before a limit, a fallback before native, …"""
        order = (*FAILED, "unsupported", "limit", "fallback", "kernel", "decomposed", "native", "not run", "skipped")
        return next((status for status in order if self.counts[status]), "skipped")


@dataclass
class Report:
    """Everything a run found out. ``backend`` describes the backend and the versions around it."""

    backend: dict[str, str]
    settings: dict[str, Any]
    cells: dict[Key, Cell] = field(default_factory=dict[Key, Cell])
    failures: list[Result] = field(default_factory=list[Result])
    models: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Processor time of all workers: what a run costs where others use the machine too."""
    frontends_missing: dict[str, str] = field(default_factory=dict[str, str])

    # -- filling ---------------------------------------------------------------------------------------------
    @classmethod
    def new(
        cls, backend: dict[str, str], plan: Plan, frontends_missing: Mapping[str, str] | None = None, date: str = ""
    ) -> Report:
        """An empty report. ``date`` is the day it is of, as ``2026-01-31``; today if empty."""
        machine = f"{platform.system()} {platform.machine()}"
        date = date or datetime.now(UTC).date().isoformat()
        about = {**backend, "python": platform.python_version(), "machine": machine, "date": date}
        return cls(about, plan.settings, frontends_missing=dict(frontends_missing or {}))

    def add(self, results: Iterable[Result]) -> None:
        """Count results."""
        for result in results:
            case = result.case
            cell = self.cells.setdefault((case.op, case.frontend, case.dtype, case.variant), Cell())
            cell.counts[result.status] += 1
            cell.host_ops.update(result.host_ops)
            if result.failed:
                cell.failed_samples.append(case.sample)
                if len(cell.failed_samples) <= _KEPT_PER_CELL:
                    self.failures.append(result)
            elif result.status in ("limit", "unsupported", "skipped") and not cell.reason:
                cell.reason = result.message[:300]
            if case.op.startswith("model:"):
                self.models.append(_model_row(result))

    def add_not_run(self, units: Iterable[Unit]) -> None:
        """Note the cells that the time bound left out."""
        for unit in units:
            for share in unit.shares:
                for variant in share.variants:
                    cell = self.cells.setdefault((unit.op, share.frontend, unit.dtype, variant), Cell())
                    if not cell.counts:
                        cell.counts["not run"] += 1

    # -- totals ----------------------------------------------------------------------------------------------
    def totals(self, where: Mapping[str, str] | None = None) -> Counter[str]:
        """Cases by status, of the cells with the given ``op``, ``frontend``, ``dtype`` or ``variant``."""
        total: Counter[str] = Counter()
        for key, cell in self.cells.items():
            named: dict[str, str] = dict(zip(("op", "frontend", "dtype", "variant"), key, strict=True))
            if all(named[name] == value for name, value in (where or {}).items()):
                total.update(cell.counts)
        return total

    @staticmethod
    def rate(counts: Mapping[str, int]) -> float | None:
        """Passed cases over those that could be judged (limits on record count as neither); ``None`` if none could."""
        passed = sum(counts.get(status, 0) for status in PASSED)
        judged = passed + sum(counts.get(status, 0) for status in (*FAILED, "unsupported"))
        return passed / judged if judged else None

    @property
    def failed(self) -> bool:
        """Whether any case failed."""
        return any(cell.counts[status] for cell in self.cells.values() for status in FAILED)

    def summary(self) -> str:
        """Totals as a text table: a row per frontend and variant, then per dtype, then everything."""
        names = [status for status in STATUSES if self.totals()[status]]
        rows: list[tuple[str, Counter[str]]] = []
        frontends = list(dict.fromkeys(key[1] for key in self.cells))
        for frontend in frontends:
            for variant in dict.fromkeys(key[3] for key in self.cells if key[1] == frontend):
                rows.append((f"{frontend} {variant}", self.totals({"frontend": frontend, "variant": variant})))
        for dtype in dict.fromkeys(key[2] for key in self.cells):
            rows.append((dtype, self.totals({"dtype": dtype})))
        rows.append(("all", self.totals()))
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':<{width}}  {'passed':>8}" + "".join(f"  {name:>11}" for name in names)]
        for name, counts in rows:
            lines.append(
                f"{name:<{width}}  {percent(self.rate(counts)):>8}" + "".join(f"  {counts[n]:>11,}" for n in names)
            )
        return "\n".join([*lines, *self._not_reached(), *self._on_the_host()])

    def _not_reached(self) -> list[str]:
        """What a rate of all that was judged does not say: how much of it was there to judge."""
        total = self.totals()
        left, every = total["not run"], sum(total.values())
        if not left:
            return []
        reached = (every - left) / every
        return ["", f"{reached:.0%} of the cases were reached in time; go on with --resume, or give a longer --budget"]

    def _on_the_host(self) -> list[str]:
        """Which operators ran on the host, those of most cells first."""
        hosts = Counter(op for cell in self.cells.values() for op in cell.host_ops if "::" in op)
        if not hosts:
            return []
        shown = [f"{op} ({count:,})" for op, count in hosts.most_common(MOST_HOSTS)]
        left = len(hosts) - len(shown)
        more = f", and {left:,} more" if left > 0 else ""
        return ["", f"operators that the host ran, and in how many rows of the report: {', '.join(shown)}{more}"]

    # -- JSON ------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """The report as plain data, schema :data:`SCHEMA`."""
        return {
            "schema": SCHEMA,
            "backend": self.backend,
            "settings": self.settings,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "frontends_missing": self.frontends_missing,
            "totals": dict(self.totals()),
            "cells": [
                {
                    "op": key[0],
                    "frontend": key[1],
                    "dtype": key[2],
                    "variant": key[3],
                    "counts": dict(cell.counts),
                    **({"host_ops": sorted(cell.host_ops)} if cell.host_ops else {}),
                    **({"failed_samples": cell.failed_samples} if cell.failed_samples else {}),
                    **({"reason": cell.reason} if cell.reason else {}),
                }
                for key, cell in sorted(self.cells.items())
            ],
            "failures": [_failure(result) for result in sorted(self.failures, key=lambda r: r.case)],
            "models": self.models,
        }

    def write(self, path: Path) -> None:
        """Write the JSON; an interrupted write leaves the old file."""
        text = json.dumps(_finite(self.to_json()), indent=0, allow_nan=False)
        scratch = path.with_name(path.name + ".part")
        try:
            with writing(path):
                scratch.write_text(text, encoding="utf-8")
                scratch.replace(path)
        finally:
            with suppress(OSError):
                scratch.unlink()


def percent(rate: float | None) -> str:
    """Rounded down: 100% is said of nothing less, and of nothing at all a dash."""
    if rate is None:
        return "–"
    return f"{math.floor(rate * 10_000 + 1e-9) / 100:.2f}%"


def _model_row(result: Result) -> dict[str, Any]:
    case = result.case
    row = {
        "model": case.op.partition(":")[2],
        "frontend": case.frontend,
        "variant": case.variant,
        "status": result.status,
    }
    return {**row, "message": result.message, "host": list(result.host_ops), **result.figures}


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


def _failure(result: Result) -> dict[str, Any]:
    data = dataclasses.asdict(result)
    data.pop("case")
    kept = {k: v for k, v in data.items() if v not in ("", None, (), {})}
    return {"case": str(result.case), **dataclasses.asdict(result.case), **kept, "seconds": round(result.seconds, 4)}


def _result(row: Mapping[str, Any]) -> Result:
    known = {f.name for f in dataclasses.fields(Result)} - {"case"}
    values = {k: v for k, v in row.items() if k in known}
    for name in ("largest_abs", "largest_rel"):
        if isinstance(values.get(name), str):
            values[name] = float(values[name])
    values["host_ops"] = tuple(values.get("host_ops", ()))
    return Result(Case.parse(row["case"]), **values)


def read_report(path: Path | str) -> Report:
    """A report from its JSON file. Raises :class:`TorchportError` for other files and other schema versions."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise TorchportError(
                f"{path} has report schema {data['schema']}, this version reads {SCHEMA}; run torchport conform again"
            )
        report = Report(data["backend"], data["settings"], seconds=data["seconds"], models=data["models"])
        report.frontends_missing = data["frontends_missing"]
        report.cpu_seconds = data["cpu_seconds"]
        for row in data["cells"]:
            cell = Cell(Counter(row["counts"]), set(row.get("host_ops", ())), row.get("failed_samples", []))
            cell.reason = row.get("reason", "")
            report.cells[row["op"], row["frontend"], row["dtype"], row["variant"]] = cell
        report.failures = [_result(row) for row in data["failures"]]
    except OSError as error:
        raise TorchportError(f"the report {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TorchportError(f"{path} is no report of torchport conform: {type(error).__name__}: {error}") from error
    return report


def failures_by_kind(failures: Sequence[Result], examples: int = 5) -> str:
    """Failures grouped by message, the most frequent first, as text."""
    import re
    from collections import defaultdict

    groups: dict[str, list[Result]] = defaultdict(list)
    for result in failures:
        text = re.sub(r"[\[(][^\[\]()]*\d[^\[\]()]*[\])]", "[..]", result.message)
        text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text)
        groups[f"{result.status}: {text[:140]}"].append(result)
    lines: list[str] = []
    for _, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(members):6d}  {members[0].status}: {members[0].message[:200]}")
        ops = Counter(f"{r.case.op}.{r.case.variant}.{r.case.dtype}" for r in members)
        more = f", and {len(ops) - examples} more" if len(ops) > examples else ""
        lines.append("        " + ", ".join(f"{op} ({n})" for op, n in ops.most_common(examples)) + more)
    return "\n".join(lines)
