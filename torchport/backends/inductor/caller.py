"""The C++ that calls compiled libraries (``caller.cpp``): built once per machine, where there is a compiler.

Where it is not there, as on a machine without a compiler, :mod:`.library` makes the call through ctypes alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from torchport.core.specs import TensorSpec

__all__ = ["build", "expected_layout", "load"]

_SOURCE: Final = Path(__file__).with_suffix(".cpp")
_lock = threading.Lock()
_DTYPE_CODES: Final = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
            torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool,
        )
    )
} | {torch.bfloat16: 15}  # fmt: skip
"""c10's ``ScalarType`` numbers (``c10/core/ScalarType.h``)."""


def _path() -> Path:
    """Where the library is: its name hashes source, torch, Python and platform.

    In a folder of the user's own: where Inductor keeps things is not known before it is imported.
    """
    parts = [_SOURCE.read_text(), torch.__version__, sys.version, sysconfig.get_platform()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"torchport-{os.getuid()}" / f"caller-{digest}.so"


def build(compiler: Sequence[str]) -> None:
    """Build the library if it is not there. What cannot be built is done without: Python's headers may be missing."""
    if sys.platform != "linux":
        return
    path = _path()
    include = sysconfig.get_paths()["include"]
    if path.exists() or not (Path(include) / "Python.h").exists():
        return
    torch_home = Path(torch.__file__).parent
    includes = [include, str(torch_home / "include"), str(torch_home / "include/torch/csrc/api/include")]
    with _lock:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as private:
            made = Path(private) / "caller.so"
            command = [
                *compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-w",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *(f"-I{folder}" for folder in includes),
                str(_SOURCE), "-o", str(made), f"-L{torch_home / 'lib'}",
                "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10",
            ]  # fmt: skip
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if done.returncode == 0:
                made.replace(path)
    load.cache_clear()


@functools.cache
def load() -> Callable[..., Any] | None:
    """``(run, container, list of tensors, expected layout, number of outputs, let go) → results``, or ``None``."""
    if sys.platform != "linux":
        return None
    path = _path()
    if not path.exists() or path.stat().st_uid != os.getuid():
        return None  # not there, or put there by somebody else
    try:
        function = ctypes.PyDLL(str(path)).torchport_call
    except (OSError, AttributeError):
        return None
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.py_object, pointer, ctypes.c_int64, ctypes.c_int]
    function.restype = ctypes.py_object
    return function


def expected_layout(specs: Sequence[TensorSpec]) -> Any | None:
    """What ``caller.cpp`` compares inputs with, as an array of int64; ``None`` for a dtype it does not know."""
    numbers: list[int] = []
    for spec in specs:
        if spec.dtype not in _DTYPE_CODES:
            return None
        numbers += [_DTYPE_CODES[spec.dtype], len(spec.shape), *spec.shape, *spec.strides]
    return (ctypes.c_int64 * max(1, len(numbers)))(*numbers)
