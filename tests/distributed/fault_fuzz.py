"""Random faults: ``python fault_fuzz.py SEED COUNT`` runs programs of two or three ranks, one of which errs.

Each run draws what the ranks do, who errs, how and when. Whoever is left must end within ``LIMIT`` seconds with an
error that names the rank; what collectives gave until then must be right; nobody may stay behind. Ranks are forked
from this process, which has imported PyTorch and not used the device, so that a run takes little more than its fault.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from launch_ranks import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LIMIT = 60.0
STEPS = 20
WORKS = ("sums", "asynchronous", "ring", "ddp", "groups")
INSIDE = ("raise", "end", "exit", "skip", "shape", "operation", "dtype")
"""What the program itself does, at a step."""
OUTSIDE = ("kill", "stop")
"""What is done to the process, at a time."""
HARMLESS = ("nothing", "slow")


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    work: str
    kind: str
    ranks: int
    victim: int
    step: int
    after: float

    @classmethod
    def draw(cls, seed: str) -> Plan:
        draw = random.Random(seed)
        ranks = draw.choice((2, 2, 3))
        kind = draw.choice(INSIDE + 2 * OUTSIDE + HARMLESS)
        return cls(
            draw.choice(WORKS), kind, ranks, draw.randrange(ranks), draw.randrange(1, STEPS - 1), draw.uniform(0, 1.5)
        )


# -- in a rank ---------------------------------------------------------------------------------------------------------
def work(plan: Plan, ready: Path) -> None:
    """Steps whose results are known, and the fault among them."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(3, 2).to("port")) if plan.work == "ddp" else None
    x = torch.ones(4, device="port")
    dist.all_reduce(x)
    ready.touch()
    faulthandler.dump_traceback_later(LIMIT - 5)
    step, certain = 0, True
    for turn in range(STEPS):
        if rank == plan.victim and turn == plan.step:
            certain = certain and plan.kind != "skip"
            if plan.kind == "skip":
                continue
            err(plan.kind)
        # A rank that leaves a batch out pairs its next one with the others' present one: nobody can tell.
        certain = certain and not (plan.kind == "skip" and turn >= plan.step)
        step += 1
        value = float(rank + turn)
        expected = float(sum(r + turn for r in range(size)))
        if plan.work in ("sums", "groups"):
            x = torch.full((4,), value, device="port")
            dist.all_reduce(x, group=groups[turn % 2 if plan.work == "groups" else 0])
            assert not certain or x.tolist() == [expected] * 4, f"wrong value {x.tolist()}"
        elif plan.work == "asynchronous":
            many = [torch.full((n,), value, device="port") for n in (1, 5, 3000)]
            works = [dist.all_reduce(one, async_op=True) for one in many]
            works[1].wait()
            assert not certain or [one[0].item() for one in many] == [expected] * 3, "wrong value"
        elif plan.work == "ring":
            got = torch.empty(4, device="port")
            mine = torch.full((4,), value, device="port")
            operations = [
                dist.P2POp(dist.isend, mine, (rank + 1) % size),
                dist.P2POp(dist.irecv, got, (rank - 1) % size),
            ]
            for one in dist.batch_isend_irecv(operations):
                one.wait()
            assert not certain or got.tolist() == [float((rank - 1) % size + turn)] * 4, f"wrong value {got.tolist()}"
        else:
            assert net is not None
            net.zero_grad()
            net(torch.full((2, 3), value, device="port")).sum().backward()
            found = net.module.weight.grad[0, 0].item()
            assert not certain or abs(found - 2 * expected / size) < 1e-3, f"wrong value {found}"
        time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()
    print("came through", flush=True)


def err(kind: str) -> None:
    """The victim's fault."""
    if kind == "raise":
        raise ValueError("a bad batch")
    if kind == "end":
        sys.exit(0)
    if kind == "exit":
        os._exit(7)
    if kind == "slow":
        time.sleep(4)
    if kind == "shape":
        dist.all_reduce(torch.ones(7, device="port"))
    if kind == "dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.int64, device="port"))
    if kind == "operation":
        dist.broadcast(torch.ones(4, device="port"), 0)


def become_rank(plan: Plan, rank: int, port: int, folder: Path) -> None:
    """What a forked process does instead of the loop below. Returns, or raises, as a program of its own would."""
    os.setsid()
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    work(plan, folder / f"ready{rank}")


# -- in the process that starts them -----------------------------------------------------------------------------------
def wait_for(processes: dict[int, int], ended: dict[int, tuple[int, float]], until: float) -> None:
    """Note how processes end, and when."""
    while len(ended) < len(processes) and time.monotonic() < until:
        for rank, process in processes.items():
            if rank not in ended:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.02)


def judge(plan: Plan, ended: dict[int, tuple[int, float]], texts: list[str]) -> str:
    """What is wrong with how a run ended; empty where nothing is."""
    others = [rank for rank in range(plan.ranks) if rank != plan.victim]
    late = [rank for rank in others if rank not in ended]
    if late:
        return f"ranks {late} did not end within {LIMIT:.0f} s"
    if any("AssertionError: wrong value" in text for text in texts):
        return "a wrong value"
    through = [rank for rank in range(plan.ranks) if "came through" in texts[rank]]
    if plan.kind in HARMLESS:
        return "" if len(through) == plan.ranks else "not everybody came through, though nobody erred"
    if plan.kind in OUTSIDE and set(others) <= set(through):
        return ""  # the fault came after everything
    for rank in others:
        if ended[rank][0] != 1:
            return f"rank {rank} ended with {ended[rank][0]}, not with an error"
        if "CollectiveError" not in texts[rank]:
            return f"rank {rank} has another error"
        if f"rank {plan.victim}" not in texts[rank].partition("CollectiveError")[2]:
            return f"rank {rank} does not name rank {plan.victim}"
    return ""


def main(seed: str, count: int, first: int = 0) -> int:
    """Run; the number of runs that were wrong."""
    wrong, slowest = 0, 0.0
    for number in range(first, first + count):
        plan = Plan.draw(f"{seed} {number}")
        folder, port = Path(tempfile.mkdtemp()), free_port()  # not removed by a rank's exit from a block
        processes: dict[int, int] = {}
        sys.stdout.flush()
        for rank in range(plan.ranks):
            process = os.fork()
            if not process:
                become_rank(plan, rank, port, folder)
                return 0
            processes[rank] = process
        ended: dict[int, tuple[int, float]] = {}
        begun = time.monotonic()
        while time.monotonic() < begun + 60 and not all((folder / f"ready{r}").exists() for r in processes):
            time.sleep(0.01)
        if plan.kind in OUTSIDE:
            time.sleep(plan.after)
            os.kill(processes[plan.victim], signal.SIGKILL if plan.kind == "kill" else signal.SIGSTOP)
        fault = time.monotonic()
        others = {rank: process for rank, process in processes.items() if rank != plan.victim}
        wait_for(others, ended, fault + LIMIT)
        if plan.kind != "stop":
            wait_for(processes, ended, fault + LIMIT)
        took = max((at for _, at in ended.values()), default=fault) - fault
        for rank, process in processes.items():
            if rank not in ended:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
        texts = [(folder / f"rank{rank}.txt").read_text() for rank in processes]
        shutil.rmtree(folder)
        trouble = judge(plan, ended, texts)
        slowest = max(slowest, took)
        print(f"{number}: {plan} took {took:.1f} s {trouble and '-- ' + trouble}", flush=True)
        if trouble:
            wrong += 1
            for rank, text in enumerate(texts):
                print(f"-- rank {rank}, {ended.get(rank)}\n{text[-3000:]}", flush=True)
    print(f"{count} runs, {wrong} wrong, the slowest took {slowest:.1f} s", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], *map(int, sys.argv[2:4]))))
