"""What tests of the C++ libraries share: the compiler, and what a program says with and without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

__all__ = ["COMPILER", "compiles", "said_without_and_with"]

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


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
