"""One program over eight virtual devices of ``xla`` against the same written by hand in JAX, with the same shardings.

    python -m benchmarks.spmd [--quick] [--batches 30] [--only mlp,gpt2] [--ways dp,fsdp,tp,2d]

Each model is trained with SGD on one batch, by data parallelism, FSDP, tensor parallelism, and both of these. The
parameters of the program in JAX are placed as ``torchport.sharding_of`` says of ours, and its results as they are.
Of each: bytes that a device sends in a step, as XLA's text of the partitioned computations has them, beside the
textbook's; a steady step, both engines in turn; compiling, from the traced graph to the executable, JAX's tracing and
lowering included; and the first step of a new program, which traces, compiles and runs.
Target: 1.10 for a steady step and for compiling.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ["TORCHPORT_CACHE"] = "off"

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

import torchport  # noqa: E402
from torchport.backend.compiler import computations  # noqa: E402

from .common import Samples, interleave, ratio, table  # noqa: E402

__all__ = ["main"]

RATE = 1e-3
Arrays = Any


# -- the models, twice -----------------------------------------------------------------------------------------------
@dataclass
class Job:
    """A model in PyTorch, its loss in JAX as a function of the parameters by name, a batch, and sizes for textbooks.

    ``activations``: bytes of what tensor parallelism reduces at a time; ``forward`` and ``backward``: how often.
    """

    model: nn.Module
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    by_hand: Callable[[dict[str, Arrays], Arrays, Arrays], Arrays]
    batch: tuple[torch.Tensor, torch.Tensor]
    activations: int
    forward: int
    backward: int


class _Perceptrons(nn.Module):
    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, inner) for _ in range(count))
        self.downs = nn.ModuleList(nn.Linear(inner, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x


def _linear(p: dict[str, Arrays], name: str, x: Arrays) -> Arrays:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _mlp() -> Job:
    import jax

    width, inner, count, rows = 512, 2048, 3, 256

    def by_hand(p: dict[str, Arrays], x: Arrays, y: Arrays) -> Arrays:
        for at in range(count):
            x = x + _linear(p, f"downs.{at}", jax.nn.gelu(_linear(p, f"ups.{at}", x), approximate=False))
        return ((x - y) ** 2).mean()

    return Job(
        _Perceptrons(width, inner, count),
        lambda net, x, y: nn.functional.mse_loss(net(x), y),
        by_hand,
        (torch.randn(rows, width), torch.randn(rows, width)),
        4 * rows * width,
        count,
        count - 1,  # the batch needs no gradient
    )


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # One matrix, as in GPT-2, with heads outermost. Of three, XLA reduces each one's share of the input's gradient
        # by itself, in a program written by hand, too: half as many bytes again as the textbook has.
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class _Gpt2(nn.Module):
    def __init__(self, words: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _gpt2() -> Job:
    import jax
    import jax.numpy as jnp

    words, width, heads, layers, length, rows = 1024, 256, 8, 2, 64, 16

    def norm(p: dict[str, Arrays], name: str, x: Arrays) -> Arrays:
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def block(p: dict[str, Arrays], name: str, x: Arrays) -> Arrays:
        b, t, c = x.shape
        q, k, v = (
            _linear(p, f"{name}.qkv", norm(p, f"{name}.norm1", x))
            .reshape(b, t, heads, 3, c // heads)
            .transpose(3, 0, 2, 1, 4)
        )
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(c // heads)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        y = (jax.nn.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3).reshape(b, t, c)
        x = x + _linear(p, f"{name}.out", y)
        y = jax.nn.gelu(_linear(p, f"{name}.up", norm(p, f"{name}.norm2", x)), approximate=True)
        return x + _linear(p, f"{name}.down", y)

    def by_hand(p: dict[str, Arrays], ids: Arrays, targets: Arrays) -> Arrays:
        x = p["words.weight"][ids] + p["places.weight"]
        for at in range(layers):
            x = block(p, f"blocks.{at}", x)
        logits = jax.nn.log_softmax(norm(p, "norm", x) @ p["head.weight"].T, axis=-1)
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean()

    ids = torch.randint(words, (rows, length + 1), dtype=torch.int32)
    return Job(
        _Gpt2(words, width, heads, layers, length),
        lambda net, x, y: nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()),
        by_hand,
        (ids[:, :-1].contiguous(), ids[:, 1:].long().contiguous()),
        4 * rows * length * width,
        2 * layers,
        2 * layers,
    )


JOBS: dict[str, Callable[[], Job]] = {"mlp": _mlp, "gpt2": _gpt2}


# -- the ways --------------------------------------------------------------------------------------------------------
Way = Callable[[nn.Module], tuple[Any, Sequence[Any]]]


def _plan(net: nn.Module) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for name, sub in net.named_modules():
        if isinstance(sub, nn.Linear):
            own = {part for part in name.split(".") if not part.isdigit()}
            if own & {"qkv", "up", "ups"}:
                plan[name] = ColwiseParallel()
            elif own & {"out", "down", "downs"}:
                plan[name] = RowwiseParallel()
    return plan


def _dp(net: nn.Module) -> tuple[Any, Sequence[Any]]:
    mesh = torchport.mesh((DEVICES,), ("data",))
    torchport.shard(net, mesh, [Replicate()])
    return mesh, [Shard(0)]


def _fsdp(net: nn.Module) -> tuple[Any, Sequence[Any]]:
    mesh = torchport.mesh((DEVICES,), ("data",))
    fully_shard(net, mesh=mesh)
    return mesh, [Shard(0)]


def _tp(net: nn.Module) -> tuple[Any, Sequence[Any]]:
    mesh = torchport.mesh((DEVICES,), ("model",))
    parallelize_module(net, mesh, _plan(net))  # type: ignore[arg-type]
    return mesh, [Replicate()]


def _both(net: nn.Module) -> tuple[Any, Sequence[Any]]:
    mesh = torchport.mesh((2, 4), ("data", "model"))
    parallelize_module(net, mesh["model"], _plan(net))  # type: ignore[arg-type]
    fully_shard(net, mesh=mesh["data"])
    return mesh, [Shard(0), Replicate()]


WAYS: dict[str, Way] = {"dp": _dp, "fsdp": _fsdp, "tp": _tp, "2d": _both}


def _textbook(job: Job, way: str) -> float:
    """Bytes that a device sends in a step, with gradients reduced whole: the CPU's XLA makes no reduce-scatters."""
    weights = 4 * sum(p.numel() for p in job.model.parameters())
    split = 4 * sum(
        p.numel() for name, p in job.model.named_parameters() if name.rpartition(".")[0] in _plan(job.model)
    )
    n = DEVICES
    if way == "dp":
        return 2 * (n - 1) / n * weights
    if way == "fsdp":
        return (n - 1) / n * (weights + 2 * weights)
    if way == "tp":
        return (job.forward + job.backward) * 2 * (n - 1) / n * job.activations
    data, model = 2, 4
    held = weights - split + split / model
    activations = (job.forward + job.backward) * 2 * (model - 1) / model * job.activations / data
    return activations + (data - 1) / data * 3 * held


# -- the engines -----------------------------------------------------------------------------------------------------
class _Ours:
    """Steps as people write them."""

    def __init__(self, job: Job, way: Way) -> None:
        self.job = job
        self.net = copy.deepcopy(job.model).to("port")
        mesh, placements = way(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
        self.x, self.y = (distribute_tensor(one.to("port"), mesh, placements) for one in job.batch)
        torchport.sync()

    def step(self) -> float:
        loss = self.job.loss(self.net, self.x, self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def sent(self) -> int:
        before = len(torchport.collectives())
        self.step()
        return sum(one.sent for one in torchport.collectives()[before:])


class _ByHand:
    """The same step in ``jax.jit``, given arrays that lie as ours do, and pinned to give them back so."""

    def __init__(self, job: Job, ours: _Ours) -> None:
        import jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        shape = torchport.sharding_of(ours.x) or next(
            found for p in ours.net.parameters() if (found := torchport.sharding_of(p)) is not None
        )
        axes = tuple(shape.mesh.axes)
        mesh = jax.make_mesh(tuple(shape.mesh.shape), axes, axis_types=(AxisType.Auto,) * len(axes))

        def place(ours_is: torch.Tensor, value: torch.Tensor) -> Arrays:
            found = torchport.sharding_of(ours_is)
            dims = () if found is None else tuple(axes or None for axes in found.dims)
            return jax.device_put(value.detach().numpy().copy(), NamedSharding(mesh, PartitionSpec(*dims)))

        theirs = dict(job.model.named_parameters())
        self._used = {
            name: NamedSharding(mesh, PartitionSpec(*(axes or None for axes in found.used)))
            for name, p in ours.net.named_parameters()
            if (found := torchport.sharding_of(p)) is not None and found.gathered
        }
        self.params = {name: place(p, theirs[name]) for name, p in ours.net.named_parameters()}
        self.x, self.y = (place(*pair) for pair in zip((ours.x, ours.y), job.batch, strict=True))

        def update(p: dict[str, Arrays], x: Arrays, y: Arrays) -> tuple[Arrays, dict[str, Arrays]]:
            bring = jax.lax.with_sharding_constraint
            whole = {name: bring(value, self._used[name]) if name in self._used else value for name, value in p.items()}
            value, grads = jax.value_and_grad(job.by_hand)(whole, x, y)
            return value, {name: p[name] - RATE * grads[name] for name in p}

        self._update = update
        self._pinned = None, {name: array.sharding for name, array in self.params.items()}
        self.compiled: Any = None

    def compile(self) -> None:
        import jax

        with jax.default_matmul_precision("highest"):
            jitted = jax.jit(lambda *args: self._update(*args), out_shardings=self._pinned)
            self.compiled = jitted.lower(self.params, self.x, self.y).compile()

    def step(self) -> float:
        if self.compiled is None:
            self.compile()
        assert self.compiled is not None
        value, self.params = self.compiled(self.params, self.x, self.y)
        return float(value)

    def sent(self) -> int:
        from torchport.backends.xla.spread import collectives_in
        from torchport.core.traffic import least_sent

        found = collectives_in(self.compiled.as_text())
        return sum(least_sent(name, nbytes, ranks) for name, _, _, ranks, nbytes in found)


def _fresh() -> None:
    """Forget what is compiled, and the tries."""
    import jax

    jax.clear_caches()
    torchport.use("reference")
    computations.clear()
    torchport.use("xla")


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


@contextmanager
def _noting(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Add the seconds of every call of a function to the last number of a list."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[-1] += perf_counter() - start

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _first(job: Job, way: Way, compiles: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Compiling, and the first step, of new programs."""
    from torchport.backends.xla import XlaBackend, jax_api

    spent: dict[str, list[float]] = {"ours": [], "hand": []}

    def ours() -> float:
        _fresh()
        spent["ours"].append(0.0)
        program = _Ours(job, way)
        with (
            _noting(XlaBackend, "preprocess", spent["ours"]),
            _noting(jax_api, "compile_module", spent["ours"]),
        ):
            return _seconds(program.step)

    def by_hand() -> float:
        _fresh()
        spent["hand"].append(0.0)
        program = _ByHand(job, _Ours(job, way))
        with _noting(program, "compile", spent["hand"]):
            return _seconds(program.step)

    steps = interleave({"ours": ours, "hand": by_hand}, compiles, warmup=1)
    return {name: Samples(found[1:]) for name, found in spent.items()}, steps  # without the warm-up, as the steps


def measure(name: str, ways: Sequence[str], batches: int, compiles: int) -> None:
    """Print the tables of one model."""
    sizes, times = [], []
    for way in ways:
        torch.manual_seed(0)
        torchport.use("xla")
        job = JOBS[name]()
        ours = _Ours(job, WAYS[way])
        by_hand = _ByHand(job, ours)
        losses = [(ours.step(), by_hand.step()) for _ in range(4)]
        assert all(math.isclose(*pair, rel_tol=1e-3) for pair in losses), f"not the same program: {losses}"
        sent, expected = ours.sent(), _textbook(job, way)
        by_hand.step()
        sizes.append(
            [way, f"{sent / 1e6:.3f}", f"{by_hand.sent() / 1e6:.3f}", f"{expected / 1e6:.3f}", f"{sent / expected:.3f}"]
        )
        found = interleave(
            {"ours": lambda o=ours: _seconds(o.step), "hand": lambda h=by_hand: _seconds(h.step)}, batches
        )
        compiling, first = _first(job, WAYS[way], compiles)
        times.append([way, *_cells(found, 1e3, 2), *_cells(compiling, 1, 2), *_cells(first, 1, 2)])
    table(
        f"{name}: MB that a device sends in a step",
        ("way", "port on xla", "by hand in JAX", "textbook", "÷ textbook"),
        sizes,
    )
    table(
        f"{name}: a steady step in ms, compiling and the first step in s (medians)",
        ("way", "ours", "JAX", "ratio", "compiling", "JAX", "ratio", "first, ours", "first, JAX", "ratio"),
        times,
    )


def _cells(found: dict[str, Samples], per: float, digits: int) -> list[str]:
    ours, hand = found["ours"], found["hand"]
    return [f"{ours.median * per:.{digits}f}", f"{hand.median * per:.{digits}f}", f"{ratio(ours, hand)[1]:.2f}"]


def main(argv: list[str] | None = None) -> None:
    """Print two tables per model."""
    parser = argparse.ArgumentParser(description="port on xla over eight devices against hand-written jax.jit")
    parser.add_argument("--batches", type=int, help="steps per engine (default 30, quick 10)")
    parser.add_argument("--quick", action="store_true", help="fewer steps and compilations")
    parser.add_argument("--only", default=",".join(JOBS), help=f"of {', '.join(JOBS)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    options = parser.parse_args(argv)
    row = next(row for row in torchport.list_backends() if row.name == "xla")
    if not row.available:
        print(row.reason)
        return
    for name in options.only.split(","):
        measure(
            name, options.ways.split(","), options.batches or (10 if options.quick else 30), 2 if options.quick else 11
        )


if __name__ == "__main__":
    main()
