"""Whether what a method declares agrees: each output, argument and buffer with what makes the value it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .checked import bad
from .schema import CallRecord, Constant, MethodRecord, Spec

__all__ = ["check_specs", "declared_specs"]


def declared_specs(method: MethodRecord, constants: Sequence[Constant]) -> dict[int, Spec]:
    """The specs of a method's values, by number, as whatever makes each declares it. What operators make has none."""
    inputs = [one.spec for one in method.inputs if one.spec is not None]
    found = dict(enumerate(inputs)) | {number: constants[which].spec for number, which in method.constants.items()}
    for instruction in method.instructions:
        if isinstance(instruction, CallRecord):
            outputs = method.delegates[instruction.delegate].outputs
            found.update(zip(instruction.results, outputs, strict=True))
    return found


def _same_kind(one: Spec, other: Spec) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _same_layout(one: Spec, other: Spec) -> bool:
    """Whether elements lie alike: strides of dimensions of one element are nobody's."""
    return 0 in one.shape or all(
        size == 1 or a == b for size, a, b in zip(one.shape, one.strides, other.strides, strict=True)
    )


def _check_call(method: MethodRecord, call: CallRecord, known: Mapping[int, Spec]) -> None:
    delegate = method.delegates[call.delegate]
    taken = [spec for position, spec in enumerate(delegate.inputs) if position not in delegate.constants]
    for position, (number, spec) in enumerate(zip(call.args, taken, strict=True)):
        made = known.get(number)
        if made is not None and not _same_kind(made, spec):
            raise bad(f"argument {position} of delegate {call.delegate} is {made}, but the delegate takes {spec}")


def check_specs(method: MethodRecord, constants: Sequence[Constant]) -> None:
    """Raise :class:`~.checked.Bad` where a method declares a value other than what makes it does.

    What operators make is compared when they have run.
    """
    known = declared_specs(method, constants)
    for instruction in method.instructions:
        if isinstance(instruction, CallRecord):
            _check_call(method, instruction, known)
    for position, output in enumerate(method.outputs):
        made = None if output.value is None else known.get(output.value)
        if made is None or output.spec is None:
            continue
        if not _same_kind(made, output.spec) or not _same_layout(made, output.spec):
            raise bad(f"output {position} is declared as {output.spec}, but what makes it gives {made}")
    for update in method.state:
        made, buffer = known.get(update.result), constants[update.constant]
        if made is not None and not _same_kind(made, buffer.spec):
            raise bad(f"buffer {buffer.name[:80]!r} is {buffer.spec}, but becomes {made}")
