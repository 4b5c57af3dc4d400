"""Computations in pieces (:mod:`.pieces`): their bytes, and how they run.

To whoever compiles, keeps and runs it, such a computation is one: its bytes hold those of the different pieces, each
once, and in which order they are called. In memory pieces are computations that others may share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from ..core import metrics
from ..core.errors import CompileError
from ..core.specs import TensorSpec
from .container import pack, spec_from_json, spec_to_json, unpack
from .execution import Computation
from .interface import Backend, BackendData, BackendDevice, ExecutionContext
from .optional import Chain, ChainCall, ChainRun, optional_of
from .pieces import Pack, PieceCall, Pieces
from .prepare import Prepared
from .runner import CallingBackend, runner_of

__all__ = ["LinkedCall", "PiecedProgram", "assemble", "is_pieced", "make_pieced", "taken_apart"]

_MAGIC: Final = b"TPPIECE1"


def is_pieced(data: bytes) -> bool:
    """Whether bytes are those of pieces, and not a backend's own."""
    return data[: len(_MAGIC)] == _MAGIC


# -- bytes -------------------------------------------------------------------------------------------------------------
def assemble(pieces: Pieces, prepared: Sequence[Prepared]) -> bytes:
    """The bytes of a graph in pieces, of those of its different pieces."""
    metadata = {
        "inputs": pieces.inputs,
        "packs": [[one.source, list(one.places)] for one in pieces.packs],
        "calls": [[one.graph, list(one.inputs), list(one.outputs)] for one in pieces.calls],
        "results": list(pieces.results),
        "pieces": [
            [
                list(map(spec_to_json, one.inputs)), list(map(spec_to_json, one.outputs)), list(one.names), one.mark,
                one.ops, one.label, one.source, one.seconds,
            ]
            for one in prepared
        ],
    }  # fmt: skip
    return pack(_MAGIC, metadata, {str(at): bytes(one.data) for at, one in enumerate(prepared)})


def taken_apart(whole: Prepared, backend: str) -> tuple[list[Prepared], Pieces]:
    """What :func:`assemble` has put together; the graphs are left out. Raises :class:`CompileError`."""

    def build(document: dict[str, Any], sections: dict[str, bytes]) -> tuple[list[Prepared], Pieces]:
        prepared: list[Prepared] = []
        for at, (inputs, outputs, names, mark, ops, label, source, seconds) in enumerate(document["pieces"]):
            specs = tuple(map(spec_from_json, inputs)), tuple(map(spec_from_json, outputs))
            prepared.append(
                Prepared(sections[str(at)], *specs, tuple(names), mark, ops, label, source, seconds, kept=whole.kept)
            )
        packs = tuple(Pack(source, tuple(places)) for source, places in document["packs"])
        calls = tuple(PieceCall(graph, tuple(given), tuple(made)) for graph, given, made in document["calls"])
        return prepared, Pieces((), document["inputs"], packs, calls, tuple(document["results"]))

    return unpack(_MAGIC, whole.data, backend, build)


# -- running -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class LinkedCall:
    """One call of a piece: where its arguments and results are, and which values nobody needs after it."""

    computation: Computation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ends: tuple[int, ...]
    last: tuple[tuple[int, int], ...]
    """Of its arguments that are inputs of the whole which nobody uses later: (position, which input)."""


class WholeBeside(Protocol):
    """Who decides, run by run, whether the pieces run or the whole graph, compiled as such."""

    def run(self, pieces: Callable[[], Any], whole: Callable[[Computation], Any]) -> Any:
        """One run of either."""
        ...


@dataclass(slots=True)
class PiecedProgram:
    """The calls in order, how many values there are, and which of them are the results."""

    calls: list[LinkedCall]
    packs: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]
    """For each value after the inputs that is part of a pack: the pack, and what takes the part."""
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    """The same: the pack, and the places in it."""
    values: int
    results: tuple[int, ...]
    different: int
    """How many different pieces there are."""
    whole: WholeBeside | None = None
    chained: ChainRun | None = None
    """What runs the calls as one, where the backend can (:class:`.SupportsChain`)."""
    asked_for_chain: bool = False
    contexts: dict[frozenset[int], list[ExecutionContext]] = field(
        default_factory=dict[frozenset[int], list[ExecutionContext]]
    )
    """What each call is told, per set of donated inputs."""

    def chain(self, backend: Backend) -> ChainRun | None:
        """What runs all calls as one, if the backend can. Each has to have run once."""
        chains = optional_of(backend).chain
        if chains is None or any(call.computation.backend is not backend for call in self.calls):
            return None
        calls = tuple(ChainCall(call.computation.handle, call.inputs, call.outputs) for call in self.calls)
        inputs = self.values - len(self.parts) - sum(len(call.outputs) for call in self.calls)
        return chains.chained(Chain(inputs, self.parts, calls, self.values, self.results))

    def contexts_for(self, donated: frozenset[int]) -> list[ExecutionContext]:
        """What each call is told if these inputs are donated."""
        found = self.contexts.get(donated)
        if found is None:
            found = []
            for call in self.calls:
                plain = call.computation.context
                given = frozenset(at for at, which in call.last if which in donated)
                found.append(ExecutionContext(plain.device, plain.outputs, given, plain.method) if given else plain)
            if len(self.contexts) < 64:
                self.contexts[donated] = found
        return found


def _taking(places: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    first, count = places[0], len(places)
    if places == tuple(range(first, first + count)):
        return lambda pack: pack[first : first + count]
    index = torch.tensor(places)
    return lambda pack: pack[index]


def program_of(pieces: Pieces, computations: Sequence[Computation]) -> PiecedProgram:
    """The calls of the pieces, each of which is a computation."""
    count = pieces.inputs + len(pieces.packs)
    last: dict[int, int] = {}
    for at, piece in enumerate(pieces.calls):
        last.update(dict.fromkeys((*piece.inputs, *piece.outputs), at))
        count += len(piece.outputs)
    for value in pieces.results:
        last[value] = len(pieces.calls)
    calls: list[LinkedCall] = []
    for at, piece in enumerate(pieces.calls):
        ends = tuple(
            one for one in dict.fromkeys((*piece.inputs, *piece.outputs)) if last[one] == at and one >= pieces.inputs
        )
        once = {one for one in piece.inputs if piece.inputs.count(one) == 1}
        given = tuple(
            (position, one)
            for position, one in enumerate(piece.inputs)
            if one < pieces.inputs and last[one] == at and one in once
        )
        calls.append(LinkedCall(computations[piece.graph], piece.inputs, piece.outputs, ends, given))
    packs = [(one.source, _taking(one.places)) for one in pieces.packs]
    parts = tuple((one.source, one.places) for one in pieces.packs)
    return PiecedProgram(calls, packs, parts, count, pieces.results, len(computations))


class _Pieced(CallingBackend):
    """Calls pieces in order. Its values are those of the backend that compiled them."""

    def execute(
        self, handle: PiecedProgram, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        if handle.whole is None:
            return self._run(handle, args, context)
        return handle.whole.run(
            lambda: self._run(handle, args, context),
            lambda computation: self.of.execute(computation.handle, args, context),
        )

    def _run(
        self, handle: PiecedProgram, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        if handle.chained is not None:
            return handle.chained(args, context)
        results = self._run_each(handle, args, context)
        if not handle.asked_for_chain:
            handle.asked_for_chain = True
            handle.chained = handle.chain(self.of)
        return results

    def _run_each(
        self, handle: PiecedProgram, args: Sequence[BackendData], context: ExecutionContext
    ) -> list[BackendData]:
        backend = self.of
        values: list[Any] = [*args, *[None] * (handle.values - len(args))]
        at = len(args)
        on_host = {source: backend.from_device(values[source]) for source in {source for source, _ in handle.packs}}
        for source, take in handle.packs:
            values[at] = backend.to_device(take(on_host[source]), context.device)
            at += 1
        del on_host
        for call, told in zip(handle.calls, handle.contexts_for(context.donated), strict=True):
            computation = call.computation
            given = [values[one] for one in call.inputs]
            with computation.lock:
                results = computation.backend.execute(computation.handle, given, told)
            for one, result in zip(call.outputs, results, strict=True):
                values[one] = result
            for one in call.ends:
                values[one] = None
        return [values[one] for one in handle.results]

    def destroy(self, handle: PiecedProgram | None) -> None:
        """Nothing: pieces are computations, which are given back by themselves."""


class _PiecedOnHost(_Pieced):
    """The same for a backend that runs computations on CPU tensors."""

    def execute_on_host(
        self,
        handle: PiecedProgram,
        tensors: list[torch.Tensor],
        specs: Sequence[TensorSpec],
        context: ExecutionContext,
    ) -> Sequence[torch.Tensor] | None:
        """Run every piece, or the whole, on CPU tensors."""
        host = optional_of(self.of).host_execution
        assert host is not None
        if handle.whole is None:
            return self._run_on_host(handle, tensors)
        return handle.whole.run(
            lambda: self._run_on_host(handle, tensors),
            lambda computation: host.execute_on_host(computation.handle, tensors, specs, context),
        )

    def _run_on_host(self, handle: PiecedProgram, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        values: list[Any] = [*tensors, *[None] * (handle.values - len(tensors))]
        at = len(tensors)
        for source, take in handle.packs:
            values[at] = take(values[source]).contiguous()
            at += 1
        for call in handle.calls:
            computation = call.computation
            given = [values[one] for one in call.inputs]
            host = computation.optional.host_execution
            if host is None:
                return None
            with computation.lock:
                results = host.execute_on_host(computation.handle, given, computation.parameters, computation.context)
            if results is None:
                return None
            for one, result in zip(call.outputs, results, strict=True):
                values[one] = result
            for one in call.ends:
                values[one] = None
        return [values[one] for one in handle.results]


def runner(backend: Backend) -> Backend:
    """What calls the pieces of a backend: on CPU tensors, too, if the backend computes on them."""
    return runner_of(backend, _Pieced if optional_of(backend).host_execution is None else _PiecedOnHost)


def make_pieced(
    backend: Backend,
    device: BackendDevice,
    whole: Prepared,
    compiled: Callable[[Prepared], Computation],
) -> Computation:
    """The computation of bytes in pieces. ``compiled``: makes a piece's. Raises :class:`CompileError`."""
    prepared, pieces = taken_apart(whole, backend.name)
    if any(one.graph >= len(prepared) for one in pieces.calls):
        raise CompileError(f"these bytes of {backend.name} call a piece that they do not have; compile again")
    program = program_of(pieces, [compiled(one) for one in prepared])
    metrics.count("PiecesCalled", len(program.calls))
    metrics.count("PiecesCompiled", len(prepared))
    return Computation(
        runner(backend), device, whole.inputs, whole.names, whole.outputs, program,
        ExecutionContext(device, whole.outputs), whole.mark, whole.ops, whole.seconds,
    )  # fmt: skip
