"""Random programs of operators, views, writes, copies and dropped references, compared with the CPU after every step.

Each program runs several times on different data, so that what died in one run is handed out again in the next, while
some values, with their autograd graphs, are kept from run to run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday_support import DEVICE, needs_counters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Instruction = tuple[str, int, int, int]
Program = list[Instruction]

RUNS = 4
MOST_VALUES = 12
SHAPES = ((2, 3), (3,), (3, 2), (1,), (3, 3))

NEW: list[Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = [
    lambda a, b, f: torch.tanh(a + b),
    lambda a, b, f: (a * b).sin(),
    lambda a, b, f: torch.maximum(a, b) * f,
    lambda a, b, f: torch.where(a > b, a, b - 1.0).clamp(-4, 4),
    lambda a, b, f: torch.lerp(a, b, 0.25),
    lambda a, b, f: torch.addcmul(a, a, b, value=f).tanh(),
    lambda a, b, f: torch.cat([a, b])[-4:],
    lambda a, b, f: a.cumsum(-1).cos(),
    lambda a, b, f: a.sort(-1).values,
    lambda a, b, f: a.max(-1).values,
    lambda a, b, f: torch.var_mean(a, -1, correction=0)[1],
    lambda a, b, f: a.mean(0, keepdim=True) + f,
    lambda a, b, f: a.clone(),
    lambda a, b, f: a.flip(0),
    lambda a, b, f: torch.stack([a, a * f])[1],
    lambda a, b, f: a.gather(0, torch.zeros_like(a, dtype=torch.int64)),
    lambda a, b, f: torch.full_like(a, f),
    lambda a, b, f: torch.nn.functional.softmax(a, -1),
    lambda a, b, f: a.matmul(b).tanh(),
    lambda a, b, f: torch.zeros(3, device=a.device) + a[..., :1],
    lambda a, b, f: a.masked_fill(a > f, f),
    lambda a, b, f: a.bfloat16().float(),
]

VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x[..., ::2],
    lambda x: x.t(),
    lambda x: x.view(-1),
    lambda x: x.unsqueeze(0),
    lambda x: x.detach(),
    lambda x: x.data,
    lambda x: x.diagonal(),
    lambda x: x.split(1)[-1],
    lambda x: x.unbind(0)[0],
    lambda x: x.transpose(0, -1)[:2],
    lambda x: x[...],
]

WRITES: list[Callable[[torch.Tensor, torch.Tensor, float], object]] = [
    lambda a, b, f: a.add_(b).tanh_(),
    lambda a, b, f: a.mul_(f),
    lambda a, b, f: a.fill_(f),
    lambda a, b, f: a.copy_(b),
    lambda a, b, f: a.__setitem__(0, f),
    lambda a, b, f: a.__setitem__(a > f, f),
    lambda a, b, f: a.__setitem__((..., slice(0, 1)), b.detach()[..., :1]),
    lambda a, b, f: a.zero_(),
    lambda a, b, f: a.clamp_(-f, f),
    lambda a, b, f: a.data.sub_(f),
    lambda a, b, f: a.masked_fill_(b > 0, f),
    lambda a, b, f: a.copy_(torch.full(a.shape, f)),
    lambda a, b, f: torch.sin(a, out=a) if not a.requires_grad else a.sin_(),
    lambda a, b, f: a.index_add_(0, torch.zeros(1, dtype=torch.int64, device=a.device), a.detach()[:1].clone()),
]

LENIENT = ("single memory location", "view size is not compatible")
"""What the CPU refuses and the device need not: writes to overlapping memory, and views of strides only the CPU has."""

KINDS = {
    "new": 6, "view": 5, "write": 5, "make": 3, "read": 2, "drop": 3, "keep": 2, "item": 1, "sync": 1,
    "to host and back": 1, "host write": 1, "backward": 2, "grad of grad": 1,
}  # fmt: skip

programs: st.SearchStrategy[Program] = st.lists(
    st.tuples(
        st.sampled_from([kind for kind, weight in KINDS.items() for _ in range(weight)]),
        st.integers(0, 23),
        st.integers(0, 23),
        st.integers(0, 23),
    ),
    min_size=3,
    max_size=30,
)


class Pair:
    """The same value on the CPU and on the device."""

    def __init__(self, cpu: torch.Tensor, port: torch.Tensor) -> None:
        self.cpu = cpu
        self.port = port

    @property
    def is_leaf(self) -> bool:
        """Whether nothing made it; PyTorch refuses to tell of some views whose base was written."""
        try:
            return self.cpu.is_leaf
        except RuntimeError:
            return False

    def check(self, where: str) -> None:
        assert (self.port.shape, self.port.dtype, self.port.requires_grad) == (
            self.cpu.shape,
            self.cpu.dtype,
            self.cpu.requires_grad,
        ), where
        got, want = self.port.detach().cpu(), self.cpu.detach()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda m: f"{where}: {m}")


class Machine:
    """Runs programs on the CPU and on the device in lockstep; both have to refuse the same instructions."""

    def __init__(self, grad: bool, shared: Pair | None = None) -> None:
        self.grad = grad
        self.shared = shared
        self.values: list[Pair] = []
        self.kept: list[Pair] = []

    def both(self, fn: Callable[..., Any], *pairs: Pair) -> Any:
        """``fn`` on both; ``None`` if the CPU refuses, when the device has to refuse as well."""
        with torch.set_grad_enabled(self.grad):
            try:
                cpu = fn(*(pair.cpu for pair in pairs))
            except (RuntimeError, IndexError) as error:
                if any(text in str(error) for text in LENIENT):
                    return None
                with pytest.raises((RuntimeError, IndexError)):
                    fn(*(pair.port for pair in pairs))
                return None
            port = fn(*(pair.port for pair in pairs))
        return Pair(cpu, port) if isinstance(cpu, torch.Tensor) else (cpu, port)

    def make(self, shape: tuple[int, ...], parameter: bool, data: random.Random) -> Pair:
        values = torch.tensor([data.uniform(-2, 2) for _ in range(torch.Size(shape).numel())]).reshape(shape)
        pair = Pair(values.clone(), values.to(DEVICE))
        values.fill_(float("nan"))  # the device has a copy of its own
        if parameter and self.grad:
            pair.cpu.requires_grad_()
            pair.port.requires_grad_()
        return pair

    def add(self, pair: Pair | None) -> None:
        if pair is not None and pair.cpu.numel():
            self.values.append(pair)
            del self.values[:-MOST_VALUES]

    def run(self, program: Program, seed: int) -> None:
        """One run of a program on the data of a seed, and a look at every value at the end."""
        data = random.Random(seed)
        self.values = [self.make((2, 3), True, data), self.make((3,), False, data), *self.kept[-3:]]
        self.kept = self.kept[-3:]
        for place, (kind, i, j, k) in enumerate(program):
            if not self.values:
                self.add(self.make((3, 3), False, data))
            a, b = self.values[i % len(self.values)], self.values[j % len(self.values)]
            if self.shared is not None and k % 3 == 0:
                b = self.shared
            self.step(kind, a, b, k, data, f"run {seed}, instruction {place}: {kind} {i} {j} {k}")
            del a, b
        for place, pair in enumerate((*self.values, *self.kept)):
            pair.check(f"run {seed}, value {place} at the end")

    def step(self, kind: str, a: Pair, b: Pair, k: int, data: random.Random, where: str) -> None:
        number = round(data.uniform(0.5, 1.5), 2)
        if kind == "new":
            fn = NEW[k % len(NEW)]
            self.add(self.both(lambda x, y: fn(x, y, number), a, b))
        elif kind == "view":
            self.add(self.both(VIEWS[k % len(VIEWS)], a))
        elif kind == "write":
            write = WRITES[k % len(WRITES)]
            self.both(lambda x, y: bool(write(x, y, number) is None), a, b)
        elif kind == "make":
            self.add(self.make(SHAPES[k % len(SHAPES)], k % 2 == 0, data))
        elif kind == "read":
            a.check(where)
        elif kind == "drop":
            self.values.remove(a)
        elif kind == "keep":
            self.kept.append(a)
        elif kind == "item":
            found = self.both(lambda x: x.sum().item(), a)
            if found is not None:
                assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-3, nan_ok=True), where
        elif kind == "sync":
            torch.port.synchronize()  # type: ignore[attr-defined]
        elif kind == "to host and back":
            self.add(Pair(a.cpu.detach().clone(), a.port.detach().cpu().to(DEVICE)))
        elif kind == "host write":
            host = a.port.detach().cpu()
            host += 1
            torch.testing.assert_close(host, a.cpu.detach() + 1, rtol=1e-4, atol=1e-4, equal_nan=True)
            a.check(where)
        elif self.grad:
            self.differentiate(kind, a, where)

    def differentiate(self, kind: str, a: Pair, where: str) -> None:
        parameters = [pair for pair in self.values if pair.is_leaf and pair.cpu.requires_grad]

        def grads(x: torch.Tensor, *leaves: torch.Tensor) -> Any:
            first = torch.autograd.grad(x.sum(), leaves, create_graph=kind != "backward", retain_graph=True,
                                        allow_unused=True)  # fmt: skip
            squares = [(g * g).sum() for g in first if g is not None]
            if kind == "backward" or not squares:
                return first
            return torch.autograd.grad(torch.stack(squares).sum(), leaves, retain_graph=True, allow_unused=True)

        found = self.both(grads, a, *parameters) if parameters else None
        for cpu, port in zip(*found, strict=True) if found is not None else ():
            assert (cpu is None) == (port is None), where
            if cpu is not None:
                pair = Pair(cpu.clone(), port.clone())  # gradients of sums are expanded: CPU does not write to such
                if len(cpu) % 2:
                    pair.check(where)
                self.add(pair)


def run_often(program: Program, grad: bool, shared: Pair | None = None) -> None:
    machine = Machine(grad, shared)
    for seed in range(RUNS):
        machine.run(program, seed)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(autouse=True)
def _reference() -> None:
    if DEVICE == "port":
        import torchport

        torchport.use("reference")


@given(program=programs, grad=st.booleans())
@examples(150)
def test_programs_agree_with_the_cpu(program: Program, grad: bool) -> None:
    run_often(program, grad)


@pytest.mark.slow
@given(program=programs, grad=st.booleans())
@examples(2000)
def test_many_programs_agree_with_the_cpu(program: Program, grad: bool) -> None:
    run_often(program, grad)


def random_program(seed: int) -> Program:
    draw = random.Random(seed)
    kinds = random.Random(seed).choices(list(KINDS), list(KINDS.values()), k=25)
    return [(kind, draw.randrange(24), draw.randrange(24), draw.randrange(24)) for kind in kinds]


def in_threads(work: list[Callable[[], Any]]) -> None:
    """Run all at once; raises the first thing that went wrong."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(work))

    def run(fn: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            fn()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(fn,)) for fn in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 30))])
def test_threads_with_programs_of_their_own(seed: int) -> None:
    in_threads([lambda s=s: run_often(random_program(4 * seed + s), s % 2 == 0) for s in range(4)])  # type: ignore[misc]


# -- what such programs and a reading of the core have found, in short ------------------------------------------------


@pytest.mark.parametrize("seed", [100, *(pytest.param(s, marks=pytest.mark.slow) for s in range(101, 110))])
def test_threads_that_share_a_value(seed: int) -> None:
    values = torch.tensor([0.5, -1.0, 2.0])
    shared = Pair(values, values.to(DEVICE))
    in_threads([lambda s=s: run_often(random_program(4 * seed + s), False, shared) for s in range(4)])  # type: ignore[misc]


def test_two_threads_use_one_value_in_turn() -> None:
    """A leaf remembers one number: the younger trace's number must not confuse the older one."""
    shared = torch.ones(3).to(DEVICE)
    used, done = threading.Event(), threading.Event()

    def other() -> None:
        pending = shared * 4
        used.set()
        assert done.wait(60)
        assert pending.tolist() == [4.0] * 3

    def this() -> None:
        first = shared + 1
        thread.start()
        assert used.wait(60)
        try:
            assert (first * shared).tolist() == [2.0] * 3
        finally:
            done.set()

    thread = threading.Thread(target=other)
    try:
        this()
    finally:
        thread.join(60)


def test_a_value_another_thread_has_read_is_not_handed_out_again() -> None:
    for step in range(4):
        value = torch.full((3,), float(step)).to(DEVICE) * 2
        in_threads([value.tolist])
        assert value.tolist() == [2.0 * step] * 3
        del value
        torch.port.synchronize()  # type: ignore[attr-defined]


def test_detach_of_what_another_thread_has_pending() -> None:
    made, done = threading.Event(), threading.Event()
    box: list[torch.Tensor] = []

    def other() -> None:
        box.append(torch.full((3,), 5.0).to(DEVICE) * 2)
        made.set()
        assert done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert made.wait(60)
    try:
        mine = torch.ones(3).to(DEVICE) + 1
        theirs = box[0].detach()
        assert (mine * 3).tolist() == [6.0] * 3
        assert theirs.tolist() == [10.0] * 3
    finally:
        done.set()
        thread.join(60)


def test_a_view_after_a_transposed_value_was_copied_in() -> None:
    base, other = torch.zeros(2, 3).to(DEVICE), torch.arange(6.0).reshape(3, 2).to(DEVICE)
    base.copy_(other.t())
    assert base.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert base.view(-1).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


def test_a_write_keeps_the_strides_that_reshape_goes_by() -> None:
    results = []
    for device in ("cpu", DEVICE):
        base = torch.arange(6.0).reshape(2, 3).to(device)
        view = base.t()
        view.masked_fill_(torch.ones(3, 2, dtype=torch.bool).to(device), 2.0)
        view.flatten().zero_()  # of a copy: the view is not contiguous
        results.append((base.tolist(), view.stride()))
    assert results[0] == results[1]


@pytest.fixture
def failing() -> Iterator[Callable[[BaseException | None], None]]:
    """Makes every execution raise what it is given."""
    import torchport
    from torchport.backends.reference import ReferenceBackend

    raised: list[BaseException | None] = [None]

    class Failing(ReferenceBackend):
        name = f"failing_{random.randrange(1 << 40)}"

        def execute(self, *args: Any) -> Any:
            if raised[0] is not None:
                raise raised[0]
            return super().execute(*args)

    torchport.register(Failing)
    torchport.use(Failing.name)
    yield lambda error: raised.__setitem__(0, error)
    torchport.use("reference")


def failed_value(failing: Callable[[BaseException | None], None]) -> torch.Tensor:
    failing(ValueError("on purpose"))
    value = torch.ones(2).to(DEVICE) * 7
    with pytest.raises(RuntimeError):
        value.tolist()
    failing(None)
    return value


@needs_counters
@pytest.mark.parametrize("operand", ["leaf", "number"])
def test_a_failed_operand_leaves_nothing_of_its_call_in_the_trace(failing: Any, operand: str) -> None:
    failed = failed_value(failing)
    for size, refused in ((2, True), (5, True), (3, False), (4, True)):
        x = torch.ones(size).to(DEVICE)
        if refused:
            with pytest.raises(RuntimeError):
                (x if operand == "leaf" else torch.tensor(2.5)) * failed
        y = x * 0.5
        assert y.shape == (size,)
        assert y.tolist() == [0.5] * size
        if operand == "number":
            torch.port.synchronize()  # type: ignore[attr-defined]
            z = torch.ones(2).to(DEVICE)
            if size != 2:
                with pytest.raises(RuntimeError):
                    torch.tensor(2.5) * failed
            assert (z * 0.5).tolist() == [0.5] * 2


@needs_counters
def test_an_interrupted_flush_can_be_repeated(failing: Any) -> None:
    value = torch.ones(2).to(DEVICE) * 3
    failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        value.tolist()
    failing(None)
    assert value.tolist() == [3.0, 3.0]
