"""Known paths are followed without Python, and nobody can tell: values, errors, and what is traced are the same."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_support import COMPILER, compiles, said_without_and_with

import torchport
from torchport import UnsupportedOp, native
from torchport.frontend.device import writes
from torchport.run.device_runtime import runtimes
from torchport.trace import record
from torchport.trace.threads import threads

pytestmark = compiles

Program = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _built() -> Iterator[None]:
    torchport.use("reference")
    torch.ones(1, device="port")
    native.build_all([str(COMPILER)])
    yield
    torchport.sync()


def followed() -> int:
    """How many operators were traced without Python so far."""
    library = native.follow.load()
    assert library is not None, "it was not built: see the log"
    library.torchport_followed.restype = ctypes.c_ulonglong
    return library.torchport_followed()


def _inputs(seed: int, shape: tuple[int, ...] = (2, 4)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def _compare(program: Program, seed: int) -> int:
    """Run a program on both devices with the same fresh values; returns how many operators were followed."""
    expected = program(_inputs(seed))
    inputs = [value.to("port") for value in _inputs(seed)]
    before = followed()
    got = program(inputs)
    count = followed() - before
    for mine, cpu in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), cpu, equal_nan=True)
    torchport.sync()
    return count


def _in_place(a: list[torch.Tensor]) -> list[torch.Tensor]:
    a[0].add_(a[1]).mul_(2.0).clamp_(min=-1)
    a[1].sub_(a[0], alpha=3)
    a[0].add_(a[0])
    return a


def _views(a: list[torch.Tensor]) -> list[torch.Tensor]:
    row, column = a[0][0], a[0][:, 1]
    row.mul_(2)
    a[0].add_(1)
    column.zero_()
    return [*a, row, column]


def _lists(a: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_mul_(a, 0.5)
    torch._foreach_addcdiv_(a, a, torch._foreach_exp(a), [0.1, 0.2, 0.3])
    roots = torch._foreach_sqrt(torch._foreach_abs(a))
    torch._foreach_add_(a[:2], list(roots[:2]), alpha=2)
    torch._foreach_add_([a[2], a[2]], 1.0)
    return [*a, *roots]


def _several(a: list[torch.Tensor]) -> list[torch.Tensor]:
    values, places = a[0].max(1)
    left, right = a[1].split(2, 1)
    normal, mean, _ = torch.native_layer_norm(a[2], [4], None, None, 1e-5)
    return [values, places, torch.cat([right, left]), normal, mean]


def _numbers(a: list[torch.Tensor]) -> list[torch.Tensor]:
    step = float(a[2].sum())
    ints = a[0].long()
    x = a[0] * step + torch.full_like(a[0], step)
    return [x, torch.full_like(x, 0.0), a[1] * 3, ints * 2, ints * 2.5, a[0] > step, torch.lerp(a[0], a[1], 0.25)]


def _gradients(a: list[torch.Tensor]) -> list[torch.Tensor]:
    w = a[1].detach().requires_grad_()
    ((a[0] @ w.t()).relu() * 2.0).sum().backward()
    assert w.grad is not None
    return [w.grad, w.detach() - 0.1 * w.grad]


def _aliases(a: list[torch.Tensor]) -> list[torch.Tensor]:
    same = a[0].detach()
    return [a[0] * a[0], same + a[0], torch.where(a[0] > 0, a[0], same), torch.stack([a[1], a[1].detach()])]


def _outs(a: list[torch.Tensor]) -> list[torch.Tensor]:
    sums, both, half = torch.empty_like(a[0]), a[0].new_empty(4, 4), torch.zeros_like(a[1], dtype=torch.float64)
    largest, places = a[0].new_empty(2), torch.empty(2, dtype=torch.int64, device=a[0].device)
    torch.add(a[0], a[1], alpha=2, out=sums)
    torch.mul(sums, 0.5, out=sums)
    torch.div(sums, 3, rounding_mode="floor", out=half)
    torch.cat([sums, a[2]], out=both)
    torch.neg(a[1][0], out=both[1])
    torch.max(a[2], 1, out=(largest, places))
    return [sums, both, half, largest, places]


def _parts(a: list[torch.Tensor]) -> list[torch.Tensor]:
    """One memory cut by ``as_strided``, as DDP cuts the buckets that it writes gradients to."""
    bucket = a[0].new_zeros(22)
    for start, strides, value in ((0, (4, 1), a[0]), (8, (1, 2), a[1]), (14, (4, 1), a[2])):
        part = bucket.as_strided((2, 4), strides, start)
        torch.mul(value, 0.5, out=part)
        part.add_(1)
        part[0].neg_()
    return [bucket]


def _through_views(a: list[torch.Tensor]) -> list[torch.Tensor]:
    for row in range(2):
        a[0][row].add_(a[1][row])
        a[1][row] = a[2][1 - row]
    a[0].t().mul_(2)
    a[2][:, 1].neg_()
    a[2][0] = a[0][0] * 2
    a[2][0, 2:] = a[2][0, :2]  # parts of one memory
    return a


def _copies(a: list[torch.Tensor]) -> list[torch.Tensor]:
    same, wide = torch.empty_like(a[0]), torch.empty_like(a[0], dtype=torch.float64)
    same.copy_(a[0])
    wide.copy_(a[1])
    a[0].copy_(a[1] * 2)
    a[1].copy_(a[0][0])
    crossed = torch.empty_strided((2, 4), (1, 2), device=a[0].device).copy_(a[2])
    a[2].copy_(crossed.mul_(3))
    same.add_(1)
    leaf = torch.zeros_like(a[0]).requires_grad_()
    kept = torch.empty_like(a[0])
    kept.copy_(leaf * 3)
    kept.sum().backward()
    assert leaf.grad is not None
    return [*a, same, wide, crossed, kept.detach(), leaf.grad]


PROGRAMS: dict[str, Program] = {
    "through views": _through_views,
    "parts": _parts,
    "copies": _copies,
    "in place": _in_place,
    "views": _views,
    "lists": _lists,
    "several results": _several,
    "numbers": _numbers,
    "gradients": _gradients,
    "aliases": _aliases,
    "out": _outs,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_the_cpu_and_most_operators_are_followed(name: str) -> None:
    counts = [_compare(PROGRAMS[name], seed) for seed in range(6)]
    # Python records in the first run; in the second it finds each operator known, which is remembered then.
    assert counts[-1] > 3
    assert counts[-1] >= counts[2]


def test_programs_in_changing_order_from_the_same_place() -> None:
    order = random.Random(0).choices(list(PROGRAMS), k=60)
    assert sum(_compare(PROGRAMS[name], seed) for seed, name in enumerate(order)) > 100


INF, NAN = float("inf"), float("nan")
NUMBERS: list[Any] = [0, 1, 2, -1, True, False, 0.0, -0.0, 1.0, 0.5, 2.0, 1e10, INF, -INF, NAN]
WITH_NUMBER: list[Callable[[torch.Tensor, Any], torch.Tensor]] = [
    lambda x, n: x + n,
    lambda x, n: x * n,
    lambda x, n: n - x,
    lambda x, n: x / n,
    lambda x, n: torch.full_like(x, n),
    lambda x, n: x == n,
    lambda x, n: x.clone().fill_(n),
    lambda x, n: x.clone().add_(n) if x.is_floating_point() or not isinstance(n, float) else x,
    lambda x, n: torch.clamp(x, max=n),
    lambda x, n: x + torch.tensor(n),
    lambda x, n: torch.add(x, x, alpha=n) if x.is_floating_point() or isinstance(n, int) else x,
    lambda x, n: torch.nn.functional.pad(x, (1, 0), value=float(n)) if x.is_floating_point() else x,
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, len(WITH_NUMBER) - 1),
    st.sampled_from([torch.float32, torch.int64, torch.float64, torch.bool]),
    st.lists(st.sampled_from(NUMBERS), min_size=4, max_size=10),
)
def test_numbers_of_every_kind_one_after_the_other(which: int, dtype: torch.dtype, values: list[Any]) -> None:
    def outcome(device: str, number: Any) -> Any:
        x = torch.tensor([[0, 1], [2, 3]]).to(dtype).to(device)
        try:
            result = WITH_NUMBER[which](x, number)
            return result.dtype, result.shape, result.tolist()
        except (RuntimeError, TypeError, OverflowError):  # some only when the value is read
            return "refused"

    for number in values:
        assert str(outcome("port", number)) == str(outcome("cpu", number)), (which, dtype, number)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 5), st.randoms(use_true_random=False))
def test_random_programs_and_their_variants(steps: list[int], changed: int, rng: random.Random) -> None:
    def program(steps: list[int]) -> Program:
        def run(a: list[torch.Tensor]) -> list[torch.Tensor]:
            values = list(a)
            for at, step in enumerate(steps):
                x, y = values[at % len(values)], values[(at * 7 + step) % len(values)]
                number = float(a[1].flatten()[0])
                if step == 0:
                    x.add_(y)
                elif step == 1:
                    x[0].mul_(1.5)
                elif step == 2:
                    torch._foreach_add_([x, y] if x is not y else [x], number)
                elif step == 3:
                    values.append(x.t().contiguous().t())
                elif step == 4:
                    values.append(torch.cat([x[:1], y[1:]]))
                elif step == 5:
                    values.append(x.detach())
                elif step == 6:
                    values += list(x.sort(1)[:1])
                elif step == 7:
                    values.append(x * number)
                elif step == 8:
                    values.append(torch.sigmoid(x) - 1)
                else:
                    x.copy_(y)
            return values

        return run

    other = [(step + changed) % 10 if at == len(steps) // 2 else step for at, step in enumerate(steps)]
    for seed in range(7):
        _compare(program(rng.choice([steps, steps, other])), seed)


@pytest.mark.parametrize("bound", [None, 7])
def test_a_list_written_where_the_trace_looks_around(monkeypatch: pytest.MonkeyPatch, bound: int | None) -> None:
    """A write to a view traces operators; a checkpoint or flush at one of them finds what is not written yet."""
    monkeypatch.setattr(record, "CHECKPOINT_EVERY", 7)

    def program(device: str, pad: int, seed: int, in_place: bool) -> list[torch.Tensor]:
        bases = [value.to(device) + 0 for value in _inputs(seed, (2, 2))]
        for base in bases:
            base.cpu()
        x = bases[2] * 1.0
        for _ in range(pad):
            x = x * 1.5
        views = [bases[0][1], bases[1]]
        if in_place:
            torch._foreach_add_(views, 1.5)
        else:
            views = list(torch._foreach_add(views, 1.5))
        x.cpu()
        return [(views[1] * 2).cpu(), x.cpu(), views[0].cpu()]

    before = torchport.config.max_trace_ops
    object.__setattr__(torchport.config, "max_trace_ops", bound or before)  # less than users may set
    try:
        for pad in range(7):
            for seed, in_place in enumerate([False, False, False, True, True, True, False, True]):
                expected = program("cpu", pad, seed, in_place)
                for mine, cpu in zip(program("port", pad, seed, in_place), expected, strict=True):
                    torch.testing.assert_close(mine, cpu)
    finally:
        torchport.config.max_trace_ops = before


def test_the_cpu_is_asked_once_per_kind_of_call_with_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (value.to("port") for value in _inputs(0)[:2])
    sums = torch.empty_like(x)

    def call(numbers: range) -> None:
        for number in numbers:
            torch.add(x, y, alpha=3, out=sums)
            torch.testing.assert_close(sums.cpu(), _inputs(0)[0] + 3 * _inputs(0)[1], msg=str(number))
            torchport.sync()

    call(range(4))

    def unexpected(*_: Any) -> None:
        raise AssertionError("the CPU was asked again")

    with monkeypatch.context() as patch:
        patch.setattr(writes, "refuse_as_cpu", unexpected)
        before = followed()
        call(range(5))
        assert followed() - before == 10  # the operator with ``out=`` and the functional one
    wide = torch.zeros(2, 8, device="port")
    refused: list[tuple[tuple[torch.Tensor, ...], torch.Tensor]] = [
        ((x, y), torch.empty(2, 4, dtype=torch.int64, device="port")),
        ((x, y), wide[:, :3]),
        ((x, y), x[:1].expand(2, 4)),
        ((wide.view(4, 4)[:2], y), wide.view(4, 4)[1:3]),
        ((x, y[:, :3]), sums),
    ]
    for (one, other), out in refused:
        with pytest.raises(RuntimeError):
            torch.add(one, other, alpha=3, out=out)


def test_parts_that_as_strided_cuts_are_written_without_python() -> None:
    for seed in range(6):
        bucket, value = torch.zeros(16, device="port"), _inputs(seed)[0].to("port")
        part = bucket.as_strided((2, 4), (4, 1), 4)
        before = followed()
        torch.mul(value, 0.5, out=part)
        count = followed() - before
        torch.testing.assert_close(part.cpu(), _inputs(seed)[0] * 0.5)
        torchport.sync()
    assert count == 4  # the write, its functional operator, into the memory, and out of it


def test_a_view_that_python_refuses_to_write_is_not_followed() -> None:
    x = torch.ones(2, 2, device="port")
    for _ in range(4):
        assert torch.add(x, x, out=torch.zeros(2, 2, device="port")).tolist() == [[2, 2], [2, 2]]
    memory = torch.zeros(16, device="port")
    odd = memory.view(4, 4).detach().as_strided((2, 2), (2, 1), 4)
    for write in (lambda: torch.add(x, x, out=odd), lambda: odd.add_(x), lambda: odd.copy_(x)):
        for _ in range(3):
            with pytest.raises(UnsupportedOp, match=r"as_strided\(\) of a detached view"):
                write()
    assert not memory.any()


def test_new_batches_are_followed_as_well() -> None:
    w = _inputs(0)[0].to("port") + 0
    w.cpu()
    counts = []
    for seed in range(70):
        batch = _inputs(seed)[1].to("port")
        before = followed()
        result = (batch * w + 1).relu()
        counts.append(followed() - before)
        torch.testing.assert_close(result.cpu(), (_inputs(seed)[1] * _inputs(0)[0] + 1).relu())
    assert counts[2:] == [3] * 68


def test_a_new_batch_ends_the_work_on_the_former_one() -> None:
    def flushes() -> int:
        return torchport.metrics.snapshot()["counters"].get("Flush: copy", 0)

    w = _inputs(0)[0].to("port") + 0
    w.cpu()
    kept = []
    before = flushes()
    with torch.no_grad():
        for seed in range(6):
            kept.append((_inputs(seed)[1].to("port") * w).relu())
    assert flushes() - before == 5
    for seed, result in enumerate(kept):
        torch.testing.assert_close(result.cpu(), (_inputs(seed)[1] * _inputs(0)[0]).relu())


def test_a_trie_that_starts_anew_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    with torchport.config.override(max_trace_nodes=20):
        for seed in range(40):
            _compare(PROGRAMS[random.Random(seed).choice(list(PROGRAMS))], seed)
    runtimes.get(0).forget_decisions()
    assert _compare(_in_place, 1) == 0
    assert [_compare(_in_place, seed) > 0 for seed in range(3)] == [False, True, True]


def test_eager_mode_does_not_follow() -> None:
    for seed in range(3):
        _compare(_in_place, seed)
    with torchport.mode("eager"):
        assert _compare(_in_place, 4) == 0
    assert _compare(_in_place, 5) > 0


def test_two_threads_follow_paths_of_their_own() -> None:
    shared = _inputs(7)[0].to("port") + 0
    errors: list[BaseException] = []

    def work(which: str) -> None:
        try:
            for seed in range(15):
                expected = PROGRAMS[which]([value.clone() for value in _inputs(seed)])
                got = PROGRAMS[which]([value.to("port") for value in _inputs(seed)])
                torch.testing.assert_close((shared + seed).cpu(), _inputs(7)[0] + seed)
                for mine, cpu in zip(got, expected, strict=True):
                    torch.testing.assert_close(mine.cpu(), cpu)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(name,)) for name in ("lists", "views", "several results")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors[0]


def test_mistakes_are_told_as_before() -> None:
    a, b = (value.to("port") for value in _inputs(0)[:2])
    for _ in range(4):
        (a + b).sum().item()
    with pytest.raises(RuntimeError, match="size"):
        a + torch.ones(3, device="port")
    with pytest.raises(torchport.DeviceMismatch):
        a + torch.ones(2, 4)
    with pytest.raises(RuntimeError):
        a.add_(torch.ones(3, device="port"))
    torch.testing.assert_close((a + b).cpu(), sum(_inputs(0)[:2]))
    assert threads.trace.cursor is threads.trace.root


WHAT_IS_TRACED = """
import torch, torchport
torchport.use("reference")
torch.manual_seed(0)
layers = torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
net = torch.nn.Sequential(*layers).to("port")
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    loss = net(torch.full((3, 4), float(step)).to("port")).square().mean()
    loss.backward()
    optimizer.step()
    print(round(loss.item(), 5))
with torch.no_grad():
    for step in range(4):
        net(torch.full((3, 4), float(step)).to("port"))
counters = torchport.metrics.snapshot()["counters"]
print({name: counters.get(name) for name in ("Flush", "TracedOps", "UncachedCompile", "Execute", "Flush: copy")})
"""


def test_what_is_traced_and_computed_is_the_same() -> None:
    without, with_them = said_without_and_with(WHAT_IS_TRACED)
    assert without == with_them
