"""Damaged and hostile program files: each gives an error of ours or the right result, and nothing else happens.

Run as a program for large numbers: ``python tests/unit/program/fuzz.py --count 200000 --seed 1``. Cases run in batches,
each in a process with limits on memory and time, in a folder of its own that must stay empty; what ends a process is
reported with the case's number, which ``--only`` runs again.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from programs import add_sub_registry, counter, entries_of, kernels, packed, padding, real_program, summing, weight

from torchport import runtime
from torchport.core.errors import TorchportError
from torchport.core.specs import CompileSpecs
from torchport.program import safetensors
from torchport.program.archive import Archive
from torchport.program.document import DEBUG, PROGRAM
from torchport.program.loader import BytesLoader
from torchport.program.writer import ROOT

MEMORY = 64 << 20
"""Bytes a batch may use beyond what it has when it starts; the files are a few kilobytes."""
SECONDS = 20
"""Longest time of one case."""
X = np.array([1.0, 2.0], np.float32)
Y = np.array([10.0, 20.0], np.float32)
HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 1 << 31, 1 << 40, 1 << 61, 1 << 62, 1 << 64, 10**400, -(1 << 63), 0.5, 1e308, True, None, "", "x",
    "\0",
    "../../evil", "/etc/passwd", "a" * 5000, "float32", "bfloat16", "aten.add.Tensor", "extra/torchport/program.json",
    [], {}, [[]], {"n": 0}, {"n": -1}, {"n": 10**9}, {"f": "nan"}, {"delegate": 0}, [0] * 1000,
)  # fmt: skip


CHECKPOINT = "weights.safetensors"


@dataclass(frozen=True)
class Seed:
    """A whole file, and what it computes from ``X`` and ``Y``; ``weights`` is the checkpoint that lies beside it."""

    data: bytes
    inputs: int
    expected: tuple[tuple[float, ...], ...]
    weights: bytes = b""


def seeds() -> list[Seed]:
    """Programs whose weights are elsewhere; with PyTorch's operators around a delegate; with two delegates and a
    constant; with a buffer; with delegates that share their bytes; with sizes that change."""
    text = b"aten::add(%0,%1)<debug_handle>1|%2"
    constant, blobs = weight((0.5, 1.5))

    def plain(method: Any) -> Any:
        delegates = tuple(
            replace(one, backend="add_sub", version="1", specs=CompileSpecs()) for one in method.delegates
        )
        return replace(method, delegates=delegates)

    from programs import delegate

    state = plain(counter())
    shared = plain(summing([delegate(tag="same"), delegate(tag="same")]))
    buffers = packed(entries_of([state], [constant], blobs | {one.entry: text for one in state.delegates}))
    twice = packed(entries_of([shared], (), {one.entry: text for one in shared.delegates}))
    outside = replace(
        constant, entry="w", external=CHECKPOINT, sha256=hashlib.sha256(blobs[constant.entry]).hexdigest()
    )
    elsewhere = packed(entries_of([state], [outside], {one.entry: text for one in state.delegates}))
    checkpoint = io.BytesIO()
    tensors = {"w": safetensors.Tensor("float32", (2,), memoryview(blobs[constant.entry]))}
    safetensors.write(checkpoint, {**tensors, "other": safetensors.Tensor("int64", (1,), memoryview(b"\1" * 8))})
    around = plain(kernels())
    leftover = packed(entries_of([around], (), {one.entry: text for one in around.delegates}))
    padded, dynamic, bytes_of = padding(backend="add_sub", version="1", specs=CompileSpecs())
    changing = packed(entries_of(padded, (), bytes_of, dynamic=dynamic))
    return [
        Seed(changing, 2, ((11.0, 22.0),)),
        Seed(elsewhere, 1, ((1.5, 3.5), (0.5, 1.5)), checkpoint.getvalue()),
        Seed(leftover, 2, ((11.0,),)),
        Seed(real_program(), 2, ((1.0, 2.0),)),
        Seed(buffers, 1, ((1.5, 3.5), (0.5, 1.5))),
        Seed(twice, 2, ((21.0, 42.0),)),
    ]


# -- mutations of bytes --------------------------------------------------------------------------------------------
Mutation = Callable[[random.Random, bytearray, list[Seed]], bytes]


def flip_one(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    data[r.randrange(len(data))] ^= 1 << r.randrange(8)
    return bytes(data)


def flip_some(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    for _ in range(r.randint(2, 16)):
        data[r.randrange(len(data))] ^= 1 << r.randrange(8)
    return bytes(data)


def overwrite(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    at, size = r.randrange(len(data)), r.choice((1, 2, 4, 8, 64))
    filler = r.choice((b"\0", b"\xff", b"\x7f", None))
    data[at : at + size] = r.randbytes(size) if filler is None else filler * size
    return bytes(data)


def truncate(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    return bytes(data[: r.randrange(len(data))] if r.random() < 0.7 else data[r.randrange(1, len(data)) :])


def cut_or_repeat(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    at, end = sorted(r.sample(range(len(data) + 1), 2))
    return bytes(data[:at] + (data[end:] if r.random() < 0.5 else data[at:end] + data[at:]))


def grow(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    extra = r.randbytes(r.choice((1, 22, 64, 1000)))
    where = r.choice((0, len(data), r.randrange(len(data))))
    return bytes(data[:where] + extra + data[where:])


def splice_bytes(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    other = r.choice(all_seeds).data
    at, start, size = r.randrange(len(data)), r.randrange(len(other)), r.choice((8, 64, 512, 2000))
    data[at : at + size] = other[start : start + size]
    return bytes(data)


def number_field(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """A hostile number in one of the zip structures."""
    marks = [b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"]
    places = [i for mark in marks for i in _all(bytes(data), mark)]
    at = r.choice(places) + r.randrange(4, 46)
    value = r.choice((0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, len(data), r.getrandbits(32)))
    data[at : at + 4] = struct.pack("<I", value)
    return bytes(data)


def _all(data: bytes, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


# -- mutations of entries ------------------------------------------------------------------------------------------
def _entries(data: bytes) -> list[tuple[str, bytes]]:
    archive = Archive(BytesLoader(data))
    return [(name, bytes(archive.view(name))) for name in archive.entries]


def splice_entries(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """Entries of another valid program, with zip checksums that fit."""
    mine, other = _entries(bytes(data)), dict(_entries(r.choice(all_seeds).data))
    at = r.randrange(len(mine))
    name = mine[at][0]
    mine[at] = (name, other.get(name, r.choice(list(other.values()))))
    return packed(mine)


def shuffle_entries(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    mine = _entries(bytes(data))
    how = r.randrange(4)
    if how == 0:
        r.shuffle(mine)
    elif how == 1:
        del mine[r.randrange(len(mine))]
    elif how == 2:
        mine.append(r.choice(mine))
    else:
        a, b = r.sample(range(len(mine)), 2)
        mine[a], mine[b] = (mine[a][0], mine[b][1]), (mine[b][0], mine[a][1])
    return packed(mine)


def rename_entry(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    mine = _entries(bytes(data))
    at = r.randrange(len(mine))
    names = ("../evil", "/evil", "a/../../evil", "C:/evil", "a\\b", "nul\0l", "", ".", "a//b", "é" * 300, "x" * 60_000)
    mine.insert(at, (r.choice(names), mine[at][1])) if r.random() < 0.5 else mine.__setitem__(
        at, (r.choice(names), mine[at][1])
    )
    return packed(mine)


def other_writer(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """The same entries written by Python's zipfile: compressed, with comments, links, bombs, unaligned."""
    file = io.BytesIO()
    how = r.randrange(5)
    with zipfile.ZipFile(file, "w", r.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in _entries(bytes(data)):
            info = zipfile.ZipInfo(f"{ROOT}/{name}")
            if how == 0:
                info.external_attr = 0o120777 << 16
            if how == 1:
                info.comment = r.randbytes(30)
            if how == 2:
                info.extra = struct.pack("<2H", r.choice((1, 0x9999)), 8) + r.randbytes(8)
            archive.writestr(info, content, zipfile.ZIP_DEFLATED if how == 3 else None)
        if how == 3:
            archive.writestr(f"{ROOT}/bomb", b"\0" * 10_000_000, zipfile.ZIP_DEFLATED)
        if how == 4:
            archive.comment = r.randbytes(100)
    return file.getvalue()


# -- hostile documents, with checksums that fit --------------------------------------------------------------------
def _sign(body: bytes) -> bytes:
    header = {"torchport": 1, "oldest": 1, "sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
    return json.dumps(header).encode() + b"\n" + body


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def hostile_document(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """The document with values replaced, removed, repeated; signed again, so that nothing but its content is wrong."""
    mine = _entries(bytes(data))
    which = PROGRAM if r.random() < 0.9 else DEBUG
    at = next(i for i, (name, _) in enumerate(mine) if name == which)
    document = json.loads(mine[at][1].split(b"\n", 1)[1])
    for _ in range(r.randint(1, 3)):
        places = _places(document, [])
        holder, key = r.choice(places)
        how = r.randrange(4)
        if how == 0 or not isinstance(holder, list):
            holder[key] = copy.deepcopy(r.choice(HOSTILE))
        elif how == 1:
            del holder[key]
        elif how == 2:
            holder.insert(key, copy.deepcopy(r.choice(HOSTILE)))
        else:
            other, other_key = r.choice(places)
            if not isinstance(other[other_key], (dict, list)):
                holder[key] = other[other_key]
    mine[at] = (which, _sign(json.dumps(document).encode()))
    return packed(mine)


def hostile_text(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """A document that is hardly JSON."""
    mine = _entries(bytes(data))
    at = next(i for i, (name, _) in enumerate(mine) if name == PROGRAM)
    body = mine[at][1].split(b"\n", 1)[1]
    bodies = (
        b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b"NaN", b"null", b"", b"\xff\xfe",
        b'{"methods":{},"methods":{}}',
        body[: r.randrange(len(body))], body + b"}", body.replace(b"[", b"[[", 1), b"{}", b'"' + b"\\ud800" * 10 + b'"',
    )  # fmt: skip
    mine[at] = (PROGRAM, _sign(r.choice(bodies)))
    return packed(mine)


def hostile_delegate(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """A delegate's bytes changed, with all checksums right: the backend has to see to it."""
    mine = dict(_entries(bytes(data)))
    document = json.loads(mine[PROGRAM].split(b"\n", 1)[1])
    name = r.choice([name for name in mine if name.startswith("data/torchport/")])
    raw = bytearray(mine[name])
    for _ in range(r.randint(1, 4)):
        raw[r.randrange(len(raw))] = r.choice(b"%(),|;<>0123456789#:ab\xff\0")
    mine[name] = bytes(raw)
    document["digests"][name] = [len(raw), hashlib.sha256(raw).hexdigest()]
    mine[PROGRAM] = _sign(json.dumps(document).encode())
    return packed(list(mine.items()))


def hostile_header(r: random.Random, data: bytearray, all_seeds: list[Seed]) -> bytes:
    """A checkpoint whose header says something else; its tensors' checksums are in the program."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    for _ in range(r.randint(1, 3)):
        holder, key = r.choice(_places(header, []))
        if r.random() < 0.8:
            holder[key] = copy.deepcopy(r.choice(HOSTILE))
        else:
            del holder[key]
        if not header:
            break
    text = json.dumps(header).encode()
    size = r.choice((len(text), len(text), len(text), 0, 1 << 63, 100_000_001, len(text) + 1))
    return struct.pack("<Q", size) + text + bytes(data[8 + length :])


OF_CHECKPOINTS: tuple[Mutation, ...] = (
    flip_one, flip_some, overwrite, truncate, cut_or_repeat, grow, splice_bytes, hostile_header, hostile_header,
)  # fmt: skip
"""What is done to a checkpoint; the program must give an error or the right result."""
SAME_RESULT: tuple[Mutation, ...] = (
    flip_one, flip_one, flip_some, overwrite, truncate, cut_or_repeat, grow, splice_bytes, number_field, splice_entries,
    shuffle_entries, rename_entry, other_writer, hostile_text,
)  # fmt: skip
"""What these give must be an error or the right result."""
ANY_RESULT: tuple[Mutation, ...] = (hostile_document, hostile_document, hostile_delegate)
"""What these give is another program, correctly signed: an error, or whatever it says."""


# -- running -------------------------------------------------------------------------------------------------------
def run_case(seed: int, number: int, all_seeds: list[Seed]) -> str:
    """What happened: ``"error"``, ``"right"`` or ``"other"`` (a signed program that says something else).

    Raises ``AssertionError`` for a wrong result; whatever else comes out is a failure too.
    """
    r = random.Random(f"{seed}/{number}")
    original = r.choice(all_seeds)
    of_weights = bool(original.weights) and r.random() < 0.5
    mutation = r.choice(OF_CHECKPOINTS if of_weights else SAME_RESULT + ANY_RESULT)
    data, weights = original.data, original.weights
    if of_weights:
        weights = mutation(r, bytearray(weights), all_seeds)
    else:
        data = mutation(r, bytearray(data), all_seeds)
    try:
        results = _compute(data, weights, original.inputs, mapped=r.random() < 0.25)
    except TorchportError:
        return "error"
    found = tuple(tuple(value.tolist()) for value in results if hasattr(value, "tolist") and value.ndim == 1)
    if not of_weights and mutation in ANY_RESULT:
        return "right" if found == original.expected else "other"
    expected = {one.expected for one in all_seeds if one.inputs == original.inputs}
    assert found in expected, f"case {number} of seed {seed} ({mutation.__name__}): wrong result {results}"
    assert found == original.expected or mutation in (splice_bytes, splice_entries), f"case {number}: another program"
    return "right"


def _compute(data: bytes, weights: bytes, inputs: int, mapped: bool = False) -> Sequence[Any]:
    """Everything that can be asked of a file; the results of its first method."""
    folder = Path(os.environ.get("FUZZ_SCRATCH", tempfile.gettempdir()))
    source: Any = data
    if mapped:
        source = folder / f"{os.getpid()}.pt2"
        source.write_bytes(data)
    if weights:
        (folder / f"{os.getpid()}.safetensors").write_bytes(weights)
    try:
        runtime.check_header(source)
        place = {CHECKPOINT: folder / f"{os.getpid()}.safetensors"} if weights else {}
        program = runtime.load(source, registry=add_sub_registry(), external_data=place)
        assert isinstance(program.debug_info.handles, dict), "damaged debug information is none, and no error"
        for name in program.methods:
            program.meta(name)
        return program.load_method(program.methods[0])(*(X, Y)[:inputs])
    finally:
        for path in folder.glob(f"{os.getpid()}.*"):
            path.unlink()


def run_batch(seed: int, start: int, count: int) -> Counter[str]:
    """Run cases in this process, under limits."""
    import signal

    all_seeds = seeds()
    assert [run_whole(one) for one in all_seeds] == [one.expected for one in all_seeds]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    found: Counter[str] = Counter()
    for number in range(start, start + count):
        Path(os.environ["FUZZ_STATUS"]).write_text(str(number)) if "FUZZ_STATUS" in os.environ else None
        signal.alarm(SECONDS)
        found[run_case(seed, number, all_seeds)] += 1
    signal.alarm(0)
    return found


def run_whole(seed: Seed) -> tuple[tuple[float, ...], ...]:
    """What an undamaged file computes."""
    results = _compute(seed.data, seed.weights, seed.inputs)
    return tuple(tuple(value.tolist()) for value in results if hasattr(value, "tolist"))


def run_many(seed: int, count: int, batch: int = 5_000) -> tuple[Counter[str], list[str]]:
    """Batches in processes of their own; counts, and what went wrong in words."""
    total: Counter[str] = Counter()
    failures: list[str] = []
    for start in range(0, count, batch):
        size = min(batch, count - start)
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryDirectory() as scratch,
            tempfile.NamedTemporaryFile("r") as status,
        ):
            here = str(Path(__file__).resolve().parent)
            path = os.pathsep.join([here, str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(Path(__file__).resolve()), "--batch", str(start), "--count", str(size)]
            done = subprocess.run(
                [*command, "--seed", str(seed)],
                cwd=folder,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": path,
                    "FUZZ_STATUS": status.name,
                    "FUZZ_SCRATCH": scratch,
                },
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS * size,
            )
            left = os.listdir(folder) + os.listdir(scratch)
            if left:
                failures.append(f"batch {start}: files were written: {left}")
            if done.returncode:
                tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
                failures.append(f"case {status.read()} of seed {seed}: exit {done.returncode}: {tail[0]}")
            else:
                total.update(json.loads(done.stdout))
    return total, failures


def main() -> int:
    parser = argparse.ArgumentParser(description="damaged and hostile program files")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, help="run --count cases from this number on, in this process")
    parser.add_argument("--only", type=int, help="run one case and show what it raises")
    options = parser.parse_args()
    if options.only is not None:
        print(run_case(options.seed, options.only, seeds()))
        return 0
    if options.batch is not None:
        print(json.dumps(run_batch(options.seed, options.batch, options.count)))
        return 0
    started = time.monotonic()
    total, failures = run_many(options.seed, options.count)
    print(f"{sum(total.values()):,} cases in {time.monotonic() - started:.0f} s: {dict(total)}")
    for failure in failures:
        print(f"FAILED {failure}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
