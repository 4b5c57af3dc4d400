"""OpenVINO's translation, operator by operator, against PyTorch's CPU; as a delegate and on the lazy device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchport
from torchport import aot, runtime
from torchport.backend.interface import BackendDevice, FreeableBuffer, InitContext
from torchport.backends.openvino.steady import SteadyArguments
from torchport.core.errors import CompileError, ConfigError
from torchport.core.specs import CompileSpecs

pytestmark = pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")

F = nn.functional
A, B = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
M, IMAGE = torch.randn(4, 5), torch.randn(2, 4, 9, 9)
MASK = A > 0
WIDE = torch.tensor([5, -7, (1 << 40) + 3, -(1 << 35)])
BN = nn.BatchNorm2d(4).eval()
nn.init.uniform_(BN.running_var, 0.5, 2.0)  # type: ignore[arg-type]
nn.init.normal_(BN.running_mean)  # type: ignore[arg-type]

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "add": (lambda a, b: a + b * 2 - 1.5, (A, B)),
    "broadcast": (lambda a, b: a / (b.abs() + 1), (A, B[:, :1])),
    "rsub": (lambda a: 2 - a, (A,)),
    "pow": (lambda a: a.abs() ** 1.5 + a**2, (A,)),
    "unary": (lambda a: a.exp().log() + a.tanh() + a.sigmoid() + a.abs().sqrt() + a.sin() + a.cos() + a.erf(), (A,)),
    "rounding": (lambda a: (a * 3).floor() + (a * 3).ceil(), (A,)),
    "rsqrt": (lambda a: (a.abs() + 1).rsqrt() + (a.abs() + 1).reciprocal(), (A,)),
    "gelu": (lambda a: F.gelu(a) + F.gelu(a, approximate="tanh") + F.silu(a) + F.relu(a), (A,)),
    "clamp": (lambda a: a.clamp(-0.5, 0.5) + a.clamp(min=0.1) + F.hardtanh(a, -0.2, 0.3), (A,)),
    "compare": (lambda a, b: torch.where(a > b, a, b) + torch.where(a <= 0.2, a, -a), (A, B)),
    "equal": (lambda a: (a == a).to(torch.float32) + (a != 0).to(torch.float32), (A,)),
    "masked_fill": (lambda a, m: a.masked_fill(m, -7.0) + a.masked_fill(~m, 2.0), (A, MASK)),
    "softmax": (lambda a: a.softmax(-1) + a.softmax(0), (A,)),
    "layer_norm": (lambda a: F.layer_norm(a, (4,)) + F.layer_norm(a, (3, 4), torch.ones(3, 4) * 2), (A,)),
    "matmul": (lambda a, m: a @ m, (A, M)),
    "linear": (lambda a, m: F.linear(a, m.t(), m[0]), (A, M)),
    "addmm": (lambda a, m: torch.addmm(m[0], a[0], m), (A, M)),
    "shapes": (lambda a: a.view(6, 4).t().unsqueeze(1).permute(2, 0, 1).flatten(1)[:, 1:3].expand(6, 2).clone(), (A,)),
    "slice": (lambda a: a[:, ::2, -3:] + a[:1, :2, 1:], (A,)),
    "select": (lambda a: a[:, -1] + a.select(0, 0)[1], (A,)),
    "cat": (lambda a, b: torch.cat([a, b, a], 1), (A, B)),
    "split": (lambda a: a.split(2, -1)[1] * a.split([1, 3], -1)[1][..., :2], (A,)),
    "reduce": (lambda a: a.mean(-1) + a.sum((0, 2)) [None] + a.amax(2) - a.amin(2), (A,)),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q * 2, q + 1), (torch.randn(2, 2, 5, 8),)),
    "causal": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (torch.randn(2, 2, 5, 8),)),
    "masked attention": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        (torch.randn(2, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()),
    ),
    "float mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m, scale=0.3),
        (torch.randn(2, 2, 5, 8), torch.randn(5, 5)),
    ),
    "embedding": (lambda i, m: F.embedding(i, m), (torch.tensor([[0, 3], [2, 1]]), M)),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(6, 4, 3, 3), torch.arange(6.0), 2, 1), (IMAGE,)),
    "depthwise": (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), None, 1, 1, 1, 4), (IMAGE,)),
    "conv1d": (lambda x: F.conv1d(x, torch.ones(2, 4, 3), torch.ones(2), dilation=2), (IMAGE[:, :, 0],)),
    "batch_norm": (lambda x: BN(x), (IMAGE,)),
    "triangles": (lambda a: a.tril() + a.triu(1) + (a > 0).tril(-1).float(), (A,)),
    "any and all": (lambda m: (m.any(-1), m.all((0, 1)), m.any(), m.all(1, keepdim=True)), (MASK,)),
    "safe softmax": (
        lambda a: torch.ops.aten._safe_softmax(a.masked_fill(a[:, :1] > 0, -torch.inf), 1), (A,)
    ),
    "native layer norm": (
        lambda a: torch.ops.aten.native_layer_norm(a, [4], torch.ones(4) * 2, torch.ones(4), 1e-5), (A,)
    ),
    "transposed": (
        lambda x: F.conv_transpose2d(x, torch.arange(4.0 * 3 * 4).view(4, 3, 2, 2), torch.arange(3.0), 2), (IMAGE,)
    ),
    "transposed in groups": (
        lambda x: F.conv_transpose2d(x, torch.arange(4.0 * 3 * 4).view(4, 3, 2, 2), None, 1, 1, 0, 2), (IMAGE,)
    ),
    "flash attention": (
        lambda q: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q * 2, q + 1),
        (torch.randn(2, 2, 5, 8),),
    ),
    "causal flash attention": (
        lambda q: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q * 2, q + 1, 0.0, True, scale=0.3),
        (torch.randn(2, 2, 5, 8),),
    ),
    "pooling with indices": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (IMAGE,)),
    "pooling": (lambda x: F.max_pool2d(x, 3, 2, 1) + F.adaptive_avg_pool2d(x, 1), (IMAGE,)),
    "alpha and beta": (lambda a, m: torch.addmm(m[0], a[0], m, alpha=2.0, beta=0.5) + a.new_zeros(5), (A, M)),
    "pooling without a batch": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (IMAGE[0],)),
    "pooling of volumes": (lambda x: F.max_pool3d(x, 2, return_indices=True), (torch.randn(1, 2, 4, 4, 4),)),
    "unpooling": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]), (IMAGE[..., :8, :8],)),
    "losses": (
        lambda a, i: (F.cross_entropy(a[0], i), F.cross_entropy(a[0], i, ignore_index=2, reduction="none")),
        (A, torch.tensor([0, 2, 3])),
    ),
    "loss of images": (
        lambda x, i: F.cross_entropy(x, i, torch.arange(1.0, 5.0), reduction="sum"),
        (IMAGE, IMAGE[:, 0].abs().long() % 4),
    ),
    "extremes and places": (lambda a: (*a.max(1), *a.min(-1), a.argmax(), a.argmin(0), a.max()), (A.round(),)),
    "spread": (lambda a: (a.var(1), a.std(), *torch.var_mean(a, (0, 2), correction=0)), (A,)),
    "norms": (
        lambda a: (
            a.norm(), a.norm(1, -1), a.norm(torch.inf, 0), torch.linalg.vector_norm(a, 0), torch.cdist(a, a * 2),
        ),
        (A,),
    ),
    "log softmax": (lambda a: (a.log_softmax(1), a.logsumexp((0, 1)), torch.logaddexp(a, a * 2)), (A,)),
    "group norm": (lambda x: F.group_norm(x, 2, torch.arange(4.0), torch.ones(4)), (IMAGE,)),
    "products of vectors": (lambda m: (m @ m[0], m[0].dot(m[1]), torch.addr(m, m[:, 0], m[0])), (torch.randn(4, 4),)),
    "counts": (lambda a: ((a > 0).sum(1), torch.count_nonzero(a.relu(), 0), a.sum()), (A,)),
    "picked": (
        lambda x: (
            x.roll(2, 3), x.diagonal(0, 2, 3), x.flip(1, 3), F.pad(x, (1, 2, 2, 0), "reflect"), F.unfold(x, 3, 1, 1),
        ),
        (IMAGE,),
    ),
    "nearest": (lambda x: (F.interpolate(x, scale_factor=2.0), F.pixel_shuffle(x, 2), x.unbind(1)[2]), (IMAGE,)),
    "scattered": (
        lambda a, b: (a.slice_scatter(b[:, :2], 1, 1, 3), a.select_scatter(b[:, 0], 1, 2), a.repeat(1, 2, 1)), (A, B)
    ),
    "signs": (
        lambda a, b: (
            a.sign(), a.trunc(), a.copysign(b), a.div(b, rounding_mode="trunc"), a.expm1(), F.softplus(a),
        ),
        (A, B),
    ),
    "the front end's": (
        lambda a: (
            a.asinh(), a.atan(), a.cumsum(1), a.log1p(), a.sort(dim=1, stable=True), a.topk(2),
            F.pad(a, (1, 1), value=3.0),
        ),
        (A.abs(),),
    ),
    "the front end's indices": (
        lambda a, i: (
            a[:, i], a.index_select(1, i), a.gather(1, i.view(1, 2, 1).expand(2, 2, 4)),
            a.scatter_add(1, i.view(1, 2, 1).expand(2, 2, 4), a),
        ),
        (A, torch.tensor([2, 0])),
    ),
    "integers become numbers": (lambda i, a: (i.float(), a * i, i == 5, i.bool()), (WIDE, torch.randn(4))),
    "integers are moved": (
        lambda i: (
            i.view(2, 2).t(), i[1:], i.unsqueeze(0).expand(2, 4), torch.cat([i, i]), torch.stack([i, i], 1),
        ),
        (WIDE,),
    ),
    "float64 is moved": (lambda x: (x.permute(1, 0), x[1:, ::2], x.flip(0)), (torch.rand(3, 4, dtype=torch.float64),)),
    "made of numbers": (
        lambda a: (torch.arange(3, device=a.device) + a.new_zeros(3), a.new_full((2,), 3.0), a.new_ones(2, 0)), (A,)
    ),
    "places among others": (
        lambda a: (
            torch.searchsorted(a.sort(-1)[0], a), torch.searchsorted(a.sort(-1)[0], a, out_int32=True, right=True),
        ),
        (A,),
    ),
    "nothing": (lambda a: (a[:0].sin(), *a[:0].max(1), a[:0] @ a[0].t(), a + 1), (A,)),
    "special functions": (
        lambda a: (
            a.i0(), torch.special.i1e(a), torch.special.bessel_j0(a * 9), torch.special.bessel_y1(a.abs() + 0.1),
            torch.special.modified_bessel_k0(a.abs() + 0.1), torch.special.erfcx(a), torch.special.log_ndtr(a * 4),
            a.tanh().erfinv(), a.lgamma(), a.digamma(), torch.polygamma(2, a), torch.mvlgamma(a.abs() + 2, 2),
        ),
        (A,),
    ),
    "running": (lambda a: (a.cumprod(1), *a.cummax(2), *a.cummin(0), a.logcumsumexp(1)), (A,)),
    "puts": (
        lambda a, b, i: (
            a.index_add(1, i, b[:, :2], alpha=2), a.put(i, b[0, 0, :2]),
            a.scatter_reduce(1, i.view(1, 2, 1).expand(2, 2, 4), b, "mean", include_self=False),
            a.index_put((i % 2, i), b[0, 0], accumulate=True),
        ),
        (A, B, torch.tensor([2, 2])),
    ),
    "ranks": (lambda a: (*a.kthvalue(2, 1), *a.median(-1), a.nanmedian(), *a.sort(1, descending=True)), (A,)),
    "pairs": (
        lambda a, b: (
            a.hypot(b), a.atan2(b), a.fmax(b), a.heaviside(b), a.signbit(), a.angle(), a.lerp(b, 0.3),
            torch.linalg.cross(a[..., :3], b[..., :3]), F.pdist(a[0]), a.round(decimals=1), a.narrow_copy(1, 1, 2),
        ),
        (A, B),
    ),
    "casts": (lambda a: ((a * 1e10).long(), a.int(), a.half(), a.to(torch.int16), (a > 0).int()), (A,)),
    "training": (lambda x: F.batch_norm(x, None, None, torch.ones(4), None, training=True), (IMAGE,)),
    "averages": (
        lambda x: (
            F.avg_pool2d(x, 2, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
            F.avg_pool2d(x[0], 4, 3, 1, ceil_mode=True, count_include_pad=False),
        ),
        (IMAGE,),
    ),
    "linear resizing": (
        lambda x: (F.interpolate(x[0], 5, mode="linear"), F.interpolate(x[None], (3, 5, 12), mode="trilinear")),
        (IMAGE,),
    ),
    "of nothing": (lambda a: (a[:0].t() @ a[:0], a[:0].norm(), torch.cat([a[:0], a])), (M,)),
    "ceil pooling": (lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), (IMAGE,)),
}  # fmt: skip


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str) -> None:
    function, args = CASES[name]
    lowered = aot.lower(Function(function), args, backend="openvino")
    assert lowered.program.meta().delegates, lowered.report()
    torch.testing.assert_close(lowered(*args), function(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda a: a * 2, (torch.arange(4),), "torch.int64 in fewer bits"),
        (lambda a: a.sin(), (torch.rand(4, dtype=torch.float64),), "torch.float64 in fewer bits"),
        (lambda a: torch.nextafter(a, a), (torch.rand(4),), "does not look at the bits"),
        (lambda a: a.sum(0), (torch.rand(0, 4),), "empty"),
        (lambda a: a.remainder(0.1), (torch.tensor([7.5, 1e9]),), "remainder is inexact"),
        (lambda a: a.floor_divide(0.1), (torch.tensor([7.5, 1e9]),), "exact remainder"),
        (lambda a: a.div(0.1, rounding_mode="floor"), (torch.tensor([7.5, 1e9]),), "exact remainder"),
    ],
)
def test_what_openvino_computes_otherwise_is_left(function: Any, args: Any, reason: str) -> None:
    lowered = aot.lower(Function(function), args, backend="openvino")
    assert not lowered.program.meta().delegates
    assert any(reason in one.reason for one in lowered.left["forward"]), lowered.report()
    torch.testing.assert_close(lowered(*args), function(*args))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=0.0), lambda x: x.sign(), lambda x: x.amax(0), lambda x: x.max(0)[1],
        lambda x: x.argmin(), lambda x: x.logsumexp(0), lambda x: torch.logaddexp(x, x.flip(0)),
        lambda x: F.softplus(x), lambda x: x.log_softmax(0),
        lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0, 2.0]).to(x.device)),
        lambda x: x > 0, lambda x: x >= x.flip(0), lambda x: x.sort()[0], lambda x: x.topk(2)[1], lambda x: x.median(),
        lambda x: x.cummax(0)[1], lambda x: x.digamma(), lambda x: x.i0(), lambda x: torch.special.log_ndtr(x),
        lambda x: torch.hypot(x, x.flip(0)), lambda x: torch.atan2(x, x.flip(0)), lambda x: x.long(),
        lambda x: x.scatter_reduce(0, torch.tensor([0, 0, 1]).to(x.device), x.flip(0), "amin"),
        lambda x: F.avg_pool1d(x[None], 2, ceil_mode=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("values", [(1.0, torch.nan, -2.0), (torch.inf, 1.0, -torch.inf), (-torch.inf,) * 3])
def test_values_that_are_no_numbers(function: Any, values: tuple[float, ...]) -> None:
    """Where OpenVINO's operators pass over NaN, or its front end's translation gives another infinity."""
    x = torch.tensor(values)
    torch.testing.assert_close(function(x.to(torchport.device("openvino"))).cpu(), function(x), equal_nan=True)


def test_what_the_lazy_device_refuses_is_not_what_says_nothing() -> None:
    """``addmm`` of a program comes with alpha and beta of 1, or with others: both are taken."""
    device = torchport.device("openvino")
    bias, left, right = torch.randn(3), torch.randn(2, 4), torch.randn(4, 3)
    with torchport.config.override(fallback="error"):
        scales: list[dict[str, Any]] = [{}, {"alpha": 1, "beta": 1}, {"alpha": 0.5, "beta": 2}, {"beta": 0}]
        for kwargs in scales:
            found = torch.addmm(bias.to(device), left.to(device), right.to(device), **kwargs)
            torch.testing.assert_close(found.cpu(), torch.addmm(bias, left, right, **kwargs), rtol=1e-4, atol=1e-5)


def test_float32_unless_asked_and_options() -> None:
    x, layer = torch.randn(8, 64), nn.Linear(64, 64)
    lowered = aot.lower(layer, (x,), backend="openvino")
    torch.testing.assert_close(lowered(x), layer(x).detach(), rtol=1e-5, atol=1e-5)
    program = lowered.program
    method = program.load_method(backend_options={"openvino": {"INFERENCE_NUM_THREADS": 1}})
    torch.testing.assert_close(method(x)[0], layer(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="init failed"):
        program.load_method(backend_options={"openvino": {"NO_SUCH_PROPERTY": 1}})
    with pytest.raises(ConfigError, match=r"openvino\.device"):
        aot.lower(layer, (x,), backend="openvino", compile_specs={"device": "CPU"})


def test_weights_are_stored_once(tmp_path: Path) -> None:
    x, layer = torch.randn(2, 512), nn.Linear(512, 512)
    saved = aot.lower(layer, (x,), backend="openvino").save(tmp_path / "m.pt2")
    assert saved.delegates < 20_000
    assert saved.total < saved.weights + 60_000
    method = runtime.load(tmp_path / "m.pt2").load_method()
    torch.testing.assert_close(method(x)[0], layer(x).detach(), rtol=1e-4, atol=1e-5)


def test_the_lazy_device() -> None:
    device = torchport.device("openvino")
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    found = torch.relu(x.to(device) @ w.to(device)).sum(1).cpu()
    torch.testing.assert_close(found, torch.relu(x @ w).sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"TPOVN001" + b"\0" * 50])
def test_other_bytes_are_refused(data: bytes) -> None:
    backend = torchport.get_backend("openvino")
    with pytest.raises(CompileError, match="not made by the openvino backend"):
        backend.init(FreeableBuffer(data), CompileSpecs(), InitContext(BackendDevice("cpu")))


def test_results_that_are_inputs() -> None:
    """OpenVINO has one memory for such an input and output; two different ones were given, and garbage came back."""
    device = torchport.device("openvino")
    x, scalar = torch.randn(2, 3), torch.tensor(3.0)
    for value in (x, scalar):
        given = value.to(device)
        copy, doubled = given.clone(), given * 2
        torchport.sync()
        torch.testing.assert_close(copy.cpu(), value)
        torch.testing.assert_close(doubled.cpu(), value * 2)
        copy.zero_()
        torch.testing.assert_close(given.cpu(), value)


def test_vectors_joined_and_their_absolute_values() -> None:
    device = torchport.device("openvino")
    x, y = torch.tensor([-3.0, 2.0]), torch.tensor([-1.0])
    joined = torch.cat([x.to(device), y.to(device)])
    absolute = joined.abs()
    torchport.sync()
    torch.testing.assert_close(joined.cpu(), torch.cat([x, y]))
    torch.testing.assert_close(absolute.cpu(), torch.cat([x, y]).abs())


def test_scalars() -> None:
    device = torchport.device("openvino")
    x = torch.tensor(-2.0)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        wide = x.expand([])
        return [wide.clone(), wide.expand([]) * 1, -wide, x.sum(0, keepdim=True), x.mean(), x.amax(0)]

    for ours, theirs in zip(program(x.to(device)), program(x), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_importing_the_engine_reports_nothing_and_forks_nothing() -> None:
    code = """
import os, sys
os.register_at_fork(before=lambda: print("forked"))
import torch, torchport
torchport.use("openvino")
x = torch.randn(3, 4, device="port")
print((torch.nn.functional.layer_norm(x, (4,)).cumsum(0) + x.argsort(1)).shape[0])  # one of them by the front end
torchport.sync()
print("openvino_telemetry" in sys.modules)
"""
    env = {**os.environ, "TORCHPORT_TIERS": "off"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["3", "False"]


@pytest.mark.slow
def test_a_signal_is_handled_after_programs_went_in_the_order_of_their_loading() -> None:
    """OpenVINO's Core leaves a thread with an unmapped signal stack where two go in that order."""
    code = """
import faulthandler, gc, os, signal
faulthandler.enable()
import torch
from torchport import aot
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
x = torch.randn(4, 4)
first = aot.lower(torch.nn.Linear(4, 4), (x,), backend="openvino")
first(x)
second = aot.lower(torch.nn.Linear(4, 2), (x,), backend="openvino")
second(x)
del first
gc.collect()
del second
gc.collect()
os.kill(os.getpid(), signal.SIGUSR1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["handled"]), done.stderr


def test_weights_that_stay_become_constants() -> None:
    """Values are told from one another as objects: a weight that was written is another value."""
    first, last = nn.Linear(256, 256), nn.Linear(256, 256)
    layer = nn.Sequential(first, nn.ReLU(), last).to(torchport.device("openvino"))
    x = torch.randn(4, 256)

    def agrees() -> None:
        with torch.no_grad():
            ours = layer(x.to(torchport.device("openvino"))).cpu()
            hidden = F.linear(x, first.weight.cpu(), first.bias.cpu()).relu()
            theirs = F.linear(hidden, last.weight.cpu(), last.bias.cpu())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    with bound_at_once() as bound:
        for step in range(9):
            agrees()
            if step == 5:
                with torch.no_grad():
                    first.weight.mul_(2)
    assert [len(taken) for taken in bound] == [4, 4], "weights and biases, and again after the write; not the input"


def test_a_small_argument_that_has_changed_is_no_constant_again() -> None:
    device = torchport.device("openvino")
    x, weight, scale = torch.randn(4, 256), torch.randn(256, 256), torch.ones(256)
    on, by = weight.to(device), scale.to(device)
    with bound_at_once() as bound:
        for step in range(16):
            if step % 5 == 4:
                scale = scale + 1
                by = scale.to(device)
            torch.testing.assert_close((x.to(device) @ on * by).cpu(), x @ weight * scale, rtol=1e-4, atol=1e-3)
    assert [len(taken) for taken in bound] == [2, 1], "with the scale, and after it has changed the weight alone"


@pytest.mark.parametrize("batch", [3, 300], ids=["a small batch", "a large batch"])
def test_the_same_batch_again_does_not_compute_the_model_while_compiling(batch: int) -> None:
    device = torchport.device("openvino")
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 100)).eval()
    x = torch.randn(batch, 3, 8, 8)
    with torch.no_grad():
        expected = net(x)
        net, on = net.to(device), x.to(device)
        with bound_at_once() as bound:
            for _ in range(5):
                torch.testing.assert_close(net(on).cpu(), expected, rtol=1e-4, atol=1e-4)
    (taken,) = bound
    assert tuple(x.shape) not in [constant.array.shape for constant in taken.values()]
    assert len(taken) == 8, "weights, biases and the four of the batch norm"


@contextmanager
def bound_at_once() -> Iterator[list[dict[int, Any]]]:
    """Inside of the block, constants are made as soon as arguments come back; each time, which were taken."""
    taken: list[dict[int, Any]] = []
    init = SteadyArguments.__init__

    def eager(self: Any, bind: Any, cost: float) -> None:
        def noted(constants: dict[int, Any]) -> Any:
            made, positions = bind(constants)
            taken.append({at: constants[at] for at in positions})
            return made, positions

        init(self, noted, 1e-9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SteadyArguments, "__init__", eager)
        yield taken


def test_a_lent_weight_is_read_in_each_call() -> None:
    """torch.compile lends a model's tensors for a call: their owner may write to them between calls."""
    layer = nn.Linear(256, 256)
    run = torch.compile(layer, backend="torchport", options={"backend": "openvino"})
    x = torch.randn(4, 256)
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-4)
            layer.weight.data.mul_(1.5)
