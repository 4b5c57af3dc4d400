"""Losses of training over ranks equal those of one process (``programs/training_program.py`` compares them)."""

from __future__ import annotations

import pytest
from launch_ranks import all_well, run_ranks

EVERY = (
    "ddp",
    "ddp_views",
    "ddp_hook",
    "ddp_accumulated",
    "tensor_parallel",
    "fsdp",
    "pipeline",
    "checkpointed",
)


def test_two_ranks_train_as_one() -> None:
    all_well(run_ranks("training_program.py", "1", "2", "ddp_hook", "tensor_parallel", "fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_ten_steps_of_two_ranks(kind: str) -> None:
    steps = "10"
    all_well(run_ranks("training_program.py", "2", steps, kind, limit=300))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp_views", "fsdp", "tensor_parallel", "two_dimensional"])
def test_ten_steps_of_four_ranks(kind: str) -> None:
    all_well(run_ranks("training_program.py", "2", "10", kind, ranks=4, limit=400))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "xla"])
@pytest.mark.parametrize("kind", ["ddp_views", "fsdp", "tensor_parallel"])
def test_ten_steps_on_compilers(kind: str, backend: str) -> None:
    all_well(run_ranks("training_program.py", "1", "10", kind, backend=backend, limit=400))
