"""The steps that run a split graph: calls of computations, operators that were left, and tensors crossing between.

Where a value lives at each point is known when the program is made, so running it is one loop over steps.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_map

from ...backend.compiler import run
from ...backend.interface import Backend, BackendData, Computation
from ...backend.partition import Partitioned
from ...core import metrics
from ...core.config import config
from ...core.errors import UnsupportedOp
from ...core.specs import TensorSpec
from ...lazy.kernels import registrar_of
from .places import Place

__all__ = ["Program", "make_program"]

_getitem: Any = operator.getitem
Step = Callable[[list[Any]], None]


class _Slot:
    """Stands for a value in the arguments of a step."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class Program:
    """One compiled graph for one set of shapes. Called with a list of arguments, which it empties."""

    def __init__(
        self, steps: Sequence[Step], inputs: Sequence[int], size: int, constants: Mapping[int, Any], results: Any
    ) -> None:
        self._steps = tuple(steps)
        self._inputs = tuple(inputs)
        self._size = size
        self._constants = dict(constants)
        self._results: tuple[Any, ...] = tuple(results)

    def __call__(self, args: list[Any]) -> list[Any]:
        slots: list[Any] = [*args, *[None] * (self._size - len(args))]
        args.clear()
        for at, value in self._constants.items():
            slots[at] = value
        for step in self._steps:
            step(slots)
        return [slots[r.at] if r.__class__ is _Slot else r for r in self._results]


def _device_name(node: fx.Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


class _Planner:
    """Writes the steps. A node's value may be in several forms: the user's tensor, a CPU tensor, a backend's data."""

    def __init__(self, parts: Partitioned, place: Place, computations: Mapping[str, Computation]) -> None:
        self.parts = parts
        self.place = place
        self.computations = computations
        self.steps: list[Step] = []
        self.size = 0
        self.constants: dict[int, Any] = {}
        self.user: dict[fx.Node, int] = {}
        """Slots of tensors of the place (or of numbers and whatever else is handed through)."""
        self.host: dict[fx.Node, int] = {}
        """Slots of CPU tensors where the place is another."""
        self.data: dict[tuple[fx.Node, str], int] = {}
        """Slots of values in a backend's form."""

    def slot(self) -> int:
        """A new slot."""
        self.size += 1
        return self.size - 1

    # -- forms -----------------------------------------------------------------------------------------------
    def as_data(self, node: fx.Node, backend: Backend) -> int:
        """The slot of a value in a backend's form."""
        found = self.data.get((node, backend.name))
        if found is not None:
            return found
        spec = TensorSpec.of(node.meta["val"])
        made = self.data[node, backend.name] = self.slot()
        place = self.place
        if node.op == "get_attr" and node in self.host:
            value = self.constants[self.host[node]].detach().clone()
            self.constants[made] = backend.to_device(value, place.device_of(backend))
        elif node in self.host:
            source, device = self.host[node], place.device_of(backend)

            def borrow(slots: list[Any]) -> None:
                slots[made] = backend.borrow(slots[source], spec, device)

            self.steps.append(borrow)
        else:
            user = self.as_user(node)

            def take(slots: list[Any]) -> None:
                slots[made] = place.take(slots[user], backend, spec)

            self.steps.append(take)
        return made

    def as_user(self, node: fx.Node) -> int:
        """The slot of a value as a tensor of the place."""
        if node in self.user:
            return self.user[node]
        made = self.user[node] = self.slot()
        name = next(name for other, name in self.data if other is node)
        source, place = self.data[node, name], self.place
        backend, spec = self._backend(name), TensorSpec.of(node.meta["val"])

        def give(slots: list[Any]) -> None:
            slots[made] = place.give(slots[source], backend, spec)

        self.steps.append(give)
        return made

    def _backend(self, name: str) -> Backend:
        return next(backend for backend in self.place.backends if backend.name == name)

    # -- nodes -----------------------------------------------------------------------------------------------
    def placeholder(self, node: fx.Node, device: torch.device | None, keys: bool) -> None:
        """An input: the user's tensor, a CPU tensor beside a ``port`` model's, a number, or the keys we draw."""
        at = self.slot()
        if keys:
            count, place = node.meta["val"].numel(), self.place

            def draw(slots: list[Any]) -> None:
                slots[at] = place.keys(count)

            self.steps.append(draw)
            self.host[node] = at
        elif device is None or self.place.is_here(device):
            self.user[node] = at
        else:
            self.host[node] = at
        if self.place.is_here(torch.device("cpu")):
            self.user[node] = at

    def constant(self, node: fx.Node) -> None:
        """A tensor or a graph that the graph holds."""
        at = self.slot()
        value: Any = getattr(self.parts.module, str(node.target))
        self.constants[at] = value
        self.user[node] = at
        if isinstance(value, torch.Tensor) and not self.place.is_here(value.device):
            self.host[node] = at
            del self.user[node]

    def delegate(self, node: fx.Node) -> None:
        """A call of a computation; its results are the ``getitem`` nodes that follow."""
        computation = self.computations[str(node.target)]
        backend = computation.backend
        inputs = tuple(self.as_data(value, backend) for value in node.args)  # type: ignore[arg-type]
        outputs: list[int] = []
        for _ in computation.results:
            outputs.append(self.slot())
        for user in node.users:
            self.data[user, backend.name] = outputs[user.args[1]]  # type: ignore[index]

        def call(slots: list[Any]) -> None:
            results = run(computation, [slots[at] for at in inputs])
            for at, result in zip(outputs, results, strict=True):
                slots[at] = result

        self.steps.append(call)

    def _template(self, node: fx.Node, form: Callable[[fx.Node], int]) -> tuple[Any, Any]:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _Slot(form(n)))  # type: ignore[misc]
        return args, {k: self.place.device if isinstance(v, torch.device) else v for k, v in kwargs.items()}

    def item(self, node: fx.Node) -> None:
        """One of several results of an operator that was left."""
        made = self.user[node] = self.slot()
        source, position = self.user[node.args[0]], node.args[1]  # type: ignore[index]

        def item(slots: list[Any]) -> None:
            slots[made] = slots[source][position]

        self.steps.append(item)

    def call(self, node: fx.Node, left: bool) -> None:
        """An operator that is no delegate's: by the backend's own kernel, else on the user's tensors."""
        target: Any = node.target
        made = self.slot()
        on_host = self.place.is_here(torch.device("cpu"))
        own = self._own_kernel(node) if left else None
        if own is not None and on_host:
            backend = self.place.backends[0]
            template = self._template(node, lambda n: self.as_data(n, backend))
            self.steps.append(_kernel_step(own, template, made, backend))
            self.user[node] = made
            return
        if left and own is None:
            self._check_policy(node)
        template = self._template(node, self._form)
        self.user[node] = made
        if left and on_host:
            self.steps.append(_counted(node))  # on a port device the device itself decides and counts

        def call(slots: list[Any]) -> None:
            args, kwargs = _filled(template, slots)
            slots[made] = target(*args, **kwargs)

        self.steps.append(call)

    def _form(self, node: fx.Node) -> int:
        """The form an operator that was left takes a value in."""
        return self.host[node] if node in self.host and node not in self.user else self.as_user(node)

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
        if config.fallback == "error":
            raise UnsupportedOp(
                f"no backend ({', '.join(b.name for b in self.place.backends)}) takes the operator: "
                f"{node.meta.get('refusal')}. Allow the host fallback with torchport.config.fallback = 'allow', or "
                "give the backend a kernel or a decomposition",
                op=str(node.target),
                source=node.meta.get("source"),
            )

    # -- the whole -------------------------------------------------------------------------------------------
    def run(self, devices: Sequence[torch.device | None], wanted: Sequence[torch.device | None]) -> Program:
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
        output = self.parts.module.graph.output_node()
        results = [
            self.result(value, device)
            for value, device in zip(output.args[0], wanted, strict=True)  # type: ignore[arg-type]
        ]
        return Program(self.steps, range(len(devices)), self.size, self.constants, results)

    def result(self, value: Any, device: torch.device | None) -> Any:
        """An output: a number or ``None`` as it is, a tensor on the device it was on when the graph was recorded."""
        if not isinstance(value, fx.Node):
            return value
        if device is None or self.place.is_here(device):
            return self._copied(value, self.as_user(value)) if value.op == "get_attr" else _Slot(self.as_user(value))
        if value in self.host:
            return self._copied(value, self.host[value])
        return self._copied(value, self.as_user(value), device)

    def _copied(self, node: fx.Node, source: int, device: torch.device | None = None) -> _Slot:
        made = self.slot()

        def copy(slots: list[Any]) -> None:
            slots[made] = slots[source].clone() if device is None else slots[source].to(device)

        self.steps.append(copy)
        return _Slot(made)


def _filled(template: Any, slots: list[Any]) -> tuple[Any, Any]:
    return tree_map(lambda v: slots[v.at] if isinstance(v, _Slot) else v, template)


_NOT_DATA: Final = object()


def _kernel_step(kernel: Callable[..., Any], template: Any, made: int, backend: Backend) -> Step:
    """A backend's own kernel for one operator: :class:`BackendData` in and out."""

    def host(value: Any) -> Any:
        return backend.from_device(value) if isinstance(value, BackendData) else value

    def step(slots: list[Any]) -> None:
        args, kwargs = _filled(template, slots)
        metrics.count("KernelCall")
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        slots[made] = tree_map(host, kernel(*args, **kwargs), is_leaf=lambda v: isinstance(v, BackendData))

    return step


def _counted(node: fx.Node) -> Step:
    """Counts an operator that runs on the host, and says so, as on the device."""
    name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else str(node.target)
    reason, source = node.meta.get("refusal"), node.meta.get("source")

    def step(slots: list[Any]) -> None:
        if config.fallback == "error":
            raise UnsupportedOp(f"{reason}, and config.fallback is 'error'", op=name, source=source)
        if config.fallback == "warn":
            warnings.warn(f"{name} runs on the host: {reason} (called at {source})", stacklevel=2)
        metrics.count("Fallback")
        metrics.count(name)

    return step


def make_program(
    parts: Partitioned,
    place: Place,
    computations: Mapping[str, Computation],
    devices: Sequence[torch.device | None],
    wanted: Sequence[torch.device | None],
) -> Program:
    """The program of a split graph. ``computations`` are by the names of its delegates.

    ``devices`` are those of the inputs and ``wanted`` those of the outputs as they were recorded, ``None`` for what is
    no tensor. Raises :class:`UnsupportedOp` where an operator is left and ``config.fallback`` is ``"error"``.
    """
    return _Planner(parts, place, computations).run(devices, wanted)
