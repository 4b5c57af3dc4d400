"""Sizes that change, ahead of time: a method becomes variants, one per set of bucket sizes.

A variant is padded where that is exact (:mod:`torchport.backend.masking`), and serves every smaller size; else there is
one variant per size.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from ..backend.buckets import SMALLEST, Buckets, other_size, require_products
from ..backend.buckets import product as _product
from ..backend.builder import Capture
from ..backend.fx_normalise import has_symbols
from ..backend.infer import fake_tensor
from ..backend.masking import Inexact, Layout, Masked, mask_padding
from ..core.errors import ConfigError, GraphError, UnsupportedOp
from ..core.specs import TensorSpec
from ..program import document as doc
from ..program.schema import Extent, OutputForm
from ..program.variants import LARGEST_PADDED

__all__ = ["Shapes", "combinations", "dim_names", "padded_graphs", "section", "shapes_of", "specialise"]

MOST_VARIANTS: Final = 64
"""Variants that one method may become."""
_UNBOUNDED: Final = 1 << 31
_NUMBERS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
Normal: TypeAlias = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What changes in a method. ``symbols`` are sympy's, ``names`` and ``ranges`` (the end may be open) theirs;
    ``inputs`` and ``outputs`` are as the program's document has them."""

    symbols: tuple[Any, ...]
    names: tuple[str, ...]
    ranges: tuple[tuple[int, int | None], ...]
    inputs: tuple[tuple[Extent, ...] | None, ...]
    outputs: tuple[OutputForm | None, ...]

    def shown(self, sizes: Sequence[int]) -> str:
        """Values of the symbols in words."""
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, sizes, strict=True))


# -- what changes ------------------------------------------------------------------------------------------------------
def dim_names(module: torch.nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> list[Any]:
    """Per tensor or plain value among the inputs, in order, the names of its ``torch.export.Dim`` objects by dimension.

    The exported program has forgotten them; nothing where they cannot be told.
    """
    try:
        if isinstance(dynamic_shapes, dict):
            bound = inspect.signature(module.forward).bind(*args, **(kwargs or {})).arguments
            given: Any = {name: bound[name] for name in dynamic_shapes}
        else:
            given, dynamic_shapes = list(args), list(dynamic_shapes)
        named: dict[int, dict[int, str]] = {}

        def walk(value: Any, dims: Any) -> None:
            if isinstance(value, torch.Tensor):
                pairs = dims.items() if isinstance(dims, dict) else enumerate(dims or ())
                found = {at: getattr(dim, "__name__", "") for at, dim in pairs if isinstance(dim, torch.export.Dim)}
                named.setdefault(id(value), {}).update({at: name for at, name in found.items() if name.isidentifier()})
            elif dims is not None and isinstance(value, dict):
                for key, one in dims.items():
                    walk(value[key], one)
            elif dims is not None and isinstance(value, (list, tuple)):
                for one, more in zip(value, dims, strict=True):
                    walk(one, more)

        walk(given, dynamic_shapes)
        return [named.get(id(leaf), {}) for leaf in tree_leaves((tuple(args), dict(kwargs or {})))]
    except (TypeError, ValueError, KeyError, AttributeError):
        return []


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def _affine(expression: Any, symbols: list[Any], where: str) -> Extent:
    """A size as multiple and offset of one symbol, which is entered among ``symbols``."""
    import sympy

    free = list(getattr(expression, "free_symbols", ()))
    if not free:
        return int(expression)
    if len(free) == 1:
        (symbol,) = free
        multiple, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
        if (
            isinstance(multiple, sympy.Integer)
            and isinstance(offset, sympy.Integer)
            and multiple >= 1
            and sympy.expand(expression - multiple * symbol - offset) == 0
        ):
            if symbol not in symbols:
                symbols.append(symbol)
            return symbols.index(symbol), int(multiple), int(offset)
    raise UnsupportedOp(
        f"{where} is {expression}; sizes that change are a torch.export.Dim, or a multiple of one plus a number"
    )


def _end(bound: Any) -> int | None:
    """The largest value of a symbol; ``None`` for an open end."""
    try:
        found = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return None if found >= _UNBOUNDED else found


def shapes_of(method: str, exported: ExportedProgram, names: Sequence[Mapping[int, str]] = ()) -> Shapes | None:
    """What changes in a method; ``None`` for nothing. Raises :class:`UnsupportedOp` for what no variants can serve."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    pairs = zip(nodes, exported.graph_signature.input_specs, strict=True)
    users = [node for node, spec in pairs if spec.kind is InputKind.USER_INPUT]
    if not any(has_symbols(node.meta.get("val")) for node in users):
        return None
    symbols: list[Any] = []
    inputs: list[tuple[Extent, ...] | None] = []
    given: dict[Any, str] = {}
    for position, node in enumerate(users):
        value = node.meta.get("val")
        if isinstance(value, _NUMBERS):
            raise UnsupportedOp(
                f"input {node.target!r} of method {method!r} is a number that changes; give it as a 0-dim tensor, or "
                "export the model for one value"
            )
        if not isinstance(value, torch.Tensor):
            inputs.append(None)
            continue
        sizes = [_expression(size) for size in value.shape]
        dims = [
            _affine(size, symbols, f"dimension {dim} of input {node.target!r} of method {method!r}")
            for dim, size in enumerate(sizes)
        ]
        inputs.append(tuple(dims))
        own = names[position] if position < len(names) else {}
        given.update({sizes[dim]: name for dim, name in own.items() if sizes[dim] in symbols})
    shown: list[str] = []
    ranges: list[tuple[int, int | None]] = []
    for at, symbol in enumerate(symbols):
        name = given.get(symbol, str(symbol))
        shown.append(name if name.isidentifier() and len(name) <= 64 and name not in shown else f"size_{at}")
        bounds = exported.range_constraints.get(symbol)
        least, most = (1, None) if bounds is None else (int(bounds.lower), _end(bounds.upper))
        ranges.append((max(1, least), most))
    outputs = _output_forms(exported, symbols)
    return Shapes(tuple(symbols), tuple(shown), tuple(ranges), tuple(inputs), outputs)


def _output_forms(exported: ExportedProgram, symbols: Sequence[Any]) -> tuple[OutputForm | None, ...]:
    """What the model's outputs are; a number that is no product of sizes has a form that says nothing."""
    results: Any = exported.graph.output_node().args[0]
    found: list[OutputForm | None] = []
    for value, spec in zip(results, exported.graph_signature.output_specs, strict=True):
        if spec.kind is not OutputKind.USER_OUTPUT:
            continue
        made = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(made, torch.Tensor):
            found.append(OutputForm(tuple(_product(_expression(size), symbols) for size in made.shape)))
        elif isinstance(made, torch.SymInt):
            found.append(OutputForm(None, _product(_expression(made), symbols)))
        elif isinstance(made, (torch.SymFloat, torch.SymBool)) and made.node.expr.free_symbols:
            raise UnsupportedOp(
                f"an output is a number computed from a size that changes ({made.node.expr}); return the size itself, "
                "or a tensor, and compute outside"
            )
        else:
            found.append(None)
    return tuple(found)


# -- which sizes -------------------------------------------------------------------------------------------------------
def _limits(shapes: Shapes, method: str, buckets: Buckets | None) -> list[tuple[int, int]]:
    """The symbols' ranges with an end. Raises :class:`ConfigError` where there is none."""
    found: list[tuple[int, int]] = []
    for name, (least, most) in zip(shapes.names, shapes.ranges, strict=True):
        if buckets is not None and buckets.sizes:
            most = buckets.sizes[-1] if most is None else min(most, buckets.sizes[-1])
        if most is None:
            raise ConfigError(
                f"size {name!r} of method {method!r} has no largest value: write torch.export.Dim({name!r}, max=…), or "
                "give lower() the sizes to compile for, as buckets=[16, 64]"
            )
        if most < least:
            raise ConfigError(f"size {name!r} of method {method!r} is at least {least}, and no bucket is as large")
        found.append((least, most))
    return found


def _grid(shapes: Shapes, limits: Sequence[tuple[int, int]], buckets: Buckets | None) -> list[tuple[int, ...]]:
    """The sizes of padded variants, largest first."""
    axes: list[list[int]] = []
    for least, most in limits:
        if buckets is not None and buckets.sizes:
            axis = [size for size in buckets.sizes if least <= size < most]
        else:
            axis = [1 << n for n in range(SMALLEST.bit_length() - 1, most.bit_length()) if least <= 1 << n < most]
        axes.append([*axis, most])
    return list(itertools.product(*(reversed(axis) for axis in axes))) if _few(axes) else []


def _few(axes: Sequence[Sequence[int]]) -> bool:
    return math.prod(map(len, axes)) <= MOST_VARIANTS


def combinations(
    shapes: Shapes, method: str, buckets: Buckets | None, reason: str | None
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """The sizes to compile for, and the symbols' ranges. ``reason``: why inputs cannot be padded, if they cannot.

    Raises :class:`ConfigError` and :class:`UnsupportedOp` for too many of them.
    """
    limits = _limits(shapes, method, buckets)
    if reason is None:
        found = _grid(shapes, limits, buckets)
        if not found:
            raise ConfigError(
                f"method {method!r} has more than {MOST_VARIANTS} sets of bucket sizes ({', '.join(shapes.names)}); "
                "give fewer, as buckets=[16, 64]"
            )
        return found, limits
    given = buckets.sizes if buckets is not None else ()
    axes = [
        [size for size in given if least <= size <= most] if given else range(least, most + 1) for least, most in limits
    ]
    if not _few(axes):
        raise UnsupportedOp(
            f"method {method!r} cannot be padded exactly ({reason}), and its sizes ({', '.join(shapes.names)}) are too "
            f"many to compile for each: at most {MOST_VARIANTS} sets. Give those there are as buckets=[16, 64], a "
            "smaller range to torch.export.Dim, or one method per set of shapes as methods={name: program}"
        )
    ends = [(axis[0], axis[-1]) for axis in axes if axis]
    if len(ends) < len(axes):
        raise ConfigError(f"no bucket of method {method!r} is in the range of its sizes: {limits}")
    return list(itertools.product(*axes)), ends


# -- a graph for one set of sizes --------------------------------------------------------------------------------------
def specialise(graph: fx.GraphModule, shapes: Shapes, sizes: Sequence[int]) -> fx.GraphModule:
    """A copy of an exported graph for these values of the symbols: as if it had been exported for them.

    Raises :class:`GraphError` for sizes that the model refuses.
    """
    table = dict(zip(shapes.symbols, sizes, strict=True))

    def number(value: Any) -> Any:
        return int(value.node.expr.xreplace(table)) if isinstance(value, torch.SymInt) else value

    def concrete(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not has_symbols(value):
            return value
        try:
            spec = TensorSpec(tuple(map(number, value.shape)), value.dtype, tuple(map(number, value.stride())))
        except TypeError:
            return value  # a size that depends on values, which is as in any exported program
        return fake_tensor(spec)

    made = copy.deepcopy(graph)
    for node in list(made.graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, _NUMBERS) and not _remains(node):
            found = _computed(node)
            if isinstance(found, (bool, int, float)):
                _use_instead(node, found)
                continue
        node.meta["val"] = tree_map(concrete, value)
        if str(node.target) == "aten._assert_scalar.default" and node.args[0] in (False, 0):
            raise GraphError(f"the model refuses {shapes.shown(sizes)}: {node.args[1]}")
    return made


def _remains(node: fx.Node) -> bool:
    """Whether a number depends on one that is known when the program runs only."""
    return any(isinstance(arg.meta.get("val"), _NUMBERS) for arg in node.all_input_nodes)


def _computed(node: fx.Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if any(has_symbols(leaf) for leaf in tree_leaves((args, kwargs))):
        return None
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (TypeError, ValueError, RuntimeError):
        return None


def _use_instead(node: fx.Node, number: Any) -> None:
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: number if n is node else n)
    node.graph.erase_node(node)


# -- padding -----------------------------------------------------------------------------------------------------------
def padded_graphs(
    graph: fx.GraphModule,
    exported: ExportedProgram,
    shapes: Shapes,
    grid: Sequence[tuple[int, ...]],
    normal: Normal,
    capture: Capture,
    strict: bool,
    constants: Collection[str] = (),
) -> tuple[dict[tuple[int, ...], fx.GraphModule], tuple[OutputForm | None, ...]]:
    """A masked graph in normal form per set of sizes, and what of the outputs is true. Raises :class:`Inexact`.

    ``capture``: whose operators masks are made of; unless ``strict``, what it does not take is left to PyTorch.
    """
    if any(not isinstance(dim, int) and dim[1:] != (1, 0) for dims in shapes.inputs for dim in dims or ()):
        raise Inexact("an input has a size that is computed from one that changes")
    if any(form is not None and form.dims is None and form.number is None for form in shapes.outputs):
        raise Inexact("an output is a number that is computed from a size")
    require_products(graph, shapes.symbols)
    found: dict[tuple[int, ...], fx.GraphModule] = {}
    forms: tuple[OutputForm | None, ...] | None = None
    kept = [spec.kind is OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs]
    for sizes in grid:
        masked = _masked(graph, shapes, sizes, normal, capture, strict, constants)
        layouts = [layout for layout, user in zip(masked.results, kept, strict=True) if user]
        own = tuple(_true_form(form, layout) for form, layout in zip(shapes.outputs, layouts, strict=True))
        if forms is not None and own != forms:
            raise Inexact("an output has another form for another size")
        found[sizes], forms = masked.module, own
    assert forms is not None
    return found, forms


def _masked(
    graph: fx.GraphModule,
    shapes: Shapes,
    sizes: tuple[int, ...],
    normal: Normal,
    capture: Capture,
    strict: bool,
    constants: Collection[str],
) -> Masked:
    if max(sizes) > LARGEST_PADDED:
        raise Inexact(f"a size is larger than {LARGEST_PADDED:,}")
    others = [other_size(size) for size in sizes]
    sets = [sizes, *((*sizes[:at], other, *sizes[at + 1 :]) for at, other in enumerate(others))]
    try:
        graphs = [normal(specialise(graph, shapes, one)) for one in sets]
    except (GraphError, RuntimeError, ValueError) as error:
        raise Inexact(f"the graph is not for every size: {error}") from error
    smallest = min(least for least, _ in shapes.ranges)
    return mask_padding(
        graphs, sizes, others, capture, smallest=smallest, strict=strict, number=torch.float32, constants=constants
    )


def _true_form(form: OutputForm | None, layout: Layout | None) -> OutputForm | None:
    if form is None or form.dims is None or layout is None:
        return form
    return OutputForm(tuple(tuple((size, None) if at is None else (0, at) for size, at in dim) for dim in layout))


def section(
    shapes: Shapes,
    limits: Sequence[tuple[int, int]],
    variants: Sequence[tuple[int, ...]],
    outputs: Sequence[OutputForm | None],
    reason: str | None,
) -> doc.Dynamic:
    """What the document says of the method."""
    symbols = tuple(doc.Symbol(name, least, most) for name, (least, most) in zip(shapes.names, limits, strict=True))
    return doc.Dynamic(symbols, shapes.inputs, tuple(outputs), tuple(sorted(variants)), reason is None, reason or "")
