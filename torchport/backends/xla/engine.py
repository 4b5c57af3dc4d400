"""What running needs of JAX, in one place: importing this imports JAX."""

from __future__ import annotations

from .jax_api import module_text, x64
from .program import XlaProgram, compile_now, end, jax_device, wait
from .spread import in_use, of_array, place, used_as
from .values import XlaData, from_array, to_array

__all__ = [
    "XlaData",
    "XlaProgram",
    "compile_now",
    "end",
    "from_array",
    "in_use",
    "jax_device",
    "module_text",
    "of_array",
    "place",
    "to_array",
    "used_as",
    "wait",
    "x64",
]
