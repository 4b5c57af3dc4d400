"""Collectives on tensors of the device do what gloo does on tensors of the CPU."""

from __future__ import annotations

import pytest
from launch_ranks import all_well, run_ranks


def test_random_programs_of_two_ranks_agree_with_gloo(commit_seed: str) -> None:
    all_well(run_ranks("../collective_fuzz.py", commit_seed, "25"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_random_programs_of_four_ranks_agree_with_gloo(commit_seed: str, backend: str) -> None:
    all_well(run_ranks("../collective_fuzz.py", commit_seed, "60", "1000000", ranks=4, backend=backend, limit=400))


@pytest.mark.slow
def test_collectives_are_listed_with_bytes_and_lines() -> None:
    """Bytes per step are those of textbooks: DDP reduces each gradient once, FSDP gathers weights and scatters once."""
    all_well(run_ranks("traffic_program.py"))
