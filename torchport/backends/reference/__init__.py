"""``reference``: runs a graph node by node with PyTorch's CPU operators. Its results are the semantics.

:mod:`.order` decides in which order and :mod:`.in_place` which results go where an argument was, so that little memory
is needed; :mod:`.program` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchport.backend.container import check_interface
from torchport.backend.host import register_host_kernels
from torchport.backend.interface import (
    Backend,
    BackendData,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    KernelRegistrar,
    Processed,
    TensorData,
)
from torchport.backend.own_kernels import kernels_of
from torchport.backend.serialize import check_calls, decode, encode
from torchport.core.specs import CompileSpecs, TensorSpec

from .in_place import check_writes, write_over
from .order import reordered
from .program import Run, make_run

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Every operator PyTorch's CPU has; compiled bytes are the graph itself, as JSON.

    What it is given and nobody else holds is freed where it was last used.
    """

    name = "reference"
    version = "1"
    capabilities = Capabilities(
        donation=True, restores_donated=True, holds_kernels=True, slow_to_compile=True, skips_cache=True
    )

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        register_host_kernels(registrar)

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        made = reordered(graph)
        write_over(made)
        return Processed(encode(made))

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Run:
        module = decode(processed.data)
        processed.free()
        check_calls(module)
        check_writes(module)
        nodes: Any = module.graph
        inputs = [node.meta["spec"] for node in nodes.find_nodes(op="placeholder")]
        check_interface("reference", inputs, len(nodes.output_node().args[0]), context)
        return make_run(module, {op: own.fn for op, own in kernels_of(self.name).items()})

    def execute(self, handle: Run, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        values = [arg.tensor for arg in args if isinstance(arg, TensorData)]
        held: list[tuple[Any, torch.Tensor | None]] = []
        for position in context.donated:
            data: Any = args[position]
            held.append((data, data.tensor))
            data.tensor = None
        try:
            with torch.no_grad():
                results = handle(values, held)
        except BaseException:
            for data, tensor in held:  # where an operator failed, others may still be run on these
                data.tensor = tensor
            raise
        return [TensorData(context.device, TensorSpec.of(result), result) for result in results]
