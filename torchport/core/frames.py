"""Which line of the user's program is running."""

from __future__ import annotations

import sys
from typing import Final

import torch

__all__ = ["user_line"]

_PACKAGES: Final = (*torch.__path__, str(__file__).removesuffix("/core/frames.py"))
_HIDDEN: Final = (*(f"{path}/" for path in _PACKAGES), "<torchport kernel")


def user_line() -> str | None:
    """``file:line in function`` of the innermost frame that belongs neither to torch nor to torchport."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HIDDEN):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
