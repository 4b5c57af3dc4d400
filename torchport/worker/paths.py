"""A path of the trie as bytes, and back: what another process needs to write the same graph.

The program's thread pays for the writing, so it is one pass of pickle's C code over the nodes' own arguments. Nothing
is pickled as it is: each kind of object that a node may hold has its rule here, and whatever has none is refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..core.specs import TensorSpec
from ..trace.graph import needed
from ..trace.handle import DEVICE_TYPE, ShownSpec, intern_spec
from ..trace.trie import HostScalar, Leaf, Node, RandomKey, ScalarInput, Value

__all__ = [
    "Definitions",
    "NotSendable",
    "PathData",
    "TracePath",
    "define",
    "definitions_of",
    "dumps",
    "loads",
    "path_from_data",
    "path_to_data",
]


class NotSendable(Exception):
    """Another process could not make this again; ``reason`` says what and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# -- how each kind of object is written ------------------------------------------------------------------------------
def _constant(name: str) -> Any:
    return vars(torch)[name]


def _operator(name: str, overload: str) -> Any:
    namespace, _, base = name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError:
        raise NotSendable(
            f"the process that compiles has no operator {name}.{overload}: define it in a module that can be imported"
        ) from None


def _spec(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> TensorSpec:
    return intern_spec(TensorSpec(shape, dtype, strides))


def _shown(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...], shown: tuple[int, ...]) -> TensorSpec:
    return intern_spec(ShownSpec(shape, dtype, strides, shown))


def _write_constant(value: Any) -> Any:
    return _constant, (str(value).removeprefix("torch."),)


def _write_device(value: torch.device) -> Any:
    # Graphs are written for the host, whatever device stands in a path.
    return torch.device, ("cpu",) if value.type == DEVICE_TYPE else (value.type, value.index)


def _write_spec(value: TensorSpec) -> Any:
    return _spec, (value.shape, value.dtype, value.strides)


def _write_shown(value: ShownSpec) -> Any:
    return _shown, (value.shape, value.dtype, value.strides, value.shown)


def _write_value(value: Value) -> Any:
    return Value, (value.value_id,)


def _write_positioned(value: Leaf | ScalarInput | RandomKey) -> Any:
    return value.__class__, (value.position,)


def _write_operator(value: Any) -> Any:
    return _operator, (value._schema.name, value._overloadname)


_RULES: Final[dict[type, Callable[[Any], Any]]] = {
    Value: _write_value,
    Leaf: _write_positioned,
    ScalarInput: _write_positioned,
    RandomKey: _write_positioned,
    HostScalar: lambda value: (HostScalar, (value.dtype, value.value)),
    TensorSpec: _write_spec,
    ShownSpec: _write_shown,
    torch.dtype: _write_constant,
    torch.layout: _write_constant,
    torch.memory_format: _write_constant,
    torch.device: _write_device,
    torch.Size: lambda value: (tuple, (list(value),)),
    complex: lambda value: (complex, (value.real, value.imag)),
    torch._ops.OpOverload: _write_operator,
}

_MAKERS: Final[tuple[Any, ...]] = (
    *(_constant, _operator, _spec, _shown, torch.device, tuple, complex),
    *(Value, Leaf, ScalarInput, RandomKey, HostScalar),
)
_BY_NAME: Final = {(maker.__module__, maker.__qualname__): maker for maker in _MAKERS}
_KNOWN: Final = frozenset(map(id, _MAKERS))


class _Pickler(pickle.Pickler):
    """Writes what has a rule, and notes which operators were not PyTorch's."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.foreign: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        rule = _RULES.get(obj.__class__)
        if rule is None:
            if id(obj) in _KNOWN:
                return NotImplemented
            raise NotSendable(f"an argument is a {type(obj).__module__}.{type(obj).__qualname__}, which cannot be sent")
        if rule is _write_operator and obj.namespace not in _BUILT_IN:
            self.foreign.append(obj)
        return rule(obj)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _BY_NAME[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a message") from None


def dumps(value: Any) -> tuple[bytes, tuple[Any, ...]]:
    """Plain data, with what a path may hold, as bytes; and the operators in it that are not PyTorch's own.

    Raises :class:`NotSendable`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), tuple(pickler.foreign)


def loads(data: bytes) -> Any:
    """What :func:`dumps` wrote. Raises :class:`NotSendable` for an operator that this process does not have."""
    return _Unpickler(io.BytesIO(data)).load()


# -- operators that are not PyTorch's ----------------------------------------------------------------------------------
_BUILT_IN: Final = frozenset({"aten", "prims", "prim"})
_REGISTERED_AT: Final = re.compile(r"^debug: registered at (.*):\d+$", re.MULTILINE)


@functools.lru_cache(maxsize=1024)
def home_of(op: Any) -> str:
    """The module whose import defines an operator; empty where C++ code does. Raises :class:`NotSendable`."""
    from torch._library.custom_ops import OPDEFS

    name = op._schema.name
    definition = OPDEFS.get(name)
    if definition is not None:
        return _importable(name, definition._init_fn.__module__)
    said = _REGISTERED_AT.search(torch._C._dispatch_dump(name))
    file = said[1] if said else ""
    if not file.endswith((".py", ">")):
        return ""  # a shared library's: all that this process has loaded are loaded there
    for module_name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file:
            return _importable(name, module_name)
    raise NotSendable(f"operator {name} is defined in {file}, which is no module that another process could import")


def _importable(op: str, module: str) -> str:
    try:
        found = module != "__main__" and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise NotSendable(f"operator {op} is defined in {module}, which no other process can import; move it to a file")
    return module


@dataclass(frozen=True, slots=True)
class Definitions:
    """What defines operators that are not PyTorch's: modules to import, shared libraries to load."""

    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


def definitions_of(ops: Iterable[Any]) -> Definitions:
    """What another process has to import and load for these operators. Raises :class:`NotSendable`."""
    homes = dict.fromkeys(home_of(op) for op in ops)
    libraries = tuple(sorted(torch.ops.loaded_libraries)) if "" in homes else ()
    return Definitions(tuple(home for home in homes if home), libraries)


def define(definitions: Definitions) -> None:
    """Import the modules and load the libraries. Raises :class:`NotSendable` where that fails."""
    try:
        for module in definitions.modules:
            importlib.import_module(module)
        for library in definitions.libraries:
            torch.ops.load_library(library)
    except Exception as error:
        raise NotSendable(f"what defines an operator cannot be loaded: {type(error).__name__}: {error}") from error


# -- paths -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PathData:
    """A path as bytes, how many operators it has, and what an error names: ``label`` and ``source``."""

    data: bytes
    ops: int
    label: str
    source: str | None
    definitions: Definitions = Definitions()


@dataclass(slots=True)
class TracePath:
    """What :func:`~torchport.trace.graph.build_graph` is given."""

    path: list[Node]
    outputs: tuple[int, ...]
    leaf_specs: list[TensorSpec]
    donated: frozenset[int]


def path_to_data(
    path: Sequence[Node], outputs: Sequence[int], leaf_specs: Sequence[TensorSpec], donated: Set[int] = frozenset()
) -> PathData:
    """The nodes of a path that the values with the ids ``outputs`` need, as bytes. Raises :class:`NotSendable`.

    Takes 2 µs per node (a training step of a transformer layer).
    """
    nodes = needed(path, outputs)
    same: dict[Any, Any] = {}  # equal lines are one object, which pickle writes once
    rows = [
        (
            node.op,
            node.args,
            node.kwargs,
            node.specs,
            None if node.container is None else node.container is list,
            node.first_id,
            node.depth,
            same.setdefault(node.source, node.source),
            node.is_factory,
        )
        for node in nodes
    ]
    try:
        data, foreign = dumps((rows, tuple(outputs), list(leaf_specs), tuple(donated)))
    except (pickle.PicklingError, RecursionError) as error:
        raise NotSendable(f"an argument cannot be sent: {error}") from error
    label = str(path[-1].op) if len(rows) == 1 else f"a graph of {len(rows)} operators"
    return PathData(data, len(rows), label, path[-1].source, definitions_of(foreign))


def path_from_data(data: bytes) -> TracePath:
    """The path that :func:`path_to_data` wrote, as nodes that a graph can be built from."""
    rows, outputs, leaf_specs, donated = loads(data)
    path: list[Node] = []
    for op, args, kwargs, specs, container, first_id, depth, source, is_factory in rows:
        node = Node(None, None, op)
        node.args, node.kwargs, node.specs = args, kwargs, specs
        node.container = None if container is None else list if container else tuple
        node.first_id, node.end_id = first_id, first_id + len(specs)
        node.depth, node.source, node.is_factory = depth, source, is_factory
        path.append(node)
    return TracePath(path, outputs, leaf_specs, frozenset(donated))
