"""Rules between runtime and delegates that ExecuTorch's own tests have: who owns bytes, codes, names, rolling back."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Recording, counter, delegate, entries_of, load, packed, program_bytes, registry_of, summing, weight

from torchport import runtime
from torchport.backend import execution
from torchport.core.errors import CompileError, ConfigError, DelegateError, ErrorCode, ProgramError, TorchportError
from torchport.program import values
from torchport.program.archive import Archive, write_archive
from torchport.program.delegate import LoadedDelegate
from torchport.program.document import DebugInfo, Origin
from torchport.program.writer import ROOT

X = np.array([1.0, 2.0], np.float32)
Y = np.array([10.0, 20.0], np.float32)


def test_the_methods_name_is_there_in_init_and_execute() -> None:
    backend = Recording()
    program = load(program_bytes(summing([delegate()], "encode"), summing([delegate(tag="d1")], "decode")), backend)
    for name in ("decode", "encode"):
        program.load_method(name)(X, Y)
    assert [entry[3] for entry in backend.log if entry[0] == "init"] == ["decode", "encode"]
    assert [entry[2] for entry in backend.log if entry[0] == "execute"] == ["decode", "encode"]


# -- bytes ---------------------------------------------------------------------------------------------------------
def test_bytes_that_are_the_handle_are_there_until_destroy_has_returned() -> None:
    seen: list[bytes] = []

    class Reading(Recording):
        def destroy(self, handle: Any) -> None:
            seen.append(bytes(handle.data))
            super().destroy(handle)

    backend = Reading()
    backend.handle_is_buffer = True
    method = load(program_bytes(summing([delegate(tag="d0"), delegate(tag="d1")])), backend).load_method()
    method.close()
    assert seen == [b"d0", b"d1"]
    assert all(buffer.freed and len(buffer) == 0 for buffer in backend.held)


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_bytes_are_aligned_as_asked_where_the_file_is_mapped(alignment: int, tmp_path: Path) -> None:
    addresses: list[int] = []

    class Looking(Recording):
        def init(self, processed: Any, specs: Any, context: Any) -> Any:
            addresses.append(np.frombuffer(processed.data, np.uint8).ctypes.data)
            addresses.extend(value.array.ctypes.data for value in context.constants.values())
            return super().init(processed, specs, context)

    constant, blobs = weight()
    entries = entries_of([summing([delegate(inputs=3, constants={2: 0})])], [constant], blobs)
    path = tmp_path / "m.pt2"
    with open(path, "wb") as file:
        write_archive(file, ROOT, entries, alignment)
    method = load(path, Looking(binds=True)).load_method()
    assert len(addresses) == 2
    assert all(address % alignment == 0 for address in addresses)
    np.testing.assert_array_equal(method(X, Y)[0], [21, 42])
    with open(path, "wb") as file:
        write_archive(file, ROOT, entries, 32768)
    assert all(entry.offset % 32768 == 0 for entry in Archive(runtime.FileLoader(path)).entries.values())
    with zipfile.ZipFile(path) as other:
        assert other.testzip() is None


@pytest.mark.parametrize("alignment", [0, 1, 63, 96, 65536, -64])
def test_other_alignments_are_refused(alignment: int) -> None:
    with pytest.raises(ProgramError, match="power of two from 64 to 32768") as caught:
        write_archive(io.BytesIO(), ROOT, [("a", b"")], alignment)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT


# -- codes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", [*ErrorCode, 77])
def test_a_delegates_code_is_given_on_unchanged(code: int) -> None:
    backend = Recording()
    program = load(program_bytes(summing([delegate()])), backend)
    error = backend.fails["init"] = DelegateError("made for another chip", code=code)
    error.args = ()
    with pytest.raises(DelegateError, match="made for another chip") as caught:
        program.load_method()
    assert caught.value.code == code
    backend.fails.clear()
    method = program.load_method()
    backend.fails["execute"] = DelegateError("busy", code=code)
    with pytest.raises(DelegateError, match="busy") as caught:
        method(X, Y)
    assert caught.value.code == code


def test_codes_are_execu_torchs() -> None:
    found = {one.name: one.value for one in ErrorCode}
    assert found == {
        "INTERNAL": 0x01, "INVALID_STATE": 0x02, "END_OF_METHOD": 0x03, "ALREADY_LOADED": 0x04, "NOT_SUPPORTED": 0x10,
        "NOT_IMPLEMENTED": 0x11, "INVALID_ARGUMENT": 0x12, "INVALID_TYPE": 0x13, "OPERATOR_MISSING": 0x14,
        "REGISTRATION_EXCEEDING_MAX_KERNELS": 0x15, "REGISTRATION_ALREADY_REGISTERED": 0x16, "NOT_FOUND": 0x20,
        "MEMORY_ALLOCATION_FAILED": 0x21, "ACCESS_FAILED": 0x22, "INVALID_PROGRAM": 0x23,
        "INVALID_EXTERNAL_DATA": 0x24, "OUT_OF_RESOURCES": 0x25, "DELEGATE_INVALID_COMPATIBILITY": 0x30,
        "DELEGATE_MEMORY_ALLOCATION_FAILED": 0x31, "DELEGATE_INVALID_HANDLE": 0x32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CompileError("compiled for another CPU"), ErrorCode.DELEGATE_INVALID_COMPATIBILITY),
        (ConfigError("no such option"), ErrorCode.INVALID_ARGUMENT),
        (NotImplementedError(), ErrorCode.NOT_IMPLEMENTED),
        (MemoryError(), ErrorCode.DELEGATE_MEMORY_ALLOCATION_FAILED),
        (ValueError("what"), ErrorCode.INTERNAL),
    ],
)
def test_other_exceptions_get_a_code(error: Exception, code: ErrorCode) -> None:
    backend = Recording()
    backend.fails["init"] = error
    error.args = (*error.args[:1], "d0")
    with pytest.raises(DelegateError, match="init failed") as caught:
        load(program_bytes(summing([delegate()])), backend).load_method()
    assert caught.value.code == code
    assert caught.value.__cause__ is error


def test_a_destroyed_delegate_has_no_handle() -> None:
    method = load(program_bytes(summing([delegate()])), Recording()).load_method()
    (one,) = method._delegates
    method.close()
    with pytest.raises(DelegateError, match="was destroyed") as caught:
        one.execute([])
    assert caught.value.code == ErrorCode.DELEGATE_INVALID_HANDLE


# -- names ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["x" * 65, "", "a b", "../evil", "a\0b"])
def test_a_backends_name_in_a_file_is_a_name(name: str) -> None:
    with pytest.raises(ProgramError, match="is not the name of a backend"):
        load(program_bytes(summing([delegate(name)])), Recording())


def test_the_longest_name_can_be_registered_and_no_longer_one() -> None:
    longest = Recording("x" * 64)
    data = program_bytes(summing([delegate("x" * 64)]))
    np.testing.assert_array_equal(load(data, longest).load_method()(X, Y)[0], [11, 22])
    with pytest.raises(TorchportError, match="at most 64 characters"):
        registry_of(Recording("x" * 65))


# -- places --------------------------------------------------------------------------------------------------------
def test_an_error_shows_operator_modules_and_the_users_calls() -> None:
    stack = "model.py:9 in forward\n  return self.inner(x)\nmodel.py:3 in forward\n  return x + y"
    place = Origin("inner", "model.py:3 in forward", "aten.add.Tensor", "Outer > inner: Adding", stack)
    debug = DebugInfo({1: place}, {"forward": [{"all": (1,)}]})
    backend = Recording()
    method = load(packed(entries_of([summing([delegate()])], debug=debug)), backend).load_method()
    backend.fails["execute"] = DelegateError("overflow", ident="all")
    with pytest.raises(DelegateError) as caught:
        method(X, Y)
    assert str(caught.value).splitlines() == [
        "overflow",
        "  method: forward",
        "  delegate: recording #0",
        "  debug handle: 1",
        "  op: aten.add.Tensor",
        "  module: inner",
        "  in: Outer > inner: Adding",
        "  line: model.py:3 in forward",
        "    model.py:9 in forward",
        "      return self.inner(x)",
        "    model.py:3 in forward",
        "      return x + y",
    ]
    assert (caught.value.op, caught.value.hierarchy, caught.value.stack) == (place.op, place.hierarchy, stack)


def test_damaged_debug_information_costs_the_places_and_nothing_else() -> None:
    entries = [
        (name, data[:-3] + b"x}]" if name.endswith("debug.json") else data)
        for name, data in entries_of([summing([delegate()])])
    ]
    backend = Recording()
    method = load(packed(entries), backend).load_method()
    np.testing.assert_array_equal(method(X, Y)[0], [11, 22])
    backend.fails["execute"] = DelegateError("overflow", code=ErrorCode.OUT_OF_RESOURCES)
    with pytest.raises(DelegateError, match="overflow") as caught:
        method(X, Y)
    assert (caught.value.code, caught.value.source) == (ErrorCode.OUT_OF_RESOURCES, None)


def test_intermediate_values_are_in_the_profile() -> None:
    class Telling(Recording):
        def execute(self, handle: Any, args: Any, context: Any) -> Any:
            results = super().execute(handle, args, context)
            context.tracer.value("all", results[0].array)
            return results

    method = load(program_bytes(summing([delegate()])), Telling(), profile=True).load_method()
    method(X, Y)
    ((handles, value),) = method.profile().values.items()
    assert handles == (1, 2)
    np.testing.assert_array_equal(value, [11, 22])


# -- rolling back --------------------------------------------------------------------------------------------------
class Loader(runtime.BytesLoader):
    """A loader whose loads can be made to fail."""

    def load(self, offset: int, size: int, segment: runtime.SegmentInfo) -> memoryview:
        return super().load(offset, size, segment)


_LOADING = [
    (Loader, "load"),
    (values.NumpyHost, "spec"),
    (values.NumpyHost, "constant"),
    (values.NumpyHost, "checker"),
    (values.NumpyHost, "adapter"),
    (LoadedDelegate, "_device"),
    (Recording, "init"),
    (runtime.State, "_adopt"),
]
_RUNNING = [
    (values.NumpyHost, "copy"),
    (values.NumpyHost, "results"),
    (Recording, "execute"),
    (execution, "check_results"),
    (execution, "count"),
]


class FailAt:
    """Lets the n-th of the calls to some functions fail; ``left`` says whether it came to that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, places: list[tuple[Any, str]], error: Exception | type) -> None:
        self.left = -1
        self.error = error
        for owner, name in places:
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise self.error
            return original(*args, **kwargs)

        return call


def _program(backend: Recording) -> runtime.Program:
    constant, blobs = weight((0.0, 5.0))
    method = counter()
    return load(Loader(program_bytes(method, constants=[constant], blobs=blobs)), backend)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_running_out_of_memory_anywhere_while_loading_leaks_nothing(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Recording()
    program = _program(backend)
    failing = FailAt(monkeypatch, _LOADING, error)
    for number in itertools.count(1):
        failing.left = number
        try:
            method = program.load_method()
        except (error, DelegateError):
            assert backend.alive == 0
            assert all(buffer.freed for buffer in backend.held)
        else:
            break
    assert number > 8, "every place has failed once"
    failing.left = -1
    np.testing.assert_array_equal(method(X)[0], [1, 7])
    method.close()
    assert backend.alive == 0


def test_running_out_of_memory_anywhere_in_a_call_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Recording()
    method = _program(backend).load_method()
    failing = FailAt(monkeypatch, _RUNNING, MemoryError)
    for number in itertools.count(1):
        failing.left = number
        try:
            new, old = method(X)
        except (MemoryError, DelegateError):
            assert not method.in_progress
            np.testing.assert_array_equal(method.state["w"], [0, 5])
        else:
            break
    assert number > 3
    np.testing.assert_array_equal((new, old), ([1, 7], [0, 5]))


def test_a_disk_that_fails_while_a_method_is_loaded() -> None:
    backend = Recording()

    class Failing(runtime.BytesLoader):
        broken = False

        def load(self, offset: int, size: int, segment: runtime.SegmentInfo) -> memoryview:
            if self.broken and segment.name.endswith("d1"):
                raise OSError(5, "Input/output error")
            return super().load(offset, size, segment)

    loader = Failing(program_bytes(summing([delegate(tag="d0"), delegate(tag="d1")])))
    program = load(loader, backend)
    loader.broken = True
    with pytest.raises(OSError, match="Input/output"):
        program.load_method()
    assert backend.names() == ["init", "destroy"]
    loader.broken = False
    np.testing.assert_array_equal(program.load_method()(X, Y)[0], [21, 42])


def test_what_torch_export_saves_is_said_to_hold_no_program(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), tmp_path / "plain.pt2")
    with pytest.raises(ProgramError, match=r"holds no torchport program; make one with torchport\.aot\.lower"):
        runtime.load(tmp_path / "plain.pt2")
