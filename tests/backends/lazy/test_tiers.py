"""Tier 0: what is new to the program is interpreted, with the values that the compiled computation has."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_training import are_equal, train
from torch import nn

import torchport
from torchport import metrics
from torchport.backend import infer
from torchport.core.config import config
from torchport.run import device_runtime, tiers, worth
from torchport.trace.threads import threads
from torchport.trace.wrapping import inner_of


@pytest.fixture(autouse=True)
def _tiers(backend: str) -> Iterator[None]:
    """Tiers are off in other tests, which are about what is compiled."""
    with config.override(tiers="auto", compile_workers=0):
        if not threads.of(0).runtime.interprets:
            pytest.skip("its values are no CPU tensors, so nothing is interpreted on it yet")
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Nothing is known of what the program does."""
    torchport.sync()
    runtime: Any = threads.of(0).runtime
    runtime.forget_decisions()


def _often(monkeypatch: pytest.MonkeyPatch, is_worth_it: Callable[[], bool]) -> None:
    """Compile an interpreted plan when ``is_worth_it`` says so."""
    monkeypatch.setattr(worth.costs, "expected", lambda backend, operators: 0.0 if is_worth_it() else float("inf"))


def _record(monkeypatch: pytest.MonkeyPatch, after: int = 1) -> None:
    """Record a path once it was computed at once so many times, whatever that has cost."""
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: sights.times >= after)


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def _train(steps: int, before: Callable[[int], object] = lambda step: None) -> list[Any]:
    return train(_net, steps, before=before)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 7, 11])
def test_the_compiled_step_takes_over_at_any_step(monkeypatch: pytest.MonkeyPatch, backend: str, at: int) -> None:
    _record(monkeypatch, after=min(at, 3))
    with config.override(tiers="off"):
        wanted = _train(12)
    _forget()
    now = [False]
    _often(monkeypatch, lambda: now[0])
    taken = metrics.counter("TakenOver")
    found = _train(12, lambda step: now.__setitem__(0, step >= at))
    assert metrics.counter("TakenOver") > taken
    if backend == "reference":
        assert are_equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_compiled_step_takes_over_at_each_of_fifty_steps(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    _record(monkeypatch)
    with config.override(tiers="off"):
        wanted = _train(53)
    now = [False]
    _often(monkeypatch, lambda: now[0])
    for at in range(1, 51):
        _forget()
        taken = metrics.counter("TakenOver")
        found = _train(53, lambda step, at=at: now.__setitem__(0, step >= at))
        assert metrics.counter("TakenOver") > taken, at
        if backend == "reference":
            assert are_equal(found, wanted), at
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_without_compiling_a_run_is_the_compiled_one_bit_by_bit(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    with config.override(tiers="off"):
        wanted = _train(5)
    _forget()
    _often(monkeypatch, lambda: False)
    _record(monkeypatch)
    compiled = metrics.counter("UncachedCompile")
    found = _train(5)
    assert metrics.counter("UncachedCompile") == compiled
    if backend == "reference":
        assert are_equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "views": lambda x: [x.t(), x[1:], x[:, ::2], x.reshape(-1)[3:].view(3, -1)[0], x.expand(2, *x.shape)[1]],
    "view of a view": lambda x: x.t()[1:].t().reshape(-1)[::3] * 2,
    "writes": lambda x: [x.clone().add_(1).t().mul_(2), x.clone().fill_(3)],
    "a write through a view": lambda x: (y := x.clone(), y[1].zero_(), y[:, 0].add_(y[:, 1]), y)[-1],
    "a write through a complex view": lambda x: (
        y := torch.complex(x, x), y.unsqueeze(-1).movedim(0, -1).real.mul_(2), y.flatten().add_(1), y)[-1],
    "scalars": lambda x: [x + 0.3, x * 2, torch.add(x, x, alpha=0.7), torch.addcmul(x, x, x, value=0.1), x**2, 1 / x],
    "of two dtypes": lambda x: [x.to(torch.bfloat16) * 0.3, x.double() + 0.1, x > 0, x.int() // 2, x.half().sum()],
    "complex": lambda x: [torch.complex(x, x).conj().abs(), torch.complex(x, x).conj() + 1, torch.complex(x, x).imag],
    "factories": lambda x: [torch.arange(5, device=x.device), torch.full((2,), 0.1, device=x.device), x.new_zeros(2)],
    "lists": lambda x: [*torch._foreach_add([x, x * 2], 0.5), *torch._foreach_add([x], [x * 2], alpha=0.3),
                        *torch._foreach_mul([x, x], [x, x]), *torch._foreach_addcdiv([x], [x], [x * 2], value=0.3)],
    "several results": lambda x: [*x.max(0), *x.split(2), *torch.topk(x, 2), *x.unbind(1)],
    "a shape that depends on values": lambda x: [x[x > 0], x.nonzero(), x.round().unique(), x.masked_select(x < 0)],
    "a number that is read": lambda x: x * float(x.sum()) if x.sum().item() < 100 else x,
    "a tensor of no dimension of the host": lambda x: x * torch.tensor(0.3) + torch.tensor(2.0, dtype=torch.float64),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "random": lambda x: [torch.rand_like(x), torch.randn(3, device=x.device), torch.bernoulli(x.sigmoid()),
                         torch.randperm(9, device=x.device), nn.functional.dropout(x, 0.4),
                         torch.empty_like(x).uniform_(1, 2)],
    "poisson": lambda x: torch.poisson(x.abs()),
    "gradients of gradients": lambda x: torch.func.grad(lambda z: torch.func.grad(lambda w: (w**3).sum())(z).sum())(x),
    "vmap": lambda x: torch.vmap(lambda row: row.softmax(0) @ row)(x),
    "nothing": lambda x: [x[:0], x[:0].sum(), torch.cat([x[:0], x])],
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_values_strides_and_dtypes_are_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, backend: str, mode: Any, program: Callable[..., Any]
) -> None:
    _record(monkeypatch)
    host = torch.arange(24.0).reshape(4, 6).sub(11).div(3)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(5)
        made = program(host.clone().to("port"))
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        return [*made, *(one.detach().cpu() for one in made)]

    with config.override(tiers="off"):
        wanted = run()
    _forget()
    with torchport.mode(mode):
        for _ in range(5):  # at once, the same again and observed, recorded, interpreted from its path, the same again
            found = run()
            for a, b in zip(found, wanted, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
                if backend == "reference":
                    assert torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num())
                else:
                    torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_shape_that_depends_on_values_is_not_remembered(backend: str) -> None:
    for count in (3, 0, 5, 5, 2, 0):
        x = torch.zeros(6)
        x[:count] = 1
        assert x.to("port").nonzero().shape == (count, 1)
        assert x.to("port")[x.to("port") > 0].shape == (count,)


def test_what_was_computed_at_once_is_not_inferred_again(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    asked: list[str] = []
    confirmed = infer._confirmed
    monkeypatch.setattr(infer, "_confirmed", lambda op, *rest: (asked.append(str(op)), confirmed(op, *rest))[1])
    _record(monkeypatch)
    before = metrics.counter("TracedOps")
    _train(3, lambda step: asked.clear())
    assert metrics.counter("TracedOps") > before + 50
    assert asked == []


def test_what_was_seen_under_another_default_dtype_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    _record(monkeypatch)
    try:
        for dtype in (torch.float32, torch.float64, torch.float64, torch.float32, torch.float32):
            torch.set_default_dtype(dtype)
            assert (torch.ones(7, 2, device="port") * 3).cpu().dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)


# -- errors ----------------------------------------------------------------------------------------------------------
WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "shapes": lambda x: x @ x,
    "a view of a transposed one": lambda x: x.t().view(-1),
    "dtypes": lambda x: torch.bernoulli(torch.complex(x, x)),
    "a number that does not fit": lambda x: torch.full_like(x.int(), 1e300),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_the_cpu_refuses_is_refused_at_the_call_and_nothing_else_suffers(backend: str, wrong: Any) -> None:
    x = torch.rand(2, 3)
    with pytest.raises(Exception) as on_cpu:
        wrong(x)
    port = x.to("port")
    for _ in range(3):
        before = port + 1
        with pytest.raises(type(on_cpu.value)):
            made = wrong(port)
            made.cpu()  # a compiled index is looked at when the value is
        torch.testing.assert_close((before * 2).cpu(), (x + 1) * 2)


def test_an_error_says_which_operator_and_line(backend: str) -> None:
    x = torch.rand(2, 3).to("port")
    with pytest.raises(RuntimeError) as info:
        torch.mm(x, x)
    notes = "\n".join(info.value.__notes__)
    assert "aten.mm.default" in notes
    assert "test_tiers.py" in notes


def test_a_computation_that_does_not_compile_stays_interpreted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    _often(monkeypatch, lambda: True)

    def refuse(*args: object) -> None:
        raise ValueError("the engine is out of order")

    instance = torchport.get_backend(backend)
    monkeypatch.setattr(instance, "preprocess", refuse, raising=False)
    x = torch.rand(3, 5, 7)
    for _ in range(6):
        torch.testing.assert_close((x.to("port").sinh() * 3).cpu(), x.sinh() * 3)
    said = capsys.readouterr().err
    assert said.count("the engine is out of order") == 1
    assert "stays interpreted" in said


# -- what is compiled and what is kept -------------------------------------------------------------------------------
def test_a_path_is_recorded_once_its_runs_have_cost_enough(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    wanted: list[bool] = []
    asked = worth.is_worth_recording

    def ask(backend: Any, sights: Any) -> bool:
        wanted.append(asked(backend, sights))
        return wanted[-1]

    monkeypatch.setattr(device_runtime, "is_worth_recording", ask)
    monkeypatch.setattr(worth.costs, "expected", lambda backend, operators: 0.002 * operators)
    x = torch.rand(16, 16)
    for _ in range(200):
        found, right = x.to("port").tan() @ x.to("port"), x.tan() @ x
        for _ in range(8):  # a shorter path is better interpreted
            found, right = found.sin(), right.sin()
        torch.testing.assert_close(found.cpu(), right)
        if wanted and wanted[-1]:
            break
    assert wanted[0] is False  # not at first sight
    assert wanted[-1] is True


def test_what_a_backend_decomposes_is_interpreted_as_the_rest_is(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    runtime: Any = threads.of(0).runtime
    rewritten = {torch.ops.aten.isin.Tensor_Tensor: lambda *args, **kwargs: NotImplemented}
    monkeypatch.setattr(runtime.capture, "decompositions", rewritten)
    before = metrics.counter("TracedOps"), metrics.counter("InterpretedOps")
    x = torch.arange(6)
    port = x.to("port")
    for _ in range(3):
        found = torch.isin(port, port[:2])
        torch.testing.assert_close((port * 3).masked_fill(found, 7).cpu(), (x * 3).masked_fill(torch.isin(x, x[:2]), 7))
    assert metrics.counter("TracedOps") == before[0], "nothing is recorded at first sight"
    assert metrics.counter("InterpretedOps") >= before[1] + 9


def test_what_comes_once_is_not_compiled(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    _often(monkeypatch, lambda: False)
    compiled = metrics.counter("UncachedCompile")
    net = _net().to("port").eval()
    for size in range(1, 20):
        net(torch.randn(size, 6).to("port")).sum().item()
    assert metrics.counter("UncachedCompile") == compiled


def test_a_loop_whose_sizes_grow_compiles_nothing(backend: str) -> None:
    compiled = metrics.counter("UncachedCompile")
    cache = torch.zeros(1, 0, 4).to("port")
    host = torch.zeros(1, 0, 4)
    for _ in range(20):
        cache, host = (
            torch.cat([cache, cache.sum(1, keepdim=True) + 1], 1),
            torch.cat([host, host.sum(1, keepdim=True) + 1], 1),
        )
        torch.testing.assert_close(cache.cpu(), host)
    assert metrics.counter("UncachedCompile") == compiled


def test_eager_mode_records_nothing(backend: str) -> None:
    before = metrics.counter("TracedOps")
    with torchport.mode("eager"):
        x = torch.rand(3, 3).to("port").requires_grad_()
        y = (x @ x).relu().sum()
        y.backward()
        assert x.grad is not None
        assert inner_of(y.detach()).value is not None
    assert metrics.counter("TracedOps") == before


def test_tiers_that_are_off_compile_at_once(backend: str) -> None:
    with config.override(tiers="off"):
        before = metrics.counter("Execute")
        (torch.rand(3, 11).to("port") + 1).cpu()
        assert metrics.counter("Execute") == before + 1


# -- other threads, memory, processes --------------------------------------------------------------------------------
def test_values_are_shared_between_threads(backend: str) -> None:
    x = torch.rand(4, 4)
    port = x.to("port")
    mine = port * 3
    found: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(3):
            found.append((mine @ port + 1).cpu())

    others = [threading.Thread(target=work) for _ in range(3)]
    for thread in others:
        thread.start()
    for _ in range(3):
        torch.testing.assert_close((mine.t() + port).cpu(), (x * 3).t() + x)
    for thread in others:
        thread.join()
    for one in found:
        torch.testing.assert_close(one, (x * 3) @ x + 1)


def test_a_view_keeps_its_values_when_its_base_is_written(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    # Views share memory in tier 0; a compiled step must not be given that memory to write over.
    state = [False]
    _often(monkeypatch, lambda: state[0])
    x = torch.rand(1024, 600)
    for step in range(5):
        state[0] = step > 2
        port = x.clone().to("port")
        kept = port.t()[1:3]
        port.add_(1)
        port.mul_(2)
        torchport.sync()
        torch.testing.assert_close(kept.cpu(), ((x + 1) * 2).t()[1:3])
        torch.testing.assert_close(port.cpu(), (x + 1) * 2)


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_first_step_in_a_process_of_its_own(backend: str, native: str) -> None:
    code = f"""
        import torch, torchport
        torchport.use({backend!r})
        net = torch.nn.Linear(4, 4).to("port")
        opt = torch.optim.Adam(net.parameters())
        for _ in range(6):
            loss = net(torch.ones(2, 4).to("port")).pow(2).sum()
            opt.zero_grad(); loss.backward(); opt.step()
        print(torchport.metrics.counter("UncachedCompile"), torch.isfinite(loss).item())
    """
    env = {**os.environ, "TORCHPORT_TIERS": "auto", "TORCHPORT_NATIVE": native}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "True"]


@pytest.mark.slow
def test_the_compilers_process_brings_what_takes_over(backend: str) -> None:
    from torchport.worker.service import service

    with config.override(compile_workers=1), worth.costs.ignored():
        x = torch.rand(7, 13)
        taken = metrics.counter("TakenOver")
        for _ in range(40):
            torch.testing.assert_close((x.to("port").cosh() * 3 + x.sum().item()).cpu(), x.cosh() * 3 + x.sum())
            if service.pending():
                assert service.wait(300)
            if metrics.counter("TakenOver") > taken:
                return
    pytest.fail("nothing was taken over")


# -- for people ------------------------------------------------------------------------------------------------------
def test_warm_has_everything_compiled_whatever_it_costs(backend: str) -> None:
    x = torch.rand(5, 7)

    def forward() -> torch.Tensor:
        return (x.to("port").tan() * 2).sum(0).cpu()

    torch.testing.assert_close(torchport.warm(forward), (x.tan() * 2).sum(0))
    assert torchport.compiled(wait=True)
    names = ("InterpretedOps", "InterpretedRun", "UncachedCompile", "Execute")
    before = [metrics.counter(name) for name in names]
    torch.testing.assert_close(forward(), (x.tan() * 2).sum(0))
    assert [metrics.counter(name) for name in names] == [*before[:3], before[3] + 1]


def test_a_swap_that_is_verified_goes_through_where_the_values_agree(
    capfd: pytest.CaptureFixture[str], backend: str
) -> None:
    with config.override(tiers="off"):
        wanted = _train(14)
    _forget()
    checked = metrics.counter("VerifiedSwap")
    with config.override(verify_swap=3), worth.costs.ignored():
        found = _train(14)
    assert metrics.counter("VerifiedSwap") >= checked + 3
    assert "the largest difference in 3 runs was" in capfd.readouterr().err
    if backend == "reference":
        assert are_equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_a_compiled_graph_that_is_wrong_is_dropped_and_written_down(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, backend: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = tiers.make_plan

    def wrong_plan(runtime: Any, path: Any, value_ids: Any, specs: Any, **more: Any) -> Any:
        plan: Any = made(runtime, path, value_ids, specs, **more)
        right: Any = plan.computation.backend

        class Wrong(type(right)):  # pyright: ignore[reportUntypedBaseClass]
            def execute(self, handle: Any, args: Any, context: Any) -> Any:
                first, *rest = right.execute(handle, args, context)
                first.tensor = first.tensor + 1
                return [first, *rest]

        plan.computation.backend = object.__new__(Wrong)
        plan.computation.backend.__dict__ |= right.__dict__
        return plan

    monkeypatch.setattr(tiers, "make_plan", wrong_plan)
    x = torch.rand(3, 11)
    refused = metrics.counter("RefusedSwap")
    with config.override(verify_swap=2), worth.costs.ignored():
        for _ in range(8):
            torch.testing.assert_close((x.to("port").cosh() * 5).sum().cpu(), (x.cosh() * 5).sum())
    assert metrics.counter("RefusedSwap") == refused + 1
    assert "is dropped, and stays interpreted" in capfd.readouterr().err
    (written,) = tmp_path.glob("torchport-mismatch-*/*.txt")
    assert "aten.cosh" in written.read_text()


def test_a_dump_says_the_tier(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    _record(monkeypatch)
    x = torch.rand(3, 5)
    shown: list[str] = []
    for step in range(6):
        _often(monkeypatch, lambda step=step: step > 3)
        y = x.to("port").sin() - 3
        shown.append(torchport.dump(y).partition("\n")[0])
        torch.testing.assert_close(y.cpu(), x.sin() - 3)
    assert shown[0] == "nothing is pending"  # it was computed at once
    assert shown[2] == "# tier: interpreted, not seen before"
    assert shown[3] == "# tier: interpreted"
    assert shown[5] == "# tier: compiled"
    assert "compiled" in torchport.dump_trie()
