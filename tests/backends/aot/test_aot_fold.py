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


class Embedded(nn.Module):
    """What BERT does to positions, types and masks before its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.register_buffer("positions", torch.arange(8)[None], persistent=False)
        self.register_buffer("types", torch.zeros(1, 8, dtype=torch.int64), persistent=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        positions = self.positions[:, :length]  # type: ignore[index]
        types = torch.gather(self.types.expand(1, -1), 1, positions).expand(batch, -1)  # type: ignore[operator]
        picked = mask[torch.arange(batch)[:, None, None], torch.arange(length)[None, None]]
        hidden = self.embedding(ids.view(-1, length)) + self.embedding(positions) + self.embedding(types)
        return hidden.masked_fill(~picked.transpose(1, 2), 0.0)


def test_positions_types_and_masks_of_a_language_model_leave_nothing_to_pytorch() -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    model, ids, mask = Embedded().eval(), torch.randint(0, 16, (2, 5)), torch.rand(2, 5) > 0.5
    lowered = aot.lower(model, (ids, mask), backend="openvino")
    assert not lowered.left["forward"]
    assert not {"aten.gather.default", "aten.index.Tensor", "aten.arange.start_step"} & set(ops_of(lowered))
    torch.testing.assert_close(lowered(ids, mask), model(ids, mask))


def test_a_result_that_shows_an_input_is_another_tensor() -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.view(2, 3), x[torch.arange(2)]

    x = torch.randn(2, 3)
    lowered = aot.lower(Same(), (x,), backend="reference")
    for found in lowered(x):
        torch.testing.assert_close(found, x)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 0, 2], [-3, 1, -1]])
def test_indexing_by_constants(order: list[int]) -> None:
    class Picked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[torch.tensor(order)] * 2

    x = torch.randn(3, 2)
    lowered = aot.lower(Picked(), (x,), backend="reference")
    assert ("aten.index.Tensor" in ops_of(lowered)) == (order in ([2, 1, 0], [0, 0, 2]))
    torch.testing.assert_close(lowered(x), Picked()(x))


def test_a_buffer_that_changes_is_no_constant() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)  # type: ignore[operator]
            return x + self.count * 2  # type: ignore[operator]

    x = torch.zeros(2)
    method = aot.lower(Counted(), (x,), backend="reference").program.load_method()
    assert [method(x)[0].tolist(), method(x)[0].tolist()] == [[2.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize("engine", ["reference", "xla"])
def test_results_of_a_program_are_nobody_elses_memory(engine: str) -> None:
    class Passed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.w[:].clone(), x[:].clone(), x + 1

    if engine == "xla":
        pytest.importorskip("jax", reason="jax is not installed")
    x = torch.randn(2, 3)
    before = x.clone()
    lowered = aot.lower(Passed(), (x,), backend=engine)
    first = lowered(x)
    with torch.no_grad():
        first[0].add_(100.0)
        first[1].add_(100.0)
    torch.testing.assert_close(x, before)
    torch.testing.assert_close(lowered(x)[0], torch.ones(2, 3))
