"""A backend whose bytes are worth keeping, and which notes what it compiles. Other processes can import it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from torchport.backend.interface import BackendDevice, Capabilities, FreeableBuffer, InitContext, Processed
from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import CompileSpecs

__all__ = ["InPieces", "Kept", "compiled"]

LOG = "TORCHPORT_TEST_LOG"
"""The environment variable that names a file with one line per call of ``preprocess``."""


def compiled() -> list[str]:
    """The process ids that have compiled something, in order."""
    try:
        with open(os.environ[LOG]) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


class Kept(ReferenceBackend):
    """As ``reference``, with two devices and an engine of one file."""

    name = "kept"
    capabilities = Capabilities(donation=True, restores_donated=True, compile_options={"level": "nothing"})
    engine = os.devnull
    settings: Mapping[str, str] = {}
    refuses = ""
    """Why ``init`` does not take what others have compiled."""
    grumbles = ""
    """Why ``init`` has to compile again what others have compiled."""

    def devices(self) -> Sequence[BackendDevice]:
        return (BackendDevice("cpu", 0), BackendDevice("cpu", 1))

    def engine_files(self) -> Sequence[str]:
        return [self.engine]

    def cache_key(self, device: BackendDevice) -> Mapping[str, str]:
        return self.settings

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        if os.environ.get(LOG):
            with open(os.environ[LOG], "a") as file:
                file.write(f"{os.getpid()}\n")
        return super().preprocess(graph, specs)

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        if self.refuses:
            reason, self.refuses = self.refuses, ""
            raise ValueError(reason)
        context.refused = self.grumbles
        return super().init(processed, specs, context)


class InPieces(Kept):
    """One whose compiling takes long, so that what repeats is compiled once."""

    name = "in_pieces"
    capabilities = dataclasses.replace(Kept.capabilities, fixed_compile_cost=10, slow_to_compile=True)


class Changes(Kept):
    """A backend that changes the graph it was given."""

    name = "changes"

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        made = super().preprocess(graph, specs)
        for node in graph.graph.nodes:
            if node.op == "call_function":
                node.args = (*node.args[:1], *[7 for _ in node.args[1:]])
        return made
