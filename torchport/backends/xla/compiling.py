"""What compiling needs, in one place: the lowering table and JAX's export. Importing this imports JAX."""

from __future__ import annotations

from .coverage import decompositions, supports
from .jax_api import export_function, platforms
from .kernels import register
from .lowering import Program, shapes_of

__all__ = ["Program", "decompositions", "export_function", "platforms", "register", "shapes_of", "supports"]
