"""Random programs of tensor operators at sizes that vary, on an engine, compared with eager on the CPU.

Run as a program for large numbers: ``python tests/backends/support/sizes_fuzz.py --engine xla --count 1000 --seed 0``.
A program is lines of Python over inputs ``[B, T, C]``; it is run for a series of ``(B, T)``. What differs is run again
with ``config.sizes = "off"``: what differs then, too, has nothing to do with sizes. ``--only SEED`` prints a program.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from padding_engine import Padding
from torch.nn import functional

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.backend.sizes import families as known

C: Final = 4
"""The width of inputs, which does not vary."""
_DRAWN_AT: Final = ((6, 11), (5, 9))
"""Sizes at which each line of a program has to run: of tensors that can hold no other as a part by chance."""
_HEADS: Final = ("x", "y", "ids", "keep", "table", "w", "kernel")


@dataclass(slots=True)
class Program:
    """Lines that make values ``v0``, ``v1``, ...; the last ones are its results."""

    seed: int
    lines: list[str] = field(default_factory=list[str])
    results: tuple[str, ...] = ()
    backward: bool = False
    series: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __str__(self) -> str:
        end = f"results: {', '.join(self.results)}{', backward' if self.backward else ''}; sizes {self.series}"
        return "\n".join((f"seed {self.seed}", *self.lines, end))


def _inputs(batch: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    return {
        "x": normal(batch, length, C),
        "y": normal(batch, length, C),
        "ids": torch.randint(0, 7, (batch, length), generator=made),
        "keep": torch.rand((batch, length), generator=made) < 0.6,
        "table": normal(7, C),
        "w": normal(C, C),
        "kernel": normal(3, C, 3),
    }


def _scope(inputs: dict[str, torch.Tensor], device: str) -> dict[str, Any]:
    batch, length = inputs["ids"].shape
    made: dict[str, Any] = {"torch": torch, "F": functional, "B": batch, "T": length, "C": C, "device": device}
    return {**made, **{name: value.detach().clone().to(device) for name, value in inputs.items()}}


# -- drawing -----------------------------------------------------------------------------------------------------------
def _lines(draw: random.Random, name: str, value: torch.Tensor) -> Sequence[str]:
    """Expressions of one float value, at random dimensions."""
    rank = value.dim()
    d, e = draw.randrange(rank), draw.randrange(rank)
    back = d - rank
    n = f"{name}.shape[{d}]"
    number = draw.choice((1, 2, 3))
    size = draw.choice(("2", "B", "T", "3"))
    before, after = f"*{name}.shape[:{d}]", f"*{name}.shape[{d}:]"
    order = ", ".join(map(str, draw.sample(range(rank), rank)))
    fill = draw.choice(("0.0", "-1e4", "T"))
    square = f"torch.ones({name}.shape[-2], {name}.shape[-2], device=device).tril()"
    attended = f"{name}, {name}.sin(), {name}.cos()"
    cut = draw.choice(
        (":-1", ":-2", "1:", "2:", "1:-1", "-3:", ":3", "::2", "1::2", "-5:-1", ":C", f":{n}//2", f"{n}//2:")
    )
    at = ", ".join([":"] * d + [cut])
    key = draw.choice(("amax", "amin", "sum", "mean", "logsumexp"))
    keep = draw.choice((True, False))
    fold = f"{name}.flatten({min(d, e)}, {max(d, e)})"
    found = [
        f"{name}.transpose({d}, {e})",
        f"{name}.transpose({d}, {e}).contiguous()",
        fold,
        f"{name}.reshape(-1)",
        f"{name}.unflatten({d}, (2, -1))",
        f"{name}.unflatten({d}, (-1, 2))",
        f"{name}.reshape(-1, {name}.shape[-1])",
        f"{name}.reshape(B, -1)",
        f"{name}.reshape(-1, T)",
        f"{name}.reshape(T, -1)",
        f"{name}.reshape(B, T, -1)",
        f"{name}.reshape(B * T, -1)",
        f"{name}.reshape(-1, B)",
        f"{name}.unsqueeze({d})",
        f"{name}.unsqueeze({d}).expand({before}, {size}, {after})",
        f"{name}.squeeze({d})",
        f"{name}.squeeze()",
        f"{name}.permute({order})",
        f"torch.cat([{name}, {name} * 2], {d})",
        f"torch.cat([{name}, torch.zeros_like({name})[{', '.join([':'] * d + [':1'])}]], {d})",
        f"torch.stack([{name}, {name}.exp().clamp(max=9)], {d})",
        f"{name}[{at}]",
        f"{name}[{at}]",
        f"{name}.narrow({d}, 0, {n} - 1)",
        f"{name}.select({d}, {draw.choice((0, 1, -1, 2))})",
        f"{name}.select({d}, {n} // 2)",
        f"F.pad({name}, ({draw.choice((0, 1, -1))}, {draw.choice((1, 2, -1))}))",
        f"F.pad({name}, (0, 0, {number}, 0))",
        f"F.pad({name}, (0, 0, 0, 16 - {name}.shape[-2]))",
        f"{name}.softmax({d})",
        f"{name}.log_softmax({back})",
        f"{name}.{key}({d}, keepdim={keep})",
        f"{name}.{key}({d})",
        f"{name}.sum()",
        f"{name}.mean()",
        f"{name}.amax()",
        f"{name}.sum(({d}, {e}))" if d != e else f"{name}.sum()",
        f"{name}.mean(({d}, {e}))" if d != e else f"{name}.mean()",
        f"{name}.var({d}, correction={draw.choice((0, 1))})",
        f"{name}.std({d})",
        f"{name}.argmax({d}).float()",
        f"{name}.argmin({d}, keepdim=True).float()",
        f"{name}.argmax().float()",
        f"{name}.max({d})[0]",
        f"{name}.max({d})[1].float()",
        f"{name}.min({d})[0]",
        f"{name}.median({d})[0]",
        f"{name}.norm(dim={d})",
        f"{name}.cumsum({d})",
        f"{name}.cumprod({d})",
        f"{name}.flip({d})",
        f"{name}.roll({draw.choice((1, -2))}, {d})",
        f"{name}.sort({d})[0]",
        f"{name}.sort({d}, descending=True)[0]",
        f"{name}.topk(2, {d})[0]",
        f"{name}.topk(min(3, {n}), {d}, largest=False)[0]",
        f"{name} * {n}",
        f"{name} / {n}",
        f"{name} * (B * T)",
        f"{name} + T",
        f"{name} - B",
        f"{name} * B ** -0.5",
        f"{n} - {name}",
        f"{name} / (T - 1)",
        f"{name} ** 2 / (B * T * C)",
        f"torch.full_like({name}, T) + {name}",
        f"{name}.new_full(({name}.shape[-1],), 2.0) * {name}",
        f"torch.arange({n}, device=device).float() + {name}.transpose({d}, -1)",
        f"torch.arange(1, {n} + 1, device=device).float() * {name}.transpose({d}, -1)",
        f"torch.arange(T, device=device).float()[:, None] * {name}",
        f"torch.linspace(0, 1, T, device=device)[:, None] + {name}",
        f"{name}.relu()",
        f"F.gelu({name})",
        f"{name}.tanh()",
        f"{name}.sigmoid()",
        f"{name}.clamp(-1, 1)",
        f"{name} + {name}.mean({d}, keepdim=True)",
        f"{name} / {name}.abs().sum({d}, keepdim=True).clamp(min=0.1)",
        f"{name}.cosh().reciprocal()",
        f"torch.where({name} > 0, {name}, {name}.exp())",
        f"{name}.masked_fill({name} < 0, {fill})",
        f"F.layer_norm({name}, {name}.shape[-1:])",
        f"F.layer_norm({name}, {name}.shape[-2:])",
        f"F.normalize({name}, dim={d})",
        f"{name}.tril()",
        f"{name}.triu(1)",
        f"{name}.tril(-1)",
        f"{name} @ {name}.transpose(-1, -2)",
        f"{name}.transpose(-1, -2) @ {name}",
        f"{name}.transpose(-1, -2) @ {name}.cos()",
        f"({name} * 0.3) @ w",
        f"F.linear({name}, w, w[0])",
        f"F.linear({name}, w[:2])",
        f"torch.einsum('...ij,...kj->...ik', {name}, {name}.sin())",
        f"torch.outer({name}.reshape(-1)[:9], {name}.reshape(-1)[:5])",
        f"{name}.index_select({d}, torch.tensor([1, 0], device=device))",
        f"{name}.index_select({d}, torch.arange({n} - 1, -1, -1, device=device))",
        f"{name}.gather({d}, {name}.argsort({d}))",
        f"{name}.gather({d}, {name}.argmax({d}, keepdim=True))",
        f"{name}.gather({d}, torch.zeros_like({name}, dtype=torch.int64))",
        f"{name}[{', '.join([':'] * d + ['[0, -1]'])}]",
        f"{name}[ids[0, :3] % 2]",
        f"{name}.scatter({d}, torch.zeros_like({name}[:1], dtype=torch.int64), 5.0)",
        f"{name}.repeat_interleave(2, {d})",
        f"{name}.repeat(*{[2 if at == d else 1 for at in range(rank)]})",
        f"{name}.split(2, {d})[-1]",
        f"{name}.chunk(2, {d})[0]",
        f"{name}.chunk(3, {d})[-1]",
        f"{name}.unbind({d})[-1]",
        f"{name}.unfold({d}, 3, 1)",
        f"{name}.diagonal()",
        f"{name}.clone()",
        f"{name}.detach() + {name}",
        f"{name}.double().sum({d}).float()",
        f"({name} > 0).sum({d}).float()",
        f"({name} > 0).any({d}).float()",
        f"({name} > 0).float().mean({d})",
        f"{name}.prod({d})",
    ]
    if rank >= 3:
        found += [
            f"torch.bmm({name}.flatten(0, -3), {name}.flatten(0, -3).transpose(1, 2))",
            f"F.max_pool1d({name}, 2)",
            f"F.avg_pool1d({name}.transpose(-1, -2), 3, 1, 1)",
            f"F.adaptive_avg_pool1d({name}, 2)",
            f"F.scaled_dot_product_attention({attended})",
            f"F.scaled_dot_product_attention({attended}, is_causal=True)",
            f"F.scaled_dot_product_attention({attended}, attn_mask={square} > 0.5)",
            f"F.conv1d({name}.transpose(-1, -2), kernel, padding=1)",
            f"F.conv1d({name}.transpose(-1, -2), kernel)",
            f"F.conv2d({name}.unsqueeze(1), kernel[:, None], padding=1)",
            f"F.max_pool2d({name}.unsqueeze(1), 2)",
            f"F.avg_pool2d({name}.unsqueeze(1), 3, 1, 1)",
            f"F.adaptive_avg_pool2d({name}.unsqueeze(1), 2)",
            f"F.interpolate({name}, scale_factor=2)",
        ]
    return found


_FIRST: Final = (
    "x + y",
    "x * y",
    "F.embedding(ids, table) + x",
    "F.embedding(ids, table)",
    "x.masked_fill(~keep[..., None], 0.0)",
    "torch.where(keep[..., None], x, y)",
    "x * keep[..., None].float()",
    "x.transpose(0, 1)",
    "x @ w",
    "x @ y.transpose(1, 2)",
    "torch.cat([x, y], 0)",
    "torch.cat([x, y], 1)",
    "torch.cat([x, y], 2)",
    "x + torch.arange(T, device=device)[:, None]",
    "x.gather(1, (ids % 2)[..., None].expand(B, T, C))",
    "F.one_hot(ids, 7).float()",
    "x[torch.arange(B, device=device), ids % 2]",
    "table[ids]",
    "x.double()",
    "(x[:, :, None] - y[:, None]).square().sum(-1)",
    "x.index_add(1, ids[0] % 2, y)",
    "ids.float() + ids.sum(1, keepdim=True)",
    "F.cross_entropy(x.flatten(0, 1), ids.flatten() % C) * y",
    "torch.cdist(x, y)",
    "keep.sum(1).float() / T",
)


def draw_program(seed: int) -> Program:
    """A program that runs at the sizes that it is drawn at, and a series of sizes for it."""
    draw = random.Random(seed)
    made = Program(seed)
    scopes = [_scope(_inputs(batch, length, 1), "cpu") for batch, length in _DRAWN_AT]
    floats: list[str] = []

    def add(expression: str) -> bool:
        name = f"v{len(made.lines)}"
        try:
            values = [eval(expression, dict(scope)) for scope in scopes]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        if any(not 0 < value.numel() <= 20000 or value.abs().amax() > 1e4 or value.isnan().any() for value in values):
            return False
        for scope, value in zip(scopes, values, strict=True):
            scope[name] = value
        made.lines.append(f"{name} = {expression}")
        if values[0].dim():
            floats.append(name)
        return True

    while not floats:
        add(draw.choice(_FIRST))
    wanted, tries = draw.choice((1, 2, 2, 3, 3, 4, 5, 7)), 0
    while len(made.lines) < wanted and tries < 60:
        tries += 1
        if draw.random() < 0.15:
            add(draw.choice(_FIRST))
            continue
        name = draw.choice(floats[-2:])
        if len(floats) > 1 and draw.random() < 0.2:
            add(f"{name} {draw.choice(('+', '*', '@'))} {draw.choice(floats)}")
        else:
            add(draw.choice(_lines(draw, name, scopes[0][name])))
    names = [line.split()[0] for line in made.lines]
    made.results = tuple(dict.fromkeys((names[-1], draw.choice(names))))
    made.backward = draw.random() < 0.3
    made.series = _series(draw)
    return made


def _series(draw: random.Random) -> list[tuple[int, int]]:
    """Sizes, mostly of one bucket, so that one computation may serve them; now and then what coincides."""
    batches, lengths = draw.choice(
        (
            (range(3, 9), range(9, 17)),
            (range(6, 7), range(9, 17)),
            (range(3, 9), range(12, 13)),
            (range(2, 9), range(2, 9)),
            (range(9, 17), range(9, 17)),
        )
    )
    found = [(draw.choice(batches), draw.choice(lengths)) for _ in range(8)]
    if draw.random() < 0.2:
        found.append(
            draw.choice(
                ((1, found[0][1]), (C, C), (found[0][1], found[0][1]), (found[0][0], 1), (0, found[0][1]), (3, 17))
            )
        )
        found.append((draw.choice(batches), draw.choice(lengths)))
    return found


# -- running -----------------------------------------------------------------------------------------------------------
def _run(program: Program, inputs: dict[str, torch.Tensor], device: str) -> list[torch.Tensor]:
    scope = _scope(inputs, device)
    floats = [scope[name] for name in _HEADS if scope[name].dtype.is_floating_point]
    leaves = [one.requires_grad_() for one in floats] if program.backward else []
    exec("\n".join(program.lines), scope)
    results = [scope[name] for name in program.results]
    grads: list[torch.Tensor] = []
    wanted = [one for one in results if one.requires_grad]
    if wanted:
        sum((one * one).sum() for one in wanted).backward()  # type: ignore[union-attr]
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    results = [one.detach() for one in (*results, *grads)]
    torchport.sync()
    return results


def difference(want: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    """What differs: shapes, dtypes, strides, then values; empty if nothing does."""
    if len(want) != len(found):
        return f"{len(found)} results instead of {len(want)}"
    for at, (one, other) in enumerate(zip(want, found, strict=True)):
        for what in ("shape", "dtype", "stride"):
            a, b = (getattr(value, what) for value in (one, other))
            a, b = (a(), b()) if callable(a) else (a, b)
            if a != b and not (what == "stride" and one.numel() <= 1):
                return f"result {at}: {what} {b} instead of {a}"
        here = other.cpu()
        scale = max(1.0, float(one.abs().amax())) if one.numel() and one.isfinite().all() else 1.0
        if not torch.allclose(here, one, rtol=2e-3, atol=2e-4 * scale, equal_nan=True):
            worst = (here - one).abs().nan_to_num(float("inf")).amax()
            return f"result {at} of shape {tuple(one.shape)}: values differ by {worst}"
    return ""


def _seen(program: Program, inputs: dict[str, torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    try:
        return difference(want, _run(program, inputs, "port"))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:600]} ({last.filename}:{last.lineno})"


def check(program: Program, counts: Counter[str] | None = None, say: Callable[[str], None] | None = None) -> list[str]:
    """Run a program at each of its sizes; what differs from the CPU there, and does not with sizes apart."""
    found: list[str] = []
    counts = Counter() if counts is None else counts
    known.families.clear()
    computations.clear()
    counts["programs"] += 1
    before = {name: metrics.counter(name) for name in ("OtherSizes", "ForSeveralSizes", "NotSymbolic")}
    for at, (batch, length) in enumerate(program.series):
        inputs = _inputs(batch, length, 1000 * program.seed + at)
        try:
            want = _run(program, inputs, "cpu")
        except (RuntimeError, IndexError, ValueError, TypeError):
            counts["raises on the CPU"] += 1
            continue
        counts["runs"] += 1
        counts["results"] += len(want)
        seen = _seen(program, inputs, want)
        if not seen:
            continue
        computations.clear()
        with torchport.config.override(sizes="off"):
            apart = _seen(program, inputs, want)
        computations.clear()
        if apart:
            counts["differs with sizes apart, too"] += 1
            if say is not None and not counts[f"said {apart[:60]}"]:
                counts[f"said {apart[:60]}"] += 1
                say(f"-- not by sizes: seed {program.seed} at {batch, length}: {apart[:160]}")
        else:
            found.append(f"at {batch, length}: {seen}")
    for name, value in before.items():
        counts[name] += metrics.counter(name) - value
    return found


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="xla", help="or padding, which computes as the CPU does")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    if asked.engine == Padding.name:
        torchport.register(Padding)
    torchport.use(asked.engine)
    end, failed = time.monotonic() + asked.seconds, 0
    with torchport.config.override(tiers="off", cache="off"):
        for seed in [asked.only] if asked.only is not None else range(asked.seed, asked.seed + asked.count):
            if time.monotonic() > end:
                break
            program = draw_program(seed)
            if asked.only is not None:
                print(program)
            found = check(program, counts, lambda text: print(text, flush=True))
            failed += bool(found)
            if found:
                print(f"{program}\n   " + "\n   ".join(found), flush=True)
    counts = Counter({name: value for name, value in counts.items() if not name.startswith("said")})
    print(asked.engine, dict(counts), f"{failed} programs differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
