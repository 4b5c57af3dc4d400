"""Tensors at a program's edge: PyTorch's where a program needs PyTorch, NumPy's where it does not.

Everything that touches either library is here; both are imported when they are first needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from ..backend.arrays import AS_INTEGERS, array_to_tensor, tensor_to_array
from ..backend.interface import ArrayData, Backend, BackendData, BackendDevice, TensorData
from ..core.errors import ErrorCode, MethodError, ProgramError
from ..core.specs import TensorSpec
from .document import PROGRAM, Input, Spec

__all__ = ["Adapter", "Host", "NumpyHost", "TorchHost", "check_literal", "host_for"]


Taken = tuple[slice, ...]


def _misfit(where: str, expected: Spec, got: object, code: ErrorCode) -> MethodError:
    return MethodError(
        f"{where} should be {expected}, but is {got}; lower the model for that, or convert it", code=code
    )


def _no_memory(spec: Spec) -> MethodError:
    return MethodError(
        f"there is no memory for an input padded to {spec}, or its elements would share it; lower the model with "
        "smaller buckets=",
        code=ErrorCode.MEMORY_ALLOCATION_FAILED,
    )


def _no_layout(where: str, spec: Spec) -> MethodError:
    return MethodError(
        f"{where} should be {spec}, and cannot be copied to that: there is no memory, or elements would share it; give "
        "a tensor with these strides, or lower the model for another",
        code=ErrorCode.MEMORY_ALLOCATION_FAILED,
    )


def _other_result(what: str, spec: Spec, got: str) -> ProgramError:
    return ProgramError(
        f"this program file says that {what} is {spec}, but what makes it gave {got}; lower the model again",
        entry=PROGRAM,
    )


def _no_result(what: str, spec: Spec) -> ProgramError:
    return ProgramError(
        f"this program file says that {what} is {spec}, which a result cannot be: there is no memory, or elements "
        "would share it; lower the model again",
        entry=PROGRAM,
    )


def _wide(spec: Spec) -> list[int]:
    """The dimensions whose strides tell where elements lie."""
    return [] if 0 in spec.shape else [dim for dim, size in enumerate(spec.shape) if size > 1]


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


_UNCHANGED: Final = nullcontext()


class Adapter:
    """How values pass between the host and one backend: ``wrap`` to the backend's form, ``unwrap`` back."""

    __slots__ = ("unwrap", "wrap")

    def __init__(self, wrap: Callable[[Any, TensorSpec], BackendData], unwrap: Callable[[Any], Any]) -> None:
        self.wrap = wrap
        self.unwrap = unwrap


class Host:
    """Tensors of one library: made from bytes, checked, converted; :class:`TorchHost` or :class:`NumpyHost`."""

    def default_state(self) -> AbstractContextManager[None]:
        """The library's default state, whatever the caller has on: what delegates and operators are run in."""
        return _UNCHANGED

    def spec(self, spec: Spec) -> TensorSpec:
        """The spec as backends know it."""
        raise NotImplementedError

    def constant(self, data: memoryview, spec: Spec, offset: int) -> Any:
        """A tensor that shows bytes, without copying them."""
        raise NotImplementedError

    def checker(self, where: str, spec: Spec) -> Callable[[Any], Any]:
        """A function that returns a tensor with exactly that spec, plain and on the CPU, or raises."""
        raise NotImplementedError

    def result(self, what: str, spec: Spec) -> Callable[[Any], Any]:
        """A function that gives a computed value the strides that the program says it has.

        It raises :class:`ProgramError` for another dtype or shape.
        """
        raise NotImplementedError

    def copy(self, value: Any) -> Any:
        """A copy with memory of its own."""
        raise NotImplementedError

    def number(self, value: int) -> Any:
        """A 0-dim float32 tensor."""
        raise NotImplementedError

    def pad(self, value: Any, spec: Spec) -> Any:
        """A tensor of that spec that begins with the value and has zeros beyond it.

        Raises :class:`MethodError` where there is no memory for it.
        """
        raise NotImplementedError

    def part(self, value: Any, factors: Sequence[int] | None, taken: Taken, shape: Sequence[int]) -> Any:
        """What ``taken`` picks of a value, in the shape ``shape``; row-major if the value is. ``factors``: the shape in
        which it is picked, if that is not the value's own."""
        raise NotImplementedError

    def adapter(self, backend: Backend, device: BackendDevice) -> Adapter:
        """Conversions to and from a backend's values."""
        raise NotImplementedError

    def results(self, values: Sequence[Any], specs: Sequence[Spec | None], inputs: Sequence[object]) -> tuple[Any, ...]:
        """A call's results, as arrays if all the tensors it was given were arrays."""
        raise NotImplementedError


def _part(value: Any, factors: Sequence[int] | None, taken: Taken, shape: Sequence[int]) -> Any:
    """:meth:`Host.part`'s view or copy, of a tensor or an array, in whatever layout it comes."""
    return value[taken] if factors is None else value.reshape(factors)[taken].reshape(shape)


class TorchHost(Host):
    """PyTorch's CPU tensors."""

    def __init__(self) -> None:
        import torch

        from ..core.default_state import default_state  # on demand: it imports PyTorch

        self.torch: Any = torch
        self._default_state = default_state

    def default_state(self) -> AbstractContextManager[None]:
        return self._default_state()

    def _dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def spec(self, spec: Spec) -> TensorSpec:
        return TensorSpec(spec.shape, self._dtype(spec.dtype), spec.strides)

    def constant(self, data: memoryview, spec: Spec, offset: int) -> Any:
        torch, dtype = self.torch, self._dtype(spec.dtype)
        if spec.extent == 0:
            return torch.empty_strided(spec.shape, spec.strides, dtype=dtype)
        window = data[offset : offset + spec.extent]
        if window.readonly:
            window = memoryview(bytearray(window))  # PyTorch has no tensors that cannot be written
        raw = torch.frombuffer(window, dtype=torch.uint8)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).as_strided(spec.shape, spec.strides)

    def checker(self, where: str, spec: Spec) -> Callable[[Any], Any]:
        torch = self.torch
        dtype, shape, strides = self._dtype(spec.dtype), spec.shape, spec.strides
        kind: Any = torch.Tensor
        strided: Any = torch.strided
        contiguous, is_complex = spec.is_contiguous, dtype.is_complex

        def convert(value: Any) -> Any:
            if not isinstance(value, kind):
                value = _array_to_torch(torch, where, spec, value)
            if value.dtype is not dtype:
                raise _misfit(where, spec, _shown_torch(value), ErrorCode.INVALID_TYPE)
            if value.shape != shape:
                raise _misfit(where, spec, _shown_torch(value), ErrorCode.INVALID_ARGUMENT)
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise _misfit(where, spec, f"on {value.device} ({value.layout}); call .cpu()", ErrorCode.INVALID_TYPE)
            with torch.no_grad():
                value = value.detach().resolve_conj().resolve_neg()
                if value.stride() != strides and not (contiguous and value.is_contiguous()):
                    value = self._laid_out(value, spec, lambda: _no_layout(where, spec))
            return value

        def check(value: Any) -> Any:
            # What nearly every value is: a plain tensor that fits. The rest is for the slow path to convert or refuse.
            if (
                type(value) is kind
                and value.dtype is dtype
                and value.shape == shape
                and value.is_cpu
                and value.layout is strided
                and (value.is_contiguous() if contiguous else value.stride() == strides)
                and not value.requires_grad
                and not value.is_neg()
                and not (is_complex and value.is_conj())
            ):
                return value
            return convert(value)

        return check

    def _laid_out(self, value: Any, spec: Spec, failed: Callable[[], Exception]) -> Any:
        """A copy with a spec's strides; raises what ``failed`` gives where there can be none."""
        if spec.may_overlap:
            raise failed()
        try:
            return self.torch.empty_strided(spec.shape, spec.strides, dtype=self._dtype(spec.dtype)).copy_(value)
        except (RuntimeError, MemoryError) as error:
            raise failed() from error

    def result(self, what: str, spec: Spec) -> Callable[[Any], Any]:
        torch, dtype, shape, strides = self.torch, self._dtype(spec.dtype), spec.shape, spec.strides
        strided: Any = torch.strided
        wide = _wide(spec)
        expected = [strides[dim] for dim in wide]

        def check(value: Any) -> Any:
            if value.dtype is not dtype or value.shape != shape or value.layout is not strided or not value.is_cpu:
                raise _other_result(what, spec, _shown_torch(value))
            given = value.stride()
            if given == strides or [given[dim] for dim in wide] == expected:
                return value
            with torch.no_grad():
                return self._laid_out(value, spec, lambda: _no_result(what, spec))

        return check

    def copy(self, value: Any) -> Any:
        with self.torch.no_grad():
            return value.clone()

    def number(self, value: int) -> Any:
        return self.torch.tensor(value, dtype=self.torch.float32)

    def pad(self, value: Any, spec: Spec) -> Any:
        torch = self.torch
        if spec.may_overlap:
            raise _no_memory(spec)
        try:
            if spec.is_contiguous:
                more: list[int] = []
                for size, given in zip(reversed(spec.shape), reversed(value.shape), strict=True):
                    more += (0, size - given)
                return torch.constant_pad_nd(value, more)
            made = torch.empty_strided(spec.shape, spec.strides, dtype=value.dtype).zero_()
        except (RuntimeError, MemoryError) as error:
            raise _no_memory(spec) from error
        made[tuple([slice(size) for size in value.shape])].copy_(value)
        return made

    def part(self, value: Any, factors: Sequence[int] | None, taken: Taken, shape: Sequence[int]) -> Any:
        found = _part(value, factors, taken, shape)
        return found if found.is_contiguous() or not value.is_contiguous() else found.contiguous()

    def adapter(self, backend: Backend, device: BackendDevice) -> Adapter:
        if backend.capabilities.torch_free:

            def wrap_array(value: Any, spec: TensorSpec) -> BackendData:
                return ArrayData(device, spec, tensor_to_array(value))

            def unwrap_array(data: ArrayData) -> Any:
                return array_to_tensor(data.array, data.spec.dtype)

            return Adapter(wrap_array, unwrap_array)
        if type(backend).from_device is Backend.from_device:
            # The backend's values are TensorData: making one here costs less than asking, and nothing is copied.
            return Adapter(lambda value, spec: TensorData(device, spec, value), lambda data: data.tensor)
        return Adapter(lambda value, spec: backend.to_device(value, device), backend.from_device)

    def results(self, values: Sequence[Any], specs: Sequence[Spec | None], inputs: Sequence[object]) -> tuple[Any, ...]:
        kinds = {_is_torch(value) for value in inputs if hasattr(value, "dtype")}
        if kinds == {False}:
            return tuple(tensor_to_array(value) if _is_torch(value) else value for value in values)
        return tuple(values)


def _shown_torch(value: Any) -> str:
    return str(TensorSpec.of(value)) if value.layout is sys.modules["torch"].strided else f"{value.layout} tensor"


def _array_to_torch(torch: Any, where: str, spec: Spec, value: object) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        raise _misfit(where, spec, f"a {type(value).__name__}", ErrorCode.INVALID_TYPE)
    array: Any = value
    if not array.flags.writeable or not array.dtype.isnative or any(step < 0 for step in array.strides):
        array = numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise _misfit(where, spec, f"an array of {array.dtype}", ErrorCode.INVALID_TYPE) from error


class NumpyHost(Host):
    """NumPy's arrays: for programs whose delegates do without PyTorch, which is not imported."""

    def __init__(self) -> None:
        import numpy

        self.numpy: Any = numpy

    def spec(self, spec: Spec) -> TensorSpec:
        name: Any = spec.dtype
        return TensorSpec(spec.shape, name, spec.strides)

    def _dtype(self, name: str) -> Any:
        return self.numpy.dtype(AS_INTEGERS.get(name, name))

    def constant(self, data: memoryview, spec: Spec, offset: int) -> Any:
        dtype = self._dtype(spec.dtype)
        steps = tuple(step * dtype.itemsize for step in spec.strides)
        if spec.extent == 0:
            return self.numpy.empty(spec.shape, dtype)
        return self.numpy.ndarray(spec.shape, dtype, data[offset : offset + spec.extent], 0, steps)

    def checker(self, where: str, spec: Spec) -> Callable[[Any], Any]:
        dtype, shape = self._dtype(spec.dtype), spec.shape
        steps = tuple(step * dtype.itemsize for step in spec.strides)
        kind: Any = self.numpy.ndarray

        def check(value: Any) -> Any:
            if type(value) is not kind:
                value = self._array(where, spec, value)
            if value.dtype != dtype:
                raise _misfit(where, spec, f"{value.dtype}{list(value.shape)}", ErrorCode.INVALID_TYPE)
            if value.shape != shape:
                raise _misfit(where, spec, f"{value.dtype}{list(value.shape)}", ErrorCode.INVALID_ARGUMENT)
            if value.strides != steps and value.size:
                return self._laid_out(value, spec, lambda: _no_layout(where, spec))
            return value

        return check

    def _array(self, where: str, spec: Spec, value: Any) -> Any:
        if isinstance(value, self.numpy.ndarray):
            return self.numpy.asarray(value)
        if not _is_torch(value):
            raise _misfit(where, spec, f"a {type(value).__name__}", ErrorCode.INVALID_TYPE)
        torch: Any = sys.modules["torch"]
        if value.layout is not torch.strided or value.device.type != "cpu":
            raise _misfit(where, spec, f"on {value.device} ({value.layout}); call .cpu()", ErrorCode.INVALID_TYPE)
        name = str(value.dtype).removeprefix("torch.")
        if name != spec.dtype:
            raise _misfit(where, spec, _shown_torch(value), ErrorCode.INVALID_TYPE)
        return tensor_to_array(value.detach().resolve_conj().resolve_neg())

    def result(self, what: str, spec: Spec) -> Callable[[Any], Any]:
        dtype, shape = self._dtype(spec.dtype), spec.shape
        steps = tuple(step * dtype.itemsize for step in spec.strides)
        wide = _wide(spec)

        def check(value: Any) -> Any:
            if value.dtype != dtype or value.shape != shape:
                raise _other_result(what, spec, f"{value.dtype}{list(value.shape)}")
            if value.strides == steps or all(value.strides[dim] == steps[dim] for dim in wide):
                return value
            return self._laid_out(value, spec, lambda: _no_result(what, spec))

        return check

    def _laid_out(self, value: Any, spec: Spec, failed: Callable[[], Exception]) -> Any:
        """A copy with a spec's strides; raises what ``failed`` gives where there can be none."""
        if spec.may_overlap:
            raise failed()
        dtype = self._dtype(spec.dtype)
        steps = tuple(step * dtype.itemsize for step in spec.strides)
        try:
            made = self.numpy.ndarray(spec.shape, dtype, bytearray(spec.extent), 0, steps)
        except (MemoryError, OverflowError, ValueError) as error:
            raise failed() from error
        made[...] = value
        return made

    def copy(self, value: Any) -> Any:
        return value.copy()

    def number(self, value: int) -> Any:
        return self.numpy.array(value, self.numpy.float32)

    def pad(self, value: Any, spec: Spec) -> Any:
        if spec.may_overlap:
            raise _no_memory(spec)
        try:
            if spec.is_contiguous:
                made = self.numpy.zeros(spec.shape, value.dtype)
            else:
                steps = tuple(step * value.dtype.itemsize for step in spec.strides)
                made = self.numpy.ndarray(spec.shape, value.dtype, bytearray(spec.extent), 0, steps)
        except (MemoryError, ValueError) as error:
            raise _no_memory(spec) from error
        made[tuple([slice(size) for size in value.shape])] = value
        return made

    def part(self, value: Any, factors: Sequence[int] | None, taken: Taken, shape: Sequence[int]) -> Any:
        found = _part(value, factors, taken, shape)
        return found.copy() if value.flags.c_contiguous and not found.flags.c_contiguous else found

    def adapter(self, backend: Backend, device: BackendDevice) -> Adapter:
        return Adapter(lambda value, spec: ArrayData(device, spec, value), lambda data: data.array)

    def results(self, values: Sequence[Any], specs: Sequence[Spec | None], inputs: Sequence[object]) -> tuple[Any, ...]:
        if not any(_is_torch(value) for value in inputs):
            return tuple(values)
        torch: Any = sys.modules["torch"]
        return tuple(
            value if spec is None else array_to_tensor(value, getattr(torch, spec.dtype))
            for value, spec in zip(values, specs, strict=True)
        )


def host_for(needs_torch: bool) -> Host:
    """The host's library for a method."""
    return TorchHost() if needs_torch else NumpyHost()


def check_literal(given: Input, value: object) -> None:
    """Raise unless an input that is no tensor equals what the model was exported with (1, 1.0 and True differ)."""
    if type(value) is not type(given.literal) or repr(value) != repr(given.literal):
        raise MethodError(
            f"input {given.name!r} was {given.literal!r} when the model was exported and is part of the program, but "
            f"is now {value!r}; pass {given.literal!r}, or export the model again",
            code=ErrorCode.INVALID_ARGUMENT,
        )
