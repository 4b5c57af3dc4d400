"""Python runs this at its start, in every process of ``pytorch_own_distributed.py``: PyTorch's harness takes ``port``.

The harness knows CUDA, XPU, HPU and the CPU by name. Its modules are imported here and told of this device; the
tests stay as they are. It also wants one device index for each rank, and on ``port`` each process has one device. The
same is done for the CPU, without torchport, for comparison. Ranks are forked where they can be, so that none
imports PyTorch again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

INTERNAL = "torch.testing._internal"
KIND = os.environ.get("PYTORCH_OWN_DISTRIBUTED", "")
DEVICE = os.environ.get("PYTORCH_OWN_DEVICE", "port")
GROUPS = "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:{DEVICE}"
_PARTS = "_fsdp_collectives _fsdp_common _fsdp_init _fsdp_param _fsdp_param_group"
_RULES = "common_rules=_common_rules embedding_ops=_embedding_ops matrix_ops=_matrix_ops utils view_ops=_view_ops"
MOVED = {
    "_composable.fsdp": ("fsdp._fully_shard", _PARTS),
    "_tensor": ("tensor", "debug random=_random _collective_utils _op_schema _redistribute experimental ops=_ops"),
    "_tensor.debug": ("tensor.debug", "comm_mode=_comm_mode _op_coverage"),
    "_tensor.experimental": ("tensor.experimental", "tp_transform=_tp_transform"),
    "_tensor.ops": ("tensor._ops", _RULES),
}
"""Modules of ``torch.distributed`` that older tests name: where they were, where they are, and names, new ones last."""
_had_threads: list[bool] = []
"""Whether ranks have been threads of this process."""
RANKS = int(os.environ.get("WORLD_SIZE", "2"))


def _common(module: Any) -> None:
    """As many devices as ranks: a test that asks for more is skipped, as PyTorch does it."""
    from torch import multiprocessing

    def if_fewer(count: int, **_: Any) -> Callable[[Any], Any]:
        def decorate(test: Any) -> Any:
            @functools.wraps(test)
            def run(*args: Any, **kwargs: Any) -> Any:
                if count <= RANKS:
                    return test(*args, **kwargs)
                skip = module.TEST_SKIPS[f"multi-gpu-{count}"]
                if not module._maybe_handle_skip_if_lt_x_gpu(args, skip.message):
                    sys.exit(skip.exit_code)
                return None

            return run

        return decorate

    def start(self: Any) -> None:
        # Backward passes of ranks that were threads have started autograd's own threads, which no fork has.
        method = "spawn" if _had_threads else "fork"
        self._start_processes(multiprocessing.get_context(method).Process)

    module.skip_if_lt_x_gpu = if_fewer
    module.require_n_gpus_for_nccl_backend = lambda count, _: if_fewer(count)
    module.at_least_x_gpu = lambda count: count <= RANKS
    module.MultiProcessTestCase._spawn_processes = start
    spawn_threads = module.MultiThreadedTestCase._spawn_threads

    def note_threads(self: Any) -> None:
        _had_threads[:] = [True]
        spawn_threads(self)

    module.MultiThreadedTestCase._spawn_threads = note_threads


def _fully_sharded(module: Any) -> None:
    module.DEVICE_TYPE, module.DISTRIBUTED_BACKEND, module.DEVICE_COUNT = DEVICE, GROUPS, RANKS
    module.test_compiled_fsdp = module.compiled_fsdp_test  # its name in PyTorch 2.6


def _tensors(module: Any) -> None:
    module.DEVICE_TYPE, module.DEVICE_COUNT, module.NUM_DEVICES, module.PG_BACKEND = DEVICE, RANKS, RANKS, GROUPS
    module.TEST_PRIVATEUSE1 = DEVICE != "cpu"
    module.DTensorTestMixin.device_type = property(lambda _: DEVICE)
    module.DTensorTestBase.backend = property(lambda _: GROUPS)
    module.DTensorContinuousTestBase.backend_str = classmethod(lambda _: GROUPS)


def _threads(module: Any) -> None:
    """Where ranks are threads of one process, which have one device between them, their group takes its tensors."""
    kind = import_module("torch.distributed").Backend
    if DEVICE not in kind.backend_capability["threaded"]:
        kind.backend_capability["threaded"].append(DEVICE)
    # They have one generator as well: PyTorch's tracker is one for all, and only some of them would wait to agree.
    tracker = import_module("torch.distributed.tensor._random").OffsetBasedRNGTracker
    original = tracker.__init__

    @functools.wraps(original)
    def init(self: Any, mesh: Any, run_state_sync: bool = True) -> None:
        original(self, mesh, run_state_sync and not _had_threads)

    tracker.__init__ = init


def _c10d(module: Any) -> None:
    """The tests of ``c10d`` make tensors without naming a device: the default one. Their group is for both devices."""
    import torch

    torch.set_default_device(DEVICE)
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _for_both(getattr(torch.distributed, name)))


def _for_both(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = GROUPS
        return original(*args, **kwargs)

    return call


def _at_old_names() -> None:
    """Tests of an older release find modules under the names that they had then."""
    at = "torch.distributed."
    for old, (new, names) in MOVED.items():
        for pair in names.split():
            before, _, now = pair.partition("=")
            module = import_module(f"{at}{new}.{now or before}")
            sys.modules[f"{at}{old}.{before}"] = module
            with contextlib.suppress(ImportError):  # ``import a.b.c as c`` asks the package
                setattr(import_module(f"{at}{old}"), before, module)


def install() -> None:
    """Change the harness's modules, each before another takes names from it.

    Tests of parity call CUDA's delay of a stream; the device's stream is the program itself.
    """
    import torch

    if DEVICE == "cpu":
        torch.cpu.device_count = lambda: RANKS
    else:
        import torchport

        torchport.use(os.environ["TORCHPORT_BACKEND"])
        torch.accelerator.device_count = torch.port.device_count = lambda: RANKS  # type: ignore[attr-defined]
        torch.port._sleep = lambda cycles: time.sleep(cycles / 1e9)  # type: ignore[attr-defined]
        import_module(f"{INTERNAL}.common_utils").get_cycles_per_ms = lambda: 1e6  # it measures with CUDA's events
    if KIND == "c10d":  # its tests that ask for devices name CUDA
        _c10d(import_module(f"{INTERNAL}.distributed.distributed_test"))
        return
    _common(import_module(f"{INTERNAL}.common_distributed"))
    _fully_sharded(import_module(f"{INTERNAL}.common_fsdp"))
    _tensors(import_module(f"{INTERNAL}.distributed._tensor.common_dtensor"))
    _threads(import_module(f"{INTERNAL}.distributed.multi_threaded_pg"))
    _at_old_names()
    # For the tests alone, after the harness: one that CUDA's absence would skip has its name replaced by the device's.
    import_module(f"{INTERNAL}.common_cuda").TEST_CUDA = True


if KIND:
    install()
