"""Products of matrices, attention and tables of vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch import fx

from .sizes import is_symbolic, known
from .writer import Writer, arg_of, rule, val

aten = torch.ops.aten


@rule(aten.mm.default, aten.bmm.default, aten.matmul.default, empty=True)
def _matmul(w: Writer, node: fx.Node) -> Any:
    return _product(w, node, node.args[0], node.args[1])


def _product(w: Writer, node: fx.Node, left: Any, right: Any) -> Any:
    """A product of matrices; 0 where it is a sum of nothing, which the engine does not take."""
    if 0 in val(left).shape:
        return w.filled(val(node).shape, numpy.array(0, numpy.float32))
    return w.ops.matmul(w.value(left), w.value(right), False, False).output(0)


def _scaled_sum(w: Writer, node: fx.Node, product: Any) -> Any:
    """``beta`` times the first argument and ``alpha`` times a product; 1 is left out. What 0 scales is not read."""
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if alpha != 1:
        product = w.ops.multiply(product, w.value(alpha))
    if beta == 0:
        return w.ops.broadcast(product, w.ints(list(val(node).shape)))
    bias = w.value(node.args[0])
    return w.ops.add(product, bias if beta == 1 else w.ops.multiply(bias, w.value(beta)))


@rule(aten.addmm.default, aten.baddbmm.default, empty=True)
def _addmm(w: Writer, node: fx.Node) -> Any:
    return _scaled_sum(w, node, _product(w, node, node.args[1], node.args[2]))


@rule(aten.addbmm.default)
def _addbmm(w: Writer, node: fx.Node) -> Any:
    products = w.ops.matmul(w.value(node.args[1]), w.value(node.args[2]), False, False)
    return _scaled_sum(w, node, w.ops.reduce_sum(products, w.ints([0]), False))


def _columns(w: Writer, matrix: Any, vector: Any, rows: int, count: int) -> Any:
    """A matrix times a vector; with one column, as OpenVINO takes it."""
    made = w.ops.matmul(w.value(matrix), w.reshape(w.value(vector), [count, 1]), False, False).output(0)
    return w.reshape(made, [rows])


@rule(aten.mv.default)
def _mv(w: Writer, node: fx.Node) -> Any:
    return _columns(w, node.args[0], node.args[1], *val(node.args[0]).shape)


@rule(aten.addmv.default)
def _addmv(w: Writer, node: fx.Node) -> Any:
    return _scaled_sum(w, node, _columns(w, node.args[1], node.args[2], *val(node.args[1]).shape))


@rule(aten.addr.default)
def _addr(w: Writer, node: fx.Node) -> Any:
    left, right = (w.value(arg) for arg in node.args[1:3])
    return _scaled_sum(w, node, w.ops.multiply(w.ops.unsqueeze(left, w.ints(1)), w.ops.unsqueeze(right, w.ints(0))))


@rule(aten.dot.default, aten.vdot.default)
def _dot(w: Writer, node: fx.Node) -> Any:
    return w.ops.reduce_sum(w.ops.multiply(w.value(node.args[0]), w.value(node.args[1])), w.ints([0]), False)


@rule(aten.linear.default)
def _linear(w: Writer, node: fx.Node) -> Any:
    made = w.ops.matmul(w.value(node.args[0]), w.value(node.args[1]), False, True)
    bias = arg_of(node, 2, "bias")
    return made if bias is None else w.ops.add(made, w.value(bias))


@rule(aten.linalg_cross.default)
def _cross(w: Writer, node: fx.Node) -> Any:
    axis = int(node.kwargs.get("dim", -1)) % val(node).dim()  # type: ignore[call-overload]
    left, right = (w.value(arg) for arg in node.args[:2])
    where = w.ints(axis)

    def turned(value: Any, order: list[int]) -> Any:
        return w.ops.gather(value, w.ints(order), where)

    up, down = [1, 2, 0], [2, 0, 1]
    first = w.ops.multiply(turned(left, up), turned(right, down))
    return w.ops.subtract(first, w.ops.multiply(turned(left, down), turned(right, up)))


def _attention_check(node: fx.Node) -> str:
    if float(arg_of(node, 4, "dropout_p", 0.0)):
        return "with dropout"
    if node.kwargs.get("enable_gqa"):
        return "with grouped queries"
    mask = arg_of(node, 3, "attn_mask")
    return "with a causal mask and another one" if mask is not None and arg_of(node, 5, "is_causal", False) else ""


@rule(aten.scaled_dot_product_attention.default, check=_attention_check)
def _attention(w: Writer, node: fx.Node) -> Any:
    query, key, value = (w.value(arg) for arg in node.args[:3])
    mask, causal = arg_of(node, 3, "attn_mask"), bool(arg_of(node, 5, "is_causal", False))
    scale = node.kwargs.get("scale")
    factor = w.value(1 / math.sqrt(val(node.args[0]).shape[-1]) if scale is None else scale)
    given = w.value(0.0) if mask is None else w.value(mask)
    if mask is not None and val(mask).dtype is torch.bool:
        given = w.ops.select(given, w.value(0.0), w.value(-math.inf)).output(0)
    if mask is None and not causal:
        return w.ops.scaled_dot_product_attention(query, key, value, w.value(0.0), factor)
    return w.ops.scaled_dot_product_attention(query, key, value, given, factor, causal)


def _flash_check(node: fx.Node) -> str:
    if float(arg_of(node, 3, "dropout_p", 0.0)):
        return "with dropout"
    query, key = (val(arg) for arg in node.args[:2])
    if query.shape[1] != key.shape[1]:
        return "with grouped queries"
    mask = arg_of(node, 5, "attn_mask")
    if mask is not None and val(mask).dtype is torch.bool:
        return "with a mask that may hide all keys"
    return "with a causal mask and another one" if mask is not None and arg_of(node, 4, "is_causal", False) else ""


def _hidden_after(w: Writer, rows: Any, columns: Any) -> Any:
    """What is added to scores, [rows, columns]: 0 up to the diagonal, and minus infinity after it."""
    if is_symbolic([rows, columns]):
        down, across = w.ops.unsqueeze(w.counted(rows), w.ints(1)), w.counted(columns)
        return w.ops.select(w.ops.less_equal(across, down), w.value(0.0), w.value(-math.inf)).output(0)
    kept = numpy.tril(numpy.ones((known(rows), known(columns)), bool))
    return w.ops.constant(numpy.where(kept, numpy.float32(0), numpy.float32(-math.inf))).output(0)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default, check=_flash_check)
def _flash_attention(w: Writer, node: fx.Node) -> Any:
    query, key, value = (w.value(arg) for arg in node.args[:3])
    mask, causal = arg_of(node, 5, "attn_mask"), bool(arg_of(node, 4, "is_causal", False))
    scale = node.kwargs.get("scale")
    factor = w.value(1 / math.sqrt(val(node.args[0]).shape[-1]) if scale is None else scale)
    given = None if mask is None else w.value(mask)
    if causal:
        rows, columns = val(node.args[0]).shape[-2], val(node.args[1]).shape[-2]
        given = _hidden_after(w, rows, columns)
    attended = [query, key, value, w.value(0.0) if given is None else given, factor]
    made = w.ops.scaled_dot_product_attention(*attended)
    # The second result, which only backward reads.
    scores = w.ops.multiply(w.ops.matmul(query, key, False, True), factor)
    scores = scores if given is None else w.ops.add(scores, given)
    most, last = w.ops.reduce_max(scores, w.ints([3]), True), w.ints([3])
    total = w.ops.reduce_sum(w.ops.exp(w.ops.subtract(scores, most)), last, True)
    logsumexp = w.ops.squeeze(w.ops.add(w.ops.log(total), most), last)
    return [made.output(0), logsumexp.output(0)]


@rule(aten.embedding.default, reads=[1])
def _embedding(w: Writer, node: fx.Node) -> Any:
    return w.ops.gather(w.value(node.args[0]), w.index(node.args[1]), w.ints(0))  # type: ignore[arg-type]
