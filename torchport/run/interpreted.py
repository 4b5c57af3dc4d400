"""Plans without compiling: a path's operators, interpreted one after the other on host memory (tier 0).

Such a plan has everything that a compiled one has, and its results have the specs that the compiled one's will have, so
that the one can take the other's place at any flush and no trace that follows sees a difference.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import fx

from ..backend.execution import Computation
from ..backend.interface import Backend, BackendData, ExecutionContext, Processed, TensorData
from ..backend.interpret import How, as_it_is, how, interpret, settled
from ..core.specs import CompileSpecs, TensorSpec, is_dense
from ..core.threads import FewerThreads
from ..trace.graph import needed, templates_of
from ..trace.handle import intern_spec, shown_as, shown_spec
from ..trace.trie import HostScalar, Leaf, Node, RandomKey, ScalarInput, Value
from .host_forms import as_tensor
from .overwriting import overwriting
from .plans import ExecutionPlan
from .sizes import Family
from .steps import Steps, make_steps
from .tier_record import TierRecord

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

__all__ = ["InterpretedPlan", "PathProgram", "PathStep", "make_interpreted"]

_CPU: Final = torch.device("cpu")
_storage_of: Final[Any] = torch.Tensor.untyped_storage  # as it is before anybody wraps it


@dataclass(slots=True, eq=False)
class InterpretedPlan(ExecutionPlan):
    """A plan that interprets its path.

    ``since``: when it was made. ``seconds``: what its runs have cost so far, ``quickest`` the quickest of them (0
    before the second). ``ticket``: the compile service's, of what is to take its place. ``here``: no other process can
    compile it. ``asked``: that process was asked whether it knows it; ``looked``: it was settled whether to ask.
    ``exact``: the engine does not load what is for several sizes. ``stays``: it does not compile. ``record``: the same
    for people. ``family``: the computations that differ from it in sizes alone, ``sizes`` its own, and names of the
    first of them; known once it may be worth compiling.
    """

    takes_tensors: ClassVar[bool] = True
    seconds: float = 0.0
    quickest: float = 0.0
    ticket: Any = None
    here: bool = False
    asked: bool = False
    looked: bool = False
    exact: bool = False
    stays: bool = False
    since: float = field(default_factory=time.monotonic)
    record: TierRecord | None = None
    family: Family | None = None
    sizes: tuple[int, ...] = ()
    names: Sequence[str] = ()

    @property
    def tier(self) -> str:
        """Where it stands, in words."""
        if self.stays:
            why = "" if self.record is None else self.record.why.partition("\n")[0]
            return f"interpreted, and stays so: {why or 'it does not compile'}"
        return "interpreted" if self.ticket is None else "interpreted, and being compiled"


def make_interpreted(
    runtime: DeviceRuntime, path: Sequence[Node], value_ids: tuple[int, ...], leaf_specs: Sequence[TensorSpec]
) -> InterpretedPlan:
    """A plan for the values at the end of a path that needs no compiler. Takes time linear in the path's length."""
    program = PathProgram(needed(path, value_ids), value_ids, leaf_specs)
    doubles, keys = tuple(sorted(program.scalar_inputs)), tuple(sorted(program.random_keys))
    leaves = tuple(sorted(program.leaves))
    program.places(leaves, doubles, keys)
    packs = [TensorSpec((len(pack),), dtype, (1,)) for pack, dtype in ((doubles, _F64), (keys, _I64)) if pack]
    inputs = (*(leaf_specs[at] for at in leaves), *packs)
    context = ExecutionContext(runtime.device, program.outputs)
    computation = Computation(
        _Interpreter(runtime), runtime.device, inputs, (), program.outputs, program, context,
        graph_ops=len(program.nodes),
    )  # fmt: skip
    seen = {node.first_id + at: spec for node in path for at, spec in enumerate(node.specs) if spec is not None}
    specs = tuple(intern_spec(shown_as(spec, seen[n])) for spec, n in zip(program.outputs, value_ids, strict=True))
    plan = InterpretedPlan(computation, leaves, (), doubles, keys, value_ids, specs)
    computation.users.add(plan)
    return plan


_F64: Final = torch.float64
_I64: Final = torch.int64


class PathProgram:
    """The operators that some values need, in order, and when each value is used for the last time."""

    def __init__(self, nodes: Sequence[Node], value_ids: Sequence[int], leaf_specs: Sequence[TensorSpec]) -> None:
        self.nodes = nodes
        self.wanted = tuple(value_ids)
        self.leaves: set[int] = set()
        self.scalar_inputs: set[int] = set()
        self.random_keys: set[int] = set()
        last: dict[int, int] = {}
        makers: dict[int, Node] = {}
        for at, node in enumerate(nodes):
            makers.update(dict.fromkeys(range(node.first_id, node.end_id), node))
            for template in templates_of(node):
                if template.__class__ is HostScalar:
                    template = template.value
                cls = template.__class__
                if cls is Value:
                    last[template.value_id] = at
                elif cls is Leaf:
                    self.leaves.add(template.position)
                elif cls is ScalarInput:
                    self.scalar_inputs.add(template.position)
                elif cls is RandomKey:
                    self.random_keys.add(template.position)
        kept = set(value_ids)
        self.ends: list[list[int]] = [[] for _ in nodes]
        for number, at in last.items():
            if number not in kept:
                self.ends[at].append(number)
        hows = [how(node.op) for node in nodes]
        forms = overwriting(nodes, hows, last, kept, leaf_specs)
        self.steps = [PathStep(*parts) for parts in zip(nodes, hows, forms, strict=True)]
        self.sharing = tuple(how(makers[value_id].op).shares for value_id in value_ids)
        self.outputs = tuple(_value_spec(makers[value_id], value_id) for value_id in value_ids)
        self.runs = 0
        self.native: Steps | None = None

    def places(self, *inputs: tuple[int, ...]) -> None:
        """Where leaves, numbers and keys stand among the arguments."""
        self.inputs = inputs


def _value_spec(node: Node, value_id: int) -> TensorSpec:
    """The spec of a result as a value of its own: like its handle's, but a view's gaps and repetitions are gone."""
    spec = shown_spec(node.specs[value_id - node.first_id])  # type: ignore[arg-type]
    if spec.is_contiguous or is_dense(spec.shape, spec.strides):
        return spec
    blank = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
    return TensorSpec.of(blank.clone())


class PathStep:
    """One operator of a path, and where its arguments come from.

    ``args`` are its arguments, in which those at ``places`` are filled in with the values of these keys, and those at
    ``lists`` with lists of them; what is in neither form is settled at each run (``rest``). ``operator``: what
    C++ may call, with ``is_but_wide`` only where all tensors are wide (:class:`.How`). ``needs``: the keys of the
    tensors among the arguments.
    """

    __slots__ = (
        "args", "in_place", "is_but_wide", "kwargs", "lists", "made", "manner", "needs", "node", "operator", "places",
        "rest",
    )  # fmt: skip

    def __init__(self, node: Node, manner: How, in_place: Any) -> None:
        self.node = node
        self.manner = manner
        self.in_place = in_place
        self.args = [self._constant(one) for one in node.args]
        self.places: list[tuple[int, Any]] = []
        self.lists: list[tuple[int, list[Any]]] = []
        self.rest: list[int] = []
        for at, one in enumerate(node.args):
            if one.__class__ in _KEYED:
                self.places.append((at, _key(one)))
            elif one.__class__ in (list, tuple) and all(item.__class__ in _KEYED for item in one):
                self.lists.append((at, [_key(item) for item in one]))
            elif not _is_fixed(one):
                self.rest.append(at)
        self.kwargs = dict(node.kwargs)
        self.kwargs.pop("pin_memory", None)
        if manner.draws:
            del self.kwargs["random_key"]
        if manner.is_factory:
            self.kwargs["device"] = _CPU
        self.made = None if node.container is None else range(node.first_id, node.end_id)
        used = templates_of(node)
        self.needs = tuple(dict.fromkeys(_key(one) for one in used if one.__class__ in (Value, Leaf)))
        floats = sum(one.__class__ is ScalarInput for one in used)
        self.is_but_wide = manner.varying and floats > 0
        places = (node.args[at] for at in manner.tensor_places if at < len(node.args))
        numbers = sum(one.__class__ is ScalarInput for one in places)  # in places of tensors
        if numbers and numbers == floats:
            self.is_but_wide, in_place = False, None  # C++ makes tensors of them, as a graph has them
        is_called = manner.call is not None and (manner.but_wide or not self.is_but_wide) and not manner.draws
        self.operator = None
        if is_called and not (numbers and self.is_but_wide) and not any(one.__class__ in _SPECIAL for one in used):
            self.operator = manner.call if in_place is None else in_place

    @property
    def brings(self) -> Sequence[int]:
        """The ids of its results."""
        return (self.node.first_id,) if self.made is None else self.made

    @staticmethod
    def _constant(argument: Any) -> Any:
        if argument.__class__ is torch.device:
            return _CPU
        return list(argument) if argument.__class__ is tuple else argument


_KEYED: Final = frozenset({Value, Leaf, ScalarInput})
_SPECIAL: Final = frozenset({HostScalar, RandomKey})


def _key(template: Any) -> Any:
    """What a run keeps the value of a template under: value ids are not negative."""
    if template.__class__ is Value:
        return template.value_id
    return -1 - template.position if template.__class__ is Leaf else ("number", template.position)


def _is_fixed(argument: Any) -> bool:
    """Whether an argument is the same in each run."""
    if argument.__class__ in (list, tuple):
        return all(map(_is_fixed, argument)) and not any(one.__class__ is torch.device for one in argument)
    return argument.__class__ not in _KEYED and argument.__class__ is not HostScalar


class _PathRun:
    """One run of a program: the values so far, leaves and numbers among them."""

    __slots__ = ("leaves", "numbers", "program", "random_keys", "values")

    def __init__(self, program: PathProgram, tensors: Sequence[torch.Tensor]) -> None:
        leaves, numbers, keys = program.inputs
        given = iter(tensors)
        self.program = program
        self.leaves = [next(given) for _ in leaves]
        self.numbers: list[float] = next(given).tolist() if numbers else []
        self.values: dict[Any, Any] = {("number", at): value for at, value in zip(numbers, self.numbers, strict=True)}
        self.random_keys: dict[int, int] = dict(zip(keys, next(given).tolist(), strict=True)) if keys else {}

    def results(self) -> list[torch.Tensor]:
        """Run the operators, one after the other; the values that are wanted."""
        program, values = self.program, self.values
        if program.native is None and program.runs:
            program.native = make_steps(program, *program.inputs[:2])
        program.runs += 1
        if program.native is not None:
            return program.native(self.leaves, self.numbers, self.alone)
        values.update(zip((-1 - at for at in program.inputs[0]), self.leaves, strict=True))
        for step, ends in zip(program.steps, program.ends, strict=True):
            self.step(step)
            for number in ends:
                del values[number]
        return [values[value_id] for value_id in program.wanted]

    def alone(self, position: int, given: tuple[Any, ...]) -> list[Any]:
        """Run one operator on the values that it needs; its results."""
        step, values = self.program.steps[position], self.values
        values.update(zip(step.needs, given, strict=True))
        self.step(step)
        made = [values.pop(value_id) for value_id in step.brings]
        for key in step.needs:
            del values[key]
        return made

    def argument(self, template: Any) -> Any:
        cls = template.__class__
        if cls in _KEYED:
            return self.values[_key(template)]
        if cls is list or cls is tuple:
            return [self.argument(one) for one in template]
        if cls is HostScalar:
            return torch.tensor(self.argument(template.value), dtype=template.dtype)
        return _CPU if cls is torch.device else template

    def step(self, step: PathStep) -> None:
        """Run one operator."""
        values, node, manner, in_place = self.values, step.node, step.manner, step.in_place
        args = step.args.copy()
        for at, key in step.places:
            args[at] = values[key]
        for at, several in step.lists:
            args[at] = [values[key] for key in several]
        for at in step.rest:
            args[at] = self.argument(node.args[at])
        kwargs = {name: self.argument(one) for name, one in step.kwargs.items()} if step.kwargs else {}
        if in_place is not None and as_it_is(manner, args, kwargs):
            in_place(*args, **kwargs)
            made = args[0]
        else:
            random_key = self.random_keys[node.kwargs["random_key"].position] if manner.draws else 0
            made = interpret(manner, args, kwargs, random_key, node.specs)
        if step.made is None:
            values[node.first_id] = made
        else:
            values.update(zip(step.made, made, strict=True))


class _Interpreter(Backend):
    """Runs programs on the values of a backend that keeps them in host memory."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.name = runtime.backend.name  # type: ignore[misc]  # errors are told of it

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("paths are interpreted as they are")

    def from_device(self, data: BackendData) -> torch.Tensor:
        return as_tensor(self.runtime.backend, data)

    def execute(self, handle: PathProgram, args: Sequence[BackendData], context: ExecutionContext) -> list[BackendData]:
        backend = self.runtime.backend
        tensors = [as_tensor(backend, arg) for arg in args]
        run = _PathRun(handle, tensors)  # type: ignore[arg-type]
        with torch.no_grad(), FewerThreads():
            results = _separate(handle, run.results(), tensors)  # type: ignore[arg-type]
        return [TensorData(context.device, spec, one) for spec, one in zip(handle.outputs, results, strict=True)]


def _separate(
    program: PathProgram, values: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results in memory of their own, with the strides that were promised."""
    taken: set[int] = set()
    if any(program.sharing):
        taken = {_storage_of(tensor).data_ptr() for tensor in given}
    made: list[torch.Tensor] = []
    for value, spec, shares in zip(values, program.outputs, program.sharing, strict=True):
        if shares:
            value = settled(value)
        if taken or shares:
            place = _storage_of(value).data_ptr()
            if place in taken and value.numel():
                value = value.clone()
            taken.add(place)
        if value.stride() != spec.strides and value.numel():
            value = torch.empty_strided(spec.shape, spec.strides, dtype=value.dtype).copy_(value)
        made.append(value)
    return made
