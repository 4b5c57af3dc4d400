"""Tell PyTorch that ``torch.device("port")`` exists. Runs inside ``import torch``, so it is small and imports little.

Private torch APIs used here: ``torch._register_device_module``,
``torch._C._acc.{PrivateUse1Hooks, DeviceGuard, register_python_privateuseone_hook,
register_python_privateuseone_device_guard}`` (what ``_setup_privateuseone_for_python_backend`` does, less its
dummies), ``torch._C._get_privateuse1_backend_name``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchport_autoload import other_accelerator

from . import (
    accelerator,
    defaults,
    first_factories,
    generators,
    libraries,
    lightning,
    module,
    parameters,
    ready,
    storages,
)
from .names import NAME
from .opaque import opaque

__all__ = ["register_device"]


class _Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined,misc]
    # Autograd asks about five times per op: an iterator's method is a constant without a Python frame.
    type_ = itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__  # type: ignore[attr-defined]


_keep: list[object] = []


def register_device() -> None:
    """Rename PrivateUse1 to ``port`` and register module, hooks and guard; a second call does nothing.

    Raises ``RuntimeError`` if another package has taken PyTorch's one slot for such devices.
    """
    if _keep:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        raise RuntimeError(
            f"PyTorch has one slot for a device of this kind and {taken!r} has taken it; "
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import only one of the packages"
        )
    torch.utils.rename_privateuse1_backend(NAME)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=False)
    torch._register_device_module(NAME, module)
    hooks, guard = _Hooks(), _Guard()
    _keep.extend((hooks, guard))
    torch._C._acc.register_python_privateuseone_hook(hooks)  # type: ignore[attr-defined]
    torch._C._acc.register_python_privateuseone_device_guard(guard)  # type: ignore[attr-defined]
    accelerator.install()
    defaults.install()
    if other_accelerator():
        from . import backward  # on demand: ``import torch`` must stay light

        backward.install(in_use=False)
    _before_the_first_use()


def _before_the_first_use() -> None:
    """Wrap functions that may be running when the device is first used, or that are reached without ``_lazy_init``."""
    parameters.install()
    storages.install()
    generators.install()
    libraries.expect()
    lightning.install()
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    first_factories.expect(ready.init)


@opaque
def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if ready.is_ready():
        from . import shims  # on demand: ``import torch`` must stay light

        shims.before_step(optimizer)


@opaque
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if ready.is_ready():
        from . import shims  # on demand: ``import torch`` must stay light

        shims.after_step()
