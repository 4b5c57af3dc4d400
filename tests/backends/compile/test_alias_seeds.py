"""Programs of :mod:`alias_fuzz` that once differed from eager, shortened: one test each, named by what was wrong."""

from __future__ import annotations

import warnings
from typing import Final

import pytest
import torch
from alias_fuzz import check, refused
from alias_programs import BOOL, COMPLEX, FLOAT, INT, Base, Holder, Program

import torchport
from torchport.core import releases

pytestmark = [
    pytest.mark.usefixtures("reference"),
    pytest.mark.filterwarnings("error:a computation failed as a whole"),
]


def _argument(name: str, base: int, view: str = "x") -> Holder:
    return Holder(name, "argument", base, view)


def _program(
    bases: tuple[Base, ...],
    holders: tuple[Holder, ...],
    lines: tuple[str, ...],
    results: tuple[str, ...] = (),
    dynamic: bool = False,
    apart: bool = False,
    runs: tuple[tuple[int, int], ...] = (),
) -> Program:
    sizes = (4, 6, 4) if dynamic else (4, 4)
    runs = runs or tuple((n, at) for at, n in enumerate(sizes))
    return Program(bases, holders, lines, results, runs, dynamic, apart)


LEAF, MADE = "leaf", "made"
ROWS, SQUARE = Base((4, 2), FLOAT, ""), Base((4, 4), FLOAT, "")
PAIRS = Base((2, 3), COMPLEX, "")
PAIRS_OF_ROWS = Base((2, 3, 2), FLOAT, "")

COMPILED: Final = {
    "a_view_of_what_reshape_copied_that_is_written": _program(
        (Base((2,), FLOAT, MADE),),
        (_argument("a", 0),),
        ("v = (a * 1).expand(2, 2).flatten(0, 1)", "w = v[1:]", "w.mul_(2)"),
        ("v", "w"),
    ),
    "a_copy_of_a_written_tensor_with_gaps": _program(
        (Base((3, 3), COMPLEX, ""),),
        (_argument("a", 0, "x[..., 1::2]"),),
        ("a.fill_(4)", "v = a.unsqueeze(-1)", "w = v.ravel()"),
        ("w", "v"),
    ),
    "inputs_that_lie_apart_in_one_memory_while_sizes_vary": _program(
        (Base((1, 4), FLOAT, ""),),
        (_argument("a", 0, "x.unbind(-1)[-1]"), _argument("b", 0, "x.diagonal(1)")),
        ("v = b[-1]", "a.add_(1)"),
        ("v",),
        dynamic=True,
    ),
    "sizes_of_the_memory_that_inputs_share_are_asked_about": _program(
        (Base(("n",), FLOAT, ""),),
        (_argument("a", 0), _argument("b", 0, "x.t()[1:]"), _argument("c", 0, "x.view(-1)")),
        ("v = a.tensor_split(2)[1]", "torch._foreach_add_([c], 1)", "w = b.unbind(-1)[-1]"),
        ("v", "w"),
        dynamic=True,
    ),
    "a_reshape_that_functionalization_takes_for_a_view": _program(
        (PAIRS_OF_ROWS, PAIRS_OF_ROWS),
        (_argument("a", 0, "x.split(2)[0]"), _argument("b", 1)),
        (
            "v = a.swapaxes(0, -1)",
            "v.index_copy_(0, torch.tensor([0], device=v.device), b[:1])",
            "w = a.reshape(2, -1)",
        ),
    ),
    "rows_of_one_matrix_that_overlap_while_sizes_vary": _program(
        (Base(("n", "n"), FLOAT, ""),),
        (_argument("a", 0, "x.narrow(-1, 0, 2)"), _argument("b", 0, "x[1:]")),
        ("b.clamp_(-2, 2)", "v = b.tril()"),
        ("a", "v"),
        dynamic=True,
    ),
    "an_argument_that_a_buffer_is_a_view_of_while_sizes_vary": _program(
        (Base((4,), FLOAT, ""), Base(("n",), BOOL, "")),
        (Holder("b", "buffer", 0, "x.ravel()"), _argument("c", 0, "x.t()[1:]"), _argument("a", 1), _argument("d", 0)),
        ("a.fill_(4)", "v = c.view(c.dtype)", "w = d.view(torch.float32)", "u = b[:1]"),
        ("v", "w"),
        dynamic=True,
    ),
    "an_argument_is_a_result_and_begins_elsewhere_at_the_next_call": _program(
        (Base((2, 3), FLOAT, ""), Base((2, 3), FLOAT, "")),
        (_argument("a", 1, "x[-1]"), Holder("b", "buffer", 0, "x.T")),
        (
            "u = b.t().t()",
            "torch.neg(u, out=u)",
            "b.scatter_(0, torch.zeros_like(b, dtype=torch.int64), 3)",
            "w = u.roll(1)",
            "v = a.to(a.dtype)",
        ),
        ("v",),
        apart=True,
    ),
    "a_view_of_what_reshape_copied_before_a_break": _program(
        (Base((3, 3), FLOAT, MADE),),
        (_argument("a", 0, "torch.diagonal(x, 1)"),),
        (
            "v = (a * 1).expand(2, *a.shape).flatten(0, 1)",
            "w = v.transpose(0, -1)",
            "torch._dynamo.graph_break()",
            "v.index_fill_(0, torch.tensor([0], device=v.device), 2)",
        ),
        ("w",),
    ),
    "a_real_view_without_dimensions_of_what_is_read": _program(
        (Base((), COMPLEX, ""),),
        (_argument("a", 0), Holder("c", "closure", 0, "x.imag")),
        ("c.copy_(1.5)", "v = a.roll(1)"),
        ("v",),
    ),
    "a_view_by_reshape_of_an_input_that_was_written_in_another_order": _program(
        (SQUARE,),
        (_argument("a", 0),),
        ("v = a.t()", "v.scatter_(0, torch.zeros_like(v, dtype=torch.int64), 3)", "u = v.t()[1:].reshape(2, -1)"),
        ("u",),
    ),
    "a_copy_of_a_written_tensor_that_lies_in_another_order": _program(
        (Base((3, 3), FLOAT, ""), Base((3, 3), FLOAT, "")),
        (_argument("a", 0), _argument("b", 1, "x.T")),
        ("b.t()[:] = a", "b.masked_fill_(a == 0, 1)", "v = b[1:]", "v.flatten().add_(1)"),
        ("v",),
    ),
    "a_copy_of_an_input_with_gaps_that_is_written_afterwards": _program(
        (Base((8,), FLOAT, MADE),), (_argument("a", 0, "x[::2]"),), ("v = a.ravel()", "a.mul_(2)"), ("v",)
    ),
    "another_dtype_of_what_was_overwritten_by_a_transposed_tensor": _program(
        (Base((4, 4), BOOL, ""),),
        (_argument("a", 0),),
        ("v = a | a", "w = v.view(torch.int32)", "v[...] = a.t()"),
        ("w",),
    ),
    "an_input_that_the_backward_keeps_and_the_forward_writes_without_autograd": _program(
        (Base((4, 2), FLOAT, LEAF),),
        (Holder("p", "parameter", 0, "x"),),
        (
            "with torch.no_grad(): p.add_(1)",
            "v = p.masked_fill(p == 1, 2)",
            "with torch.no_grad(): p.detach().add_(1)",
        ),
        ("v",),
    ),
    "as_strided_of_what_was_overwritten_by_a_transposed_tensor": _program(
        (Base((3, 3), FLOAT, ""), Base((3, 3), FLOAT, "")),
        (_argument("a", 0, "x.view_as(x)"), _argument("b", 1, "x.reshape_as(x)")),
        ("a[...] = b.t()", "v = a.as_strided((2, 2), (2, 1), 0)", "w = v.sum(0)"),
        ("w",),
    ),
    "a_result_that_is_a_written_input_beside_others_that_share_memory": _program(
        (PAIRS_OF_ROWS, PAIRS_OF_ROWS),
        (_argument("a", 0, "x.unbind(-1)[-1]"), _argument("b", 1, "x[:, 1]"), _argument("c", 1, "x.narrow(-1, 0, 2)")),
        ("v = a.float()", "u = b.unfold(-1, 2, 1)", "w = v.resolve_conj()", "a *= 2", "c[...] = w.t()"),
        ("w",),
        runs=((4, 152),),
    ),
    "a_result_that_is_a_view_of_another_where_inputs_share_memory": _program(
        (Base((8,), FLOAT, ""), Base((8,), FLOAT, MADE)),
        (Holder("c", "closure", 1, "x[0]"), _argument("a", 1)),
        ("v = a.repeat(2)", "w = v.squeeze(0)", "a.neg_()", "w[:] = c"),
        ("w", "v"),
        runs=((4, 287),),
    ),
    "no_grad_write_to_one_of_two_that_share": _program(
        (Base((4, 2), FLOAT, MADE),),
        (_argument("a", 0), _argument("b", 0, "x.narrow(0, 1, 1)")),
        ("v = b.cumsum(0)", "with torch.no_grad(): a += v"),
    ),
    "data_write_to_one_of_two_that_share": _program(
        (Base((4, 4), FLOAT, MADE),),
        (_argument("a", 0, "x.view(-1)"), _argument("b", 0, "x.select(-1, 1)")),
        ("with torch.no_grad(): a.data.copy_(a)", "v = b.t()[1:]"),
    ),
    "no_grad_and_grad_writes_to_what_is_shared": _program(
        (Base((2, 3), FLOAT, MADE),),
        (_argument("a", 0), _argument("b", 0, "x.t()[1:]"), _argument("c", 0, "x[:1]")),
        ("a *= 2", "with torch.no_grad(): b[0] = 5"),
        ("a",),
    ),
    "part_of_a_leaf_that_is_written": _program(
        (Base((2, 3, 2), FLOAT, LEAF),),
        (_argument("a", 0),),
        ("with torch.no_grad(): a.zero_()", "v = a.unbind()[0]"),
        ("v",),
    ),
    "part_of_what_another_name_writes": _program(
        (Base((4, 4), FLOAT, LEAF),),
        (_argument("a", 0), _argument("b", 0)),
        ("a.data.copy_(a)", "v = b.chunk(2)[0]"),
        ("v",),
    ),
    "part_with_sizes_that_change": _program(
        (Base(("n", 2, 2), FLOAT, LEAF), Base(("n", 2, 2), FLOAT, "")),
        (_argument("a", 1), _argument("b", 1), _argument("c", 0)),
        ("a[:] = c", "v = b.split(1, -1)[1]"),
        ("v",),
        dynamic=True,
    ),
    "alias_of_a_base_with_sizes_that_change": _program(
        (Base(("n", "n"), FLOAT, ""),),
        (_argument("a", 0, "x.t()[1:]"), _argument("b", 0)),
        ("b[::2] = 3", "v = a[..., 0]"),
        ("v", "b"),
        dynamic=True,
    ),
    "narrow_rows_in_whole_rows_overlap": _program(
        (Base((3, 3), FLOAT, ""),),
        (_argument("a", 0), _argument("b", 0, "x[1:, :2]")),
        ("a.mul_(a)", "b.pow_(2)"),
        ("b", "a"),
    ),
    "shared_at_the_first_call_only": _program(
        (Base((8,), FLOAT, ""),),
        (_argument("a", 0, "x[:-1]"), _argument("b", 0, "x[1:]")),
        ("a.mul_(2)", "v = b + a"),
        ("v", "b"),
        apart=True,
    ),
    "views_between_graphs_of_what_a_graph_made": _program(
        (ROWS,),
        (_argument("a", 0),),
        (
            "v = a.sin()",
            "w = v.view(v.shape)",
            "torch._dynamo.graph_break()",
            "v[1:] = a[1:]",
            "w.round_()",
        ),
        ("v", "w"),
    ),
    "strides_of_a_view_that_is_taken_again": _program(
        (SQUARE, SQUARE),
        (Holder("c", "closure", 1, "x"), _argument("a", 0), _argument("b", 1, "x[...]")),
        (
            "v = c.swapaxes(0, -1)",
            "b[:] = a",
            "torch._dynamo.graph_break()",
            "w = c * 2",
            "v.add_(a[:, 1])",
        ),
    ),
    "real_view_of_a_complex_base": _program(
        (Base((4, 2), COMPLEX, ""),),
        (_argument("a", 0, "x.expand_as(x)"), _argument("b", 0)),
        ("a.view(-1)[1:] = 2", "v = torch.view_as_real(b)"),
        ("v",),
    ),
    "result_that_is_a_written_input_beside_a_written_one_with_gradients": _program(
        (Base((1, 4), FLOAT, MADE), Base((1, 4), FLOAT, "")),
        (Holder("c", "closure", 1, "x[:, 1]"), _argument("a", 0)),
        ("a.floor_()", "v = c.flatten()", "v.pow_(2)"),
        ("v",),
    ),
    "no_grad_write_to_what_is_shared_beside_another_write": _program(
        (Base((2, "n"), FLOAT, MADE), Base((2, "n"), FLOAT, MADE)),
        (_argument("a", 0), _argument("b", 0, "x.t().t()"), _argument("c", 1, "x.t()[1:]")),
        (
            "v = a.as_strided((2, 2), (2, 1), 0)",
            "c[::2] = 3",
            "w = torch.slice_scatter(v, v[1:], 0, 1)",
            "with torch.no_grad(): b.put_(torch.tensor([0], device=b.device), w.reshape(-1)[:1])",
        ),
        dynamic=True,
    ),
    "what_a_broadcast_write_leaves_has_a_place_for_each_element": _program(
        (Base((4,), FLOAT, ""),),
        (_argument("a", 0, "x[::2]"),),
        ("v = a.chunk(2)[0]", "v.clamp_(-2, 2)", "w = a.neg()", "w.t()[:] = v"),
        ("w",),
    ),
    "alias_as_a_smaller_dtype_of_what_is_shared": _program(
        (Base((8,), INT, ""),),
        (Holder("b", "buffer", 0, "x"), Holder("c", "buffer", 0, "x.swapaxes(0, -1)")),
        ("v = c.view(torch.int32)", "w = v.movedim(0, -1)", "v.add_(1)", "u = b.reshape_as(b)"),
        ("w",),
    ),
    "alias_as_another_dtype_of_what_is_shared": _program(
        (Base((4, 2, 2), FLOAT, ""),),
        (_argument("a", 0), _argument("b", 0, "x.flatten()")),
        ("b.sub_(1)", "v = a.view(torch.int32)"),
        ("v",),
    ),
    "alias_as_another_dtype_with_sizes_that_change": _program(
        (Base(("n", 2, 2), FLOAT, ""),),
        (_argument("a", 0),),
        ("v = a.view(a.shape)", "w = v.view(torch.int32)"),
        ("w",),
        dynamic=True,
    ),
}
ON_THE_CPU: Final = {
    "writes_to_a_conjugate_view_and_another_input": _program(
        (PAIRS, PAIRS),
        (_argument("a", 0, "x.T"), _argument("b", 1, "x.conj()")),
        ("b.scatter_(0, torch.zeros_like(b, dtype=torch.int64), 3)", "a.masked_fill_(a == 2, 6)"),
    ),
    "conjugate_view_of_what_is_written": _program(
        (PAIRS,), (_argument("a", 0), _argument("b", 0, "x.conj()")), ("a.sub_(1)", "v = b[None]", "v.neg_()"), ("v",)
    ),
}
ON_THE_DEVICE: Final = {
    "guards_on_sizes_from_a_graph_that_AOTAutograd_gives_up": _program(
        (Base(("n", 2, 2), COMPLEX, ""), Base(("n", 2, 2), COMPLEX, "")),
        (_argument("a", 1), _argument("b", 1), _argument("c", 1, "x.view(torch.int32)"), _argument("d", 1, "x.mT")),
        ("v = a.unflatten(0, (2, -1))", "w = d[:, 1]", "b[0] = 5", "u = w.neg()"),
        ("c",),
        dynamic=True,
        runs=((4, 207), (6, 208)),
    ),
    "conjugate_view_of_part_of_what_is_shared": _program(
        (Base((4, 2), COMPLEX, ""),),
        (_argument("a", 0, "x.split(2)[0]"), _argument("b", 0)),
        ("v = a[...]", "w = b.neg()", "u = v.conj()", "u[u == 1] = 7"),
        ("u",),
    ),
}
LAZY: Final = {
    "another_dtype_of_one_row_that_was_written_transposed": _program(
        (Base((1, 4), INT, ""),),
        (_argument("a", 0),),
        ("v = a.view(torch.int32)", "w = v.t()", "w.clamp_(-2, 2)"),
        ("v",),
    ),
    "strides_stay_where_a_transposed_expanded_view_is_written": _program(
        (PAIRS_OF_ROWS,),
        (_argument("a", 0, "x.view(-1, 2)"), Holder("b", "buffer", 0, "x.mT")),
        ("v = b.expand(2, *b.shape)", "a.unbind()[0].mul_(2)", "w = v.select(-1, 1).diagonal()"),
        ("w",),
    ),
    "a_view_of_what_was_overwritten_by_an_expanded_tensor": _program(
        (PAIRS_OF_ROWS,),
        (_argument("a", 0, "x.unbind()[0]"), _argument("b", 0, "x.unflatten(0, (2, -1))")),
        ("v = torch.zeros_like(b)", "v[:] = a", "w = v.view(-1)"),
        ("w",),
    ),
    "strides_of_a_single_row_after_a_write": _program(
        (Base((1, 4), FLOAT, ""),),
        (_argument("a", 0, "x.T"), Holder("c", "closure", 0, "x"), _argument("b", 0, "x.view_as(x)")),
        ("v = b[:]", "c.lerp_(v, 0.5)", "torch.mul(a, a, out=a)"),
    ),
    "strides_of_what_out_writes": _program(
        (SQUARE, SQUARE),
        (_argument("a", 0, "x.t()"), _argument("b", 1)),
        ("torch.neg(b, out=a)", "v = a.flatten()", "v.add_(1)"),
    ),
    "as_strided_over_another_dtype": _program(
        (ROWS,), (_argument("a", 0, "torch.view_as_complex(x)"),), ("v = a.as_strided((2,), (1,), 0) * 1",), ("v",)
    ),
    "conjugate_view_as_another_dtype": _program(
        (PAIRS,),
        (Holder("c", "closure", 0, "x.conj()"), _argument("a", 0)),
        ("c.masked_scatter_(c == 1, a.clone())",),
    ),
    "conjugate_view_as_real_numbers": _program(
        (Base((8,), COMPLEX, ""),),
        (_argument("a", 0, "x[..., 1::2]"),),
        ("v = a.conj().real", "v.mul_(2)", "w = a.conj().squeeze()", "w.real.mul_(2)"),
        ("v", "w"),
    ),
    "resolve_conj_copies": _program(
        (PAIRS,), (_argument("a", 0),), ("v = a.conj().resolve_conj()", "a.mul_(2)"), ("v", "a")
    ),
    "conjugate_source_of_a_write": _program(
        (Base((4,), COMPLEX, ""),),
        (_argument("a", 0), _argument("b", 0, "x.conj()")),
        ("a.index_put_((torch.tensor([0], device=a.device),), b[:1])",),
        ("a",),
    ),
    "transposed_view_of_another_dtype": _program(
        (Base((1, 4), INT, ""),), (_argument("a", 0, "x.view(torch.int32)"),), ("v = a.mT",), ("v", "v")
    ),
    "write_of_a_transposed_value_to_another_dtype": _program(
        (SQUARE, Base((2, 3, 2), INT, "")),
        (_argument("a", 0), _argument("b", 1)),
        ("v = b[1:, :2].view(torch.float32)", "v[:] = a.unbind(-1)[-1]"),
        ("v",),
    ),
    "complex_view_of_a_strided_value": _program(
        (PAIRS_OF_ROWS,),
        (_argument("a", 0), _argument("b", 0, "x.mT")),
        ("b[::2] = 3", "b.masked_fill_(b == 2, 6)", "v = torch.view_as_complex(a)"),
        ("v", "a"),
    ),
}


def _equals_eager(program: Program, frontend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="a computation failed as a whole")
        assert check(program, frontend, "reference") is None


ASSERTS = pytest.mark.xfail(
    releases.version() < (2, 13), reason="AOTAutograd applies its own test of overlaps at each call, and asserts"
)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("frontend", ["compile-cpu", "compile-port"])
def test_compiled(name: str, frontend: str, request: pytest.FixtureRequest) -> None:
    if (name, frontend) == ("narrow_rows_in_whole_rows_overlap", "compile-cpu"):
        request.applymarker(ASSERTS)
    _equals_eager(COMPILED[name], frontend)


@pytest.mark.parametrize("name", ON_THE_DEVICE)
def test_compiled_on_the_device(name: str) -> None:
    _equals_eager(ON_THE_DEVICE[name], "compile-port")


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_compiled_on_the_cpu(name: str) -> None:
    _equals_eager(ON_THE_CPU[name], "compile-cpu")


def test_the_device_refuses_what_it_cannot_tell() -> None:
    why = check(ON_THE_CPU["conjugate_view_of_what_is_written"], "compile-port", "reference")
    assert why is not None
    assert refused(why)
    assert "one may be a conjugate view, which this device does not tell from its base" in why


@pytest.mark.parametrize("name", LAZY)
def test_lazy(name: str) -> None:
    _equals_eager(LAZY[name], "lazy")


def test_strides_of_a_view_stay_when_its_base_is_written() -> None:
    base = torch.zeros(4, 4, device="port")
    view = base.as_strided((4, 4), (1, 4), 0)
    base.add_(1)
    assert view.add(0).stride() == view.stride() == (1, 4)


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_inputs_may_overlap_otherwise_at_each_call(device: str) -> None:
    def fn(written: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        written.mul_(2)
        return read + 1

    def calls(run: object, place: str) -> list[list[float]]:
        found: list[list[float]] = []
        for start in (3, 1, None, 2, 3):
            memory, alone = torch.arange(6.0, device=place), torch.arange(3.0, device=place)
            read = alone if start is None else memory[start : start + 3]
            found.append(run(memory[:3], read).tolist())  # type: ignore[operator]
        return found

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="inputs of a compiled function share memory otherwise")
        assert calls(compiled, device) == calls(fn, "cpu")


VALUES = {
    "float": torch.tensor([1e10, float("inf"), -0.0, float("nan")]),
    "int32": torch.tensor([1, 2**31 - 1, -(2**31), 0], dtype=torch.int32),
    "bool": torch.tensor([True, False, True, False]),
    "complex": torch.tensor([complex("inf"), 1e10 + 1j, 0j, 2j]),
}


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("frontend", ["lazy", "compile-cpu", "compile-port"])
def test_writes_through_expanded_views_are_exact(dtype: str, frontend: str) -> None:
    def fn(x: torch.Tensor, row: torch.Tensor) -> None:
        x.expand(3, 2, 4)[0, 1:2, :2].copy_(row)
        x.expand_as(x)[2:].zero_()

    want, row = VALUES[dtype].clone(), torch.tensor([[1, 0]]).to(VALUES[dtype].dtype)
    fn(want, row)
    device = "cpu" if frontend == "compile-cpu" else "port"
    given = VALUES[dtype].to(device, copy=True)
    run = fn if frontend == "lazy" else torch.compile(fn, backend="torchport", options={"backend": "reference"})
    run(given, row.to(device))
    assert given.cpu().dtype is want.dtype
    torch.testing.assert_close(given.cpu(), want, rtol=0, atol=0, equal_nan=True)


def _fills_a_window(x: torch.Tensor) -> None:
    x.unfold(0, 2, 1)[0].fill_(5)


@pytest.mark.parametrize("frontend", ["lazy", "compile-port"])
def test_a_write_through_unfold_is_refused(frontend: str) -> None:
    fn, given = _fills_a_window, torch.arange(4.0).to("port")
    run = fn if frontend == "lazy" else torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with pytest.raises(Exception, match="a write through a view by unfold"):
        run(given)
    assert given.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_write_through_unfold_on_the_cpu_runs_as_it_was_captured() -> None:
    given = torch.arange(4.0)
    with pytest.warns(UserWarning, match="runs operator by operator, as in eager mode"):
        torch.compile(_fills_a_window, backend="torchport", options={"backend": "reference"})(given)
    assert given.tolist() == [5.0, 5.0, 2.0, 3.0]


def test_what_aotautograd_refuses_runs_operator_by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return x + 1

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(4)
        return x, x.detach()[1:]

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    want, got = made(), made()
    with pytest.warns(UserWarning, match="AOTAutograd, PyTorch's part of torch.compile, does not take it"):
        result = compiled(*got)
    assert torch.equal(result, fn(*want))
    assert torch.equal(got[0], want[0])
    torch._dynamo.reset()
    monkeypatch.setattr(torchport.config, "fallback", "error")
    with pytest.raises(Exception, match="aot_autograd"):
        compiled(*made())


def test_out_that_is_of_an_expanded_tensor_after_one_that_is_not() -> None:
    """What the device remembers of calls that were accepted tells the two apart."""
    for _ in range(2):
        plain = torch.ones(2, 3, dtype=torch.bool, device="port")
        torch.mul(plain, plain, out=plain)
    x = torch.ones(2, 3, dtype=torch.bool, device="port")
    view = x.expand_as(x)
    torch.mul(view, view, out=view)
    assert x.cpu().all()


def test_a_view_with_a_gradient_keeps_its_shape_under_no_grad() -> None:
    """Autograd finds its gradient by ``as_strided`` afterwards, which the device has no memory for."""
    x = torch.ones(2, 2, device="port", requires_grad=True) * 2
    row = x[1:]
    with torch.no_grad(), pytest.raises(torchport.UnsupportedOp, match="take another view of it"):
        row.t_()
    row.t_()
    assert row.shape == (2, 1)


@pytest.mark.parametrize("flushed", [False, True])
def test_what_counts_in_memory_after_a_write_from_another_order(flushed: bool) -> None:
    """A write changes no strides, and ``as_strided`` goes by them, whatever order the source lies in."""

    def found(device: str) -> list[torch.Tensor]:
        x = torch.arange(9.0, device=device).reshape(3, 3) + 0
        y = x * 10
        z = x.t() + 0
        x.copy_(y.t())
        z.copy_(y)
        if flushed:
            torchport.sync()
        return [value.as_strided((2, 2), (2, 1), 0).cpu() for value in (x, z)]

    assert all(map(torch.equal, found("port"), found("cpu")))


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_an_offset_that_the_graph_takes_for_a_constant(device: str) -> None:
    """The place of the last element depends on the size, which is a symbol; PyTorch puts no guard on it."""

    def fn(last: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        whole.mul_(2)
        return last * 3

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"}, dynamic=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="inputs of a compiled function share memory otherwise")
        for size in (4, 6, 4, 9):
            whole = torch.arange(1.0, size + 1, device=device)
            assert compiled(whole.unbind()[-1], whole).item() == 6 * size


def test_tensors_of_one_memory_that_know_no_base() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    x = torch.arange(4.0, device="port")
    with pytest.warns(UserWarning, match="share memory otherwise"):
        got = torch.compile(fn, backend="torchport", options={"backend": "reference"})(x.detach(), x[1:].detach())
    assert got.tolist() == [3.0, 5.0, 7.0]
    assert x.tolist() == [0.0, 2.0, 4.0, 6.0]
