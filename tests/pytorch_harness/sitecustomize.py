"""Python runs this at its start, in every process of ``pytorch_own_distributed.py``: PyTorch's harness takes ``port``.

The harness knows CUDA, XPU, HPU and the CPU by name. Its modules are told of this device when they are imported; the
tests stay as they are. It also wants one device index for each rank, and on ``port`` each process has one device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

import torchport
from torchport.frontend.device.patches import when_imported

RANKS = 4
GROUPS = "cpu:gloo,port:port"
INTERNAL = "torch.testing._internal"


def _always(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _common(module: Any) -> None:
    """As many devices as ranks; tests that ask for several run."""
    module.skip_if_lt_x_gpu = module.require_n_gpus_for_nccl_backend = _always
    module.at_least_x_gpu = lambda _: True


def _fully_sharded(module: Any) -> None:
    module.DEVICE_TYPE, module.DISTRIBUTED_BACKEND, module.DEVICE_COUNT = "port", GROUPS, RANKS


def _tensors(module: Any) -> None:
    module.DEVICE_TYPE, module.DEVICE_COUNT, module.PG_BACKEND = "port", RANKS, GROUPS
    module.TEST_PRIVATEUSE1 = True
    module.DTensorTestBase.backend = property(lambda _: GROUPS)
    module.DTensorContinuousTestBase.backend_str = classmethod(lambda _: GROUPS)


def _c10d(module: Any) -> None:
    """The tests of ``c10d`` make tensors without naming a device: the default one. Their group is for both devices."""
    torch.set_default_device("port")
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _for_both(getattr(torch.distributed, name)))


def _for_both(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = GROUPS
        return original(*args, **kwargs)

    return call


def install() -> None:
    """Watch for the harness's modules."""
    torchport.use(os.environ["TORCHPORT_BACKEND"])
    torch.accelerator.device_count = torch.port.device_count = lambda: RANKS  # type: ignore[attr-defined]
    if os.environ["PYTORCH_OWN_DISTRIBUTED"] == "device":  # the tests of c10d that ask for devices name CUDA
        when_imported(f"{INTERNAL}.common_distributed", _common)
    when_imported(f"{INTERNAL}.common_fsdp", _fully_sharded)
    when_imported(f"{INTERNAL}.distributed._tensor.common_dtensor", _tensors)
    when_imported(f"{INTERNAL}.distributed.distributed_test", _c10d)


if os.environ.get("PYTORCH_OWN_DISTRIBUTED"):
    install()
