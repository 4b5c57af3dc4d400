"""torchport's C++ libraries on ``xla``: built beside the first compilation on an accelerator, and not on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_graphs import normal_form

from torchport import native
from torchport.backends.xla import XlaBackend, host_code
from torchport.core.config import config
from torchport.core.specs import CompileSpecs

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())


class Library:
    """A library whose building takes until somebody lets it end."""

    def __init__(self, built: bool = False) -> None:
        self.built, self.builds = built, 0
        self.goes_on = threading.Event()

    def is_built(self) -> bool:
        return self.built

    def build(self, compiler: Any, include: Any) -> None:
        assert compiler == ["/bin/sh"]
        self.builds += 1
        assert self.goes_on.wait(60)
        self.built = True


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Library]]:
    """Two libraries in the place of ours, one of them built; ``/bin/sh`` for a compiler."""
    made = [Library(built=True), Library()]
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(host_code.shutil, "which", lambda name: "/bin/sh" if name == "sh" else None)
    monkeypatch.setattr(native, "libraries", lambda: made)
    monkeypatch.setattr(host_code, "_started", [])
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
    (thread,) = host_code._started
    assert thread.daemon
    libraries[1].goes_on.set()
    thread.join(60)
    assert _compile(True, monkeypatch) == [[True, True]]
    assert [one.builds for one in libraries] == [0, 1]
    assert host_code._started == [thread]


def test_the_cpu_builds_nothing(libraries: list[Library], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _compile(False, monkeypatch) == []
    assert not host_code._started


def test_settings_and_machines_without_a_compiler_build_nothing(
    libraries: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(config, "native", False)
        host_code.build_beside()
    monkeypatch.setattr(host_code.shutil, "which", lambda name: None)
    host_code.build_beside()
    assert not host_code._started
