"""The exception tree. Every error torchport raises on purpose is one of these.

::

    TorchportError (RuntimeError)
    ├── BackendNotFound      no backend of that name is registered or installed
    ├── BackendUnavailable   it is installed, but cannot run here
    ├── UnsupportedOp        no kernel, capture, decomposition or fallback takes the op
    ├── CompileError         a backend's preprocess or init failed
    ├── ExecutionError       a compiled computation failed while it ran
    ├── DeviceMismatch       tensors of different devices met in one op
    ├── GraphError           a graph is not in FX normal form
    ├── StorageAccess        memory of a device tensor was asked for; it has none in this process
    ├── ConfigError          a configuration value or environment variable is malformed
    ├── DelegateError        a delegate failed (with code, debug handle, source line)
    ├── ProgramError         a program file is broken (with the entry that failed)
    └── DispatchError
        ├── MissingKernel    no kernel for the operator at the key it was dispatched to
        └── AmbiguousKernel  several kernels claim the key and none may win

The tree derives from ``RuntimeError`` because that is what PyTorch raises for the same mistakes, so code that
catches PyTorch's errors keeps working. An engine's own exception is mapped at the boundary and chained with ``from``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = [
    "AmbiguousKernel",
    "BackendNotFound",
    "BackendUnavailable",
    "CompileError",
    "ConfigError",
    "DelegateError",
    "DeviceMismatch",
    "DispatchError",
    "ExecutionError",
    "GraphError",
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


class ExecutionError(_AtUserLine):
    """A compiled computation failed while it ran; the backend's own exception is chained."""


class DeviceMismatch(_AtUserLine):
    """Tensors of different devices met in one operator."""


class GraphError(TorchportError):
    """A graph breaks a rule of the FX normal form; the message names the node and the rule."""


class StorageAccess(TorchportError):
    """Raw memory of a device tensor was asked for; device tensors have none in this process."""


class ConfigError(TorchportError):
    """A configuration value or environment variable is malformed; the message lists what is accepted."""


class DelegateError(TorchportError):
    """A delegate failed.

    Attributes: ``code`` (numeric, as in ExecuTorch's ``Error``), ``debug_handles`` and ``source`` (the user's line).
    """

    def __init__(
        self, message: str, *, code: int = 1, debug_handles: Sequence[int] = (), source: str | None = None
    ) -> None:
        super().__init__(message if source is None else f"{message}\n  line: {source}")
        self.code = code
        self.debug_handles = tuple(debug_handles)
        self.source = source


class ProgramError(TorchportError):
    """A program file is broken; ``entry`` names the part that failed."""

    def __init__(self, message: str, *, entry: str | None = None) -> None:
        super().__init__(message)
        self.entry = entry


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
