"""PyTorch's own distributed tests, unmodified, on ``port``: a table of passed, failed, and why.

Not collected by pytest; for a person with PyTorch's tests, which no wheel brings but for those of ``c10d`` and DDP::

    python tests/pytorch_own_distributed.py [FILE...] [--keyword K] [--limit 1800]

Each file runs with its ranks as processes, by PyTorch's harness out of the installed ``torch.testing._internal``, which
``pytorch_harness`` tells of the device. Without files: the wheel's own tests of ``c10d`` and DDP, whose tensors are on
the default device. Everything talks on the loopback. Exits with 1 if a test failed that is not in :data:`KNOWN`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
RANKS = 2
OUTCOME = re.compile(r"^(\S+::\S+) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)", re.MULTILINE)
WHY = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+) - (.*)$", re.MULTILINE)

OWN = """from torch.multiprocessing import get_context
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed import distributed_test as own


class TestDistBackendWithFork(own.TestDistBackend, own.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(get_context("fork").Process)


if __name__ == "__main__":
    run_tests()
"""
"""A test file for the wheel's tests of ``c10d`` and DDP: they are a class to inherit from."""

OWN_NAME = "c10d_and_ddp"

KNOWN: dict[str, str] = {}
"""Parts of names, or of messages, of tests that do not pass, and why."""


def environment(folder: Path, kind: str) -> dict[str, str]:
    path = os.pathsep.join([str(HERE / "pytorch_harness"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTORCH_OWN_DISTRIBUTED": kind, "BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "TEMP_DIR": str(folder)}
    local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {"TORCHPORT_BACKEND": "reference", **os.environ, **own, **local, "PYTHONPATH": path}


def run(file: Path, keyword: str, limit: float, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Each test's outcome, and what those that failed said."""
    flags = ["-v", "--tb=short", "--no-header", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    flags += ["-W", "ignore", "-rfE", "--rootdir", str(file.parent), *(["-k", keyword] if keyword else [])]
    said = folder / f"{file.stem}.txt"
    with said.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *flags, file.name],
            cwd=file.parent,
            env=environment(folder, "c10d" if file.stem == OWN_NAME else "device") | {"COLUMNS": "400"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"  {file.name} was not done after {limit:.0f} s; what it did not reach is not counted", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = said.read_text(errors="replace")
    return dict(OUTCOME.findall(text)), dict(WHY.findall(text))


def reason_of(test: str, message: str) -> str:
    return next((why for part, why in KNOWN.items() if part in test or part in message), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="PyTorch's test files, of this release if possible")
    parser.add_argument("--keyword", default="", help="pytest's -k")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds for one file")
    parser.add_argument("--keep", type=Path, help="a folder for what the tests said")
    arguments = parser.parse_args()
    unexplained, rows = 0, list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{OWN_NAME}.py"
        own.write_text(OWN)
        for file in arguments.files or [own]:
            outcomes, why = run(file.resolve(), arguments.keyword, arguments.limit, folder)
            counts = Counter(outcomes.values())
            failed = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
            print(f"\n{file.name}: {dict(sorted(counts.items()))}", flush=True)
            for test in failed:
                reason = reason_of(test, why.get(test, ""))
                unexplained += not reason
                print(f"  {test.rpartition('::')[2]}: {reason or why.get(test, '')}", flush=True)
            rows.append(f"| {file.stem} | {counts['PASSED']} | {len(failed)} | {counts['SKIPPED']} |")
    print("\n| file | passed | failed | skipped |\n| --- | ---: | ---: | ---: |")
    print("\n".join(rows))
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
