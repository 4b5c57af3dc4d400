"""``executorch``: ExecuTorch with the XNNPACK partitioner; a delegate's bytes are a ``.pte`` file.

``runtime.load(path).delegate_data(method, index)`` takes the ``.pte`` out, for a phone: its inputs are the delegate's,
its weights are inside. Operators that XNNPACK does not take run on ExecuTorch's portable kernels, which are plain
loops: those are supported up to a number of elements (:mod:`.portable`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from torchport.backend.engine_files import libraries_of
from torchport.backend.forked import abandon
from torchport.backend.interface import (
    Backend,
    BackendData,
    BackendDevice,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    Processed,
    Support,
    TensorData,
)
from torchport.core import releases
from torchport.core.errors import CompileError, ConfigError, DelegateError, ErrorCode
from torchport.core.specs import CompileSpecs, TensorSpec

from .portable import PORTABLE, decompositions, why_not_portable

__all__ = ["ExecuTorchBackend"]

aten = torch.ops.aten
_OPS: Final = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default,
    aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar,
    aten.neg.default, aten.abs.default, aten.exp.default, aten.sqrt.default, aten.rsqrt.default, aten.tanh.default,
    aten.sigmoid.default, aten.relu.default, aten.gelu.default, aten.hardtanh.default, aten.clamp.default,
    aten.leaky_relu.default, aten.elu.default, aten.floor.default, aten.ceil.default,
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default, aten.matmul.default,
    aten.conv1d.default, aten.conv2d.default, aten.max_pool2d.default, aten.avg_pool2d.default,
    aten._native_batch_norm_legit_no_training.default, aten._softmax.default, aten.softmax.int, aten.mean.dim,
    aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.cat.default,
    aten.slice.Tensor, aten.select.int, aten.clone.default, aten.dropout.default, aten.flatten.using_ints,
    aten.adaptive_avg_pool2d.default, aten.layer_norm.default,
}  # fmt: skip
_SHAPES: Final = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.cat.default,
    aten.slice.Tensor, aten.select.int, aten.clone.default, aten.dropout.default, aten.flatten.using_ints,
}  # fmt: skip
"""Those of them for which alone XNNPACK is not worth its partitioner, which takes most of the time of lowering."""
_RUNTIME: Final = "executorch.extension.pybindings._C"
"""The runtime itself. ``executorch.runtime`` is some classes around it, and imports the exporter: seconds."""
_FIRST_TORCH: Final = (2, 13)
"""ExecuTorch 1.5 reads PyTorch's tensors where 2.13 to 2.15 have their parts. Those of 2.11 seem to have no device."""
_POOLS: Final = {aten.avg_pool2d.default, aten.max_pool2d.default, aten.adaptive_avg_pool2d.default}
_FIRST_RESULT: Final = {aten._native_batch_norm_legit_no_training.default}
_CODE: Final = re.compile(r"error:? (?:code )?(0x[0-9a-fA-F]+)")


class ExecuTorchBackend(Backend):
    """ExecuTorch with XNNPACK, on the CPU."""

    name = "executorch"
    version = "2"
    # Bound, too, in files from before: they hold the weights a second time.
    capabilities = Capabilities(binds_constants=True, embeds_constants=True, slow_to_compile=True)

    def is_available(self) -> bool:
        return not self.unavailable_reason()

    def unavailable_reason(self) -> str:
        if importlib.util.find_spec("executorch") is None:
            return "executorch is not installed: pip install torchport[executorch]"
        if releases.version() < _FIRST_TORCH:
            needed = ".".join(map(str, _FIRST_TORCH))
            return f"executorch's library is built for tensors of PyTorch {needed} or newer, not of {torch.__version__}"
        return ""

    def supports(self, node: fx.Node) -> Support:
        if getattr(node.target, "__name__", "") == "getitem":
            return Support.yes()
        reason = _why_not_xnnpack(node) if node.target in _OPS else "neither XNNPACK nor ExecuTorch's runtime has it"
        if reason and (node.target in PORTABLE or (node.target in _OPS and node.target is not aten.gelu.default)):
            reason = why_not_portable(node)
        if reason and _is_nothing(node):
            return Support.yes()
        if not reason and node.target is aten.permute.default and not node.args[1]:
            reason = "ExecuTorch does not permute scalars"
        if not reason and node.target in _POOLS and node.meta["val"].dim() < 4:
            reason = "ExecuTorch's lowering ends for a pool of an image without a batch"
        return Support.no(reason) if reason else Support.yes()

    def decompositions(self) -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
        return decompositions()

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        if specs:
            raise ConfigError(f"executorch has no compile specs, but got {', '.join(specs)}")
        module, inputs = _with_constants(graph)
        if module is None:
            return Processed(b"")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # ExecuTorch 1.5 and torch 2.13 warn about their own code
                _export_patterns()
                if not any(node.target in _OPS - _SHAPES for node in graph.graph.nodes):
                    return Processed(_lowered(torch.export.export(module, inputs), xnnpack=False))
                try:
                    return Processed(_lowered(torch.export.export(module, inputs), xnnpack=True))
                except Exception as error:  # its passes raise this very class
                    refused = error
                data = _lowered(torch.export.export(module, inputs), xnnpack=False)
            warnings.warn(
                f"XNNPACK cannot take this graph, so ExecuTorch's portable kernels run it, which is slow: {refused}",
                RuntimeWarning,
                stacklevel=2,
            )
            return Processed(data)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise CompileError(f"ExecuTorch cannot lower this graph: {type(error).__name__}: {error}") from error

    def engine_files(self) -> Sequence[str]:
        return libraries_of("executorch", "**/*.so", "version.py")

    def cache_key(self, device: BackendDevice) -> Mapping[str, str]:
        return {}

    def forked(self) -> str:
        if _RUNTIME in sys.modules:
            abandon()  # it runs in the child, but its end would wait for the parent's threads
        return ""

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        runtime: Any = importlib.import_module(_RUNTIME)
        data = bytes(processed.data)
        processed.free()
        if not data:  # all results are without elements
            return None, None, data
        try:
            program = runtime._load_program_from_buffer(
                data, program_verification=runtime.Verification.InternalConsistency
            )
            # The program reads its weights from these bytes for as long as it lives.
            return program.load_method("forward"), program, data
        except RuntimeError as error:
            raise CompileError(f"ExecuTorch cannot load these bytes: {error}; lower again") from error

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        # Detached, since the engine knows plain tensors only, and a lent one may be a parameter.
        tensors = [arg.tensor for arg in args if isinstance(arg, TensorData) and arg.tensor is not None]
        tensors = [_plain(tensor) for tensor in tensors if tensor.numel()]
        try:
            results = iter(handle[0](tensors) if handle[0] is not None else ())
        except RuntimeError as error:
            found = _CODE.search(str(error))
            code = int(found[1], 16) if found else int(ErrorCode.INTERNAL)
            raise DelegateError(f"ExecuTorch failed: {error}", code=code) from error
        return [
            TensorData(context.device, spec, _nothing(spec) if 0 in spec.shape else _with_strides(next(results), spec))
            for spec in context.outputs
        ]


def _is_nothing(node: fx.Node) -> bool:
    """Whether all that an operator gives is without elements: made when it is run, whatever the operator is."""
    found = node.meta["val"]
    return all(
        tensor is None or (isinstance(tensor, torch.Tensor) and not tensor.numel())
        for tensor in (found if isinstance(found, (list, tuple)) else [found])
    )


def _nothing(spec: TensorSpec) -> torch.Tensor:
    """A result without elements. ExecuTorch's orders of dimensions have no room for such."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)


def _why_not_xnnpack(node: fx.Node) -> str:
    """What keeps XNNPACK from one of its operators, in words, or nothing."""
    if node.kwargs.get("approximate", "none") != "none":
        return "XNNPACK's gelu is the exact one"
    for value in (node, *node.all_input_nodes):
        found = value.meta["val"]
        # Batch norm's further results are empty, and nobody uses them.
        tensors = found[:1] if node.target in _FIRST_RESULT and value is node else found
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if tensor is not None and tensor.dtype is not torch.float32:
                return f"XNNPACK computes float32, not {tensor.dtype}"
            if tensor is not None and not tensor.numel():
                return "ExecuTorch's orders of dimensions have no room for tensors without elements"
    return ""


def _lowered(exported: torch.export.ExportedProgram, xnnpack: bool) -> bytes:
    """The ``.pte`` file, with XNNPACK for what it takes, or with portable kernels alone."""
    exir: Any = importlib.import_module("executorch.exir")
    config = exir.EdgeCompileConfig(_check_ir_validity=False)
    if xnnpack:
        partition: Any = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        partitioners = [partition.XnnpackPartitioner()]
        edge = exir.to_edge_transform_and_lower(exported, partitioner=partitioners, compile_config=config)
    else:
        edge = exir.to_edge(exported, compile_config=config)
    return bytes(edge.to_executorch().buffer)


@functools.cache
def _export_patterns() -> None:
    """Have XNNPACK's partitioner make the graphs it looks for, which it keeps, without Dynamo.

    It would export them with ``strict=True`` on first use, and Dynamo refuses to start anew while it compiles, as it
    does when ``torch.compile`` has called us.
    """
    package = "executorch.backends.xnnpack.partition.graphs"
    resizing: Any = importlib.import_module(f"{package}.bilinear_2d")
    attention: Any = importlib.import_module(f"{package}.sdpa")
    original = torch.export.export

    def export(*args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "strict": False})

    resizing.torch = types.SimpleNamespace(
        nn=torch.nn, randn=torch.randn, fx=torch.fx, export=types.SimpleNamespace(export=export)
    )
    attention.export = export
    try:
        resizing.get_graphs_dict()
        attention.get_graphs()
    finally:
        resizing.torch, attention.export = torch, original


def _with_constants(graph: fx.GraphModule) -> tuple[fx.GraphModule | None, tuple[torch.Tensor, ...]]:
    """The graph with constants as buffers, and example tensors for the inputs that remain.

    What is without elements is left out; ``None`` if that are all results.
    """
    root = torch.nn.Module()
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    inputs: list[torch.Tensor] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            results = [values[value] for value in node.args[0] if value in values]
            made.output(tuple(results))
            made.eliminate_dead_code()
            return (fx.GraphModule(root, made) if results else None), tuple(inputs)
        if _is_nothing(node):
            continue
        constant = node.meta.get("constant") if node.op == "placeholder" else None
        if isinstance(constant, torch.Tensor):
            name = f"constant_{len(values)}"
            root.register_buffer(name, constant.detach())
            values[node] = made.get_attr(name)
            continue
        values[node] = made.node_copy(node, lambda n: values[n])
        if node.target is aten.view.default:
            # ExecuTorch's tensors are contiguous: what was a view of an input with other strides may be a copy here.
            values[node].target = aten.reshape.default
        if node.op == "placeholder":
            fake = node.meta["val"]
            inputs.append(torch.zeros(tuple(fake.shape), dtype=fake.dtype))
    raise AssertionError("a graph has an output")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """With the strides of a contiguous tensor, also where it has no elements: ExecuTorch aborts otherwise."""
    return tensor.detach().contiguous() if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)


def _with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tensor.shape != spec.shape or tensor.dtype is not spec.dtype:
        raise DelegateError(f"a result should be {spec}, but is {TensorSpec.of(tensor)}; lower again")
    if tuple(tensor.stride()) == spec.strides:
        return tensor
    with torch.no_grad():
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).copy_(tensor)
