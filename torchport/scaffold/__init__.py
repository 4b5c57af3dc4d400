"""``torchport new NAME``: a package with a backend that already runs, its tests, its CI and its README."""

from __future__ import annotations

from .generate import new_package

__all__ = ["new_package"]
