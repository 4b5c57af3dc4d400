"""``inductor``: compiles a graph with PyTorch's Inductor to a shared library and calls it without Python per operator.

The four parts: :mod:`.torch_api` turns a graph into C++ (all private PyTorch APIs are there), :mod:`.build` into a
shared library, :mod:`.container` into bytes, and :mod:`.library` runs it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import traceback
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from torchport import native
from torchport.backend.container import check_interface
from torchport.backend.engine_files import environment, libraries_of
from torchport.backend.host import register_host_kernels
from torchport.backend.interface import (
    Backend,
    BackendData,
    BackendDevice,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    KernelRegistrar,
    Processed,
    Support,
    TensorData,
)
from torchport.backend.normal_form import input_specs, output_specs
from torchport.backend.optional import Chain, ChainRun, Started
from torchport.core import releases
from torchport.core.errors import CompileError, ConfigError, ExecutionError
from torchport.core.specs import CompileSpecs, TensorSpec

from . import container, machine, queue
from .chain import linked
from .library import Library

__all__ = ["InductorBackend"]

_MAX_SOURCE = 512 * 1024
"""Generated C++ up to this many compressed bytes is kept for :meth:`InductorBackend.text`."""


_BROKEN: Final[Mapping[Any, str]] = {
    torch.ops.aten.hash_tensor.default: "Inductor has no code for it, and torch 2.13's proxy executor cannot call it",
    torch.ops.aten.fractional_max_pool3d.default: "Inductor's code for it pools other windows (torch 2.13)",
}
"""Operators that compiled code gets wrong or cannot call: found by running PyTorch's OpInfo."""


_READS_ANYWAY: Final = {
    torch.ops.aten._unsafe_masked_index.default,
    torch.ops.aten._unsafe_masked_index_put_accumulate.default,
}


_READ: Final = ("TORCHINDUCTOR_", "TORCH_COMPILE_")
_NOT_COMPILED: Final = {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}
"""Environment variables that Inductor's settings begin with, and those that say only where and how fast."""


def _compiler() -> str | None:
    """The path of the C++ compiler that Inductor would call, or ``None``."""
    command = shlex.split(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return shutil.which(command[0]) if command else None


def _options(specs: CompileSpecs) -> Mapping[str, Any]:
    try:
        options = json.loads(specs.text("inductor.options", "{}"))
    except ValueError as error:
        raise ConfigError(f'compile spec "inductor.options" is not JSON: {error}') from error
    if not isinstance(options, dict):
        raise ConfigError('compile spec "inductor.options" must be a JSON object of torch._inductor.config names')
    return options


def _shape_depends_on_values(op: Any, node: fx.Node) -> bool:
    """Whether the result's shape is data; indexing has one that is not, unless an index is a mask."""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in op.tags:
        return False
    indices = [index.meta.get("val") for index in node.all_input_nodes[1:]]
    masks = [index for index in indices if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)]
    return op is not torch.ops.aten.index.Tensor or bool(masks)


def _bits_of_floats(op: Any, node: fx.Node) -> bool:
    """Whether a bitwise operator got floating-point tensors, which PyTorch refuses when it runs."""
    if not isinstance(op, torch._ops.OpOverload) or not op.name().startswith(("aten::bitwise_", "aten::__")):
        return False
    values = [value.meta.get("val") for value in node.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in values)


_MADE_OF_TENSORS: Final = {
    torch.ops.aten.full.default, torch.ops.aten.full_like.default, torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.masked_fill.Scalar, torch.ops.aten.index_fill.int_Scalar,
}  # fmt: skip


def _complex_number(op: Any, node: fx.Node) -> bool:
    """Whether an operator got a complex number that Inductor's code cannot hand on (torch 2.13).

    Those that stand for a tensor become one.
    """
    numbers = (*node.args, *node.kwargs.values())
    if op in _MADE_OF_TENSORS or not any(value.__class__ is complex for value in numbers):
        return False
    parameters = op._schema.arguments
    named = {parameter.name: parameter for parameter in parameters}
    taken = (*zip(parameters, node.args, strict=False), *((named[name], value) for name, value in node.kwargs.items()))
    return any(v.__class__ is complex and not isinstance(p.type, torch.TensorType) for p, v in taken)


def _pools_beyond_the_padding(node: fx.Node) -> bool:
    """Whether Inductor gets average pooling's gradient wrong (torch 2.13): it counts padding past the last row."""
    _, _, kernel, stride, padding, ceil_mode, count_include_pad, divisor = node.args
    short = any(isinstance(value, (list, tuple)) and len(value) == 1 for value in (kernel, stride, padding))
    return short or bool(ceil_mode and count_include_pad and divisor is None)


_SOUND_SINCE: Final = (2, 13)
"""The release of PyTorch since which what :func:`_supports` leaves to the host before is right."""
_INTEGER_DIVISIONS: Final = frozenset(
    {
        torch.ops.aten.div.Tensor_mode,
        torch.ops.aten.div.Scalar_mode,
        torch.ops.aten.floor_divide.default,
        torch.ops.aten.floor_divide.Scalar,
        torch.ops.aten.remainder.Tensor,
        torch.ops.aten.remainder.Scalar,
        torch.ops.aten.remainder.Scalar_Tensor,
        torch.ops.aten.fmod.Tensor,
        torch.ops.aten.fmod.Scalar,
    }
)


def _supports(node: fx.Node) -> Support:
    """Every operator with static shapes on dense CPU tensors: what Inductor has no code for, it calls."""
    op = node.target
    if _shape_depends_on_values(op, node):
        return Support.no(f"the shape of {op}'s result depends on values; compiled code has static shapes")
    if _bits_of_floats(op, node):
        return Support.no(f"{op} is defined for integers only; Inductor would compute with the bits of floats")
    if _complex_number(op, node):
        return Support.no(f"Inductor's code has no way to give {op} a complex number")
    if op in _BROKEN:
        return Support.no(_BROKEN[op])
    if op in _READS_ANYWAY and not node.args[0].meta["val"].numel():  # type: ignore[union-attr]
        return Support.no("Inductor's code for it reads memory that a tensor without elements does not have")
    if op is torch.ops.aten.avg_pool2d_backward.default and _pools_beyond_the_padding(node):
        return Support.no("Inductor's code for it is wrong for these arguments (torch 2.13)")
    values = [node.meta.get("val"), *(value.meta.get("val") for value in node.all_input_nodes)]
    older = releases.version() < _SOUND_SINCE
    if older and op in _INTEGER_DIVISIONS and not values[0].dtype.is_floating_point:  # type: ignore[union-attr]
        return Support.no("before PyTorch 2.13 its code ends the process where a whole number is divided by 0")
    for value in values:
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(leaf, torch.Tensor):
                continue
            if older and leaf.is_complex():
                return Support.no("before PyTorch 2.13 Inductor's code for complex values gives wrong ones")
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
                return Support.no(f"a tensor is not a plain dense one ({leaf.layout}, {leaf.dtype})")
    return Support.yes()


def _torch_api() -> Any:
    from . import torch_api  # on demand: compiling needs it, running does not

    return torch_api


def _where(error: BaseException) -> str:
    """The innermost lines that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno} ({frame.line})" for frame in frames)


class InductorBackend(Backend):
    """AOTInductor on CPU. Compile spec ``inductor.options``: a JSON object that patches ``torch._inductor.config``."""

    name = "inductor"
    version = f"6-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    capabilities = Capabilities(
        releases_gil=True,
        concurrent=True,
        slow_to_compile=True,
        seconds_per_operator=0.08,
        fixed_compile_cost=100,
        donation=True,
        restores_donated=True,
        compile_options={
            "inductor.options": "a JSON object that patches torch._inductor.config",
            "mode": "a mode of torch.compile: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs",
        },
    )

    def is_available(self) -> bool:
        return _compiler() is not None

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        register_host_kernels(registrar)

    def unavailable_reason(self) -> str:
        if self.is_available():
            return ""
        tried = os.environ.get("CXX") or "g++"
        return f"no C++ compiler: {tried!r} is not on PATH. Install one (such as Debian's g++), or set CXX to its path"

    def supports(self, node: fx.Node) -> Support:
        return _supports(node)

    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        # Compiled code reads memory as it is: lazy conjugates and negatives must be real first. Mostly they are.
        as_it_is = tensor.__class__ is torch.Tensor and not (
            tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
        )
        plain = tensor if as_it_is else tensor.detach().resolve_conj().resolve_neg()
        return TensorData(device, TensorSpec.of(plain), plain)

    def from_device(self, data: BackendData) -> torch.Tensor:
        found = queue.on_host(data) if isinstance(data, TensorData) else None
        if found is None:
            raise TypeError(f"expected TensorData with a value, got {type(data).__name__}")
        return found

    def borrow(self, tensor: torch.Tensor, spec: TensorSpec, device: BackendDevice) -> BackendData:
        # Compiled code reads its inputs, during the call only.
        return self.to_device(tensor, device) if spec.dtype.is_complex else TensorData(device, spec, tensor)

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        from . import build, torch_api  # on demand: compiling needs it, running does not

        build.import_compiler()
        options = {**torch_api.mode_options(specs.text("mode", "default")), **_options(specs)}
        try:
            made = torch_api.generate(graph, options)
            library = build.build_library(made.toolchain, made.wrapper, made.kernels, made.constants)
            native.build_all(made.toolchain.compiler)
        except (CompileError, ConfigError):
            raise
        except Exception as error:
            said = str(error) or _where(error)  # many of Inductor's assertions have no words
            raise CompileError(f"Inductor cannot compile this graph: {type(error).__name__}: {said}") from error
        source = zlib.compress("\n".join([made.wrapper.text, *made.kernels]).encode(), 6)
        artifact = container.InductorArtifact(
            library=library,
            inputs=input_specs(graph),
            outputs=output_specs(graph),
            borrowed=made.borrowed,
            overwritten=made.overwritten,
            extern_nodes=made.extern_nodes,
            platform=machine.here(native="-march=native" in made.toolchain.kernel_flags),
            source=source if len(source) <= _MAX_SOURCE else b"",
        )
        return Processed(container.encode(artifact))

    def preprocess_symbolic(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return self.preprocess(graph, specs)

    def resized(self, handle: Library, context: InitContext) -> Library:
        return handle.resized(tuple(context.inputs), tuple(context.outputs))

    def compiler_settings(self) -> Mapping[str, Any]:
        if "torch._inductor.config" not in sys.modules:
            return {}
        return _torch_api().changed_settings()

    def compiling_under(self, settings: Mapping[str, Any]) -> AbstractContextManager[object]:
        return _torch_api().settings_in_force(settings)

    def engine_files(self) -> Sequence[str]:
        compiler = _compiler()
        return [*libraries_of("torch", "lib/libtorch_cpu*", "lib/libc10.*"), *([compiler] if compiler else [])]

    def cache_key(self, device: BackendDevice) -> Mapping[str, str]:
        return environment(lambda name: name == "CXX" or (name.startswith(_READ) and name not in _NOT_COMPILED))

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Library:
        artifact = container.decode(processed.data)
        processed.free()
        reason = machine.misfit(artifact.platform)
        if reason:
            raise CompileError(f"this compiled code cannot run here: {reason}; compile again")
        check_interface("inductor", artifact.inputs, artifact.outputs, context)
        return Library(artifact)

    def execute(self, handle: Library, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        tensors = [arg.tensor for arg in args if isinstance(arg, TensorData) and arg.tensor is not None]
        if len(tensors) != len(args):
            raise ExecutionError("an argument is not a TensorData with a value")
        for position in context.donated:
            data = args[position]
            if isinstance(data, TensorData):
                data.tensor = None
        results = handle.run(tensors, given=True, donated=context.donated)
        device = context.device
        return [TensorData(device, spec, result) for spec, result in zip(handle.outputs, results, strict=True)]

    def chained(self, chain: Chain) -> ChainRun | None:
        return linked(chain)

    def should_overlap(self) -> bool | None:
        return machine.should_overlap()

    def start(self, handle: Library, args: Sequence[BackendData], context: ExecutionContext) -> Started | None:
        return queue.start(handle, args, context) if handle.starts else None

    def execute_on_host(
        self, handle: Library, tensors: list[torch.Tensor], specs: Sequence[TensorSpec], context: ExecutionContext
    ) -> Sequence[torch.Tensor]:
        return handle.run(tensors)

    def destroy(self, handle: Library | None) -> None:
        if handle is not None:
            handle.close()

    def text(self, processed: Processed) -> str:
        artifact = container.decode(processed.data)
        if artifact.source:
            return zlib.decompress(artifact.source).decode()
        return f"<a shared library of {len(artifact.library)} bytes; its source was too long to keep>"
