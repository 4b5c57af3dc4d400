"""``torch.compile(model, backend="torchport")``: from Dynamo, through AOTAutograd, to ``init(preprocess(graph))``."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from ...backend.buckets import Symbols, other_size, require_products
from ...backend.builder import capture_of
from ...backend.execution import Computation
from ...backend.fx_normalise import has_symbols, normalise
from ...backend.interpreted_graph import INTERPRETER, interpreted_graph
from ...backend.masking import Inexact, mask_padding
from ...backend.partition import Delegate, partition
from ...backend.registrar import registrar_of
from ...core import metrics
from ...core.config import config
from ...core.default_state import default_state, modes_are_on
from ...core.errors import GraphError, UnsupportedOp
from ...core.frames import warn_user
from ...core.specs import TensorSpec
from ...run.sizes import Family
from ...trace.handle import DEVICE_TYPE
from ..device.expanded import exact_writes
from ..device.fake import handle_handles
from ..device.ready import init
from .aliased_results import Aliases, aliases_of, writes_to_inputs
from .as_captured import as_captured, as_captured_where_shared_otherwise, why_refused
from .buckets import PaddedProgram
from .epilogue import Epilogue
from .graph_program import make_program
from .guards import mended_guards
from .not_followed import (
    refuse_conjugate_results,
    refuse_writes_to_repeated_memory,
    skip_where_detached_gain_history,
    why_not_followed,
)
from .options import Options
from .places import DataPlace, place_of
from .saved import partition_fn
from .scalar_inputs import keep_writes_to_scalars
from .shared_inputs import keep_fixed_sizes, mended_bases
from .tiered import Part, TieredProgram, begin

__all__ = ["compile_captured", "compile_graph_module"]

Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]

MAX_SHAPES: Final = 64
"""Programs a graph with symbolic sizes keeps, one per set of shapes, least recently used out first."""


_REFUSALS: Final = (AssertionError, IndexError, KeyError, RuntimeError, TypeError, UnsupportedOp, ValueError)
"""What AOTAutograd raises for a graph that it does not follow, before it reaches a backend."""
_UNKNOWN_SIZES: Final = (
    "inputs share memory and their sizes vary, and what the graph needs of these sizes cannot be asked of the inputs"
)


def _values(graph: fx.GraphModule, op: str) -> list[Any]:
    if op == "output":
        return [n.meta.get("val") if isinstance(n, fx.Node) else None for n in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
    return [node.meta.get("val") for node in graph.graph.nodes if node.op == op]


def _device(value: Any) -> torch.device | None:
    return value.device if isinstance(value, torch.Tensor) else None


def _own_kernel(place: DataPlace) -> Callable[[fx.Node], str | None]:
    registrar = registrar_of(place.backends[0])

    def reason(node: fx.Node) -> str | None:
        own = isinstance(node.target, torch._ops.OpOverload) and registrar.kernel(node.target) is not None
        return f"backend {place.backends[0].name!r} has a kernel of its own for it" if own else None

    return reason


class CompiledGraph:
    """A graph of AOTAutograd, compiled for each set of shapes it is called with; called with a list of arguments."""

    def __init__(
        self, original: fx.GraphModule, options: Options, aliases: Aliases | None = None, inference: bool = False
    ) -> None:
        self.aliases = aliases
        self.inference = inference
        self.epilogue = Epilogue(original)
        self.graph = graph = self.epilogue.graph
        self.options = options
        inputs, outputs = _values(graph, "placeholder"), _values(graph, "output")
        self.devices = [_device(value) for value in inputs]
        self.wanted = [_device(value) for value in outputs]
        self.symbolic = any(map(has_symbols, inputs))
        self._programs: OrderedDict[Any, Run] = OrderedDict()
        self._families: dict[str, Family] = {}
        """By a delegate's name, the shapes that it was compiled for."""
        self._symbols = self._find_symbols() if self.symbolic and options.buckets is not None else None
        self._place(inputs, outputs)

    def _place(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Find out where the tensors live, and compile for there what can be compiled now."""
        inner = [node.meta.get("val") for node in self.graph.graph.nodes if node.op == "call_function"]
        self.place = place_of([*inputs, *outputs, *inner], self.options)
        self._on_host = self.place.is_here(torch.device("cpu"))
        self.specs = self.options.specs(self.place.backends)
        self._programs.clear()
        self._only: Run | None = None
        if not self.symbolic:
            program = self._compile([TensorSpec.of(v) if isinstance(v, torch.Tensor) else v for v in inputs])
            self._only = program
            if isinstance(program, TieredProgram):
                program.then = functools.partial(self._settle, program)

    def _settle(self, program: Run, final: Run) -> None:
        """A program that was interpreted at first is compiled: this is what runs from now on."""
        if self._only is program:
            self._only = final
        for key, one in list(self._programs.items()):
            if one is program:
                self._programs[key] = final

    def _compile(self, inputs: Sequence[Any]) -> Run:
        """The program for inputs of these specs. Raises :class:`CompileError` and :class:`UnsupportedOp`."""
        from torch._dynamo import convert_frame

        start = perf_counter()
        # A backward, or a new set of shapes, is compiled when it is called. Tracing patches PyTorch for all threads
        # (``nn.Module.__call__`` among it), so that is done under the lock that Dynamo holds while it traces.
        with convert_frame.compile_lock, default_state():
            program = self._program(self._normal(inputs), self.devices)
        metrics.count("CompileFrontend")
        metrics.metrics.add_time("CompileFrontendTime", perf_counter() - start)
        return program

    def _normal(self, inputs: Sequence[Any]) -> fx.GraphModule:
        place = self.place
        return normalise(
            self.graph,
            place.backends,
            inputs,
            random=place.random,
            always_draw=place.always_draw,
            written=self.epilogue.read,
        )

    def _program(self, normal: fx.GraphModule, devices: Sequence[torch.device | None]) -> Run:
        place = self.place
        parts = partition(normal, place.backends, kernel=_own_kernel(place), views_outside=True, host=INTERPRETER)
        made = {delegate.name: self._computation(delegate) for delegate in parts.delegates}

        def link(computations: Mapping[str, Computation]) -> Run:
            return make_program(parts, place, computations, devices, self.wanted, not self.inference)

        compiled = {name: one for name, one in made.items() if not isinstance(one, Part)}
        return link(compiled) if len(compiled) == len(made) else TieredProgram(made, link)

    def _computation(self, delegate: Delegate) -> Computation | Part:
        backend = delegate.backend
        if backend is INTERPRETER:
            return interpreted_graph(delegate.module)
        device, specs = self.place.device_of(backend), self.specs[backend.name]
        family = self._families.setdefault(delegate.name, Family()) if self.symbolic else None
        return begin(backend, device, specs, delegate.module, family)

    # -- buckets ---------------------------------------------------------------------------------------------
    def _find_symbols(self) -> Symbols | None:
        try:
            symbols = Symbols(self.graph)
            require_products(self.graph, symbols.names)
        except Inexact as error:
            self._say_exact(error)
            return None
        return symbols

    def _say_exact(self, why: Inexact) -> None:
        """Buckets were asked for and cannot be: each set of shapes is compiled for itself from now on."""
        self._symbols = None
        metrics.count("ExactShapes")
        warn_user(f"each set of shapes is compiled for itself, not in buckets: {why}")

    def _bucketed(self, args: Sequence[Any]) -> Run | None:
        """The program for the bucket that these arguments are in; ``None`` where there is none."""
        assert self._symbols is not None
        assert self.options.buckets is not None
        sizes = [self.options.buckets.of(size) for size in self._symbols.values(args)]
        key = ("bucket", *sizes)
        program = self._programs.get(key)
        if program is None and None not in sizes:
            try:
                program = self._padded([size for size in sizes if size is not None])
            except Inexact as error:
                self._say_exact(error)
                return None
            self._remember(key, program)
        elif program is not None:
            self._programs.move_to_end(key)
        return program

    def _padded(self, sizes: Sequence[int]) -> Run:
        """Compile for these values of the symbols and any smaller ones. Raises :class:`Inexact`."""
        symbols, start = self._symbols, perf_counter()
        assert symbols is not None
        if not self.place.is_here(torch.device("cpu")):
            raise Inexact(f"the tensors are on {self.place.device}")
        others = [other_size(size) for size in sizes]
        sets = [sizes, *([*sizes[:at], other, *sizes[at + 1 :]] for at, other in enumerate(others))]
        with default_state():
            try:
                graphs = [self._normal([symbols.spec(value, one) for value in symbols.inputs]) for one in sets]
            except GraphError as error:
                raise Inexact(f"the graph is not for every size: {error}") from error
            if graphs[0].meta["random_ops"]:
                raise Inexact("random numbers depend on where they stand in a tensor")
            masked = mask_padding(graphs, sizes, others, capture_of(self.place.backends[0]))
            cpu = torch.device("cpu")
            program = self._program(masked.module, [*self.devices, *(cpu for _ in sizes)])
        metrics.count("BucketCompile")
        metrics.metrics.add_time("CompileFrontendTime", perf_counter() - start)
        return PaddedProgram(program, symbols, sizes, masked.results)

    def _remember(self, key: Any, program: Run) -> None:
        self._programs[key] = program
        if len(self._programs) > MAX_SHAPES:
            self._programs.popitem(last=False)

    # -- running ---------------------------------------------------------------------------------------------
    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run; ``args`` is emptied, so that values can be let go of as soon as they are not needed."""
        if not self.place.is_current():
            self._place(_values(self.graph, "placeholder"), _values(self.graph, "output"))
        program = self._only or self._specialised(args)
        writes = self.epilogue.writes
        if self.aliases is None and not writes:  # the common case pays nothing
            return self._run(program, args)
        # Taken before the computation: it lets go of the arguments.
        targets = [args[at] for at in writes]
        taken = {} if self.aliases is None else self.aliases.take(args)
        parts = {} if self.aliases is None else self.aliases.parts(args)
        results = self._run(program, args)
        if writes:
            results = self.epilogue.run(targets, results, self._on_host)
        if parts:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # AOTAutograd tells autograd what is a view
                taken = {**taken, **{at: part() for at, part in parts.items()}}
        if taken:
            results = list(results)
            for at, alias in taken.items():
                results[at] = alias
        return results

    @staticmethod
    def _run(program: Run, args: list[Any]) -> Sequence[Any]:
        if modes_are_on():
            with default_state():
                return program(args)
        # AOTAutograd calls us with gradients and autocast off.
        return program(args)

    def _specialised(self, args: Sequence[Any]) -> Run:
        if self._symbols is not None and (padded := self._bucketed(args)) is not None:
            return padded
        key = tuple([TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in args])
        program = self._programs.get(key)
        if program is None:
            program = self._compile(key)
            self._remember(key, program)
            if isinstance(program, TieredProgram):
                program.then = functools.partial(self._settle, program)
        else:
            self._programs.move_to_end(key)
        return program


def compile_graph_module(
    graph: fx.GraphModule, options: Options, aliases: Aliases | None = None, inference: bool = False
) -> Run:
    """A graph of functional ATen operators as a function that takes a list of arguments, which it empties.

    Writes to inputs at the end of the graph are made. ``inference``: there are no gradients.
    """
    compiled = CompiledGraph(graph, options, aliases, inference)

    def call(args: list[Any]) -> Sequence[Any]:
        return compiled(args)

    vars(call)["_boxed_call"] = True  # AOTAutograd then gives it its arguments as a list
    return call


@functools.cache
def _prepare_dynamo() -> None:
    """Dynamo looks at every Python function that runs between two graphs; ours are none of the user's."""
    from torch._dynamo import trace_rules

    trace_rules.add("torchport")
    keep_writes_to_scalars()


def compile_captured(
    graph: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    """The Dynamo backend ``torchport``: called by ``torch.compile`` with each graph it captures.

    ``options``: ``backend`` (a name, or several in order of preference), ``ordinal``, and compile specs of those
    backends; ``mode`` is a compile spec, too. What AOTAutograd refuses before it reaches a backend runs operator by
    operator, with a warning. Raises :class:`ConfigError` for options nothing reads.
    """
    from torch._dynamo.backends.common import aot_autograd

    _prepare_dynamo()
    skip_where_detached_gain_history(graph)
    chosen = Options.parse(options, mode)
    if any(isinstance(x, torch.Tensor) and x.device.type == DEVICE_TYPE for x in example_inputs):
        init()
        handle_handles()

    why = why_not_followed(graph)
    if why is not None:
        return as_captured(graph, why)

    writes: list[bool] = []
    reached: list[bool] = []

    def forward(made: fx.GraphModule, inputs: Sequence[Any], inference: bool = False) -> Callable[..., Any]:
        refuse_conjugate_results(made)
        refuse_writes_to_repeated_memory(made)
        aliases = aliases_of(made)
        reached.append(True)
        writes.append(writes_to_inputs())
        return compile_graph_module(made, chosen, aliases, inference)

    def backward(made: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reached.append(True)
        return compile_graph_module(made, chosen)

    # Autograd must not see writes under ``no_grad``, and those in the graph alone are hidden from it.
    build = aot_autograd(
        fw_compiler=forward,
        inference_compiler=functools.partial(forward, inference=True),
        bw_compiler=backward,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    keep_fixed_sizes(graph, example_inputs)
    try:
        with mended_guards(graph) as guards, mended_bases(), exact_writes():
            compiled = build(graph, example_inputs)
    except _REFUSALS as error:
        # Dynamo has subclasses of its own for what it answers itself, for instance by a graph break.
        if reached or config.fallback == "error" or type(error) not in _REFUSALS:
            raise
        return as_captured(graph, why_refused(error))
    if guards.on_unknown_sizes:
        refused = UnsupportedOp(_UNKNOWN_SIZES)
        if config.fallback == "error":
            raise refused
        return as_captured(graph, why_refused(refused))
    return as_captured_where_shared_otherwise(compiled, graph) if any(writes) else compiled
