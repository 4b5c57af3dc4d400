"""The trie: what a path remembers, and when a call finds its node again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers_traces import AddsOnly, FakeRunner, Recording, aten, contiguous

from torchport.core.errors import DeviceMismatch
from torchport.trace.handle import make_template
from torchport.trace.trie import LEAF, NONE, Leaf, Node, ScalarInput, Value, single_op


def test_a_call_adds_a_node_and_the_same_call_after_a_flush_finds_it() -> None:
    recording = Recording()
    x = recording.leaf(2, 3)
    recording.call(aten.add.Tensor, x, x)
    first = recording.trace.cursor
    recording.runner.flush(recording.trace, "test")
    recording.call(aten.add.Tensor, x, x)
    assert recording.trace.cursor is first
    assert recording.trace.nodes == 1


def test_another_shape_another_operator_and_another_constant_are_other_children() -> None:
    recording = Recording()
    root = recording.trace.root
    for op, args in (
        (aten.relu.default, (recording.leaf(2, 3),)),
        (aten.relu.default, (recording.leaf(2, 4),)),
        (aten.neg.default, (recording.leaf(2, 3),)),
        (aten.sum.dim_IntList, (recording.leaf(2, 3), [0])),
        (aten.sum.dim_IntList, (recording.leaf(2, 3), [1])),
    ):
        recording.call(op, *args)
        recording.runner.flush(recording.trace, "test")
    assert len(root.children) == 5


def test_ids_of_results_count_up_along_the_path_and_leaves_lie_above_them() -> None:
    recording = Recording()
    x = recording.leaf(4)
    made = recording.call(aten.add.Tensor, x, x)
    split = recording.call(aten.split.Tensor, made, 2)
    last = recording.call(aten.neg.default, split[1])
    base = recording.trace.base
    assert x.value_id == base + LEAF
    assert [made.value_id, split[0].value_id, split[1].value_id, last.value_id] == [base, base + 1, base + 2, base + 3]
    assert [(node.first_id - base, node.end_id - base) for node in recording.trace.cursor.path()] == [
        (0, 1),
        (1, 3),
        (3, 4),
    ]


def test_a_node_remembers_its_arguments_as_templates() -> None:
    recording = Recording()
    x = recording.leaf(4)
    made = recording.call(aten.mul.Tensor, x, 2.5)
    recording.call(aten.add.Tensor, made, x)
    mul, add = recording.trace.cursor.path()
    assert isinstance(mul.args[0], Leaf)
    assert mul.args[0].position == 0
    assert isinstance(mul.args[1], ScalarInput)
    assert mul.args[1].position == 0
    assert isinstance(add.args[0], Value)
    assert add.args[0].value_id == made.value_id
    assert recording.trace.scalar_inputs == [2.5]


def test_a_scalar_input_may_change_without_a_new_node() -> None:
    recording = Recording()
    x = recording.leaf(4)
    for rate in (0.5, 0.25, -3.0):
        recording.call(aten.mul.Tensor, x, rate)
        assert recording.trace.scalar_inputs == [rate]
        recording.runner.flush(recording.trace, "test")
    assert recording.trace.nodes == 1


def test_a_handle_that_nobody_held_is_handed_out_again_and_one_that_is_held_is_not() -> None:
    recording = Recording()
    x = recording.leaf(4)
    first = id(recording.call(aten.neg.default, x))
    recording.runner.flush(recording.trace, "test")
    held = recording.call(aten.neg.default, x)
    assert id(held) == first
    recording.runner.flush(recording.trace, "test")
    assert recording.call(aten.neg.default, x) is not held
    assert held.value_id == NONE


def test_a_refused_call_leaves_the_trace_as_it_was() -> None:
    recording = Recording()
    x, y = recording.leaf(2), recording.leaf(3)
    recording.call(aten.neg.default, x)
    before = recording.trace.cursor
    with pytest.raises(RuntimeError, match="size") as caught:
        recording.call(aten.add.Tensor, y, x, alpha=2.5)
    assert any("aten.add.Tensor" in note for note in caught.value.__notes__)
    assert recording.trace.cursor is before
    assert not before.children
    assert (len(recording.trace.leaves), recording.trace.scalar_inputs) == (1, [])
    assert y.value_id == NONE


def test_a_refused_random_call_gives_its_key_back() -> None:
    recording = Recording()
    with pytest.raises(DeviceMismatch):
        recording.call(aten.bernoulli.Tensor, recording.leaf(3), torch.empty(3))
    assert recording.runner.keys_drawn == 1
    assert recording.runner.keys_returned == [101]
    assert recording.trace.random_keys == []


def test_a_tensor_of_another_device_is_refused_and_a_number_on_the_host_is_a_scalar_input() -> None:
    recording = Recording()
    x = recording.leaf(3)
    with pytest.raises(DeviceMismatch, match="same device"):
        recording.call(aten.add.Tensor, x, torch.ones(3))
    recording.call(aten.add.Tensor, x, torch.tensor(1.5))
    assert recording.trace.scalar_inputs == [1.5]


def test_a_path_is_interpreted_until_it_is_worth_recording() -> None:
    recording = Recording(FakeRunner(interprets=True))
    x = recording.leaf(4)
    for _ in range(3):  # twice until it is worth it, and once more with a look at what the operators give
        assert recording.call(aten.neg.default, x) == "interpreted"
        assert recording.trace.nodes == 0
        recording.trace.direct = 0  # what the end of a step does
    recording.call(aten.neg.default, x)
    assert recording.ops() == ["aten::neg"]


def test_a_long_path_is_recorded_in_shares() -> None:
    runner = FakeRunner(interprets=True)
    runner.share = 2
    recording = Recording(runner)
    x = recording.leaf(4)
    path = (aten.neg.default, aten.sin.default, aten.cos.default, aten.exp.default, aten.tanh.default)

    def step() -> list[str]:
        value: Any = x
        for op in path:
            made = recording.call(op, value if isinstance(value, torch.Tensor) else x)
            if made == "interpreted":
                break
            value = made
        recorded = recording.ops()
        recording.trace.direct = 0
        recording.runner.flush(recording.trace, "test")
        return recorded

    grown = [step() for _ in range(12)]
    names = [op.name() for op in path]
    lengths = [len(recorded) for recorded in grown]
    assert [recorded == names[: len(recorded)] for recorded in grown] == [True] * 12
    assert max(later - earlier for earlier, later in itertools.pairwise(lengths)) == 2
    assert lengths[-1] == 5


def test_an_operator_that_the_backend_refuses_is_recorded_and_marked() -> None:
    recording = Recording(FakeRunner(AddsOnly()))
    made = recording.call(aten.sin.default, recording.call(aten.add.Tensor, recording.leaf(4), 1))
    assert recording.ops() == ["aten::add.Tensor", "aten::sin"]
    assert [node.refused for node in recording.trace.cursor.path()] == [False, True]
    assert made.shape == (4,)


def test_an_operator_whose_shape_depends_on_values_runs_at_once() -> None:
    recording = Recording()
    assert recording.call(aten.nonzero.default, recording.leaf(4)) == ("ran at once", aten.nonzero.default)
    (_, decision) = recording.runner.barriers[0]
    assert "depends on values" in decision.reason


def test_a_kernel_of_the_backend_comes_before_the_graph() -> None:
    recording = Recording()
    registered = recording.runner.kernels.impl("aten::neg", "Dense", lambda x: x)
    assert recording.call(aten.neg.default, recording.leaf(4)) == ("ran at once", aten.neg.default)
    registered.remove()
    assert recording.call(aten.neg.default, recording.leaf(5)).shape == (5,)


def test_a_trie_that_has_grown_too_large_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.core.config import config

    recording = Recording()
    monkeypatch.setattr(config, "max_trace_nodes", 3)
    root = recording.trace.root
    for size in range(1, 6):
        recording.call(aten.neg.default, recording.leaf(size))
        recording.runner.flush(recording.trace, "test")
    assert recording.trace.root is not root
    assert recording.trace.nodes <= 3


def test_two_handles_of_one_value_are_one_leaf() -> None:
    recording = Recording()
    x = recording.leaf(4)
    alias = make_template(contiguous((4,)))
    alias.value = x.value
    recording.call(aten.add.Tensor, x, alias)
    assert len(recording.trace.leaves) == 1
    assert alias.value_id == x.value_id


def test_one_operator_as_a_path_of_its_own_has_leaves_for_its_values() -> None:
    recording = Recording()
    x = recording.leaf(4)
    made = recording.call(aten.neg.default, x)
    recording.call(aten.add.Tensor, made, x)
    alone = single_op(recording.trace.cursor, {("value", made.value_id): 0, ("leaf", 0): 1})
    assert [template.position for template in alone.args] == [0, 1]
    assert (alone.first_id, alone.end_id) == (0, 1)
    assert isinstance(alone.parent, Node)
    assert alone.parent.parent is None
