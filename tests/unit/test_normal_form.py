"""``torchport.backend.normal_form``: each rule of the normal form refuses the graph that breaks it, and only that."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import build, normal_form
from torch import fx

from torchport.backend.normal_form import alias_root, input_specs, is_view, output_specs, source_of, verify_graph
from torchport.core.errors import GraphError
from torchport.core.specs import TensorSpec

aten = torch.ops.aten
getitem: Any = operator.getitem


def good() -> fx.GraphModule:
    """``(x + y, split(x + y)[1] * 2)`` in normal form."""

    def nodes(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        total = graph.call_function(aten.add.Tensor, tuple(inputs))
        parts = graph.call_function(aten.split.Tensor, (total, 2))
        second = graph.call_function(getitem, (parts, 1))
        return [total, graph.call_function(aten.mul.Tensor, (second, 2.0))]

    return build(nodes, [torch.ones(4, 3), torch.ones(4, 3)])


def node_of(module: fx.GraphModule, target: object) -> fx.Node:
    return next(node for node in module.graph.nodes if node.target is target)


def call(module: fx.GraphModule, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
    """A new node before the output, with all the metadata a node needs."""
    with module.graph.inserting_before(module.graph.output_node()):
        node = module.graph.call_function(target, args, kwargs)
    base = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, fx.Node))
    node.meta.update(val=base.meta["val"] if val is None else val, debug_handle=99, source="model.py:7 in forward")
    return node


def set_outputs(module: fx.GraphModule, *outputs: Any) -> None:
    module.graph.output_node().args = (outputs,)


def test_a_good_graph_passes() -> None:
    verify_graph(good())


def test_traced_programs_pass() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = w.detach().requires_grad_()
        loss = torch.nn.functional.layer_norm(x @ w, (5,)).relu().view(-1)[2:].sum()
        return loss, *torch.autograd.grad(loss, [w])

    module, _ = normal_form(step, [torch.randn(3, 4), torch.randn(4, 5)])
    verify_graph(module)


def drop_val(module: fx.GraphModule) -> None:
    del node_of(module, aten.mul.Tensor).meta["val"]


def none_val(module: fx.GraphModule) -> None:
    node_of(module, aten.mul.Tensor).meta["val"] = None


def number_val(module: fx.GraphModule) -> None:
    node_of(module, aten.split.Tensor).meta["val"] = [3]


def placeholder_val(module: fx.GraphModule) -> None:
    next(iter(module.graph.nodes)).meta.clear()


def drop_handle(module: fx.GraphModule) -> None:
    del node_of(module, getitem).meta["debug_handle"]


def python_function(module: fx.GraphModule) -> None:
    call(module, torch.add, node_of(module, aten.mul.Tensor), 1)


def packet(module: fx.GraphModule) -> None:
    call(module, aten.add, node_of(module, aten.mul.Tensor), 1)


def method(module: fx.GraphModule) -> None:
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_method("relu", (node_of(module, aten.mul.Tensor),))


def mutation(module: fx.GraphModule) -> None:
    call(module, aten.add_.Tensor, node_of(module, aten.mul.Tensor), 1)


def out_variant(module: fx.GraphModule) -> None:
    value = node_of(module, aten.mul.Tensor)
    call(module, aten.add.out, value, value, out=value)


def view_copy(module: fx.GraphModule) -> None:
    call(module, aten.view_copy.default, node_of(module, aten.mul.Tensor), [6])


def index_a_tensor(module: fx.GraphModule) -> None:
    call(module, getitem, node_of(module, aten.mul.Tensor), 0)


def late_placeholder(module: fx.GraphModule) -> None:
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.placeholder("late")


def single_output(module: fx.GraphModule) -> None:
    module.graph.output_node().args = (node_of(module, aten.mul.Tensor),)


def list_output(module: fx.GraphModule) -> None:
    module.graph.output_node().args = ([node_of(module, aten.mul.Tensor)],)


def constant_output(module: fx.GraphModule) -> None:
    set_outputs(module, node_of(module, aten.mul.Tensor), 1.0)


def several_in_one_output(module: fx.GraphModule) -> None:
    set_outputs(module, node_of(module, aten.split.Tensor))


def input_as_output(module: fx.GraphModule) -> None:
    set_outputs(module, next(iter(module.graph.nodes)))


def view_of_input(module: fx.GraphModule) -> None:
    set_outputs(module, call(module, aten.t.default, next(iter(module.graph.nodes))))


def view_of_input_by_keyword(module: fx.GraphModule) -> None:
    set_outputs(module, call(module, aten.view.default, self=next(iter(module.graph.nodes)), size=[12]))


def aliased_outputs(module: fx.GraphModule) -> None:
    set_outputs(module, node_of(module, aten.add.Tensor), node_of(module, getitem))


def same_output_twice(module: fx.GraphModule) -> None:
    set_outputs(module, node_of(module, aten.mul.Tensor), node_of(module, aten.mul.Tensor))


def no_output(module: fx.GraphModule) -> None:
    module.graph.erase_node(module.graph.output_node())


def used_before_made(module: fx.GraphModule) -> None:
    node_of(module, aten.add.Tensor).update_arg(1, node_of(module, aten.mul.Tensor))


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (drop_val, 'meta["val"]'),
        (none_val, 'meta["val"]'),
        (number_val, 'meta["val"]'),
        (placeholder_val, 'meta["val"]'),
        (drop_handle, 'meta["debug_handle"] is not an int'),
        (python_function, "only OpOverloads may be called"),
        (packet, "only OpOverloads may be called"),
        (method, "a call_method node"),
        (mutation, "mutates an argument"),
        (out_variant, "mutates an argument"),
        (view_copy, "*_copy form of a view operator"),
        (index_a_tensor, "does not return several tensors"),
        (late_placeholder, "placeholders come first"),
        (single_output, "not one flat tuple"),
        (list_output, "not one flat tuple"),
        (constant_output, "output 1.0 is not a node"),
        (several_in_one_output, "not a node that holds one tensor"),
        (input_as_output, "shares memory with input"),
        (view_of_input, "shares memory with input"),
        (view_of_input_by_keyword, "shares memory with input"),
        (aliased_outputs, "share memory; clone one"),
        (same_output_twice, "share memory; clone one"),
        (no_output, "the last node is not the output"),
        (used_before_made, "before it has been defined"),
    ],
)
def test_each_rule(spoil: Callable[[fx.GraphModule], None], rule: str) -> None:
    module = good()
    spoil(module)
    with pytest.raises(GraphError, match=re.escape(rule)) as caught:
        verify_graph(module)
    assert str(caught.value).startswith("not in FX normal form")


def test_the_message_names_the_users_line() -> None:
    module = good()
    mutation(module)
    with pytest.raises(GraphError, match=r"add_\.Tensor.*\(from model\.py:7 in forward\)"):
        verify_graph(module)


def test_an_operator_may_leave_out_some_of_its_tensors() -> None:
    module = good()
    node_of(module, aten.split.Tensor).meta["val"][0] = None
    verify_graph(module)


def test_cloned_outputs_pass() -> None:
    module = good()
    total, part = node_of(module, aten.add.Tensor), node_of(module, getitem)
    set_outputs(module, total, call(module, aten.clone.default, part))
    verify_graph(module)


@pytest.mark.parametrize(
    ("op", "view"),
    [
        (aten.view.default, True),
        (aten.t.default, True),
        (aten.split.Tensor, True),
        (aten.slice.Tensor, True),
        (aten.view_copy.default, False),
        (aten.add.Tensor, False),
        (aten.add_.Tensor, False),
        (aten.native_layer_norm.default, False),
        (getitem, False),
        ("aten.view", False),
    ],
)
def test_views_are_told_from_their_schema(op: object, view: bool) -> None:
    assert is_view(op) == view


def test_the_alias_root_is_where_the_value_was_made() -> None:
    module = good()
    total = node_of(module, aten.add.Tensor)
    part = node_of(module, getitem)
    viewed = call(module, aten.view.default, call(module, aten.t.default, part), [6])
    assert alias_root(viewed) is total
    assert alias_root(node_of(module, aten.mul.Tensor)).target is aten.mul.Tensor
    first = next(iter(module.graph.nodes))
    assert alias_root(call(module, aten.t.default, first)) is first


def test_an_item_of_a_multi_output_operator_is_its_own_root() -> None:
    def nodes(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        norm = graph.call_function(aten.native_layer_norm.default, (inputs[0], [3], None, None, 1e-5))
        return [graph.call_function(getitem, (norm, 0)), graph.call_function(getitem, (norm, 1))]

    module = build(nodes, [torch.ones(4, 3)])
    item = node_of(module, getitem)
    assert alias_root(item) is item


def test_specs_of_inputs_and_outputs() -> None:
    module = good()
    assert input_specs(module) == (TensorSpec.of(torch.ones(4, 3)),) * 2
    assert output_specs(module) == (TensorSpec.of(torch.ones(4, 3)), TensorSpec.of(torch.ones(2, 3)))
    set_outputs(module, node_of(module, aten.split.Tensor))
    with pytest.raises(GraphError, match="has only tensors"):
        output_specs(module)


def test_the_source_line_is_text_or_unknown() -> None:
    module = good()
    assert source_of(node_of(module, aten.add.Tensor)) is None
    assert source_of(call(module, aten.relu.default, node_of(module, aten.mul.Tensor))) == "model.py:7 in forward"
