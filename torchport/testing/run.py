"""A whole run: catalogue, units, workers, journal, report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import TorchportError
from ..core.files import writing
from .plan import Case, Plan, Result, Unit, units_of
from .pool import Catalogue, list_target, run_units
from .report import Report

__all__ = ["Journal", "conform"]

Progress = Callable[[int, int, Report, str], None]
"""Told after every unit: units done, units in all, the report so far, the unit's name."""


class Journal:
    """What finished units found, a line each, so that an interrupted run can go on. Only whole lines count."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self.plan = plan
        self.done: dict[str, list[Result]] = {}
        self.seconds = self.cpu_seconds = 0.0
        """What the earlier parts of the run took."""

    def load(self) -> None:
        """Read what an earlier run left. Raises :class:`TorchportError` if that run was another one."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        try:
            settings = json.loads(lines[0]) if lines else self.plan.settings
        except ValueError:
            return
        if settings != self.plan.settings:
            changed = sorted(k for k in settings if settings[k] != self.plan.settings.get(k))
            raise TorchportError(
                f"{self.path} is of a run with other settings ({', '.join(changed)}); give the same ones, "
                "or another --out, or leave --resume away"
            )
        for line in lines[1:]:
            try:
                row = json.loads(line)
                if "seconds" in row:
                    self.seconds += row["seconds"]
                    self.cpu_seconds += row["cpu_seconds"]
                else:
                    self.done[row["unit"]] = [_from_row(r) for r in row["results"]]
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the run was stopped

    def start(self, fresh: bool) -> None:
        """Begin the file, or go on with it."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if fresh or not self.path.exists():
                self.path.write_text(json.dumps(self.plan.settings) + "\n", encoding="utf-8")
            elif not self.path.read_bytes().endswith(b"\n"):
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("\n")  # ends the line that was being written when the run was stopped

    def write(self, unit: Unit, results: list[Result]) -> None:
        """Note a finished unit."""
        self._append({"unit": unit.key, "results": [_to_row(result) for result in results]})

    def end(self, seconds: float, cpu_seconds: float) -> None:
        """Note what this part of the run took."""
        self._append({"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)})

    def _append(self, row: Mapping[str, Any]) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _to_row(result: Result) -> dict[str, Any]:
    data = dataclasses.asdict(result)
    data["case"] = str(result.case)
    return {k: v for k, v in data.items() if v not in ("", None, (), [], {})}


def _from_row(row: Mapping[str, Any]) -> Result:
    values = dict(row)
    values["case"] = Case.parse(values["case"])
    values["host_ops"] = tuple(values.get("host_ops", ()))
    return Result(**values)


def _frontends(plan: Plan, catalogue: Catalogue) -> dict[str, int | None]:
    """The plan's frontends with their limits. Raises :class:`TorchportError` for one that is unknown or missing."""
    for frontend in plan.frontends:
        if frontend not in catalogue.missing:
            raise TorchportError(f"there is no frontend {frontend!r}; there are: {', '.join(catalogue.missing)}")
        if catalogue.missing[frontend]:
            raise TorchportError(f"the frontend {frontend!r} cannot be used: {catalogue.missing[frontend]}")
    chosen = plan.frontends or tuple(frontend for frontend, why in catalogue.missing.items() if not why)
    return {frontend: catalogue.frontend_limits[frontend] for frontend in chosen}


def conform(
    plan: Plan,
    journal: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    on_case: Callable[[Case], None] = lambda case: None,
    date: str = "",
) -> Report:
    """Run a plan and report. Plan's ``frontends`` left empty means every frontend there is.

    ``date`` is the report's; today if empty.

    Raises :class:`TorchportError` where the plan names something that does not exist, and what loading the backend
    raises; failures of the backend are results.
    """
    started = time.monotonic()
    catalogue = list_target(plan.backend)
    frontends = _frontends(plan, catalogue)
    units = units_of(plan, catalogue.subjects, frontends)
    missing = {frontend: why for frontend, why in catalogue.missing.items() if why}
    report = Report.new(catalogue.backend, plan, missing, date)
    notes = Journal(journal, plan) if journal is not None else None
    done: dict[str, list[Result]] = {}
    if notes is not None:
        if resume:
            notes.load()
            done = notes.done
        notes.start(fresh=not resume)
    for results in done.values():
        report.add(results)
    left = [unit for unit in units if unit.key not in done]
    counts = {"done": len(units) - len(left)}
    partial: list[Unit] = []

    def finished(unit: Unit, results: list[Result], complete: bool) -> None:
        report.add(results)
        if not complete:
            partial.append(unit)
        elif notes is not None:
            notes.write(unit, results)
        counts["done"] += complete
        if progress is not None:
            progress(counts["done"], len(units), report, f"{unit.op} {unit.dtype}")

    try:
        not_run, report.cpu_seconds = run_units(plan, left, finished, on_case, started)
    finally:
        report.seconds = time.monotonic() - started
        if notes is not None:
            notes.end(report.seconds, report.cpu_seconds)
    report.add_not_run([*not_run, *partial])
    if notes is not None:
        report.seconds += notes.seconds
        report.cpu_seconds += notes.cpu_seconds
    return report
