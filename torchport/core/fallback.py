"""The policy for operators that a backend does not take: whether the host may run them (``config.fallback``)."""

from __future__ import annotations

from . import metrics
from .config import config
from .errors import UnsupportedOp
from .frames import warn_user

__all__ = ["check_fallback", "note_fallback"]


def check_fallback(op: str, source: str | None, why: str) -> None:
    """Raise :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``. ``why`` the host is needed, ``source``:
    the user's line."""
    if config.fallback == "error":
        raise UnsupportedOp(
            f"{why}. Allow the host fallback with torchport.config.fallback = 'allow', or give the backend a kernel or "
            "a decomposition",
            op=op,
            source=source,
        )


def note_fallback(op: str, source: str | None, why: str) -> None:
    """Count that an operator, named as ``aten::sin``, runs on the host; warn or raise as ``config.fallback`` has it."""
    check_fallback(op, source, why)
    if config.fallback == "warn":
        warn_user(f"{op} runs on the host: {why} (called at {source})")
    metrics.count("Fallback")
    metrics.count(op)
