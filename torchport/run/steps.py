"""An interpreted path without Python: its operators as steps for ``native/steps.cpp``, once that is built.

A recorded path of small operators spends more time in Python than in PyTorch's kernels: an operator's arguments are put
together, parsed and its result is wrapped, 3 µs each. Where an operator is simply called, C++ does that; the others are
steps of Python's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import native
from ..trace.trie import Leaf, ScalarInput, Value

if TYPE_CHECKING:
    from .interpreted import PathProgram, PathStep

__all__ = ["Steps", "make_steps"]

_functions: Final[list[Any]] = []
"""The library's, once it is built: what makes steps, and what runs them."""


def _use(library: ctypes.PyDLL) -> None:
    start, make, run = library.torchport_steps_start, library.torchport_steps, library.torchport_run_steps
    make.argtypes, run.argtypes = [ctypes.py_object] * 2, [ctypes.py_object] * 5
    start.restype = make.restype = run.restype = ctypes.py_object
    start()
    _functions[:] = make, run


native.steps.when_there(_use)


class Steps:
    """The steps of one path."""

    def __init__(self, program: PathProgram, leaves: Sequence[int], numbers: Sequence[int]) -> None:
        self._make, self._run = _functions
        places = {-1 - at: place for place, at in enumerate(leaves)}
        for step in program.steps:
            for value_id in step.brings:
                places[value_id] = len(places)
        self._places = places
        self._numbers = {at: place for place, at in enumerate(numbers)}
        described = [self._described(*pair) for pair in zip(program.steps, program.ends, strict=True)]
        self._steps = self._make(described, len(places))
        self._wanted = tuple(places[value_id] for value_id in program.wanted)

    def __call__(
        self, leaves: list[torch.Tensor], numbers: list[float], python: Callable[[int, tuple[Any, ...]], Sequence[Any]]
    ) -> list[torch.Tensor]:
        """The values that are wanted. ``python``: runs a step of Python's, by its position, on the values it needs."""
        return self._run(self._steps, leaves, numbers, python, self._wanted)

    def _described(self, step: PathStep, ends: Sequence[int]) -> tuple[Any, ...]:
        op = step.operator
        arguments = None if op is None else self._arguments(step, op)
        name, overload = (
            (None, None) if op is None or arguments is None else (op._schema.name, op._schema.overload_name)
        )
        places = self._places
        return (
            name, overload, arguments or (), tuple(places[key] for key in step.needs),
            tuple(places[value_id] for value_id in step.brings), tuple(places[value_id] for value_id in ends),
            op is not None and op is step.in_place, step.is_but_wide, op is torch.ops.aten.view.default,
        )  # fmt: skip

    def _arguments(self, step: PathStep, op: Any) -> tuple[Any, ...] | None:
        """Per argument of an operator ``None`` for its default, or a letter and a constant or places."""
        made: list[Any] = []
        for at, wanted in enumerate(op._schema.arguments):
            if at < len(step.args):
                given, template = step.args[at], step.node.args[at]
            elif wanted.name in step.kwargs:
                given = template = step.kwargs[wanted.name]
            else:
                made.append(None)
                continue
            one = self._argument(given, template, str(wanted.type) == "Tensor")
            if one is None or (one[0] == "n" and "Tensor" in str(wanted.type)):
                return None
            made.append(one)
        return tuple(made)

    def _argument(self, given: Any, template: Any, is_tensor: bool) -> tuple[str, Any] | None:
        cls = template.__class__
        if cls is ScalarInput:
            return "w" if is_tensor else "n", (self._numbers[template.position],)
        if cls is Value or cls is Leaf:
            return "v", (self._place(template),)
        if cls in (list, tuple) and any(one.__class__ in (Value, Leaf) for one in template):
            if not all(one is None or one.__class__ in (Value, Leaf) for one in template):
                return None
            return "l", tuple(-1 if one is None else self._place(one) for one in template)
        return "c", given

    def _place(self, template: Any) -> int:
        return self._places[template.value_id if template.__class__ is Value else -1 - template.position]


def make_steps(program: PathProgram, leaves: Sequence[int], numbers: Sequence[int]) -> Steps | None:
    """The steps of a path, if the library is there. ``leaves``, ``numbers``: what it is given, in this order."""
    return Steps(program, leaves, numbers) if _functions else None
