"""Prints, as JSON, what each attribute of PyTorch's modules and classes is; and which modules are there.

    python patch_scan.py PROGRAM [modules to import afterwards, as JSON]

Two processes' answers can be compared: a function is told by where its code is, a container by what of torchport's it
holds (its other contents are PyTorch's own state), and an object by its class.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

OURS = "torchport"


def _described(value: Any, depth: int = 0) -> str:
    if isinstance(value, types.FunctionType):
        return f"function {value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {_described(value.__func__)}"
    if isinstance(value, types.MethodType):
        return f"method {_described(value.__func__)}"
    if isinstance(value, property):
        return f"property {_described(value.fget)}"
    if isinstance(value, functools.partial):
        return f"partial {_described(value.func)}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return f"builtin {value.__qualname__}"
    if isinstance(value, tuple) and depth < 2:
        return f"({', '.join(_described(item, depth + 1) for item in value)})"
    if isinstance(value, (list, set, frozenset, Mapping)) and depth < 2:
        items = [*value, *value.values()] if isinstance(value, Mapping) else value
        found = (_described(item, depth + 1) for item in list(items))
        return f"{type(value).__name__} {sorted(text for text in found if OURS in text)}"
    return type(value).__name__


def _attributes(path: str, owner: Any) -> Iterator[tuple[str, str]]:
    for name, value in list(vars(owner).items()):
        if not isinstance(value, types.ModuleType) and name not in ("__dict__", "__weakref__", "__doc__"):
            yield f"{path}.{name}", _described(value)


def scan() -> dict[str, str]:
    """Path → what is there, of every module of PyTorch's and every class that it defines."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if not (name == "torch" or name.startswith("torch.")) or type(module) is not types.ModuleType:
            continue
        found.update(_attributes(name, module))
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                found.update(_attributes(f"{value.__module__}.{value.__qualname__}", value))
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    exec(sys.argv[1])
    for module in json.loads(sys.argv[2]) if len(sys.argv) > 2 else []:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    modules = [name for name in sys.modules if name.startswith("torch.")]
    print(json.dumps({"modules": modules, "found": scan()}))
