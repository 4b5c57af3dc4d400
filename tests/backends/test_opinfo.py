"""PyTorch's own operator samples (``op_db``, float32, forward) on the device against the CPU.

As a script it prints what fails, grouped by message::

    python tests/backends/test_opinfo.py --report                 # everything, forward
    python tests/backends/test_opinfo.py --report --limit 5       # five samples of each operator: half a minute
    python tests/backends/test_opinfo.py --report --ops '^add$' --modes function,backward --details
    python tests/backends/test_opinfo.py --rows                   # rows for opinfo_expected.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import opinfo_engine as engine
import opinfo_report as text
import pytest

DEVICE = os.environ.get("TORCHPORT_TEST_DEVICE", "port")
BACKEND = os.environ.get("TORCHPORT_TEST_BACKEND", "reference")
SHARDS = 2
SAMPLES_BY_DEFAULT = 6
LOWEST_PASS_RATE = 0.97


def results(path: Path, *arguments: str) -> list[engine.Case]:
    """What this file prints as a script, in a fresh process: workers must not be forked from one that used a device."""
    command = [sys.executable, "-W", "ignore", __file__, "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert path.exists(), f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [engine.Case(**row) for row in json.loads(path.read_text())]


def judge(cases: list[engine.Case]) -> None:
    """Fail on a failure that the table does not list, and below the required pass rate."""
    table = text.read_table()
    for row in text.stale(cases, table):
        print(f"passes now, remove it from {text.TABLE.name}: {row.op} | {row.mode} | {sorted(row.samples) or '*'}")
    new = text.unlisted(cases, table)
    assert not new, f"{len(new)} cases fail that {text.TABLE.name} does not list:\n{text.grouped(new, details=True)}"
    assert text.pass_rate(cases) >= LOWEST_PASS_RATE, text.summary(cases)


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_seeded_choice_of_samples_of_every_operator(number: int, tmp_path: Path) -> None:
    shard = ["--shard", f"{number}/{SHARDS}", "--jobs", "1"]
    cases = results(tmp_path / "cases.json", "--limit", str(SAMPLES_BY_DEFAULT), *shard)
    assert len(cases) > 2_000
    judge(cases)


@pytest.mark.slow
def test_every_sample_of_every_operator(tmp_path: Path) -> None:
    cases = results(tmp_path / "cases.json")
    assert len(cases) > 20_000
    judge(cases)
    rows = text.stale(cases, text.read_table())
    assert not rows, f"these pass now, remove them from {text.TABLE.name}: {rows}"


def test_the_table_names_operators_and_modes_that_exist() -> None:
    names = {op.formatted_name for op in engine.operators()}
    for row in text.read_table():
        assert row.op in names, f"{row.op} is no operator of op_db"
        assert row.mode in engine.MODES, f"{row.op}: no mode {row.mode}"


def main(arguments: list[str]) -> int:
    """The script mode; returns 1 if a case fails."""
    parser = argparse.ArgumentParser(description="OpInfo samples on a device, failures grouped by message")
    parser.add_argument("--report", action="store_true", help="print failures grouped by message (the default)")
    parser.add_argument("--rows", action="store_true", help="print rows for the table of known failures")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--backend", default=BACKEND)
    parser.add_argument("--ops", default="", help="regular expression on the operator's name")
    parser.add_argument("--modes", default=",".join(engine.FORWARD_MODES), help=f"of {','.join(engine.MODES)}")
    parser.add_argument("--limit", type=int, default=None, help="samples per operator (default: all)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--examples", type=int, default=6, help="operators named per group")
    parser.add_argument("--details", action="store_true", help="with a traceback per group")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th operator, from the i-th")
    parser.add_argument("--json", type=Path, help="write every case to this file")
    parser.add_argument("--strides", action="store_true", help="strides must agree, too")
    given = parser.parse_args(arguments)
    modes = tuple(given.modes.split(","))
    plan = engine.Plan(given.device, given.backend, modes, given.limit, given.strides)
    show = sys.stderr.isatty()
    shard, shards = (int(n) for n in given.shard.split("/"))
    cases = engine.run(
        engine.operators(given.ops)[shard::shards],
        plan,
        given.jobs,
        lambda done: print(f"\r{done} cases", end="", file=sys.stderr) if show else None,
    )
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    print(text.table_rows(cases) if given.rows else text.grouped(cases, given.examples, given.details))
    print(text.summary(cases), file=sys.stderr if given.rows else sys.stdout)
    return int(any(case.failed for case in cases))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
