"""Random programs of collectives, each run on tensors of the device and, by gloo alone, on tensors of the CPU.

``python collective_fuzz.py SEED COUNT [LARGEST]`` under the environment of a rank: ``COUNT`` programs from ``SEED``,
with tensors of up to ``LARGEST`` bytes. Every rank draws the same programs.

gloo does not take every dtype. What is only moved goes to it as bytes then, and what is reduced in a dtype that it has.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

# PyTorch 2.11 has the older names alone.
_NEW = hasattr(dist, "reduce_scatter_single")
_all_gather: Any = dist.all_gather_single if _NEW else dist.all_gather_into_tensor
_reduce_scatter: Any = dist.reduce_scatter_single if _NEW else dist.reduce_scatter_tensor

REDUCED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
MOVED = [
    *REDUCED,
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.complex64,
    torch.complex128,
]
"""What is moved; gloo takes those before the last five."""
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (5,), (3, 4), (2, 0, 3), (7, 2, 3)]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
WHOLE = [torch.int8, torch.uint8, torch.int32, torch.int64]


class Program:
    """One program: what it draws, and the pairs of tensors it has made.

    A pair is a tensor of the CPU and one of the device; ``pending`` are works of the device that nobody has waited for.
    """

    def __init__(self, seed: str, group: Any, ranks: Sequence[int], largest: int) -> None:
        self.draw = random.Random(seed)
        self.group, self.ranks, self.size = group, ranks, len(ranks)
        self.me = ranks.index(dist.get_rank())
        self.largest = largest
        self.pending: list[Any] = []

    def shape(self) -> tuple[int, ...]:
        if self.draw.random() < 0.15:
            return (int(2 ** self.draw.uniform(0, math.log2(self.largest / 8))),)
        return self.draw.choice(SHAPES)

    def reduction(self) -> tuple[torch.dtype, Any]:
        """A dtype that gloo reduces, and how."""
        if self.draw.random() < 0.15:
            return self.draw.choice(WHOLE), self.draw.choice(BITS)
        return self.draw.choice(REDUCED), self.draw.choice(OPS)

    def pair(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        seed, doubled = self.draw.getrandbits(30), self.draw.random() < 0.5
        generator = torch.Generator().manual_seed(seed + self.me)
        host = torch.randint(0, 3, tuple(shape), generator=generator).to(dtype)
        device = host.to("port")
        if self.draw.random() < 0.05 and self.draw.randrange(self.size) == self.me:
            time.sleep(0.02)  # one rank is behind
        if doubled and dtype not in (torch.bool, torch.uint16):  # pending when the collective comes
            return host + host, device + device
        return host, device

    def pairs(self, count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
        both = [self.pair(shape, dtype) for _ in range(count)]
        return [one[0] for one in both], [one[1] for one in both]

    def both(self, call: Callable[..., Any], host: Sequence[Any], device: Sequence[Any], **more: Any) -> None:
        """The same call on either side; on the device it may be left to arrive by itself."""
        call(*map(carried, host), group=self.group, **more)
        later = self.draw.random() < 0.5
        work = call(*device, group=self.group, async_op=later, **more)
        if later:
            self.pending.append(work)
            if self.draw.random() < 0.5:
                self.pending.pop(self.draw.randrange(len(self.pending))).wait()

    # -- one function per collective; each gives what it wrote, on both sides -----------------------------------------
    def all_reduce(self) -> Any:
        dtype, op = self.reduction()
        host, device = self.pair(self.shape(), dtype)
        self.both(dist.all_reduce, [host], [device], op=op)
        return [host], [device]

    def all_reduce_of_others(self) -> Any:
        """Dtypes and a reduction that gloo has not: it gets others that hold the same values."""
        kind = self.draw.randrange(4)
        dtype = (torch.int16, torch.complex64, torch.float32, torch.bool)[kind]
        host, device = self.pair(self.shape(), dtype)
        if kind == 0:
            stand_in, op = host.to(torch.int32), self.draw.choice(OPS)
        elif kind == 1:
            stand_in, op = torch.view_as_real(host).contiguous(), dist.ReduceOp.SUM
        elif kind == 2:
            stand_in, op = host.clone(), dist.ReduceOp.AVG
        else:
            stand_in, op = host.to(torch.uint8), dist.ReduceOp.MAX
        dist.all_reduce(stand_in, op=dist.ReduceOp.SUM if kind == 2 else op, group=self.group)
        dist.all_reduce(device, op=op, group=self.group)
        if kind == 1:
            return [torch.view_as_complex(stand_in)], [device]
        return [stand_in / self.size if kind == 2 else stand_in.to(dtype)], [device]

    def all_reduce_coalesced(self) -> Any:
        dtype, op = self.reduction()
        host = [self.pair(self.shape(), dtype) for _ in range(self.draw.randint(1, 3))]
        for one, _ in host:
            dist.all_reduce(one, op=op, group=self.group)
        dist.all_reduce_coalesced([device for _, device in host], op=op, group=self.group)
        return [one for one, _ in host], [device for _, device in host]

    def traced(self) -> Any:
        """Functional collectives, whose results are used before anybody has waited."""
        rows, dtype = self.draw.randint(0, 3), self.draw.choice([torch.float32, torch.int64])
        host, device = self.pair((rows * self.size, 2), dtype)
        total, whole, part = host.clone(), host.new_empty((rows * self.size**2, 2)), host.new_empty((rows, 2))
        dist.all_reduce(total, group=self.group)
        _all_gather(whole, host, group=self.group)
        _reduce_scatter(part, host, group=self.group)
        found = [
            functional.all_reduce(device, "sum", self.group) * 2,
            functional.all_gather_tensor(device, 0, self.group) * 2,
            functional.reduce_scatter_tensor(device, "sum", 0, self.group) * 2,
        ]
        return [total * 2, whole * 2, part * 2], found

    def objects(self) -> Any:
        """What is no tensor goes between."""
        said = [None] * self.size
        dist.all_gather_object(said, (self.me, self.draw.random()), group=self.group)
        assert [one[0] for one in said if one is not None] == list(range(self.size))
        return [], []

    def reduce(self) -> Any:
        dtype, op = self.reduction()
        host, device = self.pair(self.shape(), dtype)
        root = self.draw.randrange(self.size)
        self.both(dist.reduce, [host, self.ranks[root]], [device, self.ranks[root]], op=op)
        return ([host], [device]) if root == self.me else ([], [])

    def broadcast(self) -> Any:
        host, device = self.pair(self.shape(), self.draw.choice(MOVED))
        root = self.ranks[self.draw.randrange(self.size)]
        self.both(dist.broadcast, [host, root], [device, root])
        return [host], [device]

    def all_gather(self) -> Any:
        shape, dtype = self.shape(), self.draw.choice(MOVED)
        hosts, devices = self.pairs(self.size, shape, dtype)
        host, device = self.pair(shape, dtype)
        self.both(dist.all_gather, [hosts, host], [devices, device])
        return hosts, devices

    def all_gather_single(self) -> Any:
        rows, dtype = self.draw.randint(0, 4), self.draw.choice(MOVED)
        host, device = self.pair((rows, 3), dtype)
        out, on_device = self.pair((rows * self.size, 3), dtype)
        self.both(_all_gather, [out, host], [on_device, device])
        return [out], [on_device]

    def reduce_scatter(self) -> Any:
        shape, dtype, op = self.shape(), self.draw.choice(REDUCED), self.draw.choice(OPS[:3])
        hosts, devices = self.pairs(self.size, shape, dtype)
        out, on_device = self.pair(shape, dtype)
        if self.draw.random() < 0.5:
            self.both(dist.reduce_scatter, [out, hosts], [on_device, devices], op=op)
        else:
            host, device = torch.stack(hosts).reshape(-1), torch.stack(devices).reshape(-1)
            flat, flat_device = out.reshape(-1).clone(), on_device.reshape(-1).clone()
            self.both(_reduce_scatter, [flat, host], [flat_device, device], op=op)
            return [flat], [flat_device]
        return [out], [on_device]

    def gather(self) -> Any:
        shape, dtype = self.shape(), self.draw.choice(MOVED)
        root = self.draw.randrange(self.size)
        hosts, devices = self.pairs(self.size, shape, dtype)
        host, device = self.pair(shape, dtype)
        mine = root == self.me
        self.both(
            dist.gather,
            [host, hosts if mine else None, self.ranks[root]],
            [device, devices if mine else None, self.ranks[root]],
        )
        return (hosts, devices) if mine else ([], [])

    def scatter(self) -> Any:
        shape, dtype = self.shape(), self.draw.choice(MOVED)
        root = self.draw.randrange(self.size)
        hosts, devices = self.pairs(self.size, shape, dtype)
        out, on_device = self.pair(shape, dtype)
        mine = root == self.me
        self.both(
            dist.scatter,
            [out, hosts if mine else None, self.ranks[root]],
            [on_device, devices if mine else None, self.ranks[root]],
        )
        return [out], [on_device]

    def all_to_all_single(self) -> Any:
        dtype = self.draw.choice(MOVED)
        table = [[self.draw.randint(0, 3) for _ in range(self.size)] for _ in range(self.size)]
        sent, received = table[self.me], [row[self.me] for row in table]
        seeds = self.draw.getrandbits(30)
        generator = torch.Generator().manual_seed(seeds + self.me)
        host = torch.randint(0, 9, (sum(sent), 2), generator=generator).to(dtype)
        out = torch.zeros(sum(received), 2, dtype=dtype)
        device, on_device = host.to("port"), out.to("port")
        if dtype not in REDUCED:
            width = 2 * dtype.itemsize
            rows = [n * width for n in received], [n * width for n in sent]
            dist.all_to_all_single(carried(out), carried(host), *rows, group=self.group)
            dist.all_to_all_single(on_device, device, received, sent, group=self.group)
            return [out], [on_device]
        self.both(dist.all_to_all_single, [out, host, received, sent], [on_device, device, received, sent])
        return [out], [on_device]

    def send_and_receive(self) -> Any:
        if self.size < 2:
            return [], []
        shape, dtype = self.shape(), self.draw.choice(MOVED)
        first, second = self.draw.sample(range(self.size), 2)
        host, device = self.pair(shape, dtype)
        if self.me == first:
            dist.send(carried(host), self.ranks[second], group=self.group)
            dist.send(device, self.ranks[second], group=self.group)
        elif self.me == second:
            dist.recv(carried(host), self.ranks[first], group=self.group)
            dist.recv(device, self.ranks[first], group=self.group)
        return [host], [device]

    def exchange(self) -> Any:
        """Everybody sends to the next and receives from the one before, at once."""
        if self.size < 2:
            return [], []
        shape, dtype = self.shape(), self.draw.choice(MOVED)
        host, device = self.pair(shape, dtype)
        got, got_device = self.pair(shape, dtype)
        after, before = self.ranks[(self.me + 1) % self.size], self.ranks[self.me - 1]
        for given, taken in ((carried(host), carried(got)), (device, got_device)):
            operations = [
                dist.P2POp(dist.isend, given, after, self.group),
                dist.P2POp(dist.irecv, taken, before, self.group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return [got], [got_device]

    def run(self) -> None:
        """A few collectives, with reads and computations between them, and a look at all they wrote."""
        kinds = [
            self.all_reduce, self.reduce, self.broadcast, self.all_gather, self.all_gather_single, self.reduce_scatter,
            self.gather, self.scatter, self.all_to_all_single, self.send_and_receive, self.exchange,
            self.all_reduce_of_others, self.all_reduce_coalesced, self.traced, self.objects,
        ]  # fmt: skip
        written: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for _ in range(self.draw.randint(1, 6)):
            kind = self.draw.choice(kinds)
            hosts, devices = kind()
            written += [(kind.__name__, *pair) for pair in zip(hosts, devices, strict=True)]
            look, which = self.draw.random() < 0.3, self.draw.random()
            if look and written:  # whatever this rank has written: every rank draws the same
                check(*written[int(which * len(written))])
        for work in self.pending:
            work.wait()
        for one in written:
            check(*one)


def carried(host: Any) -> Any:
    """What gloo gets for a tensor of the CPU, or for several: itself, or its bytes."""
    if isinstance(host, list):
        return [carried(one) for one in host]
    if not isinstance(host, torch.Tensor) or host.dtype in REDUCED:
        return host
    return host.reshape(-1).view(torch.uint8)


def check(name: str, host: torch.Tensor, device: torch.Tensor) -> None:
    """Fail where a tensor of the device is not what gloo made of the same on the CPU."""
    found = device.cpu()
    assert found.dtype == host.dtype, f"{name}: {found.dtype} is not {host.dtype}"
    assert torch.equal(found, host), f"{name}: {found} is not {host}"


def main(seed: str, count: int, largest: int = 10_000) -> None:
    """Run programs on the default group and on others."""
    dist.init_process_group()
    world = list(range(dist.get_world_size()))
    groups: list[tuple[Any, list[int]]] = [(dist.group.WORLD, world)]
    for ranks in ([rank for rank in world if rank % 2 == 0], world[1:], list(reversed(world))):
        groups.append((dist.new_group(ranks), ranks if ranks == sorted(ranks) else sorted(ranks)))
    for number in range(count):
        group, ranks = groups[random.Random(f"{seed} {number}").randrange(len(groups))]
        if dist.get_rank() in ranks:
            try:
                Program(f"{seed}/{number}", group, ranks, largest).run()
            except Exception as error:
                error.add_note(f"program {number} of seed {seed}")
                raise
    dist.barrier()
    dist.destroy_process_group()
    print(f"{count} programs agree")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:4]))
