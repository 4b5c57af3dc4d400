"""Why a computation had to be compiled: the nearest trace that was known, and the first op where this one differs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..core.specs import TensorSpec
from ..trace.kernels import key_parts
from ..trace.threads import every_trace
from ..trace.trace import Trace
from ..trace.trie import FLOAT, Node, Varying
from .interpreted import InterpretedPlan

__all__ = ["APART", "CompileReason", "explain_compile"]

APART: Final = " of a part"
"""Ends the cause of a flush that computes what is read without the rest of the trace."""

log: Final = logging.getLogger("torchport.compile")

ADVICE: Final = {
    "shape": "pad or bucket the inputs to a few shapes",
    "dtype": "keep to one dtype per step",
    "strides": "make the inputs contiguous, or lay them out the same way in each step",
    "scalar": "an integer is a constant of the computation: pass it as a float or a tensor, and it becomes an input",
    "op": "the program took another path: branch with torch.where, or expect one computation per path",
    "operand": "the program used another tensor in this place",
    "values": "other results were kept: keep the same ones in each step, or none",
    "shorter": "the computation was cut at another place: a value read, or a step of another length",
    "longer": "the computation was cut at another place: a value read, or a step of another length",
    "dropped": "raise config.max_computations",
    "often": "nothing: from now on it runs faster",
}
"""What to change in the program, by what differed."""


@dataclass(frozen=True, slots=True)
class CompileReason:
    """One compilation and what made it necessary.

    ``kind`` is ``first``, ``apart``, ``device``, ``thread``, ``op``, ``shape``, ``dtype``, ``strides``, ``scalar``,
    ``operand``, ``values``, ``longer``, ``shorter``, ``dropped``, ``often`` or ``graph`` (of ``torch.compile``, which
    is compiled beside the program). ``shared`` counts the operators the
    nearest known trace has in common; ``op`` and ``line`` are this trace's first that differs, ``known_op`` and
    ``known_line`` the known one's.
    """

    device: str
    cause: str
    kind: str
    changed: str
    ops: int
    shared: int
    op: str | None = None
    line: str | None = None
    known_op: str | None = None
    known_line: str | None = None

    @property
    def advice(self) -> str:
        """What to change in the program so that it does not happen again; empty where nothing is to be done."""
        return ADVICE.get(self.kind, "")

    def __str__(self) -> str:
        where = "under torch.compile" if self.kind == "graph" else f"at a flush ({self.cause})"
        lines = [f"compiled {self.ops} operators for {self.device} {where}: {self.changed}"]
        if self.shared or self.known_op:
            lines.append(f"  like the nearest known trace for {self.shared} operators")
        if self.op is not None:
            lines.append(f"  now:  {self.op}  {self.line or 'line unknown'}")
        if self.known_op is not None:
            lines.append(f"  then: {self.known_op}  {self.known_line or 'line unknown'}")
        return "\n".join(lines)


def explain_compile(trace: Trace, node: Node, value_ids: Sequence[int], cause: str) -> CompileReason:
    """Why the values with these ids cannot be computed by what is known at this node."""
    found = _apart(node, cause) or _at_node(node, value_ids) or _below(node) or _above(node) or _first(trace)
    reason = CompileReason(device=repr(trace.runtime), cause=cause, ops=node.depth, **found)
    log.info("%s", reason)
    return reason


def _name(node: Node) -> dict[str, Any]:
    return {"op": str(node.op), "line": node.source}


def _known(node: Node) -> dict[str, Any]:
    return {"known_op": str(node.op), "known_line": node.source}


def _maker(node: Node, value_id: int) -> Node:
    """The node of a path whose result has this id."""
    at = node
    while at.parent is not None and not at.first_id <= value_id < at.end_id:
        at = at.parent
    return at


def _apart(node: Node, cause: str) -> dict[str, Any] | None:
    """The ops are computed in two parts from now on."""
    if not cause.endswith(APART):
        return None
    changed = "what is read does not depend on what is running, and the rest of the trace does: two computations"
    return {"kind": "apart", "changed": changed, "shared": node.depth}


# -- where this trace ends ------------------------------------------------------------------------------------------
def _at_node(node: Node, value_ids: Sequence[int]) -> dict[str, Any] | None:
    """The same ops were computed before, for other values."""
    if not node.plans:
        return None
    wanted = set(value_ids)
    nearest = max(node.plans, key=lambda known: len(wanted & set(known)) - len(wanted ^ set(known)))
    new = sorted(wanted - set(nearest))
    known = node.plans[nearest]
    if not new and isinstance(known, InterpretedPlan):
        changed = "it has come back so often that interpreting it costs more than compiling it is worth"
        if known.record is not None:
            changed = (
                f"it has come back {known.record.runs} times, and interpreting it has cost {known.seconds:.3g} s; "
                f"compiling it may take {known.record.expected:.3g} s"
            )
        return {"kind": "often", "changed": changed, "shared": node.depth}
    if not new:
        # The plan is there, for these values or for more, but without what it would run.
        changed = "the computation was dropped from memory (config.max_computations)"
        return {"kind": "dropped", "changed": changed, "shared": node.depth}
    maker = _maker(node, new[0])
    changed = f"{len(new)} more of its results are kept than before"
    return {"kind": "values", "changed": changed, "shared": node.depth, **_name(maker)}


def _below(node: Node) -> dict[str, Any] | None:
    """A known trace goes on where this one ends."""
    if not node.children:
        return None
    after = next(iter(dict.values(node.children)))
    changed = "it ends earlier than a known trace"
    return {"kind": "shorter", "changed": changed, "shared": node.depth, **_name(node), **_known(after)}


def _above(node: Node) -> dict[str, Any] | None:
    """The deepest place where a known trace ended or went another way."""
    at = node
    while at.parent is not None:
        parent = at.parent
        siblings = [child for child in dict.values(parent.children) if child is not at]
        if siblings:
            nearest = max(reversed(siblings[-64:]), key=lambda other: _likeness(at, other))  # the newest among equals
            return {**_difference(at, nearest), "shared": parent.depth, **_name(at), **_known(nearest)}
        if parent.plans:
            changed = "it goes on where a known trace ended"
            return {"kind": "longer", "changed": changed, "shared": parent.depth, **_name(at), **_known(parent)}
        at = parent
    return None


def _first(trace: Trace) -> dict[str, Any]:
    others: list[Trace] = [other for other in every_trace() if other is not trace and dict.values(other.root.children)]
    here = trace.runtime
    if any(other.runtime is here and other.eager == trace.eager for other in others):
        return {"kind": "thread", "changed": "the first trace of this thread", "shared": 0}
    if others:
        return {"kind": "device", "changed": f"the first trace on {here!r}", "shared": 0}
    return {"kind": "first", "changed": "the first trace", "shared": 0}


# -- how two ops differ ----------------------------------------------------------------------------------------------
def _likeness(one: Node, other: Node) -> float:
    if one.op is not other.op or len(one.key) != len(other.key):
        return -1
    return sum(a == b for a, b in zip(one.key, other.key, strict=True)) / len(one.key)


def _difference(new: Node, known: Node) -> dict[str, Any]:
    if new.op is not known.op:
        return {"kind": "op", "changed": f"operator {new.op} instead of {known.op}"}
    for name, tensors, part, before in key_parts(new.op, new.key, known.key):
        if part != before:
            kind, how = _tensor_difference(part, before) if tensors else ("scalar", _instead(part, before))
            return {"kind": kind, "changed": f"{kind} of argument {name!r}: {how}"}
    return {"kind": "op", "changed": "the same operator in another form"}


def _tensor_difference(part: Any, before: Any) -> tuple[str, str]:
    """What kind of difference two parts of a trace key are that stand for tensors, and the difference in words."""
    if _is_spec(part) and _is_spec(before):
        kind = "shape" if part.shape != before.shape else "dtype" if part.dtype != before.dtype else "strides"
        return kind, _instead(part, before)
    if _is_number(part) and _is_number(before):
        return "scalar", _instead(part, before)
    if part.__class__ is tuple and before.__class__ is tuple:
        for inner, inner_before in zip(part, before, strict=False):
            if inner != inner_before:
                return _tensor_difference(inner, inner_before)
        return "operand", f"{len(part)} tensors instead of {len(before)}"
    return "operand", f"{_tensor(part)} instead of {_tensor(before)}"


def _is_spec(part: Any) -> bool:
    return isinstance(part, TensorSpec)


def _is_number(part: Any) -> bool:
    """Whether a part is a Python number's: a scalar input, or a constant with its type."""
    return part.__class__ is Varying or (part.__class__ is tuple and len(part) == 2 and isinstance(part[1], type))


def _tensor(part: Any) -> str:
    if _is_spec(part):
        return f"a tensor not used before, {part},"
    return "a tensor used before" if part.__class__ is int else _words(part)


def _instead(part: Any, before: Any) -> str:
    return f"{_words(part)} instead of {_words(before)}"


def _words(part: Any) -> str:
    if part.__class__ is Varying:
        return "a scalar input" + ("" if part is FLOAT else f" and is {str(part).removeprefix('FLOAT ')}")
    return str(part[0] if _is_number(part) else part)
