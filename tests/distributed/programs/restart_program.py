"""Training that saves itself and goes on from there: for ``torchrun --max-restarts``. ``restart_program.py KIND``.

Rank 1 comes to grief at a step, once. Rank 0 appends each step's loss to ``losses.txt`` in ``TEST_FOLDER``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tiny_models import batch, loss_of, model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

STEPS, EVERY, FAULT = 6, 2, 4


def main(kind: str) -> None:
    dist.init_process_group()
    torch.port.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ["TEST_FOLDER"])
    net = fully_shard(model("gpt2", 1).to("port"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    saved = sorted(folder.glob("step*/.metadata"), key=lambda path: int(path.parent.name.removeprefix("step")))
    first = 0
    if saved:
        weights, states = get_state_dict(net, optimizer)
        checkpoint.load({"net": weights, "optimizer": states}, checkpoint_id=saved[-1].parent)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)
        first = int(saved[-1].parent.name.removeprefix("step"))
    for step in range(first, STEPS):
        if step == FAULT and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad batch")
        ids, targets = batch(step, rank, size)
        loss = loss_of(net, ids.to("port"), targets.to("port"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        if rank == 0:
            with (folder / "losses.txt").open("a") as losses:
                losses.write(f"{step} {whole.item()!r}\n")
        if (step + 1) % EVERY == 0 and step + 1 < STEPS - 1:
            weights, states = get_state_dict(net, optimizer)
            checkpoint.save({"net": weights, "optimizer": states}, checkpoint_id=folder / f"step{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
