"""The conformance kit: how much of PyTorch works on a backend, and what does not, reduced to a few lines.

``torchport conform BACKEND`` is the command; these names are for tests and scripts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import assert_conforms, op_cases, run_case
    from .frontends import FRONTENDS, Frontend, Place
    from .minimise import Minimised, minimise_case, minimise_script
    from .plan import Case, Plan, Result
    from .report import Report, read_report
    from .run import conform
    from .target import load_backend

_HOMES = {
    "cases": "assert_conforms op_cases run_case",
    "frontends": "FRONTENDS Frontend Place",
    "plan": "Case Plan Result",
    "report": "Report read_report",
    "minimise": "Minimised minimise_case minimise_script",
    "run": "conform",
    "target": "load_backend",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "FRONTENDS",
    "Case",
    "Frontend",
    "Minimised",
    "Place",
    "Plan",
    "Report",
    "Result",
    "assert_conforms",
    "conform",
    "load_backend",
    "minimise_case",
    "minimise_script",
    "op_cases",
    "read_report",
    "run_case",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'torchport.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
