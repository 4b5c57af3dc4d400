"""Writes a backend's package from the templates beside this module, or nothing at all."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import string
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .. import __version__
from ..backend.registry import registry
from ..core.errors import TorchportError
from ..core.files import writing

__all__ = ["FILES", "KINDS", "new_package"]

FILES: Final[Mapping[str, str]] = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
    ".github/workflows/test.yml": "test.yml.txt",
    "src/$${package}/__init__.py": "init.py.txt",
    "src/$${package}/backend.py": "backend.py.txt",
    "src/$${package}/conformance.txt": "conformance.txt",
    "src/$${package}/py.typed": "empty.txt",
    "tests/test_backend.py": "test_backend.py.txt",
    "tests/test_conformance.py": "test_conformance.py.txt",
}
"""Path in the new package → template. Both are filled in by :class:`_Template`."""

KINDS: Final[Mapping[str, tuple[str, str, tuple[str, ...], str]]] = {
    "reference": (
        "seven methods that hand over to torchport's reference engine", "backend.py.txt", (),
        "Every graph goes to torchport's `reference` engine, which runs it operator by operator with\nPyTorch's CPU "
        "kernels; nothing of $$name is used yet.",
    ),
    "fx": (
        "an engine with a front end for FX graphs", "backend_fx.py.txt", (),
        "`front_end` in backend.py is to call the engine's; it returns the graph's own Python\ncode, and nothing of "
        "$$name is used yet.",
    ),
    "table": (
        "an engine that is emitted to operator by operator", "backend_table.py.txt", ("numpy",),
        "The table in backend.py has some thirty operators, as NumPy expressions; nothing of\n$$name is used yet.",
    ),
    "onnx": (
        "an engine that reads ONNX", "backend_onnx.py.txt", ("numpy", "onnx", "onnxruntime"),
        "The table in backend.py has some twenty-five operators; ONNX Runtime runs the models, and\nnothing of $$name "
        "is used yet.",
    ),
    "pjrt": (
        "an accelerator with a PJRT plugin", "backend_pjrt.py.txt", (),
        "JAX's CPU client runs everything until `$$PLUGIN` names the plugin's library.",
    ),
}  # fmt: skip
"""What a backend may begin as → what that is, the template of ``backend.py``, packages, what the README says of it."""

_BACKEND: Final = "src/$${package}/backend.py"
_TEMPLATES: Final = Path(__file__).with_name("templates")
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class _Template(string.Template):
    """``$$name`` and ``$${name}``: a single dollar sign is left to the shell and to GitHub's expressions."""

    delimiter = "$$"


def new_package(name: str, folder: Path | None = None, kind: str = "reference") -> Path:
    """Write a package whose backend is called ``name``; returns its folder (default: ``torchport-NAME``, here).

    ``kind``: what it begins as, of :data:`KINDS`. Raises :class:`TorchportError` for any other, where the name
    cannot be a backend's or is taken, and where the folder exists and is not empty. Nothing is left behind then.
    """
    _check_name(name)
    if kind not in KINDS:
        raise TorchportError(f"a package cannot begin as {kind!r}; it can as {', '.join(KINDS)}")
    _, template, packages, start = KINDS[kind]
    target = Path(f"torchport-{name.replace('_', '-')}") if folder is None else folder
    values = {
        "name": name,
        "package": f"torchport_{name}",
        "distribution": f"torchport-{name.replace('_', '-')}",
        "Class": "".join(part.capitalize() for part in name.split("_")) + "Backend",
        "PLUGIN": f"{name.upper()}_PJRT_PLUGIN",
        "requires": "".join(f', "{one}"' for one in packages),
        "extra": "[xla]" if kind == "pjrt" else "",
        "torchport": ".".join(__version__.split(".")[:2]),
    }
    values["start"] = _Template(start).substitute(values)
    try:
        _write(target, values, template)
    except OSError as error:
        raise TorchportError(f"the package cannot be written to {target}: {error}") from error
    return target


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
        proposal = "_".join(words)
        good = _NAME.fullmatch(proposal) and not keyword.iskeyword(proposal)
        advice = f": {proposal!r}" if good else ", as 'my_chip'"
        raise TorchportError(
            f"{name!r} cannot be a backend's name: it becomes part of a module's; write lower-case letters, digits and "
            f"single underscores, a letter first{advice}"
        )
    if name in registry.names():
        raise TorchportError(
            f"a backend {name!r} is installed already (torchport backends lists them); choose another name"
        )
    if importlib.util.find_spec(f"torchport_{name}") is not None:
        raise TorchportError(f"a module torchport_{name} is installed already; choose another name, or uninstall it")


def _write(target: Path, values: Mapping[str, str], backend: str) -> None:
    """All files into a folder beside the target, which then takes the target's name: there is no half-written one."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TorchportError(f"{target} exists and is not an empty folder; give another one with --dir")
    with writing(target):
        _write_files(target, values, {**FILES, _BACKEND: backend})


def _write_files(target: Path, values: Mapping[str, str], files: Mapping[str, str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        draft.chmod(0o755)  # mkdtemp's folders are its owner's alone
        for path, template in files.items():
            text = (_TEMPLATES / template).read_text(encoding="utf-8")
            file = draft / _Template(path).substitute(values)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_Template(text).substitute(values), encoding="utf-8", newline="\n")
        if target.exists():
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
