"""``torchport doctor``: what is installed, what works here, and what other libraries have to be told.

A section is a title and a function that gives its lines; :data:`SECTIONS` is the order they are printed in.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from typing import Final

import torch

from torchport_autoload import other_accelerator

from .. import __version__, native
from ..backend.registry import registry
from ..cache.current import folder_in_settings
from ..cache.folder import CacheFolder, trouble_with
from ..core import releases
from ..core.config import config
from ..frontend.device.libraries import ACCELERATE, LIGHTNING
from ..frontend.device.patches import ADDITIONS, PATCHES, WHILE_COMPILING
from ..native.twins import twins

__all__ = ["SECTIONS", "report"]

Rows = Iterable[tuple[str, str]]
"""The lines of a section, in two columns."""

_ENGINES: Final = ("jax", "openvino", "executorch")
_TOLD: Final = {
    "accelerate": ACCELERATE,
    "transformers": f"Trainer: {ACCELERATE}; pipeline(device='port'), from_pretrained(...).to('port')",
    "lightning": LIGHTNING,
    "pytorch-lightning": LIGHTNING,
    "sentence-transformers": "SentenceTransformer(..., device='port')",
}
"""Libraries whose list of devices is closed, and what to write for this one."""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Rows:
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", f"{torch.__version__}, {releases.said()}"
    yield "torchport", __version__
    for engine in _ENGINES:
        yield engine, _version(engine) or "not installed"


def _device() -> Rows:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield "registered", "no: TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set; unset it"
    else:
        yield "registered", "yes" if hasattr(torch, "port") else "no: import torch printed the reason"
    if other := other_accelerator():
        yield (
            f"beside {other}",
            "import torch alone does not register the device here; import torchport, or TORCHPORT_BACKEND, does. "
            f"PyTorch cannot run backward on {other} in a process where it is registered",
        )
    yield "torch.accelerator", f"current_accelerator() is {torch.accelerator.current_accelerator()}"
    yield (
        "TORCHPORT_BACKEND",
        os.environ.get("TORCHPORT_BACKEND", "not set: inductor where it is available, else reference"),
    )


def _backends() -> Rows:
    for row in registry.list():
        yield row.name, "available" if row.available else f"unavailable: {row.reason}"


def _compilers() -> Rows:
    chosen = os.environ.get("CXX")
    for name in (*([chosen] if chosen else []), "g++", "clang++"):
        yield name, shutil.which(name) or "not found"


def _native() -> Rows:
    yield from native.state()
    yield (
        "functions in C++ here",
        ", ".join(twins.in_cpp()) or "none in this process",
    )


def _disk_cache() -> Rows:
    yield "TORCHPORT_CACHE", config.cache
    path = folder_in_settings()
    trouble = trouble_with(path, create=False)
    if path.exists() and trouble:
        yield "folder", f"{path}, not used: {trouble}"
        return
    entries = CacheFolder(path, config.cache_size).list()
    yield (
        "folder",
        f"{path}: {len(entries)} entries, {sum(one.size for one in entries):,} of {config.cache_size:,} bytes",
    )


def _patches() -> Rows:
    tested = ", ".join(releases.TESTED)
    for target, (what, why, when) in (PATCHES | WHILE_COMPILING | ADDITIONS).items():
        versions = f"torch {tested}" if target.startswith(("torch", "*", "PrivateUse1")) else "any version"
        yield target, f"{what}: {why} (at {when}; {versions})"


def _libraries() -> Rows:
    told = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if told is not None:
        yield "ACCELERATE_TORCH_DEVICE", told
    for package, instead in _TOLD.items():
        version = _version(package)
        if version is not None:
            yield f"{package} {version}", instead


SECTIONS: Final[list[tuple[str, Callable[[], Rows]]]] = [
    ("versions", _versions),
    ("device", _device),
    ("backends", _backends),
    ("compilers", _compilers),
    ("C++ parts", _native),
    ("disk cache", _disk_cache),
    ("changes to PyTorch's objects, and to those of libraries", _patches),
    ("libraries with a list of devices of their own, and what to tell them", _libraries),
]


def report() -> str:
    """Every section as text. What fails in one section is told there; the others follow."""
    lines: list[str] = []
    for title, section in SECTIONS:
        try:
            rows = list(section())
        except Exception as error:
            rows = [("failed", f"{type(error).__name__}: {error}")]
        width = max((len(name) for name, _ in rows), default=0)
        lines += [
            title,
            *(f"  {name:<{width}}  {' '.join(value.split())}" for name, value in rows or [("none", "")]),
            "",
        ]
    return "\n".join(line.rstrip() for line in lines[:-1])
