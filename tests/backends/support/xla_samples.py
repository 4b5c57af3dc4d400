"""Calls of single ATen overloads with real arguments: what PyTorch's own OpInfo samples reach, forward and backward.

As a script it writes ``xla_sources.txt``: for every overload of the lowering table, operators of ``op_db`` whose
samples reach it.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SOURCES = Path(__file__).with_name("xla_sources.txt")
SEED = 20_261_120
LARGEST = 1 << 16


@dataclass(frozen=True)
class Instance:
    """One call: its arguments, tensors among them, and what CPU eager returned."""

    op: Any
    args: Any
    kwargs: Any
    expected: list[torch.Tensor | None]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


def _frozen(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _signature(op: Any, args: Any, kwargs: Any) -> str:
    def shown(leaf: Any) -> Any:
        return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf

    return repr((op, tree_map(shown, (args, kwargs))))


class Recorder(TorchDispatchMode):
    """Keeps every different call of the wanted overloads."""

    def __init__(self, wanted: set[Any]) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls: dict[str, Instance] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op not in self.wanted or not self._is_plain(args, kwargs):
            return op(*args, **kwargs)
        before = tree_map(_frozen, (args, kwargs))
        result = op(*args, **kwargs)
        if self._is_plain(result, {}):
            instance = Instance(op, *before, [_frozen(leaf) for leaf in _leaves(result)])
            self.calls.setdefault(_signature(op, *before), instance)
        return result

    @staticmethod
    def _is_plain(args: Any, kwargs: Any) -> bool:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        plain = all(type(t) is torch.Tensor and t.layout is torch.strided and not t.is_quantized for t in tensors)
        device = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        return plain and all(d.type == "cpu" for d in device) and sum(t.numel() for t in tensors) <= LARGEST


def _leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _run(info: Any, sample: Any, backward: bool) -> None:
    args = tree_map(_frozen, (sample.input, sample.args, sample.kwargs))
    leaves = [leaf.requires_grad_() for leaf in tree_leaves(args) if _differentiable(leaf)] if backward else []
    result = info(args[0], *args[1], **args[2])
    if not leaves:
        return
    result = sample.output_process_fn_grad(result)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, [torch.full_like(o, 0.5) for o in outputs], allow_unused=True)


def record(info: Any, dtype: torch.dtype, wanted: set[Any], samples: int = 24) -> list[Instance]:
    """What the operator's samples call among ``wanted``, forward and backward, where CPU eager does."""
    if not info.supports_dtype(dtype, "cpu"):
        return []
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(info.sample_inputs("cpu", dtype, requires_grad=False))
    if len(given) > samples:
        given = random.Random(SEED).sample(given, samples)
    with warnings.catch_warnings(), Recorder(wanted) as recorder:
        warnings.simplefilter("ignore")
        for sample in given:
            for backward in (False, info.supports_autograd and dtype in info.backward_dtypes):
                try:
                    _run(info, sample, backward)
                except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
                    continue
    return list(recorder.calls.values())


@functools.cache
def read_sources() -> dict[str, list[str]]:
    """Overload → names of operators of ``op_db`` that reach it."""
    rows = [line.split(": ") for line in SOURCES.read_text(encoding="utf-8").splitlines() if ": " in line]
    return {op: names.split(", ") for op, names in rows}


@functools.cache
def infos() -> dict[str, Any]:
    """``op_db`` by name."""
    return {info.formatted_name: info for info in op_db}


def instances(op: Any, dtype: torch.dtype, limit: int) -> list[Instance]:
    """Up to ``limit`` different calls of an overload, a seeded choice of what OpInfo reaches."""
    found: dict[str, Instance] = {}
    known = infos()
    for name in read_sources().get(str(op), []):
        if name not in known:  # other releases of PyTorch lack some
            continue
        for one in record(known[name], dtype, {op}):
            found.setdefault(_signature(one.op, one.args, one.kwargs), one)
    calls = list(found.values())
    return calls if len(calls) <= limit else random.Random(SEED).sample(calls, limit)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them in memory."""
    if not tensor.dim():
        return tensor
    wide = torch.empty([*tensor.shape[:-1], 2 * tensor.shape[-1]], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def variant(call: Instance, change: Callable[[torch.Tensor], torch.Tensor]) -> Instance | None:
    """The call with every tensor changed, as CPU eager answers it; ``None`` where it refuses."""
    args, kwargs = tree_map(lambda v: change(v) if isinstance(v, torch.Tensor) else v, (call.args, call.kwargs))
    try:
        result = call.op(*tree_map(_frozen, args), **tree_map(_frozen, kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return Instance(call.op, args, kwargs, [_frozen(leaf) for leaf in _leaves(result)])


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without elements, if it has a dimension."""
    return tensor[:0].clone() if tensor.dim() else tensor


def scalar(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim tensor with the first element."""
    return tensor.reshape(-1)[0].clone() if tensor.numel() else tensor


def more(calls: Sequence[Instance], other_shapes: bool) -> list[Instance]:
    """The calls with gaps in memory and, if wanted, with 0-dim and empty tensors where CPU eager takes them; a few."""
    found: list[Instance] = []
    for change in (spread, scalar, emptied) if other_shapes else (spread,):
        made = (variant(call, change) for call in calls)
        found += list(itertools.islice((one for one in made if one is not None), 3))
    return found


def write_sources(table: Iterable[Any]) -> None:
    """Find up to four operators of ``op_db`` for each overload, those with its own name first."""
    wanted = set(table)
    reached: dict[Any, list[str]] = defaultdict(list)
    for name, info in infos().items():
        if not info.supports_dtype(torch.float32, "cpu"):
            continue
        for op in {one.op for one in record(info, torch.float32, wanted, samples=12)}:
            reached[op].append(name)
        print(name, file=sys.stderr)
    lines = []
    for op in sorted(reached, key=str):
        base = str(op).split(".")[1].strip("_")
        names = sorted(reached[op], key=lambda name: (base not in name, len(name), name))
        lines.append(f"{op}: {', '.join(names[:4])}")
    SOURCES.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from torchport.backends.xla.ops import TABLE

    write_sources(TABLE)
