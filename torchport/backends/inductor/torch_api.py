"""Every private PyTorch API the backend uses; checked on torch 2.13.

==============================================================  ===================================================
name                                                            why
==============================================================  ===================================================
torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors              tensors → handles that the C ABI takes
torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs         handles the C ABI returned → tensors
torch._C._aoti.AOTIModelContainerRunnerCpu                      runs graphs that need torch's proxy executor
torch_exception_get_what_without_backtrace (C)                  what an operator that failed in compiled code said
torch._guards.detect_fake_mode, TracingContext, tracing         passes look for the fake mode there
torch._inductor.codegen.cpp.CppScheduling                       how many loops become one function
torch._inductor.config.patch, list_options, list_mode_options   options of one compilation
torch._inductor.config._config, _is_default                     what a program has set of them for the whole process
torch._inductor.compile_fx: _recursive_joint_graph_passes,      its passes over a graph, without its second tracing
  fake_tensor_prop, _recursive_record_original_output_strides,    through AOTAutograd, which a graph in normal form
  _recursive_post_grad_passes                                     does not need
torch._inductor.debug.DebugContext                              lowering reports to one; it does nothing by default
torch._inductor.decomposition.select_decomp_table               decompositions that Inductor's lowerings count on
torch._inductor.dtype_propagation (its one handler)             __init__ is made to run once while compiling
torch._inductor.fx_passes.post_grad.view_to_reshape             as compile_fx does before lowering
torch._inductor.graph.GraphLowering                             FX graph → C++; its placeholder is extended
torch._inductor.ir.DonatedBuffer                                an input that results may be written over
torch._inductor.lowering.constrain_to_fx_strides                a matrix as the graph says that it lies in memory
torch._inductor.virtualized.V                                   graph, fake mode and AOT mode of one compilation
torch._subclasses.FakeTensorMode, symbolic_shapes.ShapeEnv      shapes without data while lowering
torch.fx.experimental.proxy_tensor.make_fx                      tracing decompositions
torch.utils._python_dispatch._disable_current_modes             a caller's dispatch modes must not see the compiler
aoti_runtime/model.h (header)                                   base class of the compiled model
==============================================================  ===================================================

Nothing of ``torch._inductor`` is imported before the first compilation; loading and running needs ``torch._C`` only.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from torchport.backend.normal_form import at_hint, input_specs
from torchport.core.errors import ConfigError
from torchport.core.forks import guarded_rlock
from torchport.core.releases import takes

from . import machine, onednn
from .build import Toolchain, begin
from .complex_values import give_complex_tensors, scatters
from .rows import additions
from .source import Wrapper, guard_kernels, split_kernels, strip_wrapper
from .toolchain import interface_source, toolchain_in_force

__all__ = ["Generated", "channels_last_pays", "generate", "last_error", "proxy_runner", "take_handles", "take_tensors"]

_compile_lock = guarded_rlock()
"""Inductor keeps a compilation's state in globals; one at a time per process."""

_C: Any = torch._C
_aoti = _C._aoti

take_handles: Callable[[list[torch.Tensor]], list[Any]] = _aoti.unsafe_alloc_void_ptrs_from_tensors
"""New handles (capsules) for tensors; whoever gets a handle owns it."""

take_tensors: Callable[[list[Any]], list[torch.Tensor]] = _aoti.alloc_tensors_by_stealing_from_void_ptrs
"""Tensors from handles (capsules), which are consumed."""


def _last_error() -> Any:
    function = getattr(ctypes.CDLL(_C.__file__), "torch_exception_get_what_without_backtrace", None)
    if function is not None:
        function.restype = ctypes.c_char_p
    return function


last_error: Final[Callable[[], bytes | None] | None] = _last_error()
"""What the operator that failed last in this thread said, without a stack trace; a C function, if torch has it."""


def mode_options(mode: str) -> Mapping[str, Any]:
    """The options that a mode of ``torch.compile`` stands for. Raises :class:`ConfigError` for one Inductor lacks."""
    if mode == "default":
        return {}
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode not in known:
        raise ConfigError(f'compile spec "mode" is {mode!r}; Inductor has: {", ".join(sorted(known))}')
    return known[mode]


def changed_settings() -> Mapping[str, Any]:
    """What the program has changed in ``torch._inductor.config``: not what the environment says, which others see, too.

    A setting that was patched and is as before counts as unchanged, where its own ``_is_default`` says otherwise:
    Inductor patches many while it compiles, and the next process would look for another key.
    """
    from torch._inductor import config
    from torch.utils._config_module import _UNSET_SENTINEL

    known: Any = config
    changed: dict[str, Any] = {}
    for name, entry in known._config.items():
        if not known._is_default(name):
            given = (entry.env_value_force, entry.env_value_default, entry.default)
            at_first = next(value for value in given if value is not _UNSET_SENTINEL)
            if (value := getattr(config, name)) != at_first:
                changed[name] = value
    return changed


def settings_in_force(settings: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Have these settings instead."""
    from torch._inductor import config

    return config.patch(dict(settings))


def proxy_runner(library: str) -> Any:
    """Runs a library with ``<library>.json`` beside it, where operators without a C shim are described."""
    return _aoti.AOTIModelContainerRunnerCpu(library, 1)


@dataclass(slots=True)
class Generated:
    """The C++ of one graph, and how to build it."""

    wrapper: Wrapper
    kernels: list[str]
    constants: bytes
    extern_nodes: str
    borrowed: tuple[int, ...]
    overwritten: tuple[int, ...]
    toolchain: Toolchain


_OPTIONS: Mapping[str, Any] = {
    "cpp_wrapper": True,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.compile_wrapper_opt_level": "O1",
    "max_autotune": False,
    "max_autotune_gemm": False,
    "freezing": False,
    "fallback_random": True,
    "comprehensive_padding": False,
    "graph_partition": False,
    "implicit_fallbacks": True,
    "triton.cudagraphs": False,
    "trace.enabled": False,
}


def _known(config: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that this release has: what an older one lacks, it does not do."""
    return {name: value for name, value in options.items() if name in config._config}


_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning),
    (r"`torch\._prims_common\.check` is deprecated", FutureWarning),
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    (r"Torchinductor does not support code generation for complex operators", UserWarning),
)
"""What Inductor warns of while it compiles correct graphs: its own use of deprecated functions, and slowness."""


def _is_news(record: logging.LogRecord) -> bool:
    """False for Inductor's message that an operator has no C shim: such graphs run through the proxy executor here."""
    return "missing a c-shim implementation" not in str(record.msg)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Inductor says about itself from the user, and nothing else."""
    logger = logging.getLogger("torch._inductor.ir")
    logger.addFilter(_is_news)
    try:
        with warnings.catch_warnings():
            for message, category in _WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        logger.removeFilter(_is_news)


@contextmanager
def _fast() -> Iterator[None]:
    """Compile with the garbage collector off and one method of Inductor's run once, not per generated operation.

    Lowering makes millions of small objects that all live until it ends: collecting took 22% of the time for a GPT-2
    training step. ``DtypePropagationOpsHandler`` is a singleton whose ``__init__`` runs at every use: 10% of it.
    """
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    initialise = Handler.__init__

    def once(self: Any) -> None:
        if not vars(self):
            initialise(self)

    collecting, depth = gc.isenabled(), sys.getrecursionlimit()
    gc.disable()
    sys.setrecursionlimit(max(depth, 5_000))  # expressions nest deeply in long chains; ``compile_fx`` does the same
    Handler.__init__ = once
    try:
        yield
    finally:
        Handler.__init__ = initialise
        sys.setrecursionlimit(depth)
        if collecting:
            gc.enable()


_LARGE: Final = 4 << 20
"""Bytes of inputs from which memory counts more than the microseconds that a function of its own takes."""
_ARGUMENTS: Final = 5
"""Fewer tensors than the update of a parameter reads and makes, so that each is a function of its own."""


_LITTLE: Final = 1024
"""Bytes below which two loops that read the same do not save anything: the numbers that all of an optimizer's use."""


@contextmanager
def _separate_updates(graph: fx.GraphModule) -> Iterator[None]:
    """Where tensors are large, keep Inductor from updating all of a model's parameters in one function of C++.

    All results of a function are allocated before it runs, and what it reads is released after it: old and new
    parameters and optimizer state would be there at a time.
    """
    from torch._inductor import config
    from torch._inductor.codegen import cpp

    scheduling: Any = cpp.CppScheduling

    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    if sum(_elements(value) * value.element_size() for value in inputs) < _LARGE:
        yield
        return
    before = scheduling.MAX_FUSED_KERNEL_ARGS_NUM
    scheduling.MAX_FUSED_KERNEL_ARGS_NUM = min(before, _ARGUMENTS)
    try:
        with config.patch(score_fusion_memory_threshold=_LITTLE):
            yield
    finally:
        scheduling.MAX_FUSED_KERNEL_ARGS_NUM = before


@contextmanager
def _outside_ci() -> Iterator[None]:
    """Inductor turns a fallback it would rather decompose into an error where the variable ``CI`` is set.

    That check is for PyTorch's own continuous integration; everybody else's sets the same variable.
    """
    before = os.environ.pop("CI", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["CI"] = before


def _elements(value: torch.Tensor) -> int:
    """How many elements a fake tensor has; of one whose sizes are symbols, in the program's first call."""
    return math.prod(map(at_hint, value.shape))


def _symbols_of(graph: fx.GraphModule) -> Any:
    """The fake mode of a graph whose sizes are symbols; ``None`` for any other graph."""
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            return value.fake_mode
    return None


def _fake_inputs(graph: fx.GraphModule, mode: Any) -> list[torch.Tensor]:
    if _symbols_of(graph) is mode:
        return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with mode:
        return [
            torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu") for spec in input_specs(graph)
        ]


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table, with variances of nothing as PyTorch has them (nan, where Inductor's lowering gives 0).

    What a mask overwrites by one number becomes a new value: Inductor would write it in place, and what reads the old
    value after another such write, and before this one, would get the value from before both (torch 2.13).
    """
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())

    def of_nothing(original: Callable[..., Any] | None, count: int) -> Callable[..., Any]:
        def decomposed(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
            if x.numel() or x.is_complex():
                return original(x, dim, correction=correction, keepdim=keepdim) if original else NotImplemented
            value = torch.sum(x, dim, keepdim) * float("nan")
            return value if count == 1 else (value, value.clone())

        return decomposed

    for op, count in ((torch.ops.aten.var.correction, 1), (torch.ops.aten.var_mean.correction, 2)):
        table[op] = of_nothing(table.get(op), count)
    table[torch.ops.aten.index_put.default] = _masked
    table[torch.ops.aten.pow.Scalar] = _power
    table.update(scatters(table))
    table.update(additions(table))
    return table


def _power(base: float, exponent: torch.Tensor) -> Any:
    """An integer to the power of an integer tensor; ``NotImplemented`` for others.

    Inductor calls PyTorch's kernel for it, by a C function that takes the number as floating-point (torch 2.13).
    """
    dtype = torch.result_type(exponent, base)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return NotImplemented
    return torch.pow(torch.scalar_tensor(base, dtype=torch.int64).to(dtype), exponent.to(dtype))


def _masked(x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
    """``x[mask] = number`` as a choice between the two; ``NotImplemented`` for other indices."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if values.numel() != 1 or len(indices) != 1 or not masks:
        return NotImplemented
    mask = masks[0].to(torch.bool)
    mask = mask.reshape(*mask.shape, *(1 for _ in range(x.dim() - mask.dim())))
    number = values.reshape(())
    return torch.where(mask, x + number if accumulate else number, x)


def _decompose(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph in the operators Inductor lowers, on fresh fake tensors; ``graph`` is not changed."""
    from torch.fx.experimental.proxy_tensor import make_fx

    class Restriding(fx.Interpreter):
        """Runs the graph; where a decomposition gave other strides than the operator, a view becomes a reshape."""

        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if target is torch.ops.aten.view.default:
                return torch.ops.aten.reshape.default(*args)
            return super().call_function(target, args, kwargs)

    def call(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return Restriding(graph).run(*args)

    functional = torch.func.functionalize(call, remove="mutations")
    symbolic = _symbols_of(graph)
    with torch.no_grad(), symbolic or nullcontext():  # else kernels would make numbers of symbols
        traced = make_fx(functional, decomposition_table=_decompositions(), _allow_non_fake_inputs=True)(*inputs)
    # An operator that writes to an input behind its schema's back (native_batch_norm) ends in a copy_ to it.
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
        traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    return traced


def _annotate_constants(graph: fx.GraphModule, mode: Any) -> None:
    for node in graph.graph.find_nodes(op="get_attr"):
        if "val" not in node.meta:
            node.meta["val"] = mode.from_tensor(getattr(graph, node.target), static_shapes=True)


def _run_passes(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[fx.GraphModule, Any]:
    """Inductor's passes over the decomposed graph, in ``compile_fx``'s order; returns the graph and its fake mode."""
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode(inputs)):
        graph = compile_fx._recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    view_to_reshape(graph)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(graph, inputs, True)
    compile_fx._recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(graph, is_inference=True)
    return graph, mode


def _borrowed_outputs(lowering: Any) -> tuple[int, ...]:
    """Outputs whose buffer is an input, a constant, or an earlier output's buffer."""
    taken = {*lowering.graph_inputs, *lowering.constants}
    found: list[int] = []
    for position, output in enumerate(lowering.graph_outputs):
        name = output.get_name() if hasattr(output, "get_name") else None
        root = lowering.name_to_buffer.get(name)
        names = {name, *(root.get_inputs_that_alias_output() if root is not None else ())}
        if names & taken:
            found.append(position)
        taken.add(name)
    return tuple(found)


def _constant_bytes(lowering: Any) -> bytes:
    """The values of the graph's constants, each padded to the 64 bytes that the runtime's loader expects."""
    blob = bytearray()
    for name in lowering.constants:
        if name in lowering.folded_constants:
            continue
        value = lowering.get_original_value_of_constant(name)
        storage = value.untyped_storage() if value.numel() else b""
        blob += bytes(storage)
        blob += bytes(-len(blob) % 64)
    return bytes(blob)


_BY_LAYOUT: Final = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex")
)
"""Operators that factor a contiguous matrix as its transpose; Inductor would give them a matrix of any layout."""


def _lowering_class(donated: Set[int]) -> Any:
    """Inductor's lowering, told which inputs are donated: it writes results over them where they are read last.

    It knows such inputs in backward graphs of its own making only. Large matrix products go to oneDNN where that pays.
    """
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.lowering import constrain_to_fx_strides

    class DonatingLowering(GraphLowering):
        def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
            made: Any = super().placeholder(target, args, kwargs)
            if self.placeholder_idx in donated:
                held = made.data
                held.data = ir.DonatedBuffer(name=held.data.name, layout=held.data.layout)
                self.graph_inputs_original[self.graph_input_names[-1]] = held.data
            return made

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in _BY_LAYOUT:  # how its gradient goes on depends on how the matrix lay in memory
                args, kwargs = constrain_to_fx_strides(self.current_node, *args, **kwargs)
            made: Any = onednn.lower(target, args, kwargs) if by_onednn else None
            return made if made is not None else super().call_function(target, args, kwargs)

    by_onednn = onednn.pays()
    return DonatingLowering


def _lower(graph: fx.GraphModule, inputs: list[torch.Tensor], toolchain: Toolchain, donated: Set[int]) -> Generated:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    graph, mode = _run_passes(graph, inputs)
    lowering_class = _lowering_class(donated)
    # Before PyTorch 2.12 Inductor asks its own table alone where it decomposes what has been decomposed here.
    own_table = takes(GraphLowering, "get_decomp_fn")
    with V.set_fake_mode(mode):
        lowering = lowering_class(
            graph,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            graph_id=0,
            cpp_wrapper=True,
            aot_mode=True,
            is_inference=True,
            inputs_to_check=(),
            **({"get_decomp_fn": _decompositions} if own_table else {}),
        )
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.freeze_runtime_asserts()
            lowering.run(*inputs)
            borrowed = _borrowed_outputs(lowering)
            wrapper, kernels = lowering.codegen_with_cpp_wrapper()
            extern = lowering.extern_node_serializer(V.extern_kernel_nodes) if V.extern_kernel_nodes else ""
    constants = _constant_bytes(lowering)
    outputs = len(lowering.graph_outputs)
    body = strip_wrapper(
        wrapper.value, interface_source(), len(inputs), outputs, bool(lowering.constants), by_name=bool(extern)
    )
    files = split_kernels(guard_kernels(kernels.value, _threads()), max(1, (os.cpu_count() or 1) - 1))
    return Generated(body, files, constants, extern, borrowed, tuple(sorted(donated)), toolchain)


def _threads() -> int:
    """The most threads a kernel may use; not just torch's setting of the moment, since the code may outlive it."""
    return max(torch.get_num_threads(), os.cpu_count() or 1)


def channels_last_pays(graph: fx.GraphModule) -> bool:
    """Whether convolutions are so large that turning each weight to channels-last in every run is worth it.

    Weights are inputs here, so the compiled code turns them around each time. Measured for ResNet-18 on one core of an
    AVX-512 machine: 6 ms for the weights, which gained 13 ms of 44 at 160 multiplications per weight, and less than
    1 ms of 26 at 105. Backward convolutions keep the layout that PyTorch gives them, so in a training step everything
    would be turned twice: 92 ms became 105.
    """
    aten = torch.ops.aten
    multiplications = weights = 0
    for node in graph.graph.nodes:
        if node.target is aten.convolution_backward.default:
            return False
        if node.target is aten.convolution.default:
            weight, result = node.args[1].meta["val"], node.meta["val"]
            weights += _elements(weight)
            multiplications += _elements(result) * _elements(weight) // max(1, at_hint(weight.shape[0]))
    return multiplications > 128 * weights


def generate(graph: fx.GraphModule, options: Mapping[str, Any]) -> Generated:
    """C++ for a graph in normal form. ``options`` are patches of ``torch._inductor.config``.

    Raises :class:`ConfigError` for an option that Inductor does not have, and what Inductor raises otherwise.
    """
    with ExitStack() as stack:
        stack.enter_context(_compile_lock)
        stack.enter_context(_quiet())
        stack.enter_context(_fast())
        stack.enter_context(_outside_ci())
        from torch._guards import TracingContext, tracing
        from torch._inductor import config, list_options
        from torch._inductor.debug import DebugContext
        from torch._inductor.lowering import lowerings  # decompositions look the module up without importing it
        from torch._inductor.virtualized import V
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
        from torch.utils._python_dispatch import _disable_current_modes

        assert lowerings
        unknown = sorted(set(options).difference(list_options()))
        if unknown:
            raise ConfigError(f'"inductor.options" names no option of torch._inductor.config: {", ".join(unknown)}')
        computed = {"cpp.threads": _threads(), "layout_optimization": channels_last_pays(graph)}
        if config.cpp.vec_isa_ok is None and machine.has_sleef():
            # Else Inductor compiles and loads a file per set of vector instructions to see it: 5 s, once per machine.
            # What the compiler knows of newer instructions it tries all the same.
            computed["cpp.vec_isa_ok"] = True
        stack.enter_context(_separate_updates(graph))
        stack.enter_context(config.patch({**_known(config, _OPTIONS), **computed, **options}))
        stack.enter_context(V.set_aot_compilation(True))
        toolchain = toolchain_in_force(precompile=not options)
        begin(toolchain)
        stack.enter_context(DebugContext())
        stack.enter_context(_disable_current_modes())
        mode = _symbols_of(graph) or FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        inputs = _fake_inputs(graph, mode)
        stack.enter_context(tracing(TracingContext(mode)))
        decomposed = _decompose(graph, inputs)
        give_complex_tensors(decomposed, mode)
        _annotate_constants(decomposed, mode)
        placeholders = graph.graph.find_nodes(op="placeholder")
        donated = {position for position, node in enumerate(placeholders) if node.meta.get("donated")}
        return _lower(decomposed, inputs, toolchain, donated=donated)
