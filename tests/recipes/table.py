"""Runs every recipe in a process of its own and writes docs/ecosystem.md.

    python tests/recipes/table.py [names]

A row says what came of the run with the version that is installed here; what is not installed is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipes import RECIPES, missing

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "ecosystem.md"
LIMIT = 240.0

HEAD = """# Libraries

Typical programs of each library, run on `port` with the libraries as pip installs them. `python tests/recipes/table.py`
makes this page from the recipes in `tests/recipes/recipes.py`; `pytest tests/recipes --runslow` runs the recipes. A row
has the library's version, and what a program has to set besides the device's name.

| library | version | what | on `reference` | to set |
|---|---|---|---|---|
"""


def outcome(name: str) -> tuple[str, str]:
    """The version that ran, and ``works`` or the last line of what it said."""
    command = [sys.executable, "-W", "ignore", str(HERE / "recipes.py"), name, "port"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env={**os.environ})
    except subprocess.TimeoutExpired:
        return "", f"not done after {LIMIT:.0f} s"
    if done.returncode == 0:
        return done.stdout.split()[-1], "works"
    return "", (done.stderr.strip() or "no words").splitlines()[-1]


def main(names: list[str]) -> int:
    """Print a line for each recipe, and write the page if all were asked for; how many do not work."""
    rows, failed = [], 0
    for name in names or RECIPES:
        row = RECIPES[name]
        if absent := missing(name):
            print(f"{name:16} not installed: {', '.join(absent)}", flush=True)
            continue
        version, what = outcome(name)
        print(f"{name:16} {version:10} {what[:300]}", flush=True)
        failed += what != "works"
        said = what.replace("|", "/")[:200]
        rows.append(f"| {row.library} | {version or '–'} | {row.title} | {said} | {row.setting or '–'} |\n")
    if not names:
        PAGE.write_text(HEAD + "".join(sorted(rows)))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
