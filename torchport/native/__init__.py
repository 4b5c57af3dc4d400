"""C++ libraries that replace slower Python functions: built once per machine, where there is a compiler.

Nothing depends on the libraries. The ``inductor`` backend, which compiles C++ anyway, builds them; later processes find
them. Every function has a Python form, which runs on a machine without a compiler or Python's headers.
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
"""Without the warning about missing fields, since Python's type objects leave most out. A test adds ``-Werror``."""
FLAGS: Final = (
    "-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fno-plt", "-fvisibility-inlines-hidden",
    "-ftree-vectorize", "-fno-math-errno", "-ffp-contract=off",
)  # fmt: skip
"""The last two of the first line spare calls of PyTorch's functions, inline ones too, a jump through a table. The
processor's cache for code holds little more than what an operator takes, so code that is not fetched counts. With the
second line, loops (``arithmetic.h``) compute several numbers at a time, rounded where they say."""
OPENMP: Final = "-fopenmp"
"""For GNU's compiler: PyTorch's ``parallel_for`` is in its headers, and takes one thread without. Code of other
compilers would ask a second library for threads, one that PyTorch does not use."""
Use = Callable[[ctypes.PyDLL], object]


class NativeLibrary:
    """One C++ source file and the shared library that is built from it.

    ``links``: the PyTorch libraries to link with. Python's headers are needed if ``torch_python`` is among them.
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
        """The library's file. Its name has a hash of source, headers, the compiler's flags, torch, Python and platform.

        The folder is the user's own and not Inductor's cache, whose place is known only after importing Inductor.
        """
        folders = dict.fromkeys((_FOLDER, self.source.parent))
        shared = [header.read_text() for folder in folders for header in sorted(folder.glob("*.h"))]
        parts = [
            self.source.read_text(),
            *shared,
            *FLAGS,
            OPENMP,
            torch.__version__,
            sys.version,
            sysconfig.get_platform(),
        ]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        return Path(tempfile.gettempdir()) / f"torchport-{os.getuid()}" / f"{self.source.stem}-{digest}.so"

    def when_there(self, use: Use) -> None:
        """Call ``use`` with the library: now, or once :meth:`announce` finds it built."""
        with _lock:
            found = self.load()
            if found is None:
                self._waiting.append(use)
        if found is not None:
            use(found)

    def is_built(self) -> bool:
        """Whether the library exists, and library and folder are the user's own, with write access for nobody else."""
        return _is_ours(self.path.parent, stat.S_ISDIR) and _is_ours(self.path, stat.S_ISREG)

    def load(self) -> ctypes.PyDLL | None:
        """The loaded library; ``None`` if it is not built or does not load, or if ``config.native`` is off."""
        if self._loaded is None and sys.platform == "linux" and config.native and self.is_built():
            with contextlib.suppress(OSError):
                self._loaded = ctypes.PyDLL(str(self.path))
        return self._loaded if config.native else None

    def build(self, compiler: Sequence[str], include: Path) -> None:
        """Build the library. A failure is no error: ``failure`` and the log have it, and Python's functions stay."""
        try:
            errors = self._build(compiler, include)
        except OSError as error:
            errors = str(error)
        self.failure = errors
        if errors:
            log.info("%s was not built, Python does its work: %s", self.source.name, errors)

    def folder(self) -> Path:
        """Where it is built, made if need be. Raises ``OSError`` where others can write to it."""
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder, stat.S_ISDIR):
            raise PermissionError(f"others can write to {folder}")
        return folder

    def _build(self, compiler: Sequence[str], include: Path) -> str:
        """Build the library; returns what went wrong, or an empty string."""
        if "torch_python" in self.links and not (include / "Python.h").exists():
            return f"Python's headers are not in {include}"
        folder = self.folder()
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
        """Whether the library is built, and if not, why, as far as this process has tried to build it."""
        if self.is_built():
            return f"built: {self.path}" if self.load() is not None else f"built, but does not load: {self.path}"
        if self.failure:
            return f"could not be built: {self.failure}"
        return "not built yet: the first computation on the inductor backend builds it, where there is a compiler"

    def command(self, compiler: Sequence[str], include: Path) -> list[str]:
        """The compiler's command line without ``-o``; ``include`` is the folder of Python's headers."""
        torch_home = Path(torch.__file__).parent
        includes = [include, torch_home / "include", torch_home / "include/torch/csrc/api/include"]
        return [
            *compiler, *FLAGS, *([OPENMP] if _is_gnu(tuple(compiler)) else []), *WARNINGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(part for folder in includes for part in ("-isystem", str(folder))),
            str(self.source), f"-L{torch_home / 'lib'}", *(f"-l{name}" for name in self.links),
        ]  # fmt: skip

    def announce(self) -> None:
        """Call the functions that wait for the library (:meth:`when_there`), if it is built."""
        found = self.load() if self._waiting else None
        if found is not None:
            waiting, self._waiting = self._waiting, []
            for use in waiting:
                use(found)


@functools.cache
def _is_gnu(compiler: tuple[str, ...]) -> bool:
    """Whether a compiler is GNU's, by what it says of itself."""
    try:
        return "Free Software Foundation" in run_compiler([*compiler, "--version"])[1]
    except OSError:
        return False


def _is_ours(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether a path is of this kind, owned by the user and writable by nobody else. Links are not followed."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and kind(status.st_mode)


_all: Final[list[NativeLibrary]] = []
_tried: Final[set[NativeLibrary]] = set()


def state() -> list[tuple[str, str]]:
    """Each library's name, and whether the library is used or why Python's functions are."""
    if sys.platform != "linux":
        return [("all", f"not used: on {sys.platform} Python does their work")]
    if not config.native:
        return [("all", "not used: config.native is off (TORCHPORT_NATIVE)")]
    return [(library.source.name, library.state()) for library in _all]


def libraries() -> list[NativeLibrary]:
    """All libraries; those of a backend are among them once the backend is imported."""
    return list(_all)


def build_all(compiler: Sequence[str]) -> None:
    """Build the missing libraries side by side, once per process, and put all that are built to use."""
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
    """Put to use the libraries that another process has built meanwhile."""
    if config.native and sys.platform == "linux":
        with _lock:
            for library in _all:
                library.announce()


guard: Final = NativeLibrary(_FOLDER / "guard.cpp", ("c10",))
"""The device guard: ``torchport_use_guard()``."""

flush: Final = NativeLibrary(_FOLDER / "flush.cpp", ("torch_python", "torch_cpu", "c10"))
"""Loops over handles at a flush, and over gradients: ``torchport_alive``, ``_sweep``, ``_pending``, ``_forget``,
``_unshared``, ``_leaf_values``, ``_own_gradients``, ``_make_each`` and ``_give``. ``_flush_start`` must be called
first."""

follow: Final = NativeLibrary(_FOLDER / "follow.cpp", ("torch_python", "torch_cpu", "torch", "c10"))
"""Kernels along known paths: ``torchport_follow``, ``_follow_same_value``, ``_follow_copy`` and ``_follow_out``.
``_follow_start`` must be called first. ``torchport_direct``, after ``_direct_start``, has a kernel interpret its
operator at once. ``torchport_followed`` counts the calls that were served."""

steps: Final = NativeLibrary(_FOLDER / "steps.cpp", ("torch_python", "torch_cpu", "torch", "c10"))
"""Paths that are interpreted: ``torchport_steps`` and ``torchport_run_steps``, after ``torchport_steps_start``."""
