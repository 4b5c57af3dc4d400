"""Run the CPU programs in this process and print what each did, as JSON: ``python cpu_process.py [used] [NAME ...]``.

``used``: the port device is used first. What a program did is the value it returned, its exception, its warnings, and
what was written to the file descriptors of stdout and stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
MODULES = ("cpu_tensors", "cpu_training", "cpu_system")
_ADDRESS = re.compile(r"\[W\d+ [\d:.]+|0x[0-9a-f]{6,}|/tmp/\w+|(?<=pid )\d+|(?<=USDT:)[-\d: ]+")


def programs() -> dict[str, Callable[[], Any]]:
    """Every public function that one of the modules defines."""
    import importlib

    found: dict[str, Callable[[], Any]] = {}
    for name in MODULES:
        for key, value in vars(importlib.import_module(name)).items():
            if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_"):
                assert key not in found, f"two programs are called {key}"
                found[key] = value
    return found


def shown(value: Any) -> Any:
    """A value as text that is equal for equal values: tensors by every element, addresses left out."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta and value.numel() < 5000:
        kind = "" if type(value) is torch.Tensor else type(value).__name__
        return f"{kind}{value.dtype} {tuple(value.shape)} {value.detach().cpu().tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [shown(item) for item in value]
    return _ADDRESS.sub("…", repr(value))


@dataclasses.dataclass
class Written:
    text: str = ""


@contextlib.contextmanager
def captured(descriptor: int) -> Iterator[Written]:
    """What anybody writes to a file descriptor, C++ included."""
    written = Written()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = os.dup(descriptor)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield written
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.dup2(kept, descriptor)
            os.close(kept)
            file.seek(0)
            written.text = _ADDRESS.sub("…", file.read().decode(errors="replace"))


def run(program: Callable[[], Any]) -> dict[str, Any]:
    """What one program did."""
    import torch

    did: dict[str, Any] = {}
    torch.manual_seed(0)
    with captured(1) as out, captured(2) as err, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            did["value"] = shown(program())
        except BaseException as error:
            did["exception"] = f"{type(error).__name__}: {_ADDRESS.sub('…', str(error))}"
    did["warnings"] = [f"{w.category.__name__}: {_ADDRESS.sub('…', str(w.message))}" for w in warned]
    return {**did, "stdout": out.text, "stderr": err.text}


def main() -> None:
    arguments = sys.argv[1:]
    import torch

    if "used" in arguments:
        arguments.remove("used")
        assert (torch.ones(1, device="port") + 1).item() == 2
    found = programs()
    results: dict[str, Any] = {}
    for name in arguments or found:
        began = time.perf_counter()
        if "COEXIST_TIMES" in os.environ:
            print(name, file=sys.stderr, flush=True)
        results[name] = run(found[name])
        if "COEXIST_TIMES" in os.environ:
            print(f"{time.perf_counter() - began:6.2f} {name}", file=sys.stderr)
    print(json.dumps({"loaded": sorted(name for name in sys.modules if name.startswith("torchport")), "did": results}))


if __name__ == "__main__":
    main()
