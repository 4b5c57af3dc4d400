"""Rules of :mod:`.masking` for attention, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .masker import Dim, Inexact, Masker, arguments, broadcast, is_padded, rule_for, size_of

__all__: list[str] = []

aten = torch.ops.aten


def _seen(m: Masker, keys: Dim, rank: int, query: fx.Node, given: fx.Node | None) -> fx.Node:
    """The mask of attention by which keys beyond the true size get no weight, and those of a ``given`` mask neither."""
    b, dtype = m.builder, query.meta["val"].dtype
    true = b(aten.view.default, m.mask_of(keys), [1] * (rank - 1) + [size_of(keys)])
    if given is None:
        zero = b(aten.full.default, [], 0.0, dtype=dtype, device=torch.device("cpu"))
        return b.cast(b(aten.where.ScalarOther, true, zero, -math.inf), dtype)
    if given.meta["val"].dtype is torch.bool:
        return b(aten.logical_and.default, m.values[given], true)
    return b.cast(b(aten.where.ScalarOther, true, m.values[given], -math.inf), given.meta["val"].dtype)


def _with_mask(made: fx.Node, node: fx.Node, weight: fx.Node) -> fx.Node:
    at = [argument.name for argument in node.target._schema.arguments].index("attn_mask")  # type: ignore[union-attr]
    if at < len(made.args):
        made.update_arg(at, weight)
    else:
        made.update_kwarg("attn_mask", weight)
    return made


@rule_for(aten._scaled_dot_product_flash_attention_for_cpu.default, aten.scaled_dot_product_attention.default)
def _attention(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Keys beyond the true size get no weight; where each query sees keys up to its own place only, none sees them."""
    query, key, value, causal, given = arguments(node, "query", "key", "value", "is_causal", "attn_mask")
    asked, kept, layout = m.layout(query), m.layout(key), m.layout(value)
    if asked[-1] != kept[-1] or is_padded(kept[-1]) or kept[-2] != layout[-2] or (causal and asked[-2] != kept[-2]):
        raise Inexact("attention over dimensions that are padded in different ways")
    m.same_constants(node, variants)
    whole_op = node.target is aten.scaled_dot_product_attention.default
    rows = (*broadcast([asked[:-2], kept[:-2], layout[:-2]]), asked[-2])
    if given is not None:
        broadcast([(*rows, kept[-2]), m.layout(given)])
    after: Any = (*rows, layout[-1]) if whole_op else [(*rows, layout[-1]), rows]
    if arguments(node, "dropout_p") != [0.0] or (whole_op and arguments(node, "enable_gqa") != [False]):
        raise Inexact("attention with dropout or grouped heads")
    if not is_padded(kept[-2]):
        return m.copy(node), after
    if len({query, key, value}) < 3:
        raise Inexact("attention of a tensor with itself")
    instead = {one: m.masked(one, 0, [-2]) for one in (key, value)}
    if causal and len(kept[-2]) > 1:
        raise Inexact("attention over a dimension of several")
    if causal:
        return m.copy(node, instead), after
    seen = _seen(m, kept[-2], len(kept), query, given)
    return _with_mask(m.copy(node, instead), node, seen), after


@rule_for(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """A query beyond the true size has zeros wherever it adds to keys and values, and a weight that is a number."""
    grad, query, key, value, out, sums, causal, given = arguments(
        node, "grad_out", "query", "key", "value", "out", "logsumexp", "is_causal", "attn_mask"
    )
    asked, kept, layout = m.layout(query), m.layout(key), m.layout(value)
    if asked[-1] != kept[-1] or is_padded(kept[-1]) or kept[-2] != layout[-2] or (causal and asked[-2] != kept[-2]):
        raise Inexact("attention over dimensions that are padded in different ways")
    if m.layout(grad) != m.layout(out) or m.layout(grad)[:-1] != asked[:-1] or m.layout(sums) != asked[:-1]:
        raise Inexact("attention over dimensions that are padded in different ways")
    if arguments(node, "dropout_p") != [0.0]:
        raise Inexact("attention with dropout")
    if causal and len(kept[-2]) > 1:
        raise Inexact("attention over a dimension of several")
    m.same_constants(node, variants)
    instead = {one: m.masked(one, 0, [-2]) for one in (grad, query, key, value, out)}
    instead[sums] = m.masked(sums, 0, [-1])
    after = [asked, kept, layout]
    if causal or not is_padded(kept[-2]):
        return m.copy(node, instead), after
    seen = _seen(m, kept[-2], len(kept), query, given)
    return _with_mask(m.copy(node, instead), node, seen), after
