"""``torchport.worker.paths`` and ``graphs``: what is read in another process gives the very same graph."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_support import Traced, traces_of

from torchport.backend.builder import capture_of
from torchport.backend.normal_form import verify_graph
from torchport.backend.registry import registry
from torchport.backend.serialize import encode, fingerprint
from torchport.trace.graph import build_graph, needed
from torchport.trace.trie import Node
from torchport.worker.graphs import graph_from_data, graph_to_data
from torchport.worker.paths import NotSendable, definitions_of, dumps, loads, path_from_data, path_to_data

F = torch.nn.functional


def same_graph(traced: Traced) -> None:
    """Built from bytes, the graph is the one that was built from the trie: names and lines included."""
    capture = capture_of(registry.get("reference"))
    data = path_to_data(traced.path, traced.outputs, traced.leaf_specs, traced.donated)
    back = path_from_data(data.data)
    again = build_graph(back.path, back.outputs, back.leaf_specs, capture, donated=back.donated)
    assert encode(again.module) == encode(traced.made.module)
    for name in ("leaves", "singles", "doubles", "random_keys"):
        assert getattr(again, name) == getattr(traced.made, name)
    names = [[n.name for n in g.graph.find_nodes(op="placeholder")] for g in (again.module, traced.made.module)]
    assert names[0] == names[1]
    assert data.ops == len(needed(traced.path, traced.outputs))
    by_graph = graph_from_data(*graph_to_data(traced.made.module))
    verify_graph(by_graph)
    assert fingerprint(by_graph) == fingerprint(traced.made.module)


def scalars(device: torch.device) -> Any:
    x = torch.ones(3, 4, device=device)
    return x * 0.25, x.add(x, alpha=1.5), x.clamp(min=-3, max=float("inf")), x.pow(2), x * (1 + 2j), x.fill_(7.5)


def dtypes(device: torch.device) -> Any:
    x = torch.arange(12, device=device).view(3, 4)
    return x.double() * 0.1, x.to(torch.bfloat16), x.bool(), x * torch.tensor(2.5, dtype=torch.float64)


def layouts(device: torch.device) -> Any:
    x = torch.ones(2, 3, 4, 5, device=device).contiguous(memory_format=torch.channels_last)
    return x.clone(memory_format=torch.preserve_format), x.permute(0, 2, 3, 1)[..., 1:], torch.empty_like(x).zero_()


def several(device: torch.device) -> Any:
    x = torch.arange(24.0, device=device).view(4, 6)
    top, bottom = x.split([1, 3])
    return top.max(dim=1), bottom.sort(descending=True), torch.cat([x, x]), torch.stack([top, top]), x.unbind(1)[0]


def random_numbers(device: torch.device) -> Any:
    x = torch.rand(5, 6, device=device)
    return (
        F.dropout(x, 0.3),
        torch.randn_like(x),
        torch.randint(0, 9, (4,), device=device),
        torch.randperm(8).to(device),
    )


def foreach(device: torch.device) -> Any:
    xs = [torch.ones(n, device=device) for n in (2, 3, 4)]
    return torch._foreach_add(torch._foreach_mul(xs, 0.5), xs, alpha=2)


def a_part(device: torch.device) -> Any:
    x = torch.ones(4, 4, device=device)
    kept, _dropped = x.exp() + 1, x.sin()
    return kept


def training(device: torch.device) -> Any:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(2, 5, 16).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def convolutions(device: torch.device) -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        F.cross_entropy(
            model(torch.randn(2, 3, 10, 10).to(device)).flatten(1), torch.tensor([1, 2]).to(device)
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


PROGRAMS = [scalars, dtypes, layouts, several, random_numbers, foreach, a_part, training, convolutions]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_path_gives_the_same_graph_elsewhere(program: Callable[[torch.device], Any]) -> None:
    traces = traces_of(program)
    assert traces
    for traced in traces:
        same_graph(traced)


STEPS: list[Callable[[torch.Tensor, float], torch.Tensor]] = [
    lambda x, _: x.sin(),
    lambda x, a: x * a,
    lambda x, a: x + a * x.mean(),
    lambda x, _: x.t().contiguous().view(x.shape),
    lambda x, _: x.softmax(-1),
    lambda x, a: torch.where(x > a, x, -x),
    lambda x, _: x.max(0).values.expand(x.shape).clone(),
    lambda x, a: x.double().mul(a).float(),
    lambda x, _: x.chunk(2)[1].repeat(2, 1),
    lambda x, _: x + torch.rand_like(x),
]


@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.floats(-2, 2, width=32)), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_any_path_gives_the_same_graph_elsewhere(steps: list[tuple[int, float]]) -> None:
    def program(device: torch.device) -> Any:
        x = torch.ones(4, 6, device=device)
        values = []
        for which, number in steps:
            x = STEPS[which](x, number)
            values.append(x)
        return values

    for traced in traces_of(program):
        same_graph(traced)


def test_a_trace_ignores_what_its_values_do_not_need() -> None:
    (traced,) = traces_of(lambda device: (torch.ones(2, 2, device=device).exp(), torch.ones(2, 2, device=device).sin()))
    only = path_to_data(traced.path, traced.outputs[:1], traced.leaf_specs)
    assert only.ops < path_to_data(traced.path, traced.outputs, traced.leaf_specs).ops


# -- what cannot be sent -----------------------------------------------------------------------------------------------
def node_with(argument: Any, op: Any = torch.ops.aten.sin.default) -> Node:
    node = Node(Node.root(), ("key",), op)
    node.args, node.specs, node.end_id = [argument], (None,), 1
    return node


class Unknown:
    pass


@pytest.mark.parametrize(
    "argument",
    [Unknown(), torch.ones(2), [Unknown], print, object],
    ids=["an object", "a tensor", "a class", "a builtin", "object"],
)
def test_an_argument_of_an_unknown_kind_is_refused(argument: Any) -> None:
    with pytest.raises(NotSendable, match="cannot be sent"):
        path_to_data([node_with(argument)], [0], [])


def test_an_argument_in_a_circle_or_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises((NotSendable, RecursionError)):
        path_to_data([node_with([[deep, Unknown()]])], [0], [])


def test_bytes_that_name_something_else_are_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="has no place in a message"):
        loads(pickle.dumps(print))


def test_nothing_but_plain_data_is_made() -> None:
    value = [None, 1, 2.5, 1j, "x", torch.float64, torch.strided, torch.channels_last, torch.device("meta"), (1, [2])]
    data, foreign = dumps(value)
    assert loads(data) == value
    assert foreign == ()
    assert loads(dumps(torch.Size((2, 3)))[0]) == (2, 3)
    assert loads(dumps(torch.device("port", 1))[0]) == torch.device("cpu"), "graphs are written for the host"


# -- operators of others -----------------------------------------------------------------------------------------------
def test_an_operator_of_an_importable_module_names_it() -> None:
    import worker_engines

    op = torch.ops.worker_engines.halved.default
    assert definitions_of([op]).modules == (worker_engines.__name__,)
    assert loads(dumps(op)[0]) is op


def test_an_operator_without_a_module_is_refused() -> None:
    names: dict[str, Any] = {"torch": torch}
    code = "library = torch.library.Library('worker_nowhere', 'DEF')\nlibrary.define('thing(Tensor x) -> Tensor')"
    exec(compile(code, "<typed in>", "exec"), names)
    with pytest.raises(NotSendable, match="worker_nowhere::thing is defined in <typed in>"):
        definitions_of([torch.ops.worker_nowhere.thing.default])
