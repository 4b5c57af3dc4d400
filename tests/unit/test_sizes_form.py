"""The form of graphs that are equal but for sizes: anti-unification of their integers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import fx

from torchport.backend.builder import GraphBuilder
from torchport.backend.sizes.chosen import bucket_for, is_padded_little, padding_of
from torchport.backend.sizes.form import Form, Size, Sketch, form_of, memory_order, sketch_of, strides_in
from torchport.backend.sizes.guards import hold, within
from torchport.backend.sizes.symbolic import symbolic_graph
from torchport.core.config import config
from torchport.core.specs import TensorSpec, contiguous_strides

aten = torch.ops.aten
sizes_of_symbols = st.lists(st.integers(2, 60), min_size=2, max_size=2)
products = st.tuples(st.integers(1, 9), st.lists(st.integers(0, 1), min_size=1, max_size=3).map(sorted).map(tuple))


def _sketch(values: list[int], expressions: list[Size]) -> Sketch:
    integers = (*values, 7, *(expression.at(values) for expression in expressions))
    return Sketch("digest", "", integers, len(values) + 1, (), ())


@given(
    st.lists(sizes_of_symbols, min_size=3, max_size=6, unique_by=tuple),
    st.lists(st.one_of(products.map(lambda one: Size((one,))), st.just(Size(((3, (0,)), (2, ()))))), max_size=4),
    sizes_of_symbols,
)
def test_what_a_form_says_of_the_graphs_it_was_made_of_is_so_and_of_others_is_checked(
    samples: list[list[int]], expressions: list[Size], other: list[int]
) -> None:
    found = form_of([_sketch(values, expressions) for values in samples])
    if found is None:
        return  # two symbols may vary together, so that a product of both is no expression of one
    for values in samples:
        assert found.describes(_sketch(values, expressions))
    further = _sketch(other, expressions)
    if found.describes(further):
        assert found.integers_at(found.values(further)) == list(further.integers)
    broken = Sketch(further.digest, "", (*further.integers[:-1], further.integers[-1] + 1), further.dims, (), ())
    assume(len(broken.integers) > 3)
    assert not (found.describes(broken) and found.describes(further))


@given(st.lists(st.integers(2, 99), min_size=3, max_size=5, unique=True), st.integers(1, 9), st.integers(-5, 5))
def test_a_straight_line_is_found(values: list[int], factor: int, constant: int) -> None:
    sketches = [Sketch("d", "", (v, factor * v + constant), 1, (), ()) for v in values]
    found = form_of(sketches)
    assert found is not None
    # Of two points a multiple of a square may be as good a guess; of three it is none.
    assert [found.integers_at((v,))[1] for v in range(2, 50)] == [factor * v + constant for v in range(2, 50)]


def test_a_size_of_one_or_none_is_another_form() -> None:
    three, one = Sketch("d", "", (3, 6), 1, (), ()), Sketch("d", "", (1, 2), 1, (), ())
    assert not three.varies_from(one)
    assert form_of([three, one]) is None
    found = form_of([three, Sketch("d", "", (5, 10), 1, (), ())])
    assert found is not None
    assert not found.describes(one)


@given(st.permutations(range(4)), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_strides_follow_from_the_order_of_memory(order: list[int], shape: list[int]) -> None:
    blank = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
    assert strides_in(order, shape) == blank.stride()
    if min(shape) > 1:
        assert memory_order(TensorSpec.of(blank)) == order


def test_a_view_that_no_memory_has_is_refused_at_once() -> None:
    """As in a graph that is written for sizes that it is not for; of other strides there is a contiguous copy."""
    b = GraphBuilder()
    x = b.placeholder("x", TensorSpec((4, 6), torch.float32, (1, 4)))
    assert b.val(b(aten.view.default, x, [24])).shape == (24,)
    with pytest.raises(RuntimeError, match="invalid for input of size 24") as caught:
        b(aten.view.default, x, [5, 5])
    assert not isinstance(caught.value, RecursionError)


def _graph(rows: int, width: int = 6) -> fx.GraphModule:
    """``view(softmax(x @ w), [rows * 2, width / 2])`` and the sum of an arange as long."""
    b = GraphBuilder()
    x = b.placeholder("x", TensorSpec((rows, 4), torch.float32, contiguous_strides((rows, 4))))
    w = b.placeholder("w", TensorSpec((4, width), torch.float32, contiguous_strides((4, width))))
    made = b(aten._softmax.default, b(aten.mm.default, x, w), -1, False)
    made = b(aten.view.default, made, [rows * 2, width // 2])
    padded = b(aten.constant_pad_nd.default, made, [0, 1, 0, 0], 1.0)
    counted = b(aten.arange.start_step, 0, rows, 1, dtype=torch.int64, device=torch.device("cpu"))
    results = [b(aten.clone.default, padded), b(aten.sum.default, counted)]
    output = b.graph.output(tuple(results))
    output.meta["val"] = tuple(b.val(one) for one in results)
    return fx.GraphModule(torch.nn.Module(), b.graph)


def test_the_graph_with_symbols_computes_what_the_graph_for_each_size_does() -> None:
    graphs = {rows: _graph(rows) for rows in (3, 5, 8, 40)}
    sketches: dict[int, Any] = {rows: sketch_of(graph) for rows, graph in graphs.items()}
    form = form_of([sketches[3], sketches[5]])
    assert isinstance(form, Form)
    assert all(form.describes(sketch) for sketch in sketches.values())
    symbolic = symbolic_graph(graphs[5], form, sketches[5])
    guards = symbolic.guards()
    w = torch.randn(4, 6)
    for rows, graph in graphs.items():
        assert hold(guards, form.values(sketches[rows]))
        x = torch.randn(rows, 4)
        for got, want in zip(symbolic.module(x, w), graph(x, w), strict=True):
            torch.testing.assert_close(got, want)
    assert not hold(guards, (1,))


def test_what_is_asked_of_a_symbol_becomes_a_condition() -> None:
    graphs = [_graph(rows) for rows in (3, 5)]
    first, second = map(sketch_of, graphs)
    assert first is not None
    assert second is not None
    form = form_of([first, second])
    assert form is not None
    symbolic = symbolic_graph(graphs[1], form, second)
    assert bool(symbolic.symbols[0] < 10)
    guards = symbolic.guards()
    assert [hold(guards, (rows,)) for rows in (3, 9, 10, 11)] == [True, True, False, False]


def test_graphs_that_differ_in_more_than_sizes_have_other_digests() -> None:
    digests = {
        sketch.digest for rows in (3, 5) for width in (6, 8) if (sketch := sketch_of(_graph(rows, width))) is not None
    }
    assert len(digests) == 1
    other = _graph(3)
    for node in other.graph.find_nodes(op="call_function", target=aten.mm.default):
        node.args = (node.args[0], node.args[1])
    changed = _graph(3)
    for node in changed.graph.find_nodes(op="call_function", target=aten._softmax.default):
        node.args = (node.args[0], -1, True)
    found = [sketch_of(one) for one in (other, changed)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].digest in digests
    assert found[1].digest not in digests
    assert math.prod(found[0].integers[: found[0].dims]) == 3 * 4 * 4 * 6


# -- buckets ----------------------------------------------------------------------------------------------------------
_values = st.lists(st.integers(2, 5_000), min_size=1, max_size=3)


@given(st.data(), _values, st.integers(0, 12), st.sampled_from(["off", "auto"]))
def test_a_bucket_holds_its_sizes_and_whatever_serves_them_does(
    data: st.DataObject, values: list[int], made: int, tiers: str
) -> None:
    seen = data.draw(st.lists(st.lists(st.integers(2, 5_000), min_size=len(values), max_size=len(values)), max_size=4))
    most = [data.draw(st.none() | st.integers(value, 6_000)) for value in values]
    with config.override(tiers=tiers):
        bucket = bucket_for(values, seen, made, most)
        assert all(value <= size for value, size in zip(values, bucket, strict=True))
        assert all(limit is None or size <= limit for size, limit in zip(bucket, most, strict=True))
        assert padding_of(values, bucket) >= 1
        assert not is_padded_little([size + 1 for size in bucket], bucket, made)
        if tiers == "off":
            # What a bucket serves it goes on serving when there are more of them.
            assert is_padded_little(values, bucket, made + 1) >= is_padded_little(values, bucket, made)


def test_batch_and_length_that_vary_independently_need_few_buckets() -> None:
    chance = random.Random(0)
    made: list[tuple[int, ...]] = []
    seen: list[list[int]] = []
    with config.override(tiers="off"):
        for _ in range(300):
            values = [chance.randint(2, 80), chance.randint(30, 330)]
            if not any(is_padded_little(values, bucket, len(made)) for bucket in made):
                made.append(bucket_for(values, seen[-8:], len(made)))
            seen.append(values)
    assert len(made) <= 8, made


def test_bounds_that_were_given_are_a_condition() -> None:
    assert within("True", []) == "True"
    given = within("L['t0'] != 7", [(3, 9), (None, 4)])
    held = [(t0, t1) for t0 in range(12) for t1 in range(7) if hold(given, [t0, t1])]
    assert held == [(t0, t1) for t0 in range(3, 10) if t0 != 7 for t1 in range(5)]
