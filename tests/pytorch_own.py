"""PyTorch's own tests of what lives on the CPU, with and without torchport: the same ones have to pass.

Not collected by pytest; for a person with a checkout of PyTorch, whose tests no wheel brings::

    python tests/pytorch_own.py PATH/TO/pytorch

Every file runs twice, for the CPU only, in a process of its own: once as it would without torchport
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) and once with it. A test whose outcome differs runs again on both sides, so that
one that fails now and then is not counted. Where a side ran out of time (``--limit``), the tests that it did not reach
are counted, not compared. Exits with 1 if differences are left, if tests were not reached, or if none ran.

A file of another release than the installed one can do as well: what that release lacks fails on both sides.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

FILES = {
    "test/distributed/test_data_parallel.py": "",
    "test/test_serialization.py": "",
    "test/test_torch.py": "pin_memory or pickle or deepcopy or storage or share or serial or copy",
    "test/test_dataloader.py": "",
}
"""Each file with pytest's ``-k``; an empty one means every test."""

INHERENT = {
    "test_use_pinned_memory_for_d2h": "skipped without an accelerator; this one has no allocator of pinned memory",
}
"""What has to differ, and why."""
OUTCOME = re.compile(r"^(?:\S*/)?(\S+\.py::\S+) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)", re.MULTILINE)
WITH = {"with": {}, "without": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}


def run(checkout: Path, side: str, targets: list[str], keyword: str, limit: float) -> tuple[dict[str, str], bool]:
    """The outcome of each test that ended, and whether the time sufficed for all."""
    environment = {**os.environ, **WITH[side], "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    # PyTorch's own conftest is written for the pytest that its CI pins.
    flags = ["-v", "--tb=no", "--no-header", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore"]
    flags += ["--rootdir", str(checkout / "test"), *(["-k", keyword] if keyword else [])]
    command = [sys.executable, "-m", "pytest", *flags, *targets]
    try:
        done = subprocess.run(
            command, cwd=checkout / "test", env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        said, ended = done.stdout, f"exit status {done.returncode}" if done.returncode not in (0, 1) else ""
        said += done.stderr if ended else ""
        in_time = True
    except subprocess.TimeoutExpired as late:
        in_time = False
        said, ended = (late.stdout or b"").decode(errors="replace"), f"not done after {limit:.0f} s"
    outcomes = dict(OUTCOME.findall(said))
    if ended:
        print(f"  {side} torchport: {ended}; the last lines:\n    " + "\n    ".join(said.splitlines()[-5:]), flush=True)
    return outcomes, in_time


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def compare(checkout: Path, file: str, keyword: str, limit: float) -> tuple[int, int, list[str]]:
    """How many tests ran without torchport, how many only one side had the time for, and which end otherwise."""
    target = str(Path(file).relative_to("test"))
    began = time.monotonic()
    (without, first_in_time), (with_it, second_in_time) = (
        run(checkout, side, [target], keyword, limit) for side in ("without", "with")
    )
    for name, outcomes in (("without", without), ("with", with_it)):
        print(f"  {name:8} {dict(sorted(Counter(outcomes.values()).items()))}", flush=True)
    found = differences(without, with_it)
    not_reached = 0
    if not (first_in_time and second_in_time):
        kept = [name for name in found if name in without and name in with_it]
        found, not_reached = kept, len(found) - len(kept)
        print(f"  {not_reached} tests were reached on one side only", flush=True)
    for _ in range(2):
        if not found:
            break
        again = [str(Path(target).parent / name) for name in found]
        (first, _), (second, _) = (run(checkout, side, again, "", limit) for side in ("without", "with"))
        found = [name for name in found if first.get(name) != second.get(name)]
        without.update(first)
        with_it.update(second)
    for name in found:
        reason = INHERENT.get(name.rpartition("::")[2], "")
        print(f"  {name}: {without.get(name)} without, {with_it.get(name)} with {reason and f'({reason})'}", flush=True)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return len(without), not_reached, [name for name in found if name.rpartition("::")[2] not in INHERENT]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="PyTorch's sources, at the release that is installed if possible")
    parser.add_argument("--only", action="append", metavar="FILE", help=f"one of {', '.join(FILES)}")
    parser.add_argument("--keyword", help="pytest's -k for every file, instead of the file's own")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds for one file on one side")
    arguments = parser.parse_args()
    ran, missed, differing = 0, 0, 0
    for file in arguments.only or FILES:
        print(file, flush=True)
        keyword = FILES.get(file, "") if arguments.keyword is None else arguments.keyword
        count, not_reached, found = compare(arguments.checkout, file, keyword, arguments.limit)
        ran += count
        missed += not_reached
        differing += len(found)
    print(f"{ran} tests, {differing} differences, {missed} not reached on both sides")
    return int(differing > 0 or missed > 0 or not ran)


if __name__ == "__main__":
    sys.exit(main())
