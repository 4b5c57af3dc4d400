"""Where PyTorch's Python code assumes memory behind a tensor, or knows devices by name: one contained shim each.

Private torch APIs touched here, each wrapped for ``port`` tensors only and left alone for all others:
``torch._C._has_storage``, ``torch._tensor_str._str_intern``, ``torch.Tensor._reduce_ex_internal``,
``torch._C._select_conv_backend``, ``torch._C.{_set_default_dtype, _set_default_tensor_type}``, and storage methods of
``torch.Tensor``.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2
from torch.utils._pytree import tree_leaves, tree_map

from ...core.default_state import default_state
from ...native.twins import twins
from ...run.device_runtime import runtimes
from ...run.step_closures import step_ended
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.threads import flush_mine
from ...trace.wrapping import unwrap, wrap
from . import backward, memory
from .names import device_of
from .opaque import opaque
from .patches import replace
from .places import holders_of_storage
from .storages import HostStorage

__all__ = ["TorchWithoutWrapping", "install"]


def _is_port(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and device_of(value).type == DEVICE_TYPE


def install() -> None:
    """Apply every shim, each once: the device may be made ready again after it failed.

    Shims act on tensors of the device, of which there are none before first use. Functions that may be running at first
    use, such as ``Module.to``, are wrapped inside ``import torch`` (``register.py``).
    """
    _storage_free_copies()
    _print_from_host()
    _pickle_as_storages()
    memory.install()
    _checkpoint_on_any_index()
    _kernels_of_convolutions()
    _trace_anew_for_another_default_dtype()
    backward.install(in_use=True)


@functools.cache
def _storage_free_copies() -> None:
    """``deepcopy`` and pickling take PyTorch's path for devices without storages instead of cloning one."""
    has_storage = torch._C._has_storage

    def has(tensor: torch.Tensor) -> bool:
        return device_of(tensor).type != DEVICE_TYPE and has_storage(tensor)

    replace("torch._C._has_storage", has)


class TorchWithoutWrapping:
    """``torch`` for a copied function that is not to see functionalization wrappers, which all tensors here are."""

    @staticmethod
    def _is_functional_tensor(tensor: torch.Tensor) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def _print_from_host() -> None:
    """Format a tensor from a host copy: formatting reads many small values, each a computation of its own otherwise.

    Tensors of this device are formatted by a copy of PyTorch's function that sees other globals; all others as before.
    """
    import torch._tensor_str as module
    from torch._C._functorch import is_functorch_wrapped_tensor

    original = module._str_intern

    def tensor_str(self: torch.Tensor, indent: int) -> str:
        return module._tensor_str(self.cpu(), indent)

    names = {**vars(module), "torch": TorchWithoutWrapping(), "_tensor_str": tensor_str}
    ours: Any = types.FunctionType(original.__code__, names, original.__name__)
    ours.__kwdefaults__ = original.__kwdefaults__

    @functools.wraps(original)
    def str_intern(inp: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if _is_port(inp) and not is_functorch_wrapped_tensor(inp):
            return ours(inp, tensor_contents=tensor_contents)
        return original(inp, tensor_contents=tensor_contents)

    replace("torch._tensor_str._str_intern", opaque(str_intern))


@functools.cache
def _pickle_as_storages() -> None:
    """Save a tensor as CUDA tensors are saved: the contents in a storage that is tagged with the device.

    Such a file loads with any ``map_location``, also where torchport is not installed.
    """
    original = torch.Tensor._reduce_ex_internal

    @functools.wraps(original)
    def reduce(self: torch.Tensor, proto: int) -> Any:
        skips = torch.serialization._serialization_tls.skip_data
        if not _is_port(self) or self.is_sparse or not memory.is_ours(self) or skips:
            return original(self, proto)
        torch.utils.hooks.warn_if_has_hooks(self)
        held = self.detach().cpu()
        storage = torch.storage.TypedStorage(
            wrap_storage=HostStorage.of(held.untyped_storage(), self.get_device()), dtype=held.dtype, _internal=True
        )
        state = (storage, held.storage_offset(), tuple(held.size()), held.stride(), self.requires_grad, OrderedDict())
        return _rebuild_tensor_v2, state

    replace("torch.Tensor._reduce_ex_internal", reduce)


@opaque
def before_step(optimizer: Any) -> None:
    """Called when an optimizer is about to step: gradients that are views get wrappers of their own."""
    for group in optimizer.param_groups:
        twins.own_gradients(group["params"])


@opaque
def after_step() -> None:
    """Called when an optimizer has stepped, which ends a training step: the pending values become one computation."""
    error = flush_mine("step")
    if error is not None:
        raise error
    step_ended()


@twins.python
def own_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give gradients that are views new wrappers, which are no views, where the program cannot tell the difference.

    The gradient of a linear layer is a view of a product. The view's wrapper keeps the product alive as long as the
    gradient, so each training step would compute and keep both.
    """
    alone = _gradient_alone()
    for parameter in parameters:
        # A name for the gradient would count as one of its holders.
        if _may_be_view(parameter) and _gradient_counts(parameter) == alone and not _has_address(parameter.grad):
            inner = unwrap(parameter.grad)  # type: ignore[arg-type]
            if isinstance(inner, LazyTensor):
                parameter.grad = wrap(inner)


def _may_be_view(parameter: torch.Tensor) -> bool:
    grad = parameter.grad
    return grad is not None and not grad.requires_grad and torch._is_functional_tensor(grad)


def _has_address(gradient: Any) -> bool:
    """Whether the program has asked for a gradient's address, which must not change then."""
    return memory.ADDRESS in vars(torch._C.TensorBase.untyped_storage(gradient))  # type: ignore[attr-defined]


def _gradient_counts(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Python's references to a parameter's gradient, its C++ ones, and those to its storage."""
    grad: Any = parameter.grad
    return sys.getrefcount(grad), grad._use_count(), holders_of_storage(grad)


@functools.cache
def _gradient_alone() -> tuple[int, int, int]:
    """What :func:`_gradient_counts` says of a gradient that only its parameter holds, measured on the CPU."""
    with default_state():
        probe = torch.zeros(1, device="cpu", requires_grad=True)
        probe.grad = torch.zeros(1, device="cpu")
        return _gradient_counts(probe)


@functools.cache
def _checkpoint_on_any_index() -> None:
    """Checkpointing makes a device current to ask for its generator's state; only index 0 can be current."""
    import torch.utils.checkpoint as module

    get, put = module.get_device_states, module.set_device_states

    @functools.wraps(get)
    def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
        tensors = [leaf for leaf in tree_leaves(args) if _is_port(leaf)]
        if not tensors:
            return get(*args)
        indices = [tensor.get_device() for tensor in tensors]
        return indices, [torch.port.get_rng_state(index) for index in indices]  # type: ignore[attr-defined]

    @functools.wraps(put)
    def set_device_states(devices: Any, states: Any, *, device_type: str | None = None) -> None:
        if device_type != DEVICE_TYPE:
            return put(devices, states, device_type=device_type)
        for index, state in zip(devices, states, strict=False):
            torch.port.set_rng_state(state, index)  # type: ignore[attr-defined]
        return None

    replace("torch.utils.checkpoint.get_device_states", get_device_states)
    replace("torch.utils.checkpoint.set_device_states", set_device_states)


@functools.cache
def _kernels_of_convolutions() -> None:
    """Answer which of PyTorch's kernels takes a convolution: the host's, which computes it where PyTorch does.

    That is in ``reference``, in what is interpreted until it is compiled, and in a fallback.
    """
    select = torch._C._select_conv_backend

    def on_host(value: Any) -> Any:
        if not _is_port(value):
            return value
        shape, strides = value.shape, value.stride()  # nobody writes to this memory, so none is taken
        like = torch.empty_strided(shape, strides, dtype=value.dtype, device="cpu")
        return like.requires_grad_(value.requires_grad)

    @functools.wraps(select)
    def select_on_host(*args: Any, **kwargs: Any) -> Any:
        if not any(_is_port(leaf) for leaf in tree_leaves((args, kwargs))):
            return select(*args, **kwargs)
        with default_state():
            args, kwargs = tree_map(on_host, (args, kwargs))
        return select(*args, **kwargs)

    replace("torch._C._select_conv_backend", opaque(select_on_host))


@functools.cache
def _trace_anew_for_another_default_dtype() -> None:
    """Empty the tries when the default dtype changes: recorded dtypes, as of ``torch.ones(2)``, depend on it."""

    def noticing(original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def set_default(value: Any) -> None:
            before = torch.get_default_dtype()
            original(value)
            if torch.get_default_dtype() is not before:
                flush_mine("default dtype")  # errors stay with their values
                for runtime in runtimes.all():
                    runtime.forget_decisions()

        return opaque(set_default)

    replace("torch._C._set_default_dtype", noticing(torch._C._set_default_dtype))
    replace("torch._C._set_default_tensor_type", noticing(torch._C._set_default_tensor_type))
