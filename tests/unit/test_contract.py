"""The contract: how large it is, that its table is the code's, what a backend for a former one is told."""

from __future__ import annotations

import dataclasses
import importlib.util
import types
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

import torchport
from torchport.backend import optional
from torchport.backend.compiler import compile_graph
from torchport.backend.execution import execute_on_host, start
from torchport.backend.interface import (
    Backend,
    BackendDevice,
    Capabilities,
    FreeableBuffer,
    InitContext,
    Processed,
    TensorData,
)
from torchport.backend.optional import PROTOCOLS, OptionalMethods, optional_of
from torchport.backend.registry import Registry
from torchport.core.errors import BackendUnavailable, TorchportError
from torchport.core.specs import CompileSpecs, TensorSpec

SITE = Path(__file__).parents[2] / "docs" / "_site" / "contract.py"


def _site() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("contract_table", SITE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Least(Backend):
    """What has to be written. Doubles its argument."""

    name = "least"

    def preprocess(self, graph: Any, specs: CompileSpecs) -> Processed:
        return Processed(b"")

    def execute(self, handle: Any, args: Sequence[Any], context: Any) -> Sequence[Any]:
        return [TensorData(arg.device, arg.spec, arg.tensor * 2) for arg in args]


# -- size and table --------------------------------------------------------------------------------------------------
def test_the_page_is_what_the_code_says() -> None:
    site = _site()
    assert site.PAGE.read_text(encoding="utf-8") == site.render(), "run: python docs/_site/contract.py"


def test_the_contract_fits_one_screen() -> None:
    site = _site()
    assert len(site.methods(Backend)) <= 14
    assert list(site.attributes(Backend)) == ["name", "version", "capabilities"]
    assert set(Backend.__abstractmethods__) == {"preprocess", "execute"}
    _, docstring = site.lines(Backend)
    assert docstring <= 25
    for required in ("preprocess", "init", "execute", "supports"):
        assert required in (Backend.__doc__ or "")


def test_everything_of_the_contract_is_public_and_documented() -> None:
    site = _site()
    reference = (SITE.parents[1] / "reference" / "backend.md").read_text(encoding="utf-8")
    for kind in (Backend, Capabilities, *PROTOCOLS):
        assert getattr(torchport, kind.__name__) is kind
        assert f"::: torchport.{kind.__name__}\n" in reference
        for name in site.methods(kind):
            assert getattr(kind, name).__doc__, f"{kind.__name__}.{name} has no docstring"
    assert all(site.attributes(Capabilities).values())
    for protocol in PROTOCOLS:
        _, when = (protocol.__doc__ or "").split("\n\n")
        assert when.strip().startswith(("Called ", "Asked ")), f"{protocol.__name__} does not say when it is called"


# -- capabilities ------------------------------------------------------------------------------------------------------
def test_capabilities_cannot_be_changed_and_their_defaults_promise_nothing() -> None:
    assert Least.capabilities == Capabilities()
    for one in dataclasses.fields(Capabilities):
        assert not getattr(Capabilities(), one.name), one.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        Least.capabilities.donation = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        Capabilities(True)  # type: ignore[misc]
    with pytest.raises(ValueError, match="set donation=True with it"):
        Capabilities(restores_donated=True)


@pytest.mark.parametrize("wrong", [{"donation": True}, True, None])
def test_capabilities_of_another_type_are_refused_where_the_class_is_written(wrong: object) -> None:
    with pytest.raises(TorchportError, match=r"write capabilities = torchport\.Capabilities"):
        type("Wrong", (Least,), {"capabilities": wrong})


def test_capabilities_may_be_found_out_when_they_are_asked_for() -> None:
    class Late(Least):
        @cached_property
        def capabilities(self) -> Capabilities:  # pyright: ignore[reportIncompatibleVariableOverride]
            return Capabilities(torch_free=True)

    assert Late().to_device(torch.ones(2), BackendDevice("cpu")).__class__ is torchport.ArrayData


# -- former names ------------------------------------------------------------------------------------------------------
FORMER = {
    **{one.name: rf"capabilities = torchport\.Capabilities\({one.name}=" for one in dataclasses.fields(Capabilities)},
    "computes_aside": "def should_overlap",
    "placeholder": "nobody calls it",
}


@pytest.mark.parametrize("name", FORMER)
def test_a_class_for_a_former_contract_is_told_what_to_write(name: str) -> None:
    with pytest.raises(TorchportError, match=rf"(?s)class Old .*{name}: write .*{FORMER[name]}"):
        type("Old", (Least,), {name: True})
    mixin = type("Mixin", (), {name: True})
    with pytest.raises(TorchportError, match=rf"class Mixin .*\n  {name}: "):
        type("Mixed", (mixin, Least), {})


def test_an_instance_for_a_former_contract_is_told_when_it_is_asked_for() -> None:
    class Old(Least):
        def __init__(self) -> None:
            self.donation = True

    registry = Registry()
    registry.register(Old, "old")
    with pytest.raises(BackendUnavailable, match=r"(?s)'old'.*cannot be used.*donation: write capabilities"):
        registry.get("old")
    assert [row.available for row in registry.list()] == [False]


# -- optional protocols ------------------------------------------------------------------------------------------------
def test_a_backend_satisfies_a_protocol_by_having_its_methods() -> None:
    site = _site()
    assert len(PROTOCOLS) == len(dataclasses.fields(OptionalMethods))
    assert all(value is None for value in dataclasses.astuple(optional_of(Least())))
    for protocol, one in zip(PROTOCOLS, dataclasses.fields(OptionalMethods), strict=True):
        methods = site.methods(protocol)
        assert methods
        backend = type("Some", (Least,), {method: lambda self, *args: None for method in methods})()
        found = optional_of(backend)
        assert getattr(found, one.name) is backend, f"{methods} make a {protocol.__name__}"
        others = [name.name for name in dataclasses.fields(OptionalMethods) if name.name != one.name]
        assert all(getattr(found, other) is None for other in others)


def _doubled(backend: Backend) -> Any:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    two = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    two.meta.update(val=torch.ones(2), debug_handle=0, source=None)
    graph.output((two,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with torchport.config.override(verify_graphs=False):
        return compile_graph(backend, BackendDevice("cpu"), CompileSpecs(), module)


def test_protocols_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computation = _doubled(Least())
    assert optional_of(computation.backend) is computation.optional

    class Never(type):
        def __instancecheck__(cls, instance: object) -> bool:
            raise AssertionError("a protocol was asked about in a call")

    monkeypatch.setattr(optional, "PROTOCOLS", (Never("Asked", (), {}),))
    for _ in range(2):
        assert execute_on_host(computation, [torch.ones(2)])[0].tolist() == [2, 2]
    assert start(computation, [], computation.context) is None
    with pytest.raises(AssertionError, match="was asked about"):
        optional_of(Least())


def test_host_execution_that_declines_goes_the_ordinary_way() -> None:
    class Declines(Least):
        calls = 0

        def execute_on_host(self, handle: Any, tensors: Any, specs: Any, context: Any) -> Any:
            self.calls += 1
            return None if self.calls < 2 else [tensors[0] * 3]

    backend = Declines()
    computation = _doubled(backend)
    results = [execute_on_host(computation, [torch.ones(2)])[0].tolist() for _ in range(3)]
    assert results == [[2, 2], [2, 2], [3, 3]], "the first run is checked, so it goes through execute()"
    assert backend.calls == 2


def test_results_are_the_callers_on_every_call() -> None:
    class Same(Least):
        def execute(self, handle: Any, args: Sequence[Any], context: Any) -> Sequence[Any]:
            return args

    computation, x = _doubled(Same()), torch.ones(2)
    for _ in range(3):
        (result,) = execute_on_host(computation, [x])
        assert result.data_ptr() != x.data_ptr()


def test_a_handle_is_given_back_once() -> None:
    class Counting(Least):
        destroyed = 0

        def destroy(self, handle: Any) -> None:
            Counting.destroyed += 1

    computation = _doubled(Counting())
    computation.release()
    computation.release()
    assert computation.released
    del computation
    assert Counting.destroyed == 1


def test_values_of_another_number_are_refused_after_the_first_run_too() -> None:
    class Later(Least):
        runs = 0

        def execute(self, handle: Any, args: Sequence[Any], context: Any) -> Sequence[Any]:
            self.runs += 1
            return [*super().execute(handle, args, context), *args[: self.runs - 1]]

    computation = _doubled(Later())
    execute_on_host(computation, [torch.ones(2)])
    with pytest.raises(torchport.ExecutionError, match="2 values for 1 outputs"):
        execute_on_host(computation, [torch.ones(2)])


def test_the_least_backend_can_be_loaded() -> None:
    handle = Least().init(FreeableBuffer(b""), CompileSpecs(), InitContext(BackendDevice("cpu")))
    value = TensorData(BackendDevice("cpu"), TensorSpec.of(torch.ones(2)), torch.ones(2))
    (result,) = Least().execute(handle, [value], None)
    assert result.tensor.tolist() == [2, 2]
