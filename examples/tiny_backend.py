"""A complete backend: it compiles a graph to the text of a Python function over NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

import torchport as tp

aten = torch.ops.aten
DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.bool}
NUMPY = {  # operator → the text of its value; {0}, {1}, … are its positional arguments, {shape} is its shape
    aten.add.Tensor: "{0} + {1}", aten.sub.Tensor: "{0} - {1}", aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "{0} / {1}", aten.pow.Tensor_Scalar: "{0} ** {1}", aten.neg.default: "-{0}",
    aten.exp.default: "np.exp({0})", aten.tanh.default: "np.tanh({0})", aten.relu.default: "np.maximum({0}, 0)",
    aten.le.Scalar: "{0} <= {1}", aten.where.self: "np.where({0}, {1}, {2})", aten.mean.default: "np.mean({0})",
    aten.sum.dim_IntList: "np.sum(np.atleast_1d({0}), tuple({1} or ()) or None).reshape({shape})",
    aten.mm.default: "{0} @ {1}", aten.addmm.default: "{0} + {1} @ {2}", aten.permute.default: "np.transpose({0}, {1})",
    aten.view.default: "np.reshape({0}, {shape})", aten.expand.default: "np.broadcast_to({0}, {shape})",
    aten.select.int: "np.take({0}, {2}, {1})", aten.full.default: "np.full({shape}, {1})",
    aten.full_like.default: "np.full({shape}, {1})", aten.scalar_tensor.default: "{0}", aten.clone.default: "{0}",
    aten._to_copy.default: "{0}",
}  # fmt: skip


@tp.register
class TinyBackend(tp.Backend):
    name = "tiny"

    def supports(self, node: fx.Node) -> tp.Support:
        if node.target not in NUMPY or node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
            return tp.Support.no("there is no NumPy text for it")
        dtypes = {value.meta["val"].dtype for value in (node, *node.all_input_nodes)}
        return tp.Support.yes() if dtypes <= DTYPES else tp.Support.no(f"NumPy: no {dtypes - DTYPES}")

    def preprocess(self, graph: fx.GraphModule, specs: tp.CompileSpecs) -> tp.Processed:
        *nodes, output = graph.graph.nodes
        lines = [f"def run({', '.join(node.name for node in nodes if node.op == 'placeholder')}):"]
        for node in [node for node in nodes if node.op == "call_function"]:
            shape, dtype = tuple(node.meta["val"].shape), str(node.meta["val"].dtype).removeprefix("torch.")
            value = NUMPY[node.target].format(*map(repr, node.args), shape=shape)  # repr(node) is its name
            lines.append(f"    {node.name} = np.asarray({value}, '{dtype}')")
        return tp.Processed("\n".join([*lines, f"    return {output.args[0]!r}"]).encode())

    def init(self, processed: tp.FreeableBuffer, specs: tp.CompileSpecs, context: tp.InitContext) -> Callable[..., Any]:
        namespace: dict[str, Any] = {"np": np, "inf": np.inf, "nan": np.nan}
        exec(bytes(processed.data).decode(), namespace)
        return namespace["run"]

    def execute(self, handle: Any, args: Sequence[tp.BackendData], context: tp.ExecutionContext) -> list[Any]:
        with np.errstate(all="ignore"):
            arrays = handle(*[self.from_device(value).numpy() for value in args])
        tensors = [torch.tensor(array) for array in arrays]
        return [tp.TensorData(context.device, tp.TensorSpec.of(t), t) for t in tensors]
