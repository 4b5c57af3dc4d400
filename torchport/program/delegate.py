"""One delegate of a loaded method: init, execute, destroy, and whose fault an error is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..backend.execution import Computation, execute
from ..backend.interface import (
    Backend,
    BackendData,
    BackendDevice,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    TemporaryMemory,
)
from ..backend.registry import Registry
from ..core.errors import (
    BackendNotFound,
    BackendUnavailable,
    CompileError,
    ConfigError,
    DelegateError,
    ErrorCode,
    ExecutionError,
    MethodError,
    ProgramError,
    UnsupportedOp,
)
from .document import DelegateRecord, Origin
from .profile import DelegateTracer, Recorder
from .values import Adapter, Host

__all__ = ["LoadedDelegate", "Options", "checked_options", "find_backend", "locate"]

Options = Mapping[str, bool | int | float | str]
Locate = Callable[[Sequence[int]], Origin]

_MAX_NAME: Final = 64
_MAX_TEXT: Final = 4096


def checked_options(options: Mapping[str, Options], known: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run-time options by backend, copied.

    Raises :class:`MethodError`: ``NOT_FOUND`` for a backend that the program does not use, ``INVALID_ARGUMENT`` for
    names and values that are too long or of another type.
    """
    checked: dict[str, dict[str, Any]] = {}
    for backend, given in options.items():
        if not isinstance(backend, str) or len(backend) > _MAX_NAME:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MethodError(f"a backend's name has at most {_MAX_NAME} characters, but got {str(backend)[:80]!r}")
        if backend not in known:
            shown = ", ".join(sorted(set(known))) or "none"
            raise MethodError(
                f"options are given for backend {backend!r}, but the program uses: {shown}", code=ErrorCode.NOT_FOUND
            )
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MethodError(f"options of {backend!r} must be a dict, not a {type(given).__name__}")
        for key, value in given.items():
            if not isinstance(key, str) or not 0 < len(key) <= _MAX_NAME:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise MethodError(f"option {str(key)[:80]!r} of {backend!r}: names have 1 to {_MAX_NAME} characters")
            if not isinstance(value, (bool, int, float, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise MethodError(
                    f"option {key!r} of {backend!r} is a {type(value).__name__}; it must be a bool, number or text"
                )
            if isinstance(value, str) and len(value) > _MAX_TEXT:
                raise MethodError(f"option {key!r} of {backend!r} has more than {_MAX_TEXT} characters")
        checked[backend] = dict(given)
    return checked


def find_backend(registry: Registry, name: str, method: str, index: int) -> Backend:
    """The delegate's backend. Unregistered and unavailable both give ``NOT_FOUND``, each with its own reason."""
    try:
        return registry.get(name)
    except (BackendNotFound, BackendUnavailable) as error:
        raise DelegateError(
            f"the program needs backend {name!r}: {error}",
            code=ErrorCode.NOT_FOUND,
            method=method,
            delegate=f"{name} #{index}",
        ) from error


def _code_of(error: BaseException) -> int:
    if isinstance(error, (DelegateError, ProgramError, MethodError)):
        return error.code
    if isinstance(error, CompileError):  # at run time: init does not take these bytes
        return ErrorCode.DELEGATE_INVALID_COMPATIBILITY
    if isinstance(error, UnsupportedOp):
        return ErrorCode.NOT_SUPPORTED
    if isinstance(error, ConfigError):
        return ErrorCode.INVALID_ARGUMENT
    if isinstance(error, MemoryError):
        return ErrorCode.DELEGATE_MEMORY_ALLOCATION_FAILED
    if isinstance(error, NotImplementedError):
        return ErrorCode.NOT_IMPLEMENTED
    return ErrorCode.INTERNAL


def locate(
    error: Exception, method: str, delegate: str, handles: tuple[int, ...], where: Locate, doing: str = ""
) -> DelegateError:
    """The error with its place: method, delegate, debug handles, operator, modules and the user's lines. The code
    stays."""
    place = where(handles)
    if isinstance(error, (DelegateError, CompileError, ExecutionError)):
        message = error.message
    else:
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return DelegateError(
        f"{doing}{message}",
        code=_code_of(error),
        debug_handles=handles,
        ident=getattr(error, "ident", None),
        source=place.source or getattr(error, "source", None),
        method=method,
        delegate=delegate,
        module=place.module or None,
        hierarchy=place.hierarchy or None,
        op=place.op or None,
        stack=place.stack or None,
    )


class LoadedDelegate:
    """A delegate after ``init``. One thread at a time; :meth:`destroy` may be called more than once."""

    def __init__(
        self,
        index: int,
        delegate: DelegateRecord,
        backend: Backend,
        *,
        method: str,
        host: Host,
        buffer: FreeableBuffer,
        constants: Mapping[int, Any],
        named_data: Mapping[str, memoryview],
        options: Mapping[str, Any],
        debug_map: Callable[[], Mapping[int | str, tuple[int, ...]]],
        where: Locate,
        recorder: Recorder | None,
        temporary: TemporaryMemory,
    ) -> None:
        self.index = index
        self.backend = backend
        self.name = f"{delegate.backend} #{index}"
        self._method = method
        self._buffer = buffer
        self._debug_map = debug_map
        self._where = where
        self._recorder = recorder
        device = self._device()
        self.adapter: Adapter = host.adapter(backend, device)
        self.inputs = tuple(host.spec(spec) for spec in delegate.inputs)
        self.outputs = tuple(host.spec(spec) for spec in delegate.outputs)
        tracer = None if recorder is None else DelegateTracer(recorder, delegate.backend, self.handles_of)
        try:
            values = {at: self.adapter.wrap(value, self.inputs[at]) for at, value in constants.items()}
            bound = values if backend.capabilities.binds_constants else {}
            context = InitContext(device, self.inputs, self.outputs, method, options, bound, named_data, tracer)
            handle = backend.init(buffer, delegate.specs, context)
        except BaseException as error:
            # Failed: no handle to destroy, and what backend did so far is its own to clean up.
            buffer.free()
            if isinstance(error, Exception):
                raise self._located(error, "init failed: ") from error
            raise
        self.passed = {at: value for at, value in values.items() if at not in bound}
        """Constants that are given to every call, by position."""
        self.context = ExecutionContext(device, self.outputs, frozenset(), method, options, tracer, temporary)
        inputs = tuple(spec for at, spec in enumerate(self.inputs) if at not in bound)
        self._computation = Computation(backend, device, inputs, (), self.outputs, handle, self.context)

    def _device(self) -> BackendDevice:
        return next(iter(self.backend.devices()), BackendDevice("cpu"))

    def handles_of(self, ident: int | str | None) -> tuple[int, ...]:
        """Debug handles of one of the delegate's own ids; without an id, all of them."""
        found = self._debug_map()
        if ident is None:
            return tuple(sorted({handle for handles in found.values() for handle in handles}))
        return found.get(ident, (ident,) if isinstance(ident, int) and not found else ())

    def _located(self, error: Exception, doing: str = "") -> DelegateError:
        handles = getattr(error, "debug_handles", ())
        ident = getattr(error, "ident", None)
        if not handles:
            handles = self.handles_of(ident) if ident is not None else ()
        if not handles:
            every = self.handles_of(None)
            handles = every if len(every) == 1 else ()
        return locate(error, self._method, self.name, tuple(handles), self._where, doing)

    def execute(self, args: Sequence[BackendData]) -> Sequence[BackendData]:
        """Run on the backend's values. Raises :class:`DelegateError`; the scratch memory is given back in any case."""
        computation = self._computation
        if computation.released:
            raise DelegateError(
                "the delegate was destroyed", code=ErrorCode.DELEGATE_INVALID_HANDLE, delegate=self.name
            )
        recorder = self._recorder
        start = time.perf_counter() if recorder is not None else 0.0
        try:
            return execute(computation, args, self.context, self._failure)
        finally:
            self.context.temporary.reset()
            if recorder is not None:
                handles = self.handles_of(None)
                recorder.add(
                    "delegate", self.name, start, time.perf_counter(), backend=self.backend.name, handles=handles
                )

    def _failure(self, computation: Computation, error: Exception) -> DelegateError:
        return self._located(error)

    def destroy(self) -> None:
        """Release the handle, then whatever of the bytes is still held."""
        try:
            self._computation.release()
        finally:
            self._buffer.free()
