"""No call of PyTorch's public tensor API on a tensor of the device kills or hangs the process.

The calls (``walk_calls.py``) are made in subprocesses, many in each. A process says which call it is about to make, so
when it dies of a signal, or is silent for too long, that call is the culprit and the rest go on in a new process.
As a script: ``python tests/backends/lazy/test_walk.py [regular expression]`` prints culprits, and counts of what came.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

DEVICE = os.environ.get("TORCHPORT_TEST_DEVICE", "port")
BACKEND = os.environ.get("TORCHPORT_TEST_BACKEND", "reference")
SILENCE = 60.0
SCRIPT = Path(__file__).parents[1] / "support" / "walk_calls.py"
KINDS = ["special", "member", "storage", "method", "function"]


def names(pattern: str) -> list[str]:
    """The names of the calls that match."""
    code = f"import sys, json; sys.path.insert(0, {str(SCRIPT.parent)!r}); import walk_calls; "
    code += "print(json.dumps(list(walk_calls.calls())))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [name for name in json.loads(done.stdout.splitlines()[-1]) if re.search(pattern, name)]


def _listen(process: subprocess.Popen[bytes], outcomes: dict[str, str]) -> tuple[str | None, bool]:
    """Read what the process reports until it ends or is silent: the call it was in, and whether it was silent."""
    assert process.stdout is not None
    current, text, heard = None, b"", time.monotonic()
    while True:
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        if not ready:
            if time.monotonic() - heard > SILENCE:
                return current, True
            continue
        heard = time.monotonic()
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return current, False
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            what, name, *outcome = json.loads(line)
            current = name if what == "begin" else None
            if outcome:
                outcomes[name] = outcome[0]


def walk(todo: list[str], device: str = DEVICE) -> tuple[dict[str, str], dict[str, str]]:
    """What came of each call, and the culprits with how the process ended and its last words."""
    outcomes: dict[str, str] = {}
    culprits: dict[str, str] = {}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), device, BACKEND]
    while todo:
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryFile() as words,
            tempfile.TemporaryFile() as given,
        ):
            given.write(json.dumps(todo).encode())
            given.seek(0)
            process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=words, cwd=folder)
            with process:
                current, silent = _listen(process, outcomes)
                process.kill()
            words.seek(0)
            last = words.read().decode(errors="replace")[-3_000:]
        done = current in todo
        if current is None and (process.returncode == 0 or todo[-1] in outcomes):
            break
        if not done:
            raise RuntimeError(f"the process ended ({process.returncode}) outside any call:\n{last}")
        assert current is not None
        ended = f"silent for {SILENCE:.0f} s" if silent else f"exit code {process.returncode}"
        culprits[current] = f"{ended}\n{last}"
        todo = todo[todo.index(current) + 1 :]
    return outcomes, culprits


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "function" else []) for kind in KINDS]
)
def test_no_call_kills_the_process(kind: str) -> None:
    todo = names(f"^{kind} ")
    assert len(todo) > 100
    outcomes, culprits = walk(todo)
    assert not culprits, f"{len(culprits)} calls kill or hang the process: {list(culprits)}\n{_first(culprits)}"
    assert set(outcomes) == set(todo)
    if kind != "storage":  # nothing about the memory of a device tensor has a value
        assert sum(outcome == "value" for outcome in outcomes.values()) > 50


def _first(culprits: dict[str, str]) -> str:
    return "\n\n".join(f"{name}: {words}" for name, words in list(culprits.items())[:3])


def test_the_walk_notices_a_signal_and_a_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(
        "import ctypes, json, sys, time\n"
        "for name in json.loads(sys.stdin.read()):\n"
        "    print(json.dumps(['begin', name]), flush=True)\n"
        "    if name == 'dies': ctypes.string_at(0)\n"
        "    if name == 'hangs': time.sleep(60)\n"
        "    print(json.dumps(['end', name, 'value']), flush=True)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", script)
    monkeypatch.setattr(sys.modules[__name__], "SILENCE", 2.0)
    outcomes, culprits = walk(["a", "dies", "b", "hangs", "c"])
    assert set(outcomes) == {"a", "b", "c"}
    assert set(culprits) == {"dies", "hangs"}
    assert culprits["dies"].startswith("exit code -")
    assert culprits["hangs"].startswith("silent")


def main(pattern: str) -> int:
    """Print the culprits, and what came of the other calls."""
    outcomes, culprits = walk(names(pattern))
    for name, words in culprits.items():
        frames = [line.strip() for line in words.splitlines() if line.strip().startswith("File")]
        print(f"{name:50} {words.splitlines()[0]}  {' < '.join(frames[:3])[:300]}")
    counts = Counter(re.sub(r"\d+", "N", outcome)[:100] for outcome in outcomes.values())
    for outcome, count in counts.most_common(40):
        print(f"{count:7}  {outcome}")
    print(f"{len(culprits)} culprits, {len(outcomes)} survived")
    return int(bool(culprits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
