"""The C++ libraries, built beside whatever else goes on: nobody waits for them.

``inductor`` builds them before its first computation, with the compiler that it needs itself. For other engines the
compiler's process does, once it has answered its first request, and ``xla`` on an accelerator in a thread beside its
first compilations: there a step can take as long as Python takes. A program that compiles nothing is not made to pay
for what it may never use.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Final

from .. import native
from ..core.compilers import side_by_side
from ..core.config import config

__all__ = ["build_beside"]

log: Final = logging.getLogger("torchport.native")

_STALE: Final = 3600.0
"""Seconds after which a folder that was built in is nobody's."""
_started: Final[list[threading.Thread]] = []


def _compiler() -> str | None:
    """The C++ compiler that the environment names, or the first that there is."""
    return next(
        (found for name in (os.environ.get("CXX", ""), "g++", "clang++") if (found := shutil.which(name))), None
    )


def build_beside() -> None:
    """Start to build what is missing, once in a process. What fails is no error: Python does the work."""
    if _started or not config.native or sys.platform != "linux":
        return
    compiler = _compiler()
    missing = [library for library in native.libraries() if not library.is_built()]
    if compiler is None or not missing:
        return
    thread = threading.Thread(target=_build, args=(compiler, missing), name="torchport build", daemon=True)
    _started.append(thread)
    thread.start()


def _build(compiler: str, missing: list[native.NativeLibrary]) -> None:
    """Build libraries, unless another process is at it."""
    try:
        folder = missing[0].folder()
        lock = os.open(folder / "building", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process
        include = Path(sysconfig.get_paths()["include"])
        for left in folder.glob("build-*"):  # of a process that was ended
            if left.stat().st_mtime < time.time() - _STALE:
                shutil.rmtree(left, ignore_errors=True)
        side_by_side(functools.partial(library.build, [compiler], include) for library in missing)
    except Exception as error:  # nobody waits for it, and Python does the work
        log.info("the C++ libraries were not built: %s: %s", type(error).__name__, error)
    finally:
        os.close(lock)


os.register_at_fork(after_in_child=_started.clear)
