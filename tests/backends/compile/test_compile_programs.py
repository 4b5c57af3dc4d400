"""torch.compile(backend="torchport"): what programs do around compiled code, against eager on the CPU."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import Fake, Refusing
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import torchport
from torchport import metrics
from torchport.backend.fx_normalise import normalise
from torchport.backend.normal_form import verify_graph
from torchport.backend.serialize import decode, encode, fingerprint

pytestmark = pytest.mark.usefixtures("fresh_compiler")

HAS_XLA = any(row.name == "xla" and row.available for row in torchport.list_backends())


def compiled(fn: Any, backend: str) -> Any:
    return torch.compile(fn, backend="torchport", options={"backend": backend})


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    return tensor.detach().clone().to(place).requires_grad_()


# -- aliasing ---------------------------------------------------------------------------------------------------------
def test_one_tensor_as_two_arguments(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x + y, y

    run, a = compiled(fn, backend), rand(3)
    x = a.clone().to(place)
    for got, want in zip(run(x, x), fn(a, a), strict=True):
        same(got, want)
    same(x, a)
    b, c = rand(3), rand(3, seed=2)
    y = b.clone().to(place)
    for got, want in zip(run(y, c.to(place)), fn(b, c), strict=True):
        same(got, want)
    same(y, b)


def test_arguments_that_overlap_in_memory(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum() + y.sum()

    a = rand(6)
    x = a.clone().to(place)
    same(compiled(fn, backend)(x[:4], x[2:]), fn(a[:4], a[2:]))
    same(x, a)


def test_writing_to_a_result_shows_where_it_does_in_eager(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = x[1:]
        view.add_(1)
        return view, x.t(), x, x * 2

    a = rand(4, 4)
    x = a.clone().to(place)
    theirs, ours = fn(a), compiled(fn, backend)(x)
    assert ours[2] is x
    for one, other in zip(ours, theirs, strict=True):
        one.fill_(7)
        other.fill_(7)
        same(x, a)


def test_equal_results_have_memory_of_their_own(backend: str) -> None:
    """Two copies of one value: an engine may compute it once, but who writes to one must not change the other."""
    run = compiled(lambda x: (x.expand(2, 4).reshape(-1), x.expand(2, 4).reshape(-1), x.clone()), backend)
    for _ in range(3):
        x = rand(4)
        first, second, third = run(x)
        first.fill_(7)
        third.fill_(8)
        same(second, x.repeat(2))
        same(x, rand(4))


# -- autograd ---------------------------------------------------------------------------------------------------------
def test_backward_twice_and_through_a_part_of_the_results(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * y, x.sum(), y.exp()

    run = compiled(fn, backend)
    here, there = [leaf(rand(3), torch.device("cpu")) for _ in range(2)], [leaf(rand(3), place) for _ in range(2)]
    for function, (x, y) in ((fn, here), (run, there)):
        function(x, y)[1].backward()
        product = function(x, y)[0].sum()
        product.backward(retain_graph=True)
        product.backward()
    for ours, theirs in zip(there, here, strict=True):
        same(ours.grad, theirs.grad)


def test_hooks_on_modules_and_tensors(place: torch.device, backend: str) -> None:
    def hooked(model: nn.Sequential) -> nn.Sequential:
        model[0].register_forward_hook(lambda module, args, result: result * 2)
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].weight.register_hook(lambda grad: grad * 3)
        return model

    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    ours = hooked(copy.deepcopy(theirs).to(place))
    hooked(theirs)
    run, x = compiled(ours, backend), rand(4, 3)
    seen: list[torch.Tensor] = []
    for model, value in ((theirs, x), (run, x.to(place))):
        result = model(value)
        result.register_hook(lambda grad: seen.append(grad.detach().cpu()))
        result.square().sum().backward()
    same(seen[1], seen[0])
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        same(p.grad, q.grad)


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_checkpointing(place: torch.device, backend: str, outside: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    ours = copy.deepcopy(theirs).to(place)
    a = leaf(rand(3, 4), torch.device("cpu"))
    x = leaf(a, place)
    if outside:
        result = checkpoint(compiled(ours, backend), x, use_reentrant=False)
    else:
        result = compiled(lambda value: checkpoint(ours, value, use_reentrant=False), backend)(x)
    expected = theirs(a)
    same(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    same(x.grad, a.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        same(p.grad, q.grad)


def test_checkpointed_dropout_has_one_mask(place: torch.device, backend: str) -> None:
    """The backward of ``w * dropout(x)`` is the mask: the one that the forward drew."""
    drop = nn.Dropout(0.5)
    run = compiled(lambda x: checkpoint(drop, x * 3, use_reentrant=False), backend)
    x = leaf(torch.ones(500), place)
    result = run(x)
    result.sum().backward()
    assert x.grad is not None
    same(x.grad, result.cpu())
    assert 0.3 < (result.cpu() == 0).float().mean() < 0.7


# -- errors and threads -----------------------------------------------------------------------------------------------
def test_an_error_of_the_user_and_what_comes_after(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = x + 1
        if fails:
            raise ValueError("mine")
        return y * 2

    run, x = compiled(fn, backend), rand(3)
    same(run(x.to(place), False), fn(x, False))
    with pytest.raises(ValueError, match="mine"):
        run(x.to(place), True)
    same(run(x.to(place), False), fn(x, False))


def test_first_calls_and_gradients_in_threads(place: torch.device, backend: str) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    run = compiled(copy.deepcopy(theirs).to(place), backend)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(3):
                a = leaf(rand(2 + number, 4, seed=step), torch.device("cpu"))
                x = leaf(a, place)
                (ours,) = torch.autograd.grad(run(x).square().sum(), x)
                (expected,) = torch.autograd.grad(theirs(a).square().sum(), a)
                same(ours, expected)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


# -- control flow -----------------------------------------------------------------------------------------------------
def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x, w: (x.sin() * w,), lambda x, w: (w.clone(),), (x, w))[0] + 1


def loop(n: torch.Tensor, x: torch.Tensor) -> Any:
    return while_loop(lambda i, z: i < n, lambda i, z: (i + 1, z * 1.5 + x), (torch.zeros_like(n), x * 1))


def test_a_branch_forward_and_backward(place: torch.device, backend: str) -> None:
    """``xla`` keeps it in the graph; around it, other backends' graphs are split, and it is counted."""
    run = torch.compile(branches, backend="torchport", options={"backend": backend}, fullgraph=True)
    for sign in (1, -1):
        here = [leaf(rand(3).abs() * sign, torch.device("cpu")), leaf(rand(3, seed=1), torch.device("cpu"))]
        there = [leaf(value, place) for value in here]
        result, expected = run(*there), branches(*here)
        same(result, expected)
        result.sum().backward()
        expected.sum().backward()
        for p, q in zip(there, here, strict=True):
            same(p.grad, q.grad)
    assert (metrics.counter("Fallback") == 0) == (backend == "xla")


def test_a_loop(place: torch.device, backend: str) -> None:
    run = torch.compile(loop, backend="torchport", options={"backend": backend}, fullgraph=True)
    for count in (0, 1, 4):
        n, x = torch.tensor(count), rand(3)
        for got, want in zip(run(n.to(place), x.to(place)), loop(n, x), strict=True):
            same(got, want)
    if backend == "xla":
        torchport.sync()
        compiled = metrics.counter("UncachedCompile") + metrics.counter("CachedCompile")
        assert (metrics.counter("Fallback"), compiled) == (0, 1)


@pytest.mark.skipif(not HAS_XLA, reason="xla is not available")
def test_xla_keeps_a_branch_in_the_graph() -> None:
    """By default, too, where the tests above run on ``reference`` only."""
    test_a_branch_forward_and_backward(torch.device("cpu"), "xla")


class Branching(Refusing):
    """Takes control flow, and every operator but one."""

    capabilities = replace(Refusing.capabilities, control_flow=True)
    op = "aten.tan.default"


def _exported() -> torch.fx.GraphModule:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return branches(x, w)

    return torch.export.export(Model(), (rand(3), rand(3))).graph_module


def test_graphs_inside_graphs_are_in_normal_form_and_go_through_bytes() -> None:
    graph = normalise(_exported(), Branching.install())
    graph.graph.erase_node(graph.graph.output_node())
    graph.graph.output((list(graph.graph.nodes)[-1],))
    verify_graph(graph)
    again = decode(encode(graph))
    for x in (rand(3).abs(), -rand(3).abs()):
        same(again(x, rand(3, seed=1))[0], branches(x, rand(3, seed=1)))
    assert fingerprint(graph) == fingerprint(normalise_whole())
    inner = next(getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr")
    for node in inner.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.cos.default
    assert fingerprint(graph) != fingerprint(normalise_whole())


def normalise_whole() -> torch.fx.GraphModule:
    return normalise(_exported(), Branching.install())


# -- what results look like -------------------------------------------------------------------------------------------
def test_results_have_the_strides_of_eager(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t() + y, (x * 2).t(), x.t().exp().contiguous(), (x * 2)[:1].t().sin(), y[:0] * 2

    a, b = rand(4, 3).t(), rand(4, 3)
    for got, want in zip(compiled(fn, backend)(a.to(place), b.to(place)), fn(a, b), strict=True):
        same(got, want)
        assert got.stride() == want.stride()


def test_batch_norm_whose_input_needs_no_gradient(place: torch.device, backend: str) -> None:
    theirs = nn.BatchNorm1d(3)
    ours = copy.deepcopy(theirs).to(place)
    x = rand(5, 3)
    compiled(ours, backend)(x.to(place)).square().sum().backward()
    theirs(x).square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        same(p.grad, q.grad)
    same(ours.running_var, theirs.running_var)


def test_a_mesh_and_shardings_reach_every_backend(backend: str) -> None:
    """They are of no one backend; a mesh of one device splits nothing, and a backend without meshes ignores them."""
    seen: list[Any] = []

    class Told(Fake):
        name = "told"

        def preprocess(self, graph: Any, specs: Any) -> Any:
            seen.append(dict(specs))
            return super().preprocess(graph, specs)

    mesh = {"axes": ["data"], "shape": [1]}
    shardings = [["data", None]]
    for name in (Told.install().name, backend):
        options = {"backend": name, "mesh": mesh, "input_shardings": shardings}
        run = torch.compile(lambda x: x.sin() @ x.t(), backend="torchport", options=options)
        x = rand(4, 3)
        same(run(x), x.sin() @ x.t())
        torch.compiler.reset()
    assert seen == [{"mesh": b'{"axes": ["data"], "shape": [1]}', "input_shardings": b'[["data", null]]'}]


def test_gradients_of_determinants_and_solutions_of_a_view(place: torch.device, backend: str) -> None:
    """The host leaves the gradient of what is not asked for undefined; a matrix lies in memory as the graph says."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        matrix = x[..., :3].mT
        solved = torch.linalg.solve(matrix, matrix[..., :1])
        return torch.linalg.det(matrix).sum() + torch.linalg.slogdet(matrix)[1].sum() + solved.sum()

    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    expected, given = x.clone().requires_grad_(), x.to(place).requires_grad_()
    fn(expected).backward()
    torch.compile(fn, backend="torchport", options={"backend": backend})(given).backward()
    torch.testing.assert_close(given.grad.cpu(), expected.grad, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]
