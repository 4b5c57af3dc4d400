"""Releases of PyTorch: which torchport was tested with, and what one of them has that another one lacks.

Everything that depends on the release of PyTorch asks here. Private torch APIs used here: none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

import torch

__all__ = ["SINCE", "TESTED", "UNTIL", "has", "operators", "said", "takes", "version"]

TESTED: Final = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""The releases that the whole suite of its day has been run with; ``docs/torch-internals.md`` has the results."""

SINCE: Final[dict[str, tuple[int, int]]] = {
    "torch.accelerator.empty_host_cache": (2, 12),
    "torch.accelerator.memory.empty_host_cache": (2, 12),
}
"""Names that torchport wraps and the oldest tested release lacks, with the minor release that brought them."""

UNTIL: Final[dict[str, tuple[int, int]]] = {
    # AOTAutograd lets every class without a __torch_dispatch__ pass by itself.
    "torch._functorch._aot_autograd.runtime_wrappers.HANDLED_TYPES": (2, 15),
}
"""Names that torchport wraps and the newest tested release lacks, with the minor release that dropped them."""


def version(text: str | None = None) -> tuple[int, int]:
    """The minor release of a version, or of what is installed: ``(2, 13)``."""
    major, minor = (text or torch.__version__).split(".")[:2]
    return int(major), int(minor)


def has(name: str) -> bool:
    """Whether this release has a name that :data:`SINCE` or :data:`UNTIL` lists; True for every other name."""
    return SINCE.get(name, (0, 0)) <= version() and (name not in UNTIL or version() < UNTIL[name])


def operators(namespace: Any, *names: str) -> Iterable[Any]:
    """The ``default`` overloads of those operators that this release has; PyTorch drops one now and then."""
    return [getattr(namespace, name).default for name in names if hasattr(namespace, name)]


def takes(function: Any, parameter: str) -> bool:
    """Whether this release's function has a parameter of that name."""
    return parameter in inspect.signature(function).parameters


def said() -> str:
    """Whether the installed release was tested, for people to read."""
    installed = torch.__version__.split("+")[0]
    if installed in TESTED:
        return "tested with torchport"
    others = ", ".join(TESTED)
    if version() in {version(text) for text in TESTED}:
        return f"not tested with torchport, but another patch of the same minor release was (tested: {others})"
    return f"not tested with torchport (tested: {others})"
