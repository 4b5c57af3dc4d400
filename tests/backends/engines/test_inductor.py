"""The ``inductor`` backend against the reference backend, and what it does with bad bytes, arguments and values."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, assert_same, aten, build, data_of, getitem, load, normal_form, run, storage, tensors_of
from torch.nn import functional as F

import torchport
from torchport.backend.interface import ExecutionContext, FreeableBuffer, InitContext, Processed, TensorData
from torchport.backends import inductor
from torchport.backends.inductor import InductorBackend, container, machine, source, torch_api
from torchport.backends.reference import ReferenceBackend
from torchport.core import releases
from torchport.core.errors import CompileError, ConfigError, ExecutionError
from torchport.core.specs import CompileSpecs, TensorSpec

backend = InductorBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())
Tensors = tuple[torch.Tensor, ...]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(*shape, generator=generator).to(dtype)


def check(fn: Callable[..., Any], *args: torch.Tensor, **tolerance: float) -> list[torch.Tensor]:
    graph, inputs = normal_form(fn, args)
    return assert_same(backend, graph, inputs, **tolerance)


@pytest.fixture(scope="module")
def add_one() -> Processed:
    """``x + 1`` for ``float32[2, 3]``, compiled."""
    graph, _ = normal_form(lambda x: x + 1, [rand(2, 3)])
    return backend.preprocess(graph, CompileSpecs())


def open_(processed: Processed) -> Any:
    return backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(CPU))


# -- values ------------------------------------------------------------------------------------------------------------


def test_numbers_for_complex_tensors() -> None:
    """Through a frontend, which decomposes what the backend says it has no way to call."""

    def fn(x: torch.Tensor, mask: torch.Tensor) -> Tensors:
        return x.masked_fill(mask, 2), torch.addcmul(x, x, x), torch.addcdiv(x, x, x + 3, value=2)

    args = rand(2, 3, dtype=torch.complex64), rand(2, 3) > 0
    compiled = torch.compile(fn, backend="torchport", options={"backend": "inductor"})
    torch.testing.assert_close(compiled(*args), fn(*args))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_numbers_beside_complex_tensors(shape: tuple[int, ...]) -> None:
    """Inductor's C++ calls PyTorch's kernels for most of these, and hands them tensors only."""

    def fn(x: torch.Tensor) -> Tensors:
        sums = x - 1, 1 - x, x + 1j, x - (1 + 1j), torch.sub(x, 1, alpha=2), torch.sub(x, x, alpha=3), x.real + 1j
        products = x / 2, 2 / x, x * 1j, x / 1j, torch.addcmul(x, x, x, value=2), torch.lerp(x, x * 2, 0.5)
        made = (
            torch.full_like(x, 2),
            torch.full_like(x, 1 - 1j),
            x**2,
            x**1j,
            x.real.int() + 1j,
            torch.where(x == 1j, x, 2),
        )
        index, mask = torch.zeros(1, dtype=torch.int64, device=x.device), x.real > 0
        filled = x.masked_fill(mask, 2), x.masked_fill(mask, 2j), x.reshape(-1).index_fill(0, index, 2 + 1j)
        return (*sums, *products, *made, *filled)

    x = torch.full(shape, 1 + 2j)
    for got, want in zip(fn(x.to(torchport.use("inductor"))), fn(x), strict=True):
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.diagonal_scatter(x, torch.diagonal(x, 1) + 1, 1),
        lambda x: x.scatter(0, torch.zeros(1, 3, dtype=torch.int64), x[1:2] * 2),
        lambda x: aten.index_put.default(x, [torch.tensor([0, 1]), torch.tensor([1, 2])], torch.diagonal(x, 1) + 1),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_read_between_a_write_and_one_by_a_mask(write: Callable[..., torch.Tensor], accumulate: bool) -> None:
    """Inductor itself gives the value from before both."""

    def fn(x: torch.Tensor) -> Tensors:
        written = write(x - 4)
        by_mask = aten.index_put.default(written, [written > 1], torch.tensor(7.0), accumulate)
        by_row = aten.index_put.default(written, [written[:, 0] > 1], torch.tensor([7.0]), accumulate)
        return torch.diagonal(written, 1) * 2, by_mask, by_row

    check(fn, torch.arange(9.0).reshape(3, 3))


def test_pointwise_views_and_strides() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor, e: torch.Tensor) -> Tensors:
        z = (x + y).tanh().t()
        same = (x + 1, x + 1, (x + 1).reshape(-1))
        return (
            z, z[1:3], (x * 2)[:, 1:3], x.sum(0), (x > 0).any(), x.reshape(2, 12).permute(1, 0) * 2, *same,
            x.clone(), t + 1, t.clone(), e * 2, x.sum(0, keepdim=True).expand(4, 6), (x + 2).unfold(1, 3, 1),
        )  # fmt: skip

    check(fn, rand(4, 6), rand(6), rand(6, 4).t(), rand(1, 6).expand(4, 6))


@pytest.mark.filterwarnings("ignore:var\\(\\). degrees of freedom:UserWarning")  # of nothing; 2.15 says so
def test_scalars_empty_tensors_and_dtypes() -> None:
    def fn(s: torch.Tensor, e: torch.Tensor, i: torch.Tensor, u: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Any:
        bits = (b & ~b, b.sum(), b ^ True, u + u, u >> 1, u // 3, i % 3, i // 3, -i, i.to(torch.bool))
        return s * 2 + 1, e.t() + 1, e.sum(), e.var(), d / 3, d.float(), torch.full((2,), 7), i.sum(), *bits

    ints = torch.arange(-5, 5)
    bytes_ = torch.tensor([250, 3, 7], dtype=torch.uint8)
    args = (torch.tensor(3.0), torch.empty(0, 3), ints, bytes_, torch.tensor([True, False]), rand(4).double())
    check(fn, *args)


def test_integers_to_the_power_of_integer_tensors() -> None:
    def fn(i: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> Tensors:
        return 2**i, (-3) ** i, 2.5**i, 3**u, 300**u, 2**b, torch.pow(2, u.sum(dtype=torch.uint8))

    check(fn, torch.arange(4), torch.tensor([0, 1, 5], dtype=torch.uint8), torch.tensor([True, False]))


def test_half_and_bfloat16() -> None:
    def fn(h: torch.Tensor, b: torch.Tensor) -> Tensors:
        return h @ h, h.softmax(-1), b @ b, F.layer_norm(b, [8]), b.sum(), h + 1

    check(fn, rand(8, 8, dtype=torch.float16), rand(8, 8, dtype=torch.bfloat16), rtol=2e-2, atol=2e-2)


def test_complex_numbers_go_through_the_proxy_executor() -> None:
    def fn(x: torch.Tensor) -> Tensors:
        return x * x.conj(), torch.view_as_real(x * 1), x.abs(), torch.fft.ifft(torch.fft.fft(x))

    check(fn, rand(4, dtype=torch.complex64))
    lazy = backend.to_device(torch.tensor([1 + 2j]).conj(), CPU)
    assert not tensors_of([lazy])[0].is_conj()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "order"), [(torch.complex64, lambda x: x.t()), (torch.complex128, lambda x: x.conj())]
)
def test_what_reads_a_complex_tensor_reads_it_after_a_write_to_a_part(dtype: torch.dtype, order: Any) -> None:
    def fn(x: torch.Tensor) -> Tensors:
        given = order(x)
        x = given * 1
        x[0] = 5 + 1j
        results = [x + 1]
        for part in (lambda: x[:, 1:], lambda: x.diagonal(), lambda: x.diagonal(1, -1, -2), lambda: x.t()[::2, -1]):
            written = part()
            written.mul_(2 - 1j)
            results += [x - 1, written, part() * 2]
        strided = x.as_strided((2, 2), (1, 4), 3)
        strided += 2j
        results += [x * x, strided]
        diagonal = torch.diagonal_scatter(given, given.diagonal() * 2)
        return *results, x, diagonal.diagonal(), diagonal - 1

    x = rand(4, 4, dtype=dtype)
    device = torchport.use("inductor")
    for got, expected in zip(fn(x.to(device)), fn(x), strict=True):
        torch.testing.assert_close(got.cpu(), expected.resolve_conj())


def test_int64_random_numbers_are_exact() -> None:
    def fn(counter: torch.Tensor, key: torch.Tensor) -> Tensors:
        x = counter * -7046029254386353131 + key
        x = (x ^ (x >> 32)) * -4658895280553007687
        x = x ^ ((x >> 29) & 0x7FFFFFFFF)
        x = (x * 0x1B03738712FAD5) ^ (x << 13)
        return x, (x & 0xFFFFFF).to(torch.float32) / 16777216.0, x % 7, x >> 11

    check(fn, torch.arange(1000) * 123456789123, torch.tensor(0x7EADBEEFCAFE1234))


def test_no_inputs_and_constants() -> None:
    graph = build(
        lambda g, _: [g.call_function(aten.full.default, ([2, 3], 1.5)), g.call_function(aten.arange.default, (5,))], []
    )
    assert_same(backend, graph, [])


def test_scatter_index_and_sort() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Tensors:
        return (
            x.scatter(1, i, s), x.scatter_add(1, i, s), x.scatter_reduce(1, i, s, "amax"), x.gather(1, i),
            x.masked_fill(x > 0, 1.0), x.index_put((i[:, 0],), s[:, :1].expand(-1, 5), accumulate=True),
            x.index_select(0, i[0]),
            *x.sort(-1), *x.topk(3, -1), x.cumsum(0), *x.cummax(0), x.argmax(), *x.kthvalue(2),
        )  # fmt: skip

    check(fn, rand(4, 5), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 3]]), rand(4, 2))


def test_convolution_and_batch_norm_backward() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Tensors:
        leaves = [t.detach().requires_grad_() for t in (x, w, g)]
        mean, var = mean.clone(), var.clone()
        y = F.conv2d(leaves[0], leaves[1], stride=2, padding=1)
        y = F.max_pool2d(F.batch_norm(y, mean, var, leaves[2], None, True).relu(), 2)
        y = F.interpolate(y, scale_factor=2, mode="bilinear")
        return y.detach(), mean, var, *torch.autograd.grad(y.square().sum(), leaves)

    check(fn, rand(2, 3, 17, 17), rand(8, 3, 3, 3), rand(8), rand(8), rand(8).abs(), rtol=1e-3, atol=1e-3)


def test_only_large_convolutions_get_channels_last() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).relu()

    def backward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(fn(x, w.requires_grad_()).sum(), w)[0]

    x, w = rand(1, 4, 40, 40), rand(4, 4, 3, 3)
    small = normal_form(fn, [x[..., :8, :8].contiguous(), w])[0]
    assert not torch_api.channels_last_pays(small)
    assert torch_api.channels_last_pays(normal_form(fn, [x, w])[0])
    assert not torch_api.channels_last_pays(normal_form(backward, [x, w])[0])
    check(fn, x, w)


def test_attention_embedding_and_layer_norm_backward() -> None:
    def fn(ids: torch.Tensor, table: torch.Tensor, q: torch.Tensor) -> Tensors:
        leaves = [t.detach().requires_grad_() for t in (table, q)]
        x = F.gelu(F.layer_norm(F.embedding(ids, leaves[0], padding_idx=0), [16]))
        k = x.view(2, 6, 2, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(leaves[1], k, k * 2, is_causal=True)
        return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)

    check(fn, torch.arange(12).view(2, 6) % 9, rand(9, 16), rand(2, 2, 6, 8), rtol=1e-3, atol=1e-4)


def test_an_implicit_write_leaves_the_input_alone() -> None:
    """``native_batch_norm`` updates its running statistics although its schema says it does not."""

    def nodes(graph: Any, inputs: list[Any]) -> list[Any]:
        norm = graph.call_function(aten.native_batch_norm.default, (*inputs, True, 0.1, 1e-5))
        return [graph.call_function(getitem, (norm, 0))]

    args = [rand(4, 3), rand(3), rand(3), rand(3), rand(3).abs()]
    graph = build(nodes, args)
    before = [arg.clone() for arg in args]
    (got,) = run(backend, graph, args)
    torch.testing.assert_close(args, before, rtol=0, atol=0)
    torch.testing.assert_close(got, run(ReferenceBackend(), graph, before)[0])


def test_donated_memory_strides_and_lifetime(add_one: Processed) -> None:
    handle = open_(add_one)
    context = ExecutionContext(CPU)
    x = rand(3, 2).t()  # not the strides it was compiled for
    (result,) = tensors_of(backend.execute(handle, data_of([x]), context))
    backend.destroy(handle)
    backend.destroy(handle)
    torch.testing.assert_close(result, x + 1)
    assert TensorSpec.of(result) == TensorSpec((2, 3), torch.float32, (3, 1))
    assert storage(result) != storage(x)


@pytest.mark.slow
def test_training_step() -> None:
    sizes = [(16, 32), (32,), (32, 4), (4,)]

    def step(x: torch.Tensor, target: torch.Tensor, count: torch.Tensor, *state: torch.Tensor) -> Tensors:
        weights = [w.detach().requires_grad_() for w in state[:4]]
        hidden = (x @ weights[0] + weights[1]).relu()
        loss = F.cross_entropy(hidden @ weights[2] + weights[3], target)
        results: list[torch.Tensor] = [loss.detach(), count + 1]
        correction = (1 - 0.999 ** (count + 1)).sqrt()
        for w, g, m, v in zip(weights, torch.autograd.grad(loss, weights), state[4:8], state[8:], strict=True):
            m, v = m.lerp(g, 0.1), v * 0.999 + g * g * 0.001
            results += [w.detach() * 0.999 - 1e-3 * m / (v.sqrt() / correction + 1e-8), m, v]
        return tuple(results)

    state = [rand(*size) for size in sizes] + [torch.zeros(size) for size in sizes * 2]
    check(step, rand(8, 16), torch.arange(8) % 4, torch.tensor(0.0), *state)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_wrong_arguments(add_one: Processed) -> None:
    handle = open_(add_one)
    context = ExecutionContext(CPU)
    for wrong, message in (
        ([], "takes 1 inputs, but got 0"),
        ([rand(3, 2)], r"input 0 should be float32\[2, 3\], but is float32\[3, 2\]"),
        ([rand(2, 3).double()], r"but is float64\[2, 3\]"),
    ):
        with pytest.raises(ExecutionError, match=message):
            backend.execute(handle, data_of(wrong), context)
    with pytest.raises(ExecutionError, match="not a TensorData with a value"):
        backend.execute(handle, [TensorData(CPU, TensorSpec.of(rand(2, 3)), None)], context)
    backend.destroy(handle)
    with pytest.raises(ExecutionError, match="destroyed"):
        backend.execute(handle, data_of([rand(2, 3)]), context)


SAYS_WHY = releases.version() >= (2, 13)
"""Whether a compiled library has a function that says why a call failed."""


@pytest.mark.parametrize(
    ("fn", "good", "bad", "message"),
    [
        # Large enough to run in parallel, where an uncaught C++ exception would end the process.
        (lambda i, w: F.embedding(i, w), torch.arange(16384).view(64, 256) % 100, 10**6, "index out of bounds"),
        pytest.param(
            *(lambda i, w: i // (i - 7), torch.arange(8, 16392), 7, "ZeroDivisionError"),
            marks=pytest.mark.skipif(not SAYS_WHY, reason="its code ends the process; `supports` refuses it"),
        ),
        (lambda i, w: w[0].scatter_add(0, i, i.float()), torch.arange(16) % 10, 64, "index 64 is out of bounds"),
    ],
    ids=["index", "division", "fallback"],
)
def test_bad_values_raise(fn: Callable[..., Any], good: torch.Tensor, bad: int, message: str) -> None:
    graph, args = normal_form(fn, [good, rand(100, 64)])
    handle, context = load(backend, graph)
    broken = args[0].clone()
    broken.view(-1)[5] = bad
    of_operator = message.startswith("index 64")  # what an operator of PyTorch's says, older releases do not tell
    said = message if SAYS_WHY or not of_operator else "does not say why"
    for _ in range(2):
        with pytest.raises(ExecutionError, match=said) as caught:
            backend.execute(handle, data_of([broken, *args[1:]]), context)
        assert "frame #" not in str(caught.value)
    backend.execute(handle, data_of(args), context)
    backend.destroy(handle)


def test_an_operator_of_the_proxy_executor_raises() -> None:
    graph, args = normal_form(lambda x: torch.linalg.cholesky_ex(x, check_errors=True)[0], [torch.eye(3)])
    handle, context = load(backend, graph)
    with pytest.raises(ExecutionError, match="not positive-definite" if SAYS_WHY else "does not say why"):
        backend.execute(handle, data_of([-args[0]]), context)
    backend.destroy(handle)


def test_damaged_bytes_and_other_machines(add_one: Processed, monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (b"", b"PK\3\4" + add_one.data[4:], add_one.data[:-1], add_one.data[:-9] + b"123456789"):
        with pytest.raises(CompileError, match="compile again"):
            open_(Processed(broken))
    monkeypatch.setattr(machine, "_extensions", lambda: ("sse2",))
    with pytest.raises(CompileError, match="this CPU lacks"):
        open_(add_one)


def test_options() -> None:
    graph, args = normal_form(lambda x: x.exp(), [rand(3)])
    specs = CompileSpecs({"inductor.options": '{"cpp.simdlen": 1, "max_fusion_size": 4}'})
    handle, context = load(backend, graph, specs)
    torch.testing.assert_close(tensors_of(backend.execute(handle, data_of(args), context))[0], args[0].exp())
    for text, message in (("{", "not JSON"), ("[]", "JSON object"), ('{"nonsense": 1}', "nonsense")):
        with pytest.raises(ConfigError, match=message):
            backend.preprocess(graph, CompileSpecs({"inductor.options": text}))


def test_a_failing_compiler_is_a_compile_error() -> None:
    graph, _ = normal_form(lambda x: x.sin(), [rand(3)])
    specs = CompileSpecs({"inductor.options": '{"cpp.cxx": [null, "false"]}'})
    with pytest.raises(CompileError, match=r"C\+\+ compiler|Inductor cannot"):
        backend.preprocess(graph, specs)


def test_what_is_supported() -> None:
    def nodes(graph: Any, inputs: list[Any]) -> list[Any]:
        return [graph.call_function(aten.sin.default, (inputs[0],))]

    graph = build(nodes, [rand(3)])
    sin = next(node for node in graph.graph.nodes if node.op == "call_function")
    assert backend.supports(sin)
    sin.target = aten.nonzero.default
    assert "depends on values" in backend.supports(sin).reason
    sin.target, sin.meta["val"] = aten.sin.default, torch.eye(2).to_sparse()
    assert "dense" in backend.supports(sin).reason


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.is_available()
    assert backend.unavailable_reason() == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not backend.is_available()
    assert "no-such-compiler" in backend.unavailable_reason()


# -- bytes, text, threads and processes --------------------------------------------------------------------------------


def test_text_and_container(add_one: Processed) -> None:
    assert "cpp_fused" in backend.text(add_one)
    artifact = container.decode(add_one.data)
    assert container.encode(artifact) == add_one.data
    artifact.source = b""
    assert "too long to keep" in backend.text(Processed(container.encode(artifact)))


def test_threads(add_one: Processed) -> None:
    handles = [open_(add_one) for _ in range(4)]
    graph, args = normal_form(lambda x: x.cos() * 2, [rand(5)])
    context = ExecutionContext(CPU)
    failures: list[BaseException] = []

    def work(handle: Any) -> None:
        try:
            x = rand(2, 3)
            for _ in range(20):
                torch.testing.assert_close(tensors_of(backend.execute(handle, data_of([x]), context))[0], x + 1)
            assert_same(backend, graph, args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for handle in handles:
        backend.destroy(handle)


def test_another_process_loads_it_without_inductor(add_one: Processed, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(add_one.data)
    program = """
import sys, torch
from torchport.backend.interface import *
from torchport.backends.inductor import InductorBackend
from torchport.core.specs import CompileSpecs, TensorSpec
cpu, backend, x = BackendDevice("cpu"), InductorBackend(), torch.ones(2, 3)
handle = backend.init(FreeableBuffer(open(sys.argv[1], "rb").read()), CompileSpecs(), InitContext(cpu))
print(backend.execute(handle, [TensorData(cpu, TensorSpec.of(x), x)], ExecutionContext(cpu))[0].tensor.sum().item())
print("torch._inductor" in sys.modules)
"""
    root = str(Path(inductor.__file__).parents[3])
    environment = {"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", program, str(tmp_path / "blob")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["12.0", "False"], done.stderr


# -- edits of the generated code ---------------------------------------------------------------------------------------

KERNEL = """#include <x.h>
extern "C"  void  k(float* p)
{
    #pragma omp parallel num_threads(8)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for collapse(2)
            for(int64_t x0=0; x0<2; x0+=1)
            {
                for(int64_t x1=0; x1<2; x1+=1)
                {
                    p[x0 + x1] = 0;
                }
            }
        }
    }
}
"""


def test_kernels_are_guarded() -> None:
    text = source.guard_kernels(KERNEL, 8)
    assert "num_threads(std::min<int>(8, omp_get_max_threads()))" in text
    inner = text.index("for(int64_t x1")
    assert inner < text.index("try {") < text.index("p[x0 + x1]") < text.index("catch (...)")
    assert text.rstrip().endswith("std::rethrow_exception(torchport_error);\n}")
    unknown = KERNEL.replace("for(int64_t x1=0; x1<2; x1+=1)", "while(go)")
    assert "#pragma omp" not in source.guard_kernels(unknown, 8)


def test_kernels_are_split() -> None:
    text = KERNEL + "\n#include <x.h>\n" + KERNEL.split("\n", 1)[1].replace("k(float", "other(float")
    first, second = source.split_kernels(text, 2)
    assert first.count('extern "C"') == second.count('extern "C"') == 1
    assert first.startswith("#include <x.h>")
    assert source.split_kernels(text, 1) == [text]
    assert source.split_kernels("static int x;\n" + text, 2) == ["static int x;\n" + text]


def test_an_operator_that_inductor_gets_wrong_runs_on_the_host() -> None:
    torchport.use("inductor")
    x, samples = torch.randn(2, 4, 16, 7, 5), torch.rand(2, 4, 3)

    def pooled(to: str) -> torch.Tensor:
        return F.fractional_max_pool3d(x.to(to), (4, 2, 3), output_size=(10, 3, 2), _random_samples=samples.to(to))

    torch.testing.assert_close(pooled("port").cpu(), pooled("cpu"))


@pytest.mark.parametrize("arguments", [(6, 3, 2, True), ((3, 3), (1, 1), (1,), True, False, 2), (3, 2, 1, True)])
def test_gradients_of_average_pooling(arguments: Any) -> None:
    torchport.use("inductor")
    x = torch.randn(1, 3, 9, 9)

    def gradient(to: str) -> torch.Tensor:
        leaf = x.to(to).requires_grad_()
        out = F.avg_pool2d(leaf, *arguments)
        (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape).to(to)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient("port").cpu(), gradient("cpu"))


def test_indexing_nothing_with_a_mask() -> None:
    torchport.use("inductor")
    x, mask = torch.empty(0, 5), torch.zeros(2, 2, dtype=torch.bool)
    indices = [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)]
    there = torch.ops.aten._unsafe_masked_index(x.to("port"), mask.to("port"), [i.to("port") for i in indices], 7.0)
    assert there.tolist() == [[7.0, 7.0], [7.0, 7.0]]


@pytest.mark.parametrize(("size", "functions"), [(64, 1), (512, 3)])
def test_large_parameters_are_updated_one_at_a_time(size: int, functions: int) -> None:
    """All results of a function are allocated before it runs: in one, all old and new values would be there at once."""

    def update(rate: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        momenta = [m * rate[0] + g for g, m in zip(values[1::3], values[2::3], strict=True)]
        return *momenta, *(p - rate[1] * m - rate[2] * p for p, m in zip(values[::3], momenta, strict=True))

    inputs = [torch.rand(3), *[torch.rand(size, size) for _ in range(9)]]
    graph, given = normal_form(update, inputs)
    backend = InductorBackend()
    text = backend.text(backend.preprocess(graph, CompileSpecs()))
    assert len(re.findall(r"^ +cpp_fused_\w+\(", text, re.MULTILINE)) == functions
    for ours, theirs in zip(run(backend, graph, given), update(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, c: (x + 1j, x * 1j, c * (2 - 1j)),
        lambda x, c: (1j - x, x / 1j, x.long() * 1j),
        lambda x, c: (c == 1j, c**1j, 1j**c),
        lambda x, c: (torch.where(x > 0, 1j, x), c.masked_fill(x > 0, 1j), torch.full_like(c, 2j)),
        lambda x, c: (torch._foreach_add([x, c], 1j)[1], c.clone().fill_(1j)),
    ],
)
def test_complex_numbers_on_the_device(fn: Any) -> None:
    """What compiled code cannot be given goes to the host."""
    args = rand(3), rand(3).to(torch.complex64) * (1 + 2j)
    device = torchport.use("inductor")
    for got, expected in zip(fn(*(arg.to(device) for arg in args)), fn(*args), strict=True):
        torch.testing.assert_close(got.cpu(), expected)


def test_a_write_to_all_of_a_tensor_by_a_view() -> None:
    """Both results are one buffer of the compiled code's."""
    device = torchport.use("inductor")
    for step in range(3):
        x = (torch.arange(12.0).reshape(3, 4) + step).to(device)
        view = x[:]
        view.add_(1)
        torchport.sync()
        expected = torch.arange(12.0).reshape(3, 4) + step + 1
        torch.testing.assert_close(x.cpu(), expected)
        torch.testing.assert_close(view.cpu(), expected)
        x.mul_(2)
        torch.testing.assert_close(view.cpu(), expected * 2)


def test_settings_that_are_as_they_were_have_not_been_changed() -> None:
    from torch._inductor import config as settings

    from torchport.backends.inductor.torch_api import changed_settings

    before = dict(changed_settings())
    with settings.patch(max_autotune=True, epilogue_fusion=False):
        assert {**before, "max_autotune": True, "epilogue_fusion": False} == changed_settings()
    assert changed_settings() == before, "a key that depends on what was compiled before is another in the next process"
