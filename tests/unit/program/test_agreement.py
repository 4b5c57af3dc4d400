"""What a file declares agrees with what makes it, arguments fit their operators, and limits come before work."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import F2, Recording, counter, delegate, entries_of, kernels, load, packed, program_bytes, summing, weight

from torchport import runtime
from torchport.backend.interface import BackendDevice, FreeableBuffer, InitContext
from torchport.backends.reference import ReferenceBackend
from torchport.core.errors import CompileError, DelegateError, GraphError, MethodError, ProgramError
from torchport.core.specs import CompileSpecs
from torchport.program import safetensors
from torchport.program.document import PROGRAM, Output, Spec, decode

F3 = Spec("float32", (3,), (1,))
I2 = Spec("int32", (2,), (1,))


# -- what is declared, and what makes it -------------------------------------------------------------------------------
@pytest.mark.parametrize("wrong", [F3, I2, Spec("float32", (2,), (2,))], ids=str)
def test_an_outputs_spec_is_that_of_the_delegate_that_makes_it(wrong: Spec) -> None:
    method = summing([delegate(), delegate(tag="d1")])
    with pytest.raises(ProgramError, match=r"output 0 is declared as .* but what makes it gives float32\[2\]"):
        load(program_bytes(replace(method, outputs=(Output(method.outputs[0].value, wrong),))), Recording())


@pytest.mark.parametrize("number", [0, 2], ids=["input", "constant"])
def test_an_outputs_spec_is_that_of_the_input_or_constant_that_it_is(number: int) -> None:
    constant, blobs = weight()
    method = replace(summing([delegate()], constants={2: 0}), outputs=(Output(number, F3),))
    with pytest.raises(ProgramError, match="output 0 is declared as"):
        load(program_bytes(method, constants=[constant], blobs=blobs), Recording())


def test_an_argument_is_what_its_delegate_takes_and_a_buffer_stays_what_it_is() -> None:
    method = summing([delegate(), replace(delegate(tag="d1"), inputs=(F3, F2))])
    with pytest.raises(ProgramError, match="argument 0 of delegate 1"):
        load(program_bytes(method), Recording())
    constant, blobs = weight()
    changing = counter()
    other = replace(changing, delegates=(replace(changing.delegates[0], outputs=(F3,)),), outputs=())
    with pytest.raises(ProgramError, match=r"buffer 'w' is float32\[2\], but becomes float32\[3\]"):
        load(program_bytes(other, constants=[constant], blobs=blobs), Recording())


def test_an_outputs_spec_is_that_of_the_operator_that_makes_it() -> None:
    method = kernels()
    wrong = replace(method, outputs=(Output(4, F3), method.outputs[1]))
    loaded = load(program_bytes(wrong), Recording()).load_method()
    with pytest.raises(ProgramError, match=r"says that output 0 is float32\[3\], but what makes it gave float32\[1\]"):
        loaded(torch.ones(2), torch.ones(2))
    unlike = replace(method, outputs=(Output(2, Spec("float32", (2,), (3,))),))
    (result,) = load(program_bytes(unlike), Recording()).load_method()(torch.ones(2), torch.ones(2))
    assert result.stride() == (3,), "as meta() says"
    shared = replace(method, outputs=(Output(2, Spec("float32", (2,), (0,))),))
    with pytest.raises(ProgramError, match="elements would share"):
        load(program_bytes(shared), Recording()).load_method()(torch.ones(2), torch.ones(2))


def test_inputs_whose_elements_share_memory_are_not_copied_into() -> None:
    shared = Spec("float32", (2, 2), (1, 1))
    one = replace(delegate(inputs=1), inputs=(shared,))
    method = replace(summing([delegate()]), delegates=(one,), inputs=(runtime_input(shared),), values=2, outputs=())
    method = replace(method, instructions=(replace(method.instructions[0], args=(0,), results=(1,)),))
    loaded = load(program_bytes(method), Recording()).load_method()
    with pytest.raises(MethodError, match="elements would share it"):
        loaded(np.ones((2, 2), np.float32))


def runtime_input(spec: Spec) -> Any:
    from torchport.program.document import Input

    return Input("x", spec)


# -- arguments of operators --------------------------------------------------------------------------------------------
def _graph(calls: list[Any], inputs: int = 1, outputs: Any = None) -> bytes:
    specs = [[[2, 2], "torch.float32", [2, 1]]] * inputs
    last = [{"n": inputs + len(calls) - 1}] if outputs is None else outputs
    return json.dumps({"inputs": specs, "calls": [[*one, 0, ""] for one in calls], "outputs": last}).encode()


def _init(data: bytes) -> Any:
    return ReferenceBackend().init(FreeableBuffer(data), CompileSpecs(), InitContext(BackendDevice("cpu")))


X = {"n": 0}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (["aten.softmax.int", [X, 1, 77], {}], "'dtype' is of kind Optional"),
        (["aten.softmax.int", [X, 1], {"dtype": 77}], "'dtype'"),
        (["aten.softmax.int", [X, 1], {"dtype": {"t": "torch.quint8"}}], "'dtype'"),
        (["aten.clone.default", [X], {"memory_format": 99}], "'memory_format'"),
        (["aten.full.default", [[2], 1], {"layout": 5}], "'layout'"),
        (["aten.full.default", [[2], 1], {"layout": {"t": "torch.sparse_coo"}}], "'layout'"),
        (["aten.full.default", [[2], 1], {"device": 0}], "'device'"),
        (["aten.full.default", [[2], 1], {"device": {"d": "meta"}}], "'device'"),
        (["aten.full.default", [[1 << 64], 1], {}], "'size'"),
        (["aten._reshape_alias.default", [X, [9999], [1]], {}], "without looking"),
        (["aten.from_file.default", ["/etc/passwd", False, 4], {}], "a file"),
        (["aten.size.default", [X], {}], "does not give tensors"),
        (["aten.add_.Tensor", [X, 1], {}], "not the graph's own"),
        (["aten.sin.default", [{"n": -1}], {}], "not the number of a value"),
        (["aten.sin.default", [X, 3], {}], "arguments by position"),
        (["aten.sin.default", [], {}], "misses its argument"),
        (["getitem", [X, "a"], {}], "does not take"),
        (["ops.load_library", ["x"], {}], "no operator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_in_blobs_are_of_the_operators_kinds(call: list[Any], says: str) -> None:
    with pytest.raises((GraphError, CompileError), match=says):
        _init(_graph([call]))


def test_what_reference_writes_over_is_still_read() -> None:
    run = _init(_graph([["aten.mul.Tensor", [X, 2], {}], ["aten.add_.Tensor", [{"n": 1}, 1], {}]]))
    assert run([torch.ones(2, 2)], [])[0].tolist() == [[3, 3], [3, 3]]


def test_arguments_of_leftover_operators_too() -> None:
    method = kernels()
    relu = replace(method.instructions[0], op="aten.softmax.int", args=({"n": 0}, 0, 77))
    wrong = replace(method, instructions=(relu, *method.instructions[1:]))
    with pytest.raises(DelegateError, match="'dtype'"):
        load(program_bytes(wrong), Recording()).load_method()
    rows = replace(method.instructions[2], op="aten.relu.default", args=({"n": 3},))
    with pytest.raises(DelegateError, match="another number of results"):
        load(program_bytes(replace(method, instructions=(*method.instructions[:2], rows))), Recording()).load_method()


def test_bytes_for_other_inputs_are_refused() -> None:
    spec = runtime_specs((3,))
    context = InitContext(BackendDevice("cpu"), spec, spec)
    with pytest.raises(CompileError, match=r"float32\[2, 2\] at 0 of their inputs"):
        ReferenceBackend().init(FreeableBuffer(_graph([["aten.sin.default", [X], {}]])), CompileSpecs(), context)


def runtime_specs(shape: tuple[int, ...]) -> Any:
    from torchport.core.specs import TensorSpec

    return (TensorSpec.of(torch.empty(shape)),)


# -- limits ------------------------------------------------------------------------------------------------------------
def _with(change: Callable[[Any], None]) -> memoryview:
    document = json.loads(dict(entries_of([summing([delegate()])]))[PROGRAM].split(b"\n", 1)[1])
    change(document)
    body = json.dumps(document).encode()
    header = {"torchport": 2, "oldest": 1, "sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
    return memoryview(json.dumps(header).encode() + b"\n" + body)


def _rank(document: Any) -> None:
    document["methods"]["forward"]["inputs"][0][1] = ["float32", [1 << 61] * 40_000, None]


def _strides(document: Any) -> None:
    document["methods"]["forward"]["inputs"][0][1] = ["float32", [1], [1] * 400_000]


def _empty(document: Any) -> None:
    document["methods"]["forward"]["inputs"][0][1] = ["float32", [0, 1 << 61, 1 << 61], None]


@pytest.mark.parametrize("change", [_rank, _strides, _empty], ids=["rank", "strides", "empty"])
def test_a_hostile_shape_is_refused_before_anything_is_computed_of_it(change: Callable[[Any], None]) -> None:
    data = _with(change)
    started = time.process_time()
    with pytest.raises(ProgramError):
        decode(data)
    assert time.process_time() - started < 1


def test_a_document_has_no_more_values_than_a_file_of_its_size() -> None:
    def crowd(document: Any) -> None:
        document["producer"]["x"] = [[]] * 800_000

    data = _with(crowd)
    with pytest.raises(ProgramError, match="values, which is more than a file of"):
        decode(data)
    with pytest.raises(ProgramError, match="expected text"):
        decode(data, 1 << 30)


def test_hostile_safetensors_headers_are_refused_before_sizes_are_computed(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"

    def write(header: bytes) -> safetensors.File:
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
        return safetensors.File(path)

    started = time.process_time()
    shape = json.dumps([1 << 61] * 60_000)
    with pytest.raises(ProgramError, match="more than 64 dimensions"):
        write(b'{"a":{"dtype":"F32","shape":%s,"data_offsets":[0,4]}}' % shape.encode()).get("a")
    for row in ('{"dtype":[],"shape":[1],"data_offsets":[0,4]}', '{"dtype":"F32","shape":"11","data_offsets":[0,4]}'):
        with pytest.raises(ProgramError):
            write(b'{"a":%s}' % row.encode()).get("a")
    with pytest.raises(ProgramError, match="more than a file of"):
        write(b'{"a":[' + b"[]," * 700_000 + b"0]}")
    assert time.process_time() - started < 2


def test_constants_outside_are_as_such_files_have_them() -> None:
    constant, _ = weight()
    outside = replace(constant, entry="w", external="w.safetensors", sha256="0" * 64)
    for wrong in (replace(outside, offset=4), replace(outside, spec=Spec("float32", (2,), (1 << 40,)))):
        with pytest.raises(ProgramError, match="lies outside"):
            runtime.load(packed(entries_of([summing([])], [wrong])))


def test_a_name_too_long_for_an_archive_is_an_error_in_words() -> None:
    with pytest.raises(ProgramError, match="at most 65,535 fit"):
        packed([("x" * 70_000, b"")])


# -- many at once ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_files_changed_in_their_structure(tmp_path: Path) -> None:
    """A small seeded number; ``fuzz_structure.py`` runs any number, and other engines' files."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(here / "fuzz_structure.py"), "--count", "400", "--seed", "3"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    assert "'right'" in done.stdout
    assert "'other'" in done.stdout
