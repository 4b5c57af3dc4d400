"""OpenVINO's Python modules, imported when they are first needed."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Final

__all__ = ["openvino_module"]

_REPORTING: Final = "openvino_telemetry"


@functools.cache
def openvino_module(name: str) -> Any:
    """A module by its full name, such as ``openvino.opset13``. Raises ``ImportError``.

    OpenVINO reports imports to its makers, from a process that it forks of this one, which has threads: locks that
    these hold at that moment stay locked in it. So the reporting package is out of sight meanwhile, unless the program
    has imported it itself.
    """
    absent = _REPORTING not in sys.modules
    if absent:
        sys.modules[_REPORTING] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(name)
    finally:
        if absent:
            sys.modules.pop(_REPORTING, None)
