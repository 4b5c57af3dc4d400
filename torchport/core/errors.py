"""The exception tree. Every error torchport raises on purpose is one of these.

::

    TorchportError (RuntimeError)
    ├── BackendNotFound      no backend of that name is registered or installed
    ├── BackendUnavailable   it is installed, but cannot run here
    ├── UnsupportedOp        no kernel, capture, decomposition or fallback takes the op
    ├── CompileError         a backend's preprocess or init failed
    │   └── CacheMiss        config.cache is "cache-only", and the disk cache does not have it
    ├── ExecutionError       a compiled computation failed while it ran
    ├── DeviceMismatch       tensors of different devices met in one op
    ├── ContractError        a backend's method answered or did what the contract does not allow
    ├── CollectiveError      ranks disagree about a collective, or one of them is gone
    ├── GraphError           a graph is not in FX normal form
    ├── StorageAccess        memory of a device tensor was asked for; it has none in this process
    │                        (a NotImplementedError, too)
    ├── ConfigError          a configuration value or environment variable is malformed
    ├── DelegateError        a delegate failed (with code, debug handle, source line)
    ├── ProgramError         a program file is broken (with the entry that failed)
    ├── MethodError          a program's method was called wrongly (inputs, state, options)
    └── DispatchError
        ├── MissingKernel    no kernel for the operator at the key it was dispatched to
        └── AmbiguousKernel  several kernels claim the key and none may win

The tree derives from ``RuntimeError`` because that is what PyTorch raises for the same mistakes, so code that
catches PyTorch's errors keeps working. An engine's own exception is mapped at the boundary and chained with ``from``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

__all__ = [
    "AmbiguousKernel",
    "BackendNotFound",
    "BackendUnavailable",
    "CacheMiss",
    "CollectiveError",
    "CompileError",
    "ConfigError",
    "ContractError",
    "DelegateError",
    "DeviceMismatch",
    "DispatchError",
    "ErrorCode",
    "ExecutionError",
    "GraphError",
    "MethodError",
    "MissingKernel",
    "ProgramError",
    "StorageAccess",
    "TorchportError",
    "UnsupportedOp",
]


class TorchportError(RuntimeError):
    """Root of the tree: what happened, why, and what to write instead."""


class BackendNotFound(TorchportError):
    """No backend of that name is registered, built in or installed."""


class BackendUnavailable(TorchportError):
    """The backend exists but cannot run in this process; the message says what to install."""


class _AtUserLine(TorchportError):
    """An error that knows the operator and the user's source line it came from."""

    def __init__(self, message: str, *, op: str | None = None, source: str | None = None) -> None:
        self.message = message
        self.op = op
        self.source = source
        parts = [message]
        if op is not None:
            parts.append(f"  op:   {op}")
        if source is not None:
            parts.append(f"  line: {source}")
        super().__init__("\n".join(parts))


class UnsupportedOp(_AtUserLine):
    """Nothing takes the operator: no kernel, no capture, no decomposition, no allowed fallback."""


class CompileError(_AtUserLine):
    """A backend's ``preprocess`` or ``init`` failed; the backend's own exception is chained."""


class CacheMiss(CompileError):
    """``config.cache`` is ``"cache-only"``, and the disk cache does not have it; the message shows what is nearest."""


class ExecutionError(_AtUserLine):
    """A compiled computation failed while it ran; the backend's own exception is chained."""


class DeviceMismatch(_AtUserLine):
    """Tensors of different devices met in one operator."""


class ContractError(TorchportError):
    """A backend's method answered what the contract does not allow, or did it: the message says what came instead.

    Attributes: ``method``, and ``op`` where it was about an operator.
    """

    def __init__(self, message: str, *, method: str = "", op: object = None) -> None:
        super().__init__(message)
        self.method = method
        self.op = None if op is None else str(op)


class CollectiveError(TorchportError):
    """Ranks disagree about a collective, one of them is gone, or the bytes did not arrive; names ranks and lines."""


class GraphError(TorchportError):
    """A graph breaks a rule of the FX normal form; the message names the node and the rule."""


class StorageAccess(TorchportError, NotImplementedError):
    """Raw memory of a device tensor was asked for; device tensors have none in this process.

    PyTorch and its libraries take a ``NotImplementedError`` for that, as from tensors on ``meta``.
    """


class ConfigError(TorchportError):
    """A configuration value or environment variable is malformed; the message lists what is accepted."""


class ErrorCode(IntEnum):
    """Numbers of errors of programs and delegates: those of ExecuTorch's ``Error`` (``runtime/core/error.h``)."""

    INTERNAL = 0x01
    INVALID_STATE = 0x02
    END_OF_METHOD = 0x03
    ALREADY_LOADED = 0x04
    NOT_SUPPORTED = 0x10
    NOT_IMPLEMENTED = 0x11
    INVALID_ARGUMENT = 0x12
    INVALID_TYPE = 0x13
    OPERATOR_MISSING = 0x14
    REGISTRATION_EXCEEDING_MAX_KERNELS = 0x15
    REGISTRATION_ALREADY_REGISTERED = 0x16
    NOT_FOUND = 0x20
    MEMORY_ALLOCATION_FAILED = 0x21
    ACCESS_FAILED = 0x22
    INVALID_PROGRAM = 0x23
    INVALID_EXTERNAL_DATA = 0x24
    OUT_OF_RESOURCES = 0x25
    DELEGATE_INVALID_COMPATIBILITY = 0x30
    DELEGATE_MEMORY_ALLOCATION_FAILED = 0x31
    DELEGATE_INVALID_HANDLE = 0x32


class DelegateError(TorchportError):
    """A delegate failed.

    A backend raises it with ``code`` and, where it knows, the debug handles (or its own ``ident``s of the debug map) of
    what failed; the runtime adds the rest.

    Attributes: ``code`` (an :class:`ErrorCode`), ``debug_handles``, ``source`` (the user's line), ``method``,
    ``delegate`` (backend and index), ``module`` (the path of the ``nn.Module``), ``hierarchy`` (its parents and their
    classes), ``op`` (the ATen operator) and ``stack`` (the user's calls that led there, with their text).
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = ErrorCode.INTERNAL,
        debug_handles: Sequence[int] = (),
        ident: int | str | None = None,
        source: str | None = None,
        method: str | None = None,
        delegate: str | None = None,
        module: str | None = None,
        hierarchy: str | None = None,
        op: str | None = None,
        stack: str | None = None,
    ) -> None:
        self.message = message
        self.code = code
        self.debug_handles = tuple(debug_handles)
        self.ident = ident
        self.source = source
        self.method = method
        self.delegate = delegate
        self.module = module
        self.hierarchy = hierarchy
        self.op = op
        self.stack = stack
        parts = [message]
        handles = ", ".join(map(str, self.debug_handles))
        rows = {"method": method, "delegate": delegate, "debug handle": handles, "op": op, "module": module}
        rows |= {"in": hierarchy, "line": source}
        parts += [f"  {name}: {value}" for name, value in rows.items() if value]
        parts += [f"    {line}" for line in (stack or "").splitlines()]
        super().__init__("\n".join(parts))


class ProgramError(TorchportError):
    """A program file is broken; ``entry`` names the part that failed, ``code`` is an :class:`ErrorCode`."""

    def __init__(self, message: str, *, entry: str | None = None, code: int = ErrorCode.INVALID_PROGRAM) -> None:
        super().__init__(message)
        self.entry = entry
        self.code = code


class MethodError(TorchportError):
    """A program's method was called wrongly: inputs, order of calls, options. ``code`` is an :class:`ErrorCode`."""

    def __init__(self, message: str, *, code: int = ErrorCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.code = code


class DispatchError(TorchportError):
    """The dispatcher cannot decide, or was asked for something it cannot do.

    Attributes: ``op`` and ``key``, the operator and the dispatch key by name, where the error is about a call.
    """

    def __init__(
        self, message: str, *, op: str | None = None, key: str | None = None, table: Callable[[], str] | None = None
    ) -> None:
        super().__init__(message)
        self.op = op
        self.key = key
        self._table = table

    def explain(self) -> str:
        """The message and, where the error is about a call, the operator's computed table as text."""
        return str(self) if self._table is None else f"{self}\n\n{self._table()}"


class MissingKernel(DispatchError):
    """No kernel for the operator at the key it was dispatched to."""


class AmbiguousKernel(DispatchError):
    """Several kernels claim the key and no rule lets one win."""
