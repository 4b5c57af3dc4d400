"""What a compiled graph depends on: the manifest of its entry in the disk cache, whose hash is the key.

A component is a digest, or text where that is short, so that two manifests can be compared by people. Nothing is in it
that is not compiled: no names, no lines of the program, no debug handles, no device ordinal, no folder, nobody's rank.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from ..cache.digests import Digests
from ..core.config import config
from ..core.specs import CompileSpecs, TensorSpec
from .control_flow import inner_graph
from .interface import Backend
from .optional import optional_of
from .pieces import in_pieces
from .registry import recipe_of

__all__ = ["Uncacheable", "machine", "manifest_of", "own_code", "torch_build"]

_PACKAGE: Final = Path(__file__).parents[1]
_OWN_CODE: Final = ("backend", "core", "dispatch", "native")
"""torchport's folders that decide what a backend is given and what becomes of it."""


class Uncacheable(Exception):
    """What this backend gives cannot be kept for other processes; the text says why."""


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _lists(specs: Sequence[TensorSpec]) -> list[Any]:
    return [[list(spec.shape), str(spec.dtype), list(spec.strides)] for spec in specs]


# -- the machine -------------------------------------------------------------------------------------------------------
@functools.cache
def machine() -> str:
    """The processor by architecture and instruction set extensions: compilers use all of them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
        extensions = " ".join(sorted(found[1].split())) if found else platform.processor()
    except OSError:
        extensions = platform.processor()
    chosen = os.environ.get("ATEN_CPU_CAPABILITY", "")
    return f"{sys.platform} {platform.machine()} {_short([extensions, chosen])}"


@functools.cache
def torch_build() -> str:
    """PyTorch's version, commit and options of its build."""
    return f"{torch.__version__} {torch.version.git_version} {_short(torch.__config__.show())}"


def _settings() -> str:
    """PyTorch's settings that compilers go by."""
    return " ".join([
        f"dtype={torch.get_default_dtype()}",
        f"precision={torch.get_float32_matmul_precision()}",
        f"deterministic={torch.are_deterministic_algorithms_enabled():d}",
        f"threads={torch.get_num_threads()}",
        f"onednn={torch.backends.mkldnn.enabled:d}",  # pyright: ignore[reportAttributeAccessIssue]
    ])  # fmt: skip


def own_code(digests: Digests) -> str:
    """A hash of torchport's sources that decide what a backend is given. Raises ``OSError``."""
    return _short([digests.sources(str(_PACKAGE / folder)) for folder in _OWN_CODE])


# -- the backend -------------------------------------------------------------------------------------------------------
def _code_of(backend: Backend, digests: Digests) -> str:
    """A hash of the backend's sources: those of its package, or its module where that is a single file."""
    module = sys.modules.get(type(backend).__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        raise Uncacheable(f"backend {backend.name!r} is defined in no file, so its code cannot be told from another's")
    package = getattr(module, "__path__", None)
    # A module of a package brings the package. One of torchport's own that is a single file does not bring the others.
    alone = package is None and (not module.__package__ or os.path.dirname(file) == str(_PACKAGE / "backends"))  # type: ignore[union-attr]
    return digests.file(file) if alone else digests.sources(os.path.dirname(file))


def _recipe(backend: Backend) -> str:
    recipe = recipe_of(backend)
    if recipe is None:
        raise Uncacheable(
            f"backend {backend.name!r} is known in this process only: what it gives is kept where it has an entry "
            "point, or was registered as a class or function of a module that can be imported"
        )
    return recipe


_fixed: Final[dict[tuple[int, int], tuple[Backend, dict[str, str]]]] = {}
"""Components that do not change while a process runs, by backend and cache folder."""


def _identity(backend: Backend, digests: Digests) -> dict[str, str]:
    """The components that say which backend, engine, torchport and torch compile."""
    place = id(backend), id(digests)
    known = _fixed.get(place)
    if known is not None and known[0] is backend:
        return known[1]
    engine = optional_of(backend).cache_key
    found = {
        "backend": f"{backend.name} {backend.version} {_recipe(backend)}",
        "backend's code": _code_of(backend, digests),
        "engine": "" if engine is None else digests.files(engine.engine_files()),
        "torchport": own_code(digests),
        "torch": torch_build(),
        "machine": machine(),
    }
    digests.save()
    _fixed[place] = backend, found
    return found


# -- the graph ---------------------------------------------------------------------------------------------------------
def _values(graph: fx.GraphModule) -> Iterator[Any]:
    """The spec of every value of a graph and of those that it calls, in order: a backend reads them."""
    for node in graph.graph.nodes:
        if (inner := inner_graph(graph, node)) is not None:
            yield from _values(inner)
        elif node.op == "call_function":
            yield _spec_of(node.meta.get("val"))


def _spec_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype), list(value.stride())]
    if isinstance(value, (list, tuple)):
        return [_spec_of(one) for one in value]
    return None


def manifest_of(
    backend: Backend,
    specs: CompileSpecs,
    graph: fx.GraphModule,
    mark: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    digests: Digests,
) -> dict[str, str]:
    """What the bytes that ``preprocess`` gives for a graph depend on, by component. Raises :class:`Uncacheable`.

    ``mark``: the graph's fingerprint.
    """
    if backend.capabilities.skips_cache:
        raise Uncacheable(f"backend {backend.name!r} skips the disk cache")
    device = next(iter(backend.devices()))
    able = optional_of(backend)
    try:
        identity = _identity(backend, digests)
    except OSError as error:
        raise Uncacheable(f"files of backend {backend.name!r} cannot be read: {error}") from error
    engine = {} if able.cache_key is None else able.cache_key.cache_key(device)
    settings = {} if able.compiler_settings is None else able.compiler_settings.compiler_settings()
    return {
        "graph": mark,
        "inputs": _short(_lists(inputs)),
        "outputs": _short(_lists(outputs)),
        "values": _short(list(_values(graph))),
        "specs": specs.fingerprint(),
        "device": device.type,
        "settings": _settings(),
        "form": " ".join(
            [
                "in pieces where it repeats" if in_pieces(backend) else "whole",
                *(["each size by itself"] if config.sizes == "off" else []),
            ]
        ),
        "engine's settings": _short({name: repr(value) for name, value in settings.items()}),
        **identity,
        **{f"engine: {name}": text for name, text in engine.items()},
    }
