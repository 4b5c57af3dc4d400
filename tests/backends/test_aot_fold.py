"""What a method computes from constants alone is computed when it is lowered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aot_support import fresh
from torch import nn

from torchport import aot, runtime


def ops_of(lowered: aot.LoweredProgram) -> list[str]:
    delegated = [node for piece in lowered.pieces["forward"] for node in piece.graph.graph.nodes]
    left = [one.op for one in lowered.left["forward"]]
    return [str(node.target) for node in delegated if node.op == "call_function"] + left


class Masked(nn.Module):
    """Positions and a causal mask, as language models make them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.shape[-1]
        positions = torch.arange(size)
        mask = positions[None, :] <= positions[:, None]
        scale = torch.tensor([2.0, 3.0]).sum()
        return x.masked_fill(~mask, 0.0) * scale + positions, positions


@pytest.mark.parametrize("engine", ["reference", "add_sub", "openvino"])
def test_masks_and_positions(engine: str, tmp_path: Path) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino", reason="openvino is not installed")
    x = torch.randn(4, 4)
    lowered = aot.lower(Masked(), (x,), backend=engine)
    assert not any(op.split(".")[1] in ("arange", "le", "bitwise_not", "sum") for op in ops_of(lowered))
    for found, expected in zip(lowered(x), Masked()(x), strict=True):
        torch.testing.assert_close(found, expected)
    lowered.save(tmp_path / "m.pt2")
    method = runtime.load(tmp_path / "m.pt2").load_method()
    first = method(x)
    first[1].add_(100)  # a result is nobody else's memory
    for found, expected in zip(method(x), Masked()(x), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected)
    again = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(again(x)[0], Masked()(x)[0])


def test_random_numbers_and_large_values_are_computed_at_each_call() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = torch.arange(1 << 19).to(torch.float32)
            return x + torch.rand(3), x.sum() + wide

    x = torch.zeros(3)
    lowered = aot.lower(Model(), (x,), backend="reference")
    assert any("rand" in op for op in ops_of(lowered))
    assert any("arange" in op for op in ops_of(lowered))
    assert not torch.equal(lowered(x)[0], lowered(x)[0])


def test_methods_fold_values_of_their_own(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(3).flip(0)

        def other(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.arange(3, 6).flip(0)

    x = torch.zeros(3)
    lowered = aot.lower(Model(), (x,), backend=fresh().name, methods={"other": (x,)})
    lowered.save(tmp_path / "m.pt2")
    program = runtime.load(tmp_path / "m.pt2")
    assert program.load_method()(x)[0].tolist() == [2, 1, 0]
    assert program.load_method("other")(x)[0].tolist() == [5, 4, 3]


@torch.library.custom_op("torchport_tests::calls", mutates_args=())
def calls() -> torch.Tensor:
    calls.count = getattr(calls, "count", 0) + 1
    return torch.tensor(float(calls.count))


calls.register_fake(lambda: torch.empty(()))


class Odd(nn.Module):
    """What cannot be folded: another library's operator, what fails, what is spread, sizes that depend on values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = x[x > 0].sum()
        return x + calls(), chosen, torch.arange(1.0, 9.0)[::2], torch.arange(3.0).expand(2, 3) * 1


def test_what_cannot_be_folded() -> None:
    x = torch.randn(20)
    lowered = aot.lower(Odd(), (x,), backend="reference")
    first, second = lowered(x), lowered(x)
    torch.testing.assert_close(second[0] - first[0], torch.ones(20))
    torch.testing.assert_close(first[1], x[x > 0].sum())
    assert first[2].stride() == torch.arange(1.0, 9.0)[::2].stride() == (2,)

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.linalg.cholesky(-torch.eye(2))

    lowered = aot.lower(Fails(), (torch.ones(2, 2),), backend="reference")
    with pytest.raises(RuntimeError, match="cholesky"):
        lowered(torch.ones(2, 2))
