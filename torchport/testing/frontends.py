"""Frontends: the ways a PyTorch program reaches a backend. Adding one is one entry in :data:`FRONTENDS`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..run.device_runtime import runtimes
from .plan import VARIANTS

__all__ = ["FRONTENDS", "Frontend", "Place", "available_frontends"]

_OF_VALUES: Final = ("forward", "noncontiguous", "edge", "view")
_WITHOUT_GRADIENTS: Final = (*_OF_VALUES, "inplace", "out")


@dataclass(frozen=True)
class Place:
    """Where a case runs: the device its tensors live on, how functions are called there, and what is on meanwhile."""

    device: Any
    call: Callable[..., Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    executes: bool = False
    """Whether a case that never reaches the backend's ``execute`` has missed it, even if its values are right."""


@dataclass(frozen=True)
class Frontend:
    """One way in.

    ``missing`` says why the frontend cannot be used, or nothing; ``place`` opens it for a backend's name; ``variants``
    are those that mean something behind it; ``limit`` is the most samples per operator, dtype and variant, for
    frontends whose cases take long.
    """

    name: str
    missing: Callable[[], str]
    place: Callable[[str], Place]
    variants: Sequence[str] = VARIANTS
    limit: int | None = None


def _plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _never() -> str:
    return ""


def _lazy(backend: str) -> Place:
    import torchport  # on demand: public names are looked up when they are used

    return Place(torchport.use(backend), _plain)


def _indexed(backend: str) -> Place:
    import torch

    import torchport  # on demand: public names are looked up when they are used

    torchport.device(backend)
    # PyTorch treats index 0 of a Python-defined device unlike all others.
    return Place(torch.device("port", runtimes.bind(torchport.get_backend(backend), least=1)), _plain)


def _inference(backend: str) -> Place:
    import torch

    return dataclasses.replace(_lazy(backend), around=torch.inference_mode)


def _no_eager() -> str:
    import torchport  # on demand: public names are looked up when they are used

    return "" if hasattr(torchport, "mode") else "torchport.mode does not exist in this version"


def _eager(backend: str) -> Place:
    import torchport  # on demand: public names are looked up when they are used

    mode: Any = getattr(torchport, "mode")  # noqa: B009 - absent in versions without the frontend
    return Place(torchport.use(backend), _plain, lambda: mode("eager"))


def _no_compile() -> str:
    import torch

    try:
        known = torch.compiler.list_backends(exclude_tags=())
    except ImportError as error:
        return f"torch.compile cannot be imported: {error}"
    return "" if "torchport" in known else "torch.compile knows no backend 'torchport' in this version"


def _compile(backend: str) -> Place:
    import torch

    def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.compiler.reset()
        compiled = torch.compile(fn, backend="torchport", options={"backend": backend}, dynamic=False)
        return compiled(*args, **kwargs)

    return Place(torch.device("cpu"), call, executes=True)


def _no_aot() -> str:
    if importlib.util.find_spec("torchport.aot") is None or importlib.util.find_spec("torchport.runtime") is None:
        return "torchport.aot does not exist in this version"
    return ""


def _aot(backend: str) -> Place:
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    aot: Any = importlib.import_module("torchport.aot")
    runtime: Any = importlib.import_module("torchport.runtime")
    inputs_of_programs = (torch.Tensor, bool, int, float, complex, str, type(None))

    class ExportedCall(torch.nn.Module):
        """A call with what torch.export takes as inputs; dtypes, devices and other objects are part of the program."""

        def __init__(self, fn: Callable[..., Any], leaves: Sequence[Any], structure: Any, tell: Any) -> None:
            super().__init__()
            self.fn, self.leaves, self.structure = fn, leaves, structure
            self.tell = tell
            """Gets the structure of the result: torch.export puts a module's attributes back after it has run."""

        def forward(self, *inputs: Any) -> Any:
            given = iter(inputs)
            leaves = [next(given) if isinstance(leaf, inputs_of_programs) else leaf for leaf in self.leaves]
            args, kwargs = tree_unflatten(leaves, self.structure)
            results, found = tree_flatten(self.fn(*args, **kwargs))
            self.tell(found)
            return results

    def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, inputs_of_programs))
        found: list[Any] = []
        exported = torch.export.export(ExportedCall(fn, leaves, structure, found.append), inputs)
        with tempfile.TemporaryDirectory(prefix="torchport-aot-") as folder:
            path = Path(folder) / "case.pt2"
            aot.lower(exported, backend=backend).save(path)
            results = runtime.load(path).load_method()(*inputs)
        return tree_unflatten(list(results), found[-1])

    return Place(torch.device("cpu"), call, executes=True)


FRONTENDS: Final[Mapping[str, Frontend]] = {
    frontend.name: frontend
    for frontend in (
        Frontend("lazy", _never, _lazy),
        Frontend("indexed", _never, _indexed, limit=2),
        Frontend("inference", _never, _inference, _WITHOUT_GRADIENTS, 2),
        Frontend("eager", _no_eager, _eager),
        Frontend("compile", _no_compile, _compile, (*_OF_VALUES, "backward", "training"), 2),
        Frontend("aot", _no_aot, _aot, _OF_VALUES, 2),
    )
}
"""Every frontend by name. ``compile`` and ``aot`` take CPU tensors and trace each case anew, so they run few samples;
so do ``indexed`` and ``inference``, which are the lazy device at an index above 0 and in inference mode."""


def available_frontends() -> dict[str, str]:
    """Frontend → why it cannot be used, or nothing."""
    return {name: frontend.missing() for name, frontend in FRONTENDS.items()}
