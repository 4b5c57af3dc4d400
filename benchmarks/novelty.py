"""What is new to the program: shapes never seen, training steps never seen, ``generate``, operators in eager mode.

    python -m benchmarks.novelty [--backend reference] [--rounds 15] [--tiers auto] [--threads 1] [--rows forward,eager]

Processor time of the whole process and wall time, against CPU eager in turn with it; ratios are of medians. With
``config.tiers = "auto"``, or as ``--tiers`` says. What is "never seen" has a size of its own in each round. Memory is
the peak of this process, and of the compiler's where there is one, when all rows are through. The rows ``overhead`` are
about what is not new any more, and are measured with tiers off.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import torch

import torchport
from torchport import native
from torchport.core import metrics
from torchport.run.worth import costs
from torchport.worker.service import service

from .common import table
from .models import bert, resnet18

__all__ = ["main"]

Run = Callable[[str, int], object]
"""Does on a device (``cpu`` or ``port``) what belongs to a size."""
Seconds = tuple[float, float]
"""Processor time and wall time."""


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def _seconds(run: Callable[[], object]) -> Seconds:
    start, wall = process_time(), perf_counter()
    run()
    return process_time() - start, perf_counter() - wall


def _cells(cpu: Iterable[Seconds], port: Iterable[Seconds], summary: Callable[[Iterable[float]], float]) -> list[str]:
    """Milliseconds of CPU eager and of the device, their ratio, and that of the wall times."""
    (cpu_time, cpu_wall), (port_time, port_wall) = (map(summary, zip(*both, strict=True)) for both in (cpu, port))
    return [
        f"{cpu_time * 1e3:.1f}", f"{port_time * 1e3:.1f}", f"{port_time / cpu_time:.2f}", f"{port_wall / cpu_wall:.2f}"
    ]  # fmt: skip


def _in_turn(run: Run, sizes: Iterable[int]) -> tuple[list[Seconds], list[Seconds]]:
    pairs = [(_seconds(lambda n=n: run("cpu", n)), _seconds(lambda n=n: run("port", n))) for n in sizes]
    return [cpu for cpu, _ in pairs], [port for _, port in pairs]


def _pairs(run: Run, rounds: int, sizes: Iterable[int]) -> list[str]:
    """Each round has another size; the first three are not counted."""
    sizes = iter(sizes)
    _in_turn(run, itertools.islice(sizes, 3))
    return _cells(*_in_turn(run, itertools.islice(sizes, rounds)), median)


def _on_both(cpu: torch.nn.Module) -> dict[str, Any]:
    return {"cpu": cpu, "port": copy.deepcopy(cpu).to("port")}


# -- models: how one is called with an input of some size ----------------------------------------------------------
def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length).remainder(1000)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


MODELS: Final[dict[str, tuple[Callable[[], Any], Callable[[int, int], torch.Tensor], tuple[int, int]]]] = {
    "GPT-2 (4 x 128)": (_gpt2, _ids, (8, 1)),
    "BERT (4 x 256)": (lambda: bert().model, _ids, (8, 1)),
    "ResNet-18": (lambda: resnet18().model, lambda rows, n: torch.ones(rows, 3, n, n), (64, 4)),
}
"""How to make a model, an input of some size for it, and its sizes: the first, and how far they are apart."""


def _forward(name: str, rounds: int, mode: Callable[[], Any] = torch.no_grad) -> list[str]:
    make, batch, sizes = MODELS[name]
    models = _on_both(make().eval())

    def run(device: str, size: int) -> None:
        with mode():
            _logits(models[device], batch(1, size).to(device)).cpu()

    return _pairs(run, rounds, itertools.count(*sizes))


def _training(name: str, rounds: int) -> list[str]:
    make, batch, sizes = MODELS[name]
    models = _on_both(make().train())
    optimizers = {device: torch.optim.AdamW(model.parameters(), lr=1e-4) for device, model in models.items()}

    def run(device: str, size: int) -> None:
        loss = _logits(models[device], batch(4, size).to(device)).square().mean()
        optimizers[device].zero_grad()
        loss.backward()
        optimizers[device].step()
        loss.item()

    return _pairs(run, rounds, itertools.count(*sizes))


def _recording(rounds: int) -> list[str]:
    """The one forward that records its path: the same length again, until it does, with compiling said to be cheap."""
    models = _on_both(_gpt2().eval())

    def run(device: str, size: int) -> None:
        with torch.no_grad():
            _logits(models[device], _ids(1, size).to(device)).cpu()

    cpu, port = list[Seconds](), list[Seconds]()
    for size in range(8, 8 + rounds):
        run("cpu", size)
        run("port", size)
        cpu.append(_seconds(lambda n=size: run("cpu", n)))
        with costs.ignored():
            for _ in range(5):
                before = metrics.counter("InterpretedPlan") + metrics.counter("UncachedCompile")
                seconds = _seconds(lambda n=size: run("port", n))
                if metrics.counter("InterpretedPlan") + metrics.counter("UncachedCompile") > before:
                    port.append(seconds)
                    break
    return _cells(cpu, port, median) if port else ["", "", "not seen", ""]


# -- loops whose shapes grow ---------------------------------------------------------------------------------------
def _generate(tokens: int, beams: int, rounds: int) -> Iterator[tuple[str, list[str]]]:
    """From lengths never seen, and the very same again."""
    models = _on_both(_gpt2().eval())

    def run(device: str, length: int) -> None:
        ids = torch.arange(1, length)[None].to(device)
        models[device].generate(ids, max_new_tokens=tokens, num_beams=beams, do_sample=False, pad_token_id=0).cpu()

    short = tokens < 100
    sizes = [40 + 20 * n for n in range(min(rounds, 5))] if short else [150]  # none comes by a length another had
    yield "first", _cells(*_in_turn(run, sizes), median)
    again = sizes if short else sizes * 3
    yield "second", _cells(*_in_turn(run, again), median)


def _lengths(steps: int) -> list[str]:
    """Training steps of which each has another length."""
    cpu = _gpt2().train()
    models = _on_both(cpu)
    optimizers = {device: torch.optim.AdamW(model.parameters(), lr=1e-4) for device, model in models.items()}

    def run(device: str, length: int) -> None:
        ids = _ids(1, length).to(device)
        loss = models[device](ids, labels=ids).loss
        optimizers[device].zero_grad()
        loss.backward()
        optimizers[device].step()
        loss.item()

    return _cells(*_in_turn(run, range(30, 30 + steps)), sum)


# -- the steady state ----------------------------------------------------------------------------------------------
def _overhead(width: int, rounds: int) -> Iterator[tuple[str, list[str]]]:
    """A forward of 16 layers with next to nothing to compute, compiled; the fastest, and the median.

    In turn with the other, and by itself, as in a program of one device that finds its data in the processor's caches.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=16, n_embd=width, n_head=2, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    models = _on_both(GPT2LMHeadModel(config).eval())
    ids = {device: _ids(1, 8).remainder(100).to(device) for device in models}

    def run(device: str, _: int) -> None:
        with torch.no_grad():
            _logits(models[device], ids[device]).cpu()

    with torchport.config.override(tiers="off"):
        _in_turn(run, range(5))  # compiled, and known to the trie
        times = _in_turn(run, range(10 * rounds))
        alone = [[_seconds(lambda d=device: run(d, 0)) for _ in range(10 * rounds)] for device in models]
    yield "best", _cells(*times, min)
    yield "median", _cells(*times, median)
    yield "best, each by itself", _cells(*alone, min)
    yield "median, each by itself", _cells(*alone, median)


# -- reading -------------------------------------------------------------------------------------------------------
def _reading() -> list[str]:
    """A loop that looks at a value each round, as a search or an environment does: 100 rounds of two operators."""
    times: dict[str, list[Seconds]] = {}
    for device in ("cpu", "port"):
        start = torch.ones(4).to(device)

        def loop(start: torch.Tensor = start, device: str = device) -> None:
            seen = start
            for k in range(100):
                seen = seen * 0.99 + torch.tensor([float(k), 1.0, 2.0, 3.0], device=device)
                if seen.sum().item() < 0:
                    break

        loop()
        times[device] = [_seconds(loop) for _ in range(30)]
    return _cells(times["cpu"], times["port"], min)


# -- eager mode ----------------------------------------------------------------------------------------------------
def _small_operators(gradients: bool) -> list[str]:
    """Of 400 operators."""
    times: dict[str, list[Seconds]] = {}
    for device in ("cpu", "port"):
        x = torch.randn(8, 8).to(device).requires_grad_(gradients)

        def loop(x: torch.Tensor = x) -> None:
            y = x
            for _ in range(200):
                y = y * 1.01 + x

        with torchport.mode("eager"):
            loop()
            times[device] = [_seconds(loop) for _ in range(30)]
    return _cells(times["cpu"], times["port"], min)


def _tiny_bert(rounds: int) -> list[str]:
    """A debugging run: forward and backward, a value looked at in between."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    models = _on_both(BertForMaskedLM(config).eval())

    def run(device: str, length: int) -> None:
        ids = _ids(2, length).to(device)
        loss = models[device](ids, labels=ids).loss
        loss.item()
        loss.backward()

    with torchport.mode("eager"):
        return _pairs(run, rounds, itertools.repeat(16))


# -- memory --------------------------------------------------------------------------------------------------------
def _peak(pid: int | str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return f"{int(line.split()[1]) / 1024:.0f} MiB"
    return "unknown"


def _compilers() -> list[int]:
    """The compile service's processes, and their children, which compile."""
    pids = service.pids()
    return pids + [int(pid) for one in pids for pid in Path(f"/proc/{one}/task/{one}/children").read_text().split()]


def _rows(wanted: list[str], rounds: int) -> Iterator[list[str]]:
    if "forward" in wanted:
        for name in MODELS:
            yield [f"{name}, forward, a size never seen", *_forward(name, rounds)]
            yield [f"{name}, the same in inference mode", *_forward(name, rounds, torch.inference_mode)]
    if "training" in wanted:
        for name in MODELS:
            yield [f"{name}, training step, a size never seen", *_training(name, rounds)]
    if "recording" in wanted:
        yield ["GPT-2, the one forward that records its path", *_recording(rounds)]
    if "generate" in wanted:
        for tokens, beams in ((20, 1), (20, 4), (200, 1), (200, 4)):
            for when, cells in _generate(tokens, beams, rounds):
                yield [f"generate, {tokens} tokens, {'greedy' if beams == 1 else f'{beams} beams'}, {when}", *cells]
    if "lengths" in wanted:
        yield ["300 training steps, each of another length", *_lengths(300)]
    if "overhead" in wanted:
        for width in (8, 64):
            for which, cells in _overhead(width, rounds):
                yield [f"steady state, GPT-2 of 16 layers of width {width}, forward, {which}", *cells]
    if "reading" in wanted:
        yield ["a loop that copies a row to the device and reads a value, 100 rounds", *_reading()]
    if "eager" in wanted:
        yield ["eager mode, 400 small operators", *_small_operators(gradients=False)]
        yield ["the same with gradients", *_small_operators(gradients=True)]
        yield ["eager mode, tiny BERT, forward and backward", *_tiny_bert(rounds)]


ROWS: Final = ("forward", "training", "recording", "generate", "lengths", "overhead", "reading", "eager")


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiers", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=", ".join(ROWS))
    options = parser.parse_args(argv)
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    torch.set_num_threads(options.threads)
    torchport.config.tiers = options.tiers
    torchport.use(options.backend)
    rows = list(_rows(options.rows, options.rounds))
    title = f"What is new, {options.backend}, tiers {options.tiers}, threads: {options.threads}"
    table(title, ["", "CPU eager, ms", "port, ms", "ratio", "wall ratio"], rows)
    print("\nC++ parts:", "; ".join(f"{name} {state.split(':')[0]}" for name, state in native.state()))
    peaks = [f"this process {_peak('self')}", *(f"a compiler's {_peak(pid)}" for pid in _compilers())]
    print("peak memory:", ", ".join(peaks))


if __name__ == "__main__":
    main()
