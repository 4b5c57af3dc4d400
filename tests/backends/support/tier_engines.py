"""A backend that another process can import, whose compiler gets into trouble as the environment says."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import time
from pathlib import Path
from typing import Any

from torch import fx

from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import CompileSpecs

__all__ = ["GO", "HOW", "TierEngine"]

HOW = "TIER_ENGINE_HOW"
"""``fine``, ``slow``, ``waits``, ``raises``, ``aborts``, ``hangs``, ``hungry`` or ``wrong`` (products become sums)."""
GO = "TIER_ENGINE_GO"
"""The file without which a compiler that ``waits`` does not go on."""


class TierEngine(ReferenceBackend):
    """``reference``, with a compiler: ``preprocess`` does what the environment variable says."""

    name = "tier_engine"
    capabilities = dataclasses.replace(ReferenceBackend.capabilities, skips_cache=False)

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Any:
        how = os.environ.get(HOW, "fine")
        if how == "slow":
            time.sleep(0.3)
        elif how == "waits":
            while not os.path.exists(os.environ[GO]):
                time.sleep(0.005)
        elif how == "raises":
            raise ZeroDivisionError("the engine divides by nothing")
        elif how == "aborts":
            os.abort()
        elif how == "hangs":
            ctypes.PyDLL(None).sleep(10_000)  # and keeps Python's lock
        elif how == "hungry":
            _take_all_memory()
        made = super().preprocess(graph, specs)
        if how == "wrong":
            return dataclasses.replace(made, data=made.data.replace(b"aten.mul.Tensor", b"aten.add.Tensor"))
        return made


def _take_all_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
    try:
        held: list[bytearray] = []
        while True:
            held.append(bytearray(32 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
