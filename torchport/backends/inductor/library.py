"""A loaded shared library: calls its C ABI through ctypes, which lets other Python threads run meanwhile."""

from __future__ import annotations

import _ctypes
import copy
import ctypes
import os
import re
import tempfile
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from torchport.core.errors import CompileError, ExecutionError
from torchport.core.forks import guarded_lock
from torchport.core.freed_memory import keep_freed_memory
from torchport.core.specs import TensorSpec
from torchport.core.threads import FewerThreads

from . import caller, machine, torch_api
from .container import InductorArtifact

__all__ = ["Library", "plain_message"]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype = ctypes.py_object
_capsule_of.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


_NOT_SAID = "PyTorch before 2.13 does not say why; it may have printed it"


def _message(dll: ctypes.CDLL) -> str:
    """Why the last call into the library failed: an operator's own words if it was an operator, else the library's."""
    text = ctypes.c_char_p()
    last_error = getattr(dll, "AOTInductorGetLastError", None)
    if last_error is None:
        return _NOT_SAID
    last_error(ctypes.byref(text))
    message = (text.value or b"no message").decode(errors="replace")
    if "API call failed at" in message and torch_api.last_error is not None:
        message = (torch_api.last_error() or b"").decode(errors="replace") or message
    return plain_message(message)


def plain_message(message: str) -> str:
    """A C++ error message without the function and file it starts with and the stack trace it ends in."""
    if "API call failed at" in message and torch_api.last_error is None:
        return _NOT_SAID
    return re.sub(r"^\w+, \S+:\d+, ", "", message.split("\nException raised from ")[0])


class Library:
    """One compiled graph, ready to run. ``run`` is for one thread at a time; ``close`` may be called more than once."""

    def __init__(self, artifact: InductorArtifact) -> None:
        keep_freed_memory()
        self._set_interface(artifact.inputs, artifact.outputs)
        self._lock = guarded_lock()
        self._of: Library | None = None
        """The library for other sizes, whose code this one runs."""
        self._always = artifact.borrowed
        self._overwritten = artifact.overwritten
        self._runner: Any = None
        self._caller: caller.Caller | None = None
        self._code: int | None = None
        self._container = ctypes.c_void_p()
        with tempfile.TemporaryDirectory(prefix="torchport-inductor-", ignore_cleanup_errors=True) as private:
            path = Path(private) / "model.so"
            path.write_bytes(artifact.library)
            try:
                if artifact.extern_nodes:
                    path.with_suffix(".json").write_text(artifact.extern_nodes)
                    self._runner = torch_api.proxy_runner(str(path))
                    return
                self._dll = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
            except (OSError, RuntimeError) as error:
                raise CompileError(f"the compiled library cannot be loaded: {error}") from error
        self._open()

    def _set_interface(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self._expected = [(spec.dtype, spec.shape, spec.strides) for spec in inputs]
        self._copies: tuple[int, ...] | None = None

    def resized(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Library:
        """The same code for inputs and outputs of other sizes; this library stays open as long as that one is."""
        made = copy.copy(self)
        made._set_interface(inputs, outputs)
        made._of = self
        if self._code is not None and self._caller is not None:
            layouts = caller.layouts((*inputs, *outputs))
            assert layouts is not None  # the dtypes are this library's
            made._code = self._caller.resize(self._code, layouts, len(layouts))
        return made

    def _open(self) -> None:
        create = self._dll.AOTInductorModelContainerCreateWithDevice
        create.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p]
        if create(ctypes.byref(self._container), 1, b"cpu", None):
            raise CompileError(f"the compiled library cannot be initialised: {_message(self._dll)}")
        self._run = self._dll.AOTInductorModelContainerRunSingleThreaded
        array = ctypes.POINTER(ctypes.c_void_p)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._run.argtypes = [pointer, array, size, array, size, pointer, pointer]
        self._run.restype = ctypes.c_int32
        self._input_array = ctypes.c_void_p * len(self.inputs)
        self._output_array = ctypes.c_void_p * len(self.outputs)
        layouts = caller.layouts((*self.inputs, *self.outputs))
        self._caller = caller.load()
        if layouts is None or self._caller is None:
            return
        close = self._dll.AOTInductorModelContainerDelete
        says_why = hasattr(self._dll, "AOTInductorGetLastError")  # Inductor's own runtime: since PyTorch 2.13
        last_error = self._dll.AOTInductorGetLastError if says_why else None
        functions: tuple[Any, ...] = (self._run, close, last_error, torch_api.last_error)
        addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
        counts = (len(layouts), len(self.inputs), len(self.outputs))
        self._code = self._caller.open(*addresses, self._container, layouts, *counts)

    def _checked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, as the code expects them: it does not check, and reads whatever memory it is given."""
        if len(tensors) != len(self.inputs):
            raise ExecutionError(f"the computation takes {len(self.inputs)} inputs, but got {len(tensors)}")
        checked = list(tensors)
        for position, (dtype, shape, strides) in enumerate(self._expected):
            tensor = checked[position]
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.device.type != "cpu":
                got, spec = TensorSpec.of(tensor), self.inputs[position]
                place = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
                raise ExecutionError(f"input {position} should be {spec}, but is {got}{place}; compile for that")
            if tensor.stride() != strides:
                checked[position] = _with_strides(tensor, self.inputs[position])
        return checked

    def _call(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._runner is not None:
            made: list[torch.Tensor | None] = self._runner.run(tensors)
            if any(tensor is None for tensor in made):  # an operator that PyTorch calls failed, and it went on
                raise ExecutionError(f"the compiled computation failed: {_NOT_SAID}")
            return made  # type: ignore[return-value]
        handles = self._input_array(*[_pointer_of(capsule, None) for capsule in torch_api.take_handles(tensors)])
        results = self._output_array()
        if self._run(self._container, handles, len(handles), results, len(results), None, None):
            raise ExecutionError(f"the compiled computation failed: {_message(self._dll)}")
        return torch_api.take_tensors([_capsule_of(handle, None, None) for handle in results])

    def _call_fast(self, tensors: list[torch.Tensor], let_go: bool) -> list[torch.Tensor] | None:
        """What :meth:`_call` does, by ``caller.cpp``; ``None`` if a tensor is not quite as the code expects it."""
        assert self._caller is not None
        with self._lock, FewerThreads():
            if not self._container:
                return None
            results = self._caller.call(self._code, tensors, let_go)
        if results.__class__ is str:
            raise ExecutionError(f"the compiled computation failed: {plain_message(results)}")
        return None if results.__class__ is int else results

    def start(self, given: list[Any], donated: Set[int]) -> tuple[Any, list[Any]]:
        """Have the code run on a thread without Python: what says how that went, and slots (:class:`.caller.Caller`).

        ``given`` are tensors and slots, those ``donated`` are nobody else's.
        """
        assert self._caller is not None
        return self._caller.start(self._code, given, donated, self._overwritten, self._copies, machine.threads_beside())

    @property
    def link(self) -> tuple[int, tuple[int, ...]] | None:
        """The code and which of its results to copy, for a chain; ``None`` where :meth:`run` has to call it.

        Not before the first :meth:`run`. Inputs that the code writes to are copied or given by :meth:`run` only.
        """
        if self._code is None or self._copies is None or self._overwritten:
            return None
        return self._code, self._copies

    @property
    def starts(self) -> bool:
        """Whether :meth:`start` is possible: not before the first :meth:`run`."""
        return self._code is not None and self._copies is not None

    def run(
        self, tensors: list[torch.Tensor], given: bool = False, donated: Set[int] = frozenset()
    ) -> list[torch.Tensor]:
        """Run on CPU tensors. Raises :class:`ExecutionError`; returns memory that is no input's, but for donated ones.

        ``given``: the list may be emptied, so that memory nobody else holds is freed once the code is done with it.
        ``donated``: inputs that may be written to, and no others are.
        """
        for position in self._overwritten:
            if position not in donated and position < len(tensors):
                tensors[position] = tensors[position].clone()
        if self._code is not None and len(tensors) == len(self.inputs):
            # In a thread that has not run torch yet OpenMP would use every core: this call gives it torch's number.
            torch.get_num_threads()
            results = self._call_fast(tensors, given and self._copies is not None)
            if results is not None:
                return self._own(tensors, results)
        return self._run_checked(tensors)

    def _run_checked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs = self._checked(tensors)
        # In a thread that has not run torch yet OpenMP would use every core: this call gives it torch's number.
        torch.get_num_threads()
        with self._lock:
            if self._runner is None and not self._container:
                raise ExecutionError("the computation was destroyed; it cannot run any more")
            try:
                with FewerThreads():
                    results = self._call(inputs)
            except RuntimeError as error:
                if isinstance(error, ExecutionError):
                    raise
                raise ExecutionError(f"the compiled computation failed: {plain_message(str(error))}") from error
        return self._own(inputs, results)

    def _own(self, inputs: Sequence[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results, with copies of those whose memory is an input's or the library's, or that have other strides."""
        if self._copies is None:
            self._copies = self._find_copies(inputs, results)
        for position in self._copies:
            results[position] = _with_strides(results[position], self.outputs[position])
        return results

    def _find_copies(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Which outputs to copy: decided by the code alone, so the first run tells for all."""
        kept = [tensor for position, tensor in enumerate(inputs) if position not in self._overwritten]
        taken = {tensor.untyped_storage().data_ptr() for tensor in kept}
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
        """Free the container, its constants and the code, once a running call has ended; results stay valid.

        Unloading is safe: results are made by torch's allocator, and copies are made of the rest, so no tensor's memory
        or deleter is the library's. glibc itself keeps a library whose thread-local variables a thread still holds.
        """
        with self._lock:
            self._runner = None
            if self._container:
                if self._caller is not None and self._code is not None:
                    self._caller.close(self._code)
                    self._code = None
                elif self._of is None:
                    self._dll.AOTInductorModelContainerDelete(self._container)
                self._container = ctypes.c_void_p()
                if self._of is None:
                    _ctypes.dlclose(self._dll._handle)
            self._of = None


def _with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A copy of a tensor with a spec's strides."""
    copy = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    with torch.no_grad():
        return copy.copy_(tensor.detach())
