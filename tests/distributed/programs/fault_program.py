"""Programs whose ranks come apart in some way: ``python fault_program.py KIND``. Rank 1 is the one that errs."""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def leave_a_message_behind() -> None:
    """Rank 1 ends while it waits for a message of rank 0, which lives, and after rank 2 has ended."""
    rank, folder = dist.get_rank(), Path(os.environ["TEST_FOLDER"])
    if rank == 2:
        os._exit(0)
    if rank == 1:
        atexit.register((folder / "awake").touch)  # runs after what torchport registers from here on
        dist.irecv(torch.ones(4, device="port"), 0)
        time.sleep(1)  # gloo has lost rank 2
        return
    until = time.monotonic() + 30
    while not (folder / "awake").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)


def main(kind: str) -> None:
    """Agree three times, then come apart."""
    dist.init_process_group()
    rank = dist.get_rank()
    x = torch.ones(4, device="port")
    for _ in range(3):
        dist.all_reduce(x)
    Path(os.environ["TEST_FOLDER"], f"ready{rank}").touch()
    if kind == "left":
        leave_a_message_behind()
        return
    if rank == 1:
        if kind == "raises":
            raise ValueError("a bad batch")
        if kind == "ends":
            return
        if kind in ("killed", "stopped", "addressed"):
            time.sleep(600)
        if kind == "operation":
            dist.broadcast(x, 0)
        if kind == "shape":
            x = torch.ones(5, device="port")
        if kind == "message":
            dist.send(torch.ones(5, device="port"), 0)
            return
    while kind == "addressed":  # until gloo has lost it, and refuses to take another message for it
        dist.isend(x, 1)
        time.sleep(0.01)
    if kind == "message":
        dist.recv(x, 1)
        print(x)
    dist.all_reduce(x)  # where the others are
    print("came through")


if __name__ == "__main__":
    main(sys.argv[1])
