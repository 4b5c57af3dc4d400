"""The first half of compiling: a graph becomes a backend's bytes, in whichever process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from torch import fx

from ..core.config import config
from ..core.errors import CompileError, ContractError
from ..core.specs import CompileSpecs, TensorSpec
from .answers import checked_processed
from .interface import Backend
from .normal_form import input_specs, output_specs, verify_graph
from .optional import optional_of

__all__ = ["Prepared", "describe", "failure_of", "prepare", "with_bytes", "with_bytes_of_all"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph as a backend's bytes, and what is known of the graph: all that a computation is made of.

    ``mark`` is the graph's fingerprint, ``ops`` how many operators it calls, ``label`` and ``source`` what an error
    names, ``seconds`` how long the backend took. ``kept``: the key of the disk cache's entry that the bytes come from;
    ``missed``: that it had none. ``entry``: the key of the entry that has them now.
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
    entry: str = ""


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


def with_bytes_of_all(
    backend: Backend, specs: CompileSpecs, graphs: Sequence[fx.GraphModule], abouts: Sequence[Prepared]
) -> list[Prepared]:
    """As :func:`with_bytes` for several graphs, by one call of ``preprocess_all``, whose time they share."""
    together = optional_of(backend).preprocess_all
    assert together is not None
    start = perf_counter()
    try:
        given: Any = list(together.preprocess_all(graphs, specs))
        if len(given) != len(graphs):
            raise ContractError(
                f"backend {backend.name!r}: preprocess_all() returned {len(given)} results for {len(graphs)} graphs; "
                "return what preprocess() would for each, in order",
                method="preprocess_all",
            )
        data = [checked_processed(backend, one).data for one in given]
    except Exception as error:
        label = f"{len(graphs)} graphs of {sum(about.ops for about in abouts)} operators"
        raise failure_of(backend, error, label, abouts[0].source) from error
    seconds = (perf_counter() - start) / len(graphs)
    return [replace(about, data=one, seconds=seconds) for about, one in zip(abouts, data, strict=True)]


def failure_of(backend: Backend, error: Exception, label: str, source: str | None) -> CompileError:
    """A backend's own exception as :class:`CompileError`; the caller chains it.

    An operator and a line that the exception names are the error's; else ``label`` and ``source``.
    """
    return CompileError(
        f"backend {backend.name!r} failed to compile: {type(error).__name__}: {getattr(error, 'message', error)}",
        op=getattr(error, "op", None) or label,
        source=getattr(error, "source", None) or source,
    )
