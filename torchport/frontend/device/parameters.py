"""``Module.to`` and ``p.data = …`` keep the ``Parameter`` objects when parameters come to the device or leave it.

PyTorch's own conversion makes a new ``Parameter`` where the ``TensorImpl`` of a tensor cannot take the other's place. A
new object would untie tied weights and orphan an optimizer made before. ``Module.to`` may itself be the first use of
the device, so this is in place before, from ``import torch`` on, and imports nothing of the device.

Private torch APIs used here: ``torch.nn.Module._apply``, ``torch._C.TensorBase.data``,
``torch.Tensor._backward_hooks``, ``torch.Tensor._post_accumulate_grad_hooks``, ``torch._C._swap_tensor_impl``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .names import device_of
from .opaque import opaque
from .patches import replace

__all__ = ["install"]

_NAME: Final = "port"
_Convert = Callable[[torch.Tensor], torch.Tensor]


def install() -> None:
    """Wrap ``Module._apply``, which ``to``, ``cpu`` and ``to_empty`` call, and assignment to ``Tensor.data``."""
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: _Convert, recurse: bool = True) -> Any:
        if torch.compiler.is_dynamo_compiling():  # Dynamo takes conversions between other devices into its graph
            ours = _is_port(fn(torch.empty(0))) or any(map(_is_port, self.parameters()))
            return outside_of_graphs(self, fn, recurse) if ours else original(self, fn, recurse)
        return convert(self, fn, recurse)

    def convert(self: torch.nn.Module, fn: _Convert, recurse: bool) -> Any:
        if torch.__future__.get_swap_module_params_on_conversion():
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        before, uninitialized = dict(self._parameters), {}
        if any(isinstance(parameter, torch.nn.UninitializedParameter) for parameter in before.values()):
            uninitialized = _move_uninitialized(self, fn) if _crosses(self, fn) else {}
        try:
            return original(self, fn, False)
        finally:
            for name, parameter in before.items():
                converted = self._parameters[name]
                if parameter is None or converted is None or converted is parameter:
                    continue
                if _is_port(converted) != _is_port(parameter):
                    _become(parameter, converted)
                    self._parameters[name] = parameter
            for name, parameter in uninitialized.items():
                self._parameters[name] = parameter

    def outside_of_graphs(self: torch.nn.Module, fn: _Convert, recurse: bool) -> Any:
        return convert(self, fn, recurse)

    # What ``torch.compiler.disable`` sets, which would import Dynamo.
    vars(outside_of_graphs)["_torchdynamo_disable"] = True
    for wrapper in (convert, outside_of_graphs):
        opaque(wrapper)
    replace("torch.nn.Module._apply", opaque(apply))
    replace("torch.Tensor.data", property(_PLAIN_DATA.__get__, opaque(_set_data), doc=_PLAIN_DATA.__doc__))


_PLAIN_DATA: Final[Any] = torch._C.TensorBase.data


def _set_data(self: Any, value: Any) -> None:
    """``p.data = value``, also where only one of the two is on the device.

    PyTorch refuses that, since the two ``TensorImpl`` are of different kinds, so these are swapped. The gradient moves
    along, since PyTorch takes none of another device. Raises ``RuntimeError`` for the result of an operator that
    autograd recorded, whose place in the autograd graph cannot move along.
    """
    known = isinstance(value, torch.Tensor) and not torch.compiler.is_compiling()
    if not known or _is_port(self) == _is_port(value) or _stands_for_another(self) or _stands_for_another(value):
        _PLAIN_DATA.__set__(self, value)
        return
    if self.grad_fn is not None:
        raise RuntimeError(
            f"the data of a result that autograd recorded ({self.grad_fn.name()}) cannot come from {device_of(value)}: "
            f"it is on {device_of(self)}. Write x = x.to({str(device_of(value))!r})"
        )
    grad, kind = self.grad, type(self)
    with torch.no_grad():
        inside: Any = torch.nn.Parameter(value.detach(), False) if _is_port(value) else value.detach()
    if self.requires_grad:
        inside.requires_grad_()
    if grad is not None and grad.shape == inside.shape and grad.dtype == inside.dtype:
        grad.data = grad.data.to(inside.device)
        inside.grad, self.grad = grad, None
    _become(self, inside)
    if type(self) is not kind:
        self.__class__ = kind


def _stands_for_another(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a compiler or a transformation, so that its ``TensorImpl`` must not be swapped."""
    if is_functorch_wrapped_tensor(tensor):
        return not torch._is_functional_tensor(tensor)
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is not _PLAIN_DISPATCH and not is_traceable_wrapper_subclass(tensor)


_PLAIN_DISPATCH: Final[Any] = cast("Any", torch.Tensor).__torch_dispatch__


def _is_port(tensor: torch.Tensor) -> bool:
    return device_of(tensor).type == _NAME


def _crosses(module: torch.nn.Module, fn: _Convert) -> bool:
    """Whether ``fn`` moves any of the module's own parameters to or from the device: asked with empty tensors."""
    for parameter in module._parameters.values():
        if parameter is not None and device_of(parameter).type != "meta":
            with torch.no_grad():
                result = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            if _is_port(result) != _is_port(parameter):
                return True
    return False


def _become(parameter: torch.nn.Parameter, converted: torch.nn.Parameter) -> None:
    """Give a parameter object the ``TensorImpl`` of its converted form. The object's attributes and hooks stay."""
    kind, attributes = type(parameter), dict(vars(parameter))
    hooks: Any = parameter._backward_hooks
    after: Any = parameter._post_accumulate_grad_hooks
    swap_tensors(parameter, _without_base(converted))
    if type(parameter) is not kind:
        parameter.__class__ = kind
    # The swap gave the attributes to the tensor that is dropped. A subclass's inner tensors are attributes, too, and
    # stay swapped.
    after_the_swap = vars(parameter) if is_traceable_wrapper_subclass(parameter) else {}
    vars(parameter).update({**attributes, **after_the_swap})
    if hooks is not None:  # autograd's part of a hook went with the ``TensorImpl``; assigning the hooks makes it anew
        parameter._backward_hooks = hooks
    if after is not None:
        parameter._post_accumulate_grad_hooks = after


def swap_tensors(one: Any, other: Any) -> None:
    """``torch.utils.swap_tensors`` without its refusals: one of the two is a new tensor that nobody else holds.

    Weak references keep referring to the same Python objects, as their holders expect. An autograd graph that was
    recorded before holds the former ``TensorImpl``, as on other devices; its gradients do not reach the parameter.
    """
    one.__class__, other.__class__ = type(other), type(one)
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _without_base(converted: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter of this device with a wrapper of its own.

    ``Parameter(x)`` is a view of ``x``. Nobody holds ``x`` any more, but each write to the parameter would update it.
    """
    if not _is_port(converted) or not torch._is_functional_tensor(converted):
        return converted
    from ...trace import wrapping  # on demand: ``import torch`` must stay light

    own: Any = wrapping.wrap(wrapping.unwrap(converted)).requires_grad_(converted.requires_grad)
    own.__class__ = type(converted)
    own.grad, converted.grad = converted.grad, None
    return own


def _move_uninitialized(module: torch.nn.Module, fn: _Convert) -> dict[str, Any]:
    """Move the uninitialized parameters of a lazy module, take them out of the module, and return them.

    PyTorch's conversion would make ordinary parameters without elements of uninitialized ones.
    """
    found: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            with torch.no_grad():
                probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            make: Any = torch.nn.UninitializedParameter  # its annotations do not know these options
            moved = make(parameter.requires_grad, device=probe.device, dtype=probe.dtype)
            swap_tensors(parameter, moved)
            found[name] = parameter
            module._parameters[name] = None
    return found
