"""Padding that changes nothing: a graph for the sizes of a bucket, whose results are right for every smaller size.

Which sizes are a program's symbols is not guessed. The graph is written for two sizes per symbol; what differs between
the two depends on it. From the inputs on, each dimension is followed as a product of factors, so that ``[2, 16]`` with
16 padded is still known after it became ``[32]``. An operator that mixes along a padded dimension has a rule here: what
it reads beyond the true size is replaced by what does not count (0 in a sum, minus infinity in a softmax). An operator
without a rule is :class:`Inexact`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from . import masking_attention, masking_counted, masking_parts, masking_training  # noqa: F401  # their rules
from .builder import Capture, Refused
from .masker import (
    Inexact,
    Layout,
    Masked,
    Masker,
    arguments,
    broadcast,
    dim_of,
    is_padded,
    regrouped,
    rule_for,
    size_of,
    whole,
)

__all__ = ["Inexact", "Layout", "Masked", "mask_padding"]

aten = torch.ops.aten


def mask_padding(
    graphs: Sequence[fx.GraphModule],
    sizes: Sequence[int],
    others: Sequence[int],
    capture: Capture,
    *,
    smallest: int = 2,
    strict: bool = True,
    number: torch.dtype = torch.int64,
    constants: Collection[str] = (),
    sums: bool = False,
) -> Masked:
    """Mask ``graphs[0]``, which is for ``sizes``; ``graphs[1 + i]`` is the same with ``others[i]`` for symbol ``i``.

    ``smallest``: the smallest true size that a call may have. ``strict``: the backend must take all operators, those of
    masks included; else what it does not take stays. ``number``: the dtype of true sizes. ``constants``: inputs whose
    value is in ``meta["constant"]`` and does not change. ``sums``: a size may be a symbol and a constant, such as
    ``T - 1`` (:attr:`Masked.sums`). Padded inputs must have zeros beyond their true size.
    Raises :class:`Inexact` with the reason where padding would change a result.
    """
    try:
        return Masker(sizes, others, capture, smallest, strict, number, constants, sums).run(graphs)
    except Refused as error:
        raise Inexact(f"the backend takes no masks: {error.reason}") from error


# -- rules ------------------------------------------------------------------------------------------------------------
@rule_for(aten.where.self, aten.clone.default, aten._to_copy.default, aten.full_like.default, aten.zeros_like.default,
          aten.ones_like.default, aten.fill.Scalar, aten.fill.Tensor, aten.masked_fill.Scalar, aten.gelu.default,
          aten.gelu_backward.default, aten.threshold_backward.default, aten.tanh_backward.default,
          aten.sigmoid_backward.default)  # fmt: skip
def _elementwise(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    return m.copy(node), broadcast([m.layout(n) for n in node.all_input_nodes])


_FULL: Final = (aten.full.default, aten.new_full.default)


@rule_for(*_FULL, aten.zeros.default, aten.ones.default, aten.new_zeros.default, aten.new_ones.default)
def _filled(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    values = [repr(arguments(one, "fill_value")) if one.target in _FULL else "" for one in (node, *variants)]
    if len(set(values)) > 1:
        raise Inexact("a number is computed from a size that changes")
    return m.copy(node), m.of_any_order(node, variants)


@rule_for(aten.div.Tensor_mode, aten.floor_divide.default, aten.remainder.Tensor, aten.remainder.Scalar_Tensor,
          aten.fmod.Tensor)  # fmt: skip
def _divided(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """What is beyond the true size, mostly 0, would be an error to divide an integer by."""
    m.same_constants(node, variants)
    (divisor,) = arguments(node, "other")
    whole_numbers = not node.meta["val"].dtype.is_floating_point and isinstance(divisor, fx.Node)
    instead = {divisor: m.masked(divisor, 1)} if whole_numbers else {}
    return m.copy(node, instead), broadcast([m.layout(n) for n in node.all_input_nodes])


@rule_for(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
          aten.unflatten.int)  # fmt: skip
def _view(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    return m.copy(node), regrouped(m.layout(node.args[0]), node.meta["val"].shape)


@rule_for(aten.expand.default)
def _expand(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before, shape = m.layout(node.args[0]), node.meta["val"].shape
    new = len(shape) - len(before)
    kept = [d >= new and bool(before[d - new] or n == 1) for d, n in enumerate(shape)]
    after = before if all(kept) else m.of_any_order(node, variants)
    return m.copy(node), tuple(before[d - new] if kept[d] else after[d] for d in range(len(shape)))


@rule_for(aten.permute.default, aten.t.default, aten.transpose.int)
def _permute(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before = m.layout(node.args[0])
    order = list(range(len(before)))
    if node.target is aten.permute.default:
        order = [d % len(before) for d in node.args[1]]  # type: ignore[union-attr, operator]
    elif len(before) > 1:
        a, b = node.args[1:3] if node.target is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return m.copy(node), tuple(before[d] for d in order)


@rule_for(aten.unsqueeze.default)
def _unsqueeze(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    made = list(m.layout(node.args[0]))
    at: Any = node.args[1]
    made.insert(at if at >= 0 else at + len(made) + 1, ())
    return m.copy(node), tuple(made)


@rule_for(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before = m.layout(node.args[0])
    dims = range(len(before)) if node.target is aten.squeeze.default else tree_leaves(node.args[1])
    gone = {d % len(before) for d in dims if not before[d]}
    return m.copy(node), tuple(dim for d, dim in enumerate(before) if d not in gone)


def _taken_apart(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> tuple[Layout, int]:
    """The layout of what is taken apart, and along which dimension."""
    source, dim = arguments(node, "self", "dim")
    before = m.layout(source)
    dim %= len(before)
    if is_padded(before[dim]):
        raise Inexact("the padded dimension is taken apart")
    m.same_constants(node, variants)
    return before, dim


@rule_for(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before, dim = _taken_apart(m, node, variants)
    return m.copy(node), [
        (*before[:dim], dim_of([(part.shape[dim], None)]), *before[dim + 1 :]) for part in node.meta["val"]
    ]


_LEAST: Final[dict[Any, Any]] = {aten.amax.default: -math.inf, aten.max.dim: -math.inf, aten.argmax.default: -math.inf,
                 aten.amin.default: math.inf, aten.min.dim: math.inf, aten.argmin.default: math.inf,
                 aten.any.dim: False, aten.all.dim: True, aten.any.default: False, aten.all.default: True,
                 aten.sum.default: 0, aten.sum.dim_IntList: 0, aten.prod.dim_int: 1}  # fmt: skip


_PLACES: Final = {aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim}


def _reduced(m: Masker, node: fx.Node) -> tuple[Any, list[int], Layout]:
    """Input, dimensions that go, and the layout of what is left."""
    names = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    (source,) = arguments(node, "self")
    before = m.layout(source)
    dims: Any = arguments(node, "dim")[0] if "dim" in names else None
    keep = arguments(node, "keepdim")[0] if "keepdim" in names else False
    chosen = (
        sorted({d % max(1, len(before)) for d in tree_leaves(dims)})
        if dims not in (None, [])
        else [*range(len(before))]
    )
    after = tuple(() if d in chosen else dim for d, dim in enumerate(before) if keep or d not in chosen)
    return source, chosen, after


@rule_for(*_LEAST)
def _reduce(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dims, after = _reduced(m, node)
    m.same_constants(node, variants)
    if not any(is_padded(m.layout(source)[d]) for d in dims):
        made = m.copy(node)
    else:
        fill, dtype = _LEAST[node.target], source.meta["val"].dtype
        if math.isinf(fill) and dtype is torch.bool:
            fill = fill > 0
        elif math.isinf(fill) and not dtype.is_floating_point:
            fill = torch.iinfo(dtype).min if fill < 0 else torch.iinfo(dtype).max
        # A place is told by its position, which is the true one along a dimension that is padded at its end only.
        inner = any(symbol is not None for d in dims for _, symbol in m.layout(source)[d][1:])
        if node.target in _PLACES and (inner or len(dims) > 1):
            raise Inexact("a place in a padded tensor as one number")
        made = m.copy(node, {source: m.masked(source, fill, dims)})
    return made, [after, after] if node.target in (aten.max.dim, aten.min.dim) else after


@rule_for(aten.mean.dim, aten.mean.default)
def _mean(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dims, after = _reduced(m, node)
    layout, b = m.layout(source), m.builder
    if not any(is_padded(layout[d]) for d in dims):
        m.same_constants(node, variants)
        return m.copy(node), after
    (dtype,) = arguments(node, "dtype")
    result = dtype or source.meta["val"].dtype
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    (keep,) = arguments(node, "keepdim") if node.target is aten.mean.dim else (False,)
    total = b(aten.sum.dim_IntList, b.cast(m.masked(source, 0, dims), wide), dims, keep)
    plain = math.prod(size for d in dims for size, symbol in layout[d] if symbol is None)
    count = b(aten.full.default, [], plain, dtype=wide, device=torch.device("cpu"))
    for symbol in [symbol for d in dims for _, symbol in layout[d] if symbol is not None]:
        count = b(aten.mul.Tensor, count, b.cast(m.true[symbol], wide))
    return b.cast(b(aten.div.Tensor, total, count), result), after


@rule_for(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default, aten.softmax.int,
          aten.log_softmax.int)  # fmt: skip
def _softmax(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim = arguments(node, "self", "dim")
    layout = m.layout(source)
    m.same_constants(node, variants)
    return m.copy(node, {source: m.masked(source, -math.inf, [dim])} if is_padded(layout[dim]) else {}), layout


@rule_for(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    grad, output, dim = arguments(node, "grad_output", "output", "dim")
    m.same_constants(node, variants)
    instead = {one: m.masked(one, 0, [dim]) for one in (grad, output)} if is_padded(m.layout(grad)[dim]) else {}
    return m.copy(node, instead), broadcast([m.layout(grad), m.layout(output)])


@rule_for(
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default, aten.dot.default
)
def _product(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    first, second = [n for n in node.args if isinstance(n, fx.Node)][-2:]
    left, right = m.layout(first), m.layout(second)
    inner = len(right) - 2 if len(right) > 1 else 0
    if left[-1] != right[inner]:
        raise Inexact("a product over dimensions that are padded in different ways")
    instead = {}
    if is_padded(left[-1]):
        instead = {first: m.masked(first, 0, [-1]), second: m.masked(second, 0, [inner])}
        if first is second:
            raise Inexact("a product of a tensor with itself over the padded dimension")
    after = (*broadcast([left[:-2], right[:-2]]), *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        after = broadcast([after, m.layout(arguments(node, "self")[0])])
    return m.copy(node, instead), after


@rule_for(aten.embedding.default)
def _embedding(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    weight, indices = arguments(node, "weight", "indices")
    if m.any_padded(weight):
        raise Inexact("the table of an embedding is padded")
    within = m.picks_in_order(indices, weight.meta["val"].shape[0])
    return m.copy(node, {} if within else {indices: m.masked(indices, 0)}), (*m.layout(indices), m.layout(weight)[1])


@rule_for(aten.native_layer_norm.default)
def _layer_norm(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, shape = arguments(node, "input", "normalized_shape")
    layout, count = m.layout(source), len(tree_leaves(shape))
    if any(map(is_padded, layout[-count:])):
        raise Inexact("a normalisation over the padded dimension")
    m.same_constants(node, variants)
    few = (*layout[:-count], *((),) * count)
    return m.copy(node), [layout, few, few]


@rule_for(aten.cumsum.default, aten.tril.default, aten.triu.default)
def _prefix(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """What stands at a place depends on earlier places only, or on the place itself."""
    layout = m.layout(node.args[0])
    looked = [layout[node.args[1]]] if node.target is aten.cumsum.default else layout[-2:]  # type: ignore[index]
    if any(is_padded(dim) and len(dim) > 1 for dim in looked):
        raise Inexact(f"{node.target} along a dimension of several")
    m.same_constants(node, variants)
    return m.copy(node), layout


_SPATIAL: Final = {aten.convolution.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default,
                   aten._adaptive_avg_pool2d.default, aten.max_pool2d.default, aten.adaptive_avg_pool2d.default,
                   aten._native_batch_norm_legit_no_training.default}  # fmt: skip


@rule_for(*_SPATIAL)
def _images(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Each image by itself: the number of images may be padded, and nothing else."""
    source: Any = node.args[0]
    layout = m.layout(source)
    if any(map(is_padded, layout[1:])) or m.any_padded(*[n for n in node.all_input_nodes if n is not source]):
        raise Inexact(f"{node.target} with padded images")
    if node.target is not aten._native_batch_norm_legit_no_training.default and len(layout) != 4:
        raise Inexact(f"{node.target} of a tensor that is no batch of images")
    m.same_constants(node, variants)

    def after(value: torch.Tensor) -> Layout:
        found = whole(value)
        return (layout[0], *found[1:]) if found and value.shape[0] == size_of(layout[0]) else found

    return m.copy(node), tree_map(after, node.meta["val"])


@rule_for(aten.gather.default)
def _gather(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """What is picked stands where its index stands, and indices within the true part pick from there."""
    m.same_constants(node, variants)
    source, dim, index = arguments(node, "self", "dim", "index")
    before, after = m.layout(source), m.layout(index)
    if len(before) != len(after):
        raise Inexact("places in a number are picked")
    for d, (one, other) in enumerate(zip(before, after, strict=True)):
        if max(len(one), len(other)) > 1 and (one != other or d == dim % len(before)):
            raise Inexact("places in a dimension of several are picked")
    within = m.picks_in_order(index, source.meta["val"].shape[dim]) if before else False
    return m.copy(node, {} if within else {index: m.masked(index, 0)}), after


@rule_for(aten.unbind.int)
def _unbind(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    before, dim = _taken_apart(m, node, variants)
    return m.copy(node), [(*before[:dim], *before[dim + 1 :])] * len(node.meta["val"])


# -- composite operators, which torch.export keeps whole ---------------------------------------------------------------
rule_for(*(getattr(aten, name).Tensor for name in ("__and__", "__or__", "__xor__")), aten.to.dtype,
         aten.to.dtype_layout, aten.type_as.default, aten.contiguous.default)(_elementwise)  # fmt: skip


@rule_for(aten.dropout.default)
def _dropout(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    if arguments(node, "train") != [False]:
        raise Inexact("random numbers depend on where they stand in a tensor")
    return _elementwise(m, node, variants)


@rule_for(aten.linear.default)
def _linear(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    source, weight, bias = arguments(node, "input", "weight", "bias")
    before = m.layout(source)
    if is_padded(before[-1]) or m.any_padded(weight, bias) or len(m.layout(weight)) != 2:
        raise Inexact("a linear layer over the padded dimension")
    return m.copy(node), (*before[:-1], m.layout(weight)[0])


@rule_for(aten.matmul.default)
def _matmul(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    m.same_constants(node, variants)
    first, second = arguments(node, "self", "other")
    left, right = m.layout(first), m.layout(second)
    inner = len(right) - 2 if len(right) > 1 else 0
    if left[-1] != right[inner]:
        raise Inexact("a product over dimensions that are padded in different ways")
    instead = {}
    if is_padded(left[-1]):
        if first is second:
            raise Inexact("a product of a tensor with itself over the padded dimension")
        instead = {first: m.masked(first, 0, [-1]), second: m.masked(second, 0, [inner])}
    after = (*broadcast([left[:-2], right[:-2]]), *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))
    return m.copy(node, instead), after


@rule_for(aten.layer_norm.default)
def _whole_layer_norm(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, shape = arguments(node, "input", "normalized_shape")
    layout = m.layout(source)
    if any(map(is_padded, layout[-len(tree_leaves(shape)) :])):
        raise Inexact("a normalisation over the padded dimension")
    m.same_constants(node, variants)
    return m.copy(node), layout


@rule_for(aten.index.Tensor)
def _index(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Places that are picked by number; negative ones count from the true end."""
    m.same_constants(node, variants)
    source, indices = arguments(node, "self", "indices")
    before, b = m.layout(source), m.builder
    at = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].meta["val"].dtype is not torch.int64 for d in at):
        raise Inexact("places that are picked by a mask")
    picked = broadcast([m.layout(indices[d]) for d in at])
    safe = {d for d in at if m.picks_in_order(indices[d], size_of(before[d]))}
    new: list[Any] = [
        None if index is None else m.values[index] if d in safe else m.masked(index, 0)
        for d, index in enumerate(indices)
    ]
    for d in at:
        if is_padded(before[d]) and len(before[d]) > 1:
            raise Inexact("places in a dimension of several are picked")
        if is_padded(before[d]) and d not in safe:
            end = b(aten.add.Tensor, new[d], b.cast(m.true[before[d][0][1]], torch.int64))  # type: ignore[index]
            new[d] = b(aten.where.self, b(aten.lt.Scalar, new[d], 0), end, new[d])
    rest = [dim for d, dim in enumerate(before) if d not in at]
    place = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    made = m.copy(node)
    made.args = (made.args[0], new)
    return made, (*rest[:place], *picked, *rest[place:])
