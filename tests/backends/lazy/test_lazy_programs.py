"""Programs as people write them: how many computations they come to, and that these settle."""

from __future__ import annotations

import gc
import sys
from typing import Any
from unittest import mock

import fakes
import pytest
import torch
from everyday_support import counted, needs_counters, ramp, randn
from torch import nn

import torchport
from torchport.trace import finalizers
from torchport.trace.threads import threads

pytestmark = needs_counters


# -- where a trace ends ------------------------------------------------------------------------------------------------
def test_reading_a_view_of_a_pending_value_computes_it_once() -> None:
    runs = fakes.CountingBackend.install()
    x = torch.ones(4, device=runs.device)
    y = x.exp()
    view = y.view(2, 2)[1]
    assert view.tolist() == pytest.approx([2.7182818] * 2)
    assert y.tolist() == pytest.approx([2.7182818] * 4)
    assert (view.sum() + y.sum()).item() == pytest.approx(6 * 2.7182818)
    assert runs.count("aten.exp.default") == 1


def test_a_long_computation_without_reads_is_cut_at_the_bound(device: torch.device) -> None:
    def run() -> torch.Tensor:
        x = ramp(3, device=device)
        for _ in range(2_000):
            x = x * 0.5 + 1.5
        return x

    with torchport.config.override(max_trace_ops=512):
        first = run()
        torchport.sync()
        with counted() as counts:
            last = run()
    assert counts["Flush: op"] == 2 * 2_000 // 512
    assert counts["Execute"] == counts["Flush: op"] + 1, "and the rest"
    assert counts["UncachedCompile"] == 0
    assert last.tolist() == first.tolist() == pytest.approx([3.0] * 3)


# -- numbers that vary -------------------------------------------------------------------------------------------------
def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))


def by_hand(optimizer: torch.optim.Optimizer) -> Any:
    class Schedule:
        steps = 0

        def step(self) -> None:
            self.steps += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / self.steps
                if "momentum" in group:
                    group["momentum"] = 0.9 - 0.001 * self.steps

    return Schedule()


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)


@pytest.mark.parametrize("schedule", [warm_up, by_hand, one_cycle])
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_schedule_of_a_hundred_steps_compiles_nothing_new(
    device: torch.device, schedule: Any, kind: str, foreach: bool
) -> None:
    compiled: list[int] = []

    def train(d: torch.device | str, steps: int) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1).to(d)
        options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.05, foreach=foreach, **options)
        plan = schedule(optimizer)
        for step in range(steps):
            if step == 4:
                compiled.append(torchport.metrics.counter("UncachedCompile"))
            optimizer.zero_grad()
            (net(torch.ones(2, 3).to(d)) - 1).square().mean().backward()
            optimizer.step()
            plan.step()
        compiled.append(torchport.metrics.counter("UncachedCompile"))
        return net.weight.flatten().tolist()

    actual = train(device, 104)
    assert compiled[0] == compiled[1]
    assert actual == pytest.approx(train("cpu", 104), rel=1e-3, abs=1e-5)


# -- generation --------------------------------------------------------------------------------------------------------
class Decoder(nn.Module):
    """One layer of attention over a cache of fixed size, written at a position that is a tensor."""

    def __init__(self, width: int = 8, longest: int = 32, words: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.register_buffer("keys", torch.zeros(longest, width))
        self.register_buffer("values", torch.zeros(longest, width))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embed(token)
        key, value = self.pair(x).chunk(2, -1)
        self.keys.index_copy_(0, position, key)
        self.values.index_copy_(0, position, value)
        scores = self.query(x) @ self.keys.t()
        seen = torch.arange(len(self.keys), device=x.device) <= position
        return self.head(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.values + x)


@pytest.mark.parametrize("count_by", ["tensor", "integer"])
def test_generation_with_a_cache_of_fixed_size_is_one_computation(device: torch.device, count_by: str) -> None:
    torch.manual_seed(0)
    net = Decoder()

    def generate(d: torch.device | str, length: int) -> list[int]:
        net.to(d)
        token, position = torch.zeros(1, dtype=torch.int64, device=d), torch.zeros(1, dtype=torch.int64, device=d)
        tokens: list[int] = []
        with torch.no_grad():
            for at in range(length):
                if count_by == "integer":
                    position = torch.tensor([at], device=d)
                token = net(token, position).argmax(-1)
                if count_by == "tensor":
                    position = position + 1
                tokens.append(int(token.item()))
        return tokens

    expected = generate("cpu", 24)
    assert generate(device, 4) == expected[:4]
    with counted() as counts:
        assert generate(device, 24) == expected
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] <= 24 + 1
    assert counts["Fallback"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "static"])
def test_gpt2_generates_what_the_cpu_does_and_knows_it_the_second_time(device: torch.device, cache: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 29, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    net = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[1, 2, 3]])

    def generate(d: torch.device | str) -> list[list[int]]:
        options = {"cache_implementation": cache} if cache else {}
        return net.to(d).generate(prompt.to(d), max_new_tokens=6, do_sample=False, **options).tolist()

    expected = generate("cpu")
    assert generate(device) == expected
    with counted() as counts:
        assert generate(device) == expected
    assert counts["UncachedCompile"] == 0
    assert counts["Fallback"] == 0


# -- random numbers ----------------------------------------------------------------------------------------------------
def test_one_seed_one_sequence_in_every_form(device: torch.device) -> None:
    """Lazy, eager and compiled, and each after the state was saved by another."""
    x = randn(4, 3, device=device)

    def noisy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return nn.functional.dropout(x, 0.5), torch.rand_like(x), torch.randn(3, device=x.device)

    def eager(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torchport.mode("eager"):
            return noisy(x)

    def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
        """Masks and uniform numbers to the bit; what a compiler fuses into a normal one may be rounded otherwise."""
        *exact, normal = zip(ours, theirs, strict=True)
        return all(torch.equal(a, b) for a, b in exact) and torch.allclose(*normal, rtol=1e-6, atol=1e-7)

    forms = [noisy, eager, torch.compile(noisy, backend="torchport")]
    port: Any = torch.port  # type: ignore[attr-defined]
    drawn: list[list[list[torch.Tensor]]] = []
    for at, form in enumerate(forms):
        torch.manual_seed(7)
        first = [value.cpu() for value in form(x)]
        state = port.get_rng_state()
        second = [value.cpu() for value in form(x)]
        port.set_rng_state(state)
        drawn.append([first, second, [value.cpu() for value in forms[at - 1](x)]])
    for row in drawn:
        assert same(row[0], drawn[0][0])
        assert same(row[1], drawn[0][1])
        assert same(row[2], row[1])
        assert not any(torch.equal(a, b) for a, b in zip(row[0], row[1], strict=True))


# -- finalizers --------------------------------------------------------------------------------------------------------
def test_an_interrupt_in_the_collectors_callback_leaves_the_thread_as_it_was(device: torch.device) -> None:
    """Python ignores it there; the thread went on as if it were in a finalizer, and could not compute."""
    x = torch.ones(3, device=device)
    torchport.sync()
    take_up, lost = type(threads).take_up, [0]

    def interrupted(self: Any) -> None:
        lost[0] += 1
        if lost[0] == 1:
            raise KeyboardInterrupt
        take_up(self)

    with mock.patch.object(type(threads), "take_up", interrupted), mock.patch.object(sys, "unraisablehook"):
        gc.collect()
    assert lost[0] == 2
    assert (x + 1).tolist() == [2.0, 2.0, 2.0]
    assert not finalizers.running.here


class Reader:
    """Reads a value when the garbage collector finds it, wherever the program is then."""

    def __init__(self, value: torch.Tensor, read: list[float]) -> None:
        self.value, self.read, self.me = value, read, self

    def __del__(self) -> None:
        self.read.append((self.value * 2).sum().item())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # while a graph is compiled it raises
@pytest.mark.parametrize("often", [11, 50, 300])
def test_a_finalizer_that_reads_in_the_middle_of_an_operator(device: torch.device, often: int) -> None:
    before = gc.get_threshold()
    read: list[float] = []

    def run(step: int) -> None:
        x = torch.full((3,), float(step)).to(device)
        expected = float(step)
        for k in range(12):
            x, expected = x * 0.5 + k, expected * 0.5 + k
            both = torch.stack([x, x]).sum(0)
            if k % 5 == 0:
                Reader(both + 1, read)
        assert x.tolist() == pytest.approx([expected] * 3)
        assert both.tolist() == pytest.approx([2 * expected] * 3)

    try:
        gc.set_threshold(often, 5, 5)
        for step in range(40):
            run(step)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(read) > 100  # of 120
    assert gc.isenabled()
