"""Real models lowered whole and over two backends, saved, and run in a process that has no model code."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torchport
from benchmarks.aot_models import Example, build
from torchport import aot
from torchport.aot import LoweredProgram, OpList, Partitioner, Supported, WholeProgram

NAMES = ("minilm", "resnet18", "gpt2", "whisper")
AVAILABLE = {row.name for row in torchport.list_backends() if row.available}
SECOND = "openvino" if "openvino" in AVAILABLE else "matrices"
MATRICES = ["aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.conv2d", "aten.conv1d", "aten.add"]

REGISTER = """
import torchport
from torchport.backends.reference import ReferenceBackend
torchport.registry.register(type("Matrices", (ReferenceBackend,), {"name": "matrices"}))
"""
exec(REGISTER)
"""A second backend for where OpenVINO is not installed."""

RUN = """
import sys, pathlib, numpy
import torchport.runtime as runtime
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pt2")):
    arrays = numpy.load(path.with_suffix(".npz"))
    method = runtime.load(path).load_method()
    (result,) = method(*[arrays[f"input{i}"] for i in range(len(arrays.files) - 1)])
    gap = float(abs(result - arrays["expected"]).max() / max(1.0, float(abs(arrays["expected"]).max())))
    print(path.stem, type(result).__name__, gap)
for name in ("transformers", "torchport.aot", "torchport.frontend.compile", "benchmarks"):
    assert name not in sys.modules, name
print("model code:", sorted(name for name in sys.modules if name.startswith("transformers")))
"""


@functools.cache
def _exported(name: str) -> tuple[Example, torch.export.ExportedProgram, torch.Tensor]:
    example = build(name)
    with torch.no_grad():
        return example, torch.export.export(example.module, example.args), example.module(*example.args)


def _store(folder: Path, label: str, name: str, partitioners: list[Partitioner]) -> LoweredProgram:
    example, exported, expected = _exported(name)
    lowered = aot.lower(exported, partitioners=partitioners)
    torch.testing.assert_close(lowered(*example.args), expected, rtol=1e-3, atol=2e-4)
    lowered.save(folder / f"{name}-{label}.pt2")
    arrays = {f"input{i}": arg.numpy() for i, arg in enumerate(example.args)}
    np.savez(folder / f"{name}-{label}.npz", expected=expected.numpy(), **arrays)
    return lowered


def _run_elsewhere(folder: Path, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REGISTER + RUN, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "model code: []"
    assert len(lines) == count + 1
    for line in lines[:-1]:
        assert float(line.split()[-1]) < 1e-4, line


@pytest.mark.slow
def test_models_lowered_whole_and_over_two_backends_run_without_their_code(tmp_path: Path) -> None:
    for name in NAMES:
        whole = _store(tmp_path, "whole", name, [WholeProgram("reference")])
        assert len(whole.program.meta().delegates) == 1
        assert not whole.program.meta().kernels
        parts = _store(tmp_path, "parts", name, [OpList(SECOND, MATRICES), Supported("reference")])
        assert set(parts.program.backends) == {SECOND, "reference"}, parts.report()
        assert not parts.program.meta().kernels
    _run_elsewhere(tmp_path, 2 * len(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", sorted(AVAILABLE & {"inductor", "openvino", "executorch", "xla"}))
def test_models_on_engines(name: str, engine: str, tmp_path: Path) -> None:
    lowered = _store(tmp_path, engine, name, [Supported(engine)])
    assert lowered.program.meta().uses_backend(engine)
    if engine == "inductor":
        assert not lowered.left["forward"], lowered.report()
        _store(
            tmp_path,
            "parts",
            name,
            [OpList("inductor", ["aten.linear", "aten.conv2d", "aten.addmm"]), Supported("reference")],
        )
    _run_elsewhere(tmp_path, 2 if engine == "inductor" else 1)
