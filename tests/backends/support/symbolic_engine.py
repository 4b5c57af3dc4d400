"""A backend whose computations may serve several sizes: it runs the graphs that it is given, and counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from torchport.backend.interface import (
    BackendData,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    Processed,
    TensorData,
)
from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import CompileSpecs, TensorSpec

__all__ = ["Symbolic"]


class Symbolic(ReferenceBackend):
    """As ``reference``, but a graph with symbols is kept as it is; ``limit``: it asks whether sizes are above that."""

    name = "symbolic"
    capabilities = Capabilities(skips_cache=True)
    limit: ClassVar[int] = 0
    asked: int = 0
    refuses: ClassVar[str] = ""
    loads_none: ClassVar[bool] = False
    """Whether ``init`` takes no graph with symbols."""
    graphs: ClassVar[list[fx.GraphModule]] = []
    exact: ClassVar[list[fx.GraphModule]] = []
    destroyed: ClassVar[list[Any]] = []

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        self.exact.append(graph)
        return super().preprocess(graph, specs)

    def preprocess_symbolic(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        if self.refuses:
            raise ValueError(self.refuses)
        if self.limit:  # as a compiler that chooses its code by the size
            for node in graph.graph.find_nodes(op="placeholder"):
                self.asked += sum(
                    bool(size > self.limit) for size in node.meta["val"].shape if size.__class__ is not int
                )
        self.graphs.append(graph)
        return Processed(b"symbolic %d" % (len(self.graphs) - 1))

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        if bytes(processed.data[:8]) != b"symbolic":
            return super().init(processed, specs, context)
        if self.loads_none:
            raise ValueError("no memory for as much")
        return "base", self.graphs[int(bytes(processed.data[9:]))], context.outputs

    def resized(self, handle: Any, context: InitContext) -> Any:
        return "resized", handle[1], context.outputs

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        if not isinstance(handle, tuple):
            return super().execute(handle, args, context)
        kind, graph, outputs = handle
        assert kind == "resized", "the computation for other sizes was called"
        with torch.no_grad():
            results = graph(*[arg.tensor for arg in args if isinstance(arg, TensorData)])
        made: list[BackendData] = []
        for result, spec in zip(results, outputs, strict=True):
            assert TensorSpec.of(result) == spec
            made.append(TensorData(context.device, spec, result))
        return made

    def destroy(self, handle: Any) -> None:
        self.destroyed.append(handle)
