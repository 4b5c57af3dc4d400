"""Which frames are the user's: those neither of torch nor of torchport, nor of code that either generated."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Final, NamedTuple

import torch

__all__ = ["Frame", "is_users", "user_frames", "user_line", "warn_user"]

_PACKAGES: Final = (*torch.__path__, str(__file__).removesuffix("/core/frames.py"))
_HIDDEN: Final = (*(f"{path}/" for path in _PACKAGES), "<torchport kernel", "<eval_with_key>")
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?((?:(?!\s*File ").*\n?)*)')


class Frame(NamedTuple):
    """A frame of a stack trace that PyTorch noted on a node: its place, and the line's text, which may be empty."""

    file: str
    line: int
    function: str
    code: str

    @property
    def place(self) -> str:
        """``file:line in function``."""
        return f"{self.file}:{self.line} in {self.function}"


def is_users(file: str) -> bool:
    """Whether code in this file is the user's, by the name that its code object has."""
    return not file.startswith(_HIDDEN)


_known: Final[dict[str, bool]] = {}
"""Whether code in a file is the user's: asked for each operator that is recorded, some frames deep."""


def user_line() -> str | None:
    """``file:line in function`` of the innermost running frame that is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        shown = _known.get(name)
        if shown is None:
            shown = _known[name] = is_users(name)
        if shown:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def user_frames(stack_trace: str | None) -> list[Frame]:
    """The user's frames of a formatted stack trace, outermost first."""
    return [
        Frame(file, int(line), function, " ".join(part.strip() for part in code.splitlines()).strip())
        for file, line, function, code in _FRAME.findall(stack_trace or "")
        if is_users(file)
    ]


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, naming the innermost running frame that is the user's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
