"""Who takes which operators: a :class:`Partitioner` gives nodes of a graph tags, and each tag becomes a delegate."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from ..backend.builder import capture_of
from ..backend.fx_normalise import normalise
from ..backend.interface import Backend, BackendData, Capabilities, ExecutionContext, Processed, Support
from ..backend.registry import registry
from ..core.errors import BackendUnavailable, ConfigError, GraphError
from ..core.frames import warn_user
from ..core.specs import CompileSpecs

__all__ = [
    "DelegationSpec",
    "OpList",
    "PartitionResult",
    "Partitioner",
    "Pattern",
    "Supported",
    "Tagging",
    "WholeProgram",
    "collect_tags",
]

Ops = Collection[Any]


@dataclass(frozen=True, slots=True)
class DelegationSpec:
    """Which backend a tag's delegate is for, and what its compiler is told."""

    backend: Backend
    specs: CompileSpecs = field(default_factory=CompileSpecs)


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """``tags``: node → tag, for calls and for constants (placeholders); ``delegates``: tag → what it is for.

    A tagged constant belongs to the delegate; an untagged one that a delegate uses is an argument of every call. With
    ``bind_constants`` all constants that delegates use belong to them, also where several use one.
    """

    tags: Mapping[fx.Node, str]
    delegates: Mapping[str, DelegationSpec]
    bind_constants: bool = False


def functional_form(exported: torch.export.ExportedProgram, whole: bool = True) -> torch.export.ExportedProgram:
    """The program without writes: new values of buffers are results. A new object; operators stay ``whole``, or are
    decomposed to PyTorch's core ones."""
    with warnings.catch_warnings():
        # PyTorch warns about its own use of tree specs when it copies a program, and, from 2.14, where it removes the
        # copy of a value that two buffers take twice.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        warnings.filterwarnings("ignore", message="erase_node.* on an already erased node", category=UserWarning)
        return exported.run_decompositions({} if whole else None)


def _backend(backend: str | Backend) -> Backend:
    """The backend. One that cannot run here may still compile here, for where it can: that is a warning."""
    if not isinstance(backend, str):
        return backend
    try:
        return registry.get(backend)
    except BackendUnavailable as error:
        found = registry.find(backend)
        warn_user(
            f"{error}. The program can be compiled and saved here, if the compiler is installed; it runs where the "
            "backend is available."
        )
        return found


def _specs(specs: CompileSpecs | Mapping[str, bytes | str] | None) -> CompileSpecs:
    return specs if isinstance(specs, CompileSpecs) else CompileSpecs(specs or {})


class Partitioner(ABC):
    """Tags nodes of a graph in normal form for one backend (ExecuTorch's ``Partitioner``). Must not change the graph.

    ``backend`` is a name or a :class:`Backend`; :class:`BackendNotFound` if there is none of that name, a warning if it
    cannot run here. ``specs`` are compile specs for every delegate.
    """

    def __init__(self, backend: str | Backend, specs: CompileSpecs | Mapping[str, bytes | str] | None = None) -> None:
        self.backend: Final = _backend(backend)
        self.specs: Final = _specs(specs)
        known = self.backend.capabilities.compile_options
        unknown = sorted(set(self.specs) - set(known)) if known else []
        if unknown:
            raise ConfigError(
                f"backend {self.backend.name!r} reads no compile spec {unknown[0]!r}; it reads: "
                f"{', '.join(sorted(known))}"
            )

    def supports(self, node: fx.Node) -> Support:
        """Whether an operator is kept whole for this partitioner; what it does not want may be decomposed."""
        return capture_of(self.backend).supports(node)

    @abstractmethod
    def partition(self, graph: fx.GraphModule, taken: Collection[fx.Node]) -> PartitionResult:
        """Tags for a graph. ``taken`` nodes belong to partitioners that come first; tagging them has no effect.

        Tagged nodes that would form a cycle with the rest become several delegates of the same tag.
        """

    def reason(self, node: fx.Node) -> str:
        """Why a node was not taken, for reports."""
        support = self.supports(node)
        return support.reason or "not taken" if not support else "not taken"

    def _result(self, nodes: Collection[fx.Node]) -> PartitionResult:
        tag = self.backend.name
        return PartitionResult(dict.fromkeys(nodes, tag), {tag: DelegationSpec(self.backend, self.specs)}, True)


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


class Supported(Partitioner):
    """What the backend supports. What it refuses stays an ATen operator, with the backend's reason in the report."""

    def partition(self, graph: fx.GraphModule, taken: Collection[fx.Node]) -> PartitionResult:
        return self._result([node for node in _calls(graph) if node not in taken and self._wants(node)])

    def _wants(self, node: fx.Node) -> bool:
        source: Any = node.args[0] if _is_getitem(node) else node
        return "refusal" not in source.meta and bool(self.supports(source))


class WholeProgram(Supported):
    """The whole program as one delegate; lowering raises :class:`UnsupportedOp` if an operator is not supported."""


class OpList(Supported):
    """Operators of a list, where the backend supports them: ``OpList("xla", [torch.ops.aten.mm.default])``."""

    def __init__(
        self, backend: str | Backend, ops: Ops, specs: CompileSpecs | Mapping[str, bytes | str] | None = None
    ) -> None:
        super().__init__(backend, specs)
        self.ops: Final = frozenset(overload for op in ops for overload in _overloads(op))

    def supports(self, node: fx.Node) -> Support:
        if node.target not in self.ops:
            return Support.no(f"{node.target} is not in the list for {self.backend.name!r}")
        return capture_of(self.backend).supports(node)


class Pattern(Partitioner):
    """Every place where a function's operators occur: ``Pattern("xla", lambda a, b: (a @ b).relu(), (m, m))``.

    ``args`` are example tensors; their shapes do not matter, numbers in the function do. Occurrences do not overlap;
    each is one tag.
    """

    def __init__(
        self,
        backend: str | Backend,
        function: Callable[..., Any],
        args: Sequence[torch.Tensor],
        specs: CompileSpecs | Mapping[str, bytes | str] | None = None,
    ) -> None:
        super().__init__(backend, specs)

        class Wrapped(torch.nn.Module):
            def forward(self, *tensors: torch.Tensor) -> Any:
                return function(*tensors)

        exported = functional_form(torch.export.export(Wrapped(), tuple(args)))
        self._graph = normalise(exported.graph_module, self.backend)
        left = [str(node.target) for node in _calls(self._graph) if "refusal" in node.meta]
        if left:
            raise ConfigError(f"backend {self.backend.name!r} does not support all of the pattern: {', '.join(left)}")
        if not _calls(self._graph):
            raise ConfigError("a pattern needs at least one operator")
        self._ops = frozenset(node.target for node in _calls(self._graph))

    def supports(self, node: fx.Node) -> Support:
        if node.target not in self._ops:
            return Support.no(f"{node.target} is not in the pattern for {self.backend.name!r}")
        return capture_of(self.backend).supports(node)

    def partition(self, graph: fx.GraphModule, taken: Collection[fx.Node]) -> PartitionResult:
        matcher = SubgraphMatcher(self._graph.graph, match_output=False, match_placeholder=False)
        tags: dict[fx.Node, str] = {}
        delegates: dict[str, DelegationSpec] = {}
        for match in matcher.match(graph.graph):
            nodes = [node for pattern, node in match.nodes_map.items() if pattern.op == "call_function"]
            if any(node in taken or node in tags or node.op != "call_function" for node in nodes):
                continue
            tag = f"{self.backend.name}.{len(delegates)}"
            tags.update(dict.fromkeys(nodes, tag))
            delegates[tag] = DelegationSpec(self.backend, self.specs)
        return PartitionResult(tags, delegates, True)


def _overloads(op: Any) -> list[Any]:
    if isinstance(op, str):
        found: Any = torch.ops
        for part in op.removeprefix("torch.ops.").replace("::", ".").split("."):
            found = getattr(found, part, None)
        if found is None:
            raise ConfigError(f"there is no operator {op!r}; write it as 'aten.mm.default' or 'aten.mm'")
        op = found
    return [op] if not hasattr(op, "overloads") else [getattr(op, name) for name in op.overloads()]


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


class Wanted(Backend):
    """A backend as a partitioner sees it: what normalisation asks, so that what it keeps whole is not taken apart."""

    def __init__(self, partitioner: Partitioner) -> None:
        self.name = partitioner.backend.name  # type: ignore[misc]
        self.capabilities = Capabilities(holds_kernels=partitioner.backend.capabilities.holds_kernels)
        self._partitioner = partitioner

    def supports(self, node: fx.Node) -> Support:
        return self._partitioner.supports(node)

    def decompositions(self) -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
        return self._partitioner.backend.decompositions()

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return self._partitioner.backend.preprocess(graph, specs)

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        return self._partitioner.backend.execute(handle, args, context)


# -- collecting what partitioners say ----------------------------------------------------------------------------------
@dataclass(slots=True)
class Tagging:
    """All partitioners' tags. A tag here is unique over partitioners; ``bound`` are constants that belong to theirs."""

    tags: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    delegates: dict[str, DelegationSpec] = field(default_factory=dict[str, DelegationSpec])
    bound: dict[str, set[fx.Node] | None] = field(default_factory=dict[str, set[fx.Node] | None])

    def binds(self, tag: str, constant: fx.Node) -> bool:
        """Whether a constant belongs to the tag's delegates."""
        found = self.bound[tag]
        return found is None or constant in found


def _shape_of(graph: fx.GraphModule) -> list[Any]:
    """What must be the same after a partitioner has seen the graph."""
    return [
        (node, node.name, node.op, node.target, node.args, node.kwargs, tuple(sorted(map(str, node.meta))))
        for node in graph.graph.nodes
    ]


def _checked(
    partitioner: Partitioner, graph: fx.GraphModule, result: PartitionResult, constants: Collection[fx.Node]
) -> None:
    who = type(partitioner).__name__
    nodes = set(graph.graph.nodes)
    for node, tag in result.tags.items():
        if node not in nodes:
            raise GraphError(f"{who} tagged {node}, which is not a node of the graph")
        if tag not in result.delegates:
            raise GraphError(f"{who} gave {node} the tag {tag!r}, but did not say which backend that is for")
        if node.op == "output":
            raise GraphError(f"{who} tagged the output ({tag!r}); tag what computes it")
        if node.op == "placeholder" and node not in constants:
            raise GraphError(
                f"{who} tagged {node.target}, an input that the user gives or a buffer that the program changes; only "
                "constants can belong to a delegate"
            )
        if node.op in ("placeholder", "get_attr"):
            others = [user for user in node.users if result.tags.get(user) != tag]
            if others:
                raise GraphError(
                    f"{who} gave constant {node.target} the tag {tag!r}, but {others[0]} uses it under "
                    f"{result.tags.get(others[0])!r}; leave it untagged, or tag all its users alike"
                )


def collect_tags(partitioners: Sequence[Partitioner], graph: fx.GraphModule, constants: Collection[fx.Node]) -> Tagging:
    """Ask partitioners in order of preference. Raises :class:`GraphError` for one that breaks a rule."""
    found = Tagging()
    for position, partitioner in enumerate(partitioners):
        before = _shape_of(graph)
        result = partitioner.partition(graph, frozenset(found.tags))
        if _shape_of(graph) != before:
            raise GraphError(
                f"{type(partitioner).__name__}.partition() changed the graph; return tags, and rewrite in preprocess()"
            )
        _checked(partitioner, graph, result, constants)
        for tag, delegation in result.delegates.items():
            unique = f"{position}:{tag}"
            found.delegates[unique] = delegation
            mine = {
                node for node, given in result.tags.items() if given == tag and node.op in ("placeholder", "get_attr")
            }
            found.bound[unique] = None if result.bind_constants else mine
        for node, tag in result.tags.items():
            if node.op == "call_function" and node not in found.tags:
                found.tags[node] = f"{position}:{tag}"
    return found
