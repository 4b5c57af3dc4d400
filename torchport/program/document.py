"""What a program file says: methods, instructions, delegates, constants, as JSON. No pickle, no code.

Version log
-----------
1   the first.
2   ``dynamic``: methods with sizes that change, each a set of variants. Readers of version 1 still read files without.

A file has the version that wrote it and the oldest version that can read it; :data:`VERSION` is what this code writes,
:data:`OLDEST` the oldest it reads.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from ..core.errors import ErrorCode, ProgramError
from ..core.specs import CompileSpec, CompileSpecs, contiguous_strides
from .agreement import check_specs
from .checked import MAX_RANK, bad, check_amount, read_each, read_flag, read_list, read_number, read_object, read_text
from .schema import (
    ELEMENT_SIZE,
    CallRecord,
    Constant,
    DebugInfo,
    DelegateRecord,
    Document,
    Dynamic,
    Header,
    Input,
    Instruction,
    KernelRecord,
    Literal,
    MethodRecord,
    Origin,
    Output,
    Spec,
    StateUpdate,
    Symbol,
    variant_name,
)
from .variants import dynamic_json, read_dynamic

__all__ = [
    "DEBUG",
    "ELEMENT_SIZE",
    "OLDEST",
    "PROGRAM",
    "VERSION",
    "CallRecord",
    "Constant",
    "DebugInfo",
    "DelegateRecord",
    "Document",
    "Dynamic",
    "Header",
    "Input",
    "Instruction",
    "KernelRecord",
    "Literal",
    "MethodRecord",
    "Origin",
    "Output",
    "Spec",
    "StateUpdate",
    "Symbol",
    "decode",
    "decode_debug",
    "decode_header",
    "encode",
    "encode_debug",
    "variant_name",
]

VERSION: Final = 2
OLDEST: Final = 1
PROGRAM: Final = "extra/torchport/program.json"
DEBUG: Final = "extra/torchport/debug.json"
T = TypeVar("T")
_MAX_NAME: Final = 64
_MAX_BYTES: Final = 1 << 62


# -- writing -------------------------------------------------------------------------------------------------------
def _spec_json(spec: Spec | None) -> Any:
    if spec is None:
        return None
    return [spec.dtype, list(spec.shape), None if spec.is_contiguous else list(spec.strides)]


def _delegate_json(delegate: DelegateRecord) -> dict[str, Any]:
    specs = [[key, base64.b64encode(value).decode()] for key, value in delegate.specs.items()]
    return {
        "backend": delegate.backend,
        "version": delegate.version,
        "entry": delegate.entry,
        "specs": specs,
        "inputs": [_spec_json(spec) for spec in delegate.inputs],
        "outputs": [_spec_json(spec) for spec in delegate.outputs],
        "constants": [list(pair) for pair in delegate.constants.items()],
        "named_data": dict(delegate.named_data),
    }


def _instruction_json(instruction: Instruction) -> Any:
    if isinstance(instruction, CallRecord):
        return {"delegate": instruction.delegate, "args": instruction.args, "results": instruction.results}
    fields = {"op": instruction.op, "args": instruction.args, "kwargs": dict(instruction.kwargs)}
    fields |= {"results": instruction.results, "several": instruction.several, "handle": instruction.handle}
    return fields


def _literal_json(value: Literal) -> Any:
    return {"f": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _method_json(method: MethodRecord) -> dict[str, Any]:
    return {
        "values": method.values,
        "inputs": [[one.name, _spec_json(one.spec), _literal_json(one.literal)] for one in method.inputs],
        "outputs": [[one.value, _spec_json(one.spec), _literal_json(one.literal)] for one in method.outputs],
        "constants": [list(pair) for pair in method.constants.items()],
        "state": [[one.constant, one.value, one.result] for one in method.state],
        "delegates": [_delegate_json(one) for one in method.delegates],
        "instructions": [_instruction_json(one) for one in method.instructions],
    }


def _signed(document: Any, oldest: int = 1) -> bytes:
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    header = {"torchport": VERSION, "oldest": oldest, "sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + body


def encode(document: Document) -> bytes:
    """The document as bytes: a header line with the body's SHA-256, and the body."""
    constants = [
        [one.name, _spec_json(one.spec), one.entry, one.offset, one.external, one.sha256] for one in document.constants
    ]
    body: dict[str, Any] = {
        "producer": document.producer,
        "digests": {name: list(value) for name, value in document.digests.items()},
        "constants": constants,
        "methods": {name: _method_json(method) for name, method in document.methods.items()},
    }
    if not document.dynamic:
        return _signed(body)
    return _signed({**body, "dynamic": {name: dynamic_json(one) for name, one in document.dynamic.items()}}, 2)


def encode_debug(info: DebugInfo) -> bytes:
    """The debug information as bytes, in the same form."""
    maps = {
        method: [[[ident, list(handles)] for ident, handles in one.items()] for one in found]
        for method, found in info.maps.items()
    }
    texts: dict[str, int] = {}  # operators of one layer share most of their texts
    handles: list[list[int]] = []
    for handle, place in info.handles.items():
        fields = (place.module, place.source, place.op, place.hierarchy, place.stack)
        handles.append([handle, *(texts.setdefault(text, len(texts)) for text in fields)])
    return _signed({"texts": list(texts), "handles": handles, "maps": maps})


# -- reading: every value is checked before it is used ----------------------------------------------------------------
def _literal(value: object) -> Literal:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and value.keys() == {"f"} and value["f"] in ("inf", "-inf", "nan"):
        return float(value["f"])
    raise bad("expected a plain value")


def _spec(value: object) -> Spec:
    dtype, shape, strides = read_list(value, 3)
    if read_text(dtype) not in ELEMENT_SIZE:
        raise bad(f"there is no dtype {dtype!r}")
    if len(read_list(shape)) > MAX_RANK:
        raise bad(f"a tensor has more than {MAX_RANK} dimensions")
    sizes = read_each(read_number, shape)
    if math.prod(max(size, 1) for size in sizes) * ELEMENT_SIZE[dtype] >= _MAX_BYTES:
        raise bad("a tensor is too large for any machine")
    steps = contiguous_strides(sizes) if strides is None else read_each(read_number, read_list(strides, len(sizes)))
    spec = Spec(dtype, sizes, steps)
    if spec.extent >= _MAX_BYTES:
        raise bad("a tensor is too large for any machine")
    return spec


def _optional_spec(value: object) -> Spec | None:
    return None if value is None else _spec(value)


def _input(value: object) -> Input:
    name, spec, literal = read_list(value, 3)
    return Input(read_text(name), _optional_spec(spec), _literal(literal))


def _output(value: object, values: int) -> Output:
    number, spec, literal = read_list(value, 3)
    if number is None:
        return Output(None, None, _literal(literal))
    return Output(read_number(number, values), _spec(spec))


_SHA = re.compile(r"[0-9a-f]{64}\Z")


def _sha(value: object) -> str:
    if not _SHA.match(read_text(value)):
        raise bad("expected a SHA-256 in hexadecimal")
    return str(value)


def _constant(value: object) -> Constant:
    name, spec, entry, offset, external, sha256 = read_list(value, 6)
    outside = read_text(external)
    if outside and (not outside.isprintable() or any(sign in outside for sign in "/\\:") or outside in (".", "..")):
        raise bad(f"external data {outside[:80]!r} is not the plain name of a file beside the program")
    digest = _sha(sha256) if outside else read_text(sha256)
    return Constant(read_text(name), _spec(spec), read_text(entry), read_number(offset), outside, digest)


def _compile_spec(value: object) -> CompileSpec:
    key, raw = read_list(value, 2)
    return CompileSpec(read_text(key), base64.b64decode(read_text(raw), validate=True))


def _backend_name(value: object) -> str:
    name = read_text(value)
    if not name.isidentifier() or len(name) > _MAX_NAME:
        raise bad(f"{name[:_MAX_NAME]!r} is not the name of a backend")
    return name


def _delegate(value: object, constants: int) -> DelegateRecord:
    found = read_object(value)
    inputs = read_each(_spec, found["inputs"])
    pairs = [read_list(pair, 2) for pair in read_list(found["constants"])]
    bound = {read_number(position, len(inputs)): read_number(which, constants) for position, which in pairs}
    return DelegateRecord(
        _backend_name(found["backend"]),
        read_text(found["version"]),
        read_text(found["entry"]),
        CompileSpecs(read_each(_compile_spec, found["specs"])),
        inputs,
        read_each(_spec, found["outputs"]),
        bound,
        {key: read_text(entry) for key, entry in read_object(found["named_data"]).items()},
    )


class _Values:
    """Follows which values of a method are there, so that no instruction reads one before it is made."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.made: set[int] = set()

    def make(self, value: object) -> int:
        number = read_number(value, self.total)
        if number in self.made:
            raise bad(f"value {number} is made twice")
        self.made.add(number)
        return number

    def use(self, value: object) -> int:
        number = read_number(value, self.total)
        if number not in self.made:
            raise bad(f"value {number} is used before it is made")
        return number


def _check_argument(value: object, values: _Values) -> None:
    if isinstance(value, list):
        for one in cast("list[object]", value):
            _check_argument(one, values)
    elif isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        if len(fields) != 1:
            raise bad("an argument is malformed")
        if "n" in fields:
            values.use(fields["n"])


def _instruction(value: object, values: _Values, delegates: Sequence[DelegateRecord]) -> Instruction:
    found = read_object(value)
    if "delegate" in found:
        index = read_number(found["delegate"], len(delegates))
        delegate = delegates[index]
        args = tuple(
            values.use(one) for one in read_list(found["args"], len(delegate.inputs) - len(delegate.constants))
        )
        results = tuple(values.make(one) for one in read_list(found["results"], len(delegate.outputs)))
        return CallRecord(index, args, results)
    args, kwargs = read_list(found["args"]), read_object(found["kwargs"])
    _check_argument(args, values)
    _check_argument(list(kwargs.values()), values)
    several = read_flag(found["several"])
    results = tuple(None if one is None else values.make(one) for one in read_list(found["results"]))
    if not several and len(results) != 1:
        raise bad("an operator with one result has another number of them")
    op = read_text(found["op"])
    if not all(part.isidentifier() for part in op.split(".")):
        raise bad(f"there is no operator {op[:80]!r}")
    return KernelRecord(op, tuple(args), kwargs, results, several, read_number(found["handle"]))


def _method(name: str, value: object, constants: Sequence[Constant]) -> MethodRecord:
    found = read_object(value)
    values = _Values(read_number(found["values"], 1 << 31))
    inputs = read_each(_input, found["inputs"])
    numbers = iter(range(values.total))
    for one in inputs:
        if one.spec is not None:
            values.make(next(numbers, values.total))
    pairs = [read_list(pair, 2) for pair in read_list(found["constants"])]
    bound = {values.make(number): read_number(which, len(constants)) for number, which in pairs}
    delegates = read_each(_delegate, found["delegates"], len(constants))
    instructions = tuple(_instruction(one, values, delegates) for one in read_list(found["instructions"]))
    outputs = read_each(_output, found["outputs"], values.total)
    triples = [read_list(triple, 3) for triple in read_list(found["state"])]
    state = tuple(StateUpdate(read_number(c, len(constants)), values.use(v), values.use(r)) for c, v, r in triples)
    for one in state:
        if bound.get(one.value) != one.constant:
            raise bad("a buffer's value is not the buffer's")
    for output in outputs:
        if output.value is not None:
            values.use(output.value)
    if len(values.made) != values.total:
        raise bad("there are values that nothing makes")
    method = MethodRecord(name, values.total, inputs, outputs, bound, state, delegates, instructions)
    check_specs(method, constants)
    return method


def _document(value: object) -> Document:
    found = read_object(value)
    constants = read_each(_constant, found["constants"])
    digests: dict[str, tuple[int, str]] = {}
    for name, pair in read_object(found["digests"]).items():
        size, sha256 = read_list(pair, 2)
        digests[name] = (read_number(size), _sha(sha256))
    methods = {name: _method(name, one, constants) for name, one in read_object(found["methods"]).items()}
    if not methods:
        raise bad("there is no method")
    for constant in constants:
        if constant.external:
            if constant.offset or not constant.spec.is_contiguous:
                raise bad(f"constant {constant.name[:80]!r} lies outside, and not as such files have tensors")
        else:
            size, _ = digests[constant.entry]
            if constant.offset + constant.spec.extent > size:
                raise bad(f"constant {constant.name!r} reaches beyond its entry")
        if constant.offset % ELEMENT_SIZE[constant.spec.dtype]:
            raise bad(f"constant {constant.name!r} is not aligned")
    for delegate in (one for method in methods.values() for one in method.delegates):
        for position, which in delegate.constants.items():
            if delegate.inputs[position] != constants[which].spec:
                raise bad(f"constant {constants[which].name!r} does not fit the delegate that it is for")
        for entry in (delegate.entry, *delegate.named_data.values()):
            if entry not in digests:
                raise bad(f"a delegate's entry {entry!r} has no checksum")
    producer = {key: read_text(one) for key, one in read_object(found["producer"]).items()}
    dynamic = {name: read_dynamic(name, one, methods) for name, one in read_object(found.get("dynamic", {})).items()}
    variants = [variant for name, one in dynamic.items() for variant in one.names(name)]
    if left := {name for name in methods if "@" in name}.difference(variants):
        raise bad(f"method {min(left)[:80]!r} has the name of a variant, but is none")
    return Document(methods, list(constants), digests, producer, dynamic)


def _ident(value: object) -> int | str:
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise bad("expected a number or text")


def _debug_map(value: object) -> dict[int | str, tuple[int, ...]]:
    return {
        _ident(ident): read_each(read_number, handles)
        for ident, handles in (read_list(pair, 2) for pair in read_list(value))
    }


def _debug(value: object) -> DebugInfo:
    found = read_object(value)
    texts = read_each(read_text, found["texts"])
    rows = [read_list(row, 6) for row in read_list(found["handles"])]
    handles = {
        read_number(handle): Origin(*(texts[read_number(at, len(texts))] for at in fields)) for handle, *fields in rows
    }
    maps = {name: list(read_each(_debug_map, one)) for name, one in read_object(found["maps"]).items()}
    return DebugInfo(handles, maps)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise bad("a key is given twice")
    return found


def _no_constant(name: str) -> object:
    raise bad(f"{name} is not JSON")


def _json(data: bytes) -> Any:
    return json.loads(data, object_pairs_hook=_pairs, parse_constant=_no_constant)


def _broken(entry: str, why: object) -> ProgramError:
    return ProgramError(f"this program file is damaged: {entry}: {why}; save it again", entry=entry)


def decode_header(data: memoryview, entry: str = PROGRAM) -> tuple[Header, int]:
    """The header, and where the body begins. Raises :class:`ProgramError`; ``code`` tells a version that cannot be read
    (``DELEGATE_INVALID_COMPATIBILITY``) from damage (``INVALID_PROGRAM``)."""
    line, newline, _ = bytes(data[:1024]).partition(b"\n")
    try:
        if not newline:
            raise bad("it has no header")
        found = read_object(_json(line))
        header = Header(read_number(found["torchport"]), read_number(found["oldest"]), "", 0)
        if header.version < OLDEST or header.oldest > VERSION:
            raise ProgramError(
                f"this program file has version {header.version} and is for readers of version {header.oldest} and "
                f"newer; this torchport reads versions {OLDEST} to {VERSION}: lower the model again with it, or "
                "install the torchport that wrote the file",
                entry=entry,
                code=ErrorCode.DELEGATE_INVALID_COMPATIBILITY,
            )
        return Header(header.version, header.oldest, _sha(found["sha256"]), read_number(found["size"])), len(line) + 1
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _broken(entry, error) from error


def _body(data: memoryview, entry: str, size: int) -> Any:
    header, start = decode_header(data, entry)
    body = data[start:]
    if len(body) != header.size or hashlib.sha256(body).hexdigest() != header.sha256:
        raise _broken(entry, "its checksum differs")
    text = bytes(body)
    check_amount(text, max(size, len(text)))
    return _json(text)


def _decode(data: memoryview, entry: str, read: Callable[[object], T], size: int = 0) -> T:
    try:
        return read(_body(data, entry, size))
    except KeyError as error:
        raise _broken(entry, f"{error} is missing") from error
    except (ValueError, TypeError, RecursionError, binascii.Error, OverflowError) as error:
        raise _broken(entry, error) from error
    except MemoryError as error:
        raise ProgramError(
            f"there is no memory to read {entry} of this program file",
            entry=entry,
            code=ErrorCode.MEMORY_ALLOCATION_FAILED,
        ) from error
    except ProgramError:
        raise
    except RuntimeError as error:  # a repeated compile spec
        raise _broken(entry, error) from error


def decode(data: memoryview, size: int = 0) -> Document:
    """The document that :func:`encode` wrote, checked. Raises :class:`ProgramError`.

    ``size``: the whole file's, in proportion to which a document may have values.
    """
    return _decode(data, PROGRAM, _document, size)


def decode_debug(data: memoryview, size: int = 0) -> DebugInfo:
    """The debug information that :func:`encode_debug` wrote. Raises :class:`ProgramError`."""
    return _decode(data, DEBUG, _debug, size)
