"""The first half of compiling: a graph becomes a backend's bytes, in whichever process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

from torch import fx

from ..core.config import config
from ..core.errors import CompileError
from ..core.specs import CompileSpecs, TensorSpec
from .answers import checked_processed
from .interface import Backend
from .normal_form import input_specs, output_specs, verify_graph

__all__ = ["Prepared", "describe", "failure_of", "prepare", "with_bytes"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph as a backend's bytes, and what is known of the graph: all that a computation is made of.

    ``mark`` is the graph's fingerprint, ``ops`` how many operators it calls, ``label`` and ``source`` what an error
    names, ``seconds`` how long the backend took. ``kept``: the key of the disk cache's entry that the bytes come from;
    ``missed``: that it had none.
    """

    data: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    names: tuple[str, ...]
    mark: str
    ops: int
    label: str
    source: str | None
    seconds: float
    kept: str = ""
    missed: bool = False


def prepare(
    backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, mark: str = "", source: str | None = None
) -> Prepared:
    """The first half, ``preprocess``, which needs no device. Raises :class:`CompileError`, the backend's own chained.

    ``mark``: the graph's fingerprint. ``source``: the user's line to name in an error where the graph knows none.
    """
    return with_bytes(backend, specs, graph, describe(graph, mark, source))


def describe(graph: fx.GraphModule, mark: str, source: str | None) -> Prepared:
    """What is known of a graph before it has bytes."""
    if config.verify_graphs:
        verify_graph(graph)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    label = str(calls[-1].target) if len(calls) == 1 else f"a graph of {len(calls)} operators"
    source = (calls[-1].meta.get("source") if calls else None) or source
    return Prepared(b"", input_specs(graph), output_specs(graph), names, mark, len(calls), label, source, 0.0)


def with_bytes(backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, about: Prepared) -> Prepared:
    """What is known of a graph, with its bytes. Raises :class:`CompileError`, the backend's own chained."""
    start = perf_counter()
    try:
        data = checked_processed(backend, backend.preprocess(graph, specs)).data
    except Exception as error:
        raise failure_of(backend, error, about.label, about.source) from error
    return replace(about, data=data, seconds=perf_counter() - start)


def failure_of(backend: Backend, error: Exception, label: str, source: str | None) -> CompileError:
    """A backend's own exception as :class:`CompileError`; the caller chains it.

    An operator and a line that the exception names are the error's; else ``label`` and ``source``.
    """
    return CompileError(
        f"backend {backend.name!r} failed to compile: {type(error).__name__}: {getattr(error, 'message', error)}",
        op=getattr(error, "op", None) or label,
        source=getattr(error, "source", None) or source,
    )
