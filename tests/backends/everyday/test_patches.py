"""What torchport changes of PyTorch's is in the table, and what is in the table is changed; found by looking."""

from __future__ import annotations

import fnmatch
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchport.frontend.device import patches
from torchport.frontend.device.patches import ADDITIONS, PATCHES, WHILE_COMPILING, replace, replaced

SCAN = Path(__file__).parents[1] / "support" / "patch_scan.py"
USES = """
import torch, torchport
torchport.use("reference")
x = torch.ones(3, 3, device="port", requires_grad=True)
(x @ x).sum().backward()
str(x)
"""
_FUNCTION = re.compile(r"function [^\s',)\]]*:\d+")


def _scanned(program: str, modules: list[str], autoload: str = "1") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCAN), program, json.dumps(modules)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def used() -> dict[str, Any]:
    """What PyTorch is made of in a process that uses the device."""
    return _scanned(USES, [])


@pytest.fixture(scope="module")
def plain(used: dict[str, Any]) -> dict[str, str]:
    """The same without torchport, with the same modules imported."""
    return _scanned("import torch", used["modules"], autoload="0")["found"]


def _home(target: str) -> str:
    """The path of a row's target as the scan gives it: under the module that a class comes from."""
    path, _, name = target.rpartition(".")
    if not path.startswith("torch.") or name == "*":
        return target
    try:
        owner = patches._find(path)
    except AttributeError:
        return target
    return f"{owner.__module__}.{owner.__qualname__}.{name}" if isinstance(owner, type) else target


LISTED = [_home(target) for target in (*PATCHES, *ADDITIONS)]


def _differing(plain: dict[str, str], used: dict[str, str]) -> dict[str, str]:
    return {
        path: text
        for path, text in used.items()
        if plain.get(path) != text and not path.endswith("__warningregistry__")
    }


def _is_listed(path: str) -> bool:
    return any(fnmatch.fnmatchcase(path, target) for target in LISTED)


def _unlisted(plain: dict[str, str], used: dict[str, str]) -> list[str]:
    """What is neither in the table nor another name of what is, such as an imported function."""
    differing = _differing(plain, used)
    known = {one for path, text in differing.items() if _is_listed(path) for one in _FUNCTION.findall(text)}
    return [
        path
        for path, text in differing.items()
        if not _is_listed(path) and not (set(_FUNCTION.findall(text)) or {text}) <= known
    ]


def test_every_changed_object_is_in_the_table(plain: dict[str, str], used: dict[str, Any]) -> None:
    assert len(plain) > 50_000
    assert _unlisted(plain, used["found"]) == []


def test_what_the_table_says_of_the_first_use_is_so(plain: dict[str, str], used: dict[str, Any]) -> None:
    differing = _differing(plain, used["found"])
    expected = {_home(target) for target, row in PATCHES.items() if row[2] in ("import torch", "first use")}
    assert expected - differing.keys() == set()


def test_a_change_that_the_table_lacks_is_found(plain: dict[str, str], used: dict[str, Any]) -> None:
    changed = (
        USES
        + """
from torchport.frontend.device.opaque import opaque
torch.Tensor.tolist = opaque
torch.nn.functional.relu = opaque
"""
    )
    found = _scanned(changed, [])["found"]
    assert _unlisted(plain, found) == ["torch.Tensor.tolist", "torch.nn.functional.relu"]


def test_what_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(KeyError, match=r"Tensor\.tolist"):
        replace("torch.Tensor.tolist", None)
    torch.ones(1, device="port")
    with pytest.raises(RuntimeError, match="pin_memory is replaced twice"):
        replace("torch.Tensor.pin_memory", None)
    assert torch.Tensor.pin_memory is not None


def test_what_is_changed_while_a_graph_is_compiled_is_as_before_afterwards() -> None:
    for target in WHILE_COMPILING:
        path, _, name = target.rpartition(".")
        importlib.import_module(path.removesuffix(".FunctionalTensorMode"))
        owner, new = patches._find(path), object()
        before = vars(owner)[name]
        with pytest.raises(ZeroDivisionError), replaced(target, new):
            assert vars(owner)[name] is new
            raise ZeroDivisionError
        assert vars(owner)[name] is before


def test_what_is_not_in_the_table_is_not_changed_while_a_graph_is_compiled() -> None:
    with pytest.raises(KeyError), replaced("torch.Tensor.tolist", None):
        pass


def test_no_other_module_changes_objects_of_pytorch_for_a_while() -> None:
    sources = Path(patches.__file__).parents[2]
    mocks = re.compile(r"^(from|import) unittest|mock\.patch|patch\.object", re.MULTILINE)
    found = (path for path in sources.rglob("*.py") if mocks.search(path.read_text(encoding="utf-8")))
    assert [str(path.relative_to(sources)) for path in found] == ["testing/judge.py"]  # the conformance kit's own runs


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_pytorch_names_the_hosts_kernel_for_a_convolution(dilation: int, transposed: bool, contiguous: bool) -> None:
    def selected(device: str, batch: int) -> Any:
        x = torch.ones(batch, 4, 9, 9 if contiguous else 18, device=device)
        x = (x if contiguous else x[..., ::2]).requires_grad_()
        rest = (torch.ones(4, 4, 3, 3, device=device), None, (1, 1), (0, 0), (dilation,) * 2, transposed, (0, 0), 1)
        return int(torch._C._select_conv_backend(x, *rest))

    assert [selected("port", batch) for batch in (0, 1, 2)] == [selected("cpu", batch) for batch in (0, 1, 2)]
