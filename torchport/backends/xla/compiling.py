"""What compiling needs, in one place: the lowering table and JAX's export. Importing this imports JAX."""

from __future__ import annotations

from .at_once import register
from .coverage import decompositions, supports
from .jax_api import export_function, platforms
from .lowering import JaxFunction

__all__ = [
    "JaxFunction",
    "decompositions",
    "export_function",
    "platforms",
    "register",
    "supports",
]
