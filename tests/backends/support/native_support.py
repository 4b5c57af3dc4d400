"""What tests of the C++ libraries share: the compiler, and what a program says with and without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import torchport
from torchport import native
from torchport.core.config import config

__all__ = ["COMPILER", "compiles", "said_without_and_with", "with_libraries"]

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@contextmanager
def with_libraries(**settings: Any) -> Iterator[None]:
    """Inside of the block ``reference`` computes with the C++ libraries, and nothing is pending before and after.

    ``settings``: of :data:`torchport.config`; operators are interpreted if they say nothing else.
    """
    native.build_all([str(COMPILER)])
    assert native.follow.load() is not None, "it was not built: see the log"
    torchport.use("reference")
    torchport.sync()
    with config.override(**{"tiers": "auto", **settings}):
        yield
    torchport.sync()


def said_without_and_with(program: str) -> list[list[str]]:
    """The lines that a program prints in a process without the libraries, and in one with them."""
    said = []
    for wanted in ("0", "1"):
        environment = {**os.environ, "TORCHPORT_NATIVE": wanted}
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    return said
