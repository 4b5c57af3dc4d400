"""The runtime on a recording backend: order of init and destroy, who owns what, inputs, errors."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from programs import (
    Recording,
    delegate,
    kernels,
    load,
    program_bytes,
    summing,
    two,
    weight,
)

from torchport import runtime
from torchport.core.errors import DelegateError, ErrorCode, MethodError, TorchportError
from torchport.program.document import Input

X = np.array([1.0, 2.0], np.float32)
Y = np.array([10.0, 20.0], np.float32)


# -- running -------------------------------------------------------------------------------------------------------
def test_a_method_runs_its_delegates_in_order() -> None:
    backend = Recording()
    method = two(backend).load_method()
    (result,) = method(X, Y)
    np.testing.assert_array_equal(result, [21, 42])
    assert type(result) is np.ndarray
    assert backend.names() == ["init", "init", "execute", "execute"]


def test_tensors_in_tensors_out_and_names() -> None:
    method = two(Recording()).load_method()
    (result,) = method(torch.tensor(X), y=torch.tensor(Y))
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result, torch.tensor([21.0, 42.0]))
    (again,) = method(y=Y, x=X)
    np.testing.assert_array_equal(again, [21, 42])


def test_meta_says_what_a_method_takes_and_needs() -> None:
    constant, blobs = weight()
    bound = replace(delegate(inputs=3), constants={2: 0})
    program = load(program_bytes(summing([bound]), constants=[constant], blobs=blobs), Recording())
    meta = program.meta("forward")
    assert program.methods == ("forward",)
    assert [(one.name, one.dtype, one.shape, one.nbytes) for one in meta.inputs] == [
        ("x", "float32", (2,), 8), ("y", "float32", (2,), 8)
    ]  # fmt: skip
    (found,) = meta.delegates
    assert (found.backend, found.version, found.nbytes, found.specs) == ("recording", "7", 2, {"level": b"3"})
    assert found.constants == ("w",)
    assert meta.constant_bytes == 8
    assert meta.instructions == 1
    assert meta.uses_backend("recording")
    assert not meta.uses_backend("other")
    with pytest.raises(MethodError, match="it has: forward") as caught:
        program.meta("backward")
    assert caught.value.code == ErrorCode.NOT_FOUND


def test_leftover_operators_run_around_delegates() -> None:
    backend = Recording()
    program = load(program_bytes(kernels()), backend)
    assert program.meta().kernels == {"aten.relu.default": 1, "aten.split.Tensor": 1}
    values = torch.tensor([-5.0, 2.0], requires_grad=True), torch.tensor(Y)
    with torch.autocast("cpu"):
        first, literal = program.load_method()(*values)
    torch.testing.assert_close(first, torch.tensor([10.0]))
    assert literal == 3
    assert not first.requires_grad


def test_a_missing_operator_is_named_when_the_method_is_loaded() -> None:
    method = kernels()
    wrong = replace(method.instructions[0], op="aten.no_such_operator.default")
    method = replace(method, instructions=(wrong, *method.instructions[1:]))
    backend = Recording()
    program = load(program_bytes(method), backend)
    with pytest.raises(DelegateError, match="no_such_operator") as caught:
        program.load_method()
    assert caught.value.code == ErrorCode.OPERATOR_MISSING
    assert "model.py:3" in str(caught.value)
    assert backend.alive == 0


# -- init and destroy ----------------------------------------------------------------------------------------------
def test_order_of_init() -> None:
    """Look-up, availability, bytes, specs, init; delegates in the order of their indices."""
    backend = Recording()
    segments: list[runtime.SegmentInfo] = []

    class Watching(runtime.BytesLoader):
        def load(self, offset: int, size: int, segment: runtime.SegmentInfo) -> memoryview:
            segments.append(segment)
            backend.log.append(("load", segment.kind, segment.name, segment.descriptor))
            return super().load(offset, size, segment)

    data = program_bytes(summing([delegate(tag="d0"), delegate(tag="d1")]))
    program = load(Watching(data), backend)  # type: ignore[arg-type]
    backend.log.clear()
    program.load_method(backend_options={"recording": {"fast": True}})
    assert backend.log == [
        ("is_available",),
        ("is_available",),
        ("load", "delegate", "data/torchport/d0", "recording"),
        ("init", "d0", {"level": b"3"}, "forward", {"fast": True}),
        ("load", "delegate", "data/torchport/d1", "recording"),
        ("init", "d1", {"level": b"3"}, "forward", {"fast": True}),
    ]
    assert segments


def test_backends_that_are_not_there_or_not_available_are_not_found() -> None:
    backend = Recording()
    data = program_bytes(summing([delegate(), delegate("absent")]))
    with pytest.raises(DelegateError, match="no backend is called 'absent'") as caught:
        load(data, backend).load_method()
    assert caught.value.code == ErrorCode.NOT_FOUND
    assert caught.value.delegate == "absent #1"
    backend.available = False
    with pytest.raises(DelegateError, match="the accelerator is unplugged") as caught:
        two(backend).load_method()
    assert caught.value.code == ErrorCode.NOT_FOUND
    assert backend.names() == []


def test_destroy_in_order_of_indices_and_once() -> None:
    backend = Recording()
    method = two(backend).load_method()
    method.close()
    method.close()
    assert backend.names() == ["init", "init", "destroy", "destroy"]
    assert [entry[1] for entry in backend.log if entry[0] == "destroy"] == ["d0", "d1"]
    with pytest.raises(MethodError, match="closed") as caught:
        method(X, Y)
    assert caught.value.code == ErrorCode.INVALID_STATE


def test_a_method_that_nobody_holds_is_destroyed() -> None:
    backend = Recording()
    method = two(backend).load_method()
    method(X, Y)
    gone = weakref.ref(method)
    del method
    import gc

    gc.collect()
    assert gone() is None
    assert backend.alive == 0


def test_a_failing_init_destroys_only_the_delegates_before_it() -> None:
    backend = Recording()
    backend.fails["init"] = ValueError("no memory for", "d2")
    tags = [delegate(tag=f"d{number}") for number in range(4)]
    program = load(program_bytes(summing(tags)), backend)
    with pytest.raises(DelegateError, match="init failed: ValueError") as caught:
        program.load_method()
    assert (caught.value.method, caught.value.delegate) == ("forward", "recording #2")
    assert isinstance(caught.value.__cause__, ValueError)
    assert [entry[:2] for entry in backend.log if entry[0] != "is_available"] == [
        ("init", "d0"), ("init", "d1"), ("init", "d2"), ("destroy", "d0"), ("destroy", "d1")
    ]  # fmt: skip
    assert all(buffer.freed for buffer in backend.held), "the bytes of every delegate are released"
    backend.fails.clear()
    np.testing.assert_array_equal(program.load_method()(X, Y)[0], [41, 82])


def test_a_failing_destroy_does_not_stop_the_others() -> None:
    backend = Recording()
    method = two(backend).load_method()
    backend.fails["destroy"] = OSError("stuck")
    with pytest.raises(TorchportError, match="stuck"):
        method.close()
    assert [entry[1] for entry in backend.log if entry[0] == "destroy"] == ["d0", "d1"]


def test_bytes_may_be_freed_in_init() -> None:
    backend = Recording()
    backend.free_in_init = True
    method = two(backend).load_method()
    method(X, Y)
    with pytest.raises(ValueError, match="freed"):
        _ = backend.held[0].data


def test_the_handle_may_be_the_bytes_which_outlive_it() -> None:
    backend = Recording()
    backend.handle_is_buffer = True
    method = two(backend).load_method()
    method(X, Y)
    assert not backend.held[0].freed
    method.close()
    assert all(buffer.freed for buffer in backend.held)


def test_a_null_handle_is_destroyed_too() -> None:
    backend = Recording()
    backend.null_handle = True
    method = two(backend).load_method()
    method(X, Y)
    method.close()
    assert [entry for entry in backend.log if entry[0] == "destroy"] == [("destroy", None)] * 2


def test_identical_bytes_are_stored_once_and_initialised_twice() -> None:
    backend = Recording()
    twice = [delegate(tag="same"), delegate(tag="same")]
    data = program_bytes(summing(twice))
    assert data.count(b"PK\x03\x04") == 1 + 6, "one entry for both, and six that every program has"
    load(data, backend).load_method()
    assert [entry[1] for entry in backend.log if entry[0] == "init"] == ["same", "same"]


# -- constants -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("binds", [False, True])
def test_constants_reach_a_delegate_once_or_at_every_call(binds: bool) -> None:
    backend = Recording(binds=binds)
    constant, blobs = weight((100.0, 200.0))
    bound = replace(delegate(inputs=3), constants={1: 0})
    data = program_bytes(summing([bound]), constants=[constant], blobs=blobs)
    method = load(data, backend).load_method()
    np.testing.assert_array_equal(method(X, Y)[0], [111, 222])
    np.testing.assert_array_equal(method(X, Y)[0], [111, 222])
    counts = [entry[1] for entry in backend.log if entry[0] == "execute"]
    assert counts == ([2, 2] if binds else [3, 3])
    assert set(backend.contexts[0].constants) == ({1} if binds else set())


def test_constants_may_be_arguments_of_the_run() -> None:
    constant, blobs = weight((100.0, 200.0))
    method = summing([delegate(inputs=3)], constants={2: 0})
    program = load(program_bytes(method, constants=[constant], blobs=blobs), Recording())
    np.testing.assert_array_equal(program.load_method()(X, Y)[0], [111, 222])


def test_named_data_reaches_init() -> None:
    backend = Recording()
    entry = "data/torchport/shared"
    one = replace(delegate(), named_data={"table": entry})
    load(program_bytes(summing([one]), blobs={entry: b"rows"}), backend).load_method()
    assert bytes(backend.contexts[0].named_data["table"]) == b"rows"


# -- inputs --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("inputs", "says", "code"),
    [
        ((X,), "takes 2 inputs", ErrorCode.INVALID_ARGUMENT),
        ((X, Y, Y), "takes 2 inputs", ErrorCode.INVALID_ARGUMENT),
        ((X.astype(np.float64), Y), r"input 'x' should be float32\[2\]", ErrorCode.INVALID_TYPE),
        ((X, np.zeros(3, np.float32)), r"input 'y' should be float32\[2\]", ErrorCode.INVALID_ARGUMENT),
        ((X, "text"), "input 'y'", ErrorCode.INVALID_TYPE),
        ((X, 3), "input 'y'", ErrorCode.INVALID_TYPE),
        ((torch.zeros(2, dtype=torch.int32), Y), "input 'x'", ErrorCode.INVALID_TYPE),
        ((torch.zeros(2, device="meta"), Y), "input 'x'", ErrorCode.INVALID_TYPE),
        ((torch.zeros(2).to_sparse(), Y), "input 'x'", ErrorCode.INVALID_TYPE),
    ],
    ids=["few", "many", "dtype", "shape", "text", "number", "tensor dtype", "meta", "sparse"],
)
def test_inputs_are_checked(inputs: Any, says: str, code: ErrorCode) -> None:
    backend = Recording()
    method = two(backend).load_method()
    with pytest.raises(MethodError, match=says) as caught:
        method(*inputs)
    assert caught.value.code == code
    assert "execute" not in backend.names()
    np.testing.assert_array_equal(method(X, Y)[0], [21, 42])


def test_too_few_inputs_never_reuse_old_ones() -> None:
    method = two(Recording()).load_method()
    method(X, Y)
    with pytest.raises(MethodError, match="takes 2 inputs"):
        method(X)
    with pytest.raises(MethodError, match="misses inputs: y"):
        method(x=X)
    with pytest.raises(MethodError, match="'z' of method 'forward' is none of: x, y"):
        method(X, z=Y)
    with pytest.raises(MethodError, match="given twice"):
        method(X, Y, x=X)


@pytest.mark.parametrize(
    ("literal", "given", "fine"),
    [(3, 3, True), (3, 3.0, False), (1, True, False), (None, None, True), (None, 0, False), ("a", "b", False),
     (float("nan"), float("nan"), True), (float("inf"), float("inf"), True)],
)  # fmt: skip
def test_inputs_that_are_no_tensors_must_be_what_was_traced(literal: Any, given: Any, fine: bool) -> None:
    method = summing([delegate()])
    method = replace(method, inputs=(*method.inputs, Input("flag", None, literal)))
    loaded = load(program_bytes(method), Recording()).load_method()
    if fine:
        np.testing.assert_array_equal(loaded(X, Y, given)[0], [11, 22])
    else:
        with pytest.raises(MethodError, match="'flag' was"):
            loaded(X, Y, given)


def test_inputs_of_other_strides_are_brought_into_shape() -> None:
    method = two(Recording()).load_method()
    wide = np.array([1, 9, 2, 9], np.float32)[::2]
    np.testing.assert_array_equal(method(wide, Y)[0], [21, 42])
    (result,) = method(torch.tensor([1.0, 9.0, 2.0, 9.0])[::2], torch.tensor(Y))
    torch.testing.assert_close(result, torch.tensor([21.0, 42.0]))


def test_inputs_may_alias_and_outputs_never_do() -> None:
    method = two(Recording()).load_method()
    (result,) = method(X, X)
    np.testing.assert_array_equal(result, [3, 6])
    passing = summing([delegate()])
    passing = replace(passing, outputs=(replace(passing.outputs[0], value=0), *passing.outputs, passing.outputs[0]))
    same, first, second = load(program_bytes(passing), Recording()).load_method()(X, Y)
    same += 1
    first += 1
    np.testing.assert_array_equal(X, [1, 2])
    np.testing.assert_array_equal(second, [11, 22])


# -- errors while running, steps -----------------------------------------------------------------------------------
def test_an_error_keeps_its_code_and_gains_its_place() -> None:
    backend = Recording()
    method = two(backend).load_method()
    backend.fails["execute"] = DelegateError("the queue is full", code=ErrorCode.OUT_OF_RESOURCES, debug_handles=(2,))
    with pytest.raises(DelegateError) as caught:
        method(X, Y)
    error = caught.value
    assert error.code == ErrorCode.OUT_OF_RESOURCES
    assert (error.method, error.delegate) == ("forward", "recording #0")
    assert (error.module, error.source) == ("layer", "model.py:4 in forward")
    assert str(error).splitlines() == [
        "the queue is full",
        "  method: forward",
        "  delegate: recording #0",
        "  debug handle: 2",
        "  module: layer",
        "  line: model.py:4 in forward",
    ]
    backend.fails["execute"] = MemoryError()
    with pytest.raises(DelegateError) as caught:
        method(X, Y)
    assert caught.value.code == ErrorCode.DELEGATE_MEMORY_ALLOCATION_FAILED
    backend.fails["execute"] = DelegateError("op broke", ident="all")
    with pytest.raises(DelegateError) as caught:
        method(X, Y)
    assert caught.value.debug_handles == (1, 2)


def test_an_error_resets_a_call_so_that_it_can_be_made_again() -> None:
    backend = Recording()
    method = two(backend).load_method()
    backend.fails["execute"] = RuntimeError("once")
    with pytest.raises(DelegateError, match="once"):
        method(X, Y)
    assert not method.in_progress
    backend.fails.clear()
    np.testing.assert_array_equal(method(X, Y)[0], [21, 42])


def test_steps_and_their_errors() -> None:
    backend = Recording()
    method = two(backend).load_method()
    with pytest.raises(MethodError) as caught:
        method.step()
    assert caught.value.code == ErrorCode.INVALID_STATE
    method.set_inputs(X, Y)
    assert method.step()
    backend.fails["execute"] = RuntimeError("busy")
    with pytest.raises(DelegateError, match="busy"):
        method.step()
    assert method.in_progress, "a step that failed does not end the run"
    with pytest.raises(MethodError, match="in progress") as caught:
        method(X, Y)
    assert caught.value.code == ErrorCode.INVALID_STATE
    with pytest.raises(MethodError, match="in progress"):
        method.set_inputs(X, Y)
    with pytest.raises(MethodError, match="steps left"):
        method.outputs()
    backend.fails.clear()
    assert not method.step(), "the same instruction again, and it was the last"
    with pytest.raises(MethodError) as caught:
        method.step()
    assert caught.value.code == ErrorCode.END_OF_METHOD
    np.testing.assert_array_equal(method.outputs()[0], [21, 42])
    assert not method.in_progress
    method.set_inputs(X, Y)
    method.reset()
    np.testing.assert_array_equal(method(X, Y)[0], [21, 42])


def test_a_backend_that_calls_the_method_it_runs_in_is_refused() -> None:
    backend = Recording()
    method = two(backend).load_method()
    backend.before_execute = lambda context: method(X, Y)
    with pytest.raises(DelegateError, match="in progress") as caught:
        method(X, Y)
    assert caught.value.code == ErrorCode.INVALID_STATE
    backend.before_execute = None
    np.testing.assert_array_equal(method(X, Y)[0], [21, 42])


def test_scratch_memory_is_given_back_after_every_instruction() -> None:
    backend = Recording()
    backend.temporary = 1000
    method = two(backend).load_method()
    method(X, Y)
    backend.fails["execute"] = RuntimeError("after allocating")
    with pytest.raises(DelegateError):
        method(X, Y)
    backend.fails.clear()
    method(X, Y)
    method.set_inputs(X, Y)
    method.step()
    method.step()


def test_wrong_results_of_a_backend_are_refused() -> None:
    class Wrong(Recording):
        def execute(self, handle: Any, args: Any, context: Any) -> Any:
            (result,) = super().execute(handle, args, context)
            return [] if self.temporary else [replace_array(result, result.array[:1])]

    def replace_array(data: Any, array: Any) -> Any:
        from torchport.backend.interface import ArrayData
        from torchport.core.specs import TensorSpec

        return ArrayData(data.device, TensorSpec(array.shape, data.spec.dtype, (1,)), array)

    backend = Wrong()
    method = two(backend).load_method()
    with pytest.raises(DelegateError, match=r"output 0 is float32\[1\], but the graph says float32\[2\]"):
        method(X, Y)
    backend.temporary = 1
    with pytest.raises(DelegateError, match="0 values for 1 outputs"):
        method(X, Y)
