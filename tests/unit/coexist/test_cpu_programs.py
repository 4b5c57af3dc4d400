"""Programs for the CPU do the same with torchport as without: values, exceptions, warnings and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROCESS = Path(__file__).with_name("cpu_process.py")

INHERENT = {
    "accelerator_available": "there is an accelerator now",
    "accelerator_name": "the same",
    "accelerator_count": "the same",
    "accelerator_in_c": "the same",
    "accelerator_module": "the same: the module of the accelerator, or of the CPU if there is none",
    "accelerator_synchronized": "without an accelerator it raises",
    "accelerator_memory": "without an accelerator it raises",
    "pinned_memory": "without an accelerator it raises; with this one it is a copy that is noted as pinned",
    "pinned_storage": "the same",
    "pinned_factory": "raises on both sides; PyTorch's words for it know of the device",
    "loader_with_pinned_memory": "PyTorch warns that there is no accelerator to pin for; the batches are the same",
    "loader_with_workers_and_pinned_memory": "the same",
    "capturable_optimizer": "raises on both sides; PyTorch's words list the device's name",
    "stream_objects": "a stream without a device is the accelerator's",
    "profiled": "ProfilerActivity has the device's name; events and tables are the same",
}
if torch.version.cuda and not torch.cuda.is_available():
    INHERENT["flexible_attention"] = "a CUDA build without a GPU takes CUDA where no device is named, and raises"
    INHERENT["logging"] = "conftest.py sets TORCH_LOGS on such a build; PyTorch says so with the time of day"
    del INHERENT["accelerator_memory"]  # such a build answers
"""What has to differ, and why."""

HEAVY = {"compiled", "compiled_over_pinned_queries", "compiled_backends", "compiled_over_a_break",
         "exported", "fake_tensors", "fx_graphs", "nested",
         "custom_operators", "distributed_checkpoint_in_the_background", "scripted", "vmap_and_grad"}  # fmt: skip
"""What takes most of the time; left to the slow test."""


def run(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(PROCESS), *arguments]
    env = {**os.environ, "TORCHPORT_BACKEND": "reference", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def different(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    assert one["did"].keys() == other["did"].keys()
    return {name: (did, other["did"][name]) for name, did in one["did"].items() if did != other["did"][name]}


def names(*, heavy: bool) -> list[str]:
    sys.path.insert(0, str(PROCESS.parent))
    try:
        import cpu_process

        found = list(cpu_process.programs())
    finally:
        sys.path.remove(str(PROCESS.parent))
    return [name for name in found if heavy or name not in HEAVY]


@pytest.mark.slow
def test_programs_for_the_cpu_do_the_same_with_the_package_installed() -> None:
    chosen = names(heavy=False)
    without = run(*chosen, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    installed = run(*chosen)
    assert len(chosen) >= 150
    assert not without["loaded"]
    found = different(without, installed)
    assert {name: pair for name, pair in found.items() if name not in INHERENT} == {}
    assert set(found) == set(INHERENT)
    # None of them has used the device, or imported what only its use needs.
    assert not [name for name in installed["loaded"] if name.endswith((".install", ".shims", ".runtime", ".kernel"))]


@pytest.mark.slow
def test_programs_for_the_cpu_do_the_same_after_the_device_was_used() -> None:
    without = run(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    for arguments in ((), ("used",)):
        found = different(without, run(*arguments))
        assert {name: pair for name, pair in found.items() if name not in INHERENT} == {}, arguments


def test_every_name_of_an_exception_is_a_programs() -> None:
    assert set(INHERENT) | HEAVY <= set(names(heavy=True))
