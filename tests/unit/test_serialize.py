"""``torchport.backend.serialize``: graphs survive the way through bytes, equal graphs share a fingerprint."""

from __future__ import annotations

import contextlib
import json
import math
import operator
from typing import Any

import pytest
import torch
from helpers_graphs import build, normal_form
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from torchport.backend.serialize import decode, encode, fingerprint, resolve_op
from torchport.core.errors import GraphError
from torchport.core.specs import TensorSpec

aten = torch.ops.aten
getitem: Any = operator.getitem


def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w = w.detach().requires_grad_()
    y = torch.nn.functional.layer_norm(x @ w, (5,)).to(torch.float64)
    y = torch.where(y > 0.5, y, -math.inf).clamp_min(-1e30).split(2)[1]
    loss = (y.view(-1)[1:] * 0.1).sum()
    return loss, *torch.autograd.grad(loss, [w])


@pytest.fixture(scope="module")
def traced() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    return normal_form(model, [torch.randn(3, 4), torch.randn(4, 5)])


def unary(op: Any, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """A graph of one call on one 2 by 3 input."""
    return build(lambda graph, inputs: [graph.call_function(op, (inputs[0], *args), kwargs)], [torch.ones(2, 3)])


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_a_graph_survives(traced: tuple[fx.GraphModule, list[torch.Tensor]]) -> None:
    module, args = traced
    again = decode(encode(module))
    for got, want in zip(again(*args), module(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert [node.target for node in calls(again)] == [node.target for node in calls(module)]


def test_debug_information_survives(traced: tuple[fx.GraphModule, list[torch.Tensor]]) -> None:
    module, _ = traced
    for got, want in zip(calls(decode(encode(module))), calls(module), strict=True):
        assert got.meta["debug_handle"] == want.meta["debug_handle"]
        assert got.meta["source"] == want.meta["source"]


def test_inputs_keep_their_specs() -> None:
    module = build(lambda graph, inputs: [graph.call_function(aten.relu.default, (inputs[0],))], [torch.ones(4, 2).t()])
    (spec,) = [node.meta["spec"] for node in decode(encode(module)).graph.nodes if node.op == "placeholder"]
    assert spec == TensorSpec((2, 4), torch.float32, (1, 2))


def test_the_fingerprint_is_of_the_computation_only(traced: tuple[fx.GraphModule, list[torch.Tensor]]) -> None:
    module, _ = traced
    other, _ = normal_form(model, [torch.randn(3, 4), torch.randn(4, 5)])
    for node in calls(other):
        node.meta.update(debug_handle=node.meta["debug_handle"] + 100, source="elsewhere.py:1 in f")
        node.name = f"renamed_{node.name}"
    assert fingerprint(module) == fingerprint(other)
    assert encode(module) != encode(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (unary(aten.add.Scalar, 1), unary(aten.add.Scalar, 2)),
        (unary(aten.add.Scalar, 1), unary(aten.add.Scalar, 1.0)),
        (unary(aten.add.Scalar, 1), unary(aten.add.Scalar, True)),
        (unary(aten.add.Scalar, 0.0), unary(aten.add.Scalar, -0.0)),
        (unary(aten.add.Scalar, 1), unary(aten.sub.Scalar, 1)),
        (unary(aten.sum.dim_IntList, [0]), unary(aten.sum.dim_IntList, [1])),
        (unary(aten.sum.dim_IntList, [0]), unary(aten.sum.dim_IntList, None)),
        (unary(aten.sum.default), unary(aten.sum.default, dtype=torch.float64)),
    ],
    ids=lambda module: str(calls(module)[0].args[1:]),
)
def test_fingerprints_tell_computations_apart(one: fx.GraphModule, other: fx.GraphModule) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_fingerprints_tell_input_specs_apart() -> None:
    def nodes(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        return [graph.call_function(aten.relu.default, (inputs[0],))]

    variants = [torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3, dtype=torch.float64)]
    assert len({fingerprint(build(nodes, [variant])) for variant in variants}) == len(variants)


scalars = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.complex_numbers())


def identical(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (repr(a) == repr(b))


@given(scalars)
def test_scalars_survive_to_the_bit(value: Any) -> None:
    module = unary(aten.relu.default)
    calls(module)[0].args = (calls(module)[0].args[0], value)
    assert identical(calls(decode(encode(module)))[0].args[1], value)


arguments = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(max_size=5),
        st.sampled_from(
            [
                torch.float32,
                torch.complex64,
                torch.uint16,
                torch.float8_e4m3fn,
                torch.strided,
                torch.sparse_coo,
                torch.channels_last,
                torch.preserve_format,
                torch.device("cpu"),
                torch.device("cuda", 1),
            ]
        ),
    ),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(arguments)
def test_arguments_survive(value: Any) -> None:
    module = unary(aten.relu.default)
    node = calls(module)[0]
    node.args, node.kwargs = (node.args[0], value), {"option": value}
    (again,) = calls(decode(encode(module)))
    assert again.args[1] == value
    assert again.kwargs["option"] == value


def test_what_cannot_be_encoded_is_named() -> None:
    module = unary(aten.relu.default)
    node = calls(module)[0]
    node.args = (node.args[0], torch.Generator())
    with pytest.raises(GraphError, match="a Generator cannot be an argument in normal form"):
        encode(module)
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_method("relu", (node,))
    node.args = (node.args[0],)
    with pytest.raises(GraphError, match="a call_method node cannot be encoded"):
        encode(module)


def test_resolving_operators() -> None:
    assert resolve_op("aten.add.Tensor") is aten.add.Tensor
    for name in ("aten.add", "aten.add.Nothing", "aten.nothing.default", "nothing", "", "aten.__class__.default"):
        with pytest.raises(GraphError, match="no operator"):
            resolve_op(name)


def document(**changes: Any) -> bytes:
    whole = json.loads(encode(unary(aten.add.Scalar, 1)))
    return json.dumps({**whole, **changes}).encode()


def one_call(args: Any, kwargs: Any, target: str = "aten.add.Scalar") -> bytes:
    return document(calls=[[target, args, kwargs, 1, None]])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        document(inputs=[[[2], "torch.nothing", [1]]]),
        document(inputs=[[[2], "torch.nn", [1]]]),
        document(inputs=3),
        document(outputs=[{"n": 7}]),
        document(outputs=5),
        one_call([{"n": 9}, 1], {}),
        one_call([{"n": 0}, {"t": "torch.nn"}], {}),
        one_call([{"n": 0}, {"t": "torch.save"}], {}),
        one_call([{"n": 0}, {"d": "nonsense"}], {}),
        one_call([{"n": 0}, {"x": 1}], {}),
        one_call([{"n": 0}, {"n": 0, "t": "torch.float32"}], {}),
        one_call([{"n": 0}, {"c": ["a", "b"]}], {}),
        one_call([{"n": 0}, 1], {}, target="aten.nothing.default"),
        one_call([{"n": 0}, 1], {"alpha=print('run'), beta": 1}),
        one_call([{"n": 0}, 1], {"lambda": 1}),
    ],
)
def test_bytes_that_are_no_graph_are_refused(data: bytes) -> None:
    with pytest.raises(GraphError):
        decode(data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_give_a_graph_or_a_graph_error(data: st.DataObject) -> None:
    whole = bytearray(encode(unary(aten.add.Scalar, 1.5)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(GraphError):
        decode(bytes(whole))
