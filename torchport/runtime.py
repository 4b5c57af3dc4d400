"""The runtime of program files: ``torchport.runtime.load(path)`` → program → method. Needs no model and no compiler."""

from __future__ import annotations

from .program.document import OLDEST, VERSION
from .program.loader import BytesLoader, DataLoader, FileLoader, SegmentInfo
from .program.method import Method, State
from .program.package import check_header
from .program.profile import Event, Profile
from .program.program import DelegateMeta, MethodMeta, Program, TensorMeta, load

__all__ = [
    "OLDEST",
    "VERSION",
    "BytesLoader",
    "DataLoader",
    "DelegateMeta",
    "Event",
    "FileLoader",
    "Method",
    "MethodMeta",
    "Profile",
    "Program",
    "SegmentInfo",
    "State",
    "TensorMeta",
    "check_header",
    "load",
]
