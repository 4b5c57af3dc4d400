"""Ahead of time: ``lower(model, args, backend=…)`` → a program that runs here and can be saved as one file."""

from __future__ import annotations

from .lower import lower
from .lowered import LoweredProgram
from .partitioner import DelegationSpec, OpList, Partitioner, PartitionResult, Pattern, Supported, WholeProgram

__all__ = [
    "DelegationSpec",
    "LoweredProgram",
    "OpList",
    "PartitionResult",
    "Partitioner",
    "Pattern",
    "Supported",
    "WholeProgram",
    "lower",
]
