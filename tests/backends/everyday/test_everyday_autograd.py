"""Everyday PyTorch on the device: autograd, hooks, functional transforms, checkpointing, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday_support import ON_PORT, agree, everywhere, needs_counters, ramp, randn, same
from fakes import Fake
from torch import nn
from torch.utils.checkpoint import checkpoint


def net_on(device: torch.device, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)


def grads(net: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in net.parameters()]


@everywhere
def test_gradients_of_a_small_network(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = net_on(d)
        x = randn(5, 4, device=d).requires_grad_()
        nn.functional.cross_entropy(net(x), torch.tensor([0, 1, 0, 1, 1], device=d)).backward()
        return x.grad, grads(net)

    agree(use, device, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "mish"])
def test_gradients_that_the_cpu_has_one_kernel_for_round_once(device: torch.device, name: str) -> None:
    """PyTorch has these in parts as well, which round half-precision values in between."""
    fn = getattr(nn.functional, name)
    grads = []
    for place in ("cpu", device):
        x = ((ramp(64, device="cpu") - 32) / 8).bfloat16().to(place).requires_grad_()
        fn(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad.float().cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=2**-8, atol=0)
    twice = ramp(8, device=device).double().requires_grad_()
    assert torch.autograd.gradgradcheck(fn, twice)
    whole = getattr(torch.ops.aten, f"{name}_backward")
    with torch.inference_mode():
        assert whole(twice.detach(), twice.detach()).shape == (8,)
    with pytest.raises(RuntimeError, match="not implemented"):
        whole(twice, twice).sum().backward()


def test_clip_grad_norm_and_value(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        norms = []
        net = net_on(d)
        for foreach in (True, False):
            net.zero_grad()
            net(randn(5, 4, device=d) * 10).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=foreach))
        clipped = [g.clone() for g in grads(net)]
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        return norms, clipped, grads(net), nn.utils.get_total_norm(list(grads(net)))

    agree(use, device, rtol=1e-4, atol=1e-5)


def test_gradient_accumulation_equals_one_large_batch(device: torch.device) -> None:
    x, net = randn(8, 4, device=device), net_on(device)
    net(x).square().mean().backward()
    whole = [g.cpu() for g in grads(net)]
    net.zero_grad()
    for part in x.chunk(4):
        (net(part).square().mean() / 4).backward()
    same([g.cpu() for g in grads(net)], whole, rtol=1e-4, atol=1e-6)


def test_zero_grad_sets_none_or_zero(device: torch.device) -> None:
    net = net_on(device)
    net(randn(2, 4, device=device)).sum().backward()
    net.zero_grad(set_to_none=False)
    assert all(g.abs().sum().item() == 0 for g in grads(net))
    net.zero_grad()
    assert grads(net) == [None] * 6


def test_retain_graph_create_graph_and_second_derivatives(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, device=d).requires_grad_()
        y = (x**3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        first.sum().backward()
        return first, second, x.grad

    agree(use, device)


def test_backward_twice_raises(device: torch.device) -> None:
    x = ramp(3, device=device).requires_grad_()
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_in_place_on_a_leaf_raises_and_changed_saved_tensors_are_noticed(device: torch.device) -> None:
    x = ramp(3, device=device).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)
    y = x * 1
    z = (y * y).sum()
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2),
        lambda x: torch._foreach_add_([x], 1),
        lambda x: torch._foreach_lerp_([x, x.clone()], [x.clone(), x.clone()], 0.5),
        lambda x: torch._foreach_zero_([x, x]),
        lambda x: torch._foreach_copy_([x], [x + 1]),
    ],
)
def test_writes_to_what_is_saved_are_noticed_also_in_lists(device: torch.device, write: Any) -> None:
    x = ramp(3, device=device)
    loss = (torch.ones(3, device=device).requires_grad_() * x).sum()
    write(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_operations_inside_autograd(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(2, 3, device=d).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y.t()[1] += x[0, 0]
        y.relu_()
        y.sum().backward()
        return x.grad, y

    agree(use, device)


# -- modes -------------------------------------------------------------------------------------------------------------
def test_no_grad_enable_grad_and_set_grad_enabled(device: torch.device) -> None:
    x = ramp(3, device=device).requires_grad_()
    with torch.no_grad():
        assert not (x * 2).requires_grad
        with torch.enable_grad():
            assert (x * 2).requires_grad
        x += 1
    with torch.set_grad_enabled(False):
        assert not x.sum().requires_grad
    assert (x * 2).requires_grad
    same(x.detach(), torch.tensor([1.0, 2.0, 3.0]))


def test_inference_mode(device: torch.device) -> None:
    net = net_on(device)
    expected = net(randn(2, 4, device=device)).detach().cpu()
    with torch.inference_mode():
        y = net(randn(2, 4, device=device))
        assert not y.requires_grad
        z = y + 1
        z += 1
        z[0] = 0
        assert z[0].sum().item() == 0
    same(y.cpu().clone(), expected)
    assert y.sum().item() == pytest.approx(expected.sum().item(), rel=1e-4)


# -- hooks -------------------------------------------------------------------------------------------------------------
def test_tensor_hooks(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        seen: list[torch.Tensor] = []
        x = ramp(3, device=d).requires_grad_()
        y = x * 2
        y.register_hook(seen.append)
        y.register_hook(lambda g: g * 10)
        y.retain_grad()
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        (y * y).sum().backward()
        return seen, x.grad, y.grad

    agree(use, device)


def test_module_hooks(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        seen: list[Any] = []
        net = net_on(d)
        net[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        net[1].register_forward_hook(lambda m, args, out: out + 1)
        net[3].register_full_backward_hook(lambda m, gin, gout: seen.extend([gin[0], gout[0]]))
        net[0].register_full_backward_pre_hook(lambda m, gout: (gout[0] * 0.5,))
        net(randn(2, 4, device=d).requires_grad_()).sum().backward()
        return seen, grads(net)

    agree(use, device, rtol=1e-4, atol=1e-6)


def test_saved_tensor_hooks(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, device=d).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(d)):
            y = (x * x).exp().sum()
        y.backward()
        return x.grad

    agree(use, device, rtol=1e-5)


# -- custom functions --------------------------------------------------------------------------------------------------
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return x**3 * scale, x + 1

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[Any, None]:
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        if first is not None:
            total = total + 3 * x * x * ctx.scale * first
        return (total if second is None else total + second), None


class TimesTwoInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_custom_autograd_functions(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, device=d).requires_grad_()
        y, z = Cube.apply(x, 0.5)
        (y.sum() + (z * z).sum()).backward()
        w = x.detach().clone().requires_grad_()
        v = w * 3
        TimesTwoInPlace.apply(v)
        v.sum().backward()
        return y, z, x.grad, v, w.grad

    agree(use, device)


# -- checkpointing -----------------------------------------------------------------------------------------------------
@needs_counters
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_has_one_mask_on_any_index(reentrant: bool) -> None:
    fake = Fake.install()
    x = torch.ones(1000, device=fake.device, requires_grad=True)
    y = checkpoint(lambda value: nn.functional.dropout(value * 3, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert 0 < int((x.grad == 0).sum()) < 1000


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(device: torch.device, reentrant: bool) -> None:
    net, x = net_on(device), randn(5, 4, device=device).requires_grad_()
    net(x).square().sum().backward()
    expected = [x.grad.cpu(), *[g.cpu() for g in grads(net)]]
    net.zero_grad()
    x.grad = None
    checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
    same([x.grad.cpu(), *[g.cpu() for g in grads(net)]], expected, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_dropout_mask_again(device: torch.device, reentrant: bool) -> None:
    x = torch.ones(64, device=device, requires_grad=True)
    y = checkpoint(lambda t: nn.functional.dropout(t, 0.5) * t, x, use_reentrant=reentrant)
    kept = y.detach().cpu() != 0
    y.sum().backward()
    assert 10 < kept.sum() < 54
    assert torch.equal(x.grad.cpu() != 0, kept)
    after = nn.functional.dropout(torch.ones(64, device=device), 0.5).cpu() != 0
    assert not torch.equal(after, kept)


# -- torch.func --------------------------------------------------------------------------------------------------------
def _transforms() -> dict[str, Callable[[torch.device], Any]]:
    f = lambda x: (x.sin() * x).sum()  # noqa: E731
    return {
        "grad": lambda d: torch.func.grad(f)(ramp(3, device=d)),
        "grad_and_value": lambda d: torch.func.grad_and_value(f)(ramp(3, device=d)),
        "grad of grad": lambda d: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(ramp(3, device=d)),
        "vmap": lambda d: torch.func.vmap(lambda a, b: a @ b)(randn(3, 2, 4, device=d), randn(3, 4, 2, device=d)),
        "vmap over dims": lambda d: torch.func.vmap(torch.dot, in_dims=(1, 0))(
            ramp(4, 3, device=d), ramp(3, 4, device=d)
        ),
        "vmap of grad": lambda d: torch.func.vmap(torch.func.grad(f))(ramp(4, 3, device=d)),
        "vmap in place": lambda d: torch.func.vmap(lambda x: x.clone().add_(1)[0])(ramp(4, 3, device=d)),
        "jacrev": lambda d: torch.func.jacrev(lambda x: x**2 + x[0])(ramp(3, device=d)),
        "jacfwd": lambda d: torch.func.jacfwd(lambda x: x**2 + x[0])(ramp(3, device=d)),
        "hessian": lambda d: torch.func.hessian(f)(ramp(3, device=d)),
        "vjp": lambda d: torch.func.vjp(torch.sin, ramp(3, device=d))[1](torch.ones(3, device=d)),
        "jvp": lambda d: torch.func.jvp(torch.sin, (ramp(3, device=d),), (torch.ones(3, device=d),)),
    }


@pytest.mark.parametrize("name", _transforms())
def test_function_transforms(device: torch.device, name: str) -> None:
    agree(_transforms()[name], device, rtol=1e-5, atol=1e-5)


def test_functional_call_and_per_sample_gradients(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = net_on(d)
        params = {k: v.detach() for k, v in net.named_parameters()}

        def loss(p: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(torch.func.functional_call(net, p, (x[None],))[0], y)

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        return per_sample(params, randn(3, 4, device=d), randn(3, 2, device=d, seed=1))

    agree(use, device, rtol=1e-4, atol=1e-6)


def test_vectorised_jacobians_of_autograd(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, device=d)
        f = torch.autograd.functional
        return (
            f.jacobian(lambda t: t**2, x),
            f.hessian(lambda t: (t**3).sum(), x),
            f.jacobian(torch.sin, x, vectorize=True),
        )

    agree(use, device, rtol=1e-5)


def test_ensembles_with_stack_module_state(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        nets = [net_on(d, seed) for seed in range(3)]
        params, buffers = torch.func.stack_module_state(nets)

        def run(p: Any, b: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(nets[0], (p, b), (x,))

        return torch.func.vmap(run, in_dims=(0, 0, None))(params, buffers, randn(2, 4, device=d)).detach()

    agree(use, device, rtol=1e-4, atol=1e-6)


# -- autocast ----------------------------------------------------------------------------------------------------------
@everywhere
def test_autocast_to_bfloat16(device: torch.device) -> None:
    net, x = net_on(device), randn(5, 4, device=device)
    expected = net(x).detach().cpu()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = net(x)
        assert torch.is_autocast_enabled(device.type)
        assert (x @ x.t()).dtype is torch.bfloat16
        assert torch.mm(x, x.t()).dtype is torch.bfloat16
        assert nn.functional.linear(x, x).dtype is torch.bfloat16
        assert (x + x).dtype is torch.float32
        with torch.autocast(device.type, enabled=False):
            assert (x @ x.t()).dtype is torch.float32
    assert y.dtype is torch.bfloat16
    same(y.float().detach(), expected, rtol=0.05, atol=0.05)
    y.float().square().mean().backward()
    assert all(p.grad.dtype is torch.float32 for p in net.parameters())
    assert (x @ x.t()).dtype is torch.float32


def test_autocast_casts_losses_and_norms_up(device: torch.device) -> None:
    if not ON_PORT:
        pytest.skip("the CPU's autocast keeps softmax in bfloat16; the device follows CUDA's lists")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        low = randn(3, 3, device=device) @ torch.eye(3, device=device)
        assert low.dtype is torch.bfloat16
        assert low.softmax(-1).dtype is torch.float32
        assert nn.functional.cross_entropy(low, torch.tensor([0, 1, 2], device=device)).dtype is torch.float32
        assert torch.cat([low, low.float()]).dtype is torch.float32


def test_autocast_as_a_decorator_and_its_default_dtype(device: torch.device) -> None:
    @torch.autocast(device.type, dtype=torch.bfloat16)
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    assert product(randn(2, 2, device=device)).dtype is torch.bfloat16
    assert torch.get_autocast_dtype(device.type) in {torch.bfloat16, torch.float16}
    assert torch.amp.is_autocast_available(device.type)


def test_as_strided_keeps_the_tangent(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x, tangent = (torch.linspace(0, n, 12, device=d).reshape(3, 4) for n in (1, 2))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            result = torch.autograd.forward_ad.unpack_dual(torch.as_strided(dual, (2, 2), (1, 4), 1))
            return result.primal.clone(), result.tangent.clone()

    agree(use, device)


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("computed", [False, True])
def test_gradients_of_determinants_and_solutions_of_a_view(device: torch.device, computed: bool) -> None:
    """Their derivatives ask how the matrix lies in memory, and a view that was computed by itself lies otherwise."""

    def use(d: torch.device) -> Any:
        found = []
        for view in (lambda x: x[..., :3], lambda x: x[..., :3].mT, lambda x: x[..., :3].contiguous()):
            for fn in (
                torch.linalg.det,
                lambda m: torch.linalg.slogdet(m)[1],
                lambda m: torch.linalg.solve(m, m[..., :1]),
            ):
                matrix = view(randn(2, 3, 5, device=d, seed=3).requires_grad_())
                if computed:
                    matrix.detach().cpu()
                found += torch.autograd.grad(fn(matrix).sum(), matrix)
        return found

    agree(use, device, rtol=1e-3, atol=1e-4)
