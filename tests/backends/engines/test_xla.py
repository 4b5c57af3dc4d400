"""The ``xla`` backend: values, bytes, settings, donation, memory that is shared, errors, and life without JAX."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_graphs import aten, build, normal_form, run
from torch.nn import functional as F

import torchport
from torchport.backend.interface import (
    BackendData,
    BackendDevice,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    Processed,
)
from torchport.backends.reference import ReferenceBackend
from torchport.backends.xla import XlaBackend, container
from torchport.backends.xla.settings import Settings
from torchport.core.errors import BackendUnavailable, CompileError, ConfigError, ExecutionError
from torchport.core.specs import CompileSpecs, TensorSpec

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())
DEVICE = backend.devices()[0] if backend.is_available() else BackendDevice("cpu", 0)
"""JAX's first: what these tests run on."""
on_the_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="an accelerator shares no memory with the host")


def _no_value(like: torch.Tensor) -> Any:
    """A placeholder for a value such as this tensor."""
    from torchport.backends.xla.engine import XlaData

    return XlaData(DEVICE, TensorSpec.of(like), None)


Tensors = tuple[torch.Tensor, ...]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(*shape, generator=generator).to(dtype)


def put(tensors: Sequence[torch.Tensor]) -> list[BackendData]:
    return [backend.to_device(tensor.clone(), DEVICE) for tensor in tensors]


def get(results: Sequence[BackendData]) -> list[torch.Tensor]:
    return [backend.from_device(data) for data in results]


def open_(processed: Processed, specs: CompileSpecs | None = None) -> Any:
    return backend.init(FreeableBuffer(processed.data), specs or CompileSpecs(), InitContext(DEVICE))


def compute(graph: Any, args: Sequence[torch.Tensor], specs: CompileSpecs | None = None) -> list[torch.Tensor]:
    handle = open_(backend.preprocess(graph, specs or CompileSpecs()), specs)
    results = get(backend.execute(handle, put(args), ExecutionContext(DEVICE)))
    backend.destroy(handle)
    return results


def check(fn: Callable[..., Any], *args: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """The backend's results are the reference's, in value, dtype and shape."""
    graph, inputs = normal_form(fn, args)
    expected = run(ReferenceBackend(), graph, [arg.clone() for arg in inputs])
    for got, want in zip(compute(graph, inputs), expected, strict=True):
        exact = not (want.is_floating_point() or want.is_complex())
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(got, want, equal_nan=True, **tolerance)


@pytest.fixture(scope="module")
def add_one() -> Processed:
    """``x + 1`` for ``float32[8, 8]``, lowered."""
    graph, _ = normal_form(lambda x: x + 1, [rand(8, 8)])
    return backend.preprocess(graph, CompileSpecs())


# -- values -----------------------------------------------------------------------------------------
def test_views_scalars_empty_tensors_and_dtypes() -> None:
    def fn(x: torch.Tensor, s: torch.Tensor, e: torch.Tensor, i: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> Any:
        bits = (b & ~b, b.sum(), b ^ True, u + u, u >> 1, u // 3, i % 3, i // 3, -i, i.to(torch.bool), i << 61)
        views = (x.t()[1:3], x[:, 1:3] * 2, x.unfold(1, 3, 1) + 1, x.as_strided((3, 2), (1, 6)) * 2, x.diagonal() + 0)
        return s * 2 + 1, e.t() + 1, e.sum(), x / 3, x.double(), torch.full((2,), 7), i.sum(), *bits, *views

    bytes_ = torch.tensor([250, 3, 7], dtype=torch.uint8)
    flags = torch.tensor([True, False])
    check(fn, rand(4, 6), torch.tensor(3.0), torch.empty(0, 3), torch.arange(-5, 5), bytes_, flags)


def test_inputs_with_gaps_and_in_other_orders() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
        return x @ y, z + 1, y.as_strided((4,), (2,)), x.reshape(-1) * 2

    check(fn, rand(8, 12)[::2, ::2], rand(4, 6).t(), rand(1, 6).expand(4, 6))


def test_half_precision_and_complex_numbers() -> None:
    def fn(h: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Tensors:
        return h @ h, h.softmax(-1), b @ b, F.layer_norm(b, [8]), b.sum(), h + 1, c * c.conj(), c.abs(), c @ c

    args = (rand(8, 8, dtype=torch.float16), rand(8, 8, dtype=torch.bfloat16), rand(4, 4, dtype=torch.complex64))
    check(fn, *args, rtol=2e-2, atol=2e-2)


def test_bfloat16_rounds_after_every_operator() -> None:
    """Kept in float32 between the two, the sum would be 256 + 1 + 1 = 258."""
    graph, args = normal_form(lambda x: x + 1 + 1, [torch.tensor([256.0] * 64, dtype=torch.bfloat16)])
    (result,) = compute(graph, args)
    assert result.tolist() == (args[0] + 1 + 1).tolist() == [256.0] * 64


def test_64_bit_integers_are_exact() -> None:
    def fn(counter: torch.Tensor, key: torch.Tensor) -> Tensors:
        x = counter * -7046029254386353131 + key
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        return x, (x >> 40) & 0xFFFFFF, x % 7, x >> 63, x << 3

    check(fn, torch.arange(1000) * 123456789123, torch.tensor(0x7EADBEEFCAFE1234))


def test_random_numbers_are_the_reference_backends() -> None:

    drawn: list[list[torch.Tensor]] = []
    for name in ("reference", "xla"):
        torchport.use(name)
        torch.manual_seed(7)
        x = torch.rand(40, device="port")
        drawn.append(
            [x.cpu(), torch.randint(0, 1 << 40, (40,), device="port").cpu(), torch.randperm(40, device="port").cpu()]
        )
        drawn[-1].append(F.dropout(torch.ones(64, device="port"), 0.5).cpu())
    for ours, theirs in zip(*drawn, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_a_convolution_net_with_its_gradients() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, t: torch.Tensor) -> Tensors:
        leaves = [v.detach().requires_grad_() for v in (x, w, g, t)]
        y = F.conv2d(leaves[0], leaves[1], stride=2, padding=1)
        y = F.max_pool2d(F.batch_norm(y, None, None, leaves[2], None, True).relu(), 2)
        y = F.conv_transpose2d(y, leaves[3], stride=2, groups=2, output_padding=1)
        return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)

    check(fn, rand(2, 3, 17, 17), rand(8, 3, 3, 3), rand(8), rand(8, 2, 3, 3), rtol=1e-3, atol=1e-3)


def test_a_result_that_is_an_argument_or_another_result_is_not_computed_twice() -> None:
    graph, args = normal_form(lambda x: (x + 1, (x + 1).clone(), x.clone()), [rand(8, 8)])
    handle = open_(backend.preprocess(graph, CompileSpecs()))
    data = put(args)
    first, second, third = backend.execute(handle, data, ExecutionContext(DEVICE))
    assert third.handle is data[0].handle
    assert first is not second
    for got, want in zip(get([first, second, third]), (args[0] + 1, args[0] + 1, args[0]), strict=True):
        torch.testing.assert_close(got, want)
    backend.destroy(handle)


def test_branches_and_loops_stay_in_the_graph() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
            y = torch.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos() * 2,), (x,))[0]
            start = (torch.zeros((), dtype=torch.int64), x)
            return while_loop(lambda i, z: i < n, lambda i, z: (i + 1, z * 1.5 + y), start)

    model = Model()
    exported = torch.export.export(model, (rand(3, 4), torch.tensor(3)))
    handle = open_(backend.preprocess(exported.graph_module, CompileSpecs()))
    for sign, n in ((1, 3), (-1, 5), (1, 0)):
        x = rand(3, 4).abs() * sign
        got = get(backend.execute(handle, put([x, torch.tensor(n)]), ExecutionContext(DEVICE)))
        for one, other in zip(got, model(x, torch.tensor(n)), strict=True):
            torch.testing.assert_close(one, other)
    backend.destroy(handle)


def test_a_graph_without_inputs() -> None:
    graph = build(
        lambda g, _: [g.call_function(aten.full.default, ([2, 3], 1.5)), g.call_function(aten.arange.default, (5,))], []
    )
    full, counted = compute(graph, [])
    assert full.tolist() == [[1.5] * 3] * 2
    assert counted.tolist() == [0, 1, 2, 3, 4]


# -- memory -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (64, 2)], ids=str)
def test_values_come_back_as_they_went(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    data = backend.to_device(tensor, DEVICE)
    result = backend.from_device(data)
    assert data.spec == TensorSpec.of(tensor)
    torch.testing.assert_close(result, tensor, rtol=0, atol=0)


def test_what_is_fetched_has_memory_of_its_own() -> None:
    """As from a GPU, where JAX gives a copy, and in some releases one that says nobody may write to it."""
    import jax.numpy as jnp
    import numpy as np

    from torchport.backends.xla import values

    array = jnp.arange(4.0)
    assert values._fetched(array).flags.writeable
    assert values._fetched(array).tolist() == [0, 1, 2, 3]

    class OnAGpu:
        def __init__(self, locked: bool) -> None:
            self.locked = locked

        def devices(self) -> set[int]:
            return {0}

        def _single_device_array_to_np_array_did_copy(self) -> tuple[Any, bool]:
            fetched = np.arange(4.0)
            fetched.flags.writeable = not self.locked
            return fetched, True

    for locked in (False, True):
        found = values._fetched(OnAGpu(locked))
        assert found.flags.writeable
        assert found.tolist() == [0, 1, 2, 3]


@on_the_cpu
def test_the_cpu_shares_memory_both_ways() -> None:
    tensor = rand(64, 64)
    data = backend.to_device(tensor, DEVICE)
    assert backend.from_device(data).data_ptr() == tensor.data_ptr()


def test_nobody_sees_a_write_through_shared_memory() -> None:

    host = rand(64, 64)
    torchport.use("xla")
    there = host.to("port")
    before = host.clone()
    host.zero_()
    back = there.cpu()
    torch.testing.assert_close(back, before)
    back.fill_(7)
    torch.testing.assert_close(there.cpu(), before)
    there += 1
    torch.testing.assert_close(there.cpu(), before + 1)
    assert back.eq(7).all()


def test_what_is_given_away_is_used_and_gone(add_one: Processed) -> None:
    handle = open_(add_one)
    (held,) = put([rand(8, 8)])
    seen = backend.from_device(held).clone()
    giving = ExecutionContext(DEVICE, donated=frozenset({0}))
    (kept,) = backend.execute(handle, [held], ExecutionContext(DEVICE))
    (given,) = backend.execute(handle, [held], ExecutionContext(DEVICE))
    backend.execute(handle, [kept], giving)  # offered once: nothing is compiled for it yet
    torch.testing.assert_close(backend.from_device(kept), seen + 1)
    (result,) = backend.execute(handle, [given], giving)
    torch.testing.assert_close(backend.from_device(result), seen + 2)
    torch.testing.assert_close(backend.from_device(held), seen)
    with pytest.raises((ExecutionError, RuntimeError), match=r"deleted|donated"):
        backend.execute(handle, [given], ExecutionContext(DEVICE))
    backend.destroy(handle)


def test_only_memory_that_a_result_can_have_is_given_away() -> None:
    """JAX warns of other memory, which is an error in tests."""
    args = [rand(8, 8), rand(5), rand(8, 8)]
    handle = open_(backend.preprocess(normal_form(lambda x, y, z: x * y.sum() + z, args)[0], CompileSpecs()))
    for _ in range(3):
        data = put(args)
        giving = ExecutionContext(DEVICE, donated=frozenset({0, 1, 2}))
        (result,) = get(backend.execute(handle, data, giving))
        torch.testing.assert_close(result, args[0] * args[1].sum() + args[2])
    assert [sorted(offered) for offered in handle._donating] == [[0]]
    torch.testing.assert_close(get(data[1:]), args[1:])
    backend.destroy(handle)


def test_a_tensor_that_shares_memory_survives_the_giving_away(add_one: Processed) -> None:
    handle = open_(add_one)
    (computed,) = backend.execute(handle, put([rand(8, 8)]), ExecutionContext(DEVICE))
    shared = backend.from_device(computed)
    before = shared.clone()
    for _ in range(3):
        try:
            (result,) = backend.execute(handle, [computed], ExecutionContext(DEVICE, donated=frozenset({0})))
            torch.testing.assert_close(backend.from_device(result), before + 1)
        except ExecutionError as error:
            assert "deleted" in str(error)  # noqa: PT017
        torch.testing.assert_close(shared, before)
    backend.destroy(handle)


def test_an_array_that_two_values_hold_is_not_given_away() -> None:
    graph, args = normal_form(lambda x: ((y := x + 1), y.clone(), x.clone()), [rand(8, 8)])
    handle = open_(backend.preprocess(graph, CompileSpecs()))
    double, (data,) = open_(backend.preprocess(normal_form(lambda x: x * 2, args)[0], CompileSpecs())), put(args)
    results = backend.execute(handle, [data], ExecutionContext(DEVICE))
    for _ in range(3):
        for one in (*results, data):
            backend.execute(double, [one], ExecutionContext(DEVICE, donated=frozenset({0})))
    for got, want in zip(get([*results, data]), (args[0] + 1, args[0] + 1, args[0], args[0]), strict=True):
        torch.testing.assert_close(got, want)


def test_placeholders() -> None:
    data = _no_value(rand(2))
    assert not data.has_value
    with pytest.raises(ExecutionError, match="not an XlaData with a value"):
        backend.from_device(data)
    data.assign(put([rand(2)])[0])
    assert data.has_value
    torch.testing.assert_close(backend.from_device(data), rand(2))


def test_memory_and_waiting() -> None:
    info = backend.memory_info(DEVICE)
    assert 0 < info["free"] <= info["total"]
    backend.synchronize(DEVICE)


def test_a_gpus_platform_has_the_name_that_jax_exports_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of a GPU say ``gpu``, and modules are exported for ``cuda`` or ``rocm``."""
    import jax
    from jax import export

    from torchport.backends.xla import jax_api

    class Gpu:
        platform = "gpu"

    monkeypatch.setattr(jax, "devices", lambda: [Gpu(), Gpu()])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(export, "default_export_platform", lambda: "cuda")
    assert jax_api.platforms() == ["cuda"]
    module = jax_api.export_function(lambda x: (x + 1,), [((2,), "float32")], Settings())
    assert export.deserialize(bytearray(module)).platforms == ("cuda",)


# -- settings and bytes -------------------------------------------------------------------------------
def test_settings_are_checked(add_one: Processed) -> None:
    graph, args = normal_form(lambda x: x @ x, [rand(4, 4)])
    specs = CompileSpecs({"xla.matmul_precision": "default", "xla.options": '{"xla_cpu_enable_fast_math": false}'})
    torch.testing.assert_close(compute(graph, args, specs)[0], args[0] @ args[0])
    for key, value, message in (
        ("xla.matmul_precision", "exact", "one of highest, high, default"),
        ("xla.options", "{", "not JSON"),
        ("xla.options", "[]", "JSON object"),
        ("xla.precision", "high", "no compile spec 'xla.precision'"),
    ):
        with pytest.raises(ConfigError, match=message):
            backend.preprocess(graph, CompileSpecs({key: value}))


def test_text_shows_stablehlo_in_full_precision() -> None:
    graph, _ = normal_form(lambda x: x @ x, [rand(4, 4)])
    text = backend.text(backend.preprocess(graph, CompileSpecs()))
    assert "stablehlo.dot_general" in text
    assert "HIGHEST" in text


def test_bytes_of_other_makers_and_damaged_ones_are_refused(add_one: Processed) -> None:
    for broken in (
        b"",
        b"PK\3\4" + add_one.data[4:],
        add_one.data[:-1],
        add_one.data[: (half := len(add_one.data) // 2)] + bytes([add_one.data[half] ^ 1]) + add_one.data[half + 1 :],
    ):
        with pytest.raises(CompileError, match="compile again"):
            open_(Processed(broken))
    artifact = container.decode(add_one.data)
    assert container.encode(artifact) == add_one.data
    artifact.module, artifact.executable = b"nonsense", b""
    with pytest.raises(CompileError, match="cannot read the StableHLO"):
        open_(Processed(container.encode(artifact)))


def test_another_process_runs_the_bytes(add_one: Processed, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(add_one.data)
    program = """
import sys, torch
from torchport.backend.interface import *
from torchport.backends.xla import XlaBackend
from torchport.core.specs import CompileSpecs
backend = XlaBackend()
device = backend.devices()[0]
handle = backend.init(FreeableBuffer(open(sys.argv[1], "rb").read()), CompileSpecs(), InitContext(device))
x = backend.to_device(torch.ones(8, 8), device)
print(backend.from_device(backend.execute(handle, [x], ExecutionContext(device))[0]).sum().item())
assert "torchport.backends.xla.ops" not in sys.modules
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "blob")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "128.0", done.stderr


def test_the_stored_executable_is_used_where_it_fits(add_one: Processed, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.backends.xla import executables, jax_api, program

    program._fresh.clear()
    compiled: list[Any] = []
    compile_module = jax_api.compile_module

    def counted(*args: Any) -> Any:
        compiled.append(args)
        return compile_module(*args)

    monkeypatch.setattr(jax_api, "compile_module", counted)
    artifact = container.decode(add_one.data)
    assert artifact.executable
    x = rand(8, 8)
    for change, compiles in (
        (lambda a: None, 0),
        (lambda a: setattr(a, "executable", b"nonsense"), 1),
        (lambda a: a.made_by["executable"].update(processor="another"), 1),
        (lambda a: setattr(a, "executable", b""), 1),
    ):
        compiled.clear()
        artifact = container.decode(add_one.data)
        change(artifact)
        handle = open_(Processed(container.encode(artifact)))
        torch.testing.assert_close(get(backend.execute(handle, put([x]), ExecutionContext(DEVICE)))[0], x + 1)
        assert len(compiled) == compiles
        with pytest.raises(ExecutionError, match=r"but is float32\[9, 8\]"):
            backend.execute(handle, put([rand(9, 8)]), ExecutionContext(DEVICE))
    assert executables.load(b"", [], [], program.jax_device(DEVICE)) is None


def test_the_users_own_jax_is_left_alone(add_one: Processed) -> None:
    import jax
    import jax.numpy as jnp

    open_(add_one)
    assert not jax.config.jax_enable_x64
    assert jax.config.jax_default_matmul_precision is None
    assert jnp.arange(3).dtype == jnp.int32
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        check(lambda x, y: (x + y, (x > 0) * y), rand(4, 6), rand(6).double())


def test_threads(add_one: Processed) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            handle = open_(add_one)
            for number in range(10):
                x = torch.full((8, 8), float(number))
                (result,) = get(backend.execute(handle, put([x]), ExecutionContext(DEVICE)))
                torch.testing.assert_close(result, x + 1)
            backend.destroy(handle)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- errors -------------------------------------------------------------------------------------------
def test_wrong_arguments_are_named(add_one: Processed) -> None:
    handle = open_(add_one)
    context = ExecutionContext(DEVICE)
    for wrong, message in (
        ([], "takes 1 inputs, but got 0"),
        ([rand(9, 8)], r"input 0 should be float32\[8, 8\], but is float32\[9, 8\]"),
        ([rand(8, 8).double()], r"but is float64\[8, 8\]"),
    ):
        with pytest.raises(ExecutionError, match=message):
            backend.execute(handle, put(wrong), context)
    with pytest.raises(ExecutionError, match="not an XlaData with a value"):
        backend.execute(handle, [_no_value(rand(8, 8))], context)
    backend.destroy(handle)
    backend.destroy(handle)
    with pytest.raises(ExecutionError, match="destroyed"):
        backend.execute(handle, put([rand(8, 8)]), context)


def test_an_index_that_is_out_of_range_reads_nan_and_writes_nothing() -> None:
    graph, args = normal_form(
        lambda w, i: (F.embedding(i, w), w.index_put((i,), w[0])), [rand(4, 3), torch.tensor([0, 1])]
    )
    args[1][1] = 9
    read, written = compute(graph, args)
    torch.testing.assert_close(read[0], args[0][0])
    assert read[1].isnan().all()
    torch.testing.assert_close(written[1:], args[0][1:])


def test_devices_and_dtypes_that_there_are_not() -> None:
    assert DEVICE in backend.devices()
    with pytest.raises(BackendUnavailable, match="JAX has no device tpu:3"):
        backend.to_device(rand(2), BackendDevice("tpu", 3))
    with pytest.raises(ExecutionError, match=r"no torch.float8_e5m2"):
        backend.to_device(torch.zeros(2, dtype=torch.float8_e5m2), DEVICE)


def test_what_is_supported() -> None:
    def nodes(graph: Any, inputs: list[Any]) -> list[Any]:
        return [graph.call_function(aten.sin.default, (inputs[0],))]

    graph = build(nodes, [rand(3)])
    sin = next(node for node in graph.graph.nodes if node.op == "call_function")
    assert backend.supports(sin)
    sin.target = aten.nonzero.default
    assert "no lowering" in backend.supports(sin).reason
    sin.target, sin.meta["val"] = aten.sin.default, torch.eye(2).to_sparse()
    assert "dense" in backend.supports(sin).reason


@on_the_cpu
def test_what_depends_on_values_runs_outside_the_graph() -> None:

    torchport.use("xla")
    torchport.metrics.reset()
    x = torch.tensor([0.0, 2.0, 0.0, 3.0], device="port")
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert (x * 2)[x > 0].tolist() == [4.0, 6.0]
    assert torchport.metrics.counter("Fallback") == 0
    assert torchport.metrics.counter("KernelCall") == 2


def test_a_decomposition_that_writes_into_its_lists() -> None:

    torchport.use("xla")
    torchport.metrics.reset()
    here = rand(2, 3, 8).requires_grad_()
    there = here.detach().to("port").requires_grad_()
    for x in (here, there):
        F.pad(x, (2, 2), mode="reflect").square().sum().backward()
    assert here.grad is not None
    assert there.grad is not None
    torch.testing.assert_close(there.grad.cpu(), here.grad)
    assert torchport.metrics.counter("Fallback") == 0


def test_without_jax_the_rest_works_and_the_message_says_what_to_install() -> None:
    program = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "jaxlib"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import torch, torchport
row = next(row for row in torchport.list_backends() if row.name == "xla")
print(row.available, row.reason)
torchport.use("reference")
print(torch.ones(3, device="port").sum().item())
try:
    torchport.use("xla")
except torchport.BackendUnavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert lines[0].startswith("False")
    assert lines[1] == "3.0"
    assert all(
        "jax, jaxlib not found; install what it needs with: pip install 'torchport[xla]'" in line for line in lines[::2]
    )
