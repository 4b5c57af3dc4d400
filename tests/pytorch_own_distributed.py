"""PyTorch's own distributed tests, unmodified, on ``port``: a table of passed, failed, and why.

Not collected by pytest; for a person with PyTorch's tests, which no wheel brings but for those of ``c10d`` and DDP::

    python tests/pytorch_own_distributed.py [FILE...] [--device port] [--keyword K] [--ranks 2] [--limit 1800]
                                             [--keep FOLDER]

Each file runs with its ranks as processes, by PyTorch's harness out of the installed ``torch.testing._internal``, which
``pytorch_harness`` tells of the device. Where a file names CUDA, a copy with the device's name in that word's place
runs, and the table says so; any other runs as it is. ``--device cpu`` runs it without torchport, for comparison:
``--compare FOLDER`` is what such a run has kept. Without files: the wheel's own tests of ``c10d`` and DDP, whose
tensors are on the default device. Everything talks on the loopback. Exits with 1 if a test failed that passes on the
CPU and is not in :data:`KNOWN`.
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
OUTCOME = re.compile(r"^(\S+::\S+) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)", re.MULTILINE)
SECTION = re.compile(r"^_{3,} (?:ERROR at \w+ of )?(\S+) _{3,}$", re.MULTILINE)
ERRORS = "Error|Exception|Access|UnsupportedOp|Mismatch"
WHY = re.compile(rf"^E +((?!RuntimeError: (?:Process|Thread) \d)[\w.]*(?:{ERRORS})\b.*)$", re.MULTILINE)
"""The errors of a test's section; the first one is a rank's own, where the ranks' report says that one has failed."""

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

FAILED = ("FAILED", "ERROR")
KNOWN: dict[str, str] = {
    "test_fully_shard_communication_count": "PyTorch gives the root's parameters back after the forward now",
    "test_fully_shard_backward_prefetch": "PyTorch gives the root's parameters back after the forward now",
    "test_raise_not_implemented_state_dict_if_2d": "PyTorch has it now",
    "test_tp_with_fsdp_offloading": "PyTorch gathers nothing any more where one rank has all, as here with two ranks",
    "should be materialized on CPU when enabling CPU offloading": "PyTorch's own check, newer than the test",
    "resize_ of a storage": "the older FSDP resizes storages, which have no memory in this process; fully_shard runs",
    "data_ptr of a view": "no memory in this process, and no address of a view whose start is not known",
    "has no attribute '_sleep'": "CUDA's own function",
    "active_bytes.all.peak": "the reference backend keeps no peaks of memory",
    "no sharding strategy": "PyTorch has none for the operator",
    "test_deterministic_rand_1d": "PyTorch's tracker has the generator's state now, which the test seeds by rank",
    "has no attribute 'get_seed'": "a method of PyTorch's tracker, which it has no more",
    "test_dropout_errors": "of a device PyTorch takes native_dropout, for which it reduces partial values now",
}
"""Parts of names, or of messages, of tests that do not pass, and why."""


def environment(folder: Path, kind: str, device: str, ranks: int) -> dict[str, str]:
    path = os.pathsep.join([str(HERE / "pytorch_harness"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTORCH_OWN_DISTRIBUTED": kind, "BACKEND": "gloo", "WORLD_SIZE": str(ranks), "TEMP_DIR": str(folder)}
    local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    there = {"PYTORCH_OWN_DEVICE": device, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(device != "cpu"))}
    fixed = {"TORCHPORT_BACKEND": "reference", "TORCHPORT_COMPILE_WORKERS": "0"}
    return {**fixed, **os.environ, **own, **local, **there, "PYTHONPATH": path}


def for_device(file: Path, device: str, folder: Path) -> tuple[Path, bool]:
    """The file, or a copy in ``folder`` that names ``device`` where the file names CUDA; and whether it is a copy."""
    text, count = re.subn(r"\bcuda\b", device, file.read_text())
    text = re.sub(r"\bnccl\b", "gloo" if device == "cpu" else device, text)
    text = text.replace("cpu:gloo,cpu:gloo", "gloo")
    if not count:
        return file, False
    copy = folder / file.name
    copy.write_text(text)
    return copy, True


def run(
    file: Path, device: str, ranks: int, keyword: str, limit: float, folder: Path
) -> tuple[dict[str, str], dict[str, str]]:
    flags = ["-v", "--tb=short", "--no-header", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    flags += ["-W", "ignore", "-rfE", "--rootdir", str(file.parent), *(["-k", keyword] if keyword else [])]
    said = folder / f"{file.stem}.txt"
    with said.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *flags, file.name],
            cwd=file.parent,
            env=environment(folder, "c10d" if file.stem == OWN_NAME else "device", device, ranks) | {"COLUMNS": "400"},
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
    return outcomes_in(said)


def outcomes_in(said: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Each test's outcome, and what those that failed said."""
    text = said.read_text(errors="replace")
    _, *parts = SECTION.split(text)
    why = {name: found[0] for name, part in zip(parts[::2], parts[1::2], strict=True) if (found := WHY.findall(part))}
    outcomes = dict(OUTCOME.findall(text))
    return outcomes, {test: why.get(".".join(test.split("::")[1:]), "") for test in outcomes}


def reason_of(test: str, message: str) -> str:
    return next((why for part, why in KNOWN.items() if part in test or part in message), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="PyTorch's test files, of this release if possible")
    parser.add_argument("--keyword", default="", help="pytest's -k")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="tests that want more are skipped")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds for one file")
    parser.add_argument("--keep", type=Path, help="a folder for what the tests said")
    parser.add_argument("--device", default="port", help="port, or cpu for comparison")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="what a run on the CPU has kept")
    arguments = parser.parse_args()
    unexplained, rows = 0, list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{OWN_NAME}.py"
        own.write_text(OWN)
        for given in arguments.files or [own]:
            file, is_copy = for_device(given.resolve(), arguments.device, folder)
            outcomes, why = run(file, arguments.device, arguments.ranks, arguments.keyword, arguments.limit, folder)
            there = arguments.compare and arguments.compare / f"{file.stem}.txt"
            on_cpu = outcomes_in(there)[0] if there and there.exists() else {}
            counts = Counter(outcomes.values())
            failed = [test for test, outcome in outcomes.items() if outcome in FAILED]
            as_on_cpu = [test for test in failed if on_cpu.get(test) in FAILED]
            print(f"\n{file.name}: {dict(sorted(counts.items()))}", flush=True)
            for test in failed:
                reason = "so on the CPU" if test in as_on_cpu else reason_of(test, why.get(test, ""))
                unexplained += not reason
                print(f"  {test.rpartition('::')[2]}: {reason or why.get(test, '')}", flush=True)
            cells = [counts["PASSED"], counts["SKIPPED"], len(as_on_cpu), len(failed) - len(as_on_cpu)]
            rows.append(f"| {file.stem}{' (renamed)' * is_copy} | {' | '.join(map(str, cells))} |")
    print("\n| file | passed | skipped | failed, as on the CPU | failed |\n| --- | ---: | ---: | ---: | ---: |")
    print("\n".join(rows))
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
