"""Small C++ libraries that do what Python does slower: built once per machine, where there is a compiler.

Nothing depends on them. Whoever compiles C++ anyway (the ``inductor`` backend) builds them; later processes find them.
Each has a Python form that does the same, which is what runs on a machine without a compiler or Python's headers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from ..config import config

__all__ = ["NativeLibrary", "build_all", "guard", "lists"]

log: Final = logging.getLogger("torchport.native")
_lock: Final = threading.Lock()
_FOLDER: Final = Path(__file__).parent
Use = Callable[[ctypes.PyDLL], object]


class NativeLibrary:
    """A C++ source file of torchport's, and the shared library it becomes.

    ``links``: PyTorch's libraries that it uses. Python's headers are needed if ``torch_python`` is among them.
    """

    def __init__(self, source: Path, links: Sequence[str]) -> None:
        self.source = source
        self.links = tuple(links)
        self._waiting: list[Use] = []
        _all.append(self)

    @functools.cached_property
    def path(self) -> Path:
        """Where the library is: its name hashes source, torch, Python and platform.

        In a folder of the user's own: where Inductor keeps things is not known before it is imported.
        """
        parts = [self.source.read_text(), torch.__version__, sys.version, sysconfig.get_platform()]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        return Path(tempfile.gettempdir()) / f"torchport-{os.getuid()}" / f"{self.source.stem}-{digest}.so"

    def when_there(self, use: Use) -> None:
        """Call ``use`` with the library: now, or once it has been built in this process."""
        found = self.load()
        if found is None:
            self._waiting.append(use)
        else:
            use(found)

    @functools.cache  # noqa: B019  (libraries live as long as the process)
    def _loaded(self) -> ctypes.PyDLL | None:
        if sys.platform != "linux" or not config.native or not self.path.exists():
            return None
        for found in (self.path, self.path.parent):
            status = found.stat()
            if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None  # put there by somebody else, or somebody else may change it
        try:
            return ctypes.PyDLL(str(self.path))
        except OSError:
            return None

    def load(self) -> ctypes.PyDLL | None:
        """The library, if it is there and ``config.native`` allows it."""
        return self._loaded()

    def is_missing(self, include: Path) -> bool:
        """Whether the library could be built and was not."""
        buildable = "torch_python" not in self.links or (include / "Python.h").exists()
        return sys.platform == "linux" and buildable and not self.path.exists()

    def build(self, compiler: Sequence[str], include: Path) -> None:
        """Build it if it is not there. What cannot be built is done without."""
        torch_home = Path(torch.__file__).parent
        includes = [include, torch_home / "include", torch_home / "include/torch/csrc/api/include"]
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix="build-", ignore_cleanup_errors=True) as private:
            made = Path(private) / self.path.name
            command = [
                *compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-w",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *(f"-I{folder}" for folder in includes),
                str(self.source), "-o", str(made), f"-L{torch_home / 'lib'}",
                *(f"-l{name}" for name in self.links),
            ]  # fmt: skip
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if done.returncode == 0:
                made.replace(self.path)
            else:
                log.warning(
                    "%s was not built, Python does its work: %s", self.source.name, done.stderr.decode()[-2000:]
                )

    def announce(self) -> None:
        """Give the library to those who wait for it."""
        self._loaded.cache_clear()  # type: ignore[attr-defined]
        found = self.load()
        if found is not None:
            waiting, self._waiting = self._waiting, []
            for use in waiting:
                use(found)


_all: Final[list[NativeLibrary]] = []
_tried: Final[set[NativeLibrary]] = set()


def build_all(compiler: Sequence[str]) -> None:
    """Build, side by side, what is not there; each is tried once per process."""
    if not config.native:
        return
    with _lock:
        include = Path(sysconfig.get_paths()["include"])
        missing = [library for library in _all if library not in _tried and library.is_missing(include)]
        if not missing:
            return
        _tried.update(missing)
        with ThreadPoolExecutor(len(missing), "torchport build") as pool:
            list(pool.map(lambda library: library.build(compiler, include), missing))
        for library in missing:
            library.announce()


guard: Final = NativeLibrary(_FOLDER / "guard.cpp", ("c10",))
"""The device guard: ``torchport_use_guard()``."""

lists: Final = NativeLibrary(_FOLDER / "lists.cpp", ("torch_python", "torch_cpu", "c10"))
"""Lists of handles and of wrappers: ``torchport_alive``, ``_inner``, ``_written`` and ``_write``."""
