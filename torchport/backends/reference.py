"""``reference``: runs a graph node by node with PyTorch's CPU operators. Its results are the semantics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchport.backend.host import register_host_kernels
from torchport.backend.interface import (
    Backend,
    BackendData,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    KernelRegistrar,
    Processed,
    TensorData,
)
from torchport.backend.serialize import decode, encode
from torchport.core.specs import CompileSpecs, TensorSpec

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Every operator PyTorch's CPU has; compiled bytes are the graph itself, as JSON."""

    name = "reference"
    version = "1"

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        register_host_kernels(registrar)

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return Processed(encode(graph))

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Callable[..., Any]:
        module = decode(processed.data)
        processed.free()
        return module.forward

    def execute(
        self, handle: Callable[..., Any], args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        tensors = [arg.tensor for arg in args if isinstance(arg, TensorData)]
        with torch.no_grad():
            results = handle(*tensors)
        return [TensorData(context.device, TensorSpec.of(result), result) for result in results]
