"""``torchport.shard``: one process, or several, over a mesh of virtual CPU devices, on ``xla``."""

from __future__ import annotations

import pytest
from launch_ranks import all_well, run_ranks

pytest.importorskip("jax", reason="SPMD is XLA's")
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
WAYS = ("data_parallel", "fsdp", "tensor_parallel", "two_dimensional")


def test_placements_and_refusals() -> None:
    all_well(run_ranks("placing_program.py", ranks=1, backend="xla", limit=300, **DEVICES))


@pytest.mark.slow
def test_training_in_two_dimensions() -> None:
    ended = run_ranks("spmd_program.py", "4", "gpt2", "two_dimensional", ranks=1, backend="xla", limit=300, **DEVICES)
    all_well(ended)


@pytest.mark.slow
def test_two_processes_share_a_mesh() -> None:
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    all_well(run_ranks("spmd_program.py", "3", "gpt2", "two_dimensional", backend="xla", limit=300, **four))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_ten_steps(kind: str) -> None:
    all_well(run_ranks("spmd_program.py", "10", kind, *WAYS, ranks=1, backend="xla", limit=900, **DEVICES))
