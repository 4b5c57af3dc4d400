"""``lower``: export, normal form, partition, preprocess, and the result as a program."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.utils._pytree import tree_map

from .. import __version__
from ..backend.buckets import Buckets
from ..backend.builder import capture_of
from ..backend.fx_normalise import normalise, source_line
from ..backend.interface import Backend, Processed
from ..backend.masking import Inexact
from ..backend.normal_form import verify_graph
from ..backend.optional import optional_of, preprocess_each
from ..backend.partition import Partitioned, partition
from ..core.config import config
from ..core.errors import BackendUnavailable, CompileError, ConfigError, GraphError, UnsupportedOp
from ..core.specs import CompileSpecs
from ..program import document as doc
from ..program.writer import BLOBS, digest
from .dynamic import Shapes, combinations, dim_names, padded_graphs, section, shapes_of, specialise
from .emit import Constants, Emitted, delegate_specs, emit, module_path, place_of
from .fold import fold_constants
from .lowered import Left, LoweredProgram, Piece
from .partitioner import Partitioner, Supported, Wanted, WholeProgram, collect_tags, functional_form

__all__ = ["lower"]

Model: TypeAlias = "ExportedProgram | torch.nn.Module"
Methods: TypeAlias = "Mapping[str, ExportedProgram | Sequence[Any]]"
SpecsOf: TypeAlias = "CompileSpecs | Mapping[str, bytes | str] | Mapping[str, CompileSpecs | Mapping[str, bytes | str]]"

_FORWARD: Final = "forward"


# -- what is to be lowered -----------------------------------------------------------------------------------------
def _distinct(given: Any) -> Any:
    """Example arguments where no tensor occurs twice: ``torch.export`` takes one that does for one input.

    None has elements that share memory either (``expand``): a program is given tensors of their own memory.
    """
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = id(value) in seen
        seen.add(id(value))
        if value.layout is torch.strided and 0 in value.stride() and value.numel() > 1:
            return value.clone(memory_format=torch.contiguous_format)
        return value.clone() if known else value

    return tree_map(own, given)


def _export(
    module: torch.nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """Export a method of a module. A method other than ``forward`` stands in for it meanwhile."""
    if not callable(getattr(module, name, None)):
        raise ConfigError(f"{type(module).__name__} has no method {name!r}")
    args, kwargs = _distinct((tuple(args), dict(kwargs or {})))
    if name == _FORWARD:
        return torch.export.export(module, tuple(args), kwargs, dynamic_shapes=dynamic_shapes)
    had = module.__dict__.get(_FORWARD)
    module.__dict__[_FORWARD] = getattr(module, name)
    try:
        return torch.export.export(module, tuple(args), kwargs, dynamic_shapes=dynamic_shapes)
    finally:
        if had is None:
            del module.__dict__[_FORWARD]
        else:
            module.__dict__[_FORWARD] = had


def _exported(
    model: Model, args: Sequence[Any], kwargs: Mapping[str, Any] | None, methods: Methods | None, dynamic_shapes: Any
) -> dict[str, ExportedProgram]:
    """Every method's exported program, by name."""
    found: dict[str, ExportedProgram] = {}
    for what, given in {
        "args": args,
        **{f"methods[{name!r}]": given for name, given in (methods or {}).items()},
    }.items():
        if not isinstance(given, (tuple, list, ExportedProgram)):
            raise ConfigError(
                f"{what} is a {type(given).__name__}; give a tuple of example inputs, as (x,) for one input x"
            )
    if isinstance(model, ExportedProgram):
        if args or kwargs or dynamic_shapes is not None:
            raise ConfigError("an exported program has its inputs and shapes; give args with a module only")
        found[_FORWARD] = model
    elif isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        if args or kwargs or not methods:
            found[_FORWARD] = _export(model, _FORWARD, args, kwargs, dynamic_shapes)
    else:
        raise ConfigError(f"lower() takes an ExportedProgram or an nn.Module, not a {type(model).__name__}")
    for name, given in (methods or {}).items():
        if name in found or name == "model" or not name.isidentifier():
            raise ConfigError(
                f"a method cannot be called {name!r}: names are identifiers, each given once, and not 'model'"
            )
        if isinstance(given, ExportedProgram):
            found[name] = given
        elif isinstance(model, torch.nn.Module):
            found[name] = _export(model, name, given, None, None)
        else:
            raise ConfigError(f"method {name!r}: an exported program has one method; give the other one's, exported")
    return found


def _constants_of(exported: ExportedProgram, state: Collection[str]) -> set[str]:
    """Note the tensor on every placeholder that stands for one; the names of those that no method changes."""
    unchanged: set[str] = set()
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = str(spec.target)
            value = exported.state_dict.get(name, exported.constants.get(name))
            if not isinstance(value, torch.Tensor):
                raise GraphError(f"the exported program has no value for {name!r}; export the model again")
            node.meta["constant"] = value
            if name not in state:
                unchanged.add(node.name)
    return unchanged


def _small_constants(exported: ExportedProgram, unchanged: Collection[str]) -> set[str]:
    """The names of constants that may be computed with when the model is lowered: all but parameters."""
    kinds = (InputKind.CONSTANT_TENSOR, InputKind.BUFFER)
    specs = exported.graph_signature.input_specs
    return {spec.arg.name for spec in specs if spec.kind in kinds and spec.arg.name in unchanged}


def _with_true_sizes(signature: ExportGraphSignature, count: int) -> ExportGraphSignature:
    """The signature of a padded graph, which takes true sizes after all that the program takes."""
    more = [InputSpec(InputKind.USER_INPUT, TensorArgument(f"true_size_{at}"), None) for at in range(count)]
    return ExportGraphSignature([*signature.input_specs, *more], list(signature.output_specs))


# -- who takes what --------------------------------------------------------------------------------------------------
def _specs_for(backend: str, specs: SpecsOf | None) -> CompileSpecs:
    if specs is None:
        return CompileSpecs()
    if isinstance(specs, CompileSpecs):
        return specs
    nested = [isinstance(value, (Mapping, CompileSpecs)) for value in specs.values()]
    if any(nested):
        if not all(nested):
            raise ConfigError("compile_specs are options of one backend, or {backend: options} for several; not both")
        mine: Any = specs.get(backend, {})
        return mine if isinstance(mine, CompileSpecs) else CompileSpecs(mine)
    return CompileSpecs(specs)  # type: ignore[arg-type]


def _partitioners(
    backend: str | Backend | Sequence[str | Backend] | None,
    partitioners: Sequence[Partitioner] | None,
    specs: SpecsOf | None,
) -> list[Partitioner]:
    if (backend is None) == (partitioners is None):
        raise ConfigError(
            'say who computes: lower(model, args, backend="inductor"), several names in order of preference, or '
            "partitioners=[...]"
        )
    if partitioners is not None:
        if specs is not None:
            raise ConfigError("with partitioners=, compile specs are theirs: OpList(backend, ops, specs)")
        if not partitioners or not all(isinstance(one, Partitioner) for one in partitioners):  # pyright: ignore
            raise ConfigError("partitioners= takes torchport.aot.Partitioner objects, in order of preference")
        return list(partitioners)
    chosen: Iterable[str | Backend] = [backend] if isinstance(backend, (str, Backend)) else (backend or ())
    found: list[Partitioner] = []
    for one in chosen:
        supported = Supported(one)
        found.append(Supported(supported.backend, _specs_for(supported.backend.name, specs)))
    if not found:
        raise ConfigError("backend= is empty; give at least one")
    return found


@dataclass(slots=True)
class _Lowering:
    """Collects the methods of one program."""

    partitioners: list[Partitioner]
    wanted: list[Wanted] = field(init=False)
    constants: Constants = field(default_factory=Constants)
    debug: doc.DebugInfo = field(default_factory=doc.DebugInfo)
    emitted: list[Emitted] = field(default_factory=list[Emitted])
    pieces: dict[str, list[Piece]] = field(default_factory=dict[str, list[Piece]])
    left: dict[str, list[Left]] = field(default_factory=dict[str, list[Left]])
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict[str, fx.GraphModule])
    dynamic: dict[str, doc.Dynamic] = field(default_factory=dict[str, doc.Dynamic])

    def __post_init__(self) -> None:
        self.wanted = [Wanted(partitioner) for partitioner in self.partitioners]

    def method(self, name: str, functional: ExportedProgram, given: ExportedProgram, state: Collection[str]) -> None:
        """Split one method among the partitioners. ``given``: the program before its writes were taken out; ``state``:
        buffers that some method changes."""
        unchanged = _constants_of(functional, state)
        self._number(functional.graph, given.graph)
        graph = self._folded(copy.deepcopy(functional.graph_module), functional, unchanged)
        self._split(name, graph, functional.graph_signature, unchanged, state)

    def _folded(
        self, module: fx.GraphModule, functional: ExportedProgram, unchanged: Collection[str]
    ) -> fx.GraphModule:
        """A graph in normal form, without what does not depend on inputs."""
        small = _small_constants(functional, unchanged)
        fold_constants(module, [node for node in module.graph.nodes if node.name in small])
        return self._normal(module)

    def _normal(self, module: fx.GraphModule) -> fx.GraphModule:
        return normalise(module, self.wanted)

    def dynamic_method(
        self,
        name: str,
        functional: ExportedProgram,
        given: ExportedProgram,
        state: Collection[str],
        shapes: Shapes,
        buckets: Buckets | None,
    ) -> None:
        """A method with sizes that change: its variants, padded if that is exact."""
        others = dict(self.debug.handles)
        self._number(functional.graph, given.graph)
        first: Inexact | None = None
        whole = any(isinstance(one, WholeProgram) for one in self.partitioners)
        grid, limits = combinations(shapes, name, buckets, None)
        for program in (functional, None):
            before = dict(self.debug.handles)
            if program is None:  # what torch.export keeps whole and has no rule may consist of operators that have one
                try:
                    program = functional_form(given, whole=False)
                except Exception as error:  # a number read from a tensor: each variant is tried for itself
                    first = first or Inexact(f"the operators do not come apart ({type(error).__name__})")
                    break
                self._handles(others)
                self._number(program.graph, given.graph)
            unchanged = _constants_of(program, state)
            small = _small_constants(program, unchanged)
            try:
                graphs, forms = padded_graphs(
                    program.graph_module, program, shapes, grid, self._normal, capture_of(self.wanted[0]), whole, small
                )
            except Inexact as error:
                first = error if first is None else first
                self._handles(before)
                continue
            signature = _with_true_sizes(program.graph_signature, len(grid[0]))
            for sizes, graph in reversed(graphs.items()):
                fold_constants(graph, [node for node in graph.graph.nodes if node.name in small])
                self._split(doc.variant_name(name, sizes), graph, signature, set(unchanged), state)
            self.dynamic[name] = section(shapes, limits, grid, forms, None)
            return
        reason = str(first)
        sets, limits = combinations(shapes, name, buckets, reason)
        unchanged = _constants_of(functional, state)
        for sizes in sets:
            graph = self._folded(specialise(functional.graph_module, shapes, sizes), functional, unchanged)
            self._split(doc.variant_name(name, sizes), graph, functional.graph_signature, set(unchanged), state)
        self.dynamic[name] = section(shapes, limits, sets, shapes.outputs, reason)

    def _handles(self, before: Mapping[int, doc.Origin]) -> None:
        """Go back to the debug handles there were, since a graph that had others is not used."""
        self.debug.handles.clear()
        self.debug.handles.update(before)

    def _split(
        self,
        name: str,
        graph: fx.GraphModule,
        signature: ExportGraphSignature,
        unchanged: set[str],
        state: Collection[str],
    ) -> None:
        """Give a graph in normal form to the partitioners, as a method of the program."""
        for node in graph.graph.nodes:
            value = getattr(graph, str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor):  # else a graph that an operator takes, such as a branch of torch.cond
                node.meta["constant"] = value
                unchanged.add(node.name)
        constants = [node for node in graph.graph.nodes if node.name in unchanged]
        tagging = collect_tags(self.partitioners, graph, frozenset(constants))
        split = partition(graph, tags=tagging.tags)
        self._require_whole(name, split)
        by_name = {node.name: node for node in constants}
        bound = {
            one.name: [
                node.name
                for node in one.module.graph.nodes
                if node.op == "placeholder" and node.name in by_name and tagging.binds(one.backend, by_name[node.name])
            ]
            for one in split.delegates
        }
        embedding = {
            one.name for one in split.delegates if tagging.delegates[one.backend].backend.capabilities.embeds_constants
        }
        self.emitted.append(emit(name, signature, split, bound, self.constants, state, embedding))
        self.graphs[name] = split.module
        self.left[name] = [self._left(item) for item in split.leftovers]
        self.pieces[name] = []
        for one in split.delegates:
            self._finish_inputs(one.module, set(bound[one.name]))
            delegation = tagging.delegates[one.backend]
            self.pieces[name].append(Piece(delegation.backend, delegation.specs, one.module))

    def _number(self, graph: fx.Graph, given: fx.Graph) -> None:
        """Give every operator a debug handle that is its own in the whole program, and note where it comes from."""
        before = {node.name: node for node in given.nodes}
        for node in graph.nodes:
            if node.op == "call_function":
                if source_line(node) is None and node.name in before:  # control flow loses it on the way
                    node.meta["stack_trace"] = before[node.name].meta.get("stack_trace")
                handle = len(self.debug.handles) + 1
                node.meta["debug_handle"] = handle
                self.debug.handles[handle] = place_of(node)

    def _require_whole(self, name: str, split: Partitioned) -> None:
        if any(isinstance(one, WholeProgram) for one in self.partitioners):
            for item in split.leftovers:
                reason = self._left(item).reason
                place = self.debug.handles.get(item.node.meta.get("debug_handle", 0), doc.Origin())
                stack = "".join(f"\n    {line}" for line in place.stack.splitlines())
                count = len(split.leftovers)
                raise UnsupportedOp(
                    f"{count} operator{'s' * (count > 1)} of method {name!r} {'are' if count > 1 else 'is'} not "
                    f"supported, so it cannot be lowered whole (Supported(backend) leaves such operators to PyTorch); "
                    f"the first: {reason}{stack}",
                    op=str(item.node.target),
                    source=item.source,
                )

    def _left(self, item: Any) -> Left:
        node = item.node
        reason = node.meta.get("refusal")
        if not reason:
            names = [partitioner.backend.name for partitioner in self.partitioners]
            reasons = [f"{who}: {one.reason(node)}" for who, one in zip(names, self.partitioners, strict=True)]
            reason = "; ".join(reasons)
        elif reason.startswith(f"{node.target}: "):
            reason = reason.removeprefix(f"{node.target}: ")
        elif reason.startswith("aten."):
            reason = f"not supported, and taken apart neither: {reason}"
        return Left(str(node.target), reason, module_path(node), item.source or "")

    @staticmethod
    def _finish_inputs(module: fx.GraphModule, bound: set[str]) -> None:
        for node in module.graph.nodes:
            if node.op == "placeholder" and node.name not in bound:
                node.meta.pop("constant", None)
        if config.verify_graphs:
            verify_graph(module)

    # -- compiling -----------------------------------------------------------------------------------------------------
    def preprocess(self) -> dict[str, list[Processed]]:
        """Compile every piece: all of one backend's in one call, so that it may share among methods."""
        done: dict[str, list[Processed | None]] = {name: [None] * len(pieces) for name, pieces in self.pieces.items()}
        backends = {id(piece.backend): piece.backend for pieces in self.pieces.values() for piece in pieces}
        for backend in backends.values():
            places = {
                name: [at for at, piece in enumerate(pieces) if piece.backend is backend]
                for name, pieces in self.pieces.items()
            }
            graphs = {name: [self.pieces[name][at].graph for at in found] for name, found in places.items()}
            specs = {name: [self.pieces[name][at].specs for at in found] for name, found in places.items()}
            made = _preprocess(backend, graphs, specs)
            for name, found in places.items():
                if len(made.get(name, ())) != len(found):
                    raise CompileError(f"backend {backend.name!r} gave {len(made.get(name, ()))} results for {name!r}")
                for at, processed in zip(found, made[name], strict=True):
                    self._check_debug_map(backend, processed)
                    done[name][at] = processed
        return {name: [one for one in found if one is not None] for name, found in done.items()}

    def _check_debug_map(self, backend: Backend, processed: Processed) -> None:
        """Ids are numbers or text, and each stands for operators of the program."""
        for ident, handles in processed.debug_map.items():
            if not isinstance(ident, (int, str)) or isinstance(ident, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                why = f"has the id {ident!r}; ids are numbers or text"
            elif not handles:
                why = f"says of {ident!r} that it stands for no operator; leave it out"
            elif unknown := [one for one in handles if one and one not in self.debug.handles]:
                why = f"has debug handle {unknown[0]} for {ident!r}; handles are the nodes' meta['debug_handle']"
            else:
                continue
            raise CompileError(f"the debug map of backend {backend.name!r} {why}")

    def program(self, processed: Mapping[str, Sequence[Processed]]) -> tuple[doc.Document, dict[str, bytes]]:
        """The document, and the delegates' bytes by entry; equal bytes are one entry."""
        blobs: dict[str, bytes] = {}
        names: dict[str, str] = {}
        named: dict[tuple[str, str], str] = {}

        def entry_of(data: bytes) -> str:
            _, sha = digest(data)
            entry = names.setdefault(sha, f"{BLOBS}{len(names)}")
            blobs[entry] = data
            return entry

        def named_entry(backend: str, key: str, data: bytes) -> str:
            entry = entry_of(data)
            if named.setdefault((backend, key), entry) != entry:
                raise CompileError(f"backend {backend!r} gave two different data the name {key!r}; names are unique")
            return entry

        methods: dict[str, doc.MethodRecord] = {}
        for one in self.emitted:
            delegates: list[doc.DelegateRecord] = []
            for piece, made, bound in zip(self.pieces[one.name], processed[one.name], one.bound, strict=True):
                inputs, outputs, constants = delegate_specs(piece.graph, bound)
                who = piece.backend
                data = {key: named_entry(who.name, key, value) for key, value in made.named_data.items()}
                delegates.append(
                    doc.DelegateRecord(
                        who.name, who.version, entry_of(made.data), piece.specs, inputs, outputs, constants, data
                    )
                )
            self.debug.maps[one.name] = [dict(made.debug_map) for made in processed[one.name]]
            methods[one.name] = doc.MethodRecord(
                one.name, one.values, one.inputs, one.outputs, one.constants, one.state, tuple(delegates),
                one.instructions,
            )  # fmt: skip
        producer = {"torchport": __version__, "torch": torch.__version__}
        return doc.Document(methods, [], {}, producer, self.dynamic), blobs


def _preprocess(
    backend: Backend,
    graphs: Mapping[str, Sequence[fx.GraphModule]],
    specs: Mapping[str, Sequence[CompileSpecs]],
) -> Mapping[str, Sequence[Processed]]:
    try:
        together = optional_of(backend).methods
        if together is not None:
            return together.preprocess_methods(graphs, specs)
        return preprocess_each(backend, graphs, specs)
    except (CompileError, ConfigError, UnsupportedOp, ImportError):
        raise
    except Exception as error:
        raise CompileError(
            f"backend {backend.name!r} failed to compile: {type(error).__name__}: {error}",
            op=f"{sum(map(len, graphs.values()))} graphs of methods {', '.join(graphs)}",
        ) from error


def _sizes(buckets: Any) -> Buckets | None:
    found = None if isinstance(buckets, bool) else Buckets.parse(buckets)
    if found is None and buckets is not None:
        raise ConfigError(f"buckets= takes a list of sizes, such as [16, 64], not {buckets!r}")
    return found


def lower(
    model: Model,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | Backend | Sequence[str | Backend] | None = None,
    partitioners: Sequence[Partitioner] | None = None,
    compile_specs: SpecsOf | None = None,
    methods: Methods | None = None,
    dynamic_shapes: Any = None,
    buckets: Sequence[int] | None = None,
) -> LoweredProgram:
    """A model compiled ahead of time: callable, and to be saved as one file.

    ``model``: an ``ExportedProgram``, or an ``nn.Module`` with example ``args`` and ``kwargs``, which is exported.
    ``methods``: more methods of the same program by name: exported programs, or example arguments for the module's
    method of that name; constants that methods share are stored once, and buffers are theirs together if they share a
    :class:`torchport.runtime.State`.
    ``backend``: a backend's name, or several in order of preference: each gets what it supports, and what nobody takes
    stays an ATen operator, run by PyTorch on the CPU. ``compile_specs``: options for its compiler, or by backend's
    name. ``partitioners``: more control; see :class:`Partitioner`.
    ``dynamic_shapes``: as for ``torch.export``, with a largest value (``torch.export.Dim("batch", max=64)``); a method
    with sizes that change is compiled for a few of them, ``buckets`` (default: 8, 16, 32, … and the largest). Inputs
    are padded up to the next one where that is exact; else it is compiled for the buckets given, or for each size.

    Raises :class:`UnsupportedOp` for what a program cannot hold, :class:`CompileError` where a backend's compiler
    fails, :class:`BackendUnavailable` where it is not installed, :class:`ConfigError` for arguments that do not fit
    together, and what ``torch.export`` raises.
    """
    chosen = _partitioners(backend, partitioners, compile_specs)
    sizes = _sizes(buckets)
    exported = _exported(model, args, kwargs, methods, dynamic_shapes)
    names = dim_names(model, args, kwargs, dynamic_shapes) if isinstance(model, torch.nn.Module) else []
    shapes = {name: shapes_of(name, program, names if name == _FORWARD else ()) for name, program in exported.items()}
    if sizes is not None and not any(shapes.values()):
        raise ConfigError("buckets= is for sizes that change, and there are none; give dynamic_shapes=, too")
    lowering = _Lowering(chosen)
    functional = {name: functional_form(program) for name, program in exported.items()}
    state = {name for program in functional.values() for name in program.graph_signature.buffers_to_mutate.values()}
    try:
        for name, program in functional.items():
            found = shapes[name]
            if found is None:
                lowering.method(name, program, exported[name], state)
            else:
                lowering.dynamic_method(name, program, exported[name], state, found, sizes)
        document, blobs = lowering.program(lowering.preprocess())
    except ImportError as error:
        reasons = {one.backend.name: one.backend.unavailable_reason() for one in chosen}
        shown = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason) or str(error)
        raise BackendUnavailable(f"a compiler is not installed here ({error}): {shown}") from error
    return LoweredProgram(
        document=document,
        debug=lowering.debug,
        blobs=blobs,
        constants=lowering.constants,
        exported=exported,
        pieces=lowering.pieces,
        left=lowering.left,
        graphs=lowering.graphs,
    )
