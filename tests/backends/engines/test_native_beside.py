"""torchport's C++ libraries are built beside the first compilation of ``xla`` on an accelerator, and otherwise by the
compiler's process once it has answered."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import normal_form

from torchport import native
from torchport.backends.xla import XlaBackend
from torchport.core.config import config
from torchport.core.specs import CompileSpecs
from torchport.native import beside

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())


class Library:
    """A library whose building takes until somebody lets it end."""

    def __init__(self, place: Path, built: bool = False) -> None:
        self.place, self.built, self.builds = place, built, 0
        self.goes_on = threading.Event()

    def is_built(self) -> bool:
        return self.built

    def folder(self) -> Path:
        return self.place

    def build(self, compiler: Any, include: Any) -> None:
        assert compiler == ["/bin/sh"]
        self.builds += 1
        assert self.goes_on.wait(60)
        self.built = True


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Library]]:
    """Two libraries in the place of ours, one of them built; ``/bin/sh`` for a compiler."""
    made = [Library(tmp_path, built=True), Library(tmp_path)]
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(beside.shutil, "which", lambda name: "/bin/sh" if name == "sh" else None)
    monkeypatch.setattr(native, "libraries", lambda: made)
    monkeypatch.setattr(beside, "_started", [])
    yield made
    for library in made:
        library.goes_on.set()


def _compile(on_an_accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Compile once; whether the libraries were built, each time that they were put to use."""
    announced: list[list[bool]] = []
    monkeypatch.setattr(native, "announce", lambda: announced.append([one.is_built() for one in native.libraries()]))
    made = XlaBackend()
    if on_an_accelerator:
        import dataclasses

        made.__dict__["capabilities"] = dataclasses.replace(made.capabilities, donation=True)
    made.preprocess(normal_form(lambda x: x + 1, [torch.ones(3)])[0], CompileSpecs())
    return announced


def test_an_accelerators_first_compilation_builds_what_is_missing_and_waits_for_nothing(
    libraries: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _compile(True, monkeypatch) == [[True, False]]
    (thread,) = beside._started
    assert thread.daemon
    libraries[1].goes_on.set()
    thread.join(60)
    assert _compile(True, monkeypatch) == [[True, True]]
    assert [one.builds for one in libraries] == [0, 1]
    assert beside._started == [thread]


def test_the_cpu_builds_nothing(libraries: list[Library], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compile(False, monkeypatch) == []
    assert not beside._started


def test_settings_and_machines_without_a_compiler_build_nothing(
    libraries: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(config, "native", False)
        beside.build_beside()
    monkeypatch.setattr(beside.shutil, "which", lambda name: None)
    beside.build_beside()
    assert not beside._started


def test_one_process_builds_them(libraries: list[Library], tmp_path: Path) -> None:
    with open(tmp_path / "building", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        beside.build_beside()
        (thread,) = beside._started
        thread.join(60)
    assert [one.builds for one in libraries] == [0, 0]
    assert not libraries[1].built


PROGRAM = """
import time, torch, torchport
from torchport import native
from torchport.run.worth import costs

torchport.use("xla")
x = torch.ones(8, 8, device="port")

def step():
    y = x
    for _ in range(12):
        y = torch.tanh(y @ x) + 0.5
    return y.sum().item()

first = step()
assert not native.follow.is_built()
with costs.ignored():
    for _ in range(8):
        step()
    torchport.compiled(wait=True)
    step()
end = time.monotonic() + 300
while not all(library.is_built() for library in native.libraries()) and time.monotonic() < end:
    time.sleep(0.2)
native.announce()
print([library.source.name for library in native.libraries() if library.load() is None])
assert abs(step() - first) < 1e-3
"""


@pytest.mark.slow  # it compiles them: a minute
@pytest.mark.skipif(beside._compiler() is None, reason="there is no C++ compiler")
def test_a_program_that_has_something_compiled_gets_them(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TORCHPORT_TIERS": "auto"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]"]
