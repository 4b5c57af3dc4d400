"""What is done to program files by structure: see :mod:`fuzz_structure`."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fuzz
import torch
from programs import packed

from torchport.program.document import DEBUG, PROGRAM

BLOBS = "data/torchport/"
Json = Any
Entries = dict[str, bytes]


@dataclass(frozen=True)
class Seed:
    """A whole file, taken apart; what its methods take and give."""

    name: str
    data: bytes
    entries: Mapping[str, bytes]
    weights: Mapping[str, bytes]
    inputs: Mapping[str, tuple[torch.Tensor, ...]]
    expected: Mapping[str, tuple[Any, ...]]

    @property
    def native(self) -> bool:
        """Whether delegates' bytes are compiled code."""
        return not self.name.startswith("reference")


# -- changes to JSON ---------------------------------------------------------------------------------------------------
NUMBERS = (
    -1, 0, 1, 2, 3, 7, 16, 63, 64, 65, 255, 1 << 15, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 61, 1 << 62,
    1 << 63, -(1 << 63), -(1 << 31), 10**30, 0.5, -0.0, 1e308, True, False,
)  # fmt: skip
TEXTS = (
    "", "x", "\0", "../../evil", "/etc/passwd", "a" * 3000, "é" * 500, "\ud800", "float32", "float64", "int8", "bool",
    "complex64", "bfloat16", "float8_e5m2", "torch.float32", "torch.qint8", "torch.bits8", "torch.sparse_coo",
    "strided", "torch.channels_last", "cpu", "cuda", "meta", "port", "cpu:7", "reference", "inductor", "aten",
    "aten.add", "getitem", "graph", "torch.ops", "inf", "nan", "1e400", "__class__", "self", "forward", "forward@3",
)  # fmt: skip


def _deep(depth: int) -> Json:
    found: Json = 1
    for _ in range(depth):
        found = [found]
    return found


def _values(r: random.Random) -> Json:
    """Something that does not belong there."""
    return r.choice(
        (
            None, r.choice(NUMBERS), r.choice(NUMBERS), r.choice(TEXTS), [], {}, [r.choice(NUMBERS) for _ in range(3)],
            {"n": r.choice(NUMBERS)}, {"n": r.randrange(12)}, {"f": r.choice(TEXTS)}, {"c": [r.choice(TEXTS), "1"]},
            {"t": r.choice(TEXTS)}, {"d": r.choice(TEXTS)}, {r.choice(TEXTS): r.choice(NUMBERS)},
            _deep(r.choice((3, 200))), [0] * r.choice((65, 1000)), [1 << 61] * 70,
        )
    )  # fmt: skip


def _near(r: random.Random, value: Json, pool: Mapping[type, Sequence[Json]]) -> Json:
    """Something like a value: what a file could have there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return r.choice((value + 1, value - 1, value * 2, -value, r.choice(NUMBERS), r.randrange(9)))
    same = pool.get(type(value), ())
    return json.loads(json.dumps(r.choice(same))) if same and r.random() < 0.7 else _values(r)


def _walk(value: Json, found: list[tuple[Json, Any]]) -> list[tuple[Json, Any]]:
    """Every place of a document: what holds it, and where."""
    pending = [value]
    while pending:
        one = pending.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inner in items:
            found.append((one, key))
            pending.append(inner)
    return found


def _ops() -> tuple[str, ...]:
    """Every operator of ATen by name."""
    names = sorted(torch._C._dispatch_get_all_op_names())
    return tuple(
        name.replace("::", ".") + ("" if "." in name else ".default") for name in names if name.startswith("aten::")
    )


OPS = _ops()


def change(r: random.Random, document: Json, others: Sequence[Json]) -> None:
    """Change a document in place: replace, remove, repeat, swap, insert, from itself or another one."""
    places = _walk(document, [])
    if not places:
        return
    pool: dict[type, list[Json]] = {}
    for holder, key in r.sample(places, min(len(places), 200)):
        pool.setdefault(type(holder[key]), []).append(holder[key])
    holder, key = r.choice(places)
    how = r.randrange(10)
    if how <= 3:
        holder[key] = _near(r, holder[key], pool)
    elif how == 4:
        holder[key] = _values(r)
    elif how == 5:
        del holder[key]
    elif how == 6 and isinstance(holder, list):
        holder[key:key] = [json.loads(json.dumps(holder[key]))] * r.choice((1, 1, 2, 70, 500))
    elif how == 6:
        holder[r.choice(TEXTS)] = holder.pop(key)
    elif how == 7:
        other, other_key = r.choice(places)
        text = json.dumps(other[other_key])
        holder[key] = json.loads(text) if len(text) < 20_000 else None
    elif how == 8 and others:
        other, other_key = r.choice(_walk(r.choice(others), []) or [({"": 1}, "")])
        text = json.dumps(other[other_key])
        holder[key] = json.loads(text) if len(text) < 20_000 else None
    elif isinstance(holder, list) and len(holder) > 1:
        r.shuffle(holder)
    else:
        holder[key] = _near(r, holder[key], pool)


def text_of(r: random.Random, document: Json) -> bytes:
    """JSON, now and then as no library writes it."""
    body = json.dumps(document).encode()
    how = r.randrange(60)
    if how == 0:
        return body.replace(b"{", b'{"methods":{},', 1)
    if how == 1:
        at = r.randrange(len(body))
        return (
            body[:at] + r.choice((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000, b"NaN", b"[]," * 60_000)) + body[at:]
        )
    if how == 2:
        return b" " * 100_000 + body
    if how == 3:
        return body.decode().encode("utf-16")
    return body


# -- changes to files --------------------------------------------------------------------------------------------------
def _signed(r: random.Random, body: bytes, oldest: int = 1) -> bytes:
    header: dict[str, Any] = {"torchport": 2, "oldest": oldest, "sha256": hashlib.sha256(body).hexdigest()}
    header["size"] = len(body)
    if r.random() < 0.02:
        change(r, header, ())
    return json.dumps(header).encode() + b"\n" + body


def document_of(entries: Entries, name: str = PROGRAM) -> Json:
    return json.loads(entries[name].split(b"\n", 1)[1])


def _put(r: random.Random, entries: Entries, document: Json, name: str = PROGRAM) -> None:
    entries[name] = _signed(r, text_of(r, document))


def _put_blob(r: random.Random, entries: Entries, name: str, data: bytes) -> None:
    document = document_of(entries)
    entries[name] = data
    document["digests"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    entries[PROGRAM] = _signed(random.Random(1), json.dumps(document).encode())


def of_document(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    document = document_of(entries)
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        other = document_of(dict(r.choice(seeds).entries)) if r.random() < 0.2 else None
        change(r, document, () if other is None else (other,))
    _put(r, entries, document)


def of_methods(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    """Instructions, delegates, inputs, outputs: what runs."""
    document = document_of(entries)
    method = document["methods"][r.choice(list(document["methods"]))]
    part = r.choice([key for key in method if method[key]] or ["values"])
    for _ in range(r.choice((1, 1, 2))):
        change(r, method[part] if isinstance(method.get(part), (dict, list)) else method, ())
    _put(r, entries, document)


def of_debug(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    document = document_of(entries, DEBUG)
    change(r, document, ())
    _put(r, entries, document, DEBUG)


def of_specs(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    """A spec, everywhere it stands or in one place: files that agree with themselves, but not with the code."""
    document = document_of(entries)
    places = [(h, k) for h, k in _walk(document, []) if _is_spec(h[k])]
    holder, key = r.choice(places)
    before = json.dumps(holder[key])
    after = json.loads(before)
    which = r.randrange(3)
    if which == 0:
        after[0] = r.choice(("float32", "float64", "int32", "int64", "bool", "bfloat16", "complex64", "uint8"))
    elif which == 1 and after[1]:
        after[1][r.randrange(len(after[1]))] = r.choice((0, 1, 2, 3, 5, 8, 1 << 20, 1 << 40, -1))
    elif which == 1:
        after[1] = [r.choice((1, 2))]
    else:
        after[2] = [r.choice((0, 1, 2, 7, 1 << 20, 1 << 45)) for _ in after[1]]
    for other, other_key in places if r.random() < 0.6 else [(holder, key)]:
        if json.dumps(other[other_key]) == before:
            other[other_key] = json.loads(json.dumps(after))
    _put(r, entries, document)


def _is_spec(value: Json) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)


def of_blob(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    """A graph of ``reference``: arguments, operators, references, inputs and outputs."""
    name = r.choice([one for one in entries if one.startswith(BLOBS) and entries[one].startswith(b'{"inputs"')])
    graph = json.loads(entries[name])
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        calls = graph.get("calls") if isinstance(graph, dict) else None
        how = r.randrange(6)
        if not isinstance(calls, list) or not calls or how == 0:
            change(r, graph, ())
            continue
        call = r.choice(calls)
        if how == 1 and isinstance(call, list) and call:
            call[0] = r.choice(OPS)
        elif how == 2 and isinstance(call, list) and len(call) > 2 and isinstance(call[2], dict):
            call[2][r.choice(("dtype", "layout", "device", "memory_format", "pin_memory", "out", "self"))] = _values(r)
        elif isinstance(call, list) and len(call) > 1:
            change(r, call[1:3], ())
    _put_blob(r, entries, name, text_of(r, graph))


def of_constants(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    """A weight's bytes, with a checksum that fits."""
    document = document_of(entries)
    names = [one[2] for one in document["constants"] if not one[4]]
    if not names:
        return of_document(r, entries, seed, seeds)
    name = r.choice(names)
    raw = bytearray(entries[name])
    how = r.randrange(3)
    if how == 0 and raw:
        at = r.randrange(len(raw))
        raw[at : at + 8] = r.randbytes(min(8, len(raw) - at))
    elif how == 1:
        raw = raw[: r.randrange(len(raw) + 1)]
    else:
        raw = bytearray(b"\xff" * len(raw))
    return _put_blob(r, entries, name, bytes(raw))


def of_entries(r: random.Random, entries: Entries, seed: Seed, seeds: Sequence[Seed]) -> None:
    """Entries swapped, dropped, or another file's, under the checksums of this one."""
    names = [name for name in entries if name == PROGRAM or name in document_of(entries)["digests"]]
    name, other = r.choice(names), dict(r.choice(seeds).entries)
    how = r.randrange(3)
    if how == 0:
        del entries[name]
    elif how == 1:
        entries[name] = r.choice(list(other.values()))
    else:
        raw = bytearray(entries[name] or b"\0")
        raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
        entries[name] = bytes(raw)


Change = Callable[[random.Random, Entries, Seed, Sequence[Seed]], None]
SIGNED: tuple[Change, ...] = (
    of_document, of_document, of_methods, of_methods, of_debug, of_specs, of_specs, of_blob, of_blob, of_blob, of_blob,
    of_constants,
)  # fmt: skip
OF_NATIVE: tuple[Change, ...] = (of_document, of_methods, of_methods, of_specs, of_specs, of_specs, of_debug)
BYTES: tuple[fuzz.Mutation, ...] = (
    fuzz.flip_one, fuzz.flip_some, fuzz.overwrite, fuzz.truncate, fuzz.cut_or_repeat, fuzz.grow, fuzz.number_field,
    fuzz.other_writer,
)  # fmt: skip


def mutated(r: random.Random, seed: Seed, seeds: Sequence[Seed]) -> tuple[bytes, dict[str, bytes], str]:
    """A changed file, the checkpoint beside it, and what was changed: ``"bytes"`` where checksums tell."""
    weights = dict(seed.weights)
    if weights and r.random() < 0.4:
        name = next(iter(weights))
        how = r.choice(fuzz.OF_CHECKPOINTS)
        weights[name] = how(r, bytearray(weights[name]), []) if how is not fuzz.splice_bytes else weights[name][:-1]
        return seed.data, weights, "bytes"
    if r.random() < 0.12:
        how = r.choice(BYTES)
        return how(r, bytearray(seed.data), []), weights, "bytes"
    entries = dict(seed.entries)
    if r.random() < 0.1:
        of_entries(r, entries, seed, seeds)
        return packed(list(entries.items())), weights, "bytes"
    one = r.choice(OF_NATIVE if seed.native else SIGNED)
    one(r, entries, seed, seeds)
    return packed(list(entries.items())), weights, "debug" if one is of_debug else "signed"
