"""Recorded paths that C++ interprets (``native/steps.cpp``): the values are those of Python's interpreter."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_support import COMPILER, compiles

import torchport
from torchport import native
from torchport.core.config import config
from torchport.core.errors import ExecutionError
from torchport.run import flush, interpreted, steps
from torchport.run.worth import costs

pytestmark = compiles


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is recorded at once, and interpreted for good."""
    native.build_all([str(COMPILER)])
    assert native.steps.load() is not None, "it was not built: see the log"
    torchport.use("reference")
    torchport.sync()
    monkeypatch.setattr(flush, "next_plan", lambda plan, progress: plan)
    with config.override(tiers="auto"), costs.ignored():
        yield
    torchport.sync()


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Python ran each operator of a path that C++ runs."""
    seen: Counter[str] = Counter()
    alone = interpreted._PathRun.alone

    def noted(run: Any, position: int, given: tuple[Any, ...]) -> list[Any]:
        seen[str(run.program.steps[position].node.op)] += 1
        return alone(run, position, given)

    monkeypatch.setattr(interpreted._PathRun, "alone", noted)
    return seen


def _x(device: str, dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    made = torch.sin(torch.arange(24.0, dtype=torch.float64)) * 3
    return made.reshape(shape or (4, 6)).to(dtype).to(device)


def _sum_of(*values: torch.Tensor) -> list[torch.Tensor]:
    return [value.clone() for value in values]


def _attention(device: str) -> Any:
    q = _x(device, torch.float32, 1, 2, 3, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, q.flip(2), q * 2, is_causal=True)


def _lists(device: str) -> Any:
    values = [_x(device), _x(device).t(), _x(device)[0]]
    torch._foreach_mul_(values, 0.5)
    torch._foreach_addcdiv_(values, [v + 1 for v in values], [v * v + 2 for v in values], 0.25)
    torch._foreach_lerp_(values, [v.neg() for v in values], 0.3)
    return [*values, torch.stack([v.sum() for v in torch._foreach_add(values, 1.5)])]


def _trained(device: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(6, 8),
        torch.nn.GELU(),
        torch.nn.LayerNorm(8),
        torch.nn.Dropout(0.0),
        torch.nn.Linear(8, 2),
    ]
    model = torch.nn.Sequential(*layers).to(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    said = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(_x(device, dtype)).square().mean()
        loss.backward()
        optimizer.step()
        said.append(loss.detach())
    return [*said, *(p.detach() for p in model.parameters())]


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "arithmetic": lambda d: (_x(d) * 0.3 + 1) / (_x(d).abs() + 0.7) - _x(d) ** 2,
    "numbers and halves": lambda d: [
        (_x(d, dtype) * 0.3 + 1.7) * 2 - 0.1 for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ],
    "numbers and integers": lambda d: [
        _x(d, torch.int64) * 2.5, _x(d, torch.int32) + 3, _x(d, torch.int16) / 2.0, _x(d, torch.bool) * 1.5,
    ],
    "numbers and complex": lambda d: [_x(d, torch.complex64) * 0.3, _x(d, torch.complex128) + 1.7],
    "an alpha": lambda d: [
        torch.add(_x(d), _x(d), alpha=0.3), torch.sub(_x(d), _x(d)[0], alpha=0.3), torch.rsub(_x(d), 2.5),
        torch.add(_x(d, torch.bfloat16), _x(d, torch.bfloat16), alpha=0.3),
    ],
    "views": lambda d: [_x(d).t()[1:4, ::2].reshape(-1) + 1, _x(d).view(2, 12).t().sum(0), _x(d).unfold(1, 3, 2) * 2],
    "a view of other strides": lambda d: (_x(d).t() + 0.5).reshape(24).view(3, 8) * 2,
    "several results": lambda d: [*_x(d).split(2, 1), *_x(d).max(1), *torch.var_mean(_x(d), 0), *_x(d).sort(1)],
    "places": lambda d: _x(d)[torch.tensor([0, 2], device=d), :, None] * _x(d)[:, torch.tensor([1], device=d)].sum(),
    "put": lambda d: torch.index_put(_x(d), (torch.tensor([1, 3], device=d),), _x(d)[:2] * 3),
    "dtypes": lambda d: [_x(d).to(torch.int32).sum(), _x(d).sum(dtype=torch.float64), _x(d).argmax(), _x(d) > 0.5],
    "factories": lambda d: torch.full((4, 6), 0.25, device=d) + torch.arange(6, device=d) + torch.eye(4, 6, device=d),
    "random": lambda d: _x(d) + torch.rand(4, 6, device=d) * torch.randn(4, 6, device=d).clamp(-1, 1),
    "dropout": lambda d: torch.nn.functional.dropout(_x(d), 0.5) * 2,
    "products": lambda d: torch.addmm(_x(d)[:, :4], _x(d), _x(d).t(), beta=0.5, alpha=2) @ _x(d).unsqueeze(0),
    "convolution": lambda d: torch.nn.functional.conv2d(_x(d, torch.float32, 1, 2, 3, 4), torch.ones(3, 2, 2, 2).to(d)),
    "pooling": lambda d: torch.nn.functional.max_pool2d(_x(d, torch.float32, 1, 2, 3, 4), 2, stride=1),
    "attention": _attention,
    "in place": lambda d: _sum_of(_x(d).mul_(2).add_(_x(d), alpha=0.3).clamp_(-1, 1), _x(d).exp_().sub_(1)),
    "lists": _lists,
    "clamped by None": lambda d: _x(d).clamp(max=0.5),
    "losses": lambda d: torch.nn.functional.cross_entropy(_x(d), torch.tensor([1, 0, 5, 2], device=d)),
    "infinite numbers": lambda d: [_x(d) * float("inf"), torch.clamp(_x(d), float("-inf"), 0.5)],
    "one way": lambda d: torch.where(_x(d) > 0, _x(d), torch.zeros((), device=d)) + torch.tensor(1.5),
}  # fmt: skip


def _told(values: Any) -> list[Any]:
    values = values if isinstance(values, list) else [values]
    torchport.sync()
    told = []
    for value in values:
        host = value.detach().cpu().contiguous()
        bits = host.view(torch.uint8).flatten().tolist() if host.dim() else [str(host.item())]
        told.append((str(host.dtype), tuple(host.shape), value.stride(), bits))
    return told


def _runs(program: Callable[[str], Any], times: int = 6) -> list[Any]:
    said = []
    for _ in range(times):
        torch.manual_seed(3)
        said.append(_told(program("port")))
    return said


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_values_are_those_of_python(monkeypatch: pytest.MonkeyPatch, program: Callable[[str], Any]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_functions", [])
        wanted = _runs(program)
    torchport.use("add_sub")
    torchport.use("reference")  # from an empty trie
    assert _runs(program) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_is_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_functions", [])
        wanted = _told(_trained("port", dtype))
    torchport.use("add_sub")
    torchport.use("reference")
    assert _told(_trained("port", dtype)) == wanted


MOSTLY: dict[str, int] = {"arithmetic": 0, "numbers and integers": 0, "views": 3, "places": 0, "attention": 0, "put": 0}


@pytest.mark.parametrize("name", MOSTLY)
def test_python_runs_no_operator(in_python: Counter[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[Any] = []
    make_steps = steps.make_steps
    monkeypatch.setattr(interpreted, "make_steps", lambda *given: made.append(make_steps(*given)) or made[-1])
    _runs(PROGRAMS[name])
    assert made, "nothing was recorded, or it ran once"
    assert None not in made
    assert sum(in_python.values()) == MOSTLY[name], in_python


def test_an_error_is_the_operators_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(6.0).to("port")

    def program(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor([index]).to("port")
        return table.index_select(0, at) * 2, table + 1

    for index in (1, 2, 3, 1):
        first, second = program(index)
        assert (first.tolist(), second.tolist()) == ([2.0 * index], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    first, second = program(9)
    with pytest.raises((ExecutionError, IndexError, RuntimeError), match="out of range"):
        first.tolist()
    assert second.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    first, second = program(4)
    assert (first.tolist(), second.tolist()[0]) == ([8.0], 1.0)


def test_an_interrupt_between_operators_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = itertools.chain([False, False, False, True], itertools.repeat(False))
    alone = interpreted._PathRun.alone

    def interrupted(run: Any, position: int, given: tuple[Any, ...]) -> list[Any]:
        if next(interrupts):
            raise KeyboardInterrupt
        return alone(run, position, given)

    def program() -> torch.Tensor:
        return torch.rand(3, device="port") * 2 + 1

    torch.manual_seed(0)
    wanted = [program().tolist() for _ in range(8)]
    monkeypatch.setattr(interpreted._PathRun, "alone", interrupted)
    torch.manual_seed(0)
    said = []
    for _ in range(8):
        made = program()
        try:
            said.append(made.tolist())
        except KeyboardInterrupt:
            said.append(made.tolist())
    assert said == wanted
    assert not any(itertools.islice(interrupts, 3)), "there was no interrupt"


def test_values_go_with_their_last_use() -> None:
    def program() -> torch.Tensor:
        x = torch.ones(1 << 20, device="port")
        for k in range(20):
            x = torch.sin(x) * (0.5 + k)
        return x.sum()

    wanted = program().item()
    for _ in range(4):
        assert program().item() == wanted
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4):
        assert program().item() == wanted
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB; all of them are 160 MiB
