"""C++ libraries in the place of slower Python functions: built once per machine, where there is a compiler.

Nothing depends on them. Whoever compiles C++ anyway (the ``inductor`` backend) builds them; later processes find them.
Each has a Python form that does the same, which is what runs on a machine without a compiler or Python's headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from ..core.compilers import run_compiler, side_by_side
from ..core.config import config
from ..core.forks import guarded_rlock

__all__ = ["NativeLibrary", "announce", "build_all", "flush", "follow", "guard", "state"]

log: Final = logging.getLogger("torchport.native")
_lock: Final = guarded_rlock()
_FOLDER: Final = Path(__file__).parent
WARNINGS: Final = ("-Wall", "-Wextra", "-Wno-missing-field-initializers")
"""Python's type objects are made with most of their fields left out. A test compiles with ``-Werror``."""
Use = Callable[[ctypes.PyDLL], object]


class NativeLibrary:
    """A C++ source file of torchport's, and the shared library it becomes.

    ``links``: PyTorch's libraries that it uses. Python's headers are needed if ``torch_python`` is among them.
    """

    def __init__(self, source: Path, links: Sequence[str]) -> None:
        self.source = source
        self.links = tuple(links)
        self._waiting: list[Use] = []
        self._loaded: ctypes.PyDLL | None = None
        self.failure = ""
        _all.append(self)

    @functools.cached_property
    def path(self) -> Path:
        """Where the library is: its name hashes source, torch, Python and platform.

        In a folder of the user's own: where Inductor keeps things is not known before it is imported.
        """
        shared = [header.read_text() for header in sorted(self.source.parent.glob("*.h"))]
        parts = [self.source.read_text(), *shared, torch.__version__, sys.version, sysconfig.get_platform()]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        return Path(tempfile.gettempdir()) / f"torchport-{os.getuid()}" / f"{self.source.stem}-{digest}.so"

    def when_there(self, use: Use) -> None:
        """Call ``use`` with the library: now, or once it has been built in this process."""
        with _lock:
            found = self.load()
            if found is None:
                self._waiting.append(use)
        if found is not None:
            use(found)

    def is_built(self) -> bool:
        """Whether the library is there and nobody else can have put it there or change it."""
        return _is_ours(self.path.parent, stat.S_ISDIR) and _is_ours(self.path, stat.S_ISREG)

    def load(self) -> ctypes.PyDLL | None:
        """The library, if it is there and ``config.native`` allows it."""
        if self._loaded is None and sys.platform == "linux" and config.native and self.is_built():
            with contextlib.suppress(OSError):
                self._loaded = ctypes.PyDLL(str(self.path))
        return self._loaded if config.native else None

    def build(self, compiler: Sequence[str], include: Path) -> None:
        """Build it if it is not there. What cannot be built is done without; the log of this module says why."""
        try:
            errors = self._build(compiler, include)
        except OSError as error:
            errors = str(error)
        self.failure = errors
        if errors:
            log.info("%s was not built, Python does its work: %s", self.source.name, errors)

    def _build(self, compiler: Sequence[str], include: Path) -> str:
        """What went wrong."""
        if "torch_python" in self.links and not (include / "Python.h").exists():
            return f"Python's headers are not in {include}"
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder, stat.S_ISDIR):
            return f"others can write to {folder}"
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-", ignore_cleanup_errors=True) as private:
            made = Path(private) / self.path.name
            command = [*self.command(compiler, include), "-o", str(made)]
            status, output = run_compiler(command)
            if status != 0:
                return output[-2_000:] or f"the compiler ended with {status}"
            made.chmod(0o700)
            made.replace(self.path)
        return ""

    def state(self) -> str:
        """Whether it is there, and if not, why, as far as this process has tried."""
        if self.is_built():
            return f"built: {self.path}" if self.load() is not None else f"built, but does not load: {self.path}"
        if self.failure:
            return f"could not be built: {self.failure}"
        return "not built yet: the first computation on the inductor backend builds it, where there is a compiler"

    def command(self, compiler: Sequence[str], include: Path) -> list[str]:
        """The compiler's command line, less where the library goes; ``include`` is where Python's headers are."""
        torch_home = Path(torch.__file__).parent
        includes = [include, torch_home / "include", torch_home / "include/torch/csrc/api/include"]
        return [
            *compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", *WARNINGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(part for folder in includes for part in ("-isystem", str(folder))),
            str(self.source), f"-L{torch_home / 'lib'}", *(f"-l{name}" for name in self.links),
        ]  # fmt: skip

    def announce(self) -> None:
        """Give the library, if it is there, to those who wait for it."""
        found = self.load() if self._waiting else None
        if found is not None:
            waiting, self._waiting = self._waiting, []
            for use in waiting:
                use(found)


def _is_ours(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether something is of a kind, the user's own, and for others to read only. Links are not followed."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and kind(status.st_mode)


_all: Final[list[NativeLibrary]] = []
_tried: Final[set[NativeLibrary]] = set()


def state() -> list[tuple[str, str]]:
    """Each library's name, and whether it is used, or why Python does its work."""
    if sys.platform != "linux":
        return [("all", f"not used: on {sys.platform} Python does their work")]
    if not config.native:
        return [("all", "not used: config.native is off (TORCHPORT_NATIVE)")]
    return [(library.source.name, library.state()) for library in _all]


def libraries() -> list[NativeLibrary]:
    """Every library that is known: those of engines once they are imported."""
    return list(_all)


def build_all(compiler: Sequence[str]) -> None:
    """Build, side by side, what is not there, and use what is; each is tried once per process."""
    if not config.native or sys.platform != "linux":
        return
    with _lock:
        missing = [library for library in _all if library not in _tried and not library.is_built()]
        _tried.update(missing)
        if missing:
            include = Path(sysconfig.get_paths()["include"])
            side_by_side(functools.partial(library.build, compiler, include) for library in missing)
        for library in _all:
            library.announce()


def announce() -> None:
    """Use what another process has built meanwhile."""
    if config.native and sys.platform == "linux":
        with _lock:
            for library in _all:
                library.announce()


guard: Final = NativeLibrary(_FOLDER / "guard.cpp", ("c10",))
"""The device guard: ``torchport_use_guard()``."""

flush: Final = NativeLibrary(_FOLDER / "flush.cpp", ("torch_python", "torch_cpu", "c10"))
"""Handles of a trace that ends, and gradients: ``torchport_alive``, ``_sweep``, ``_pending``, ``_forget``,
``_unshared`` and ``_own_gradients``, once ``_flush_start`` was called."""

follow: Final = NativeLibrary(_FOLDER / "follow.cpp", ("torch_python", "torch_cpu", "torch", "c10"))
"""Kernels along known paths: ``torchport_follow``, ``_follow_same_value`` and ``_follow_out``, once ``_follow_start``
was called, and ``torchport_followed``."""
