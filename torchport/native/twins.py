"""Functions that exist twice, in Python and in C++, and the one place that says which of the two runs.

:data:`twins` has one attribute per function; callers call ``twins.sweep(…)`` and never one of the two forms directly.
The Python form registers itself where it is defined (:meth:`Twins.python`). The C++ form replaces the Python form once
its library is loaded (:meth:`Twins.use`). C++ functions behind PyTorch's dispatcher, and helpers of C++ functions,
mirror Python functions too. A comment ``Twin of …`` above a C++ function names its Python form; :func:`table` collects
all pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = ["Pair", "Twins", "make_each", "table", "table_text", "twins"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Twins:
    """The functions in use, each an attribute. A name that was never registered is an ``AttributeError``."""

    alive: Callable[[list[Any]], list[Any]]
    sweep: Callable[[list[Any], Any, Any], None]
    pending: Callable[[list[Any]], list[Any]]
    forget: Callable[[list[Any]], None]
    unshared: Callable[[Sequence[Any], Sequence[Any]], frozenset[int]]
    leaf_values: Callable[[list[Any], tuple[int, ...], type[Any]], tuple[list[Any], bool]]
    own_gradients: Callable[[Iterable[Any]], None]
    draw: Callable[[Any, int, int], None]
    make_each: Callable[[type[Any], Mapping[str, Any], Mapping[str, Sequence[Any]]], list[Any]]
    give: Callable[[Iterable[Iterable[Any]], Sequence[Any], Sequence[Any]], None]

    def __init__(self) -> None:
        self.in_python: dict[str, Callable[..., Any]] = {}
        """Python's functions, by name."""

    def python(self, function: _Function) -> _Function:
        """Register a Python function under its name. It is in use until a C++ function replaces it."""
        self.in_python[function.__name__] = function
        setattr(self, function.__name__, function)
        return function

    def use(self, **functions: Callable[..., Any]) -> None:
        """Use these functions instead of Python's. Raises ``KeyError`` for a name without a Python function."""
        unknown = functions.keys() - self.in_python.keys()
        if unknown:
            raise KeyError(f"no Python function is named {', '.join(sorted(unknown))}")
        for name, function in functions.items():
            setattr(self, name, function)

    def use_python(self) -> None:
        """Use Python's functions, all of them."""
        self.use(**self.in_python)

    def in_cpp(self) -> list[str]:
        """The names whose C++ function is in use."""
        return [name for name, function in self.in_python.items() if getattr(self, name) is not function]


twins: Final = Twins()


@twins.python
def make_each(of: type[Any], shared: Mapping[str, Any], each: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Objects of a class without calling it: ``shared`` has the slots that are the same in all, ``each`` the others.

    A training step makes hundreds of futures. Raises ``ValueError`` if the sequences are not equally long.
    """
    made: list[Any] = []
    for values in zip(*each.values(), strict=True):
        one: Any = object.__new__(of)
        for name, value in shared.items():
            setattr(one, name, value)
        for name, value in zip(each, values, strict=True):
            setattr(one, name, value)
        made.append(one)
    return made


@dataclass(frozen=True, slots=True)
class Pair:
    """A C++ function and its Python form."""

    file: str
    cpp: str
    python: str

    @property
    def how(self) -> str:
        """How the C++ function comes to run instead of the Python one."""
        name = self.cpp.removeprefix("torchport_")
        if name in twins.in_python and name != self.cpp:
            return f"`twins.{name}`"
        if name != self.cpp and self.file == "steps.cpp":
            return "`run.steps`"
        if name != self.cpp:
            return "PyTorch's device guard" if "guard" in name else "PyTorch's dispatcher"
        return "called in C++"


_MARK: Final = re.compile(r"^ *// Twin of ``([\w.]+)``\.\n[^\n(]*?(\w+)\(", re.MULTILINE)


def _pairs(source: Path) -> Iterable[Pair]:
    for python, cpp in _MARK.findall(source.read_text(encoding="utf-8")):
        yield Pair(source.name, cpp, python)


def table() -> list[Pair]:
    """Every pair of a C++ and a Python function, as the C++ sources say it, file by file."""
    folder = Path(__file__).parent
    return [pair for source in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]) for pair in _pairs(source)]


def table_text() -> str:
    """The table as it stands in the documentation."""
    rows = [f"| `{pair.file}` | `{pair.cpp}` | `{pair.python}` | {pair.how} |" for pair in table()]
    return "\n".join(["| file | C++ | Python | how it is swapped |", "|---|---|---|---|", *rows])
