"""Numbers of a program, which a compiled computation gets packed in one value: kept from run to run while they stay."""

from __future__ import annotations

import threading

import pytest
import torch
from everyday_support import needs_counters

import torchport
from torchport.run import jobs

pytestmark = [needs_counters, pytest.mark.everywhere]


def _step(x: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    """Each number is an input of its own, and shows in the result with its sign, zeros too."""
    for number in numbers:
        x = torch.copysign(x + 1.5, torch.ones_like(x) * number) + number * 3
    return x


SERIES = [
    [2.5, 0.25, 3.5],
    [2.5, 0.25, 3.5],
    [2.5, 0.25, -3.5],
    [2.5, 0.0, -3.5],
    [2.5, -0.0, -3.5],
    [2.5, 0.0, -3.5],
    [2.5, 0.25, 3.5],
]


def _expected(dtype: torch.dtype, numbers: list[float]) -> torch.Tensor:
    return _step(torch.arange(4, dtype=dtype), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_has_its_own_numbers(backend: str, dtype: torch.dtype) -> None:
    x = torch.arange(4, dtype=dtype).to("port")
    with torchport.config.override(tiers="off"):
        for _ in range(2):
            for numbers in SERIES:
                made, wanted = _step(x, numbers).cpu(), _expected(dtype, numbers)
                torch.testing.assert_close(made, wanted)
                assert torch.equal(made.signbit(), wanted.signbit()), numbers


def test_results_of_earlier_runs_keep_their_numbers(backend: str) -> None:
    x = torch.arange(4.0).to("port")
    with torchport.config.override(tiers="off"):
        made = []
        for numbers in SERIES:
            made.append(_step(x, numbers))
            torchport.sync(wait=False)
        for result, numbers in zip(made, SERIES, strict=True):
            torch.testing.assert_close(result.cpu(), _expected(torch.float32, numbers))


def _uploads_of_three_more(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What a backend is given in three runs with the numbers of the three before, and from then on; and the input."""
    of = type(torchport.get_backend(name))
    uploads: list[torch.Tensor] = []
    original = of.to_device
    monkeypatch.setattr(of, "to_device", lambda self, *args: (uploads.append(args[0]), original(self, *args))[1])
    x = torch.arange(4.0).to("port")
    for step in range(6):
        if step == 3:
            uploads.clear()
        torch.testing.assert_close(_step(x, SERIES[0]).cpu(), _expected(torch.float32, SERIES[0]))
    return uploads, x


def test_numbers_that_stay_are_packed_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torchport.config.override(tiers="off"):
        uploads, x = _uploads_of_three_more(backend, monkeypatch)
        assert not uploads
        _step(x, SERIES[2]).cpu()
        assert len(uploads) == 1


def test_nothing_is_kept_where_values_lie_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh's computation puts its arguments on the mesh; the next one may be another's."""
    torchport.use("reference")
    monkeypatch.setattr(jobs, "is_partitioned", lambda backend: True)
    with torchport.config.override(tiers="off"):
        uploads, _ = _uploads_of_three_more("reference", monkeypatch)
        assert len(uploads) == 3


def test_each_thread_has_its_own_numbers(backend: str) -> None:
    wrong: list[object] = []

    def work(sign: float) -> None:
        x = torch.arange(4.0).to("port")
        for at in range(30):
            numbers = [sign * (at // 3 + 0.5), sign * 2.5]
            made, wanted = _step(x, numbers).cpu(), _expected(torch.float32, numbers)
            if not torch.allclose(made, wanted):
                wrong.append((numbers, made, wanted))

    with torchport.config.override(tiers="off"):
        threads = [threading.Thread(target=work, args=(sign,)) for sign in (1.0, -1.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
