"""The one place where the dispatcher meets PyTorch. Imported on demand; the rest of the package needs no torch.

Private PyTorch APIs used here (checked on torch 2.13.0):

===============================================  ==================================================================
name                                             what for
===============================================  ==================================================================
``torch._C._dispatch_tls_local_include_set``     this thread's included keys, for ``explain``
``torch._C._dispatch_tls_local_exclude_set``     this thread's excluded keys, for ``explain``
``torch._C._dispatch_dump``                      an operator's registrations with file and line, as text
``torch._C._dispatch_dump_table``                the fallbacks, read off an operator that has no kernel
``torch._C._dispatch_library``                   to define that operator for a moment
``torch._C._dispatch_get_all_op_names``          the names of PyTorch's operators
``torch._C._dispatch_key_for_device``            a device type's key
``torch._C._get_privateuse1_backend_name``       what ``privateuseone`` is called in this process
===============================================  ==================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

import torch

from torchport.core.errors import DispatchError

from .keys import DispatchKey, backends
from .keyset import DispatchKeySet, tensor_keys
from .rules import KernelTable, Registration, fallthrough
from .schema import Schema, parse_schema

__all__ = [
    "StockOperator",
    "device_keys",
    "stock_operator",
    "stock_operator_names",
    "thread_keysets",
]

_C: Final = cast(Any, torch)._C


def thread_keysets() -> tuple[DispatchKeySet, DispatchKeySet]:
    """The keys PyTorch includes and excludes in this thread."""
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return DispatchKeySet.from_torch(included), DispatchKeySet.from_torch(excluded)


def device_keys(device: str) -> DispatchKeySet:
    """The keys of a plain tensor on a device (``cpu``, ``cuda:0``, ``meta``, a renamed private device).

    Errors: ``DispatchError`` for a device type PyTorch does not know.
    """
    device_type = device.split(":", 1)[0]
    if device_type == _C._get_privateuse1_backend_name():
        device_type = "privateuseone"
    try:
        name = _C._dispatch_key_for_device(device_type)
    except RuntimeError as error:
        raise DispatchError(f"device {device!r}: PyTorch dispatches no such device type") from error
    component = backends.get_optional(name)
    if component is None:
        return DispatchKeySet(name, "ADInplaceOrView", "AutogradOther")
    return tensor_keys(component)


# -- registrations of PyTorch's own dispatcher ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StockOperator:
    """An operator of PyTorch's C++ dispatcher, read off its registrations; ``table`` is recomputed by our rules."""

    name: str
    schema_text: str
    schema: Schema | None
    """None when the schema is beyond our grammar."""
    defined_at: str
    table: KernelTable


_STATE_LINE: Final = re.compile(r"(?P<key>\w+)(?P<alias>\[alias\])?(?P<inactive> \(inactive\))?: (?P<rest>.*)$")
_TABLE_LINE: Final = re.compile(r"(?P<key>\w+): (?P<fall>fallthrough )?(?P<label>.*) \[backend fallback\]$")
_SOURCE: Final = re.compile(r"registered at (?P<source>\S+:\d+)")
_BUILD_ROOT: Final = re.compile(r"^/__w/pytorch/pytorch/")


def _source(label: str) -> str:
    found = _SOURCE.search(label)
    return _BUILD_ROOT.sub("", found["source"]) if found else label


def _stock_kernel(*args: Any, **kwargs: Any) -> Any:
    raise DispatchError("this kernel belongs to PyTorch's C++ dispatcher and can only be explained, not called, here")


@lru_cache(maxsize=512)
def _is_modelled(key: str) -> bool:
    """Whether we have a key of PyTorch's; an older release has one more, ``Named``."""
    try:
        DispatchKey(key)
    except DispatchError:
        return False
    return True


def _registration(key: str, label: str, op: str | None, is_fallthrough: bool) -> Registration:
    kernel = fallthrough if is_fallthrough else _stock_kernel
    return Registration(DispatchKey(key), kernel, op=op, label=label, source=_source(label))


def stock_fallbacks() -> Mapping[DispatchKey, Registration]:
    """PyTorch's backend fallbacks, read off the table of an operator without kernels."""
    library = _C._dispatch_library("FRAGMENT", "torchport_explain", "")
    library.def_("no_kernels(Tensor x) -> Tensor")
    text: str = _C._dispatch_dump_table("torchport_explain::no_kernels")
    del library
    found: dict[DispatchKey, Registration] = {}
    for line in text.splitlines():
        match = _TABLE_LINE.match(line)
        if match and _is_modelled(match["key"]):
            found[DispatchKey(match["key"])] = _registration(match["key"], match["label"], None, bool(match["fall"]))
    return found


def stock_operator(name: str, fallbacks: Mapping[DispatchKey, Registration] | None = None) -> StockOperator | None:
    """Read an operator's registrations from PyTorch; None when it has no operator of that name."""
    name = name.removesuffix(".default")
    text: str = _C._dispatch_dump(name) if re.fullmatch(r"\w+::\w+(\.\w+)?", name) else ""
    if not text:
        return None
    table = KernelTable((stock_fallbacks() if fallbacks is None else fallbacks).get)
    schema_text, defined_at = "", ""
    for line in text.splitlines():
        if line.startswith("schema: "):
            schema_text = line.removeprefix("schema: ")
        elif line.startswith("debug: "):
            defined_at = _source(line.removeprefix("debug: "))
        elif not line.startswith(("name: ", "alias analysis kind: ")):
            _add_state_line(table, name, line)
    return StockOperator(name, schema_text, _schema(schema_text), defined_at, table)


def _add_state_line(table: KernelTable, name: str, line: str) -> None:
    match = _STATE_LINE.match(line)
    if match is None or not _is_modelled(match["key"]):
        return
    label, _, detail = match["rest"].partition(" :: ")
    is_fallthrough = detail.rpartition("[ ")[2].startswith("fallthrough")
    registration = _registration(match["key"], label, name, is_fallthrough)
    table.direct.setdefault(registration.key, []).append(registration)


@lru_cache(maxsize=4096)
def _schema(text: str) -> Schema | None:
    try:
        return parse_schema(text)
    except DispatchError:
        return None


def stock_operator_names() -> list[str]:
    """Names of every operator PyTorch knows in this process."""
    return list(_C._dispatch_get_all_op_names())
