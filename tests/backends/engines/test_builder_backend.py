"""``examples/builder_backend.py``, an engine that is built through calls: it trains, and its operators are right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from examples_support import example, operators_are_right, train_model, train_perceptron, trains_as_the_cpu_does

import torchport


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with example("builder") as found:
        yield found


@pytest.fixture
def device(module: ModuleType) -> torch.device:
    return torchport.device("builder")


def test_a_perceptron_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(train_perceptron, device)


def test_gpt2_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(lambda place: train_model("gpt2", place), device)


def test_one_operator_may_be_several_calls_and_the_results_are_typed(module: ModuleType, device: torch.device) -> None:
    made: list[torchport.Processed] = []
    backend = torchport.get_backend("builder")
    preprocess = backend.preprocess

    def spy(graph: torch.fx.GraphModule, specs: torchport.CompileSpecs) -> torchport.Processed:
        made.append(preprocess(graph, specs))
        return made[-1]

    x = torch.randn(3, 4)
    with pytest.MonkeyPatch.context() as patch, torchport.config.override(cache="off"):
        patch.setattr(backend, "preprocess", spy)
        torch.testing.assert_close(torch.softmax(x.to(device), 1).cpu(), torch.softmax(x, 1))
    tape = json.loads(made[0].data)
    assert [one["op"] for one in tape["instructions"]] == ["parameter", "amax", "sub", "exp", "sum", "div"]
    assert [one["dtype"] for one in tape["instructions"]] == [None] * 5 + ["float32"]
    assert tape["results"] == [5]


def test_numbers_are_rounded_as_pytorch_rounds_them(device: torch.device) -> None:
    whole = torch.arange(-3, 4)
    third = torch.full((), 1 / 3, dtype=torch.float64)
    for x, y in ((whole, 2.5), (whole, third), (third, whole.float()), (whole > 0, whole), (whole.int(), 3)):
        expected = x * y
        found = x.to(device) * (y.to(device) if isinstance(y, torch.Tensor) else y)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.cpu(), expected)
    x = torch.linspace(-1, 1, 5)
    torch.testing.assert_close(torch.add(x.to(device), x.to(device), alpha=3).cpu(), torch.add(x, x, alpha=3))


def test_empty_tensors_of_one_dimension_are_joined_to_anything(device: torch.device) -> None:
    x = torch.ones(2, 3)
    assert torch.cat([torch.empty(0).to(device), x.to(device)], 1).tolist() == x.tolist()
    assert torch.cat([torch.empty(0).to(device), torch.empty(0).to(device)]).tolist() == []


def test_what_it_does_not_take_has_a_reason(device: torch.device) -> None:
    with torchport.config.override(fallback="error"):
        with pytest.raises(torchport.UnsupportedOp, match="there is no lowering of aten"):
            torch.sort(torch.ones(3).to(device))
        with pytest.raises(torchport.UnsupportedOp, match="padding that cuts off"):
            torch.nn.functional.pad(torch.ones(3).to(device), (-1, 2))


OPERATORS = (
    "add sub mul div neg abs exp log sqrt tanh pow bitwise_and bitwise_not logical_and logical_not eq ne lt le ge mm "
    "bmm addmm clamp where full_like view unsqueeze expand permute select split_with_sizes cat sum mean amax any "
    "softmax log_softmax native_layer_norm gather scatter nn.functional.relu nn.functional.embedding nn.functional.pad"
)


@pytest.mark.slow
def test_operators_on_samples_of_pytorch() -> None:
    operators_are_right("builder", "BuilderBackend", OPERATORS)
