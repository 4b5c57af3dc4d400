"""Runs one of PyTorch's own device-generic test files, unmodified, on a backend.

``python -m torchport.testing.pytorch BACKEND test_view_ops.py [unittest arguments]``. PyTorch's
``instantiate_device_type_tests`` makes a class per device type; only ours is made here (``…PRIVATEUSE1``).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .target import load_backend

__all__ = ["main", "run_test_file"]


def run_test_file(backend: str, path: str | Path, arguments: Sequence[str] = ()) -> None:
    """Run a test file as a program, on ``port`` bound to the backend. Ends the process as the file does."""
    # PyTorch reads it when the test file asks for device classes.
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = "privateuse1"
    import torch

    import torchport  # on demand: public names are looked up when they are used

    torchport.use(load_backend(backend).name)
    torch.zeros(1, device="port").cpu()  # the device is in use, so PyTorch counts it among those to test
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns 2 if it is wrong."""
    if len(arguments) < 2 or not Path(arguments[1]).is_file():
        print("usage: python -m torchport.testing.pytorch BACKEND TEST_FILE [unittest arguments]", file=sys.stderr)
        return 2
    run_test_file(arguments[0], arguments[1], arguments[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
