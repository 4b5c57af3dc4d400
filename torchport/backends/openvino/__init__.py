"""``openvino``: inference on Intel's OpenVINO, in float32 unless asked otherwise. Needs no PyTorch to run a program.

:mod:`.translate` writes a graph in OpenVINO's opset, by rules of this package and OpenVINO's own PyTorch front end
(:mod:`.front_end`); compiled bytes are its IR (XML and weights), which every machine
compiles for itself when it loads a program. Constants stay where the program has them: they are bound when it is
loaded, so that OpenVINO folds and packs them, and are stored once.

Compile spec ``openvino.device``: the device, ``CPU`` by default. Run-time options are OpenVINO's properties by name,
such as ``INFERENCE_NUM_THREADS``; ``INFERENCE_PRECISION_HINT`` is ``f32`` unless it is given, where OpenVINO's default
is bfloat16 on CPUs that have it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import struct
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from torchport.backend.arrays import AS_INTEGERS, tensor_to_array
from torchport.backend.engine_files import libraries_of
from torchport.backend.forked import abandon
from torchport.backend.interface import (
    ArrayData,
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
)
from torchport.core.errors import CompileError, ConfigError, DelegateError, ErrorCode
from torchport.core.forks import guarded_lock
from torchport.core.specs import CompileSpecs, TensorSpec

from .modules import openvino_module
from .steady import SteadyArguments

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["OpenVinoBackend"]

_HEADER: Final = struct.Struct("<8sQQI")
_MAGIC: Final = b"TPOVN002"
_WORDS: Final = frozenset({"int64", "float64", "complex64"})
"""Dtypes whose elements a model has as two integers of 32 bits: OpenVINO's CPU plugin has no wider ones."""


@functools.cache
def _modules() -> tuple[Any, Any]:
    """NumPy and OpenVINO, which are imported when they are first needed."""
    return importlib.import_module("numpy"), openvino_module("openvino")


_core_lock = guarded_lock()
_core: Any = None


def _the_core() -> Any:
    """The process's one ``openvino.Core``, never given up.

    Each Core gives the thread that first compiles with it an alternate signal stack, and takes it back when the Core
    goes. Where two go in another order than the reverse of their making, the thread is left with one that is unmapped,
    and the next signal that Python handles (a child's end, Ctrl-C) ends the process.
    """
    global _core
    with _core_lock:
        if _core is None:
            _core = _modules()[1].Core()
        return _core


_every_compiled: Final[weakref.WeakSet[_Compiled]] = weakref.WeakSet()


class _Compiled:
    """A compiled model with one request, for some sizes."""

    steady: SteadyArguments | None = None
    """Finds arguments that are worth being constants."""
    is_seen = True
    """Whether the shapes of its results need not be looked at."""

    def __init__(self, compiled: Any, outputs: Sequence[TensorSpec], passed: Mapping[int, int], held: Any) -> None:
        self.request = compiled.create_infer_request()
        self.passed = passed
        """Outputs that are inputs as they came. Given memory for both, OpenVINO reads the output's."""
        self.held = held
        """Memory of constants: OpenVINO does not keep alive what it is given to share."""
        self._dtypes = [output.get_element_type().to_dtype() for output in compiled.outputs]
        self._give(outputs)
        _every_compiled.add(self)

    def _give(self, outputs: Sequence[TensorSpec]) -> None:
        self.outputs = [
            (spec, spec.dtype_name if spec.dtype_name in _WORDS else dtype)
            for spec, dtype in zip(outputs, self._dtypes, strict=True)
        ]
        self.copied = [at for at, spec in enumerate(outputs) if not spec.is_contiguous]

    def resized(self, outputs: Sequence[TensorSpec]) -> _Compiled:
        """The same model and request for other sizes."""
        made = copy.copy(self)
        made._give(outputs)
        made.is_seen = False
        return made


class _Lent(ArrayData):
    """An argument whose owner may write to it between calls."""

    __slots__ = ()


def _translation() -> Any:
    """The module that writes graphs as the engine's files."""
    from . import translate  # on demand: compiling needs it, running does not

    return translate


class OpenVinoBackend(Backend):
    """OpenVINO on CPU (or the device of compile spec ``openvino.device``)."""

    name = "openvino"
    version = "4"
    capabilities = Capabilities(torch_free=True, binds_constants=True, slow_to_compile=True)

    def is_available(self) -> bool:
        return importlib.util.find_spec("openvino") is not None

    def unavailable_reason(self) -> str:
        return "" if self.is_available() else "openvino is not installed: pip install torchport[openvino]"

    def forked(self) -> str:
        if _core is None:
            return ""
        abandon(_core, *(compiled.request for compiled in _every_compiled))
        return "OpenVINO was used before the fork, and its threads stayed in the parent"

    def engine_files(self) -> Sequence[str]:
        return libraries_of("openvino", "libs/libopenvino.*", "libs/*_cpu_plugin.*", "libs/*_ir_frontend.*")

    def cache_key(self, device: BackendDevice) -> Mapping[str, str]:
        return {}

    def supports(self, node: fx.Node) -> Support:
        return _translation().supports(node)

    def decompositions(self) -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
        return _translation().decompositions()

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        _translation().register_attention_at_once(registrar)

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        unknown = sorted(set(specs) - {"openvino.device"})
        if unknown:
            raise ConfigError(f"openvino has no compile spec {unknown[0]!r}; it has: openvino.device")
        return _packed(*_translation().to_ir(graph))

    def preprocess_symbolic(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return _packed(*_translation().to_symbolic_ir(graph))

    def resized(self, handle: _Compiled, context: InitContext) -> _Compiled:
        return handle.resized(context.outputs)

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> _Compiled:
        model = _read(processed)
        held = _bind(model, context.constants)
        config = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", **dict(context.options)}
        device = specs.text("openvino.device", "CPU")
        start = perf_counter()
        try:
            compiled = _the_core().compile_model(model, device, config)
        except RuntimeError as error:
            raise CompileError(f"OpenVINO cannot compile this model: {error}") from error
        seconds = perf_counter() - start
        processed.free()
        _check_types(compiled, context)
        made = _Compiled(compiled, context.outputs, _passed(model), held)

        def bind(constants: Mapping[int, BackendData]) -> tuple[_Compiled, Collection[int]]:
            bound = model.clone()
            folded = _folded(bound, constants)
            taken = {at: data for at, data in constants.items() if at not in folded}
            held = _bind(bound, taken)
            compiled = _the_core().compile_model(bound, device, config)
            return _Compiled(compiled, context.outputs, _passed(bound), held), taken

        if not context.constants:  # a program's are constants already
            made.steady = SteadyArguments(bind, seconds)
        return made

    def borrow(self, tensor: torch.Tensor, spec: TensorSpec, device: BackendDevice) -> BackendData:
        """A tensor of somebody else's where it is: ``execute`` is done with it when it returns."""
        return _Lent(device, spec, tensor_to_array(tensor.detach().resolve_conj().resolve_neg()))

    def execute(
        self, handle: _Compiled, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        steady = handle.steady
        if steady is None or any(arg.__class__ is _Lent for arg in args):
            return self._run(handle, handle, args, context)
        bound = steady.bound(args)
        if bound is not None:
            return self._run(handle, *bound, context)
        start = perf_counter()
        results = self._run(handle, handle, args, context)
        steady.ran(args, perf_counter() - start)
        return results

    def _run(
        self, handle: _Compiled, by: _Compiled, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        """The results of ``handle`` by the model of ``by``."""
        numpy, ov = _modules()
        request = by.request
        results: list[Any] = []
        copies: list[Any] = []  # OpenVINO does not keep alive what it is given to share
        try:
            for position, arg in enumerate(args):
                array = arg.array  # type: ignore[attr-defined]
                if not array.flags.c_contiguous or not array.flags.writeable:
                    # OpenVINO takes only what could be written to, and does not write to it.
                    array = array.copy("C")
                    copies.append(array)
                request.set_input_tensor(position, ov.Tensor(_held(array), shared_memory=True))
            for position, (spec, dtype) in enumerate(handle.outputs):
                source = by.passed.get(position)
                if source is None:
                    made = numpy.empty(spec.shape, dtype)
                    request.set_output_tensor(position, ov.Tensor(_held(made), shared_memory=True))
                else:
                    made = args[source].array.copy()  # type: ignore[attr-defined]
                results.append(made)
            request.start_async()
            request.wait()
            if not handle.is_seen:
                _check_shapes(request, results)
                handle.is_seen = True
        except RuntimeError as error:
            raise DelegateError(f"OpenVINO failed: {error}", code=ErrorCode.INTERNAL) from error
        if handle.copied:
            for position in handle.copied:
                results[position] = _with_strides(results[position], context.outputs[position])
        device = context.device
        return [ArrayData(device, spec, array) for array, (spec, _) in zip(results, handle.outputs, strict=True)]

    def destroy(self, handle: _Compiled | None) -> None:
        if handle is not None:
            handle.request = handle.steady = None

    def text(self, processed: Processed) -> str:
        _, length, _, _ = _HEADER.unpack_from(processed.data)
        return bytes(processed.data[_HEADER.size : _HEADER.size + length]).decode()


def _packed(xml: bytes, weights: bytes) -> Processed:
    return Processed(_HEADER.pack(_MAGIC, len(xml), len(weights), zlib.crc32(xml + weights)) + xml + weights)


def _read(processed: FreeableBuffer) -> Any:
    """The model of compiled bytes. Raises :class:`CompileError` for anything else."""
    data = memoryview(processed.data)
    try:
        magic, length, size, checksum = _HEADER.unpack_from(data)
        start, end = _HEADER.size + length, _HEADER.size + length + size
        if magic != _MAGIC or end != len(data) or zlib.crc32(data[_HEADER.size :]) != checksum:
            raise ValueError("they are damaged")
        xml, weights = bytes(data[_HEADER.size : start]), bytes(data[start:end])
        return _the_core().read_model(xml, weights)
    except (struct.error, ValueError, RuntimeError) as error:
        raise CompileError(f"these bytes were not made by the openvino backend: {error}; lower again") from error


def _check_shapes(request: Any, results: Sequence[Any]) -> None:
    """Raise :class:`DelegateError` where a model for several sizes gave other shapes than it should have."""
    for position, made in enumerate(results):
        found, wanted = tuple(request.get_output_tensor(position).shape), _held(made).shape
        if found != wanted:
            raise DelegateError(
                f"OpenVINO made a result of shape {found} instead of {wanted}: set config.sizes to 'off'",
                code=ErrorCode.INTERNAL,
            )


def _check_types(compiled: Any, context: InitContext) -> None:
    """Raise :class:`CompileError` where a compiled model is for other inputs or outputs than the program says."""
    rest = [spec for position, spec in enumerate(context.inputs) if position not in context.constants]
    for side, own, said in (("inputs", compiled.inputs, rest), ("outputs", compiled.outputs, context.outputs)):
        found = [(port.get_partial_shape(), port.get_element_type().to_dtype().name) for port in own]
        wanted = [
            ((*spec.shape, 2), "int32")
            if spec.dtype_name in _WORDS
            else (tuple(spec.shape), AS_INTEGERS.get(spec.dtype_name, spec.dtype_name))
            for spec in said
        ]
        fit = len(found) == len(wanted) and all(
            kind == one and _fits(shape, sizes) for (shape, kind), (sizes, one) in zip(found, wanted, strict=True)
        )
        if not fit:
            shown = [(str(shape), kind) for shape, kind in found]
            raise CompileError(f"these bytes of openvino have the {side} {shown}, and not {wanted}; lower again")


def _fits(shape: Any, sizes: Sequence[int]) -> bool:
    """Whether a model's shape, where dimensions may be of any size, is this one."""
    return len(shape) == len(sizes) and all(
        dim.is_dynamic or dim.get_length() == size for dim, size in zip(shape, sizes, strict=True)
    )


def _bind(model: Any, constants: Mapping[int, BackendData]) -> list[Any]:
    """Make inputs constants. Their memory is the program's: OpenVINO copies what it packs. Returns the arrays."""
    numpy, ov = _modules()
    parameters = list(model.get_parameters())
    held: list[Any] = []
    for position, data in constants.items():
        array = numpy.ascontiguousarray(data.array)  # type: ignore[attr-defined]
        if not array.flags.writeable:  # of a program that is bytes; OpenVINO takes only what could be written to
            array = array.copy()
        held.append(array)
        constant = ov.opset13.constant(_held(array), shared_memory=True)
        parameter = parameters[position]
        for target in list(parameter.output(0).get_target_inputs()):
            target.replace_source_output(constant.output(0))
        model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return held


_HEAVY: Final = frozenset(
    {
        "MatMul",
        "Convolution",
        "GroupConvolution",
        "ConvolutionBackpropData",
        "GroupConvolutionBackpropData",
        "LSTMSequence",
    }
)
"""What OpenVINO is not to compute while it compiles: it does that without its fast kernels."""


def _folded(model: Any, constants: Mapping[int, BackendData]) -> set[int]:
    """Which of these arguments must stay arguments, lest something large were computed while compiling.

    They are what a product's left side, the activations, is computed from: a program that runs on the same batch again.
    """
    parameters = {parameter.get_friendly_name(): at for at, parameter in enumerate(model.get_parameters())}
    found: set[int] = set()
    while True:
        again = _first_folded(model, parameters, constants.keys() - found)
        if not again:
            return found
        # Ids and the batch are the small ones; tables and weights are not.
        found.add(min(again, key=lambda at: constants[at].array.nbytes))  # type: ignore[attr-defined]


def _first_folded(model: Any, parameters: Mapping[str, int], bound: Set[int]) -> set[int]:
    """What the activations of the first heavy operator come from that would have nothing but constants to work on."""
    sources: dict[str, set[int] | None] = {}
    for op in model.get_ordered_ops():
        kind, name = op.get_type_name(), op.get_friendly_name()
        if kind == "Parameter":
            sources[name] = {parameters[name]} & bound or None
            continue
        of = [sources[value.get_node().get_friendly_name()] for value in op.input_values()]
        known = [one for one in of if one is not None]
        if len(known) < len(of):
            sources[name] = None
            continue
        sources[name] = set().union(*known)
        if kind in _HEAVY and sources[name]:
            return max(known[:2], key=len) or set().union(*known)
    return set()


def _held(array: Any) -> Any:
    """Contiguous elements as a model has them, in the same memory: those of 64 bits are pairs of 32-bit words."""
    if array.dtype.itemsize != 8:
        return array
    return array.reshape(*array.shape, 1).view(_modules()[0].int32)


def _passed(model: Any) -> dict[int, int]:
    """Outputs that are inputs as they came, and which."""
    parameters = {parameter.get_friendly_name(): at for at, parameter in enumerate(model.get_parameters())}
    sources = [result.input_value(0).get_node() for result in model.get_results()]
    return {
        at: parameters[node.get_friendly_name()]
        for at, node in enumerate(sources)
        if node.get_type_name() == "Parameter"
    }


def _with_strides(array: Any, spec: TensorSpec) -> Any:
    import numpy

    order = sorted(range(len(spec.shape)), key=lambda axis: -spec.strides[axis])
    made = numpy.empty([spec.shape[axis] for axis in order], array.dtype)
    view = made.transpose([order.index(axis) for axis in range(len(order))])
    view[...] = array
    return view
