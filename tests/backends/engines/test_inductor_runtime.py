"""The runtime that an ``inductor`` library is compiled with: torchport's small one, or Inductor's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, normal_form
from torch.nn import functional as F

from torchport.backend.interface import FreeableBuffer, InitContext
from torchport.backends.inductor import InductorBackend, container, source, torch_api
from torchport.core.errors import ExecutionError
from torchport.core.specs import CompileSpecs

backend = InductorBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())


def _bytes_of_library(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> str:
    blob = backend.preprocess(normal_form(fn, inputs)[0], CompileSpecs()).data
    return container.decode(blob).library.decode("latin1")


def test_most_graphs_need_a_small_runtime_only(caplog: pytest.LogCaptureFixture) -> None:
    """Attention, products of matrices, loops, writing where an index says: none reads Inductor's own headers."""
    q, index = torch.randn(1, 2, 8, 16), torch.tensor([1, 0])
    functions = [
        (lambda x: F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(8, 32) @ torch.ones(32, 3), [q]),
        (lambda x, i: x.index_add(0, i, x.exp()).cumsum(1), [torch.randn(2, 3), index]),
    ]
    with caplog.at_level("INFO", "torchport.compile"):
        for fn, inputs in functions:
            text = _bytes_of_library(fn, inputs)
            assert "torchport_runtime" in text
            assert "AOTInductorModelContainerUpdateConstantBuffer" not in text
    assert not [record for record in caplog.records if record.name == "torchport.compile"]


def test_a_wrapper_that_needs_more_gets_inductors_runtime(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strip = source.strip_wrapper

    def with_more(*args: Any, **kwargs: Any) -> source.Wrapper:
        made = strip(*args, **kwargs)
        return dataclasses.replace(made, text=f"torch::aot_inductor::ConstantMap unknown;\n{made.text}")

    monkeypatch.setattr(torch_api, "strip_wrapper", with_more)
    with caplog.at_level("INFO", "torchport.compile"):
        text = _bytes_of_library(lambda x: x + 1, [torch.randn(3)])
    assert "AOTInductorModelContainerUpdateConstantBuffer" in text
    assert "ConstantMap" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("precompiled", [True, False])
def test_where_the_small_runtime_does_not_compile_every_graph_gets_inductors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, precompiled: bool
) -> None:
    """As on a release of PyTorch whose headers are elsewhere."""
    known = torch_api.toolchain_in_force

    def other(precompile: bool) -> Any:
        return dataclasses.replace(known(precompile), own_header="#include <nowhere.h>\n", precompile=precompiled)

    monkeypatch.setattr(torch_api, "toolchain_in_force", other)
    with caplog.at_level("INFO", "torchport.compile"):
        for size in (3, 4):
            text = _bytes_of_library(lambda x: x + 1, [torch.randn(size)])
            assert "AOTInductorModelContainerUpdateConstantBuffer" in text
    assert "nowhere.h" in caplog.text


def test_what_a_small_runtime_says_of_an_error() -> None:
    """The message is the library's own; the next call is right again."""
    graph, given = normal_form(lambda x, i: x[i], [torch.arange(4.0), torch.tensor([9])])
    made = backend.preprocess(graph, CompileSpecs())
    handle = backend.init(FreeableBuffer(made.data), CompileSpecs(), InitContext(CPU))
    with pytest.raises(ExecutionError, match="index out of bounds"):
        handle.run([given[0], torch.tensor([9])])
    assert handle.run([given[0], torch.tensor([2])])[0].tolist() == [2.0]
    backend.destroy(handle)
