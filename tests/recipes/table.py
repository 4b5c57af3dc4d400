"""Runs every recipe on each backend, each in a process of its own, and writes docs/ecosystem.md.

    python tests/recipes/table.py [--backend xla] [names]

A row says what came of the runs with the version that is installed here; what is not installed is left out. The page is
written only where every recipe ran on every backend. The figures of the last table come from ``speed.py``; the programs
between the tables stay as they are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from recipes import RECIPES, missing
from speed import ROWS, figures

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "ecosystem.md"
LIMIT = 600.0
BACKENDS: Final = ("reference", "inductor", "xla")

HEAD = """# Libraries

Typical programs of each library, run on `port` with the libraries as pip installs them. `python tests/recipes/table.py`
makes this page from the recipes in `tests/recipes/recipes.py`; `pytest tests/recipes --runslow` runs the recipes. A row
has the library's version, what came of it on each backend, and what a program has to set besides the device's name.
timm needs torchvision, which cannot be imported beside the CPU build of PyTorch 2.13: its rows ran with PyTorch 2.14.1
and torchvision 0.29.1.

| library | version | what | `reference` | `inductor` | `xla` | to set |
|---|---|---|---|---|---|---|
"""

PROGRAMS: Final = "\n## Five programs\n"
"""Written by hand, and kept: from this heading up to that of the next table."""

SPEED = """
## Speed of training

Processor time of a training step of 20 ms and more, on `inductor` against CPU eager: medians of steps in turn, one
thread, all threads of the process together, everything compiled before (`python tests/recipes/speed.py`).

By the clock, with the loss of every tenth step read (`--clock`), diffusers' row is 0.74 to 0.82 with one thread and
0.88 to 0.92 with two threads on two cores, in each of four runs: what the program traces takes processor time, but
little of the clock's, where the device computes beside it. With the loss of each step read it is 1.05 to 1.10.

| library | what | CPU, ms | `inductor`, ms | ratio |
|---|---|---|---|---|
"""


def programs() -> str:
    """The part of the page that is not made here: programs to copy."""
    _, heading, after = PAGE.read_text(encoding="utf-8").partition(PROGRAMS)
    return heading + after.partition("\n## ")[0]


def outcome(name: str, backend: str = "reference") -> tuple[str, str]:
    """The version that ran, and ``works`` or the last line of what it said."""
    command = [sys.executable, "-W", "ignore", str(HERE / "recipes.py"), name, "port"]
    environment = {**os.environ, "TORCHPORT_TEST_BACKEND": backend}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return "", f"not done after {LIMIT:.0f} s"
    if done.returncode == 0:
        return done.stdout.split()[-1], "works"
    return "", (done.stderr.strip() or "no words").splitlines()[-1]


def _works(names: list[str], backends: list[str]) -> tuple[list[str], int]:
    """The rows of the first table, and how many runs did not work."""
    rows, failed = [], 0
    for name in names:
        row = RECIPES[name]
        if absent := missing(name):
            print(f"{name:16} not installed: {', '.join(absent)}", flush=True)
            continue
        versions, cells = set(), []
        for backend in backends:
            version, what = outcome(name, backend)
            print(f"{name:16} {backend:10} {version:10} {what[:300]}", flush=True)
            versions.update({version} - {""})
            failed += what != "works"
            cells.append(what.replace("|", "/")[:200])
        known = "".join(versions) or "–"
        rows.append(f"| {row.library} | {known} | {row.title} | {' | '.join(cells)} | {row.setting or '–'} |\n")
    return sorted(rows), failed


def _speed() -> list[str]:
    rows = []
    for name, (library, made) in ROWS.items():
        found = figures(name)
        print(f"{name:30} {found}", flush=True)
        if not isinstance(found, str):
            cpu, port = found
            about = (made.__doc__ or "").rstrip(".")
            rows.append(f"| {library} | {about} | {cpu:.0f} | {port:.0f} | {port / cpu:.2f} |\n")
    return sorted(rows)


def main() -> int:
    """Print a line for each run, and write the page if all were asked for; how many do not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="instead of all of them")
    arguments = parser.parse_args()
    rows, failed = _works(arguments.names or list(RECIPES), arguments.backend or list(BACKENDS))
    if not arguments.names and not arguments.backend:
        PAGE.write_text(HEAD + "".join(rows) + programs() + SPEED + "".join(_speed()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
