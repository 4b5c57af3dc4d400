"""Padding that changes nothing: a graph for the sizes of a bucket, whose results are right for every smaller size.

Which sizes are a program's symbols is not guessed. The graph is written for two sizes per symbol; what differs between
the two depends on it. From the inputs on, each dimension is followed as a product of factors, so that ``[2, 16]`` with
16 padded is still known after it became ``[32]``. An operator that mixes along a padded dimension has a rule here: what
it reads beyond the true size is replaced by what does not count (0 in a sum, minus infinity in a softmax). An operator
without a rule is :class:`Inexact`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from ...backend.builder import Capture, GraphBuilder, Refused
from ...backend.partition import REFUSAL
from ...core.specs import TensorSpec

__all__ = ["Factor", "Inexact", "Layout", "Masked", "mask_padding"]

aten = torch.ops.aten
_getitem: Any = operator.getitem

Factor: TypeAlias = tuple[int, int | None]
"""A size and the number of the symbol that it is, if it is one."""
Dim: TypeAlias = tuple[Factor, ...]
Layout: TypeAlias = tuple[Dim, ...]


class Inexact(Exception):
    """Why a graph cannot be padded."""


@dataclass(frozen=True, slots=True)
class Masked:
    """``module`` takes the true size of each symbol, too (int64, 0-dim); ``results`` are the outputs' layouts."""

    module: fx.GraphModule
    results: tuple[Layout | None, ...]


def _dim(factors: Sequence[Factor]) -> Dim:
    """Factors with those that are no symbol joined, without ones."""
    made: list[Factor] = []
    for size, symbol in factors:
        if symbol is None and size == 1:
            continue
        if symbol is None and made and made[-1][1] is None:
            made[-1] = (made[-1][0] * size, None)
        else:
            made.append((size, symbol))
    return tuple(made)


def _size(dim: Dim) -> int:
    return math.prod(size for size, _ in dim)


def _padded(dim: Dim) -> bool:
    return any(symbol is not None for _, symbol in dim)


def _regrouped(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout after a ``view`` to this shape. Raises :class:`Inexact` where a padded factor would be cut."""
    left = [factor for dim in layout for factor in dim]
    made: list[Dim] = []
    for wanted in shape:
        taken: list[Factor] = []
        while _size(tuple(taken)) < wanted:
            if not left:
                raise Inexact("a view that does not keep the padded dimension together")
            size, symbol = left.pop(0)
            need = wanted // _size(tuple(taken))
            if size > need:
                if symbol is not None or size % need:
                    raise Inexact("a view cuts the padded dimension")
                left.insert(0, (size // need, None))
                size = need
            taken.append((size, symbol))
        made.append(_dim(taken))
    if left:
        raise Inexact("a view that does not keep the padded dimension together")
    return tuple(made)


def _broadcast(layouts: Sequence[Layout]) -> Layout:
    """The layout of an elementwise operator's result."""
    rank = max(map(len, layouts), default=0)
    made: list[Dim] = []
    for back in range(rank, 0, -1):
        found = {layout[-back] for layout in layouts if len(layout) >= back and layout[-back]}
        if len(found) > 1:
            raise Inexact("an operator puts dimensions together that are padded in different ways")
        made.append(found.pop() if found else ())
    return tuple(made)


Rule: TypeAlias = Callable[["_Masker", fx.Node, Sequence[fx.Node]], Any]
_RULES: Final[dict[Any, Rule]] = {}


def _rule(*ops: Any) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return enter


class _Masker:
    """Writes the graph. ``variants`` are the nodes that a node is in the other graphs."""

    def __init__(self, sizes: Sequence[int], others: Sequence[int], capture: Capture) -> None:
        self.sizes = sizes
        self.others = others
        self.builder = GraphBuilder(capture, strict=True)
        self.values: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[fx.Node, Any] = {}
        self.true: list[fx.Node] = []
        self._masks: dict[Dim, fx.Node] = {}

    # -- layouts ---------------------------------------------------------------------------------------------
    def symbol(self, size: int, variants: Sequence[int]) -> Dim:
        """A dimension that is a symbol or none. Raises :class:`Inexact` for what is computed from one."""
        moved = [at for at, other in enumerate(variants) if other != size]
        if not moved:
            return _dim([(size, None)])
        (at, *more) = moved
        if more or size != self.sizes[at] or variants[at] != self.others[at]:
            raise Inexact(f"a size is computed from one that changes ({size})")
        return ((size, at),)

    def from_shapes(self, node: fx.Node, variants: Sequence[fx.Node]) -> Layout:
        """The layout of a tensor all whose dimensions are symbols or none."""
        shapes = [tuple(one.meta["val"].shape) for one in variants]
        return tuple(self.symbol(n, [shape[d] for shape in shapes]) for d, n in enumerate(node.meta["val"].shape))

    def check(self, layout: Any, value: Any, variants: Sequence[Any]) -> None:
        """Whether a layout explains the shapes that every graph has."""
        if isinstance(value, torch.Tensor):
            for at, other in enumerate(variants):
                sizes = [math.prod(self.others[at] if s == at else n for n, s in dim) for dim in layout]
                if sizes != list(other.shape):
                    raise Inexact("a shape that the masks do not explain")
        elif isinstance(value, (list, tuple)):
            for position, one in enumerate(value):
                self.check(layout[position], one, [other[position] for other in variants])

    def layout(self, node: Any) -> Layout:
        return self.layouts[node]

    # -- nodes -----------------------------------------------------------------------------------------------
    def copy(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        """The node as it is, on other values where ``instead`` says so."""
        known = {**self.values, **(instead or {})}
        return self.builder.graph.node_copy(node, lambda n: known[n])

    def same_constants(self, node: fx.Node, variants: Sequence[fx.Node]) -> None:
        """Raises :class:`Inexact` where an argument that is no tensor is computed from a size that changes."""

        def constants(one: fx.Node) -> Any:
            return tree_map(lambda v: None if isinstance(v, fx.Node) else v, (list(one.args), dict(one.kwargs)))

        if any(repr(constants(one)) != repr(constants(node)) for one in variants):
            raise Inexact("a number is computed from a size that changes")

    def mask_of(self, dim: Dim) -> fx.Node:
        """Which places of a dimension are true ones: bool, 1-D."""
        if dim in self._masks:
            return self._masks[dim]
        b, inner, found = self.builder, 1, None
        place = b(aten.arange.start_step, 0, _size(dim), 1, dtype=torch.int64, device=torch.device("cpu"))
        for size, symbol in reversed(dim):
            if symbol is not None:
                at = place if inner == 1 else b(aten.div.Tensor_mode, place, inner, rounding_mode="floor")
                at = at if inner * size == _size(dim) else b(aten.remainder.Scalar, at, size)
                holds = b(aten.lt.Tensor, at, self.true[symbol])
                found = holds if found is None else b(aten.logical_and.default, found, holds)
            inner *= size
        assert found is not None
        self._masks[dim] = found
        return found

    def masked(self, node: fx.Node, fill: Any, dims: Sequence[int] | None = None) -> fx.Node:
        """The node's value with ``fill`` beyond the true sizes of these dimensions (default: of all)."""
        layout, b = self.layout(node), self.builder
        rank = len(layout)
        chosen = {d % rank for d in dims} if dims is not None else set(range(rank))
        value = self.values[node]
        for d in sorted(chosen):
            if _padded(layout[d]):
                shape = [_size(layout[d]) if at == d else 1 for at in range(rank)]
                mask = b(aten.view.default, self.mask_of(layout[d]), shape)
                dtype = b.val(value).dtype
                value = b.cast(b(aten.where.ScalarOther, mask, value, fill), dtype)
        return value

    def any_padded(self, *nodes: Any) -> bool:
        return any(_padded(dim) for node in nodes if isinstance(node, fx.Node) for dim in self.layout(node))

    # -- the whole -------------------------------------------------------------------------------------------
    def call(self, node: fx.Node, variants: Sequence[fx.Node]) -> None:
        """One operator."""
        self.builder.debug_handle, self.builder.source = node.meta["debug_handle"], node.meta.get("source")
        if REFUSAL in node.meta:
            raise Inexact(f"{node.target} runs outside of the graph")
        rule = _RULES.get(node.target)
        inputs = [n for n in node.all_input_nodes if isinstance(self.layouts[n], tuple)]
        if rule is not None:
            made, layout = rule(self, node, variants)
        elif node.target is _getitem:
            made, layout = self.copy(node), self.layouts[node.args[0]][node.args[1]]  # type: ignore[index]
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            self.same_constants(node, variants)
            made, layout = self.copy(node), _broadcast([self.layout(n) for n in inputs])
        elif not self.any_padded(*inputs):
            self.same_constants(node, variants)
            made, layout = self.copy(node), tree_map(_whole, node.meta["val"])
        else:
            raise Inexact(f"{node.target} has no rule")
        self.check(layout, node.meta["val"], [one.meta["val"] for one in variants])
        self.values[node], self.layouts[node] = made, layout

    def run(self, graphs: Sequence[fx.GraphModule]) -> Masked:
        """The graph; ``graphs`` are the one to mask, and one per symbol."""
        rows = [list(graph.graph.nodes) for graph in graphs]
        if len({len(row) for row in rows}) > 1:
            raise Inexact("the graph is another one for another size")
        root = torch.nn.Module()
        results: tuple[Layout | None, ...] = ()
        inputs = sum(node.op == "placeholder" for node in rows[0])
        for position, (node, *variants) in enumerate(zip(*rows, strict=True)):
            if any((one.op, one.target) != (node.op, node.target) for one in variants):
                raise Inexact("the graph is another one for another size")
            if node.op == "placeholder":
                self.values[node] = self.copy(node)
                tensor = isinstance(node.meta["val"], torch.Tensor)
                self.layouts[node] = self.from_shapes(node, variants) if tensor else ()
                if position == inputs - 1:
                    spec = TensorSpec((), torch.int64, ())
                    self.true = [self.builder.placeholder(f"true_size_{at}", spec) for at in range(len(self.sizes))]
            elif node.op == "get_attr":
                held = getattr(graphs[0], str(node.target))
                if not isinstance(held, torch.Tensor):
                    raise Inexact("control flow")
                setattr(root, str(node.target), held)
                self.values[node], self.layouts[node] = self.copy(node), _whole(held)
            elif node.op == "output":
                self.copy(node)
                outputs: Any = node.args[0]
                results = tuple(self.layouts[o] if isinstance(o, fx.Node) else None for o in outputs)
            else:
                self.call(node, variants)
        made = fx.GraphModule(root, self.builder.graph)
        made.meta["random_ops"] = 0
        return Masked(made, results)


def _whole(value: Any) -> Any:
    return tuple(_dim([(n, None)]) for n in value.shape) if isinstance(value, torch.Tensor) else ()


def mask_padding(
    graphs: Sequence[fx.GraphModule], sizes: Sequence[int], others: Sequence[int], capture: Capture
) -> Masked:
    """Mask ``graphs[0]``, which is for ``sizes``; ``graphs[1 + i]`` is the same with ``others[i]`` for symbol ``i``.

    Raises :class:`Inexact` with the reason where padding would change a result.
    """
    try:
        return _Masker(sizes, others, capture).run(graphs)
    except Refused as error:
        raise Inexact(f"the backend takes no masks: {error.reason}") from error


# -- rules ------------------------------------------------------------------------------------------------------------
def _args(node: fx.Node, *names: str) -> list[Any]:
    """Arguments by name, with the schema's defaults."""
    found: list[Any] = []
    for name in names:
        at, argument = next((i, a) for i, a in enumerate(node.target._schema.arguments) if a.name == name)  # type: ignore[union-attr]
        found.append(node.args[at] if at < len(node.args) else node.kwargs.get(name, argument.default_value))
    return found


@_rule(aten.where.self, aten.clone.default, aten._to_copy.default, aten.full_like.default, aten.zeros_like.default,
       aten.ones_like.default, aten.gelu.default, aten.gelu_backward.default, aten.masked_fill.Scalar,
       aten.threshold_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default)  # fmt: skip
def _elementwise(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    return m.copy(node), _broadcast([m.layout(n) for n in node.all_input_nodes])


@_rule(aten.full.default, aten.zeros.default, aten.ones.default)
def _filled(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    values = [repr(_args(one, "fill_value")) if one.target is aten.full.default else "" for one in (node, *variants)]
    if len(set(values)) > 1:
        raise Inexact("a number is computed from a size that changes")
    return m.copy(node), m.from_shapes(node, variants)


@_rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _counted(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    layout = m.from_shapes(node, variants)
    named = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    start, step = (
        (_args(node, "start")[0] if "start" in named else 0),
        (_args(node, "step")[0] if "step" in named else 1),
    )
    if _padded(layout[0]) and (start, step) != (0, 1):
        raise Inexact("a range that does not count from 0")
    return m.copy(node), layout


@_rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def _view(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    return m.copy(node), _regrouped(m.layout(node.args[0]), node.meta["val"].shape)


@_rule(aten.expand.default)
def _expand(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before, shapes = m.layout(node.args[0]), [one.meta["val"].shape for one in variants]
    shape = node.meta["val"].shape
    new = len(shape) - len(before)
    return m.copy(node), tuple(
        before[d - new] if d >= new and (before[d - new] or n == 1) else m.symbol(n, [s[d] for s in shapes])
        for d, n in enumerate(shape)
    )


@_rule(aten.permute.default, aten.t.default, aten.transpose.int)
def _permute(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before = m.layout(node.args[0])
    order = list(range(len(before)))
    if node.target is aten.permute.default:
        order = [d % len(before) for d in node.args[1]]  # type: ignore[union-attr, operator]
    elif len(before) > 1:
        a, b = node.args[1:3] if node.target is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return m.copy(node), tuple(before[d] for d in order)


@_rule(aten.unsqueeze.default)
def _unsqueeze(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    made = list(m.layout(node.args[0]))
    at: Any = node.args[1]
    made.insert(at if at >= 0 else at + len(made) + 1, ())
    return m.copy(node), tuple(made)


@_rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before, dims = m.layout(node.args[0]), tree_leaves(node.args[1])
    gone = {d % len(before) for d in dims if not before[d]}
    return m.copy(node), tuple(dim for d, dim in enumerate(before) if d not in gone)


@_rule(aten.select.int)
def _select(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim, index = _args(node, "self", "dim", "index")
    before = m.layout(source)
    if _padded(before[dim]) and index not in (0, 1):
        raise Inexact("one place of the padded dimension is taken, which need not be there")
    m.same_constants(node, variants)
    return m.copy(node), tuple(one for d, one in enumerate(before) if d != dim % len(before))


@_rule(aten.slice.Tensor)
def _slice(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim, start, step = _args(node, "self", "dim", "start", "step")
    made = list(m.layout(source))
    dim %= len(made)
    length = node.meta["val"].shape[dim]
    if _padded(made[dim]):
        if length != _size(made[dim]):
            raise Inexact("a part of the padded dimension is taken")
    else:
        made[dim] = m.symbol(length, [one.meta["val"].shape[dim] for one in variants])
        if _padded(made[dim]) and (start not in (None, 0) or step != 1):
            raise Inexact("a slice of a size that changes does not begin at 0")
    return m.copy(node), tuple(made)


@_rule(aten.cat.default)
def _cat(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    tensors, dim = _args(node, "tensors", "dim")
    layouts = [m.layout(n) for n in tensors]
    dim %= len(layouts[0])
    if any(_padded(layout[dim]) for layout in layouts):
        raise Inexact("the padded dimension is joined to another")
    made = list(_broadcast([(*layout[:dim], (), *layout[dim + 1 :]) for layout in layouts]))
    made[dim] = _dim([(node.meta["val"].shape[dim], None)])
    return m.copy(node), tuple(made)


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim = _args(node, "self", "dim")
    before = m.layout(source)
    dim %= len(before)
    if _padded(before[dim]):
        raise Inexact("the padded dimension is split")
    m.same_constants(node, variants)
    return m.copy(node), [
        (*before[:dim], _dim([(part.shape[dim], None)]), *before[dim + 1 :]) for part in node.meta["val"]
    ]


_LEAST: Final[dict[Any, Any]] = {aten.amax.default: -math.inf, aten.max.dim: -math.inf, aten.argmax.default: -math.inf,
                 aten.amin.default: math.inf, aten.min.dim: math.inf, aten.argmin.default: math.inf,
                 aten.any.dim: False, aten.all.dim: True, aten.any.default: False, aten.all.default: True,
                 aten.sum.default: 0, aten.sum.dim_IntList: 0, aten.prod.dim_int: 1}  # fmt: skip


def _reduced(m: _Masker, node: fx.Node) -> tuple[Any, list[int], Layout]:
    """Input, dimensions that go, and the layout of what is left."""
    names = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    (source,) = _args(node, "self")
    before = m.layout(source)
    dims: Any = _args(node, "dim")[0] if "dim" in names else None
    keep = _args(node, "keepdim")[0] if "keepdim" in names else False
    chosen = (
        sorted({d % max(1, len(before)) for d in tree_leaves(dims)})
        if dims not in (None, [])
        else [*range(len(before))]
    )
    after = tuple(() if d in chosen else dim for d, dim in enumerate(before) if keep or d not in chosen)
    return source, chosen, after


@_rule(*_LEAST)
def _reduce(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dims, after = _reduced(m, node)
    m.same_constants(node, variants)
    if not any(_padded(m.layout(source)[d]) for d in dims):
        made = m.copy(node)
    else:
        fill, dtype = _LEAST[node.target], source.meta["val"].dtype
        if math.isinf(fill) and not dtype.is_floating_point:
            fill = torch.iinfo(dtype).min if fill < 0 else torch.iinfo(dtype).max
        if len(after) == 0 and node.target in (aten.argmax.default, aten.argmin.default) and len(dims) > 1:
            raise Inexact("a place in a padded tensor as one number")
        made = m.copy(node, {source: m.masked(source, fill, dims)})
    return made, [after, after] if node.target in (aten.max.dim, aten.min.dim) else after


@_rule(aten.mean.dim, aten.mean.default)
def _mean(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dims, after = _reduced(m, node)
    layout, b = m.layout(source), m.builder
    if not any(_padded(layout[d]) for d in dims):
        m.same_constants(node, variants)
        return m.copy(node), after
    (dtype,) = _args(node, "dtype")
    result = dtype or source.meta["val"].dtype
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    (keep,) = _args(node, "keepdim") if node.target is aten.mean.dim else (False,)
    total = b(aten.sum.dim_IntList, b.cast(m.masked(source, 0, dims), wide), dims, keep)
    plain = math.prod(size for d in dims for size, symbol in layout[d] if symbol is None)
    count = b(aten.full.default, [], plain, dtype=wide, device=torch.device("cpu"))
    for symbol in [symbol for d in dims for _, symbol in layout[d] if symbol is not None]:
        count = b(aten.mul.Tensor, count, b.cast(m.true[symbol], wide))
    return b.cast(b(aten.div.Tensor, total, count), result), after


@_rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim = _args(node, "self", "dim")
    layout = m.layout(source)
    m.same_constants(node, variants)
    return m.copy(node, {source: m.masked(source, -math.inf, [dim])} if _padded(layout[dim]) else {}), layout


@_rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    grad, output, dim = _args(node, "grad_output", "output", "dim")
    m.same_constants(node, variants)
    instead = {one: m.masked(one, 0, [dim]) for one in (grad, output)} if _padded(m.layout(grad)[dim]) else {}
    return m.copy(node, instead), _broadcast([m.layout(grad), m.layout(output)])


@_rule(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default, aten.dot.default)
def _product(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    first, second = [n for n in node.args if isinstance(n, fx.Node)][-2:]
    left, right = m.layout(first), m.layout(second)
    inner = len(right) - 2 if len(right) > 1 else 0
    if left[-1] != right[inner]:
        raise Inexact("a product over dimensions that are padded in different ways")
    instead = {}
    if _padded(left[-1]):
        instead = {first: m.masked(first, 0, [-1]), second: m.masked(second, 0, [inner])}
        if first is second:
            raise Inexact("a product of a tensor with itself over the padded dimension")
    after = (*left[:-1], *(right[-1:] if len(right) > 1 else ()))
    return m.copy(node, instead), after


@_rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Keys beyond the true size get no weight; where each query sees keys up to its own place only, none sees them."""
    m.same_constants(node, variants)
    query, key, value, causal, given = _args(node, "query", "key", "value", "is_causal", "attn_mask")
    asked, kept, layout = m.layout(query), m.layout(key), m.layout(value)
    if asked[-1] != kept[-1] or _padded(kept[-1]) or kept[-2] != layout[-2] or (causal and asked[-2] != kept[-2]):
        raise Inexact("attention over dimensions that are padded in different ways")
    after = [(*asked[:-1], layout[-1]), asked[:-1]]
    if not _padded(kept[-2]):
        return m.copy(node), after
    if len({query, key, value}) < 3:
        raise Inexact("attention of a tensor with itself")
    if given is not None and not causal:
        raise Inexact("attention with a mask of the program's own")
    instead = {one: m.masked(one, 0, [-2]) for one in (key, value)}
    if causal:
        return m.copy(node, instead), after
    b, dtype = m.builder, query.meta["val"].dtype
    true = b(aten.view.default, m.mask_of(kept[-2]), [1, 1, 1, _size(kept[-2])])
    zero = b(aten.full.default, [], 0.0, dtype=dtype, device=torch.device("cpu"))
    weight = b.cast(b(aten.where.ScalarOther, true, zero, -math.inf), dtype)
    made = m.copy(node, instead)
    made.update_kwarg("attn_mask", weight)
    return made, after


@_rule(aten.embedding.default)
def _embedding(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    weight, indices = _args(node, "weight", "indices")
    if m.any_padded(weight):
        raise Inexact("the table of an embedding is padded")
    return m.copy(node, {indices: m.masked(indices, 0)}), (*m.layout(indices), m.layout(weight)[1])


@_rule(aten.native_layer_norm.default)
def _layer_norm(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, shape = _args(node, "input", "normalized_shape")
    layout, count = m.layout(source), len(tree_leaves(shape))
    if any(map(_padded, layout[-count:])):
        raise Inexact("a normalisation over the padded dimension")
    m.same_constants(node, variants)
    few = (*layout[:-count], *((),) * count)
    return m.copy(node), [layout, few, few]


@_rule(aten.cumsum.default, aten.tril.default, aten.triu.default)
def _prefix(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """What stands at a place depends on earlier places only, or on the place itself."""
    layout = m.layout(node.args[0])
    looked = [layout[node.args[1]]] if node.target is aten.cumsum.default else layout[-2:]  # type: ignore[index]
    if any(_padded(dim) and len(dim) > 1 for dim in looked):
        raise Inexact(f"{node.target} along a dimension of several")
    m.same_constants(node, variants)
    return m.copy(node), layout


_SPATIAL: Final = {aten.convolution.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default,
                   aten._adaptive_avg_pool2d.default, aten.max_pool2d.default, aten.adaptive_avg_pool2d.default,
                   aten._native_batch_norm_legit_no_training.default}  # fmt: skip


@_rule(*_SPATIAL)
def _images(m: _Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Each image by itself: the number of images may be padded, and nothing else."""
    source: Any = node.args[0]
    layout = m.layout(source)
    if any(map(_padded, layout[1:])) or m.any_padded(*[n for n in node.all_input_nodes if n is not source]):
        raise Inexact(f"{node.target} with padded images")
    if node.target is not aten._native_batch_norm_legit_no_training.default and len(layout) != 4:
        raise Inexact(f"{node.target} of a tensor that is no batch of images")
    m.same_constants(node, variants)

    def after(value: torch.Tensor) -> Layout:
        found = _whole(value)
        return (layout[0], *found[1:]) if found and value.shape[0] == _size(layout[0]) else found

    return m.copy(node), tree_map(after, node.meta["val"])
