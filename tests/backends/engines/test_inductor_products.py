"""Large matrix products go to oneDNN where MKL keeps to AVX2, in whatever layout their factors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, normal_form

from torchport.backend.interface import BackendData, ExecutionContext, FreeableBuffer, InitContext, TensorData
from torchport.backends.inductor import InductorBackend, machine
from torchport.core.specs import CompileSpecs, TensorSpec

backend = InductorBackend()
pytestmark = [
    pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason()),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN"),
]
CALL = "aoti_torch_cpu__linear_pointwise"


@pytest.fixture
def such_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "avx512_without_mkl", lambda: True)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """How many products go to oneDNN, and the results of the compiled function's second run."""
    graph, _ = normal_form(fn, args)
    processed = backend.preprocess(graph, CompileSpecs())
    handle = backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(CPU))
    for _ in range(2):
        data: list[BackendData] = [TensorData(CPU, TensorSpec.of(arg), arg) for arg in args]
        results = backend.execute(handle, data, ExecutionContext(CPU))
    return backend.text(processed).count(f"{CALL}("), [backend.from_device(result) for result in results]


LARGE = (noise(130, 128), noise(128, 132), noise(132))
PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda x, w, b: x @ w,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "linear": lambda x, w, b: torch.nn.functional.linear(x, w.t(), b).relu(),
    "batches": lambda x, w, b: torch.nn.functional.linear(x.view(2, 65, 128), w.t(), b),
    "transposed": lambda x, w, b: (w.t() @ x.t()) * 2,
    "expressions": lambda x, w, b: (x + 1).t().contiguous().t() @ (w * 2) + b,
    "parts": lambda x, w, b: x[:, ::1][1:] @ w[:, 2:],
    "expanded": lambda x, w, b: b[:128].expand(130, 128) @ w,
    "with itself": lambda x, w, b: x @ x.t(),
    "two in a row": lambda x, w, b: (x @ w) @ w.t(),
    "gradients": lambda x, w, b: ((x @ w).t() @ x, (x @ w) @ w.t(), (x @ w).sum(0)),
}


@pytest.mark.usefixtures("such_a_processor")
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_products_are_those_of_the_cpu(name: str) -> None:
    expected = PRODUCTS[name](*LARGE)
    calls, results = compiled(PRODUCTS[name], *LARGE)
    assert calls > 0
    for mine, cpu in zip(results, expected if isinstance(expected, tuple) else [expected], strict=True):
        torch.testing.assert_close(mine, cpu, rtol=1e-4, atol=1e-3)


OTHERS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "small": (lambda x, w, b: x @ w, (noise(16, 64), noise(64, 64), noise(64))),
    "few rows": (lambda x, w, b: torch.addmm(b, x, w), (noise(2, 2048), noise(2048, 600), noise(600))),
    "double": (lambda x, w, b: x @ w, tuple(value.double() for value in LARGE)),
    "a scaled sum": (lambda x, w, b: torch.addmm(b, x, w, beta=2.0, alpha=0.5), LARGE),
    "a bias per row": (lambda x, w, b: torch.addmm(b[:130].unsqueeze(1), x, w), LARGE),
    "a full bias": (lambda x, w, b: torch.addmm(x @ w, x, w) - x @ w, (noise(4, 8), noise(8, 4), noise(4))),
    "nothing": (lambda x, w, b: x[:, :0] @ w[:0], LARGE),
}


@pytest.mark.usefixtures("such_a_processor")
@pytest.mark.parametrize("name", OTHERS)
def test_all_others_stay_where_they_are(name: str) -> None:
    fn, args = OTHERS[name]
    calls, (result,) = compiled(fn, *args)
    assert calls == 0
    torch.testing.assert_close(result, fn(*args), rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("such_a_processor")
def test_who_turns_onednn_off_does_not_get_it() -> None:
    # PyTorch's context manager warns of TF32 here, and its setter is refused once its test tools are imported.
    torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]
    try:
        calls, _ = compiled(PRODUCTS["mm"], *LARGE)
    finally:
        torch._C._set_mkldnn_enabled(True)  # type: ignore[attr-defined]
    assert calls == 0


def test_on_processors_that_mkl_knows_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "avx512_without_mkl", lambda: False)
    calls, _ = compiled(PRODUCTS["mm"], *LARGE)
    assert calls == 0


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [("GenuineIntel", "avx2 avx512f", False), ("AuthenticAMD", "avx2", False), ("AuthenticAMD", "avx2 avx512f", True)],
)
def test_which_processors_these_are(monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, expected: bool) -> None:
    text = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n"
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: text)
    for function in (machine._extensions, machine.avx512_without_mkl):
        function.cache_clear()
    try:
        assert machine.avx512_without_mkl() is expected
    finally:
        monkeypatch.undo()
        for function in (machine._extensions, machine.avx512_without_mkl):
            function.cache_clear()
