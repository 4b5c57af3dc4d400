"""A program whose computations are compiled beside it, while its compiler gets into trouble or it ends itself.

``tier_program.py FRONTEND END``: ``FRONTEND`` is ``lazy`` or ``compile``; ``END`` is

- ``compiled``, ``interpreted``: train until one computation, or all, came to be so; then end;
- ``kills N SEED``: train until the compiler's process was killed so often, at random moments; then end;
- ``off``: the same until nothing is compiled in other processes any more, and a while longer;
- ``exit``, ``raise``, ``sys.exit``, ``_exit`` with ``SECONDS``: train for so long once there is a worker, then end so;
- ``outside``: until somebody ends it.

Every loss and parameter is compared with CPU eager's; the program ends with code 9 where they differ. It prints the
ids of its worker's processes once there are some, and what was counted at its end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

os.environ.update(TORCHPORT_CACHE="off", OMP_NUM_THREADS="1", TORCHPORT_COMPILE_NICE="0", TORCHPORT_TIERS="auto")

import torch
from tier_engines import TierEngine
from torch import nn
from worker_support import family

import torchport
from torchport import metrics
from torchport.run.worth import costs
from torchport.worker import service as services
from torchport.worker.service import service

FRONTEND, END, *MORE = sys.argv[1:]
WRONG = 9
COUNTS = ("TakenOver", "StaysInterpreted", "InterpretedRun", "CompileWorkers", "CompileWorkerDeaths")


def say(*words: object) -> None:
    print(*words, flush=True)


def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    try:
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        say("wrong", error)
        sys.stdout.flush()
        os._exit(WRONG)


def train(size: int, pause: float = 0.0) -> Iterator[None]:
    """Steps of two models, one on CPU eager, without end."""
    torch.manual_seed(size)
    wanted = nn.Sequential(nn.Linear(4, size), nn.GELU(), nn.LayerNorm(size), nn.Linear(size, 1))
    place = "port" if FRONTEND == "lazy" else "cpu"
    mine = nn.Sequential(nn.Linear(4, size), nn.GELU(), nn.LayerNorm(size), nn.Linear(size, 1))
    mine.load_state_dict(wanted.state_dict())
    mine.to(place)
    run = mine if FRONTEND == "lazy" else torch.compile(mine, backend="torchport", options={"backend": "tier_engine"})
    theirs, ours = torch.optim.Adam(wanted.parameters(), lr=1e-3), torch.optim.Adam(mine.parameters(), lr=1e-3)
    for _ in iter(int, 1):
        x = torch.randn(3, 4)
        one, other = wanted(x).square().mean(), run(x.to(place)).square().mean()
        for optimizer, loss in ((theirs, one), (ours, other)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        compare(other, one)
        for p, q in zip(mine.parameters(), wanted.parameters(), strict=True):
            compare(p, q)
        time.sleep(pause)
        yield


def train_many(steps: int = 12) -> Iterator[None]:
    """Steps of one model after the other, each of another size."""
    size = 2
    while True:
        torch.compiler.reset()  # else Dynamo stops after so many models
        steps_of = train(size)
        for _ in range(steps):
            next(steps_of)
            yield
        size = 2 + (size - 1) % 400


def kill_workers(times: int, seed: int, killed: list[float]) -> None:
    """Kill the watcher or the worker, so many times, each a random moment after a new one has begun."""
    draw = random.Random(seed)
    known: set[int] = set()
    while len(killed) < times:
        new = set(service.pids()) - known
        if not new:
            time.sleep(0.005)
            continue
        pid = new.pop()
        # The first seconds are the imports; most of the rest is spent on requests.
        time.sleep(draw.choice([draw.uniform(0, 1), draw.uniform(1, 6)]))
        known.add(pid)
        victims = family(pid)
        try:
            os.kill(draw.choice(victims), signal.SIGKILL)
            killed.append(time.monotonic())
        except ProcessLookupError:
            pass


def until(done: object, seconds: float, steps: Iterator[None]) -> None:
    latest = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        next(steps)
        if time.monotonic() > latest:
            say("too slow", *(f"{name}={metrics.counter(name)}" for name in COUNTS))
            sys.exit(8)


def announce() -> None:
    """Say which processes the worker consists of, and which thread of ours has started them."""
    while not service.pids():
        time.sleep(0.005)
    say("workers", *family(service.pids()[0]))


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    torchport.register(TierEngine)
    torchport.use("tier_engine")
    threading.Thread(target=announce, daemon=True).start()
    with costs.ignored():
        if END == "compiled":
            until(lambda: metrics.counter("TakenOver"), 300, train(5, 0.02))
            for step, _ in enumerate(train(5)):
                if step == 5:
                    break
        elif END == "interpreted":
            until(lambda: metrics.counter("StaysInterpreted"), 300, train(5, 0.02))
            for step, _ in enumerate(train(5)):
                if step == 5:
                    break
        elif END == "kills":
            services._DEATHS_IN_A_ROW = 10_000
            killed: list[float] = []
            threading.Thread(target=kill_workers, args=(int(MORE[0]), int(MORE[1]), killed), daemon=True).start()
            until(lambda: len(killed) == int(MORE[0]), 560, train_many())
            before = metrics.counter("TakenOver")
            # One model, at its ease: many short ones may each be over before what was asked for is there.
            until(lambda: metrics.counter("TakenOver") > before, 200, train(401, 0.02))
            say("killed", len(killed))
        elif END == "off":
            threading.Thread(target=kill_workers, args=(10_000, 0, []), daemon=True).start()
            until(lambda: service.failed, 500, train_many())
            stays = metrics.counter("StaysInterpreted")
            until(lambda: metrics.counter("StaysInterpreted") > stays, 60, train_many())
        else:
            seconds, latest = float(MORE[0]) if MORE else 10_000.0, time.monotonic() + 300
            steps = train_many()
            while not service.pids() and time.monotonic() < latest:
                next(steps)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                next(steps)
    say("counts", *(f"{name}={metrics.counter(name)}" for name in COUNTS))
    if END == "raise":
        raise ValueError("the program fails")
    if END == "sys.exit":
        sys.exit(3)
    if END == "_exit":
        os._exit(4)


if __name__ == "__main__":
    main()
