"""Sparse, quantized, nested, masked and wrapped tensors on the device: equal to the CPU's, or refused in words."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import fakes
import layout_cases
import layout_sweep
import pytest
import torch

import torchport

CASES = Path(layout_cases.__file__)


def _outcomes(*groups: str) -> dict[str, str]:
    """What came of each case, run in a process of its own."""
    command = [sys.executable, str(CASES), *groups]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    last = lines[-1] if lines else "nothing"
    assert run.returncode == 0, f"ended with {run.returncode} after {last}\n{run.stderr[-2000:]}"
    return dict(lines)


def _check(*groups: str) -> None:
    found = _outcomes(*groups)
    for group in groups:
        wanted = "refused" if group in layout_cases.REFUSED else "equal"
        mine = {name: result for name, result in found.items() if name.startswith(f"{group}: ")}
        assert len(mine) >= 2 * len({**layout_cases.REFUSED, **layout_cases.WORKING}[group])
        elsewhere = "refused" if group == "coo" else wanted
        odd = {k: v for k, v in mine.items() if v != (elsewhere if k.endswith(", index") else wanted)}
        assert odd == {}


def test_what_is_not_strided_is_refused_where_it_is_made() -> None:
    _check("sparse", "quantized", "onednn", "nested")


def test_sparse_tensors_of_coordinates_work() -> None:
    _check("coo")


def test_jagged_nested_tensors_and_subclasses_of_anybody_work() -> None:
    _check("jagged", "others")


def test_a_sparse_tensor_is_subtracted_from_a_view() -> None:
    """The CPU of torch 2.13 writes to other rows."""
    whole = torch.ones(4, 3).to("port")
    whole[1:3].sub_(torch.tensor([[1.0, 0, 2], [0, 0, 3]]).to_sparse().to("port"))
    assert whole.tolist() == [[1, 1, 1], [0, 1, -1], [1, 1, -2], [1, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_pytorchs_samples_of_other_layouts_work_or_are_refused(kind: str) -> None:
    found = layout_sweep.sweep(kind, most=2, only=None)
    assert sum(map(len, found.values())) > 100
    assert {state: found[state] for state in ("wrong", "internal", "crashed") if state in found} == {}


@pytest.mark.slow
def test_torch_compile_of_jagged_nested_tensors_and_subclasses() -> None:
    _check("compiled")


@pytest.mark.parametrize("name", ["reference", "add_sub"])
def test_a_subclass_gets_the_users_tensors(name: str) -> None:
    """Its code sees no handles: what it makes of them mixes with other tensors, and writes reach views."""
    device = torchport.device(name)
    seen: list[Any] = []

    class Wrapper(torch.Tensor):
        held: torch.Tensor

        @staticmethod
        def __new__(cls: Any, held: torch.Tensor) -> Any:
            made: Any = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
            made.held = held
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [value.held if isinstance(value, Wrapper) else value for value in args]
            seen.extend(type(value) for value in plain if isinstance(value, torch.Tensor))
            made = torch.zeros(2, device=device)
            made[:1] += 1  # a view, and a write to it
            return Wrapper(func(*plain, **(kwargs or {})) + made)

    weight = torch.full((2,), 2.0, device=device)
    with torch.no_grad():
        result = Wrapper(torch.ones(2, device=device)) * weight
    assert type(result) is Wrapper
    assert (result.held + weight).tolist() == [5.0, 4.0]
    assert set(seen) == {torch.Tensor}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_backend_with_kernels_for_compressed_tensors_gets_them() -> None:
    """What is refused elsewhere is made where a backend has registered kernels that take it."""

    class Compressed(fakes.Fake):
        def register_kernels(self, registrar: Any) -> None:
            registrar.impl("aten::neg", "SparseCsr", lambda x: torch.full((2,), 7.0, device=x.device))

    crow, col, values = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1.0])
    takes, lacks = torch.device("port"), fakes.Fake.install().device
    make = torch.ops.aten._sparse_csr_tensor_unsafe  # what torch.sparse_csr_tensor comes to after its checks
    torchport.use(Compressed.install().name)
    try:
        made = make(crow.to(takes), col.to(takes), values.to(takes), (1, 1), device=takes)
        assert made.layout == torch.sparse_csr
        assert made.device.type == "port"
        assert made.neg().tolist() == [7.0, 7.0]
    finally:
        torchport.use("reference")
    with pytest.raises(torchport.UnsupportedOp, match="strided tensors only"):
        make(crow.to(lacks), col.to(lacks), values.to(lacks), (1, 1), device=lacks)


def test_the_message_says_what_to_write_instead() -> None:
    bag = torch.nn.EmbeddingBag(3, 2, sparse=True, mode="sum").to("port")
    with pytest.raises(torchport.UnsupportedOp, match=r"to_dense(.|\n)*line: ") as caught:
        bag.weight.detach().to_sparse_csr()
    assert "PythonDispatcher" not in str(caught.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torchport.UnsupportedOp, match=r"layout=torch\.jagged"):
            torch.nested.nested_tensor([torch.ones(2)], device="port")


def test_repeated_elements_are_views_and_nothing_else() -> None:
    """Writes to a tensor made with strides of 0 reached its first element only."""
    device = torchport.device("reference")
    made = torch.empty_strided((2, 3), (0, 0), device=device)
    assert (made.stride(), made.fill_(1.0).tolist()) == ((0, 0), [[1.0] * 3] * 2)
    assert torch.empty_strided((2, 3), (1, 0), device=device).zero_().add(1.0).tolist() == [[1.0] * 3] * 2
    with pytest.raises(torchport.UnsupportedOp, match="expand"):
        torch.ones(2, device=device).new_empty_strided((2, 3), (0, 1))
    assert torch.empty_strided((1, 3), (0, 1), device=device).fill_(1.0).tolist() == [[1.0, 1.0, 1.0]]
    assert torch.empty(1, 1, device=device).expand(2, 3).fill_(1.0).tolist() == [[1.0] * 3] * 2
