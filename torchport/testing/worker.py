"""A worker process: says which case it is about to run, runs it, sends what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import signal
import sys
import time
import warnings
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final

from ..core.config import config
from .frontends import FRONTENDS, available_frontends
from .judge import Judge
from .limits import limits_of
from .plan import Plan, Unit
from .subjects import catalogue
from .target import load_backend

__all__ = ["list_everything", "quiet", "work"]


_PR_SET_PDEATHSIG: Final = 1
"""``linux/prctl.h``."""


def _end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, however that comes: it may be at a case that hangs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def quiet(log: str) -> Any:
    """Send what engines print to a file, and the Python stack of a crash too."""
    try:
        file = open(log, "w", buffering=1)  # noqa: SIM115 - open as long as the process lives
    except FileNotFoundError:
        os._exit(1)  # the run was ended, and its folder removed, before this process began
    _end_with_parent()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    faulthandler.enable(file)
    # A lock that an engine's process leaves behind when it crashes is cleaned up by a tracker of its own: the parent's
    # would warn about it when the run is over.
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = None
    warnings.simplefilter("ignore")
    return file


def list_everything(pipe: Connection, target: str, log: str) -> None:
    """Send the catalogue, the frontends (with why one is missing), and a description of the backend; or the error."""
    quiet(log)
    try:
        import torch

        import torchport  # on demand: public names are looked up when they are used

        backend = load_backend(target)
        described = {
            "name": backend.name,
            "version": backend.version,
            "class": f"{type(backend).__module__}.{type(backend).__qualname__}",
            "torch": torch.__version__,
            "torchport": torchport.__version__,
        }
        limits = {name: frontend.limit for name, frontend in FRONTENDS.items()}
        pipe.send(("catalogue", catalogue(), available_frontends(), limits, described))
    except Exception as error:
        pipe.send(("error", type(error).__name__, str(error)))
    pipe.close()
    os._exit(0)


def work(pipe: Connection, plan: Plan, log: str) -> None:
    """Take ``(unit, first position)`` until ``None`` comes; answer with announcements, results and the unit's end."""
    file = quiet(log)
    try:
        import torch

        torch.set_num_threads(1)
        config.tiers = "off"  # else it is the interpreter that is judged
        backend = load_backend(plan.backend)
        limits = limits_of(backend, plan.limits)
        judge = Judge(backend, plan.backend, seed=plan.seed, strict=plan.strict, limits=limits)
        pipe.send(("ready",))
        while (given := pipe.recv()) is not None:
            unit, first = given
            file.seek(0)
            file.truncate()
            _run_unit(pipe, judge, unit, first)
            pipe.send(("end", unit.key, time.process_time()))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send(("error", type(error).__name__, str(error)))
    pipe.close()
    # Not through the interpreter's end: an engine that crashes in its destructors would spoil a finished run.
    os._exit(0)


def _run_unit(pipe: Connection, judge: Any, unit: Unit, first: int) -> None:
    known: tuple[Any, Any] = (None, None)
    for position, (case, subject, sample) in enumerate(judge.cases(unit)):
        if position < first:
            continue
        pipe.send(("case", position, case))
        same = dataclasses.replace(case, frontend="")
        if known[0] != same:
            # One answer of the CPU serves all frontends; it is compared with, never written to.
            known = (same, judge.truth(case, subject, sample))
        pipe.send(("result", position, judge.run(case, subject, sample, known[1])))
