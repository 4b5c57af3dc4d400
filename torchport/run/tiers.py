"""Which tier a computation runs in: interpreted at first, compiled when it has come back often enough to be worth it.

A plan begins as an :class:`.interpreted.InterpretedPlan`. Its runs are timed. When together they have cost a part of
what compiling is expected to cost, the compiler's process is asked for it (:mod:`..worker`), and the program goes on
interpreting. A later flush finds the answer, and the compiled plan takes over. What does not compile is said once; the
program stays with the interpreter.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

from .. import native
from ..backend.compiler import EntryRefused, SizesRefused, beside, computations
from ..backend.execution import Computation
from ..backend.interface import BackendDevice
from ..backend.pieced import is_pieced
from ..backend.sizes.sized import is_sized
from ..core import metrics
from ..core.config import config
from ..core.errors import CompileError, TorchportError
from ..core.specs import CompileSpecs, TensorSpec
from ..trace.finalizers import may_collect
from ..worker.paths import NotSendable
from ..worker.request import Answer, NotKnown, is_sendable, path_request
from ..worker.service import Cancelled, Ticket, service
from . import worth
from .checked_swap import CheckedPlan, make_checked
from .history import history
from .interpreted import InterpretedPlan, make_interpreted
from .kept_paths import forget, is_kept, note_made, noting
from .plans import ExecutionPlan, make_plan, plan_of
from .sizes import FREE, Family, family_of, skeleton_of
from .tier_record import TierRecord
from .trial import TrialPlan, is_worth_trying, make_trial
from .whole import watch_pieces
from .worth import costs, is_worth_a_look, price

if TYPE_CHECKING:
    from ..backend.interface import Backend
    from ..trace.trie import Node
    from .device_runtime import DeviceRuntime

__all__ = [
    "Progress",
    "claim",
    "first_plan",
    "is_tiered",
    "loader",
    "next_plan",
    "say_it_stays",
]


log: Final = logging.getLogger("torchport.compile")


class Progress:
    """Where a plan that is interpreted stands on its way to be compiled: what is needed to ask for it."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        node: Node,
        value_ids: tuple[int, ...],
        leaf_specs: Callable[[], Sequence[TensorSpec]],
        donated: Callable[[], Set[int]],
        note: Callable[[], object],
    ) -> None:
        self.runtime = runtime
        self.node = node
        self.value_ids = value_ids
        self.leaf_specs = leaf_specs
        self.donated = donated
        self.note = note
        """Called when something is compiled: writes down why."""


def is_tiered(backend: Backend) -> bool:
    """Whether what is new to the program is interpreted at first, as far as the settings and the backend say."""
    return config.tiers == "on" or (config.tiers == "auto" and backend.capabilities.slow_to_compile)


def first_plan(
    runtime: DeviceRuntime,
    path: Sequence[Node],
    value_ids: tuple[int, ...],
    leaf_specs: Sequence[TensorSpec],
    spent: float = 0.0,
) -> InterpretedPlan:
    """The plan of values that nobody has wanted here before; ``spent``: seconds that its path has cost already."""
    metrics.count("InterpretedPlan")
    plan = make_interpreted(runtime, path, value_ids, leaf_specs)
    plan.seconds = spent
    assert plan.computation is not None
    plan.record = TierRecord("lazy", repr(runtime), plan.computation.graph_ops)
    history.tiers.append(plan.record)
    return plan


def next_plan(plan: InterpretedPlan, progress: Progress) -> ExecutionPlan:
    """Note another run of an interpreted plan; what to run: the same, or the compiled one once it is there."""
    computation = plan.computation
    assert computation is not None
    if isinstance(plan, (CheckedPlan, TrialPlan)):
        return plan.settled()
    metrics.count("InterpretedRun")
    if plan.record is not None:
        if plan.record.runs:
            plan.quickest = min(plan.quickest or computation.seconds, computation.seconds)
        plan.record.runs += 1
        plan.record.seconds += computation.seconds
    plan.seconds += computation.seconds
    if plan.ticket is not None:
        return _taken_over(plan, progress) if plan.ticket.done() else plan
    if plan.stays or progress.runtime.is_lost:
        return plan
    backend = progress.runtime.backend
    expected = costs.expected(backend, computation.graph_ops)
    if plan.record is not None:
        plan.record.expected = expected
    least = price(backend, (plan.quickest or computation.seconds) / max(computation.graph_ops, 1))
    looks = is_worth_a_look(plan.seconds, expected)
    if plan.seconds >= least * expected or looks or Family.any_shared:
        expected *= _family(plan, progress).factor(plan.sizes)
    if not plan.here and worth.WORTH_WAITING * expected <= plan.seconds < least * expected:
        plan.here = _compiles_here(progress)  # that price is the lower one
    if not plan.here and plan.seconds >= least * expected:
        _request(plan, progress)
    elif not plan.here and not plan.asked and not service.off:
        is_shared = plan.family is not None and plan.family.shared
        if is_shared or (looks and not plan.looked and _is_kept(plan, progress)):
            plan.asked = True
            _request(plan, progress, known=True)
    if plan.here and plan.seconds >= worth.WORTH_WAITING * expected:
        return _compiled_here(plan, progress)
    return plan


def _is_kept(plan: InterpretedPlan, progress: Progress) -> bool:
    """Whether an earlier program has left on disk what takes an interpreted plan's place. It is asked once."""
    plan.looked = True
    return is_kept(progress.runtime.backend, progress.node.path(), progress.value_ids, progress.leaf_specs())


def _family(plan: InterpretedPlan, progress: Progress) -> Family:
    """The computations that differ from this one in sizes alone."""
    if plan.family is None:
        who = f"{progress.runtime!r} {progress.runtime.backend.name}"
        known = skeleton_of(who, progress.node.path(), progress.value_ids, progress.leaf_specs())
        key, plan.sizes, plan.names = known
        plan.family = family_of(key)
    return plan.family


def _note_sizes(plan: InterpretedPlan, progress: Progress) -> None:
    """Note that a plan is being compiled: why, and what is another than in those that differ in sizes alone."""
    progress.note()
    family = _family(plan, progress)
    if plan.record is not None and (varied := family.varied(plan.sizes, plan.names)):
        plan.record.sizes = f"size {len(family.compiled) + 1} of it that is compiled: {varied}"
        if len(family.compiled) >= FREE:
            metrics.count("OneMoreSize")
            log.info("compiled for one more size: %s", varied)
    family.add(plan.sizes)


def _compiles_here(progress: Progress) -> bool:
    """Whether the program's own process compiles: there is no other one, it cannot make the backend, or the graph is to
    be segments, where it compiles whole ones. What else cannot be sent shows when it is asked."""
    if service.off and not service.failed:
        return True
    return not is_sendable(progress.runtime.backend) or any(node.refused for node in progress.node.path())


def _request(plan: InterpretedPlan, progress: Progress, known: bool = False) -> None:
    """Ask the compiler's process; ``known``: for what need not be compiled."""
    if service.failed:  # what has ended that process three times is not to end this one
        _stay(plan, service.failed)
        return
    runtime, node = progress.runtime, progress.node
    if _compiles_here(progress):
        plan.here = True
        return
    try:
        key = (id(runtime), id(node), progress.value_ids, known, plan.exact)
        with each_size_by_itself() if plan.exact else nullcontext():
            request = path_request(
                key,
                runtime.backend,
                runtime.specs,
                node.path(),
                progress.value_ids,
                progress.leaf_specs(),
                progress.donated(),
                known,
            )
    except NotSendable:
        plan.here = True
        return
    if not known:
        _note_sizes(plan, progress)
    load = loader(runtime.backend, runtime.device, runtime.specs)
    path, specs = node.path(), list(progress.leaf_specs())
    plan.ticket = service.submit(request, noting(load, runtime.backend, path, progress.value_ids, specs))
    if plan.record is not None:
        plan.record.tier = "compiling"


def _taken_over(plan: InterpretedPlan, progress: Progress) -> ExecutionPlan:
    """The compiled plan, if what was asked for compiled."""
    ticket, plan.ticket = plan.ticket, None
    runtime = progress.runtime
    if plan.record is not None:
        plan.record.tier = "interpreted"
    try:
        answer, computation = claim(ticket, runtime.backend, runtime.device, runtime.specs)
        assert answer.sources is not None
    except NotKnown:
        forget(runtime.backend, progress.node.path(), progress.value_ids, progress.leaf_specs())
        return plan  # it is compiled when it has cost enough, as any other
    except NotSendable:
        plan.here = True
        return plan
    except (Cancelled, EntryRefused):
        plan.seconds = 0.0  # it is asked for again when it has cost as much again
        plan.asked = plan.looked = False
        return plan
    except SizesRefused as error:
        if plan.exact:
            _give_up(plan, error)
        else:
            plan.exact = plan.asked = True  # it is asked for again as soon as it has cost enough
        return plan
    except TorchportError as error:
        _give_up(plan, error)
        return plan
    watch_pieces(runtime.backend, runtime.device, runtime.specs, computation, ticket.request, plan.record, answer.entry)
    if plan.family is not None and (is_sized(answer.data) or is_pieced(answer.data)):
        plan.family.note_shared()
        if plan.record is not None and is_sized(answer.data):
            plan.record.sizes = "served by a computation for several sizes"
    made = plan_of(computation, progress.node.path(), progress.value_ids, answer.sources)
    return _successor(plan, progress, made)


def _compiled_here(plan: InterpretedPlan, progress: Progress) -> ExecutionPlan:
    """The compiled plan, if it compiles in this process: the backend, or an operator, is known to no other."""
    runtime, path = progress.runtime, progress.node.path()
    _note_sizes(plan, progress)
    before = metrics.counter("UncachedCompile")
    try:
        with may_collect():
            made = make_plan(runtime, path, progress.value_ids, progress.leaf_specs(), donated=progress.donated())
    except CompileError as error:
        _give_up(plan, error)
        return plan
    assert made.computation is not None
    note_made(made, runtime.backend, path, progress.leaf_specs())
    if metrics.counter("UncachedCompile") > before:
        costs.note(runtime.backend, made.computation.graph_ops, made.computation.compile_seconds)
    return _successor(plan, progress, made)


def _successor(plan: InterpretedPlan, progress: Progress, made: ExecutionPlan) -> ExecutionPlan:
    """What takes an interpreted plan's place: the compiled one, with the interpreter beside it if that is wanted, or
    in turn with it until it is known which is quicker."""
    metrics.count("TakenOver")
    metrics.metrics.add_time("TakeOverTime", time.monotonic() - plan.since)
    if plan.record is not None:
        plan.record.take_over()
    if config.verify_swap:
        return make_checked(progress.runtime, progress.node, progress.leaf_specs(), plan, made)
    backend = progress.runtime.backend
    if not is_worth_trying(backend, plan):
        return made
    # An interpreter that is quicker here is so in the next program, too: it need not look for what is on disk.
    known = backend, progress.node.path(), progress.value_ids, list(progress.leaf_specs())
    return make_trial(progress.runtime, plan, made, dropped=lambda: forget(*known))


def _give_up(plan: InterpretedPlan, error: TorchportError) -> None:
    """It does not compile: say so, once for each reason, and go on with the interpreter."""
    _stay(plan, str(error))
    say_it_stays(error)


def _stay(plan: InterpretedPlan, why: str) -> None:
    plan.stays = True
    metrics.count("StaysInterpreted")
    if plan.record is not None:
        plan.record.stay(why)


def each_size_by_itself() -> AbstractContextManager[object]:
    """Have what is asked for compiled for its own sizes, inside a ``with`` block."""
    return config.override(sizes="off")


def claim(ticket: Ticket, backend: Backend, device: BackendDevice, specs: CompileSpecs) -> tuple[Answer, Computation]:
    """What the other process has compiled, made runnable here. Raises :class:`CompileError`, :class:`NotSendable`,
    :class:`Cancelled`, and where it is to be asked for again :class:`EntryRefused`, or :class:`SizesRefused` if that is
    for its own sizes alone."""
    answer = ticket.result()
    if not answer.kept and answer.seconds:
        costs.note(backend, answer.ops, ticket.seconds or answer.seconds)
    native.announce()
    if isinstance(ticket.loaded, Exception):
        raise ticket.loaded.with_traceback(None)
    return answer, ticket.loaded or computations.take(backend, device, specs, answer)


def loader(backend: Backend, device: BackendDevice, specs: CompileSpecs) -> Callable[[Answer], Computation]:
    """What makes an answer runnable, to be called on the compile service's thread: the program's goes on meanwhile."""

    def load(answer: Answer) -> Computation:
        with beside():
            return computations.take(backend, device, specs, answer)

    return load


def say_it_stays(error: TorchportError) -> None:
    """Say on standard error that something stays interpreted, once for each reason."""
    message = str(error)
    if message not in _said:
        _said.add(message)
        # To people: a warning would break programs that turn warnings into errors, and the values are right.
        print(f"torchport: a computation stays interpreted, because it does not compile: {message}", file=sys.stderr)


_said: Final[set[str]] = set()
