"""The report as one HTML page: the data and the script that shows it, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..core.files import writing
from .difference import Change
from .plan import FAILED, PASSED, STATUSES, VARIANTS
from .report import Report

__all__ = ["render", "write_page"]

_TEMPLATE: Final = Path(__file__).with_name("page.html")


def _compact(report: Report, changes: Sequence[Change]) -> dict[str, Any]:
    """The report with names as numbers: a full run has some 20,000 cells."""
    data = report.to_json()
    ops = sorted({key[0] for key in report.cells}, key=lambda name: (":" in name, name.lower()))
    frontends = list(dict.fromkeys(key[1] for key in report.cells))
    dtypes = list(dict.fromkeys(key[2] for key in report.cells))
    found = {key[3] for key in report.cells}
    variants = [variant for variant in VARIANTS if variant in found]
    place = [{name: n for n, name in enumerate(names)} for names in (ops, frontends, dtypes, variants)]
    cells: list[list[Any]] = []
    for key, cell in report.cells.items():
        where = [places[name] for places, name in zip(place, key, strict=True)]
        counts = {STATUSES.index(status): n for status, n in cell.counts.items() if n}
        cells.append([*where, counts, sorted(cell.host_ops), cell.reason])
    return {
        "backend": data["backend"],
        "settings": data["settings"],
        "seconds": data["seconds"],
        "frontends_missing": data["frontends_missing"],
        "models": data["models"],
        "failures": data["failures"],
        "changes": [change.to_json() for change in changes],
        "statuses": list(STATUSES),
        "passed": list(PASSED),
        "failed": list(FAILED),
        "ops": ops,
        "frontends": frontends,
        "dtypes": dtypes,
        "variants": variants,
        "cells": cells,
    }


def render(report: Report, changes: Sequence[Change] = ()) -> str:
    """The page. ``changes`` against an earlier report are shown first."""
    text = json.dumps(_compact(report, changes), separators=(",", ":"))
    # A script element ends at "</", whatever quotes it is in; "<!--" starts another mode.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    name = report.backend["name"].replace("&", "&amp;").replace("<", "&lt;")
    return _TEMPLATE.read_text(encoding="utf-8").replace("@NAME@", name).replace("@DATA@", text)


def write_page(path: Path, report: Report, changes: Sequence[Change] = ()) -> None:
    """Write the page to a file."""
    text = render(report, changes)
    with writing(path):
        path.write_text(text, encoding="utf-8")
