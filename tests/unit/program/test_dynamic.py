"""Methods with sizes that change: what a file may say of them, and what the runtime does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from programs import Recording, delegate, entries_of, load, packed, padding, summing

from torchport.core.errors import DelegateError, ErrorCode, MethodError, ProgramError
from torchport.program.document import Document, Spec, Symbol, decode, encode
from torchport.program.schema import Dynamic, OutputForm


def program(backend: Recording, **more: Any) -> Any:
    methods, dynamic, blobs = padding()
    return load(packed(entries_of(methods, (), blobs, dynamic=dynamic)), backend, **more)


def numbers(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)


# -- the runtime -------------------------------------------------------------------------------------------------------
def test_a_method_is_listed_once_and_says_what_changes() -> None:
    found = program(Recording())
    assert found.methods == ("forward",)
    meta = found.meta()
    assert [str(one) for one in (*meta.inputs, *meta.outputs)] == ["float32[n=1..5]"] * 3
    assert meta.inputs[0].shape == (5,)
    assert meta.inputs[0].dynamic == {0: ("n", 1, 5)}
    assert meta.padded
    assert [one.name for one in meta.variants] == ["forward@3", "forward@5"]
    assert meta.uses_backend("recording")
    with pytest.raises(MethodError, match="no method 'forward@3'; it has: forward"):
        found.load_method("forward@3")


def test_variants_are_loaded_when_they_are_needed_and_once() -> None:
    backend = Recording()
    method = program(backend).load_method()
    assert backend.names() == []
    for count in (1, 2, 3, 3):
        (result,) = method(numbers(count), y=numbers(count, 10.0))
        np.testing.assert_array_equal(result, numbers(count) + numbers(count, 10.0))
        assert result.shape == (count,)
    assert backend.names() == ["init", *["execute"] * 4]
    method(numbers(4), numbers(4))
    assert backend.alive == 2
    method.close()
    assert backend.alive == 0
    with pytest.raises(MethodError, match="was closed"):
        method(numbers(4), numbers(4))


def test_sizes_of_a_variant_are_not_copied() -> None:
    seen: list[Any] = []

    class Looking(Recording):
        def execute(self, handle: Any, args: Any, context: Any) -> Any:
            seen.append(args[0].array)
            return super().execute(handle, args, context)

    method = program(Looking()).load_method()
    x = numbers(3)
    method(x, x)
    assert seen[-1] is x
    method(x[:2], x[:2])
    assert seen[-1].tolist() == [0, 1, 0]


def test_a_variant_that_fails_to_load_leaves_nothing_and_is_tried_again() -> None:
    backend = Recording()
    method = program(backend).load_method()
    backend.fails["init"] = ValueError()
    with pytest.raises(DelegateError, match="init"):
        method(numbers(2), numbers(2))
    assert backend.alive == 0
    backend.fails.clear()
    assert method(numbers(2), numbers(2))[0].shape == (2,)


def test_an_absent_backend_is_said_when_the_method_is_loaded() -> None:
    backend = Recording()
    backend.available = False
    with pytest.raises(DelegateError, match="unplugged") as caught:
        program(backend).load_method()
    assert caught.value.code == ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((numbers(6), numbers(6)), r"'x': dimension 0 \(n\) is 6, but n is from 1 to 5"),
        ((numbers(0), numbers(0)), r"'x': dimension 0 \(n\) is 0, but n is from 1 to 5"),
        ((numbers(2), numbers(3)), r"'y': dimension 0 \(n\) is 3, but n is 2 by input 'x'"),
        ((numbers(2), numbers(2)[None]), r"'y' should be float32\[n=1..5\], but is \[1, 2\]"),
        ((numbers(2), [1.0, 2.0]), r"'y' should be float32\[n=1..5\], but is a list"),
        ((numbers(2), numbers(2).astype(np.int32)), r"'y' should be float32\[2\], but is int32\[2\]"),
        ((numbers(2),), r"takes 2 inputs \(x, y\), but got 1"),
        ((numbers(2),) * 3, r"takes 2 inputs \(x, y\), but got 3"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, says: str) -> None:
    method = program(Recording()).load_method()
    with pytest.raises(MethodError, match=says):
        method(*inputs)
    assert method(numbers(2), numbers(2))[0].tolist() == [0, 2]


def test_inputs_by_name_that_do_not_fit() -> None:
    method = program(Recording()).load_method()
    with pytest.raises(MethodError, match="misses inputs: y"):
        method(x=numbers(2))
    with pytest.raises(MethodError, match="none of: x, y"):
        method(numbers(2), true_size_0=numbers(2))


def test_step_by_step() -> None:
    method = program(Recording()).load_method()
    with pytest.raises(MethodError, match="set_inputs"):
        method.step()
    method.set_inputs(numbers(4), numbers(4))
    assert method.in_progress
    with pytest.raises(MethodError, match="in progress"):
        method(numbers(2), numbers(2))
    assert not method.step()
    assert method.outputs()[0].tolist() == [0, 2, 4, 6]
    assert not method.in_progress
    method.set_inputs(numbers(1), numbers(1))
    method.reset()
    assert method(numbers(2), numbers(2))[0].tolist() == [0, 2]


def test_options_and_profile() -> None:
    backend = Recording()
    method = program(backend, profile=True).load_method(backend_options={"recording": {"threads": 2}})
    method(numbers(2), numbers(2))
    method.set_options("recording", threads=3)
    method(numbers(2), numbers(2))
    method(numbers(5), numbers(5))
    options = [entry[-1]["threads"] for entry in backend.log if entry[0] == "execute"]
    assert options == [2, 3, 3]
    names = [event.name for event in method.profile().events if event.kind == "execute"]
    assert names == ["method forward@3", "method forward@3", "method forward@5"]
    assert sum(event.name == "program" for event in method.profile().events) == 1


def test_threads() -> None:
    backend = Recording()
    method = program(backend).load_method()
    wrong: list[Any] = []

    def work(count: int) -> None:
        for _ in range(50):
            (result,) = method(numbers(count), numbers(count))
            if result.tolist() != (numbers(count) * 2).tolist():
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 2, 3, 4, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert backend.alive == 2


def test_more_sizes_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchport.program.dynamic._KNOWN", 2)
    method = program(Recording()).load_method()
    for count in (1, 2, 3, 4, 5, 1, 2, 3):
        assert method(numbers(count), numbers(count))[0].shape == (count,)
    assert len(method._calls) == 2  # type: ignore[attr-defined]


# -- the file ----------------------------------------------------------------------------------------------------------
def document(change: Callable[[Document], Document] = lambda one: one) -> bytes:
    methods, dynamic, blobs = padding()
    digests = {one: (len(data), "0" * 64) for one, data in blobs.items()}
    return encode(change(Document({one.name: one for one in methods}, [], digests, {}, dynamic)))


def test_the_section_is_read_as_it_was_written() -> None:
    _, dynamic, _ = padding()
    found = decode(memoryview(document()))
    assert found.dynamic == dynamic
    assert found.names() == ("forward",)
    assert b'"oldest":2' in document()[:100]


def test_files_without_it_are_for_readers_of_version_1() -> None:
    method = summing([delegate()])
    digests = {method.delegates[0].entry: (1, "0" * 64)}
    data = encode(Document({"forward": method}, [], digests))
    assert b'"oldest":1' in data[:100]
    assert b"dynamic" not in data


def section(**fields: Any) -> Callable[[Document], Document]:
    return lambda one: replace(one, dynamic={"forward": replace(one.dynamic["forward"], **fields)})


def output(**fields: Any) -> Callable[[Document], Document]:
    return section(outputs=(OutputForm(**fields),))


def method(name: str, **fields: Any) -> Callable[[Document], Document]:
    return lambda one: replace(one, methods={**one.methods, name: replace(one.methods["forward@3"], **fields)})


def without(name: str) -> Callable[[Document], Document]:
    return lambda one: replace(one, methods={key: value for key, value in one.methods.items() if key != name})


F3 = Spec("float32", (3,), (1,))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("forward@3"), "'forward@3' is missing"),
        (section(variants=((3,),)), "no variant is large enough"),
        (section(variants=((3,), (3,), (5,))), "one twice"),
        (section(variants=()), "has no variant"),
        (section(variants=((3,), (9,))), "out of range"),
        (section(variants=((3, 3), (5, 5))), "expected 1 items"),
        (section(symbols=(Symbol("n", 0, 5),)), "has the range 0 to 5"),
        (section(symbols=(Symbol("n", 4, 3),)), "has the range 4 to 3"),
        (section(symbols=(Symbol("n n", 1, 5),)), "not the name of a size"),
        (section(symbols=()), "expected 0 items|no sizes|from 0 to -1"),
        (section(symbols=(Symbol("n", 1, 5), Symbol("n", 1, 5))), "two of one name"),
        (section(symbols=(Symbol("n", 1, 5), Symbol("m", 1, 5))), "expected 2 items"),
        (section(symbols=(Symbol("n", 1, 1 << 25),)), "too large|no variant is large enough"),
        (section(inputs=(((0, 1, 0),), (3,))), "'y' of a variant has another shape"),
        (section(inputs=(((0, 2, -3),), ((0, 1, 0),))), "computed from another|another shape"),
        (section(inputs=(((0, 0, 3),), ((0, 1, 0),))), "no multiple"),
        (section(inputs=(((1, 1, 0),), ((0, 1, 0),))), "whole number"),
        (section(inputs=(((0, 1, 0),), None)), "'y' differs"),
        (section(inputs=(((0, 1, 0),),)), "another number of inputs"),
        (section(inputs=(((0, 1, 0), 1), ((0, 1, 0),))), "another shape"),
        (section(outputs=()), "another number of outputs"),
        (section(outputs=(None,)), "says it is none"),
        (output(dims=(((3, None),),)), "an output of a variant has another shape"),
        (output(dims=(None,)), "an output of a variant has another shape"),
        (output(dims=()), "another number of dimensions"),
        (output(dims=(((0, 1),),)), "whole number"),
        (output(number=((0, 0),)), "says it is none"),
        (section(padded=False), "another number of inputs"),
        (method("forward@3", outputs=()), "another number of outputs"),
        (method("forward@4"), "'forward@4' has the name of a variant, but is none"),
        (method("forward"), "cannot be called 'forward'"),
        (lambda one: replace(one, dynamic={"a@b": one.dynamic["forward"]}), "cannot be called 'a@b'"),
        (lambda one: replace(one, dynamic={}), "has the name of a variant, but is none"),
    ],
)
def test_what_a_file_may_not_say(change: Callable[[Document], Document], says: str) -> None:
    with pytest.raises(ProgramError, match=says) as caught:
        decode(memoryview(document(change)))
    assert caught.value.code == ErrorCode.INVALID_PROGRAM


def test_a_padded_variant_takes_the_true_sizes() -> None:
    def change(one: Document) -> Document:
        found = one.methods["forward@3"]
        inputs = (*found.inputs[:2], replace(found.inputs[2], spec=F3))
        return replace(one, methods={**one.methods, "forward@3": replace(found, inputs=inputs)})

    with pytest.raises(ProgramError, match="does not take the true sizes"):
        decode(memoryview(document(change)))


def test_the_largest_variant() -> None:
    symbols = (Symbol("a", 1, 8), Symbol("b", 1, 8))
    assert Dynamic(symbols, (), (), ((2, 8), (8, 2), (4, 2)), True).largest == (8, 2)
