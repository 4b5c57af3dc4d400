"""The computed tables that PyTorch's own test_dispatch.py pins down, written anew, and what it cannot ask of C++."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport import dispatch
from torchport.dispatch import Dispatcher, DispatchKey

CHECKED = ("Undefined", "CPU", "CUDA", "XLA", "AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradXLA")
FALL = "fallthrough"
"""Expected where only the standard autograd fallthrough is left."""

MATH, DEFAULT, AUTOGRAD = "CompositeImplicitAutograd", "CompositeExplicitAutograd", "Autograd"


def table(*keys: str, extra: tuple[str, ...] = ()) -> dict[str, str]:
    """Rows of an operator with one kernel per key, each called after its key; every order of registration."""
    made: list[dict[str, str]] = []
    for order in itertools.permutations(keys):
        ours = Dispatcher()
        ours.define("test::foo(Tensor x) -> Tensor")
        for key in order:
            ours.impl("test::foo", key, lambda x: x, label=f"fn_{key}")
        rows = ours.computed_table("test::foo")
        found: dict[str, str] = {}
        for name in (*CHECKED, *extra):
            row = rows[DispatchKey(name)]
            if row.registration is not None:
                found[name] = FALL if row.is_fallthrough else f"{row.registration.label} [{row.rule.provenance}]"
        made.append(found)
    assert all(one == made[0] for one in made), "the order of registrations mattered"
    return made[0]


def rows(everywhere: str | None = None, **named: str) -> dict[str, str]:
    found = {} if everywhere is None else dict.fromkeys(CHECKED, everywhere)
    return found | named


AUTOGRAD_ROWS = ("AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradXLA")


def test_math() -> None:
    assert table(MATH) == rows(f"fn_{MATH} [math kernel]")


def test_cpu_math() -> None:
    expected = rows(f"fn_{MATH} [math kernel]", CPU="fn_CPU [kernel]", AutogradCPU=FALL)
    assert table("CPU", MATH) == expected


def test_autograd() -> None:
    assert table(AUTOGRAD) == dict.fromkeys(AUTOGRAD_ROWS, f"fn_{AUTOGRAD} [autograd kernel]")


def test_cpu_autograd_math() -> None:
    expected = rows(f"fn_{MATH} [math kernel]", CPU="fn_CPU [kernel]", AutogradCPU=f"fn_{AUTOGRAD} [autograd kernel]")
    assert table("CPU", AUTOGRAD, MATH) == expected


def test_mixed_direct_and_alias() -> None:
    expected = rows(
        f"fn_{MATH} [math kernel]",
        CPU="fn_CPU [kernel]",
        XLA="fn_XLA [kernel]",
        AutogradCPU="fn_AutogradCPU [kernel]",
        AutogradXLA=f"fn_{AUTOGRAD} [autograd kernel]",
    )
    assert table(MATH, "CPU", "XLA", AUTOGRAD, "AutogradCPU") == expected


def test_ambiguous_autogradother() -> None:
    expected = rows(
        f"fn_{MATH} [math kernel]",
        AutogradOther="ambiguous_autogradother [ambiguous autogradother]",
        QuantizedCPU="fn_QuantizedCPU [kernel]",
    )
    assert table(MATH, "QuantizedCPU", extra=("QuantizedCPU",)) == expected


def test_cpu_defaultbackend() -> None:
    expected = rows(f"fn_{DEFAULT} [default backend kernel]", CPU="fn_CPU [kernel]")
    assert table("CPU", DEFAULT) == expected | dict.fromkeys(AUTOGRAD_ROWS, FALL)


def test_cpu_autograd_defaultbackend() -> None:
    expected = rows(
        f"fn_{DEFAULT} [default backend kernel]",
        CPU="fn_CPU [kernel]",
        QuantizedCPU=f"fn_{DEFAULT} [default backend kernel]",
    )
    expected |= dict.fromkeys(AUTOGRAD_ROWS, f"fn_{AUTOGRAD} [autograd kernel]")
    assert table("CPU", AUTOGRAD, DEFAULT, extra=("QuantizedCPU",)) == expected


def test_cpu_autograd_math_defaultbackend() -> None:
    expected = rows(f"fn_{DEFAULT} [default backend kernel]", CPU="fn_CPU [kernel]")
    expected |= dict.fromkeys(AUTOGRAD_ROWS, f"fn_{AUTOGRAD} [autograd kernel]")
    assert table("CPU", AUTOGRAD, MATH, DEFAULT) == expected


def test_cpu_math_autogradcpu_fallthrough() -> None:
    ours = Dispatcher(standard_fallbacks=False)
    ours.define("test::foo(Tensor x) -> Tensor")
    ours.fallback("AutogradCPU", dispatch.fallthrough, label="below")
    ours.impl("test::foo", None, lambda x: x, label="math")
    ours.impl("test::foo", "CPU", lambda x: x, label="cpu")
    text = ours.dump_table("test::foo")
    assert "AutogradCPU: fallthrough below [backend fallback]\n" in text
    assert "AutogradCUDA: math [math kernel]\n" in text
    assert text.startswith("Undefined: math [math kernel]\nCPU: cpu [kernel]\n")


def test_where_cpp_depends_on_the_order() -> None:
    """Rows that C++'s live table gets wrong after some orders (it refreshes too few); here the order cannot matter."""
    assert table(MATH, "SparseCPU")["AutogradOther"] == "ambiguous_autogradother [ambiguous autogradother]"
    assert table(MATH, DEFAULT)["AutogradCPU"] == FALL


keys = st.sampled_from(["CPU", "SparseCPU", "FPGA", "AutogradCPU", "AutogradOther", "NestedTensorCPU", MATH, DEFAULT])
more = st.sampled_from([AUTOGRAD, "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutogradNestedTensor"])


@given(st.lists(keys | more, unique=True, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_table(names: list[str], rng: object) -> None:
    def build(order: list[str]) -> tuple[Dispatcher, dict[str, dispatch.Registration]]:
        ours = Dispatcher()
        ours.define("test::foo(Tensor x) -> Tensor")
        return ours, {name: ours.impl("test::foo", name, lambda x: x, label=name) for name in order}

    shuffled = list(names)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    (one, _), (other, handles) = build(names), build(shuffled)
    assert one.dump_table("test::foo") == other.dump_table("test::foo")
    extra = other.impl("test::foo", shuffled[0], lambda x: x, label="newer")
    extra.remove()
    assert one.dump_table("test::foo") == other.dump_table("test::foo")
    for handle in handles.values():
        handle.remove()
    empty, _ = build([])
    assert empty.dump_table("test::foo") == other.dump_table("test::foo")


def test_a_backend_registered_later_is_in_the_table() -> None:
    ours = Dispatcher()
    ours.impl("test::foo", MATH, lambda x: x, label="math")
    component = dispatch.backends.register("test.late")
    try:
        rows_ = ours.computed_table("test::foo")
        assert str(rows_[DispatchKey("test.late")]) == "test.late: math [math kernel]"
        other = Dispatcher()
        other.impl("test::foo", "CPU", lambda x: x)
        assert other.computed_table("test::foo")[DispatchKey("Autograd:test.late")].is_fallthrough
    finally:
        dispatch.backends.unregister(component)


def test_newest_wins_and_remove_restores() -> None:
    ours = Dispatcher()
    first = ours.impl("test::foo", "CPU", lambda x: "first", label="first")
    with ours.impl("test::foo", "CPU", lambda x: "second", label="second"):
        assert "CPU: second [kernel]" in ours.dump_table("test::foo")
        assert "(inactive): first" in ours.operator("test::foo").dump_registrations()
    assert "CPU: first [kernel]" in ours.dump_table("test::foo")
    first.remove()
    assert "test::foo" not in ours


@pytest.mark.parametrize("key", [None, "Undefined", "CatchAll"])
def test_catch_all_is_composite_implicit(key: str | None) -> None:
    ours = Dispatcher()
    assert ours.impl("test::foo", key, lambda x: x).key is DispatchKey(MATH)
