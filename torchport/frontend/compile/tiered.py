"""Graphs of ``torch.compile`` that run before they are compiled: interpreted, while another process compiles them.

A backend's part of a graph (a *delegate*) that neither memory nor the disk cache has is interpreted operator by
operator on CPU tensors, and the compile service is asked for it. Between two calls the compiled computation takes its
place, so each call has its effects and its random numbers once. When all parts are compiled, nothing of this is left on
the way of a call.

The interpreter runs the graph that is compiled, not the program: random operators are drawn as they are there, by the
same operators or by the same arithmetic on the same keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from ... import native
from ...backend.compiler import EntryRefused, SizesRefused, computations
from ...backend.execution import Computation, execute_on_host
from ...backend.interface import Backend, BackendData, BackendDevice, ExecutionContext, Processed, TensorData
from ...backend.interpreted_graph import Interpreter, can_interpret, interpreted_graph
from ...backend.normal_form import input_specs
from ...backend.serialize import fingerprint
from ...core import metrics
from ...core.config import config
from ...core.default_state import default_state
from ...core.errors import TorchportError
from ...core.forks import guarded_lock
from ...core.sharding import is_partitioned
from ...core.specs import CompileSpecs, TensorSpec
from ...run.checked_swap import compare, say_dropped, say_that_it_agrees
from ...run.history import history
from ...run.reasons import CompileReason
from ...run.sizes import Family
from ...run.tier_record import TierRecord
from ...run.tiers import claim, each_size_by_itself, is_tiered, loader, say_it_stays
from ...run.whole import watch_pieces
from ...run.worth import costs, price
from ...worker.paths import NotSendable
from ...worker.request import graph_request
from ...worker.service import Cancelled, Ticket, service

__all__ = ["Part", "TieredProgram", "begin"]

Run: TypeAlias = Callable[[list[Any]], Sequence[Any]]

log: Final = logging.getLogger("torchport.compile")


def begin(
    backend: Backend, device: BackendDevice, specs: CompileSpecs, graph: fx.GraphModule, family: Family | None = None
) -> Computation | Part:
    """A delegate's computation, compiled; or as a :class:`Part`, which is interpreted at first.

    ``family``: of a graph that is for one set of shapes among many, those of them that are compiled: whether one more
    is depends on what it costs, and is not before its second call. Raises :class:`CompileError`.
    """
    if not _is_tiered(backend):
        return computations.get(backend, device, specs, graph, None)
    mark = fingerprint(graph)
    known = computations.known(backend, device, specs, graph, mark)
    if known is not None or not can_interpret(graph):
        return known or computations.get(backend, device, specs, graph, None)
    try:
        return Part(backend, device, specs, graph, mark, family)
    except NotSendable:
        return computations.get(backend, device, specs, graph, None)


def _is_tiered(backend: Backend) -> bool:
    """Whether a backend's graphs are interpreted at first.

    Not where compiling is as quick as reading what was compiled, where what is not on disk is an error, where there is
    no other process to compile, or in PyTorch's deterministic mode: when the compiled graph takes over depends on time,
    and its last bits may be others.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if not is_tiered(backend) or config.cache == "cache-only" or backend.capabilities.skips_cache:
        return False
    if is_partitioned(backend):
        return False  # interpreting would bring values to one device
    return not service.off or bool(service.failed)


class Part:
    """A delegate that is interpreted until it is compiled. ``computation`` is what runs now."""

    def __init__(
        self,
        backend: Backend,
        device: BackendDevice,
        specs: CompileSpecs,
        graph: fx.GraphModule,
        mark: str,
        family: Family | None,
    ) -> None:
        """Ask for it, at once or when it has cost enough. Raises :class:`NotSendable`."""
        self.backend = backend
        self.device = device
        self.specs = specs
        self.graph = graph
        self.family = family
        self.sizes = tuple(size for spec in input_specs(graph) for size in spec.shape)
        # With the settings that are in force now, which it would have been compiled under.
        self._key = ("graph", backend.name, str(device), specs.fingerprint(), mark)
        self._request = graph_request(self._key, backend, specs, graph)
        self._exact = False
        self._ticket: Ticket | None = None
        self._check: _Check | None = None
        self.computation = interpreted_graph(graph, Interpreter(backend.name))
        self._interpreted = self.computation
        place = f"{backend.name} on {device}"
        self.record = TierRecord("torch.compile", place, self.computation.graph_ops)
        history.tiers.append(self.record)
        metrics.count("InterpretedPlan")
        if family is None:
            self._ask("torch.compile has a graph that neither memory nor the disk cache knows")

    def _ask(self, why: str) -> None:
        if service.failed:
            self._stay(service.failed)
            return
        self.record.expected = costs.expected(self.backend, self.record.operators)
        reason = CompileReason(self.record.device, "torch.compile", "graph", why, self.record.operators, 0)
        history.reasons.append(reason)
        log.info("%s", reason)
        self._submit()

    def _submit(self) -> None:
        self.record.tier = "compiling"
        self._ticket = service.submit(self._request, loader(self.backend, self.device, self.specs))

    def called(self) -> None:
        """Note that it is about to run."""
        if self._check is not None:
            return
        metrics.count("InterpretedRun")
        self.record.runs += 1
        self.record.seconds += self.computation.seconds
        if self._ticket is None and not self.settled and self.record.runs >= 2 and self._is_worth_it():
            self._ask("a graph of torch.compile has come back with the same shapes")

    def _is_worth_it(self) -> bool:
        """Whether these shapes have cost enough, beside the others that the graph was compiled for."""
        assert self.family is not None
        factor = self.family.factor(self.sizes)
        if factor > 1:
            expected = costs.expected(self.backend, self.record.operators)
            each = self.record.seconds / max(self.record.runs * self.record.operators, 1)
            if self.record.seconds < price(self.backend, each) * expected * factor:
                return False
            metrics.count("OneMoreSize")
        self.family.add(self.sizes)
        return True

    @property
    def settled(self) -> bool:
        """Whether nothing is going to change any more."""
        return self.record.tier in ("compiled", "stays interpreted")

    def advance(self) -> bool:
        """Have the next thing run that is there, if there is one; whether ``computation`` has changed."""
        if self._check is not None:
            return self._after_check(self._check)
        ticket = self._ticket
        if ticket is None or not ticket.done():
            return False
        entry = ""
        try:
            answer, made = claim(ticket, self.backend, self.device, self.specs)
            entry = answer.entry
        except NotSendable:
            native.announce()
            made = computations.get(self.backend, self.device, self.specs, self.graph, None)
        except (Cancelled, EntryRefused):
            if service.failed or service.off:
                self._stay(service.failed or service.off)
            else:
                self._submit()
            return False
        except SizesRefused as error:
            if self._exact:
                self._stay(str(error))
                say_it_stays(error)
                return False
            self._exact = True
            with each_size_by_itself():
                self._request = graph_request((*self._key, "exact"), self.backend, self.specs, self.graph)
            self._submit()
            return False
        except TorchportError as error:
            self._stay(str(error))
            say_it_stays(error)
            return False
        watch_pieces(self.backend, self.device, self.specs, made, self._request, self.record, entry)
        metrics.count("TakenOver")
        metrics.metrics.add_time("TakeOverTime", self.record.take_over())
        if config.verify_swap:
            self.record.tier = "checked"
            self._check = _Check(self, self._interpreted, made)
            self.computation = self._check.computation
        else:
            self.computation = made
        return True

    def _after_check(self, check: _Check) -> bool:
        if check.wrong:
            self._stay(check.wrong)
            self.computation = self._interpreted
        elif check.left <= 0:
            say_that_it_agrees(self.record.operators, check.largest)
            self.record.tier = "compiled"
            self.computation = check.compiled
        else:
            return False
        self._check = None
        return True

    def _stay(self, why: str) -> None:
        metrics.count("StaysInterpreted")
        self._ticket = None
        self.record.stay(why)


class TieredProgram:
    """A split graph of which parts are interpreted; called with a list of arguments, which it empties.

    ``then`` is called with what takes its place, once nothing is going to change any more.
    """

    def __init__(
        self,
        made: Mapping[str, Computation | Part],
        link: Callable[[Mapping[str, Computation]], Run],
    ) -> None:
        self._made = made
        self._link = link
        self._parts = [part for part in made.values() if isinstance(part, Part)]
        self._run = self._linked()
        self._lock = guarded_lock()
        self.then: Callable[[Run], None] | None = None

    def _linked(self) -> Run:
        return self._link({name: one.computation if isinstance(one, Part) else one for name, one in self._made.items()})

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self._lock.acquire(blocking=False):  # else another thread looks after it
            try:
                self._advance()
            finally:
                self._lock.release()
        return self._run(args)

    def _advance(self) -> None:
        with default_state():
            changed = [part.advance() for part in self._parts if not part.settled]
            if any(changed):
                self._run = self._linked()
        for part in self._parts:
            if part.record.tier != "compiled":
                part.called()
        if self.then is not None and all(part.settled for part in self._parts):
            self.then(self._run)


class _Check(Backend):
    """Runs the interpreter and the compiled computation on the same tensors and random numbers (``verify_swap``)."""

    def __init__(self, part: Part, interpreted: Computation, compiled: Computation) -> None:
        self.name = part.backend.name  # type: ignore[misc]  # errors are told of it
        self.part = part
        self.interpreted = interpreted
        self.compiled = compiled
        self.left = config.verify_swap
        self.largest = 0.0
        self.wrong = ""
        self.computation = interpreted.run_by(self)

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("both computations are there already")

    def execute(self, handle: None, args: Sequence[BackendData], context: ExecutionContext) -> list[BackendData]:
        results = self._both([arg.tensor for arg in args])  # type: ignore[attr-defined]
        return [TensorData(context.device, TensorSpec.of(result), result) for result in results]

    def execute_on_host(
        self, handle: None, tensors: list[torch.Tensor], specs: Sequence[TensorSpec], context: ExecutionContext
    ) -> Sequence[torch.Tensor]:
        """Run both on CPU tensors."""
        return self._both(tensors)

    def _both(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.default_generator
        before = generator.get_state()
        wanted = list(execute_on_host(self.interpreted, list(tensors)))
        if self.wrong or self.left <= 0:  # another thread was quicker
            return wanted
        after = generator.get_state()
        generator.set_state(before)
        self.left -= 1
        try:
            found = list(execute_on_host(self.compiled, list(tensors)))
        except TorchportError as error:
            self._refuse(0, str(error))
            return wanted
        finally:
            generator.set_state(after)
        metrics.count("VerifiedSwap")
        largest, at, why = compare(found, wanted)
        self.largest = max(self.largest, largest)
        if why:
            self._refuse(at, why)
            return wanted
        return found

    def _refuse(self, at: int, why: str) -> None:
        self.wrong = why
        say_dropped(self.part.record.device, why, _needed(self.part.graph, at))


def _needed(module: fx.GraphModule, at: int) -> fx.GraphModule:
    """The operators that one result needs."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            outputs: Any = node.args[0]
            graph.output((values[outputs[at]],))
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
