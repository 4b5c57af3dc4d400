"""What the process that compiles is asked, and what it answers, as bytes.

A request holds the backend's recipe, compile specs, a path or a graph, and the settings that were in force where it was
made: torchport's, and those of PyTorch that compilers read.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Final

import torch
from torch import fx

from ..backend.infer import fake_tensor
from ..backend.interface import Backend
from ..backend.optional import optional_of
from ..backend.prepare import Prepared
from ..backend.registry import registry
from ..core.config import config
from ..core.errors import CompileError
from ..core.specs import CompileSpecs, TensorSpec
from ..core.varying import VaryingDim, marks, replace_marks
from ..trace.graph import Sources
from ..trace.trie import Node
from .graphs import graph_to_data, operators
from .paths import Definitions, NotSendable, definitions_of, dumps, loads, path_to_data

__all__ = [
    "KNOWN",
    "PATH",
    "Answer",
    "NotKnown",
    "Question",
    "Request",
    "answer_of",
    "as_whole",
    "failure_to_data",
    "graph_request",
    "is_sendable",
    "path_request",
    "prepared_to_data",
    "read_request",
    "settings_in_force",
    "warming_request",
]

PATH: Final = "path"
GRAPH: Final = "graph"
KNOWN: Final = "path, if nothing has to be compiled for it"


class NotKnown(Exception):
    """Something would have to be compiled."""


@dataclass(frozen=True, slots=True)
class Request:
    """A computation to prepare. Requests with one ``key`` are one; ``label`` and ``source`` are what errors name."""

    key: Hashable
    body: bytes
    label: str
    source: str | None


@dataclass(frozen=True, slots=True)
class Question:
    """A request as the process that compiles reads it."""

    recipe: str
    specs: dict[str, bytes]
    engine: dict[str, Any]
    settings: Any
    definitions: Definitions
    kind: str
    content: Any
    names: tuple[str, ...]
    source: str | None


_SETTINGS: Final = 3
_DEFINITIONS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Prepared):
    """A computation's bytes, and for a path also where its inputs come from."""

    sources: Sources | None = None


# -- settings ----------------------------------------------------------------------------------------------------------
def _settings() -> tuple[Any, ...]:
    return (
        config.values(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        tuple(map(astuple, marks())),
    )


@contextmanager
def settings_in_force(settings: tuple[Any, ...]) -> Iterator[None]:
    """Have the settings that a request was made under. Its number of threads is one that code is generated for."""
    values, dtype, precision, deterministic, warn_only, threads, varying = settings
    replace_marks(VaryingDim(*one) for one in varying)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_num_threads(threads)
    try:
        with config.override(**{**values, "compile_workers": 0}):
            yield
    finally:
        torch.set_num_threads(1)


# -- requests ----------------------------------------------------------------------------------------------------------
def is_sendable(backend: Backend) -> bool:
    """Whether another process can make a backend."""
    return registry.recipe(backend) is not None


def _recipe(backend: Backend) -> str:
    found = registry.recipe(backend)
    if found is None:
        raise NotSendable(
            f"backend {backend.name!r} is known in this process only: another one can make a backend that has an entry "
            "point, or was registered as a class or function of a module that can be imported"
        )
    return found


def _engine_settings(backend: Backend) -> dict[str, Any]:
    able = optional_of(backend).compiler_settings
    return {} if able is None else dict(able.compiler_settings())


def _request(key: Hashable, question: Question, label: str) -> Request:
    fields = [getattr(question, field.name) for field in dataclasses.fields(question)]
    fields[_DEFINITIONS] = (question.definitions.modules, question.definitions.libraries)
    return Request(key, dumps(tuple(fields))[0], label, question.source)


def path_request(
    key: Hashable,
    backend: Backend,
    specs: CompileSpecs,
    path: Sequence[Node],
    outputs: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
    donated: Set[int] = frozenset(),
    known: bool = False,
) -> Request:
    """Ask for the values with the ids ``outputs`` at the end of a trace path. Raises :class:`NotSendable`.

    ``key``: what makes this computation this one; the service compiles once what is asked for twice. ``known``: nothing
    is to be compiled; the answer is :class:`NotKnown` where something would have to be.
    """
    recipe = _recipe(backend)
    data = path_to_data(path, outputs, leaf_specs, donated)
    engine = _engine_settings(backend)
    kind = KNOWN if known else PATH
    question = Question(recipe, dict(specs), engine, _settings(), data.definitions, kind, data.data, (), data.source)
    return _request(key, question, data.label)


def graph_request(
    key: Hashable, backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, source: str | None = None
) -> Request:
    """Ask for a graph in normal form; else as :func:`path_request`.

    ``source``: the user's line to name in an error where the graph knows none.
    """
    recipe = _recipe(backend)
    content = graph_to_data(graph)
    ops = operators(graph)
    names = tuple(node.name for node in graph.graph.find_nodes(op="placeholder"))
    foreign = definitions_of(op for op in ops if op.namespace not in ("aten", "prims"))
    engine = _engine_settings(backend)
    question = Question(recipe, dict(specs), engine, _settings(), foreign, GRAPH, content, names, source)
    return _request(key, question, f"a graph of {len(content[1])} operators")


def as_whole(request: Request) -> Request:
    """The same, to be compiled as a whole where it was compiled in pieces."""
    fields = list(loads(request.body))
    values, *others = fields[_SETTINGS]
    fields[_SETTINGS] = ({**values, "pieces": "off"}, *others)
    return Request(("whole", request.key), dumps(tuple(fields))[0], request.label, request.source)


def warming_request(backend: Backend, specs: CompileSpecs) -> Request:
    """Ask for next to nothing, so that the other process has loaded what compiling needs when it is needed."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.relu.default, (given,))
    output = graph.output((made,))
    for node in (given, made):
        node.meta.update(val=fake_tensor(TensorSpec((2,), torch.float32, (1,))), debug_handle=0, source=None)
    output.meta["val"] = (made.meta["val"],)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return graph_request(("warm", backend.name), backend, specs, module)


def read_request(body: bytes) -> Question:
    """A request as it was asked."""
    fields = list(loads(body))
    fields[_DEFINITIONS] = Definitions(*fields[_DEFINITIONS])
    return Question(*fields)


# -- answers -----------------------------------------------------------------------------------------------------------
_DONE: Final = "done"
_FAILED: Final = "failed"
_NOT_SENDABLE: Final = "not sendable"
_NOT_KNOWN: Final = "not known"
_SOURCES: Final = tuple(field.name for field in dataclasses.fields(Sources))


def prepared_to_data(prepared: Prepared, sources: Sources | None) -> bytes:
    """The answer to a request that compiled."""
    fields = tuple(getattr(prepared, field.name) for field in dataclasses.fields(Prepared))
    places = None if sources is None else tuple(getattr(sources, name) for name in _SOURCES)
    return dumps((_DONE, fields, places))[0]


def failure_to_data(error: BaseException) -> bytes:
    """The answer to a request that did not."""
    if isinstance(error, NotSendable):
        return dumps((_NOT_SENDABLE, error.reason))[0]
    if isinstance(error, NotKnown):
        return dumps((_NOT_KNOWN,))[0]
    told = "".join(traceback.format_exception(error))
    if _ran_out_of_memory(error):
        message, op, source = f"the compiler's process ran out of memory: {error}", None, None
    elif isinstance(error, CompileError):
        message, op, source = error.message, error.op, error.source
    else:
        message, op, source = f"{type(error).__name__}: {error}", None, None
    return dumps((_FAILED, message, op, source, told))[0]


def _ran_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__
    return False


class RemoteError(Exception):
    """What was raised in the other process, as text: the cause of the error that is raised here."""


def answer_of(body: bytes, request: Request) -> Answer:
    """What was prepared. Raises :class:`CompileError`, with the other process's traceback, or :class:`NotSendable`."""
    kind, *rest = loads(body)
    if kind == _DONE:
        fields, places = rest
        sources = None if places is None else Sources(**dict(zip(_SOURCES, places, strict=True)))
        return Answer(*fields, sources=sources)
    if kind == _NOT_SENDABLE:
        raise NotSendable(rest[0])
    if kind == _NOT_KNOWN:
        raise NotKnown
    message, op, source, told = rest
    raise CompileError(message, op=op or request.label, source=source or request.source) from RemoteError("\n" + told)
