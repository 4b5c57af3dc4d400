"""torchport's own C++ libraries where XLA computes on an accelerator: there a step can take as long as Python takes.

They are built in a thread beside XLA's first compilations, which take longer, and put to use when a later one ends.
On the CPU nothing is started: XLA needs the cores, and a short program would pay for what it never uses.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Final

from torchport import native
from torchport.core.compilers import side_by_side
from torchport.core.config import config

__all__ = ["build_beside", "put_to_use"]

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
    include = Path(sysconfig.get_paths()["include"])
    builds = [functools.partial(library.build, [compiler], include) for library in missing]
    thread = threading.Thread(target=side_by_side, args=(builds,), name="torchport build", daemon=True)
    _started.append(thread)
    thread.start()


def put_to_use() -> None:
    """Use what has been built by now, by this process or another."""
    native.announce()


os.register_at_fork(after_in_child=_started.clear)
