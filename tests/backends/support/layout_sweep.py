"""PyTorch's OpInfo samples of sparse and of jagged nested tensors on the device, for crashes and wrong values.

``python tests/backends/support/layout_sweep.py [sparse|nested] [--samples N] [--only NAME] [--part K/N]`` runs a
child process per batch of operators and prints the shares: worked (equal to the CPU), refused in words, as the CPU
(which refuses as well), wrong, internal (PyTorch's assertions and dispatch tables), crashed. The last three must be 0.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

INTERNAL = ("INTERNAL ASSERT", "Could not run", "report a bug", "PythonDispatcher", "Expected func != nullptr")
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
RANDOM = ("empty", "rand", "bernoulli", "nn.functional.dropout", "nn.functional.rrelu")
BATCH = 180


def _databases(kind: str) -> list[Any]:
    warnings.simplefilter("ignore")
    if kind == "nested":
        from torch.testing._internal.opinfo.definitions.nested import njt_op_db

        return [op for op in njt_op_db if torch.float32 in op.supported_dtypes("cpu")]
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if any(op.supports_sparse_layout(layout) for layout in LAYOUTS)]


def _samples(kind: str, op: Any, most: int) -> Iterator[Any]:
    if kind == "nested":
        try:
            yield from islice(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd), most)
        except Exception as error:  # PyTorch has none of this kind, or cannot make them on the CPU
            print(f"no samples: {op.name}: {type(error).__name__}", file=sys.stderr)
        return
    for layout in LAYOUTS:
        if op.supports_sparse_layout(layout):
            try:
                yield from islice(op.sample_inputs_sparse(layout, "cpu", torch.float32, requires_grad=False), most)
            except Exception as error:  # PyTorch has no samples of this kind
                print(f"no samples: {op.name} {layout}: {type(error).__name__}", file=sys.stderr)


def _values(value: Any) -> list[Any]:
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            held: Any = leaf.detach()
            plain = held.values() if held.is_nested else held.to_dense() if held.layout != torch.strided else held
            found.append(plain.cpu())
        else:
            found.append(leaf)
    return found


def _run(op: Any, sample: Any, device: str | None, dense_only: bool) -> tuple[list[Any], list[Any]]:
    """Results and gradients."""

    def move(x: torch.Tensor) -> torch.Tensor:
        if device is None or (dense_only and x.layout not in (torch.strided, torch.jagged)):
            return x.detach().requires_grad_(x.requires_grad) if x.requires_grad else x
        moved = x.detach().to(device)
        return moved.requires_grad_(x.requires_grad) if x.requires_grad else moved

    torch.manual_seed(0)
    given = tree_map_only(torch.Tensor, move, (sample.input, sample.args, sample.kwargs))
    if device is not None:
        given = tree_map_only(torch.device, lambda _: torch.device(device), given)
    result = op.op(given[0], *given[1], **given[2])
    wanted = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
    made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    held = _values(result)
    if not wanted or not made:
        return held, []
    total = torch.stack([(x.values() if x.is_nested else x).square().sum() for x in made]).sum()
    return held, [
        _values(g)[0] if isinstance(g, torch.Tensor) else None
        for g in torch.autograd.grad(total, wanted, allow_unused=True)
    ]


def _compare(op: Any, sample: Any, dense_only: bool) -> tuple[str, str]:
    import torchport

    try:
        expected: Any = _run(op, sample, None, dense_only)
    except Exception as error:
        expected = error
    try:
        found = _run(op, sample, "port", dense_only)
    except torchport.TorchportError as error:
        return "refused", str(error)[:300]
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(mark in text for mark in INTERNAL):
            same = isinstance(expected, Exception) and any(mark in str(expected) for mark in INTERNAL)
            return ("as the CPU" if same else "internal"), text[:300]
        return ("as the CPU" if isinstance(expected, Exception) else "refused by PyTorch"), text[:300]
    if isinstance(expected, Exception):
        return "worked", "the CPU does not"
    if getattr(op, "name", "").startswith(
        ("empty", "nn.functional.dropout", "rand", "bernoulli", "nn.functional.rrelu")
    ):
        return "worked", "random"
    try:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    except AssertionError as error:
        return "wrong", str(error)[:300]
    return "worked", ""


def _child(kind: str, names: list[str], most: int) -> None:
    import torchport

    torchport.use("reference")
    for op in _databases(kind):
        name = f"{op.name}:{op.variant_test_name}"
        if name not in names:
            continue
        for number, sample in enumerate(_samples(kind, op, most)):
            for dense_only in (False, True) if kind == "sparse" else (False,):
                label = f"{name} {number}{' dense on port' * dense_only}"
                print(json.dumps([label, "begun", ""]), flush=True)
                print(json.dumps([label, *_compare(op, sample, dense_only)]), flush=True)


def sweep(kind: str, most: int, only: str | None, part: tuple[int, int] = (0, 1)) -> dict[str, list[tuple[str, str]]]:
    """Outcome → the samples with that outcome, each with what was said."""
    names = [f"{op.name}:{op.variant_test_name}" for op in _databases(kind)]
    names = [name for name in names if only is None or only in name][part[0] :: part[1]]
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        command = [sys.executable, __file__, kind, "--samples", str(most), "--child", *batch]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        rows = {label: (state, text) for label, state, text in map(json.loads, run.stdout.splitlines())}
        for label, (state, text) in rows.items():
            found["crashed" if state == "begun" else state].append((label, text or run.stderr[-300:]))
        if run.returncode != 0 and not any(state == "begun" for state, _ in rows.values()):
            found["crashed"].append((f"the process of {batch[0]} …", run.stderr[-600:]))
    return found


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["sparse", "nested"])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--only")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th operator from the K-th on")
    parser.add_argument("--child", nargs="*")
    given = parser.parse_args()
    if given.child is not None:
        _child(given.kind, given.child, given.samples)
        return 0
    first, step = map(int, given.part.split("/"))
    found = sweep(given.kind, given.samples, given.only, (first, step))
    total = sum(map(len, found.values()))
    for state, rows in sorted(found.items()):
        print(f"{state}: {len(rows)} of {total}")
        if state not in ("worked", "as the CPU"):
            reasons = collections.Counter(text.split("\n")[0][:160] for _, text in rows)
            for reason, count in reasons.most_common(25):
                example = next(label for label, text in rows if text.startswith(reason[:100]))
                print(f"   {count} × {reason}   ({example})")
    return sum(len(found.get(state, [])) for state in ("wrong", "internal", "crashed"))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
