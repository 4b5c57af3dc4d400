"""Tensors without elements from the host, which libraries begin their caches with, and factories of a known path."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from native_support import COMPILER, compiles, said_without_and_with

import torchport
from torchport import native
from torchport.trace.threads import threads


@pytest.fixture(params=["python", pytest.param("native", marks=compiles)])
def form(request: pytest.FixtureRequest) -> str:
    """The native form is in use from then on; Python's form is a process of its own at the end of this file."""
    torchport.use("reference")
    torch.ones(1, device="port")
    if request.param == "native":
        native.build_all([str(COMPILER)])
        assert native.follow.load() is not None, "it was not built: see the log"
    return request.param


def _empty(**options: Any) -> torch.Tensor:
    return torch.tensor([], device="port", **options)


def test_they_are_one_leaf(form: str) -> None:
    x = torch.ones(2, 3, device="port")
    torchport.sync()
    rows = [torch.cat([_empty(), x[0] * k]) for k in range(6)]
    assert len(threads.of(0).leaves) <= 2
    assert [row.tolist() for row in rows] == [[float(k)] * 3 for k in range(6)]


def test_each_is_a_tensor_of_its_own(form: str) -> None:
    first, second, third = _empty(), _empty(), _empty(dtype=torch.int64, requires_grad=False)
    assert third.dtype is torch.int64
    assert not torch._C._is_alias_of(first, second)  # type: ignore[attr-defined]
    first.requires_grad_()
    assert not second.requires_grad
    second.add_(1)
    second = torch.cat([second, torch.ones(2, device="port")])
    assert (first.shape, second.tolist(), third.tolist()) == ((0,), [1.0, 1.0], [])
    (first * 2).sum().backward()
    assert first.grad is not None
    assert first.grad.shape == (0,)
    torchport.donate(_empty())
    assert _empty().tolist() == []


def test_other_shapes_and_copies(form: str) -> None:
    for shape in ((0, 3), (2, 0), (0,)):
        host = torch.empty(shape, dtype=torch.float64)
        there = host.to("port", torch.float32)
        assert there.shape == shape
        assert there.dtype is torch.float32
        assert there.cpu().shape == shape
    strided = torch.empty(0, 4)[:, 0]
    assert strided.to("port").stride() == strided.stride()


def test_under_modes_and_in_threads(form: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert type(torch.tensor([], device="port")).__name__ == "FakeTensor"
    with torch.inference_mode():
        assert torch.cat([_empty(), torch.ones(1, device="port")]).tolist() == [1.0]
    assert torch.cat([_empty(), torch.ones(1, device="port")]).tolist() == [1.0]
    found: list[Any] = []

    def work() -> None:
        made = [_empty() for _ in range(4)]
        found.append(torch.cat([*made, torch.ones(1, device="port")]).tolist())

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert found == [[1.0]]


def test_another_backend_has_its_own(form: str) -> None:
    from torchport.backend.registry import registry

    kept = _empty()
    torchport.use(next(name for name in ("xla", "openvino", "reference") if registry.get(name).is_available()))
    made = _empty()
    assert torch.cat([kept, made, torch.ones(2, device="port")]).tolist() == [1.0, 1.0]
    torchport.use("reference")
    assert torch.cat([made, kept, torch.ones(2, device="port")]).tolist() == [1.0, 1.0]


@compiles
def test_factories_of_a_known_path_need_no_python() -> None:
    torchport.use("reference")
    torch.ones(1, device="port")
    native.build_all([str(COMPILER)])
    library = native.follow.load()
    assert library is not None

    def step(n: int) -> list[Any]:
        x, y = torch.zeros(3, device="port"), torch.full((3,), 2.5, device="port")
        x[1] = n
        kept = torch.arange(3, device="port")
        return [x.tolist(), (x + y).tolist(), kept.tolist(), torch.ones(3, device="port", dtype=torch.int32).tolist()]

    expected = [[[0.0, n, 0.0], [2.5, n + 2.5, 2.5], [0, 1, 2], [1, 1, 1]] for n in range(6)]
    with torchport.config.override(tiers="off"):
        assert [step(n) for n in range(4)] == expected[:4]
        before = library.torchport_followed()
        assert [step(n) for n in range(4, 6)] == expected[4:]
    assert library.torchport_followed() - before >= 2 * 4


@compiles
def test_a_factory_gives_a_new_tensor_each_time() -> None:
    """Those of former steps are held, and written to."""
    torchport.use("reference")
    with torchport.config.override(tiers="off"):
        held: list[torch.Tensor] = []
        for n in range(6):
            held.append(torch.zeros(2, device="port"))
            held[-1] += n
            torchport.sync()
        pending = [torch.zeros(2, device="port") for _ in range(3)]
        pending[1] += 1
    assert [one.tolist() for one in held] == [[float(n)] * 2 for n in range(6)]
    assert [one.tolist() for one in pending] == [[0.0] * 2, [1.0] * 2, [0.0] * 2]


PROGRAM = """
import torch, torchport
torchport.use("reference")
torchport.config.tiers = "off"
for step in range(4):
    rows = [torch.cat([torch.tensor([], device="port"), torch.full((2,), float(k + step), device="port")])
            for k in range(3)]
    print([row.tolist() for row in rows])
    x = torch.arange(3, device="port")
    x[0] = step
    print(x.tolist(), torch.ones(2, dtype=torch.int8, device="port").dtype)
print(torchport.metrics.counter("UncachedCompile"))
"""


@pytest.mark.slow
@compiles
def test_python_alone_says_the_same() -> None:
    without, with_ = said_without_and_with(PROGRAM)
    assert without == with_
