"""The steps that run a split graph: calls of computations, operators that were left, and tensors crossing between.

Where a value lives at each point is known when the program is made, so running it is one loop over steps.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from ...backend.borrow import borrower
from ...backend.builder import refusals
from ...backend.execution import Computation, call_kernel
from ...backend.interface import BackendData
from ...backend.interpreted_graph import INTERPRETER
from ...backend.partition import Partitioned
from ...backend.registrar import registrar_of
from ...core.fallback import check_fallback, note_fallback
from ...core.specs import TensorSpec
from .places import Caller, DataPlace

__all__ = ["make_program"]

_getitem: Any = operator.getitem
Step = Callable[[list[Any]], None]


class _Slot:
    """Stands for a value in the arguments of a step."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class GraphProgram:
    """One compiled graph for one set of shapes. Called with a list of arguments, which it empties."""

    def __init__(
        self, steps: Sequence[Step], size: int, constants: Mapping[int, Any], results: Sequence[Any], hidden: bool
    ) -> None:
        self._steps = tuple(steps)
        self._size = size
        self._constants = tuple(constants.items())
        self._results = tuple(results)
        self._hidden = hidden

    def __call__(self, args: list[Any]) -> list[Any]:
        slots: list[Any] = [*args, *[None] * (self._size - len(args))]
        args.clear()
        for at, value in self._constants:
            slots[at] = value
        # Where there are gradients, autograd must not know what is a view of what in here: AOTAutograd tells it about
        # the results itself. Elsewhere nobody else does, and what is compiled next goes by it.
        with torch._C._AutoDispatchBelowADInplaceOrView() if self._hidden else nullcontext():
            for step in self._steps:
                step(slots)
        return [slots[r.at] if r.__class__ is _Slot else r for r in self._results]


class _Planner:
    """Writes the steps. A value is a tensor of the place, or a CPU tensor beside a ``port`` model's."""

    def __init__(self, parts: Partitioned, place: DataPlace, computations: Mapping[str, Computation]) -> None:
        self.parts = parts
        self.place = place
        self.computations = computations
        self.steps: list[Step] = []
        self.size = 0
        self.constants: dict[int, Any] = {}
        self.user: dict[fx.Node, int] = {}
        """Slots of tensors of the place, and of whatever else is handed through."""
        self.host: dict[fx.Node, int] = {}
        """Slots of CPU tensors where the place is another."""

    def slot(self) -> int:
        """A new slot."""
        self.size += 1
        return self.size - 1

    def as_user(self, node: fx.Node) -> int:
        """The slot of a value as a tensor of the place."""
        found = self.user.get(node)
        if found is not None:
            return found
        made, source, place = self.slot(), self.host[node], self.place
        self.user[node] = made
        if node.op == "get_attr":
            self.constants[made] = place.from_host(self.constants[source])
            return made

        def move(slots: list[Any]) -> None:
            value = slots[source]  # nothing where an operator of the host's left a result undefined, as a gradient
            slots[made] = None if value is None else place.from_host(value)

        self.steps.append(move)
        return made

    # -- nodes -----------------------------------------------------------------------------------------------
    def placeholder(self, node: fx.Node, device: torch.device | None, keys: bool) -> None:
        """An input: a tensor, a number, or the keys we draw."""
        at = self.slot()
        here = self.place.is_here(torch.device("cpu")) if keys else device is None or self.place.is_here(device)
        (self.user if here else self.host)[node] = at
        if keys:
            count, place = node.meta["val"].numel(), self.place

            def draw(slots: list[Any]) -> None:
                slots[at] = place.keys(count)

            self.steps.append(draw)

    def constant(self, node: fx.Node) -> None:
        """A tensor or a graph that the graph holds."""
        at = self.slot()
        value: Any = getattr(self.parts.module, str(node.target))
        self.constants[at] = value
        here = not isinstance(value, torch.Tensor) or self.place.is_here(value.device)
        (self.user if here else self.host)[node] = at

    def delegate(self, node: fx.Node) -> None:
        """A call of a computation; its results are the ``getitem`` nodes that follow."""
        computation = self.computations[str(node.target)]
        inputs = tuple(self.as_user(value) for value in node.args)  # type: ignore[arg-type]
        outputs = tuple(self.slot() for _ in computation.results)
        for user in node.users:
            self.user[user] = outputs[user.args[1]]  # type: ignore[index]
        caller = _caller(self.parts, self.place, computation, str(node.target))

        def call(slots: list[Any]) -> None:
            for at, result in zip(outputs, caller([slots[i] for i in inputs]), strict=True):
                slots[at] = result

        self.steps.append(call)

    def _template(self, node: fx.Node) -> tuple[Any, Any]:
        stays = self._stays(node)

        def slot(n: fx.Node) -> _Slot:
            # A CPU scalar beside tensors of another device acts as a number; any other CPU tensor has to be moved.
            cpu = n in self.host and n not in self.user and (stays or n.meta["val"].dim() == 0)
            return _Slot(self.host[n] if cpu else self.as_user(n))

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), slot)  # type: ignore[misc]
        return args, {k: self.place.device if isinstance(v, torch.device) else v for k, v in kwargs.items()}

    def item(self, node: fx.Node) -> None:
        """One of several results of an operator that is no delegate's."""
        made = self.user[node] = self.slot()
        source, position = self.user[node.args[0]], node.args[1]  # type: ignore[index]

        def item(slots: list[Any]) -> None:
            slots[made] = slots[source][position]

        self.steps.append(item)

    def call(self, node: fx.Node, left: bool) -> None:
        """An operator that is no delegate's: a view, or one that was left.

        On a ``port`` device the device itself decides who runs it, and counts; here that is done for the CPU.
        """
        target: Any = node.target
        template = self._template(node)
        made = self.slot()
        (self.host if self._stays(node) else self.user)[node] = made
        own = self._own_kernel(node) if left else None
        if left and own is None:
            self._check_policy(node)
        if left and not isinstance(target, torch._ops.OpOverload):
            self.steps += [_counted(node), _host_step(target, template, made, self.place)]
            return
        if left and self.place.is_here(torch.device("cpu")):
            if own is not None:
                self.steps.append(_kernel_step(node, own, template, made, self.place))
                return
            self.steps.append(_counted(node))

        self.steps.append(_view_step(target, template, made) or _plain_step(target, template, made))

    def _stays(self, node: fx.Node) -> bool:
        """Whether an operator gets CPU tensors beside a model on another device, and nothing else: it gives one."""
        inputs = node.all_input_nodes
        return (
            bool(inputs) and "device" not in node.kwargs and all(n in self.host and n not in self.user for n in inputs)
        )

    def _own_kernel(self, node: fx.Node) -> Callable[..., Any] | None:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        registrar, op = registrar_of(self.place.backends[0]), node.target
        kernel = registrar.kernel(op)
        if kernel is not None:
            return kernel
        boxed = registrar.boxed if node.meta.get("at_once") else None
        return None if boxed is None else lambda *args, **kwargs: boxed(op, args, kwargs)

    def _check_policy(self, node: fx.Node) -> None:
        why = _not_taken(self.place, node.meta.get("refusal"))
        check_fallback(node.target, node.meta.get("source"), why)

    # -- the whole -------------------------------------------------------------------------------------------
    def run(
        self, devices: Sequence[torch.device | None], wanted: Sequence[torch.device | None], hidden: bool
    ) -> GraphProgram:
        """The program. ``devices`` are those of the inputs, ``wanted`` those of the outputs."""
        left = {leftover.node for leftover in self.parts.leftovers}
        nodes = list(self.parts.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for position, node in enumerate(placeholders):
            keys = position >= len(devices)
            self.placeholder(node, None if keys else devices[position], keys)
        for node in nodes:
            if node.op == "get_attr":
                self.constant(node)
            elif node.op == "call_module":
                self.delegate(node)
            elif node.target is _getitem and node.args[0].op == "call_module":
                continue
            elif node.target is _getitem and node.args[0] in self.user:
                self.item(node)
            elif node.op == "call_function":
                self.call(node, node in left)
        outputs: Any = self.parts.module.graph.output_node().args[0]
        results = [self.result(value, device) for value, device in zip(outputs, wanted, strict=True)]
        return GraphProgram(self.steps, self.size, self.constants, results, hidden)

    def result(self, value: Any, device: torch.device | None) -> Any:
        """An output: a number or ``None`` as it is, a tensor on the device it was on when the graph was recorded."""
        if not isinstance(value, fx.Node):
            return value
        here = device is None or self.place.is_here(device)
        if here and value.op != "get_attr":
            return _Slot(self.as_user(value))
        made = self.slot()
        source = self.as_user(value) if here or value not in self.host else self.host[value]

        def copied(slots: list[Any]) -> None:
            found = slots[source]
            slots[made] = found.clone() if device is None or found.device == device else found.to(device)

        self.steps.append(copied)
        return _Slot(made)


def _not_taken(place: DataPlace, reason: object) -> str:
    return f"no backend ({', '.join(backend.name for backend in place.backends)}) takes the operator: {reason}"


def _caller(parts: Partitioned, place: DataPlace, computation: Computation, name: str) -> Caller:
    """How a delegate is called; what the interpreter runs in it is counted. Raises :class:`UnsupportedOp`."""
    caller = place.caller(computation)
    if computation.backend is not INTERPRETER:
        return caller
    module = next(delegate.module for delegate in parts.delegates if delegate.name == name)
    found = [(one.op, one.source, one.reason) for one in refusals(module)]
    for op, source, reason in found:
        check_fallback(op, source, _not_taken(place, reason))

    def counted(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for op, source, reason in found:
            note_fallback(op, source, reason)
        return caller(tensors)

    return counted


def _plain_step(target: Any, template: Any, made: int) -> Step:
    def call(slots: list[Any]) -> None:
        args, kwargs = _filled(template, slots)
        slots[made] = target(*args, **kwargs)

    return call


def _view_step(target: Any, template: Any, made: int) -> Step | None:
    """A call whose first argument alone is a value, without looking through the others each time."""
    (first, *others), kwargs = (template[0] or [None]), template[1]
    if not isinstance(first, _Slot) or any(isinstance(leaf, _Slot) for leaf in tree_leaves((others, kwargs))):
        return None
    source = first.at

    def view(slots: list[Any]) -> None:
        slots[made] = target(slots[source], *others, **kwargs)

    return view


def _filled(template: Any, slots: list[Any]) -> tuple[Any, Any]:
    return tree_map(lambda v: slots[v.at] if isinstance(v, _Slot) else v, template)


def _kernel_step(node: fx.Node, kernel: Callable[..., Any], template: Any, made: int, place: DataPlace) -> Step:
    """A backend's own kernel for one operator: :class:`BackendData` in and out."""
    backend = place.backends[0]
    device, op, source = place.device_of(backend), node.target, node.meta.get("source")

    def data(value: Any) -> Any:
        return borrower(backend)(value, TensorSpec.of(value), device) if isinstance(value, torch.Tensor) else value

    def host(value: Any) -> Any:
        return backend.from_device(value) if isinstance(value, BackendData) else value

    def step(slots: list[Any]) -> None:
        args, kwargs = tree_map(data, _filled(template, slots))
        results = call_kernel(backend, kernel, op, args, kwargs, source)
        slots[made] = tree_map(host, results, is_leaf=lambda v: isinstance(v, BackendData))

    return step


def _host_step(target: Any, template: Any, made: int, place: DataPlace) -> Step:
    """What is no operator, such as control flow on graphs: on CPU copies of its tensors."""
    cpu = torch.device("cpu")

    def host(value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            return _on_host(value)
        return value.to(cpu) if isinstance(value, torch.Tensor) else value

    def step(slots: list[Any]) -> None:
        args, kwargs = tree_map(host, _filled(template, slots))
        results = target(*args, **kwargs)
        slots[made] = tree_map(lambda v: place.from_host(v) if isinstance(v, torch.Tensor) else v, results)

    return step


@functools.lru_cache(64)
def _on_host(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph that makes its new tensors on the CPU."""
    made = copy.deepcopy(graph)
    for node in made.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    made.recompile()
    return made


def _counted(node: fx.Node) -> Step:
    """Counts an operator that runs on the host, and says so, as on the device."""
    op, reason, source = node.target, str(node.meta.get("refusal")), node.meta.get("source")
    return lambda slots: note_fallback(op, source, reason)


def _direct(parts: Partitioned, place: DataPlace, computations: Mapping[str, Computation], inputs: int) -> Any:
    """The one computation with the graph's own inputs and results, if that is all there is; else ``None``."""
    calls = [n for n in parts.module.graph.nodes if n.op not in ("placeholder", "output") and n.target is not _getitem]
    placeholders = parts.module.graph.find_nodes(op="placeholder")
    outputs: Any = parts.module.graph.output_node().args[0]
    if len(calls) != 1 or calls[0].op != "call_module" or len(placeholders) != inputs:
        return None
    known = {node: (False, at) for at, node in enumerate(placeholders)}
    known |= {item: (True, item.args[1]) for item in calls[0].users}
    sources = [known[value] if isinstance(value, fx.Node) else (None, value) for value in outputs]
    name = str(calls[0].target)
    caller = _caller(parts, place, computations[name], name)
    order = [known[value][1] for value in calls[0].args]
    whole = order == list(range(inputs))
    plain = sources == [(True, at) for at in range(len(sources))]

    def direct(args: list[Any]) -> Sequence[Any]:
        given = args.copy() if whole else [args[at] for at in order]
        if plain:
            args.clear()
            return caller(given)
        results = caller(given)
        made = [results[at] if own else at if own is None else args[at] for own, at in sources]
        args.clear()
        return made

    return direct


def make_program(
    parts: Partitioned,
    place: DataPlace,
    computations: Mapping[str, Computation],
    devices: Sequence[torch.device | None],
    wanted: Sequence[torch.device | None],
    hidden: bool = True,
) -> Callable[[list[Any]], Sequence[Any]]:
    """The program of a split graph: called with a list of arguments, which it empties.

    ``computations`` are by the names of the delegates, ``devices`` those of the inputs and ``wanted`` those of the
    outputs as they were recorded, ``None`` for what is no tensor. ``hidden``: autograd is not told of views. Raises
    :class:`UnsupportedOp` where an operator is left and ``config.fallback`` is ``"error"``.
    """
    if all(device is None or place.is_here(device) for device in (*devices, *wanted)):
        direct = _direct(parts, place, computations, len(devices))
        if direct is not None:
            return direct
    return _Planner(parts, place, computations).run(devices, wanted, hidden)
