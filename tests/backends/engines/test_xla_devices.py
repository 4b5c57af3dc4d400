"""The ``xla`` backend on several devices: meshes, and how inputs are split over them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers_graphs import normal_form
from torch import fx

from torchport.backend.interface import ExecutionContext, FreeableBuffer, InitContext
from torchport.backends.xla import XlaBackend
from torchport.core.errors import CompileError, ConfigError
from torchport.core.specs import CompileSpecs

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())


def _computed(graph: fx.GraphModule, args: Sequence[torch.Tensor], specs: CompileSpecs) -> torch.Tensor:
    device = backend.devices()[0]
    processed = backend.preprocess(graph, specs)
    handle = backend.init(FreeableBuffer(processed.data), specs, InitContext(device))
    given = [backend.to_device(arg.clone(), device) for arg in args]
    return backend.from_device(backend.execute(handle, given, ExecutionContext(device))[0])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"mesh": "{"}, "not JSON"),
        ({"mesh": "[1]"}, '"mesh" must be like'),
        ({"mesh": '{"axes": ["a", "b"], "shape": [2]}'}, "as many names as sizes"),
        ({"mesh": '{"axes": ["a", "a"], "shape": [2, 1]}'}, "different strings"),
        ({"mesh": '{"axes": ["a"], "shape": [0]}'}, "whole numbers above 0"),
        ({"input_shardings": "[null]"}, 'needs "mesh"'),
        ({"mesh": '{"axes": ["a"], "shape": [4]}', "input_shardings": "[]"}, "a JSON list of 1 entries"),
        ({"mesh": '{"axes": ["a"], "shape": [4]}', "input_shardings": '[["b"]]'}, "names 'b'; the mesh has: a"),
        ({"mesh": '{"axes": ["a"], "shape": [3]}', "input_shardings": '[["a"]]'}, "8 into 3 parts"),
        ({"mesh": '{"axes": ["a"], "shape": [2]}', "input_shardings": '[["a", "a"]]'}, "uses a mesh axis twice"),
        ({"mesh": '{"axes": ["a"], "shape": [2]}', "input_shardings": '[["a", "a", null]]'}, "at most 2 entries"),
        ({"mesh": '{"axes": ["a"], "shape": [4096]}'}, "the mesh has 4096 devices, but JAX has"),
    ],
)
def test_meshes_and_shardings_are_checked(specs: dict[str, str], message: str) -> None:
    graph, _ = normal_form(lambda x: x + 1, [torch.rand(8, 8)])
    with pytest.raises((ConfigError, CompileError), match=message):
        backend.preprocess(graph, CompileSpecs(specs))


def test_a_mesh_of_one_device_is_no_mesh() -> None:
    graph, args = normal_form(lambda x: x + 1, [torch.rand(8, 8)])
    specs = CompileSpecs({"mesh": '{"axes": ["data"], "shape": [1]}', "input_shardings": '[["data", null]]'})
    torch.testing.assert_close(_computed(graph, args, specs), args[0] + 1)


def test_inputs_are_split_over_four_devices() -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from helpers_graphs import normal_form
from torchport.backend.interface import *
from torchport.backends.xla import XlaBackend, container
from torchport.core.specs import CompileSpecs
backend = XlaBackend()
assert len(backend.devices()) == 4
x, w = torch.randn(8, 6), torch.randn(6, 12)
graph, args = normal_form(lambda x, w: (x @ w, (x @ w).sum(0)), [x, w])
specs = CompileSpecs({
    "mesh": '{"axes": ["data", "model"], "shape": [2, 2]}', "input_shardings": '[["data"], [null, "model"]]'})
processed = backend.preprocess(graph, specs)
print(container.decode(processed.data).placement)
for ordinal in (0, 2):
    device = BackendDevice("cpu", ordinal)
    handle = backend.init(FreeableBuffer(processed.data), specs, InitContext(device))
    product, total = backend.execute(handle, [backend.to_device(t, device) for t in args], ExecutionContext(device))
    print(len(product.handle.devices()), product.handle.sharding.shard_shape((8, 12)))
    torch.testing.assert_close(backend.from_device(product), x @ w)
    torch.testing.assert_close(backend.from_device(total), (x @ w).sum(0))
plain = backend.preprocess(graph, CompileSpecs())
device = BackendDevice("cpu", 3)
handle = backend.init(FreeableBuffer(plain.data), CompileSpecs(), InitContext(device))
product, _ = backend.execute(handle, [backend.to_device(t, device) for t in args], ExecutionContext(device))
print(product.handle.devices())
torch.testing.assert_close(backend.from_device(product), x @ w)
few, args = normal_form(lambda x: (x + 1, x), [torch.ones(3, dtype=torch.float64)])
handle = backend.init(FreeableBuffer(backend.preprocess(few, CompileSpecs()).data), CompileSpecs(), InitContext(device))
one, two = backend.execute(handle, [backend.to_device(t, device) for t in args], ExecutionContext(device))
print(one.handle.devices(), one.handle.dtype, backend.from_device(one).tolist(), backend.from_device(two).tolist())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "ignore", "-c", program, tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    assert lines[0].startswith(
        "{'mesh': {'axes': ['data', 'model'], 'shape': [2, 2]}, 'inputs': [[['data']], [[], ['model']]]}"
    )
    assert lines[1:3] == ["4 (4, 6)"] * 2
    assert lines[3] == "{CpuDevice(id=3)}"
    assert lines[4] == "{CpuDevice(id=3)} float64 [2.0, 2.0, 2.0] [1.0, 1.0, 1.0]"
