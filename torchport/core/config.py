"""Every setting torchport reads, in one place: attribute of :data:`config`, or an environment variable, validated.

attribute              environment variable        meaning
``backend``            ``TORCHPORT_BACKEND``       backend bound to ``port:0``; empty: chosen automatically
``fallback``           ``TORCHPORT_FALLBACK``      ``allow`` | ``warn`` | ``error``: ops a backend cannot take
``fallback_backend``   ``TORCHPORT_FALLBACK_BACKEND`` backend that runs such ops where it takes all of a segment;
                                                   empty: the host. Read when a computation is compiled
``max_trace_ops``      ``TORCHPORT_MAX_TRACE_OPS`` ops traced before an automatic flush (at least 64)
``max_trace_nodes``    ``TORCHPORT_MAX_TRACE_NODES`` trie nodes a device keeps before it starts afresh
``max_computations``   ``TORCHPORT_MAX_COMPUTATIONS`` compiled computations kept in memory per backend
``verify_graphs``      ``TORCHPORT_VERIFY_GRAPHS`` check the FX normal form of every graph before it is compiled
``check_backends``     ``TORCHPORT_CHECK_BACKENDS`` look after each computation whether its backend kept to the contract
``flush_on_copy``      ``TORCHPORT_FLUSH_ON_COPY`` a host-to-device copy of more than one element ends the trace
``mode``               ``TORCHPORT_MODE``          ``lazy`` | ``eager``: what threads start in (``torchport.mode``)
``execution``          ``TORCHPORT_EXECUTION``     ``auto`` | ``inline`` | ``worker``: which thread computations run on
``native``             ``TORCHPORT_NATIVE``        build and use torchport's own small C++ libraries
``tiers``              ``TORCHPORT_TIERS``         ``auto`` | ``on`` | ``off``: interpret what is new, compile it later;
                                                   ``auto``: where the backend is slow to compile
``verify_swap``        ``TORCHPORT_VERIFY_SWAP``   runs of a computation that takes over to compare with the interpreter
``compile_workers``    ``TORCHPORT_COMPILE_WORKERS`` processes that compile beside the program; 0: none
``compile_after``      ``TORCHPORT_COMPILE_AFTER`` how many times what compiling is expected to take a computation has
                                                   to have cost before they are asked for it; ``auto``: by what that
                                                   costs the program
``compile_timeout``    ``TORCHPORT_COMPILE_TIMEOUT`` seconds that one computation may compile there
``compile_nice``       ``TORCHPORT_COMPILE_NICE``  how far those processes stand back for the program, 0 to 19
``pieces``             ``TORCHPORT_PIECES``        ``auto`` | ``off``: a graph whose layers repeat is compiled
                                                   in pieces, each different one once; or as a whole
``sizes``              ``TORCHPORT_SIZES``         ``auto`` | ``off``: graphs that are equal but for sizes share a
                                                   computation, where the backend has that; or have one each
``cache``              ``TORCHPORT_CACHE``         ``on`` | ``read-only`` | ``cache-only`` | ``off``: what is compiled,
                                                   on disk; with ``cache-only`` what is not there is an error
``cache_dir``          ``TORCHPORT_CACHE_DIR``     where they are; empty: in the user's cache folder
``cache_size``         ``TORCHPORT_CACHE_SIZE``    bytes they may take, such as ``5G``
``peer_timeout``       ``TORCHPORT_PEER_TIMEOUT``  seconds of silence after which a rank counts as gone (distributed)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from .errors import ConfigError

__all__ = ["Config", "config", "parse_size", "watch"]

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("a string")
    return raw


def _flag(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise ValueError("one of 1/0, true/false, yes/no, on/off")


def _count(minimum: int, maximum: int | None = None) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        try:
            value = int(raw) if isinstance(raw, (int, str)) and not isinstance(raw, bool) else minimum - 1
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"a whole number of at least {minimum}")
        if maximum is not None and value > maximum:
            raise ValueError(f"a whole number from {minimum} to {maximum}")
        return value

    return parse


_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(raw: object) -> int:
    """A number of bytes: a whole number, or text such as ``"512M"``. Raises ``ValueError``."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", str(raw).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes, such as 512M or 5G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _choice(*allowed: str) -> Callable[[object], str]:
    def parse(raw: object) -> str:
        if raw not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return str(raw)

    return parse


def _auto_or_number(raw: object) -> str | float:
    if raw == "auto":
        return "auto"
    try:
        value = -1.0 if isinstance(raw, bool) else float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ValueError("auto, or a number that is not negative")
    return value


_FIELDS: Final[dict[str, tuple[Callable[[object], Any], Any]]] = {
    "backend": (_text, ""),
    "fallback": (_choice("allow", "warn", "error"), "allow"),
    "fallback_backend": (_text, ""),
    "max_trace_ops": (_count(64), 20_000),
    "max_trace_nodes": (_count(1), 100_000),
    "max_computations": (_count(1), 1_024),
    "verify_graphs": (_flag, False),
    "check_backends": (_flag, False),
    "flush_on_copy": (_flag, True),
    "mode": (_choice("lazy", "eager"), "lazy"),
    "execution": (_choice("auto", "inline", "worker"), "auto"),
    "native": (_flag, True),
    "tiers": (_choice("auto", "on", "off"), "auto"),
    "verify_swap": (_count(0), 0),
    "compile_workers": (_count(0), 1),
    "compile_after": (_auto_or_number, "auto"),
    "compile_timeout": (_count(1), 600),
    "compile_nice": (_count(0, 19), 10),
    "pieces": (_choice("auto", "off"), "auto"),
    "sizes": (_choice("auto", "off"), "auto"),
    "cache": (_choice("on", "read-only", "cache-only", "off"), "on"),
    "cache_dir": (_text, ""),
    "cache_size": (parse_size, 5 << 30),
    "peer_timeout": (_count(2), 20),
}


class Config:
    """Validated settings; assigning a malformed value raises :class:`ConfigError` and changes nothing."""

    backend: str
    fallback: str
    fallback_backend: str
    max_trace_ops: int
    max_trace_nodes: int
    max_computations: int
    verify_graphs: bool
    check_backends: bool
    flush_on_copy: bool
    mode: str
    execution: str
    native: bool
    tiers: str
    verify_swap: int
    compile_workers: int
    compile_after: str | float
    compile_timeout: int
    compile_nice: int
    pieces: str
    sizes: str
    cache: str
    cache_dir: str
    cache_size: int
    peer_timeout: int

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ
        for name, (_, default) in _FIELDS.items():
            variable = f"TORCHPORT_{name.upper()}"
            if variable in env:
                self._assign(name, env[variable], variable)
            else:
                object.__setattr__(self, name, default)

    def _assign(self, name: str, value: object, shown: str) -> None:
        if name not in _FIELDS:
            raise ConfigError(f"torchport has no setting {name!r}; it has: {', '.join(sorted(_FIELDS))}")
        try:
            valid = _FIELDS[name][0](value)
        except ValueError as error:
            raise ConfigError(f"{shown} is {value!r}, but must be {error}") from None
        self._set(name, valid)

    def _set(self, name: str, value: object) -> None:
        changed = self.__dict__.get(name, value) != value
        object.__setattr__(self, name, value)
        if changed:
            for call in _watchers.get(name, ()):
                call()

    def __setattr__(self, name: str, value: object) -> None:
        self._assign(name, value, f"torchport.config.{name}")

    @contextmanager
    def override(self, **values: object) -> Generator[Config]:
        """Set the given settings inside a ``with`` block and restore them after it, also on an exception."""
        before = {name: getattr(self, name) for name in values if name in _FIELDS}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                self._set(name, value)

    def values(self) -> dict[str, Any]:
        """Every setting by name, as :meth:`override` takes them."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return "Config(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in _FIELDS) + ")"


_watchers: Final[dict[str, list[Callable[[], object]]]] = {}


def watch(name: str, call: Callable[[], object]) -> None:
    """Have ``call`` called whenever a setting has got another value."""
    _watchers.setdefault(name, []).append(call)


config: Final = Config()
