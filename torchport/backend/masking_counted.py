"""Rules of :mod:`.masking` for ranges: positions along a size, and positions in a whole tensor.

Random numbers are functions of where an element stands in its tensor (:mod:`.random`): a range over all elements that
is hashed, and then viewed as the tensor. In a padded tensor an element stands elsewhere, so the range gives each place
the number that the element there has in the tensor of the true sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .masker import Dim, Inexact, Masker, arguments, dim_of, in_its_shape, rule_for

__all__: list[str] = []

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


@rule_for(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _counted(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    nodes = (node, *variants)
    named = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    starts = [arguments(one, "start")[0] if "start" in named else 0 for one in nodes]
    steps = [arguments(one, "step")[0] if "step" in named else 1 for one in nodes]
    ends = [arguments(one, "end")[0] for one in nodes]
    lengths = [one.meta["val"].shape[0] for one in nodes]
    if len(set(lengths)) == 1:
        m.same_constants(node, variants)  # where it starts may change, although its length does not
        return m.copy(node), m.from_shapes(node, variants)
    if set(steps) != {1} or any(end - start != n for start, end, n in zip(starts, ends, lengths, strict=True)):
        raise Inexact("a range that does not count by one, up to a size")
    dim = _factors(m, nodes)
    if len(dim) == 1 and set(starts) == {0}:
        return m.copy(node), (dim,)
    dtype = node.meta["val"].dtype
    if dtype is not torch.int64:
        raise Inexact("a range over several sizes in a dtype that may not hold its numbers")
    places = _places(m, dim)
    if any(starts):
        places = m.builder(aten.add.Tensor, places, m.true_number(starts[0], starts[1:], dtype))
    return places, (dim,)


def _factors(m: Masker, nodes: Sequence[fx.Node]) -> Dim:
    """What the length of a range is the product of: the sizes of the tensor that it is viewed as, or a size itself."""
    viewed = [next((user for user in in_its_shape(one) if user.target in _VIEWS), None) for one in nodes]
    first, *others = nodes if None in viewed else viewed
    return dim_of([factor for dim in m.of_any_order(first, others) for factor in dim])  # type: ignore[arg-type]


def _places(m: Masker, dim: Dim) -> fx.Node:
    """The number that each place of a dimension has among the true ones, row by row; 1-D, int64."""
    b, total = m.builder, None
    where = {"dtype": torch.int64, "device": torch.device("cpu")}
    for at, (size, _) in enumerate(dim):
        one = b(aten.arange.start_step, 0, size, 1, **where)
        constant = 1
        for inner, symbol in dim[at + 1 :]:
            if symbol is None:
                constant *= inner
            else:
                one = b(aten.mul.Tensor, one, b.cast(m.true[symbol], torch.int64))
        if constant != 1:
            one = b(aten.mul.Tensor, one, constant)
        one = b(aten.view.default, one, [size if d == at else 1 for d in range(len(dim))])
        total = one if total is None else b(aten.add.Tensor, total, one)
    assert total is not None
    return b(aten.view.default, total, [-1])
