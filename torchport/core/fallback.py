"""The policy for operators that a backend does not take: whether the host may run them (``config.fallback``)."""

from __future__ import annotations

from . import metrics
from .config import config
from .errors import UnsupportedOp
from .frames import warn_user

__all__ = ["check_fallback", "note_fallback"]


def check_fallback(op: object, source: str | None, why: str) -> None:
    """Raise :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``. ``why`` the host is needed, ``source``:
    the user's line."""
    if config.fallback == "error":
        raise UnsupportedOp(
            f"{why}. Allow the host fallback with torchport.config.fallback = 'allow', or give the backend a kernel or "
            "a decomposition",
            op=str(op),
            source=source,
        )


def note_fallback(op: object, source: str | None, why: str) -> None:
    """Count that an operator runs on the host, in all and by its name; warn or raise as ``config.fallback`` has it."""
    check_fallback(op, source, why)
    named = getattr(op, "name", None)
    name = str(named()) if callable(named) else str(op)
    if config.fallback == "warn":
        warn_user(f"{name} runs on the host: {why} (called at {source})")
    metrics.count("Fallback")
    metrics.count(name)
