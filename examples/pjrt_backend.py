"""A backend for an accelerator that comes as a PJRT plugin: JAX loads the plugin, torchport's ``xla`` lowers to it.

``PJRT_PLUGIN`` names the plugin's shared library, ``PJRT_PLATFORM`` what it calls its platform. Without a plugin the
backend runs on the CPU client that comes with JAX. That client is PJRT, too, so all of this can be tried anywhere.

What is inherited: lowering to StableHLO, compiling, values that stay in the accelerator's memory, donation, the disk
cache, program files, errors. What is written here is what differs from plugin to plugin: how it is found, which dtypes
the hardware has, and which operators its compiler does not take.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import torchport as tp
from torchport.backends.xla import XlaBackend

aten = torch.ops.aten
LIBRARY = os.environ.get("PJRT_PLUGIN", "")
PLATFORM = os.environ.get("PJRT_PLATFORM", "") if LIBRARY else "cpu"
DTYPES = frozenset({"float32", "bfloat16", "int32", "int64", "bool"})
"""What the hardware has. torchport keeps values of other dtypes on the host, and runs there what reads or makes them.
Random operators are arithmetic on int64: without it they would run on the host as well."""
NOT_COMPILED: dict[Any, str] = {aten.sort.default: "sort", aten.sort.stable: "sort"}
"""Operators that the plugin's compiler does not take, as an example: they run on the host, between two computations."""


@functools.cache
def register_plugin() -> None:
    """Make the plugin known to JAX. It comes before the first use of JAX in the process, which starts all platforms.

    A plugin that is installed as a package, with an entry point in the group ``jax_plugins``, needs no such call: JAX
    finds it, and the backend ``xla`` runs on it as it is.
    """
    if LIBRARY:
        from jax._src import xla_bridge  # where JAX keeps the function that its own plugins call

        xla_bridge.register_plugin(PLATFORM, library_path=LIBRARY)


@tp.register
class PjrtBackend(XlaBackend):
    name = "pjrt"
    version = "0"

    @functools.cached_property
    def capabilities(self) -> tp.Capabilities:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dataclasses.replace(super().capabilities, dtypes=DTYPES)

    def is_available(self) -> bool:
        return super().is_available() and not self.unavailable_reason()

    def unavailable_reason(self) -> str:
        if LIBRARY and not Path(LIBRARY).is_file():
            return f"PJRT_PLUGIN is {LIBRARY}, which is no file; set it to the path of the plugin's library"
        if LIBRARY and not PLATFORM:
            return "PJRT_PLATFORM is not set; set it to what the plugin calls its platform"
        return super().unavailable_reason()

    def devices(self) -> Sequence[tp.BackendDevice]:
        register_plugin()
        found = [device for device in super().devices() if device.type == PLATFORM]
        if not found:
            raise RuntimeError(f"JAX has no devices of {PLATFORM!r}; is another platform named in JAX_PLATFORMS?")
        return found

    def supports(self, node: fx.Node) -> tp.Support:
        if node.target in NOT_COMPILED:
            return tp.Support.no(f"the plugin's compiler has no {NOT_COMPILED[node.target]}")
        return super().supports(node)
