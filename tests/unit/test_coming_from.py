"""The page for those who come from other projects: our names are true, and none of theirs is left over."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import torchport
from torchport.dispatch import DispatchKey, Functionality

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if line.startswith("| `") and not line.startswith(("| `torch::", "| `executorch"))
]
THEIRS = [
    "BackendImplInterface",
    "InitializeAtenBindings",
    "PrepareToExit",
    "SetRngSeed",
    "GetIrBuilder",
    "MakeComputationDataFromTensor",
    "MakeComputationDataFromScalar",
    "CreateDataPlaceholder",
    "GetComputationDataFromNode",
    "MakeTensorFromComputationData",
    "CreateLoweringContext",
    "GetCompilationDevices",
    "Compile",
    "ExecuteComputation",
    "GetDefaultDeviceType",
    "SetDefaultDeviceType",
    "GetDefaultDeviceOrdinal",
    "SetDefaultDeviceOrdinal",
    "EagerFallbackDeviceType",
    "GetBackendDevices",
    "CreateMetricReport",
    "GetBackendDevice",
    "GetComputationBackendText",
    "BackendRegistrar",
    "hasBackend",
    "getBackend",
    "getIrBuilder",
    "IrBuilder",
    "BackendData",
    "BackendDataPtr",
    "Info",
    "Handle",
    "shape",
    "info",
    "SetInfo",
    "GetHandle",
    "Assign",
    "HasValue",
    "Computation",
    "ComputationPtr",
    "parameters_size",
    "parameter_shapes",
    "parameter_names",
    "result_shape",
    "LoweringContext",
    "Create",
    "GetParametersData",
    "GetResultShape",
    "AddResult",
    "AddParameter",
    "Build",
    "GetEmittedNodeCount",
    "BackendDevice",
    "BackendDeviceType",
    "Shape",
    "SizedBuffer",
    "CompileSpec",
    "DelegateHandle",
    "PyTorchBackendInterface",
    "is_available",
    "init",
    "execute",
    "destroy",
    "Backend",
    "BackendRegistry",
    "register_backend",
    "get_backend_class",
    "BackendInitContext",
    "BackendExecutionContext",
    "FreeableBuffer",
    "Free",
    "EValue",
    "Error",
    "Result",
    "MemoryAllocator",
    "BackendWithCompiler",
    "backend_with_compiler_demo",
    "compile",
    "parseMethodHandle",
    "TORCH_DELEGATED_BACKEND_THROW",
    "RECORD_BACKEND_EVENT_TO_EDGE_PROFILER",
    "RECORD_BACKEND_MEMORY_EVENT_TO_EDGE_PROFILER",
    "preprocess",
]
"""Types, methods and macros of lazy tensors' backend headers, ExecuTorch's interface and TorchScript's demo backend."""
KEYS = [
    "Undefined",
    "Dense",
    "FPGA",
    "Vulkan",
    "Metal",
    "Quantized",
    "CustomRNGKeyId",
    "MkldnnCPU",
    "Sparse",
    "NestedTensor",
    "BackendSelect",
    "Python",
    "FuncTorchDynamicLayerBackMode",
    "Functionalize",
    "Conjugate",
    "Negative",
    "ZeroTensor",
    "ADInplaceOrView",
    "AutogradOther",
    "AutogradFunctionality",
]


def _has(name: str) -> bool:
    found: object = torchport
    for part in name.split(".")[1:]:
        fields = {one.name for one in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set[str]()
        if part in fields:
            return True
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_none_of_their_names_is_left_over() -> None:
    named = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
    assert set(THEIRS) - named == set()


def test_our_names_are_true() -> None:
    ours = set(re.findall(r"`(torchport(?:\.\w+)+)`", TEXT))
    assert len(ours) > 30
    assert [name for name in sorted(ours) if not name.startswith("torchport.compat") and not _has(name)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0]).strip("-")[:50])
def test_each_has_a_line_of_code(row: list[str]) -> None:
    assert len(row) == 3
    code = re.findall(r"`([^`]+)`", row[2])
    assert code
    for line in code:
        ast.parse(line.replace("return ", ""))


def test_the_keys_are_there() -> None:
    known = {key.name for key in Functionality} | {"Undefined"}
    missing = [key for key in KEYS if key not in known and not hasattr(DispatchKey, key)]
    assert missing == []
