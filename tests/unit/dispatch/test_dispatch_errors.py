"""Bad input: a clear error, and nothing changed. Missing and ambiguous kernels: at most five lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dispatch_things import CPU, CUDA, SPARSE, Thing

from torchport import dispatch
from torchport.core.errors import AmbiguousKernel, DispatchError, MissingKernel, TorchportError
from torchport.dispatch import Dispatcher


@pytest.fixture
def ours() -> Dispatcher:
    made = Dispatcher()
    made.define("test::foo(Tensor x, int n=0, *, bool flag=False) -> Tensor")
    made.impl("test::foo", "CPU", lambda x, n=0, *, flag=False: x, label="foo_cpu")
    return made


def state(ours: Dispatcher) -> Any:
    tables = [(op.name, str(op.schema), op.dump_registrations(), op.dump_table()) for op in ours]
    return tables, ours.fallbacks(), len(dispatch.backends)


NOT_CALLABLE: Any = 3
REFUSED: dict[str, tuple[Callable[[Dispatcher], Any], str]] = {
    "malformed schema": (lambda d: d.define("test::bad(Tensor x -> Tensor"), "malformed schema"),
    "unknown type": (lambda d: d.define("test::bad(Tensr x) -> Tensor"), "unknown type 'Tensr'"),
    "name without namespace": (lambda d: d.define("bad"), "write 'namespace::name'"),
    "defined twice": (lambda d: d.define("test::foo(Tensor x) -> Tensor"), "defined already"),
    "name defined twice": (lambda d: d.define("test::foo"), "defined already"),
    "unknown key": (lambda d: d.impl("test::foo", "SparseCUP", lambda x: x), "did you mean SparseCPU"),
    "key without backend": (lambda d: d.impl("test::foo", "Sparse", lambda x: x), "for example SparseCPU"),
    "malformed name": (lambda d: d.impl("foo", "CPU", lambda x: x), "write 'namespace::name'"),
    "not callable": (lambda d: d.impl("test::foo", "CPU", NOT_CALLABLE), "not callable"),
    "too few parameters": (lambda d: d.impl("test::foo", "CUDA", lambda x: x), "does not take"),
    "too many parameters": (lambda d: d.impl("test::foo", "CUDA", lambda x, n, m, *, flag: x), "does not take"),
    "no default": (lambda d: d.impl("test::foo", "CUDA", lambda x, n, *, flag: x), "give them one too"),
    "positional where by name": (lambda d: d.impl("test::foo", "CUDA", lambda x, n=0, flag=0, /: x), "does not take"),
    "no place for the key set": (
        lambda d: d.impl("test::foo", "CUDA", lambda x, *, n=0, flag=False: x, with_keyset=True),
        "the key set first",
    ),
    "alias for one backend": (
        lambda d: d.for_backend("CPU").impl("test::foo", "CompositeImplicitAutograd", lambda x, n=0, *, flag=0: x),
        "needs a runtime key",
    ),
    "another key for one backend": (
        lambda d: d.for_backend("CPU").impl("test::foo", "Functionalize", lambda x, n=0, *, flag=0: x),
        "use one of AutogradFunctionality, Dense",
    ),
    "unknown backend": (lambda d: d.for_backend("CPUU"), "did you mean"),
    "fallback for the catch-all": (lambda d: d.fallback("Undefined", lambda op: op), "BackendSelect"),
    "fallback taken": (lambda d: d.fallback("ADInplaceOrView", dispatch.fallthrough), "has a fallback already"),
    "fallback taken by an alias": (lambda d: d.fallback("AutogradXLA", dispatch.fallthrough), "has a fallback already"),
    "alias fallback over one": (lambda d: d.fallback("CompositeImplicitAutograd", lambda op: op), "already"),
    "fallback not callable": (lambda d: d.fallback("CUDA", NOT_CALLABLE), "not callable"),
    "fallback without backend": (lambda d: d.fallback("Dense", lambda op: op), "for example CPU"),
    "unknown operator": (lambda d: d.call("test::fo", CPU), "did you mean test::foo"),
    "redispatch of an unknown operator": (lambda d: d.redispatch("x::y", dispatch.DispatchKeySet()), "no operator"),
    "undefine of an unknown operator": (lambda d: d.undefine("x::y"), "no operator"),
    "lookup at an alias": (lambda d: d.lookup("test::foo", dispatch.DispatchKeySet("Autograd")), "alias key"),
    "too many arguments": (lambda d: d.call("test::foo", CPU, 1, 2), "takes 2 positional"),
    "unknown argument": (lambda d: d.call("test::foo", CPU, m=2), "no argument 'm'"),
    "missing argument": (lambda d: d.call("test::foo"), "needs argument 'x'"),
    "calling fallthrough": (lambda d: dispatch.fallthrough(CPU), "cannot be called"),
}


@pytest.mark.parametrize(("act", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_and_nothing_changed(ours: Dispatcher, act: Callable[[Dispatcher], Any], why: str) -> None:
    before = state(ours)
    with pytest.raises(DispatchError, match=why) as caught:
        act(ours)
    assert state(ours) == before
    assert isinstance(caught.value, TorchportError)


def test_removing_twice(ours: Dispatcher) -> None:
    handle = ours.impl("test::foo", "CUDA", lambda x, n=0, *, flag=False: x)
    handle.remove()
    before = state(ours)
    with pytest.raises(DispatchError, match="removed already"):
        handle.remove()
    fallback = ours.fallback("CUDA", lambda op: op)
    fallback.remove()
    with pytest.raises(DispatchError, match="removed already"):
        fallback.remove()
    with ours.impl("test::foo", "CUDA", lambda x, n=0, *, flag=False: x) as handle:
        handle.remove()
    assert state(ours) == before


def test_a_kernel_from_before_must_fit_the_schema() -> None:
    ours = Dispatcher()
    ours.impl("test::late", "CPU", lambda x, y: x)
    before = state(ours)
    with pytest.raises(DispatchError, match="does not take"):
        ours.define("test::late(Tensor x) -> Tensor")
    assert state(ours) == before
    assert ours.define("test::late(Tensor x, Tensor y) -> Tensor")(CPU, CPU) is CPU


def golden(error: pytest.ExceptionInfo[DispatchError]) -> list[str]:
    lines = str(error.value).splitlines()
    assert len(lines) <= 5
    return lines


def test_missing_at_another_backend(ours: Dispatcher) -> None:
    with pytest.raises(MissingKernel) as caught:
        ours.call("test::foo", CUDA)
    assert golden(caught) == [
        "no kernel for test::foo at CUDA",
        "  keys: CUDA (its arguments' and this thread's, without fallthroughs)",
        "  registered at: CPU",
        "  fix: dispatcher.impl('test::foo', 'CUDA', kernel)",
        "  or:  move the arguments to a backend that has a kernel: CPU; .explain() on this error has the table",
    ]
    assert (caught.value.op, caught.value.key) == ("test::foo", "CUDA")
    assert "CPU: foo_cpu [kernel]\n" in caught.value.explain()


def test_missing_at_another_layout(ours: Dispatcher) -> None:
    with pytest.raises(MissingKernel) as caught:
        ours.call("test::foo", SPARSE)
    assert golden(caught)[0] == "no kernel for test::foo at SparseCPU"
    assert "make the arguments dense: there is a kernel at CPU" in golden(caught)[4]


def test_missing_without_tensors(ours: Dispatcher) -> None:
    with pytest.raises(MissingKernel) as caught:
        ours.call("test::foo", 3)
    assert golden(caught)[:2] == [
        "no kernel for test::foo at Undefined",
        "  keys: none; no argument carries any (int)",
    ]
    assert "'BackendSelect'" in golden(caught)[3]
    assert "'CompositeExplicitAutograd'" in golden(caught)[4]


def test_missing_formula() -> None:
    ours = Dispatcher(standard_fallbacks=False)
    ours.impl("test::foo", "CPU", lambda x: x)
    with pytest.raises(MissingKernel) as caught, dispatch.exclude("ADInplaceOrView", "BackendSelect"):
        ours.call("test::foo", CPU)
    assert "with dispatch.exclude('AutogradCPU')" in golden(caught)[4]


def test_missing_everywhere() -> None:
    ours = Dispatcher()
    ours.define("test::bare")
    with pytest.raises(MissingKernel) as caught:
        ours.call("test::bare", CPU)
    assert golden(caught)[2] == "  registered at: nothing"
    assert "'CompositeImplicitAutograd'" in golden(caught)[4]


def test_ambiguous(ours: Dispatcher) -> None:
    ours.define("test::both(Tensor x) -> Tensor")
    ours.impl("test::both", "CompositeImplicitAutograd", lambda x: x)
    ours.impl("test::both", "SparseCPU", lambda x: x)
    with pytest.raises(AmbiguousKernel) as caught:
        ours.call("test::both", Thing("FPGA", "AutogradOther"))
    lines = golden(caught)
    assert lines[0] == "test::both at AutogradOther: the composite and a backend kernel both claim it"
    assert "backend kernels: SparseCPU" in lines[2]
    assert "dispatcher.impl('test::both', 'AutogradOther', kernel)" in lines[3]
    assert "AutogradOther: ambiguous_autogradother [ambiguous autogradother]" in caught.value.explain()
    assert caught.value.__cause__ is None


def test_everything_falls_through(ours: Dispatcher) -> None:
    ours.define("test::skip(Tensor x) -> Tensor")
    ours.impl("test::skip", "CompositeExplicitAutograd", dispatch.fallthrough)
    with pytest.raises(DispatchError) as caught:
        ours.call("test::skip", CPU)
    assert golden(caught)[0].startswith("test::skip: the call landed on the fallthrough at Undefined")


def test_registrations_say_where_they_were_made(ours: Dispatcher) -> None:
    handle = ours.impl("test::foo", "CUDA", lambda x, n=0, *, flag=False: x)
    assert handle.source.startswith(__file__)
    through = ours.for_backend("CUDA").impl("test::foo", "Sparse", lambda x, n=0, *, flag=False: x)
    assert through.source.startswith(__file__)
    assert ours.fallback("XLA", lambda op, *a, **k: op).source.startswith(__file__)


def test_a_long_list_of_keys_is_cut(ours: Dispatcher) -> None:
    for component in list(dispatch.backends)[1:]:
        for functionality in ("Quantized", "Sparse", "SparseCsr", "NestedTensor"):
            ours.for_backend(component).impl("test::foo", functionality, lambda x, n=0, *, flag=False: x)
    with pytest.raises(MissingKernel) as caught:
        ours.call("test::foo", CUDA)
    assert golden(caught)[2].endswith("…")
    assert max(map(len, golden(caught))) < 200
