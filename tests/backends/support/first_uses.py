"""First uses of the device: what a program may do with it before anything else has made it ready.

Each kind is a function of a device type that returns values to compare. ``python first_uses.py KIND port`` runs one as
the very first use in its process; ``all port warm`` warms the device up and runs them all, ``all cpu warm`` gives what
is right, and ``save port`` makes the files that some load, in the folder ``FIRST_USES_SAVED``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import first_uses_code  # noqa: F401  (registers its kinds)
import torch
from first_uses_state import save
from first_uses_support import AS_WARM, KINDS, Tied, plain, train

__all__ = ["AS_WARM", "KINDS", "result_of", "save"]


def result_of(name: str, device: str) -> Any:
    """What a kind comes to."""
    try:
        return plain(KINDS[name](device))
    except Exception as error:
        if os.environ.get("FIRST_USES_DEBUG"):
            traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def main() -> None:
    """``KIND DEVICE``, ``save DEVICE`` or ``all DEVICE warm``; the results are the last line."""
    what, device = sys.argv[1:3]
    torch.manual_seed(0)
    if what == "save":
        save(device)
    elif what == "all":
        train(Tied().to(device), device)
        results: dict[str, Any] = {}
        for name in KINDS:
            torch.manual_seed(0)
            results[name] = result_of(name, device)
        print(json.dumps(results))
    else:
        print(json.dumps({what: result_of(what, device)}))


if __name__ == "__main__":
    main()
