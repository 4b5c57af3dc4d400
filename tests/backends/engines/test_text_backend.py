"""``examples/text_backend.py``, an engine that reads text: it trains, and its complaints reach the user's lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from examples_support import example, operators_are_right, train_model, train_perceptron, trains_as_the_cpu_does

import torchport


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with example("text") as found:
        yield found


@pytest.fixture
def device(module: ModuleType) -> torch.device:
    return torchport.device("text")


class Looked(torch.nn.Module):
    """Doubled rows of a table of four."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.table(rows)
        return found * 2


def _line(error: Any) -> str:
    """The text of the line that an error names."""
    path, _, rest = error.source.partition(":")
    return Path(path).read_text(encoding="utf-8").splitlines()[int(rest.split()[0]) - 1].strip()


def test_a_perceptron_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(train_perceptron, device)


def test_gpt2_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(lambda place: train_model("gpt2", place), device)


def test_the_text_can_be_read(device: torch.device) -> None:
    x = torch.arange(6.0).reshape(2, 3).to(device)
    assert torchport.dump((x * float("inf")).sum(0), format="backend").splitlines() == [
        "%0 = input : float32[2,3]",
        "%1 = multiply %0 Infinity : float32[2,3]",
        '%2 = sum %1 {"axes": [0]} : float32[3]',
        "return %2",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("%0 = input : float32[2]\n%1 = shake %0 : float32[2]\nreturn %1", "line 2: there is no instruction 'shake'"),
        ("%0 = input : float32[2]\n%1 = exp %7 : float32[2]\nreturn %1", "line 2: %7 has no value yet"),
        ("%0 = input float32[2]\nreturn %0", "line 1: cannot read '%0 = input float32[2]'"),
        ("%0 = input : float32[2]", "line 1: the program ends without a return"),
    ],
)
def test_the_assembler_names_the_line(module: ModuleType, text: str, complaint: str) -> None:
    with pytest.raises(module.EngineError) as caught:
        module.assemble(text)
    assert str(caught.value) == complaint


def test_what_the_assembler_refuses_is_an_error_at_the_users_line(device: torch.device) -> None:
    x = torch.ones([1] * 8).to(device)
    wide = x.exp()[None]
    with pytest.raises(torchport.CompileError, match="line 2: a register has at most 8 dimensions, not 9") as caught:
        wide.cpu()
    assert _line(caught.value) == "wide = x.exp()[None]"
    inner: Any = caught.value.__cause__
    assert inner.op == "aten.unsqueeze.default"


def test_what_the_machine_refuses_is_an_error_at_the_users_line(device: torch.device) -> None:
    table, rows = torch.ones(4, 2).to(device), torch.tensor([1, 9]).to(device)
    doubled = table * 2
    found = torch.nn.functional.embedding(rows, doubled)
    with pytest.raises(torchport.ExecutionError, match="take: rows 1 to 9 of a table that has 4") as caught:
        found.cpu()
    assert caught.value.op == "aten.embedding.default"
    assert _line(caught.value) == "found = torch.nn.functional.embedding(rows, doubled)"
    assert doubled.sum().item() == 16, "what does not depend on the failure is computed"


def test_in_a_file_lines_of_the_text_lead_to_lines_of_the_user(module: ModuleType, tmp_path: Path) -> None:
    file, rows = tmp_path / "looked.pt2", torch.tensor([1, 3])
    model = Looked()
    torchport.aot.lower(model, (rows,), backend="text").save(file)
    with torchport.runtime.load(file, profile=True).load_method() as method:
        torch.testing.assert_close(method(rows)[0], model(rows))
        assert "op take" in method.profile().table()
        with pytest.raises(torchport.DelegateError, match="line 3: take: rows 1 to 4 of a table that has 4") as caught:
            method(rows + torch.tensor([0, 1]))
    error = caught.value
    assert (error.op, error.module, error.code) == ("aten.embedding.default", "table", 0x12)
    assert _line(error) == "found = self.table(rows)"


def test_bytes_of_another_version_are_refused(module: ModuleType) -> None:
    backend, context = module.TextBackend(), torchport.InitContext(torchport.BackendDevice("cpu"))
    newer = torchport.FreeableBuffer(b"%0 = input : float32[2]\n%1 = fused_exp %0 : float32[2]\nreturn %1")
    with pytest.raises(torchport.DelegateError, match="no instruction 'fused_exp'") as caught:
        backend.init(newer, torchport.CompileSpecs(), context)
    assert caught.value.code == torchport.ErrorCode.DELEGATE_INVALID_COMPATIBILITY
    assert caught.value.ident == 2


OPERATORS = (
    "add sub mul div neg abs exp log sqrt tanh pow bitwise_and bitwise_not logical_and logical_not eq ne lt le ge mm "
    "bmm addmm where full_like view unsqueeze expand permute select split_with_sizes cat sum mean amax any softmax "
    "log_softmax native_layer_norm gather scatter nn.functional.relu nn.functional.pad"
)


@pytest.mark.slow
def test_operators_on_samples_of_pytorch() -> None:
    operators_are_right("text", "TextBackend", OPERATORS)
