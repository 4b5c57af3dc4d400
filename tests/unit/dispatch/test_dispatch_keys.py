"""Backends, keys and sets: what c10 cannot be asked about (run-time backends, errors, immutability)."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchport import dispatch
from torchport.core.errors import DispatchError
from torchport.dispatch import BackendComponent, DispatchKey, DispatchKeySet, Functionality, KeyClass, backends


@pytest.fixture
def port() -> Iterator[BackendComponent]:
    component = backends.register("test.port")
    yield component
    backends.unregister(component)


@pytest.fixture
def many() -> Iterator[list[BackendComponent]]:
    components = [backends.register(f"many{at}") for at in range(200)]
    yield components
    for component in components:
        backends.unregister(component)


def test_core_needs_no_torch() -> None:
    code = (
        "import sys; from torchport import dispatch as d; o = d.Dispatcher();"
        "o.define('a::b(Tensor x) -> Tensor');"
        "o.impl('a::b', 'CPU', lambda x: x); o.dump_table('a::b'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def test_builtin_backends_in_c10s_order() -> None:
    names = [component.name for component in backends if component.builtin]
    assert names[:4] == ["CPU", "CUDA", "HIP", "XLA"]
    assert names[-4:] == ["PrivateUse1", "PrivateUse2", "PrivateUse3", "Meta"]
    assert len(names) == torch._C._dispatch_num_backends()


def test_the_five_classes() -> None:
    classes = {
        "FPGA": KeyClass.BACKEND,
        "Functionalize": KeyClass.FUNCTIONALITY,
        "Sparse": KeyClass.PER_BACKEND_FUNCTIONALITY,
        "SparseCPU": KeyClass.RUNTIME_INSTANCE,
        "Autograd": KeyClass.ALIAS,
        "Undefined": KeyClass.UNDEFINED,
    }
    for name, key_class in classes.items():
        key = DispatchKey(name)
        assert key.key_class is key_class
        owns_bit = key_class in (KeyClass.BACKEND, KeyClass.FUNCTIONALITY, KeyClass.PER_BACKEND_FUNCTIONALITY)
        assert (key.bits.bit_count() == 1) == owns_bit
        assert (key in dispatch.runtime_keys()) == key.is_runtime


def test_keys_are_one_object_each() -> None:
    assert DispatchKey("SparseCPU") is DispatchKey.SparseCPU is DispatchKey(DispatchKey.SparseCPU)
    assert DispatchKey("CatchAll") is DispatchKey.Undefined
    assert DispatchKey("DefaultBackend") is DispatchKey.CompositeExplicitAutograd
    assert pickle.loads(pickle.dumps(DispatchKey.AutogradCPU)) is DispatchKey.AutogradCPU
    assert copy.deepcopy(DispatchKey.CPU) is DispatchKey.CPU
    assert repr(DispatchKey.CPU) == "DispatchKey.CPU"
    assert str(DispatchKey.CPU) == "CPU"
    with pytest.raises(AttributeError, match="SparseCpu"):
        _ = DispatchKey.SparseCpu


def test_a_backend_of_our_own(port: BackendComponent) -> None:
    assert not port.builtin
    assert port in backends
    assert "test.port" in backends
    assert backends.get("test.port") is port is backends.at(port.index)
    dense, sparse = DispatchKey("test.port"), DispatchKey("Sparse:test.port")
    assert (dense.functionality, dense.backend) == (Functionality.Dense, port)
    assert (sparse.functionality, sparse.backend) == (Functionality.Sparse, port)
    assert repr(sparse) == "DispatchKey('Sparse:test.port')"
    assert DispatchKey("Sparse:CPU") is DispatchKey.SparseCPU
    both = DispatchKeySet("CUDA", "AutogradMeta", dense, "Autograd:test.port")
    assert both.highest_priority is DispatchKey("Autograd:test.port"), "run-time backends come after Meta"
    assert both.backend is port
    assert dispatch.backend_from_autograd("Autograd:test.port") == DispatchKeySet(dense)
    assert dispatch.autograd_from_backend(port) is DispatchKey("Autograd:test.port")
    for alias in ("Autograd", "CompositeImplicitAutograd", "CompositeExplicitAutograd"):
        key = DispatchKey("Autograd:test.port") if alias == "Autograd" else dense
        assert dispatch.in_alias(key, DispatchKey(alias))
    assert dispatch.tensor_keys(port) == DispatchKeySet(dense, "ADInplaceOrView", "Autograd:test.port")


def test_functional_backends_are_left_out_of_non_functional() -> None:
    component = backends.register("test.functional", functional=True)
    try:
        assert not dispatch.in_alias(
            DispatchKey("test.functional"), DispatchKey("CompositeExplicitAutogradNonFunctional")
        )
        assert dispatch.in_alias(DispatchKey("test.functional"), DispatchKey("CompositeExplicitAutograd"))
    finally:
        backends.unregister(component)


def test_bits_are_not_given_out_twice(port: BackendComponent) -> None:
    old = backends.register("test.gone")
    stale = DispatchKeySet("test.gone")
    backends.unregister(old)
    new = backends.register("test.new")
    try:
        assert not stale.has(new)
        assert list(stale) == []
        assert stale.backend is None
        assert stale.highest_priority is DispatchKey.Dense
        assert "test.gone" not in backends
        with pytest.raises(DispatchError, match=r"test\.gone"):
            DispatchKey("test.gone")
        with pytest.raises(DispatchError, match="not registered"):
            backends.unregister(old)
    finally:
        backends.unregister(new)


def test_two_hundred_backends(many: list[BackendComponent]) -> None:
    assert len(dispatch.runtime_keys()) == 41 + 6 * len(backends)
    everything = DispatchKeySet(*many)
    assert everything.backends() == tuple(many)
    ours = dispatch.Dispatcher()
    for component in many:
        ours.impl("many::op", component.name, lambda x, name=component.name: name)

    class Thing:
        def __init__(self, name: str) -> None:
            self.dispatch_keys = DispatchKeySet(name, f"Autograd:{name}")

        dispatch_keys: DispatchKeySet

    assert [ours.call("many::op", Thing(component.name)) for component in many] == [c.name for c in many]
    full = DispatchKeySet.full()
    assert DispatchKeySet(*(key for key in full)) == full


def test_bad_backend_names(port: BackendComponent) -> None:
    for name in ("", "1st", "a b", "a:b", "é!", "CPU", "Autograd", "AutogradCPU", "test.port", "CatchAll"):
        with pytest.raises(DispatchError):
            backends.register(name)
    with pytest.raises(DispatchError, match="cannot be unregistered"):
        backends.unregister(backends.get("CPU"))
    with pytest.raises(DispatchError, match="did you mean CUDA"):
        backends.get("CUDAA")
    assert backends.get_optional("nope") is None


def test_sets_are_values() -> None:
    keys = DispatchKeySet("CPU", "AutogradCPU")
    assert keys == DispatchKeySet("AutogradCPU", "CPU")
    assert hash(keys) == hash(DispatchKeySet("AutogradCPU", "CPU"))
    assert keys != "CPU"
    assert keys
    assert not DispatchKeySet()
    assert "CPU" in keys
    assert DispatchKey.CUDA not in keys
    assert keys.has(backends.get("CPU"))
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert copy.deepcopy(keys) == keys
    assert repr(keys) == "DispatchKeySet(CPU, AutogradCPU)"
    assert len(keys) == 2
    assert keys ^ keys == DispatchKeySet()
    assert keys.remove_backend(backends.get("CPU")).backend is None
    assert keys.has_all(DispatchKeySet("CPU"))
    assert keys.has_any(DispatchKeySet("AutogradFunctionality", "Python"))
    with pytest.raises(AttributeError):
        keys.bits = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del keys.bits


def test_what_a_set_refuses() -> None:
    with pytest.raises(DispatchError, match="no dispatch key is named 'SparseCPUU'; did you mean SparseCPU"):
        DispatchKeySet("SparseCPUU")
    for refused in (DispatchKeySet, DispatchKeySet().add, DispatchKeySet().has, DispatchKeySet().remove):
        with pytest.raises(DispatchError, match="alias key, where a runtime key is needed"):
            refused("CompositeImplicitAutograd")
    with pytest.raises(DispatchError, match="Undefined"):
        DispatchKeySet().has("Undefined")
    with pytest.raises(DispatchError, match="share bits"):
        DispatchKeySet("CPU").has_any(DispatchKeySet("AutogradCPU"))
    with pytest.raises(DispatchError, match="not a functionality"):
        DispatchKeySet.full_after("Autograd")


def test_to_torch(port: BackendComponent) -> None:
    keys = DispatchKeySet("PrivateUse1", "AutogradPrivateUse1")
    assert DispatchKeySet.from_torch(keys.to_torch()) == keys
    assert DispatchKeySet.from_torch(keys.to_torch(), privateuse1=port) == DispatchKeySet(
        "test.port", "Autograd:test.port"
    )
    with pytest.raises(DispatchError, match=r"test\.port"):
        DispatchKeySet("test.port").to_torch()


raw = st.integers(min_value=0, max_value=2**62 - 1).map(lambda r: torch._C.DispatchKeySet.from_raw_repr(r))


@given(raw, raw)
def test_set_laws(a: object, b: object) -> None:
    x, y = DispatchKeySet.from_torch(a), DispatchKeySet.from_torch(b)
    assert (x | y) & x == x
    assert (x - y) | (x & y) == x
    assert (x - y).backends() == x.backends()
    assert x.has_all(x & y)
    assert DispatchKeySet(*x) | DispatchKeySet.from_bits(x.bits) == x
    assert list(x) == sorted(x, key=dispatch.runtime_keys().index)
