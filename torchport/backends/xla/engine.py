"""What running needs of JAX, in one place: importing this imports JAX."""

from __future__ import annotations

from .jax_api import module_text, x64
from .program import XlaProgram, compile_now, end, jax_device, wait
from .values import XlaData, from_array, to_array

__all__ = [
    "XlaData",
    "XlaProgram",
    "compile_now",
    "end",
    "from_array",
    "jax_device",
    "module_text",
    "to_array",
    "wait",
    "x64",
]
