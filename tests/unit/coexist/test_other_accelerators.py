"""Where PyTorch has another accelerator: what ``import torch`` registers, and what programs can still do.

Machines with one are rare among those that run tests; here functions say that there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from torchport.frontend.device import copies

WITH_A_GPU = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
import torchport_autoload
torch.backends.cuda.is_built = lambda: True
torchport_autoload._has_gpu = lambda: True
"""
"""What follows is what ``import torch`` would call at its end, on a machine with a GPU."""


def python(code: str, **environment: str) -> str:
    surroundings = {name: value for name, value in os.environ.items() if name != "TORCHPORT_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITH_A_GPU + code],
        capture_output=True, text=True, check=False, env={**surroundings, **environment}, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_that_does_not_name_torchport_keeps_its_accelerator() -> None:
    """PyTorch's engine cannot run backward on it once the device is registered."""
    shown = python(
        "torchport_autoload.autoload()\n"
        "print(torchport_autoload.stood_back, hasattr(torch, 'port'), 'torchport' in sys.modules)\n"
        "print(torch._C._get_privateuse1_backend_name())"
    )
    assert shown.split() == ["cuda", "False", "False", "privateuseone"]


@pytest.mark.parametrize(
    ("before", "after"), [("", "import torchport"), ("import torchport", ""), ("", "import torchport.runtime")]
)
def test_a_program_that_imports_torchport_gets_the_device(before: str, after: str) -> None:
    shown = python(
        f"{before}\ntorchport_autoload.autoload()\n{after}\nprint((torch.ones(2, device='port') + 1).tolist())"
    )
    assert shown == "[2.0, 2.0]\n"


def test_so_does_one_whose_environment_names_a_backend() -> None:
    code = "torchport_autoload.autoload()\nprint(torch.ones(2, device='port').tolist(), torch.port.get_device_name())"
    assert python(code, TORCHPORT_BACKEND="reference") == "[1.0, 1.0] reference on cpu:0\n"


def test_what_cannot_be_asked_for_is_no_accelerator() -> None:
    code = """
def broken(): raise OSError("the driver is broken")
torchport_autoload._has_gpu = broken
torchport_autoload.autoload()
print(hasattr(torch, "port"))
"""
    assert python(code) == "True\n"


def test_backward_on_the_other_accelerator_says_why_it_fails() -> None:
    """Before the device's first use and after it; other errors stay what they are."""
    code = """
import torch.autograd.graph
message = ""
plain = torch.autograd.graph._engine_run_backward
def engine(*args, **kwargs):
    if message:
        raise RuntimeError(message)
    return plain(*args, **kwargs)
torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = engine
torchport_autoload.autoload()
import torchport
torchport.use("reference")
for device in ("cpu", "port"):
    for message in ("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED", "another one", ""):
        x = torch.ones(2, device=device, requires_grad=True)
        try:
            x.sum().backward()
        except RuntimeError as error:
            print(type(error).__name__, str(error).split(";")[0], "|", error.__cause__)
        else:
            print(x.grad.tolist())
"""
    why = (
        "DeviceMismatch PyTorch cannot run backward on another accelerator in a process where the device port is "
        "registered (PyTorch issue 161129) | opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED"
    )
    assert python(code).splitlines() == [why, "RuntimeError another one | None", "[1.0, 1.0]"] * 2


def test_doctor_tells_of_the_other_accelerator() -> None:
    code = "from torchport.debug.doctor import report\nprint(report())"
    assert "PyTorch cannot run backward on cuda in a process where it is registered" in " ".join(python(code).split())


def test_a_tensor_of_another_accelerator_comes_by_way_of_the_cpu() -> None:
    class OnAGpu:
        is_cpu = False

        def to(self, *args: Any) -> Any:
            return args

    there: Any = OnAGpu()
    assert copies._private_copy(there, torch.bfloat16) == ("cpu", torch.bfloat16)
    assert copies._private_copy(there, None) == ("cpu", None)
