"""Calls, redispatch, thread keys, fallbacks and backends of our own, without torch's help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dispatch_things import CPU, CUDA, SPARSE, Thing

from torchport import dispatch
from torchport.core.errors import DispatchError, MissingKernel
from torchport.dispatch import BackendComponent, Dispatcher, DispatchKey, DispatchKeySet


@pytest.fixture
def ours() -> Dispatcher:
    made = Dispatcher()
    made.define("test::foo(Tensor x, Tensor? y=None, *, int n=0, Tensor? out=None) -> Tensor")
    made.define("test::cat(Tensor[] xs, int dim=0) -> Tensor")
    made.define("test::make(int[] size, *, bool flag=False) -> Tensor")
    return made


@pytest.fixture
def two() -> Iterator[tuple[BackendComponent, BackendComponent]]:
    pair = dispatch.backends.register("test.one"), dispatch.backends.register("test.two")
    yield pair
    for component in pair:
        dispatch.backends.unregister(component)


def named(label: str) -> Any:
    def kernel(x: Any, y: Any = None, *, n: int = 0, out: Any = None) -> Any:
        return label, n

    return kernel


def test_all_arguments_count(ours: Dispatcher) -> None:
    ours.impl("test::foo", "CPU", named("cpu"))
    ours.impl("test::foo", "CUDA", named("cuda"))
    foo = ours.operator("test::foo")
    assert foo(CPU) == ("cpu", 0)
    assert foo(CPU, n=3) == ("cpu", 3)
    assert foo(CPU, None) == ("cpu", 0)
    assert foo(CPU, CUDA) == foo(CUDA, CPU) == foo(CPU, y=CUDA) == foo(x=CPU, y=CUDA) == ("cuda", 0)
    assert foo(CPU, out=CUDA, n=2) == ("cuda", 2)
    assert ours.call("test::foo", CPU) == ours.call(foo, CPU) == ("cpu", 0)


def test_lists_count(ours: Dispatcher) -> None:
    for key in ("CPU", "CUDA", "SparseCPU", "CompositeExplicitAutograd"):
        ours.impl("test::cat", key, lambda xs, dim=0, key=key: key)
    cat = ours.operator("test::cat")
    assert cat([CPU, CUDA]) == "CUDA"
    assert cat((CPU, SPARSE), 1) == "SparseCPU"
    assert cat([None, CPU]) == "CPU"
    assert cat([]) == "CompositeExplicitAutograd"


def test_an_operator_without_schema_looks_at_everything() -> None:
    ours = Dispatcher()
    ours.define("test::free")
    ours.impl("test::free", "CPU", lambda *a, **k: "cpu")
    ours.impl("test::free", "CUDA", lambda *a, **k: "cuda")
    assert ours.call("test::free", 1, "s", [CPU], k=CUDA) == "cuda"
    assert ours.call("test::free", 1, "s", [CPU]) == "cpu"


def test_torch_tensors_are_known() -> None:
    ours = Dispatcher()
    ours.define("test::foo(Tensor x) -> Tensor")
    ours.impl("test::foo", "CPU", lambda x: "cpu")
    ours.impl("test::foo", "Meta", lambda x: "meta")
    assert ours.call("test::foo", torch.ones(1)) == "cpu"
    assert ours.call("test::foo", torch.nn.Parameter(torch.ones(1, device="meta"))) == "meta"


def test_extractors(ours: Dispatcher) -> None:
    class Plain:
        where = "CPU"

    class Derived(Plain):
        pass

    ours.impl("test::foo", "CPU", named("cpu"))
    with pytest.raises(MissingKernel):
        ours.call("test::foo", Derived())
    ours.add_extractor(Plain, lambda plain: DispatchKeySet(plain.where))
    assert ours.call("test::foo", Derived()) == ("cpu", 0)
    ours.add_extractor(Derived, lambda derived: DispatchKeySet("CUDA").bits)
    with pytest.raises(MissingKernel, match="at CUDA"):
        ours.call("test::foo", Derived())
    with pytest.raises(DispatchError, match="list"):
        ours.add_extractor(list, lambda values: 0)


def test_backend_select_for_calls_without_tensors(ours: Dispatcher) -> None:
    ours.impl("test::make", "CPU", lambda size, *, flag=False: ("cpu", size))
    with pytest.raises(MissingKernel, match="at Undefined"):
        ours.call("test::make", [2])

    def select(keyset: DispatchKeySet, size: Any, *, flag: bool = False) -> Any:
        return ours.redispatch("test::make", DispatchKeySet("CPU"), size, flag=flag)

    handle = ours.impl("test::make", "BackendSelect", select, with_keyset=True)
    assert ours.call("test::make", [2]) == ("cpu", [2])
    handle.remove()
    ours.impl("test::make", None, lambda size, *, flag=False: "catch-all")
    assert ours.call("test::make", [2], flag=True) == "catch-all"


def test_with_keyset_gets_the_masked_set(ours: Dispatcher) -> None:
    seen: list[DispatchKeySet] = []

    def below(keyset: DispatchKeySet, x: Any, y: Any = None, *, n: int = 0, out: Any = None) -> Any:
        seen.append(keyset)
        return ours.redispatch("test::foo", keyset & DispatchKeySet.full_after("AutogradCPU"), x, y, n=n, out=out)

    ours.impl("test::foo", "Autograd", below, with_keyset=True)
    ours.impl("test::foo", "CPU", named("cpu"))
    assert ours.call("test::foo", CPU, n=5) == ("cpu", 5)
    assert seen == [DispatchKeySet("CPU", "AutogradCPU")], "BackendSelect and ADInplaceOrView are fallthrough"


def test_calling_again_without_a_guard_recurses(ours: Dispatcher) -> None:
    depth = 0

    def again(x: Any, y: Any = None, *, n: int = 0, out: Any = None) -> Any:
        nonlocal depth
        depth += 1
        if depth < 3:
            return ours.call("test::foo", x)
        with dispatch.exclude("AutogradCPU"):
            return ours.call("test::foo", x)

    ours.impl("test::foo", "Autograd", again)
    ours.impl("test::foo", "CPU", named("cpu"))
    assert ours.call("test::foo", CPU) == ("cpu", 0)
    assert depth == 3


def test_redispatch_is_verbatim(ours: Dispatcher) -> None:
    ours.impl("test::foo", "CPU", named("cpu"))
    ours.impl("test::foo", "CUDA", named("cuda"))
    with dispatch.include("CUDA"), dispatch.exclude("Dense"):
        assert ours.redispatch("test::foo", DispatchKeySet("CPU"), CUDA, n=1) == ("cpu", 1)
    with pytest.raises(DispatchError, match="landed on the fallthrough at ADInplaceOrView"):
        ours.redispatch("test::foo", DispatchKeySet("CPU", "ADInplaceOrView"), CPU)
    with pytest.raises(MissingKernel, match="at Undefined"):
        ours.redispatch("test::foo", DispatchKeySet(), CPU)


def test_boxed_fallback(ours: Dispatcher) -> None:
    def report(keyset: DispatchKeySet, op: dispatch.Operator, *args: Any, **kwargs: Any) -> Any:
        return op.name, list(keyset), len(args), kwargs

    handle = ours.fallback("CUDA", report, with_keyset=True)
    assert ours.call("test::foo", CUDA, None, n=1) == ("test::foo", [DispatchKey.CUDA], 2, {"n": 1})
    plain = ours.fallback("SparseCPU", lambda op, *args, **kwargs: op.name)
    assert ours.call("test::cat", [SPARSE]) == "test::cat"
    assert ours.lookup("test::cat", DispatchKeySet("SparseCPU")).is_fallback
    ours.impl("test::foo", "CUDA", named("own"))
    assert ours.call("test::foo", CUDA) == ("own", 0)
    handle.remove()
    plain.remove()
    with pytest.raises(MissingKernel):
        ours.call("test::cat", [SPARSE])


def test_fallthrough_per_operator_and_per_backend(ours: Dispatcher) -> None:
    ours.impl("test::foo", "CPU", named("cpu"))
    ours.impl("test::foo", "CUDA", named("cuda"))
    ours.impl("test::foo", "AutogradCPU", named("autograd"))
    assert ours.call("test::foo", CPU) == ("autograd", 0)
    skip = ours.impl("test::foo", "AutogradCPU", dispatch.fallthrough)
    assert ours.call("test::foo", CPU) == ("cpu", 0)
    ours.impl("test::foo", "AutogradCUDA", named("autograd cuda"))
    assert ours.call("test::foo", CPU, CUDA) == ("autograd cuda", 0), "the highest backend's mask counts"
    skip.remove()
    assert ours.call("test::foo", CPU) == ("autograd", 0)
    ours.define("test::other(Tensor x) -> Tensor")
    ours.impl("test::other", "CPU", lambda x: "other")
    assert ours.call("test::other", CPU) == "other"


def test_guards_restore_on_exceptions(ours: Dispatcher) -> None:
    before = dispatch.local_keys()
    guard = dispatch.include("Functionalize", DispatchKeySet("CUDA"))

    def fail() -> None:
        with guard, guard, dispatch.exclude("Dense"):
            assert dispatch.local_keys()[0].has("Functionalize")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dispatch.local_keys() == before
    with dispatch.force(DispatchKeySet("CPU"), DispatchKeySet()):
        assert dispatch.local_keys() == (DispatchKeySet("CPU"), DispatchKeySet())
    assert dispatch.local_keys() == before
    with pytest.raises(DispatchError, match="alias"):
        dispatch.include("Autograd")


def test_guards_are_per_thread(ours: Dispatcher) -> None:
    ours.impl("test::foo", "CPU", named("cpu"))
    ours.impl("test::foo", "AutogradCPU", named("autograd"))
    results: list[Any] = []
    with dispatch.exclude("AutogradCPU"):
        thread = threading.Thread(target=lambda: results.append(ours.call("test::foo", CPU)))
        thread.start()
        thread.join()
        results.append(ours.call("test::foo", CPU))
    assert results == [("autograd", 0), ("cpu", 0)]


def test_registering_while_others_call(ours: Dispatcher) -> None:
    """No call sees a kernel after its removal, whatever other threads remember meanwhile."""
    ours.impl("test::foo", "CPU", named("base"))
    stop = threading.Event()
    wrong: list[BaseException] = []

    def call() -> None:
        try:
            while not stop.is_set():
                assert ours.call("test::foo", CPU)[0] in ("base", "extra")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with ours.impl("test::foo", "CPU", named("extra")):
            pass
        assert ours.call("test::foo", CPU) == ("base", 0)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_backends_in_one_process(ours: Dispatcher, two: tuple[BackendComponent, BackendComponent]) -> None:
    """Each has its own kernels for the same op; an autograd kernel of one leaves the other alone."""
    one, other = two
    first, second = ours.for_backend(one), ours.for_backend("test.two")
    ours.impl("test::foo", "Autograd", named("everyone's formula"))
    first.impl("test::foo", "Dense", named("one"))
    second.impl("test::foo", "Dense", named("two"))
    second.impl("test::foo", "Sparse", named("two, sparse"))
    plain = [Thing(*dispatch.tensor_keys(component)) for component in two]
    with dispatch.exclude("AutogradFunctionality"):
        assert [ours.call("test::foo", x)[0] for x in plain] == ["one", "two"]
        assert ours.call("test::foo", Thing("Sparse:test.two"))[0] == "two, sparse"
    for kind in ("Quantized", "SparseCsr", "NestedTensor"):
        first.impl("test::foo", kind, named(kind))
        assert ours.call("test::foo", Thing(f"{kind}:test.one"))[0] == kind
    first.impl("test::foo", "Autograd", named("one's own formula"))
    assert [ours.call("test::foo", x)[0] for x in plain] == ["one's own formula", "everyone's formula"]
    first.remove_all()
    assert [ours.call("test::foo", x)[0] for x in plain] == ["everyone's formula"] * 2
    assert [r.key.backend for r in ours.operator("test::foo").table.registrations()] == [None, other, other]


def test_lookup(ours: Dispatcher) -> None:
    ours.impl("test::foo", "CPU", kernel := named("cpu"))
    found = ours.lookup("test::foo", CPU.dispatch_keys)
    assert (found.found, found.kernel, found.key, found.rule.provenance) == (True, kernel, DispatchKey.CPU, "kernel")
    assert found.keyset == DispatchKeySet("CPU")
    assert not found.is_fallback
    assert found.run(CPU) == ("cpu", 0)
    assert ours.lookup("test::foo", CPU.dispatch_keys.bits) is found, "remembered"
    missing = ours.lookup("test::foo", CUDA.dispatch_keys)
    assert (missing.found, missing.kernel, missing.rule.id) == (False, None, "missing")
    below = ours.lookup("test::foo", DispatchKeySet("CPU", "AutogradCPU"), verbatim=True)
    assert (below.found, below.rule.id, below.is_fallback) == (False, "fallback", False)
    ours.impl("test::foo", "CUDA", named("cuda"))
    assert ours.lookup("test::foo", CUDA.dispatch_keys).found, "forgotten when something changes"


def test_version_grows_with_every_change(ours: Dispatcher) -> None:
    versions = [ours.version]
    for change in (
        lambda: ours.impl("test::foo", "CPU", named("cpu")),
        lambda: ours.fallback("CUDA", lambda op, *args: args),
        lambda: ours.define("test::new(Tensor x) -> Tensor"),
        lambda: ours.undefine("test::new"),
        lambda: ours.impl("test::foo", "CUDA", named("cuda")).remove(),
        lambda: ours.add_extractor(Thing, lambda thing: thing.dispatch_keys),
    ):
        change()
        versions.append(ours.version)
    ours.lookup("test::foo", CPU.dispatch_keys)
    assert versions == sorted(set(versions))
    assert ours.version == versions[-1]


def test_iteration_and_membership(ours: Dispatcher) -> None:
    assert {op.name for op in ours} == {"test::foo", "test::cat", "test::make"}
    assert "test::foo" in ours
    assert "test::foo.default" in ours
    assert 3 not in ours
    assert ours.operator("test::foo.default") is ours.operator("test::foo")
    assert ours.operator_optional("test::nope") is None
    ours.undefine("test::foo")
    assert "test::foo" not in ours
