"""A backend that computes as the CPU does, and for sizes that vary is given padded graphs, as ``xla`` is."""

from __future__ import annotations

from torchport.backend.interface import Capabilities
from torchport.backends.reference import ReferenceBackend

__all__ = ["Padding"]


class Padding(ReferenceBackend):
    """``reference``, said to compile slowly and to be worth a disk cache."""

    name = "padding"
    capabilities = Capabilities(donation=True, restores_donated=True, slow_to_compile=True)
