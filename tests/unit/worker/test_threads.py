"""While a compiler's process is at work, what the program computes leaves it a core."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worker_support import a_trace, wait_until

from torchport.backend.interface import Backend
from torchport.core import threads
from torchport.core.config import config
from torchport.core.threads import FewerThreads, leave_cores
from torchport.worker.service import Service

LONG = 240.0
"""Seconds to wait for a result on a machine that does much else."""

pytestmark = pytest.mark.skipif(not threads.native_arguments()[1], reason="PyTorch's library has no OpenMP here")


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch is set to three threads, on a machine of three cores."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "cores", lambda: 3)
    torch.set_num_threads(3)
    yield
    leave_cores(0)
    torch.set_num_threads(before)


def test_fewer_threads_in_the_block_and_as_many_after_it() -> None:
    for busy, expected in ((0, 3), (1, 2), (2, 1), (7, 1)):
        leave_cores(busy)
        with FewerThreads():
            assert torch.get_num_threads() == expected
            with FewerThreads():
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3


def test_an_error_leaves_as_many_as_before() -> None:
    leave_cores(1)
    with pytest.raises(ValueError, match="of the block"), FewerThreads():
        raise ValueError("of the block")
    assert torch.get_num_threads() == 3


def test_a_thread_that_has_not_computed_yet_keeps_pytorchs_number() -> None:
    """OpenMP would have it begin with the number of cores."""
    torch.set_num_threads(1)
    leave_cores(2)
    found: list[int] = []

    def compute() -> None:
        with FewerThreads():
            torch.ones(1 << 16).add(1)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [1]


def test_not_where_the_program_wants_the_same_bits_each_time() -> None:
    leave_cores(1)
    torch.use_deterministic_algorithms(True)
    try:
        with FewerThreads():
            assert torch.get_num_threads() == 3
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_interpreted_operators_take_fewer() -> None:
    """Python's way and C++'s, which runs an operator from the second time on."""
    seen: list[int] = []

    def digamma(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x.clone()

    library = torch.library.Library("aten", "IMPL")
    library.impl("digamma", digamma, "CPU")
    try:
        leave_cores(1)
        with config.override(tiers="on"):
            for _ in range(4):
                x = torch.ones(3).to("port")
                assert torch.digamma(x).tolist() == [1.0, 1.0, 1.0]
    finally:
        library._destroy()
    assert set(seen) == {2}
    assert torch.get_num_threads() == 3


def test_a_core_is_left_for_as_long_as_a_process_compiles(shared: Service, troubled: Backend, tmp_path: Path) -> None:
    assert threads.most.value == 0
    began = tmp_path / "began"
    ticket = shared.submit(a_trace().request("core", troubled, how="slow", file=str(began), seconds="1"))
    wait_until(began.exists, LONG)
    assert threads.most.value == 2
    child = os.fork()
    if child == 0:
        os._exit(threads.most.value)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ticket.result(LONG)
    wait_until(lambda: threads.most.value == 0, LONG)
