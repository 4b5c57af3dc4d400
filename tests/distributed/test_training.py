"""Losses of training over ranks equal those of one process (``programs/training_program.py`` compares them)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch_ranks import all_well, run_ranks

MODELS = ("gpt2", "llama", "mixtral")
WAYS = ("ddp_views", "fsdp", "simple_fsdp", "tensor_parallel", "two_dimensional", "schedule")
MORE = ("ddp", "ddp_unused", "ddp_static", "ddp_hook", "ddp_power", "ddp_accumulated", "pipeline", "checkpointed")

LAYERS = ("sync_batch_norm", "split_groups", "uneven_inputs", "sharded_optimizer", "own_number", "deferred_weights")
LAYERS += ("default_device", "divided_gradients", "freed_views", "views_of_parts", "fused_rates", "mixed_lists")
LAYERS += ("counted_collectives", "uneven_parts", "one_bucket", "values_beside")


def test_two_ranks_train_as_one() -> None:
    ways = ("ddp_unused", "tensor_parallel", "fsdp", "simple_fsdp", "two_dimensional", "pipeline")
    all_well(run_ranks("training_program.py", "gpt2", "2", "2", *ways))


@pytest.mark.slow
def test_layers_that_know_of_ranks() -> None:
    all_well(run_ranks("layers_program.py", *LAYERS))


def test_a_process_group_that_is_written_in_python() -> None:
    all_well(run_ranks("python_group_program.py", ranks=1))


@pytest.mark.slow
def test_a_model_too_large_for_any_machine_is_rehearsed() -> None:
    """With tiers a first sight of an operator is interpreted; nothing of a rehearsal may be."""
    all_well(run_ranks("rehearsal_program.py", ranks=1, TORCHPORT_TIERS="auto"))


@pytest.mark.slow
def test_parts_on_a_second_device() -> None:
    all_well(run_ranks("second_device_program.py"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_steps(kind: str, ranks: int) -> None:
    all_well(run_ranks("training_program.py", kind, str(ranks), "10", *WAYS, ranks=ranks, limit=600))


@pytest.mark.slow
def test_other_ways_of_two_ranks() -> None:
    all_well(run_ranks("training_program.py", "gpt2", "2", "10", *MORE, limit=600))


@pytest.mark.slow
def test_layers_that_know_of_four_ranks() -> None:
    all_well(run_ranks("layers_program.py", *LAYERS, ranks=4, limit=300))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["xla", "inductor"])
def test_ten_steps_on_compilers(backend: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """Ranks that share a disk cache compile no graph twice between them."""
    cache = {"TORCHPORT_CACHE": "on", "TORCHPORT_CACHE_DIR": str(tmp_path)}
    program = ("training_program.py", kind, str(ranks), "10", *WAYS)
    ended = run_ranks(*program, ranks=ranks, backend=backend, limit=3000, **cache)
    all_well(ended)
    compiled = [int(n) for one in ended for n in re.findall(r"^compiled (\d+)", one.text, re.M)]
    kept = [entry for entry in tmp_path.rglob("*") if entry.name.endswith(".entry")]
    assert sum(compiled) <= len(kept), (compiled, len(kept))
    print(f"{backend} {kind} {ranks}: compiled {compiled}, kept {len(kept)}")
