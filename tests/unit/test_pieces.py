"""Graphs in pieces: what repeats is found, and the pieces compute what the whole does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers_graphs import CPU, aten, build, data_of, load, normal_form, run, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from torchport.backend.execution import Computation
from torchport.backend.interface import ExecutionContext
from torchport.backend.normal_form import input_specs, output_specs, verify_graph
from torchport.backend.pieced import assemble, is_pieced, make_pieced
from torchport.backend.pieces import Pieces, cut
from torchport.backend.prepare import Prepared, describe, with_bytes
from torchport.backend.repeats import Run, find_runs
from torchport.backend.serialize import fingerprint
from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import CompileSpecs

SPECS = CompileSpecs()


def _pieces_of(graph: fx.GraphModule, fixed: int = 4) -> Pieces:
    before = fingerprint(graph)
    found = cut(graph, fixed)
    assert fingerprint(graph) == before, "the graph was changed"
    assert found is not None
    for one in found.graphs:
        verify_graph(one)
    return found


def _assembled(graph: fx.GraphModule, pieces: Pieces, backend: ReferenceBackend) -> Computation:
    """The pieces as a computation, by way of their bytes."""
    prepared = [with_bytes(backend, SPECS, one, describe(one, fingerprint(one), None)) for one in pieces.graphs]
    about = describe(graph, "whole", None)
    data = assemble(pieces, prepared)
    assert is_pieced(data)
    assert not is_pieced(prepared[0].data)

    def compiled(one: Prepared) -> Computation:
        module = pieces.graphs[[p.mark for p in prepared].index(one.mark)]
        assert (one.inputs, one.outputs) == (input_specs(module), output_specs(module))
        handle, context = load(backend, module)
        return Computation(backend, CPU, one.inputs, one.names, one.outputs, handle, context, one.mark)

    whole = Prepared(data, about.inputs, about.outputs, about.names, "whole", about.ops, about.label, None, 0.0)
    return make_pieced(backend, CPU, whole, compiled)


def _run_pieces(
    graph: fx.GraphModule, pieces: Pieces, args: Sequence[torch.Tensor], donated: frozenset[int] = frozenset()
) -> list[torch.Tensor]:
    made = _assembled(graph, pieces, ReferenceBackend())
    context = ExecutionContext(CPU, made.results, donated)
    return tensors_of(made.backend.execute(made.handle, data_of(args), context))


# -- what repeats ------------------------------------------------------------------------------------------------------
def test_a_run_is_found_between_what_does_not_repeat() -> None:
    layer = list(range(100, 120))
    tokens = np.asarray([1, 2, 3, *layer * 5, 4, 5])
    ((found, slack),) = find_runs(tokens, 20)
    assert found == Run(3, 20, 5)
    assert slack == 0


def test_a_repetition_that_is_cut_off_is_slack() -> None:
    layer = list(range(100, 120))
    ((found, slack),) = find_runs(np.asarray([*layer * 4, *layer[:7], 1]), 20)
    assert found == Run(0, 20, 4)
    assert slack == 7


def test_an_odd_layer_parts_a_run() -> None:
    layer = list(range(100, 120))
    tokens = np.asarray([*layer * 4, *range(200, 230), *layer * 3])
    assert [run for run, _ in find_runs(tokens, 20)] == [Run(0, 20, 4), Run(110, 20, 3)]


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(2, 6))
@settings(deadline=None)
def test_runs_repeat_and_do_not_overlap(tokens: list[int], least: int) -> None:
    taken: set[int] = set()
    for one, slack in find_runs(np.asarray(tokens, dtype=np.int64), least):
        assert one.count > 1
        assert one.saved >= least
        for phase in range(slack + 1):
            first = tokens[one.start + phase : one.start + phase + one.period]
            for at in range(one.count):
                place = one.start + phase + at * one.period
                assert tokens[place : place + one.period] == first
        places = set(range(one.start, one.end))
        assert not places & taken
        taken |= places


# -- the same values ---------------------------------------------------------------------------------------------------
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.layer_norm(x, (8,), b, b)
    x = x + torch.tanh(h @ w + b) * torch.sigmoid(h) + (h.transpose(0, 1) @ h).sum(0)
    return x + ((x * 0.5).exp().clamp(max=3.0) - x.cos() @ w).relu()


def _several(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one, two = (x @ w).split(4, -1)
    scale = torch.full((8,), 0.5)
    x = x + torch.cat([two.tanh(), one.sigmoid()], -1) * scale + b.exp() - (x * 2.0).relu() + x.mean(-1, keepdim=True)
    return x / (1.0 + x.abs()) + x.sin() * w.sum(0).tanh()


LAYERS: list[Layer] = [_plain, _several]


def _program(kinds: Sequence[int], train: bool) -> Callable[..., Any]:
    def fn(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        leaves = [w.detach().requires_grad_(train) for w in weights]
        h = x * 1.5
        for at, kind in enumerate(kinds):
            h = LAYERS[kind](h, leaves[2 * at], leaves[2 * at + 1])
        loss = (h * h).mean()
        if not train:
            return h, loss
        gradients = torch.autograd.grad(loss, leaves)
        # As an optimizer does: operator by operator over all parameters.
        averages = [g * 0.1 for g in gradients]
        squares = [g * g * 0.01 for g in gradients]
        roots = [s.sqrt() + 1e-8 for s in squares]
        return loss, *[w - a / r for w, a, r in zip(weights, averages, roots, strict=True)], *averages

    return fn


def _arguments(layers: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layers)
    weights = [torch.randn(shape, generator=generator) * 0.3 for _ in range(layers) for shape in ((8, 8), (8,))]
    return [torch.randn(6, 8, generator=generator), *weights]


@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kinds", [[0] * 6, [1] * 6, [0, 0, 0, 0, 1, 0, 0, 0, 0], [0, 1] * 4], ids=str)
def test_pieces_compute_what_the_whole_does(kinds: list[int], train: bool) -> None:
    graph, args = normal_form(_program(kinds, train), _arguments(len(kinds)))
    pieces = _pieces_of(graph)
    assert len(pieces.graphs) < len(pieces.calls)
    wanted = run(ReferenceBackend(), graph, [arg.clone() for arg in args])
    found = _run_pieces(graph, pieces, args)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in found]
    assert len(set(addresses)) == len(addresses)
    assert not {arg.untyped_storage().data_ptr() for arg in args} & set(addresses)


@given(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=5, max_size=9), st.booleans(), st.integers(0, 2**16))
@settings(deadline=None, max_examples=8)
def test_random_stacks(kinds: list[int], train: bool, seed: int) -> None:
    graph, args = normal_form(_program(kinds, train), _arguments(len(kinds)))
    chosen = random.Random(seed)
    for node in graph.graph.find_nodes(op="placeholder"):
        if chosen.random() < 0.3:
            node.meta["donated"] = True
    pieces = cut(graph, chosen.choice([2, 4, 8]))
    if pieces is None:
        return
    wanted = run(ReferenceBackend(), graph, [arg.clone() for arg in args])
    given = frozenset(at for at in range(len(args)) if chosen.random() < 0.3)
    found = _run_pieces(graph, pieces, [arg.clone() for arg in args], given)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_depth_does_not_change_what_is_compiled() -> None:
    def different(layers: int) -> set[str]:
        graph, _ = normal_form(_program([0] * layers, True), _arguments(layers))
        return {fingerprint(one) for one in _pieces_of(graph).graphs}

    assert different(8) == different(16)


def test_an_odd_layer_leaves_the_others_as_they_were() -> None:
    def of(kinds: list[int]) -> set[str]:
        graph, _ = normal_form(_program(kinds, True), _arguments(len(kinds)))
        return {fingerprint(one) for one in _pieces_of(graph).graphs}

    before = of([0] * 11)
    after = of([0] * 5 + [1] + [0] * 5)
    assert len(after - before) <= 3
    assert len(before & after) >= len(before) - 2


def test_each_piece_gets_its_own_part_of_the_packs() -> None:
    """Scalar inputs and random keys come in packs; a layer takes its own numbers."""

    def nodes(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        x, pack = inputs
        for at in range(8):
            number = graph.call_function(aten.select.int, (pack, 0, 2 * at))
            other = graph.call_function(aten.select.int, (pack, 0, 2 * at + 1))
            for op in (aten.tanh, aten.sin, aten.exp, aten.cos, aten.neg, aten.tanh, aten.sin, aten.cos):
                x = graph.call_function(op.default, (x,))
                x = graph.call_function(aten.mul.Tensor, (x, number))
            x = graph.call_function(aten.mm.default, (graph.call_function(aten.add.Tensor, (x, other)), x))
        return [x]

    args = [torch.randn(3, 3), torch.rand(16)]
    graph = build(nodes, args)
    pieces = _pieces_of(graph)
    assert len(pieces.graphs) <= 3
    # A layer's two numbers, or three, where the cut is between an operator and the one that uses its number.
    assert {len(one.places) for one in pieces.packs} <= {1, 2, 3}
    assert len(pieces.packs) == len(pieces.calls)
    found = _run_pieces(graph, pieces, args)
    torch.testing.assert_close(found, run(ReferenceBackend(), graph, args), rtol=0, atol=0)


def test_what_is_donated_is_donated_to_the_last_piece_that_uses_it() -> None:
    layers = 6
    graph, _ = normal_form(_program([0] * layers, True), _arguments(layers))
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["donated"] = True
    pieces = _pieces_of(graph)
    marked: dict[int, list[int]] = {}
    for at, call in enumerate(pieces.calls):
        placeholders = pieces.graphs[call.graph].graph.find_nodes(op="placeholder")
        for value, placeholder in zip(call.inputs, placeholders, strict=True):
            if placeholder.meta.get("donated"):
                marked.setdefault(value, []).append(at)
    uses = {value: at for at, call in enumerate(pieces.calls) for value in call.inputs if value < pieces.inputs}
    assert marked == {value: [at] for value, at in uses.items()}


def test_a_small_graph_and_one_that_does_not_repeat_stay_whole() -> None:
    graph, _ = normal_form(_program([0] * 6, False), _arguments(6))
    assert cut(graph, 1_000) is None
    graph, _ = normal_form(_program([0], False), _arguments(1))
    assert cut(graph, 4) is None
