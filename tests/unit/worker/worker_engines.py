"""A backend that another process can import, and that gets into trouble as its compile specs say."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import CompileSpecs

LIBRARY = torch.library.Library("worker_engines", "DEF")
LIBRARY.define("halved(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "halved", "CompositeExplicitAutograd")
def halved(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


class Troubled(ReferenceBackend):
    """``how``: one of the methods below; ``file`` is written once it has begun."""

    name = "troubled"
    level = 0
    """A setting of the whole process."""

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs):  # type: ignore[no-untyped-def]
        if specs.text("file"):
            with open(specs.text("file"), "a") as file:
                file.write(f"{os.getpid()}\n")
        getattr(self, specs.text("how", "fine"))(specs)
        return super().preprocess(graph, specs)

    def compiler_settings(self) -> Mapping[str, Any]:
        return {"level": self.level} if self.level else {}

    @contextmanager
    def compiling_under(self, settings: Mapping[str, Any]) -> Iterator[None]:
        before, self.level = self.level, settings.get("level", 0)
        yield
        self.level = before

    def tells(self, specs: CompileSpecs) -> None:
        raise ValueError(f"at level {self.level}")

    def fine(self, specs: CompileSpecs) -> None:
        pass

    def slow(self, specs: CompileSpecs) -> None:
        time.sleep(float(specs.text("seconds", "0.02")))

    def raises(self, specs: CompileSpecs) -> None:
        raise ZeroDivisionError("the engine divides by nothing")

    def exits(self, specs: CompileSpecs) -> None:
        os._exit(3)

    def crashes(self, specs: CompileSpecs) -> None:
        print("the engine is about to crash", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def hangs(self, specs: CompileSpecs) -> None:
        ctypes.PyDLL(None).sleep(10_000)  # and keeps Python's lock

    def hungry(self, specs: CompileSpecs) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
        try:
            held = []
            while True:
                held.append(bytearray(32 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def children(self, specs: CompileSpecs) -> None:
        """As a compiler that calls others, one of which leaves the session and has lost its parent."""
        code = "import subprocess; subprocess.Popen(['sleep', '10000'], start_new_session=True)"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
        subprocess.Popen(["sleep", "10000"])
        with open(specs.text("file"), "a") as file:
            file.write("ready\n")
        time.sleep(10_000)
