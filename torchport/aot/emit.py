"""From a partitioned graph to a method of a program: numbered values, and instructions that read and make them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature, InputKind, OutputKind, TensorArgument

from ..backend.fx_normalise import source_line
from ..backend.normal_form import alias_root, input_specs, output_specs, source_of
from ..backend.partition import Partitioned
from ..backend.serialize import encode_arg
from ..core.errors import GraphError, UnsupportedOp
from ..core.frames import user_frames
from ..core.specs import TensorSpec
from ..program import document as doc

__all__ = ["EMBEDDED", "Constants", "Emitted", "emit", "file_spec", "module_path", "place_of"]

EMBEDDED: Final = -1
"""In the place of a constant's number: its value is in a delegate's bytes."""

_getitem: Any = operator.getitem
_LITERALS: Final = (bool, int, float, str, type(None))
_CONSTANT_KINDS: Final = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def file_spec(spec: TensorSpec) -> doc.Spec:
    """A spec as program files have it. Raises :class:`GraphError` for a dtype they do not."""
    if spec.dtype_name not in doc.ELEMENT_SIZE:
        raise GraphError(f"a program file cannot hold tensors of {spec.dtype}; convert the model")
    return doc.Spec(spec.dtype_name, tuple(map(int, spec.shape)), tuple(map(int, spec.strides)))


def module_path(node: fx.Node) -> str:
    """The path of the ``nn.Module`` a node comes from, as in ``named_modules``."""
    stack: Any = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path)


_FRAMES_KEPT: Final = 16


def place_of(node: fx.Node) -> doc.Origin:
    """Where a node of an exported program comes from, as errors and profiles show it."""
    stack: Any = node.meta.get("nn_module_stack") or {}
    modules = [(str(path), str(kind).rpartition(".")[2]) for path, kind in stack.values()]
    hierarchy = " > ".join(f"{path}: {kind}" if path else kind for path, kind in modules)
    frames = user_frames(node.meta.get("stack_trace"))[-_FRAMES_KEPT:]
    shown = "\n".join(frame.place + (f"\n  {frame.code}" if frame.code else "") for frame in frames)
    return doc.Origin(module_path(node), source_line(node) or "", str(node.target), hierarchy, shown)


class Constants:
    """Tensors that programs hold, each once: equal views of one memory share a number."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._numbers: dict[Any, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """The constant's number. The tensor is kept as it is, not copied."""
        plain = tensor.detach()
        if plain.device.type != "cpu" or plain.layout is not torch.strided:
            raise GraphError(
                f"constant {name!r} is on {plain.device} ({plain.layout}); move the model to the CPU before export"
            )
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        key = (plain.untyped_storage().data_ptr(), plain.storage_offset(), TensorSpec.of(plain))
        if plain.numel() == 0:
            key = (name, 0, TensorSpec.of(plain))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.tensors)
            self.tensors.append(plain)
            self.names.append(name)
        return number


@dataclass(slots=True)
class Emitted:
    """A method without its delegates' bytes. ``graphs`` are theirs, ``specs`` their compile specs, in order."""

    name: str
    inputs: tuple[doc.Input, ...]
    outputs: tuple[doc.Output, ...]
    values: int
    constants: dict[int, int]
    state: tuple[doc.StateUpdate, ...]
    instructions: tuple[doc.Instruction, ...]
    graphs: list[fx.GraphModule] = field(default_factory=list[fx.GraphModule])
    bound: list[dict[int, int]] = field(default_factory=list[dict[int, int]])


class _Emitter:
    def __init__(self, signature: ExportGraphSignature, constants: Constants) -> None:
        self.signature = signature
        self.constants = constants
        self.numbers: dict[fx.Node, int] = {}
        self.inputs: list[doc.Input] = []
        self.bound: dict[int, int] = {}
        self.of_target: dict[str, fx.Node] = {}
        self.instructions: list[doc.Instruction] = []
        self.count = 0
        self.given: set[fx.Node] = set()
        self.given_as_is: set[fx.Node] = set()

    def number(self, node: fx.Node) -> int:
        """A new value's number."""
        self.numbers[node] = self.count
        self.count += 1
        return self.count - 1

    # -- inputs ------------------------------------------------------------------------------------------------------
    def placeholders(self, outer: fx.GraphModule, used: set[fx.Node]) -> None:
        """User inputs come first; then the constants that the outer graph itself uses, as ``used`` says."""
        nodes = [node for node in outer.graph.nodes if node.op == "placeholder"]
        kinds = self.signature.input_specs
        if len(nodes) != len(kinds):
            raise GraphError(f"the graph has {len(nodes)} inputs, but its signature {len(kinds)}")
        for node, kind in zip(nodes, kinds, strict=True):
            if kind.kind is InputKind.USER_INPUT:
                self._user_input(node, kind.arg)
        for node, kind in zip(nodes, kinds, strict=True):
            if kind.kind in _CONSTANT_KINDS:
                self.of_target[str(kind.target)] = node
                if node in used:
                    self.bound[self.number(node)] = self.constant(node, str(kind.target))
            elif kind.kind is not InputKind.USER_INPUT:
                raise UnsupportedOp(f"input {node} is a {kind.kind.name}; a program holds tensors only")

    def _user_input(self, node: fx.Node, arg: Any) -> None:
        name = str(node.target)
        if isinstance(arg, TensorArgument):
            self.inputs.append(doc.Input(name, file_spec(TensorSpec.of(node.meta["val"]))))
            self.number(node)
        elif isinstance(arg, ConstantArgument) and arg.value.__class__ in _LITERALS:
            self.inputs.append(doc.Input(name, None, arg.value))
        else:
            raise UnsupportedOp(f"input {name} is a {type(arg).__name__}; a program takes tensors and plain values")

    def constant(self, node: fx.Node, name: str) -> int:
        """The number of a constant that a node stands for."""
        return self.constants.add(name, node.meta["constant"])

    # -- instructions ------------------------------------------------------------------------------------------------
    def call(self, node: fx.Node, index: int, bound: Mapping[int, int]) -> None:
        """A delegate's call: arguments are what is not bound to it."""
        args = tuple(self.numbers[arg] for at, arg in enumerate(node.args) if at not in bound)  # type: ignore[index]
        count = len(node.meta["val"])
        items = {user.args[1]: user for user in node.users}
        results: list[int] = []
        for position in range(count):
            if position in items:
                results.append(self.number(items[position]))
            else:
                results.append(self.count)
                self.count += 1
        self.instructions.append(doc.CallRecord(index, args, tuple(results)))

    def kernel(self, node: fx.Node) -> None:
        """An operator that nobody took."""
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedOp(
                f"{node.target} cannot be part of a program: {node.meta.get('refusal', 'it is no ATen operator')}",
                op=str(node.target),
                source=source_of(node),
            )
        args, kwargs = encode_arg(node.args, self.numbers), {}
        for key, value in node.kwargs.items():
            kwargs[key] = encode_arg(value, self.numbers)
        value = node.meta.get("val")
        several = isinstance(value, (list, tuple))
        if several and any(isinstance(part, (list, tuple)) for part in value):
            raise UnsupportedOp(
                "it gives a list among its results, and an instruction of a program gives tensors",
                op=str(node.target),
                source=source_of(node),
            )
        if several:
            items = {user.args[1]: user for user in node.users}
            results = tuple(self.number(items[at]) if at in items else None for at in range(len(value)))
        else:
            results = (self.number(node),) if node.users else (None,)
        handle = node.meta.get("debug_handle", 0)
        self.instructions.append(doc.KernelRecord(str(node.target), tuple(args), kwargs, results, several, handle))

    # -- outputs -----------------------------------------------------------------------------------------------------
    def outputs(
        self, outer: fx.GraphModule, state: Collection[str]
    ) -> tuple[tuple[doc.Output, ...], tuple[doc.StateUpdate, ...]]:
        """What the user gets, and what buffers become."""
        given = [self._separate(value) for value in outer.graph.output_node().args[0]]  # type: ignore[union-attr]
        outputs: list[doc.Output] = []
        read = [self.numbers[self.of_target[name]] for name in sorted(state) if name in self.of_target]
        updates = {number: doc.StateUpdate(self.bound[number], number, number) for number in read}
        for value, kind in zip(given, self.signature.output_specs, strict=True):
            if kind.kind is OutputKind.USER_OUTPUT:
                outputs.append(self._output(value))
            elif kind.kind is OutputKind.BUFFER_MUTATION:
                number = self.numbers[self.of_target[str(kind.target)]]
                updates[number] = doc.StateUpdate(self.bound[number], number, self.numbers[value])
            elif kind.kind is OutputKind.USER_INPUT_MUTATION:
                raise UnsupportedOp(
                    f"the model writes to its input {kind.target!r}; a program gives results and leaves its inputs "
                    "alone: return the new value instead, or make the input a buffer"
                )
            else:
                raise UnsupportedOp(f"output {value} is a {kind.kind.name}; a program gives tensors and plain values")
        return tuple(outputs), tuple(updates.values())

    def _separate(self, value: Any) -> Any:
        """An output that views an input, a constant or another output is copied; the same value twice, at run time."""
        if not isinstance(value, fx.Node):
            return value
        root = alias_root(value)
        shared = root.op in ("placeholder", "get_attr") or root in self.given
        self.given.add(root)
        if not shared or value.op in ("placeholder", "get_attr") or value in self.given_as_is:
            self.given_as_is.add(value)
            return value
        copy = fx.Graph().call_function(torch.ops.aten.clone.default, (value,))
        copy.meta = dict(value.meta)
        number = self.numbers[value]
        self.instructions.append(doc.KernelRecord("aten.clone.default", ({"n": number},), {}, (self.number(copy),)))
        return copy

    def _output(self, value: Any) -> doc.Output:
        if isinstance(value, fx.Node) and not isinstance(value.meta.get("val"), torch.Tensor):
            raise UnsupportedOp(
                f"output {value} is a number that depends on a tensor's values; return the tensor, and read it outside",
                source=source_of(value),
            )
        if isinstance(value, fx.Node):
            return doc.Output(self.numbers[value], file_spec(TensorSpec.of(value.meta["val"])))
        if value.__class__ in _LITERALS:
            return doc.Output(None, None, value)
        raise UnsupportedOp(f"an output is a {type(value).__name__}; a program gives tensors and plain values")


def _used_outside(outer: fx.GraphModule, bound: Mapping[str, Mapping[int, int]]) -> set[fx.Node]:
    """Nodes that anything but a delegate they are bound to uses."""
    used: set[fx.Node] = set()
    for node in outer.graph.nodes:
        skipped = bound.get(str(node.target), {}) if node.op == "call_module" else {}
        for at, arg in enumerate(node.args if node.op == "call_module" else node.all_input_nodes):
            if at not in skipped and isinstance(arg, fx.Node):
                used.add(arg)
    return used


def emit(
    name: str,
    signature: ExportGraphSignature,
    partitioned: Partitioned,
    bound_nodes: Mapping[str, Sequence[str]],
    constants: Constants,
    state: Collection[str],
    embedding: Collection[str] = (),
) -> Emitted:
    """A method. ``bound_nodes``: per delegate (its name in the outer graph) the inputs that are bound to it, by name.

    ``state``: the buffers that some method changes. ``embedding``: delegates whose bytes hold what is bound to them.

    Raises :class:`UnsupportedOp` or :class:`GraphError` for what a program file cannot say.
    """
    outer = partitioned.module
    emitter = _Emitter(signature, constants)
    targets = {
        node.name: str(kind.target)
        for node, kind in zip(
            [node for node in outer.graph.nodes if node.op == "placeholder"],
            signature.input_specs,
            strict=True,
        )
    }
    bound: dict[str, dict[int, int]] = {}
    for node in outer.graph.nodes:
        if node.op == "call_module":
            wanted = set(bound_nodes[str(node.target)])
            inside = node.target in embedding
            bound[str(node.target)] = {
                at: EMBEDDED if inside else emitter.constant(arg, targets.get(arg.name, arg.name))
                for at, arg in enumerate(node.args)
                if isinstance(arg, fx.Node) and arg.name in wanted
            }
    used = _used_outside(outer, bound)
    used.update(node for node in outer.graph.nodes if targets.get(node.name) in state)
    emitter.placeholders(outer, used)
    for node in outer.graph.nodes:
        if node.op == "get_attr" and node in used and "constant" in node.meta:
            emitter.bound[emitter.number(node)] = emitter.constant(node, str(node.target))
    graphs: list[fx.GraphModule] = []
    for node in outer.graph.nodes:
        if node.op == "call_module":
            emitter.call(node, len(graphs), bound[str(node.target)])
            graphs.append(getattr(outer, str(node.target)))
        elif node.op == "call_function" and node.target is not _getitem:
            emitter.kernel(node)
    outputs, updates = emitter.outputs(outer, state)
    return Emitted(
        name,
        tuple(emitter.inputs),
        outputs,
        emitter.count,
        emitter.bound,
        updates,
        tuple(emitter.instructions),
        graphs,
        list(bound.values()),
    )


def delegate_specs(
    graph: fx.GraphModule, bound: Mapping[int, int]
) -> tuple[tuple[doc.Spec, ...], tuple[doc.Spec, ...], dict[int, int]]:
    """Inputs and outputs of a delegate as program files have them, and its constants: without what its bytes hold."""
    inputs = [spec for at, spec in enumerate(input_specs(graph)) if bound.get(at) != EMBEDDED]
    constants = {at: which for at, which in bound.items() if which != EMBEDDED}
    return tuple(map(file_spec, inputs)), tuple(map(file_spec, output_specs(graph))), constants
