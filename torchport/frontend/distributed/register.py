"""Tell ``torch.distributed`` that there is a backend for the device. Runs inside ``import torch`` and imports little.

Private torch APIs used here: ``torch.distributed.Backend._plugins``,
``torch.distributed.rendezvous._create_c10d_store``, ``_torchelastic_use_agent_store`` of the same module,
``torch.distributed.distributed_c10d.BackendConfig``,
``torch.distributed.fsdp._fully_shard._fsdp_init.init_device_mesh``, ``torch._C._get_accelerator``,
``torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors``.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import torch

from ..device.names import NAME, device_of
from ..device.patches import replace, when_imported
from ..device.ready import at_first_use, is_ready

__all__ = ["register_process_group"]


def register_process_group() -> None:
    """Register the backend ``port`` once ``torch.distributed`` is imported, if PyTorch has it at all."""
    if torch.distributed.is_available():
        when_imported("torch.distributed.rendezvous", _restarts)
        when_imported("torch.distributed.distributed_c10d", _process_groups)
        when_imported("torch.testing._internal.distributed.fake_pg", _rehearsals)
        when_imported("torch.distributed.fsdp._fully_shard._fsdp_init", _sharded_modules)
        when_imported("torch.distributed.fsdp._fully_shard._fsdp_param", _sharded_parameters)
        when_imported("torch.distributed.fsdp._fully_shard._fsdp_collectives", _sharded_gradients)
        at_first_use.append(_sharded_copies)


def _create(options: Any, backend_options: Any) -> Any:
    return _room().create(options)


def _room() -> Any:
    from . import backend  # on demand: ``import torch`` must stay light

    return backend


def _process_groups(module: Any) -> None:
    """``init_process_group()`` without a backend makes one for tensors of the device, and gloo's for those of the CPU.

    PyTorch would make one for the accelerator alone. Objects and checkpoints travel as tensors of the CPU.
    """
    kind, backend_type = module.BackendConfig, module.Backend
    backend_type.register_backend(NAME, _create, extended_api=True, devices=["cpu", NAME])
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, backend: Any) -> None:
        if str(backend) == backend_type.UNDEFINED and torch._C._get_accelerator().type == NAME:
            backend = f"cpu:{backend_type.default_device_backend_map['cpu']},{NAME}:{NAME}"
        original(self, backend)
        if NAME in self.device_backend_map:  # whoever has written the group
            _room().install()

    replace("torch.distributed.distributed_c10d.BackendConfig.__init__", init)


def _restarts(module: Any) -> None:
    """Processes that ``torchrun`` starts again have keys of their own in the agent's store.

    Those of the ranks that have ended are still there: gloo would connect to where they listened, if it comes first.
    With several agents PyTorch does not tell a number that all processes of a try have in common.
    """
    original = module._create_c10d_store

    @functools.wraps(original)
    def create_store(*args: Any, **kwargs: Any) -> Any:
        store = original(*args, **kwargs)
        tries = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if tries == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1" or not module._torchelastic_use_agent_store():
            return store
        return torch.distributed.PrefixStore(f"restart {tries}", store)

    replace("torch.distributed.rendezvous._create_c10d_store", create_store)


def _rehearsals(module: Any) -> None:
    """PyTorch's fake process group takes tensors of the device: what they would exchange is noted."""
    kind = torch.distributed.Backend
    plugin = kind._plugins[kind.FAKE.upper()]

    def create_fake(*args: Any) -> Any:
        _room().rehearse(_rehearses)
        return plugin.creator_fn(*args)

    kind._plugins[kind.FAKE.upper()] = plugin._replace(creator_fn=create_fake)
    kind.backend_capability[kind.FAKE].append(NAME)


def _rehearses() -> bool:
    return torch.distributed.is_initialized() and f"{NAME}:fake" in torch.distributed.get_backend_config()


def _sharded_modules(module: Any) -> None:
    """``fully_shard`` without a mesh spreads over CPUs, unless the device was used and the group takes its tensors."""
    original = module.init_device_mesh

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        elsewhere = device_type == NAME and not (is_ready() and _carries_ours())
        return original("cpu" if elsewhere else device_type, *args, **kwargs)

    replace("torch.distributed.fsdp._fully_shard._fsdp_init.init_device_mesh", init_device_mesh)


def _carries_ours() -> bool:
    """Whether the default process group takes tensors of the device, or there is none yet: it will then."""
    if not torch.distributed.is_initialized():
        return True
    return f"{NAME}:" in torch.distributed.get_backend_config()  # such as "cpu:gloo,port:port"


def _sharded_gradients(module: Any) -> None:
    """``set_gradient_divide_factor`` divides by itself: no kernel is told the factor of ``ReduceOp.PREMUL_SUM``."""
    original = module._get_gradient_divide_factors

    @functools.wraps(original)
    def factors(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        if given.arguments.get("device_type") == NAME and given.arguments.get("factor") is not None:
            given.arguments["force_sum_reduction_for_comms"] = True
        return original(*given.args, **given.kwargs)

    replace("torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors", factors)


def _sharded_copies() -> None:
    """Take the operators that ``fully_shard`` copies with; it may be given process groups of anybody's."""
    when_imported(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives", lambda module: _room().sharding.install(module)
    )


def _sharded_parameters(module: Any) -> None:
    """``fully_shard`` frees gathered parameters by resizing storages, and asks whether two tensors share one."""
    alloc, free, reset = module.alloc_storage, module.free_storage, module.FSDPParam.reset_sharded_param

    @functools.wraps(alloc)
    def alloc_storage(tensor: torch.Tensor) -> None:
        if device_of(tensor).type != NAME:
            return alloc(tensor)
        return _room().sharding.make_again(tensor)

    @functools.wraps(free)
    def free_storage(tensor: torch.Tensor) -> None:
        if device_of(tensor).type != NAME:
            return free(tensor)
        return _room().sharding.free(tensor)

    @functools.wraps(reset)
    def reset_sharded_param(self: Any) -> None:
        if device_of(self._sharded_param_data).type != NAME:
            return reset(self)
        # It asks whether the data that it holds and the parameter's share memory. What is held is never the newer.
        held, self._sharded_param_data = self._sharded_param_data, None
        try:
            return reset(self)
        finally:
            if self._sharded_param_data is None:
                self._sharded_param_data = held

    name = "torch.distributed.fsdp._fully_shard._fsdp_param"
    replace(f"{name}.alloc_storage", alloc_storage)
    replace(f"{name}.free_storage", free_storage)
    replace(f"{name}.FSDPParam.reset_sharded_param", reset_sharded_param)
