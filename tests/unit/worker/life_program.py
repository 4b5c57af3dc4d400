"""A program that has something compiled in another process, and then ends in some way: ``life_program.py HOW FILE``.

Once its worker is at work, which ``FILE`` says, it prints the ids of the processes that this consists of.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from worker_engines import Troubled
from worker_support import a_trace, family, wait_until

import torchport
from torchport.run.worth import costs
from torchport.worker.service import service


def train(seconds: float) -> None:
    """Train for so long with computations that are interpreted at first, each compiled beside the program at once."""
    torchport.config.tiers = "auto"
    torchport.use("reference")
    end = time.monotonic() + seconds
    with costs.ignored():
        while time.monotonic() < end:
            for size in range(1, 6):
                net = torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.GELU(), torch.nn.Linear(size, 1)).to(
                    "port"
                )
                optimizer = torch.optim.Adam(net.parameters())
                for _ in range(4):
                    net(torch.ones(3, 4).to("port")).sum().backward()
                    optimizer.step()


HOW, FILE = sys.argv[1], Path(sys.argv[2])


def at_work() -> bool:
    return FILE.exists() and FILE.read_text().endswith("ready\n")


def say(*words: object) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    torchport.config.compile_nice = 0
    if HOW.startswith("train"):
        train(0.2)
        wait_until(service.pids)
        say(*family(service.pids()[0]))
        train(float(HOW.split()[1]))
        if HOW.endswith("_exit"):
            os._exit(0)
        sys.exit(0)
    torchport.register(Troubled)
    torch.manual_seed(0)
    ticket = service.submit(
        a_trace().request("busy", torchport.get_backend("troubled"), how="children", file=str(FILE))
    )
    if HOW == "exit at once":
        (pid,) = wait_until(service.pids)
        say(*family(pid))
        sys.exit(0)
    wait_until(at_work, 240)
    if HOW == "wait":
        try:
            say(*family(service.pids()[0]))  # the interrupt may come before this returns
            ticket.result(240)
        except KeyboardInterrupt:
            say("interrupted", ticket.done(), *service.pids())
            sys.exit(0)
    say(*family(service.pids()[0]))
    if HOW == "exit":
        sys.exit(0)
    elif HOW == "raise":
        raise ValueError("the program fails")
    elif HOW == "_exit":
        os._exit(0)
    elif HOW == "fork":
        signal.alarm(240)
        child = os.fork()
        if child == 0:
            assert ticket.done(), "what was under way is the parent's"
            assert service.pids() == []
            assert service.idle()
            other = service.submit(a_trace().request("child", torchport.get_backend("troubled")))
            outputs = other.result(200).outputs
            say("child", len(outputs), *family(service.pids()[0]))
            say("sleeps", os.getpid())
            time.sleep(1000)
        time.sleep(1000)
