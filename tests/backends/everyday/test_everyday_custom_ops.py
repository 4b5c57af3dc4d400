"""Operators of others' libraries: Python bodies that view and write, kernels for the CPU alone, on every index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from everyday_support import agree, everywhere, needs_counters, ramp
from fakes import Fake
from torch import Tensor

import torchport


@torch.library.custom_op("torchport_tests::rows", mutates_args=())
def rows(x: Tensor, w: Tensor) -> Tensor:
    """A matrix product, row by row, through views that are written."""
    out = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    for i in range(x.shape[0]):
        out[i].copy_(w @ x[i])
        out[i : i + 1].mul_(2)
    return out


@rows.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return 2 * grad @ w, 2 * grad.t() @ x


rows.register_autograd(_rows_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("torchport_tests::bump_first", mutates_args=("x", "more"))
def bump_first(x: Tensor, more: list[Tensor], by: int) -> None:
    x[0].add_(by)
    for one in more:
        one.view(-1)[-1:].mul_(by)


def _numpy_sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


numpy_sin = torch.library.custom_op("torchport_tests::numpy_sin", _numpy_sin, mutates_args=(), device_types="cpu")


@torch.library.custom_op("torchport_tests::numpy_fill", mutates_args=("x", "more"), device_types="cpu")
def numpy_fill(x: Tensor, more: list[Tensor]) -> Tensor:
    x.numpy()[0] = 7
    for one in more:
        one.numpy()[...] = 8
    return x * 2


@torch.library.custom_op("torchport_tests::same_back", mutates_args=())
def same_back(x: Tensor) -> Tensor:
    return x


_library = torch.library.Library("torchport_tests", "FRAGMENT")
_library.define("plain_cos(Tensor x, *, int times=1) -> (Tensor, Tensor[])")
_library.impl("plain_cos", lambda x, *, times=1: (torch.from_numpy(np.cos(x.numpy())), [x + 1] * times), "CPU")


def _bumped(device: Any) -> list[Tensor]:
    base = ramp(4, 3, device=device)
    other = ramp(2, 2, device=device)
    bump_first(base[1:], [other, base[0]], 3)
    return [base, other]


def _gradients(device: Any) -> list[Tensor]:
    x, w = (ramp(*shape, device=device).requires_grad_() for shape in ((3, 4), (5, 4)))
    (rows(x, w) ** 2).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [x.grad, w.grad]


def _filled(device: Any) -> list[Tensor]:
    x, y = ramp(3, device=device), ramp(2, 2, device=device)
    result = numpy_fill(x[1:], more=[y[0]])
    return [x, y, result]


@everywhere
def test_views_that_a_body_writes_to(device: torch.device) -> None:
    agree(lambda to: rows(ramp(3, 4, device=to), ramp(5, 4, device=to)), device)
    agree(_gradients, device)


def test_arguments_that_are_written(device: torch.device) -> None:
    agree(_bumped, device)


@needs_counters
def test_a_kernel_for_the_cpu_alone_runs_on_the_host(device: torch.device) -> None:
    torchport.metrics.reset()
    agree(lambda to: numpy_sin(ramp(4, device=to)), device)
    assert torchport.metrics.counter("Fallback") == 1
    assert torchport.metrics.counter("torchport_tests::numpy_sin") == 1
    agree(_filled, device)


@needs_counters
def test_the_fallback_policy_holds_for_others_operators(device: torch.device) -> None:
    x = ramp(4, device=device)
    with torchport.config.override(fallback="error"):
        with pytest.raises(torchport.UnsupportedOp, match="a kernel for the CPU, and none for port"):
            numpy_sin(x)
        with pytest.raises(torchport.UnsupportedOp, match="a kernel for the CPU, and none for port"):
            torch.ops.torchport_tests.plain_cos(x)
    with torchport.config.override(fallback="warn"), pytest.warns(UserWarning, match="numpy_sin.* runs on the host"):
        numpy_sin(x)


def test_an_operator_of_a_plain_library(device: torch.device) -> None:
    def run(to: Any) -> list[Tensor]:
        one, more = torch.ops.torchport_tests.plain_cos(ramp(4, device=to), times=2)
        return [one, *more]

    agree(run, device)


def test_a_body_must_not_give_back_its_argument(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="alias"):
        same_back(ramp(3, device=device))


@needs_counters
def test_on_another_index() -> None:
    fake = Fake.install()
    for program in (_bumped, _gradients, _filled):
        for ours, theirs in zip(program(fake.device), program("cpu"), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
    x = ramp(4, device=fake.device)
    cosine, (after,) = torch.ops.torchport_tests.plain_cos(x)
    assert cosine.device == after.device == fake.device
    torch.testing.assert_close(cosine.cpu(), ramp(4, device="cpu").cos())


@needs_counters
def test_one_defined_after_the_device_is_in_use_and_for_the_device(device: torch.device) -> None:
    ramp(2, device=device)

    @torch.library.custom_op("torchport_tests::late", mutates_args=())
    def late(x: Tensor) -> Tensor:
        return x + 1

    @late.register_kernel("port")
    def _(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:1].add_(5)
        return out

    assert late(ramp(2, device="cpu")).tolist() == (ramp(2, device="cpu") + 1).tolist()
    assert late(ramp(2, device=device)).tolist() == [5.0, 0.0]


@needs_counters
def test_torch_compile_keeps_them_whole(device: torch.device, backend: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(rows(x, w)) + numpy_sin_traced(x).sum()

    torch.compiler.reset()
    for to in ("cpu", device):
        given = [ramp(3, 4, device=to), ramp(5, 4, device=to)]
        result = torch.compile(program, backend="torchport", options={"backend": backend})(*given)
        torch.testing.assert_close(result.cpu(), program(ramp(3, 4, device="cpu"), ramp(5, 4, device="cpu")))


numpy_sin_traced = torch.library.custom_op(
    "torchport_tests::numpy_sin_traced", _numpy_sin, mutates_args=(), device_types="cpu"
)
numpy_sin_traced.register_fake(torch.empty_like)


@torch.library.custom_op("torchport_tests::maybe", mutates_args=("x", "out"), device_types="cpu")
def maybe(x: Tensor, y: Tensor, out: Tensor | None = None) -> None:
    x.add_(1)
    y.mul_(2)
    if out is not None:
        out.copy_(x)


@torch.library.custom_op("torchport_tests::both", mutates_args=("x", "y"), device_types="cpu")
def both(x: Tensor, y: Tensor) -> None:
    x.add_(1)
    y.mul_(2)


@needs_counters
def test_arguments_of_a_kernel_on_the_host(device: torch.device) -> None:
    x, y = torch.ones(3).to(device), torch.ones(3).to(device)
    maybe(x, y)
    assert x.tolist() == [2.0] * 3
    maybe(x, y, x.clone())
    assert x.tolist() == [3.0] * 3
    both(y, y)
    assert y.tolist() == [4.0] * 3, "one tensor given twice is one tensor"
    with pytest.raises(torchport.UnsupportedOp, match="shares memory with another argument"):
        both(y[:2], y[1:])
    assert y.tolist() == [4.0] * 3


def _bump_a_clone(x: Tensor) -> Tensor:
    y = x.clone()
    bump_first(y, [], 3)
    return y * 2


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export's own
@pytest.mark.parametrize("how", ["aot_eager", "torchport", "export", "aot"])
def test_compilers_still_make_operators_that_write_functional(how: str) -> None:
    x = torch.ones(2, 2)
    expected = _bump_a_clone(x)
    torch.compiler.reset()

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _bump_a_clone(x)

    if how == "export":
        found = torch.export.export(Model(), (x,)).run_decompositions().module()(x)
    elif how == "aot":
        exported = torch.export.export(Model(), (x,)).run_decompositions()
        with pytest.raises(torchport.UnsupportedOp, match="auto_functionalized"):
            torchport.aot.lower(exported, backend="reference")
        return
    else:
        found = torch.compile(_bump_a_clone, backend=how)(x)
    torch.testing.assert_close(found, expected)


_library.define("fill_seven(Tensor(a!) y) -> ()")
_library.impl("fill_seven", lambda y: y.fill_(7), "CPU")
_library.define("fill_inside(Tensor x) -> Tensor")


def _fill_inside(x: Tensor) -> Tensor:
    y = x.clone()
    torch.ops.torchport_tests.fill_seven(y)
    return y


_library.impl("fill_inside", _fill_inside, "CompositeExplicitAutograd")


@needs_counters
def test_a_write_that_nobody_could_follow_is_refused(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    with pytest.raises(torchport.UnsupportedOp, match="fill_seven"):
        torch.ops.torchport_tests.fill_inside(x)
    assert x.tolist() == [1.0] * 3


_library.define("quantized(Tensor x, float scale) -> Tensor")
_library.impl("quantized", lambda x, scale: (x / scale).round().to(torch.int8), "CompositeExplicitAutograd")
_library.define("widened(Tensor x) -> Tensor")
_library.impl("widened", lambda x: (x.to(torch.float64) * 2).sum().to(torch.int64), "CompositeExplicitAutograd")


@everywhere
def test_another_dtype_inside_a_composite(device: torch.device) -> None:
    """What ``quantized_decomposed.quantize_per_tensor`` does: a copy to another dtype below functionalization."""
    for mode in ("lazy", "eager"):
        with torchport.mode(mode):
            agree(lambda to: torch.ops.torchport_tests.quantized(ramp(4, device=to), 0.5), device)
            agree(lambda to: torch.ops.torchport_tests.widened(ramp(4, device=to)), device)


_library.define("plus_ones(Tensor x) -> Tensor")
_library.impl("plus_ones", lambda x: x + torch.ones(x.shape, device=x.device), "CompositeExplicitAutograd")
_library.define("plus_more(Tensor[] xs) -> Tensor[]")


def _plus_more(xs: list[Tensor]) -> list[Tensor]:
    x = xs[0]
    drawn = torch.rand(3, device=x.device) * 0 + torch.empty(3, device=x.device).fill_(2.0)
    made = torch.zeros_like(x) + torch.arange(3, device=x.device) + x.new_full((3,), 2.0)
    made[1:] += torch.tensor([1.0, 2.0], device=x.device)
    return [x + drawn, made]


_library.impl("plus_more", _plus_more, "CompositeExplicitAutograd")
_library.define("adds_one(Tensor(a!) x) -> ()")


def _adds_one(x: Tensor) -> None:
    x[0].add_(torch.ones((), device=x.device))


_library.impl("adds_one", _adds_one, "CompositeExplicitAutograd")


@everywhere
@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_factories_inside_a_composite(device: torch.device, mode: str, grad: Callable[[], Any]) -> None:
    """Below functionalization PyTorch gives the body a shallow copy of what a factory made, which is in no trace."""

    def plus_ones(to: torch.device) -> Tensor:
        with grad():
            return torch.ops.torchport_tests.plus_ones(ramp(3, device=to))

    def plus_more(to: torch.device) -> Tensor:
        with grad():
            return torch.stack(torch.ops.torchport_tests.plus_more([ramp(3, device=to)]))

    def written(to: torch.device) -> Tensor:
        with grad():
            x = ramp(3, 2, device=to).clone()
            torch.ops.torchport_tests.adds_one(x[1:])
            return x

    with torchport.mode(mode):
        for program in (plus_ones, plus_more):
            agree(program, device)
        if device.type != "cpu":
            expected = ramp(3, 2, device=torch.device("cpu")).clone()
            expected[1] += 1
            torch.testing.assert_close(written(device).cpu(), expected)


def test_a_composite_defined_after_first_use(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    library = torch.library.Library("torchport_tests_later", "DEF")
    library.define("twice.out(Tensor x) -> Tensor")
    library.impl("twice.out", lambda x: x * torch.full((3,), 2.0, device=x.device), "CompositeExplicitAutograd")
    assert torch.ops.torchport_tests_later.twice.out(x).tolist() == [2.0] * 3
    assert torch.ops.torchport_tests_later.twice.out(torch.ones(3)).tolist() == [2.0] * 3
    library._destroy()


@needs_counters
def test_a_composite_that_gets_a_kernel_for_the_device_is_taken_once(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    library = torch.library.Library("torchport_tests_both", "DEF")
    library.define("moved(Tensor x) -> Tensor")
    library.impl("moved", lambda x: x + 1, "CompositeExplicitAutograd")
    library.impl("moved", lambda x: x + 2, "PrivateUse1")
    kernels = torch._C._dispatch_dump("torchport_tests_both::moved")
    assert sum(line.startswith("Functionalize") for line in kernels.splitlines()) == 1, kernels
    assert torch.ops.torchport_tests_both.moved(x).tolist() == [3.0] * 3
    assert torch.ops.torchport_tests_both.moved(torch.ones(3)).tolist() == [2.0] * 3
    library._destroy()


def test_compilers_see_a_composite_as_one_operator() -> None:
    found: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = torch.ones(3)
    compiled = torch.compile(lambda x: torch.ops.torchport_tests.plus_ones(x), backend=backend)
    assert compiled(x).tolist() == [2.0] * 3
    assert [str(target) for target in found] == ["torchport_tests.plus_ones"]


def _counted_on_host(x: Tensor) -> list[Tensor]:
    return [torch.arange(4.0, device="cpu") + x.dim(), x * 2]


@needs_counters
def test_a_kernel_for_the_device_may_give_tensors_of_the_cpu(device: torch.device) -> None:
    """Functionalization wraps them, and its wrapper has no memory: the CPU's kernels then read what is not theirs."""
    torch.ones(3).to(device)
    library = torch.library.Library("torchport_tests_own", "DEF")
    library.define("counted(Tensor x) -> Tensor[]")
    library.impl("counted", _counted_on_host, "PrivateUse1")
    host, ours = torch.ops.torchport_tests_own.counted(torch.ones(3).to(device))
    assert host.numpy().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.zeros(4).copy_(host).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert ours.device.type == device.type
    assert ours.tolist() == [2.0] * 3
    library._destroy()


@needs_counters
def test_what_fully_shard_copies_with_takes_tensors_of_two_devices(device: torch.device) -> None:
    """Its process group may be anybody's, whose tensors are the CPU's."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: F401 - registers the operators

    whole = torch.zeros(8)
    part, out = torch.ops.fsdp.all_gather_copy_in([torch.ones(4).to(device)], whole, [4], 4, 1)
    assert part.numpy().tolist() == [1.0] * 4
    assert out.numpy().tolist() == whole.tolist() == [0.0] * 4 + [1.0] * 4
