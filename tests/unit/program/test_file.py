"""The file: the archive's dialect, what damage does, saving under SIGKILL, safetensors."""

from __future__ import annotations

import io
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import add_sub_registry, entries_of, packed, real_program, summing

from torchport import runtime
from torchport.core.errors import ErrorCode, ProgramError, TorchportError
from torchport.program import archive, safetensors
from torchport.program.archive import ALIGNMENT, Archive, write_archive
from torchport.program.loader import BytesLoader
from torchport.program.writer import atomic_file

DATA = real_program()


def read(data: bytes) -> Archive:
    return Archive(BytesLoader(data))


# -- the archive ---------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,8}(/[a-z0-9.]{1,8}[a-z])?", fullmatch=True), st.binary(max_size=300)))
def test_what_is_written_is_read_and_aligned_and_other_programs_read_it(entries: dict[str, bytes]) -> None:
    data = packed(list(entries.items()))
    if not entries:
        with pytest.raises(ProgramError):
            read(data)
        return
    found = read(data)
    assert {name: bytes(found.verified(name)) for name in found.entries} == entries
    assert all(entry.offset % ALIGNMENT == 0 for entry in found.entries.values())
    with zipfile.ZipFile(io.BytesIO(data)) as other:
        assert other.testzip() is None
        assert {name.split("/", 1)[1]: other.read(name) for name in other.namelist()} == entries


def test_zip64_where_numbers_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limits lowered, so that a few bytes are already too many for the old fields."""
    entries = [("a", b"x" * 500), ("b/c", b"y" * 10), ("d", b"")]
    monkeypatch.setattr(archive, "_MAX32", 0xFF)
    monkeypatch.setattr(archive, "_MAX16", 2)
    data = packed(entries)
    found = read(data)
    assert {name: bytes(found.verified(name)) for name in found.entries} == dict(entries)
    monkeypatch.undo()
    with pytest.raises(ProgramError):
        read(data)


def test_a_real_zip64_file(tmp_path: Path) -> None:
    """An entry beyond 4 GiB: a sparse file, of which only headers are written."""
    path = tmp_path / "big.zip"
    size = (1 << 32) + 100
    with open(path, "wb") as file, mmap.mmap(-1, size, mmap.MAP_PRIVATE, mmap.PROT_READ) as zeros:
        view = memoryview(zeros)
        write_archive(_Sparse(file), "torchport", [("big", view), ("after", b"small")])  # type: ignore[arg-type]
        view.release()
    loader = runtime.FileLoader(path)
    found = Archive(loader)
    assert found.entries["big"].size == size
    assert found.entries["after"].header > 1 << 32
    assert bytes(found.verified("after")) == b"small"


class _Sparse:
    """Writes zeros by seeking."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        if len(data) > 1 << 20:
            self.file.seek(len(data), os.SEEK_CUR)
            return len(data)
        return self.file.write(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d[:-1], "zip directory"),
        (lambda d: d + b"\0", "zip directory"),
        (lambda d: b"\0" + d, "does not lie where it says"),
        (lambda d: d[:100], "zip directory"),
        (lambda d: b"", "ends too early"),
        (lambda d: d.replace(b"extra/torchport/debug", b"extra/torchport/../bg"), "not a plain relative path"),
        (lambda d: d.replace(b"extra/torchport/program", b"extra/torchport/../gram"), "holds no torchport program"),
        (lambda d: d.replace(b"archive_format", b"archive/format"), ""),
    ],
    ids=["cut", "grown", "prepended", "half", "empty", "traversal", "no program", "renamed alike"],
)
def test_structure(change: Any, says: str) -> None:
    data = change(DATA)
    if not says:
        assert runtime.load(data).methods == ("forward",), "an entry that nobody needs may have another name"
        return
    with pytest.raises(ProgramError, match=says):
        runtime.load(data)


def test_compressed_entries_and_foreign_zips_are_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as other:
        other.writestr("torchport/a", b"x" * 1000)
    with pytest.raises(ProgramError, match="compressed"):
        read(file.getvalue())
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w") as other:
        other.writestr("torchport/a", b"x")
    with pytest.raises(ProgramError, match="not aligned"):
        read(plain.getvalue())


def test_a_pt2_without_a_program_says_how_to_make_one() -> None:
    with pytest.raises(ProgramError, match="holds no torchport program"):
        runtime.load(packed([("models/model.json", b"{}")]))


# -- damage ----------------------------------------------------------------------------------------------------------
def test_every_single_bit_of_the_documents_and_delegates_matters_or_is_nobodys() -> None:
    """Single-bit flips over the whole file, one bit of every third byte: an error of ours or the right result."""
    r = random.Random(5)
    outcomes = {"error": 0, "right": 0}
    for position in range(0, len(DATA), 3):
        data = bytearray(DATA)
        data[position] ^= 1 << r.randrange(8)
        try:
            method = runtime.load(bytes(data), registry=add_sub_registry()).load_method()
            (result,) = method(fuzz.X, fuzz.Y)
        except TorchportError:
            outcomes["error"] += 1
        else:
            np.testing.assert_array_equal(result, [1, 2])
            outcomes["right"] += 1
    assert outcomes["error"] > outcomes["right"] > 0


def test_mutated_files() -> None:
    """A small seeded number; ``fuzz.py`` runs any number."""
    total, failures = fuzz.run_many(seed=11, count=1_500)
    assert failures == []
    assert sum(total.values()) == 1_500
    assert total["error"] > total["right"] > 0


def test_the_fuzzer_finds_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checksums, the same mutations give wrong results: the fuzzer notices."""
    monkeypatch.setattr("torchport.program.package._verify", lambda archive, digests: None)
    monkeypatch.setattr(fuzz, "SAME_RESULT", (fuzz.flip_one,))
    monkeypatch.setattr(fuzz, "ANY_RESULT", ())
    all_seeds = [fuzz.Seed(DATA, 2, ((1.0, 2.0),))]
    with pytest.raises(Exception, match=r"wrong result|case"):
        for number in range(3_000):
            fuzz.run_case(3, number, all_seeds)


# -- saving ------------------------------------------------------------------------------------------------------------
WRITER = """
import sys
sys.path[:0] = {paths!r}
from programs import summing, delegate, entries_of
from torchport.program import writer
from torchport.program.document import decode, DebugInfo, PROGRAM
blob = {byte!r} * 3_000_000
method = summing([delegate(tag="d0")])
document = decode(memoryview(dict(entries_of([method], blobs={{"data/torchport/d0": blob}}))[PROGRAM]))
print("ready", flush=True)
sys.stdin.readline()
while True:
    writer.write_program({path!r}, document, DebugInfo(), {{"data/torchport/d0": blob}})
    print("saved", flush=True)
"""


def test_killing_a_process_that_saves_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    here = Path(__file__).parent
    r = random.Random(7)
    seen: set[bytes] = set()
    for kills in range(6):
        code = WRITER.format(paths=[str(here), str(here.parents[2])], byte=bytes([65 + kills]), path=str(path))
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        if kills == 0:
            process.stdout.readline()
        time.sleep(r.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stdin.close()
        program = runtime.load(path)
        (delegate,) = program.meta().delegates
        assert delegate.nbytes == 3_000_000
        data = program.delegate_data("forward", 0)
        assert len(set(data)) == 1
        seen.add(data[:1])
    assert seen


def test_an_error_while_saving_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.pt2"]
    with atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    with pytest.raises(ProgramError) as caught, atomic_file(tmp_path / "absent" / "m.pt2"):
        pass
    assert caught.value.code == ErrorCode.ACCESS_FAILED


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path: Path) -> None:
    names = (".m.pt2.123-0011aabb.tmp", ".m.pt2.124-0011aabb.tmp", ".n.pt2.123-0011aabb.tmp", ".m.pt2.x.tmp")
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    os.utime(tmp_path / names[1])
    with atomic_file(tmp_path / "m.pt2") as file:
        file.write(b"new")
    assert sorted(os.listdir(tmp_path)) == sorted((*names[1:], "m.pt2"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# -- safetensors -------------------------------------------------------------------------------------------------------
def test_safetensors_files_are_those_of_the_library(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor([True, False]),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
        "d": torch.tensor(7, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = safetensors.File(tmp_path / "theirs.safetensors")
    assert sorted(theirs.names()) == ["a", "b", "c", "d"]
    found = {name: theirs.get(name) for name in theirs.names()}
    with atomic_file(tmp_path / "ours.safetensors") as file:
        safetensors.write(file, {name: tensor for name, tensor in found.items() if tensor is not None})
    ours = load_file(tmp_path / "ours.safetensors")
    assert ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(ours[name], tensor)
    assert theirs.get("nothing") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"{{{{{",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}     ' + b"\0" * 8,
        struct.pack("<Q", 60) + b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}       ' + b"\0" * 8,
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}     ' + b"\0" * 8,
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}      ' + b"\0" * 8,
        struct.pack("<Q", 20) + b'{"a":3}             ' + b"\0" * 8,
    ],
)
def test_damaged_safetensors_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ProgramError):
        safetensors.File(path).get("a")


def test_external_names_cannot_lead_elsewhere() -> None:
    from torchport.program.document import Constant, Spec

    spec = Spec("float32", (2,), (1,))
    for name in ("../w.safetensors", "/etc/passwd", "a/b", "..", "C:w", "a\\b"):
        constant = Constant("w", spec, "w", 0, name, "0" * 64)
        with pytest.raises(ProgramError, match="not the plain name of a file"):
            runtime.load(packed(entries_of([summing([])], [constant])))
