"""A loaded shared library: calls its C ABI through ctypes, which lets other Python threads run meanwhile."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchport.core.errors import CompileError, ExecutionError
from torchport.core.specs import TensorSpec

from . import torch_api
from .container import Artifact

__all__ = ["Library"]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype = ctypes.py_object
_capsule_of.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _message(dll: ctypes.CDLL) -> str:
    text = ctypes.c_char_p()
    dll.AOTInductorGetLastError(ctypes.byref(text))
    message = (text.value or b"no message").decode(errors="replace")
    return message.split("\nException raised from ")[0]  # what follows is a C++ stack trace


class Library:
    """One compiled graph, ready to run. ``run`` is for one thread at a time; ``close`` may be called more than once."""

    def __init__(self, artifact: Artifact) -> None:
        self.inputs = artifact.inputs
        self.outputs = artifact.outputs
        self._lock = threading.Lock()
        self._copies: tuple[int, ...] | None = None
        self._always = artifact.borrowed
        self._runner: Any = None
        self._container = ctypes.c_void_p()
        with tempfile.TemporaryDirectory(prefix="torchport-inductor-", ignore_cleanup_errors=True) as private:
            path = Path(private) / "model.so"
            path.write_bytes(artifact.library)
            if artifact.extern_nodes:
                path.with_suffix(".json").write_text(artifact.extern_nodes)
                self._runner = torch_api.proxy_runner(str(path))
                return
            try:
                self._dll = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            except OSError as error:
                raise CompileError(f"the compiled library cannot be loaded: {error}") from error
        self._open()

    def _open(self) -> None:
        create = self._dll.AOTInductorModelContainerCreateWithDevice
        create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p]
        if create(ctypes.byref(self._container), 1, b"cpu", None):
            raise CompileError(f"the compiled library cannot be initialised: {_message(self._dll)}")
        self._run = self._dll.AOTInductorModelContainerRunSingleThreaded
        array = ctypes.POINTER(ctypes.c_void_p)
        self._run.argtypes = [
            ctypes.c_void_p, array, ctypes.c_size_t, array, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._run.restype = ctypes.c_int32
        self._input_array = ctypes.c_void_p * len(self.inputs)
        self._output_array = ctypes.c_void_p * len(self.outputs)

    def _checked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) != len(self.inputs):
            raise ExecutionError(f"the computation takes {len(self.inputs)} inputs, but got {len(tensors)}")
        checked: list[torch.Tensor] = []
        for tensor, spec in zip(tensors, self.inputs, strict=True):
            if tensor.dtype is not spec.dtype or tensor.shape != spec.shape:
                got = TensorSpec.of(tensor)
                raise ExecutionError(f"input {len(checked)} should be {spec}, but is {got}; compile for that spec")
            if tensor.stride() != spec.strides:
                tensor = _with_strides(tensor, spec)
            checked.append(tensor)
        return checked

    def _call(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._runner is not None:
            return self._runner.run(tensors)
        handles = self._input_array(*[_pointer_of(capsule, None) for capsule in torch_api.take_handles(tensors)])
        results = self._output_array()
        if self._run(self._container, handles, len(handles), results, len(results), None, None):
            raise ExecutionError(f"the compiled computation failed: {_message(self._dll)}")
        return torch_api.take_tensors([_capsule_of(handle, None, None) for handle in results])

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on CPU tensors. Raises :class:`ExecutionError`; never writes to an input, returns fresh memory."""
        inputs = self._checked(tensors)
        try:
            results = self._call(inputs)
        except RuntimeError as error:
            if isinstance(error, ExecutionError):
                raise
            raise ExecutionError(f"the compiled computation failed: {error}") from error
        if self._copies is None:
            self._copies = self._find_copies(inputs, results)
        for position in self._copies:
            results[position] = _with_strides(results[position], self.outputs[position])
        return results

    def _find_copies(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Which outputs to copy: decided by the code alone, so the first run tells for all."""
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        found = set(self._always)
        for position, (tensor, spec) in enumerate(zip(results, self.outputs, strict=True)):
            address = tensor.untyped_storage().data_ptr()
            if tensor.dtype is not spec.dtype or tensor.shape != spec.shape:
                raise ExecutionError(f"output {position} should be {spec}, but is {TensorSpec.of(tensor)}")
            if tensor.stride() != spec.strides or (address and address in taken):
                found.add(position)
            taken.add(address)
        return tuple(sorted(found))

    def close(self) -> None:
        """Free the container and its constants. The code stays mapped: results may still be in use by other threads."""
        with self._lock:
            self._runner = None
            if self._container:
                self._dll.AOTInductorModelContainerDelete(self._container)
                self._container = ctypes.c_void_p()


def _with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A copy of a tensor with a spec's strides."""
    copy = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    with torch.no_grad():
        return copy.copy_(tensor.detach())
