"""Random programs of everything a program may do to tensors besides computing: modes, threads, random numbers, data
swapped under a parameter, deep copies, optimizers, lists, failures. Compared with the CPU after every run.

The machine of :mod:`test_property_aliasing` with more instructions. Random numbers are compared with those that another
thread draws from the same state of the generator, at once and without touching this thread's trace.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday_support import DEVICE, needs_counters
from hypothesis import given
from hypothesis import strategies as st
from test_property_aliasing import KINDS, Machine, Pair, Program, examples, in_threads
from torch import nn

import torchport

pytestmark = needs_counters

RANDOM: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.rand_like,
    lambda x: torch.randn(3, device=x.device),
    lambda x: nn.functional.dropout(x, 0.5),
    lambda x: x.detach().clone().normal_(0.5, 2.0),
    lambda x: torch.bernoulli(torch.full_like(x, 0.3)) * x,
    lambda x: torch.randint(0, 5, (3,), device=x.device).float(),
    lambda x: torch.randperm(3, device=x.device).float(),
    lambda x: nn.functional.rrelu(x, training=True),
]

LISTS: list[Callable[[list[torch.Tensor], float], object]] = [
    lambda v, f: torch._foreach_add_(v, f),
    lambda v, f: torch._foreach_mul_(v, [f] * len(v)),
    lambda v, f: torch._foreach_lerp_(v, [x.clone() for x in v], 0.5),
    lambda v, f: torch._foreach_zero_(v),
    lambda v, f: torch._foreach_clamp_max_(v, f),
    lambda v, f: torch._foreach_copy_(v, [x.flip(0) for x in v]),
]

SHAPELESS: list[Callable[[torch.Tensor, float], torch.Tensor]] = [
    lambda x, f: x[x > f],
    lambda x, f: torch.nonzero(x > f).float(),
    lambda x, f: x.unique(),
    lambda x, f: torch.masked_select(x, x < f),
    lambda x, f: x.repeat_interleave(torch.tensor([2], device=x.device), dim=0) if x.shape[0] == 1 else x.clone(),
]

REFUSED: list[Callable[[torch.Tensor], object]] = [
    lambda x: x + torch.ones(7, 11, device=x.device),
    lambda x: x @ torch.ones(13, 5, device=x.device),
    lambda x: x.sum(dim=9),
    lambda x: x.view(17),
    lambda x: x.add_(torch.ones(5, *x.shape, device=x.device)),
]

OPTIMIZERS: list[Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.05),
    lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
]

MORE = {
    "random": 4, "list": 2, "shapeless": 1, "refused": 1, "mode": 2, "thread": 2, "deepcopy": 1, "set data": 2,
    "no grad": 2, "inference": 1, "detach in place": 1, "expand and fill": 1, "accumulate": 2, "step": 2, "pickle": 1,
    "out": 1, "swap": 1, "seed": 1, "cut": 1, "shadow": 2,
}  # fmt: skip

more_programs: st.SearchStrategy[Program] = st.lists(
    st.tuples(
        st.sampled_from([kind for kind, weight in (KINDS | MORE).items() for _ in range(weight)]),
        st.integers(0, 23),
        st.integers(0, 23),
        st.integers(0, 23),
    ),
    min_size=3,
    max_size=30,
)


def elsewhere(fn: Callable[[], Any]) -> Any:
    """What ``fn`` gives on another thread, whose traces are its own."""
    box: list[Any] = []
    in_threads([lambda: box.append(fn())])
    return box[0]


class Programs(Machine):
    """The machine with more instructions."""

    def __init__(self, grad: bool, seed: int) -> None:
        super().__init__(grad)
        self.optimizers: list[tuple[Any, Any]] = []
        torch.manual_seed(seed)

    def step(self, kind: str, a: Pair, b: Pair, k: int, data: random.Random, where: str) -> None:
        method = getattr(self, "do_" + kind.replace(" ", "_"), None)
        if method is None:
            super().step(kind, a, b, k, data, where)
        else:
            method(a, b, k, round(data.uniform(0.5, 1.5), 2), where)

    # -- random numbers
    def do_random(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        draw = RANDOM[k % len(RANDOM)]
        port: Any = torch.port  # type: ignore[attr-defined]
        state = port.get_rng_state()
        given = a.cpu.detach().clone()

        def expected() -> torch.Tensor:
            torchport.mode("eager" if k % 2 else "lazy")
            x = given.to(DEVICE)
            port.set_rng_state(state)
            return draw(x).detach().cpu().clone()

        cpu = elsewhere(expected)
        after = port.get_rng_state()
        port.set_rng_state(state)
        with torch.set_grad_enabled(self.grad):
            made = draw(a.port.detach())
        assert port.get_rng_state().tolist() == after.tolist(), where
        self.add(Pair(cpu, made.detach()))

    def do_seed(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        torch.manual_seed(k)

    # -- how it runs
    def do_mode(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        torchport.mode("eager" if k % 2 else "lazy")

    def do_cut(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        torchport.sync(wait=k % 2 == 0)

    def do_thread(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        """Another thread computes with a value, writes to it, or reads it."""

        def work(x: torch.Tensor) -> Any:
            with torch.no_grad():
                if k % 3 == 0:
                    return x * number + 1
                if k % 3 == 1:
                    return x.sum().item()
                x.detach().mul_(number)
                return x.detach()[:1] + 1

        def on_port(x: torch.Tensor) -> Any:
            return work(x) if x is a.cpu else elsewhere(lambda: work(x))

        found = self.both(on_port, a)
        if isinstance(found, Pair):
            self.add(found)
        elif found is not None:
            cpu, port = found
            assert port == pytest.approx(cpu, rel=1e-4, abs=1e-3, nan_ok=True), where

    def do_refused(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        fn = REFUSED[k % len(REFUSED)]
        self.both(lambda x: bool(fn(x)), a)

    # -- tensors and what they hold
    def do_shapeless(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        fn = SHAPELESS[k % len(SHAPELESS)]
        found = self.both(lambda x: fn(x.detach(), number), a)
        if found is not None and _safe(a.cpu, number):
            self.add(found)

    def do_list(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        fn = LISTS[k % len(LISTS)]
        pairs = [pair for pair in (a, b, *self.values[:2]) if not pair.cpu.requires_grad]
        if pairs:
            self.both(lambda *v: bool(fn(list(v), number) is None), *pairs)

    def do_deepcopy(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        self.add(self.both(lambda x: copy.deepcopy(x if k % 2 else x.detach()), a))

    def do_pickle(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        def through_a_file(x: torch.Tensor) -> torch.Tensor:
            file = io.BytesIO()
            torch.save(x.detach(), file)
            file.seek(0)
            return torch.load(file)

        self.add(self.both(through_a_file, a))

    def do_set_data(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        def put(x: torch.Tensor, y: torch.Tensor) -> bool:
            x.data = (y.detach() * number) if k % 2 else y.data
            return True

        if a.cpu.shape == b.cpu.shape and a.cpu.dtype == b.cpu.dtype and not a.cpu._is_view() and a.is_leaf:
            self.both(put, a, b)

    def do_swap(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        if a is not b and not a.cpu._is_view() and not b.cpu._is_view() and a.is_leaf and b.is_leaf:
            a.cpu, b.cpu = b.cpu, a.cpu
            a.port, b.port = b.port, a.port

    def do_no_grad(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        def write(x: torch.Tensor, y: torch.Tensor) -> bool:
            with torch.no_grad():
                if k % 2:
                    x.mul_(number).add_(y.detach().sum())
                else:
                    x.view(x.shape)[:1] = number
            return True

        self.both(write, a, b)

    def do_inference(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                made = x * number
                made[:1].add_(1)
            return made.clone()

        self.add(self.both(run, a))

    def do_detach_in_place(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        if not a.cpu._is_view():
            self.both(lambda x: bool(x.detach_() is x), a)

    def do_expand_and_fill(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        def fill(x: torch.Tensor) -> torch.Tensor:
            row = x.detach().clone()[:1]
            wide = row.unsqueeze(0).expand(3, *row.shape)
            if k % 2:
                wide.fill_(number)
            else:
                wide[1:].zero_()
            return row

        self.add(self.both(fill, a))

    def do_out(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            made = torch.zeros_like(x.detach())
            torch.mul(x.detach(), number, out=made)
            torch.add(x.detach(), made, out=made)
            return made

        self.add(self.both(run, a))

    def do_shadow(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        """A value that dies at once, after it was used, kept by autograd only, or never used."""

        def run(x: torch.Tensor) -> torch.Tensor:
            dead = (x * number).exp()
            kept = dead.tanh() if k % 2 else x.clone()
            del dead
            return kept

        self.add(self.both(run, a))

    # -- training
    def do_accumulate(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        leaves = [pair for pair in self.values if pair.is_leaf and pair.cpu.requires_grad]
        if not self.grad or not a.cpu.requires_grad:
            return

        def run(x: torch.Tensor, *parameters: torch.Tensor) -> bool:
            (x * number).sum().backward(retain_graph=True)
            return True

        if self.both(run, a, *leaves) is None:
            return
        for pair in leaves:
            assert (pair.cpu.grad is None) == (pair.port.grad is None), where
            if pair.cpu.grad is not None and k % 2:
                Pair(pair.cpu.grad, pair.port.grad).check(where)  # type: ignore[arg-type]

    def do_step(self, a: Pair, b: Pair, k: int, number: float, where: str) -> None:
        make = OPTIMIZERS[k % len(OPTIMIZERS)]
        found = [p for p in self.values if p.is_leaf and p.cpu.requires_grad and p.cpu.grad is not None]
        leaves = list({id(p.cpu): p for p in found}.values())  # a parameter given twice is stepped otherwise in lists
        if not leaves:
            return
        pair = (make([p.cpu for p in leaves]), make([p.port for p in leaves]))
        for step in range(2):
            for optimizer in pair:
                optimizer.param_groups[0]["lr"] = number / (step + 1)
                optimizer.step()
        if k % 2:
            for optimizer in pair:
                optimizer.zero_grad(set_to_none=k % 4 == 1)


def _safe(x: torch.Tensor, number: float) -> bool:
    """Whether rounding cannot change which elements a comparison picks."""
    values = x.detach().flatten().sort().values
    apart = ((values - number).abs() > 1e-3).all() and (values.diff() > 1e-3).all()
    return bool(apart)


_seeds = itertools.count()


def run_program(program: Program, grad: bool, seed: int = 0, runs: int = 4) -> None:
    machine = Programs(grad, seed)
    try:
        for number in range(runs):
            machine.run(program, number)
    finally:
        torchport.mode("lazy")
        with contextlib.suppress(torchport.TorchportError):
            torchport.sync()


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    torchport.use("reference")
    yield
    torchport.mode("lazy")


@pytest.fixture(params=["inline", "worker"])
def execution(request: pytest.FixtureRequest) -> Iterator[str]:
    with torchport.config.override(execution=request.param):
        yield request.param
        torchport.sync()


@given(program=more_programs, grad=st.booleans())
@examples(15)
def test_programs_agree_with_the_cpu(execution: str, program: Program, grad: bool) -> None:
    run_program(program, grad)


@pytest.mark.slow
@given(program=more_programs, grad=st.booleans())
@examples(800)
def test_many_programs_agree_with_the_cpu(execution: str, program: Program, grad: bool) -> None:
    run_program(program, grad)


def random_program(seed: int, length: int = 25) -> Program:
    draw = random.Random(seed)
    every = KINDS | MORE
    kinds = draw.choices(list(every), list(every.values()), k=length)
    return [(kind, draw.randrange(24), draw.randrange(24), draw.randrange(24)) for kind in kinds]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 20))])
def test_threads_with_programs_of_their_own(execution: str, seed: int) -> None:
    """Without random numbers, which threads take from one generator."""

    def work(number: int) -> Callable[[], None]:
        program = [step for step in random_program(number, 40) if step[0] not in ("random", "seed")]
        return lambda: run_program(program, number % 2 == 0, runs=3)

    in_threads([work(4 * seed + number) for number in range(4)])


if __name__ == "__main__":  # a search of its own: python test_property_programs.py SECONDS FIRST_SEED
    import sys
    import time
    import traceback

    from test_lazy_donation import Poisoning

    until, first = time.monotonic() + float(sys.argv[1]), int(sys.argv[2])
    names = ["reference", Poisoning.install().name]
    failures = 0
    for seed in itertools.count(first):
        if time.monotonic() > until or failures > 5:
            print(f"{seed - first} programs, {failures} failures")
            break
        torchport.use(names[seed // 100 % 2])
        try:
            with torchport.config.override(execution=("inline", "worker", "auto")[seed % 3]):
                run_program(random_program(seed, 10 + seed % 30), seed % 2 == 0, seed)
        except BaseException as error:
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}")
            traceback.print_exc(limit=-4)
            torchport.mode("lazy")
