"""Runs PyTorch's OpInfo samples on a device and compares with the CPU; a crash or hang of one case costs one case.

A *case* is (operator, mode, sample). Modes: ``function`` calls the operator, ``inplace`` its in-place variant, ``out``
writes into given results, ``backward`` compares input gradients. Cases run in forked worker processes that say which
case they are about to run, so the parent knows the culprit when a worker dies.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import re
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

FORWARD_MODES = ("function", "inplace", "out")
MODES = (*FORWARD_MODES, "backward")
DTYPE = torch.float32
HANG_SECONDS = 120.0
SEED = 20_240_817
NO_CPU_KERNEL = re.compile(r"^jiterator_")
ARGUMENTS_ON_CPU = {"tensor_split"}
"""Operators that read an argument tensor on the host: only their input moves, as on CUDA."""
UNDEFINED_VALUES = re.compile(r"^((new_)?empty(_like|_strided|_permuted)?|resize_(as_)?)$")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run: device string, backend name (or none), modes, and at most how many samples of each operator."""

    device: str
    backend: str | None = "reference"
    modes: tuple[str, ...] = FORWARD_MODES
    limit: int | None = None
    strides: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One result. ``status``: pass, fail, crash, hang, or skip (the CPU cannot run the case, so there is no truth)."""

    op: str
    mode: str
    sample: int
    status: str
    message: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.status in {"fail", "crash", "hang"}


def operators(pattern: str = "") -> list[Any]:
    """The operators of ``op_db`` that compute in float32 on the CPU and whose name matches the pattern."""
    keep = re.compile(pattern)
    return [
        op
        for op in op_db
        if op.supports_dtype(DTYPE, "cpu")
        and not NO_CPU_KERNEL.search(op.formatted_name)
        and keep.search(op.formatted_name)
    ]


def bind(plan: Plan) -> None:
    """Make the plan's backend the one behind its device."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if torch.device(plan.device).type != "cpu" and plan.backend:
        import torchport

        torchport.use(plan.backend)


def samples_of(op: Any, limit: int | None) -> list[tuple[int, Any]]:
    """The operator's samples with their numbers; a seeded choice of ``limit`` of them where there are more."""
    torch.manual_seed(SEED)
    samples = list(enumerate(op.sample_inputs("cpu", DTYPE, requires_grad=False)))
    if limit is None or len(samples) <= limit:
        return samples
    chosen = random.Random(zlib.crc32(op.formatted_name.encode())).sample(samples, limit)
    return sorted(chosen, key=lambda pair: pair[0])


def to_device(value: Any, device: str) -> Any:
    """A copy of nested arguments with tensors, and device arguments that say CPU, on ``device``."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device) if device != "cpu" else leaf.clone()
        if isinstance(leaf, torch.device) or leaf == "cpu":
            return torch.device(device)
        return leaf

    return tree_map(move, value)


def _set_seed() -> None:
    torch.manual_seed(SEED)


def _arguments(op: Any, sample: Any, device: str) -> tuple[Any, Any, Any]:
    if op.name in ARGUMENTS_ON_CPU:
        return to_device(sample.input, device), sample.args, sample.kwargs
    return to_device((sample.input, sample.args, sample.kwargs), device)


def _function(op: Any, sample: Any, device: str) -> Any:
    input_, args, kwargs = _arguments(op, sample, device)
    _set_seed()
    return op(input_, *args, **kwargs)


def _inplace(op: Any, sample: Any, device: str) -> Any:
    input_, args, kwargs = _arguments(op, sample, device)
    _set_seed()
    returned = op.get_inplace()(input_, *args, **kwargs)
    return returned, input_


def _out(op: Any, sample: Any, device: str) -> Any:
    shapes = op(sample.input, *sample.args, **sample.kwargs)
    out = tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), shapes)
    input_, args, kwargs = _arguments(op, sample, device)
    _set_seed()
    op(input_, *args, **kwargs, out=out)
    return out


def _backward(op: Any, sample: Any, device: str) -> Any:
    input_, args, kwargs = _arguments(op, sample, device)
    leaves = [t.requires_grad_() for t in tree_leaves((input_, args, kwargs)) if _differentiable(t)]
    _set_seed()
    result = sample.output_process_fn_grad(op(input_, *args, **kwargs))
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    seeds = [torch.full_like(t, 0.5) for t in outputs]
    return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


RUNNERS: dict[str, Callable[[Any, Any, str], Any]] = {
    "function": _function,
    "inplace": _inplace,
    "out": _out,
    "backward": _backward,
}


def applies(op: Any, sample: Any, mode: str) -> bool:
    """Whether the operator has the mode for this sample."""
    if mode == "inplace":
        return op.get_inplace() is not None and not sample.broadcasts_input
    if mode == "out":
        return op.supports_out
    if mode == "backward":
        return op.supports_autograd and DTYPE in op.backward_dtypes
    return True


def _expect(op: Any, sample: Any, mode: str) -> tuple[bool, Any]:
    """The CPU's answer, and whether there is one."""
    try:
        return True, RUNNERS[mode](op, sample, "cpu")
    except Exception:
        return False, None


def _other_draw(op: Any, sample: Any, mode: str, expected: Any) -> bool:
    """Whether the CPU itself gives other values with another seed or in fresh memory: only shapes are comparable."""
    torch.manual_seed(SEED + 1)
    with mock.patch.object(torch, "manual_seed"):  # op_db seeds, too: its wrapper_set_seed
        for _ in range(5):
            try:
                _compare(RUNNERS[mode](op, sample, "cpu"), expected)
            except AssertionError:
                return True
            torch.rand(1)
    return False


def _compare(actual: Any, expected: Any, *, values: bool = True, strides: bool = False) -> None:
    """Raise ``AssertionError`` unless two nested results agree (in shape and dtype only, without ``values``)."""
    got, want = tree_leaves(actual), tree_leaves(expected)
    if len(got) != len(want):
        raise AssertionError(f"{len(got)} results instead of {len(want)}")
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or (values and a != b and not (a != a and b != b)):
                raise AssertionError(f"value {a!r} instead of {b!r}")
            continue
        if not isinstance(a, torch.Tensor):
            raise AssertionError(f"a {type(a).__name__} instead of a tensor")
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        if strides and b.layout is torch.strided and a.stride() != b.stride() and b.numel() > 0:
            raise AssertionError(f"strides {a.stride()} instead of {b.stride()} for shape {list(b.shape)}")
        if values:
            torch.testing.assert_close(a.cpu(), b, **_tolerance(b), equal_nan=True)


def _tolerance(expected: torch.Tensor) -> dict[str, float]:
    """Room for another summation order, as a fused or decomposed kernel has."""
    return {"rtol": 2e-5, "atol": 2e-5} if expected.is_floating_point() or expected.is_complex() else {}


def _check_device(sample: Any, result: Any, expected: Any, device: str) -> None:
    given = tree_leaves((sample.input, sample.args, sample.kwargs))
    if not any(isinstance(leaf, torch.Tensor | torch.device) or leaf == "cpu" for leaf in given):
        return
    want = torch.device(device).type
    for a, b in zip(tree_leaves(result), tree_leaves(expected), strict=False):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.device.type != want:
            raise AssertionError(f"a result is on {a.device}, not on {want}")


def run_case(op: Any, sample: Any, mode: str, plan: Plan) -> tuple[str, str, str]:
    """Status, one-line message, and details of one case."""
    known, expected = _expect(op, sample, mode)
    if not known:
        return "skip", "the CPU raises", ""
    try:
        actual = RUNNERS[mode](op, sample, plan.device)
        _check_device(sample, actual, expected, plan.device)
        try:
            _compare(actual, expected, strides=plan.strides)
        except AssertionError:
            if UNDEFINED_VALUES.search(op.name) or _other_draw(op, sample, mode, expected):
                _compare(actual, expected, values=False, strides=plan.strides)
            else:
                raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        shown = f"{type(error).__name__}: {first}"
        return "fail", shown, f"sample {_shown(sample)}\n{traceback.format_exc(limit=-25)}"
    return "pass", "", ""


def _shown(sample: Any) -> str:
    def leaf(value: Any) -> Any:
        return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else value

    text = f"{tree_map(leaf, sample.input)}, *{tree_map(leaf, sample.args)}, **{tree_map(leaf, sample.kwargs)}"
    return text[:400]


# -- processes ---------------------------------------------------------------------------------------------------------
Position = tuple[int, int, int]
"""Operator (index into the list), mode (index into the plan's), sample number."""


def _cases(ops: list[Any], indices: Iterable[int], plan: Plan) -> Iterator[tuple[Position, Any, Any, str]]:
    for index in indices:
        op = ops[index]
        for number, sample in samples_of(op, plan.limit):
            for which, mode in enumerate(plan.modes):
                if applies(op, sample, mode):
                    yield (index, which, number), op, sample, mode


def _work(ops: list[Any], indices: list[int], skip: set[Position], plan: Plan, pipe: Connection) -> None:
    """A worker's life: announce a case, run it, send what came of it."""
    bind(plan)
    for position, op, sample, mode in _cases(ops, indices, plan):
        if position in skip:
            continue
        pipe.send(position)
        pipe.send((position, *run_case(op, sample, mode, plan)))
    pipe.send(None)
    pipe.close()
    os._exit(0)


class _Worker:
    """A process, what it has been given, and the case it announced last."""

    def __init__(self, ops: list[Any], indices: list[int], skip: set[Position], plan: Plan) -> None:
        context = multiprocessing.get_context("fork")
        self.indices = indices
        self.skip = set(skip)
        self.current: Position | None = None
        self.heard = time.monotonic()
        self.pipe, child = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(ops, indices, skip, plan, child), daemon=True)
        self.process.start()
        child.close()

    def end(self) -> int | None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


def run(
    ops: list[Any],
    plan: Plan,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Case]:
    """Every case of the operators, in worker processes. A crash or hang becomes the result of the case that did it."""
    queue = [list(range(start, min(start + 8, len(ops)))) for start in range(0, len(ops), 8)]
    running: list[_Worker] = []
    cases: list[Case] = []
    while queue or running:
        while queue and len(running) < jobs:
            running.append(_Worker(ops, queue.pop(0), set(), plan))
        wait([worker.pipe for worker in running], timeout=1.0)
        for worker in list(running):
            ended = _listen(worker, ops, plan, cases)
            if ended is None and time.monotonic() - worker.heard > HANG_SECONDS:
                ended = "hang"
            if ended is None:
                continue
            running.remove(worker)
            code = worker.end()
            if ended != "done":
                _blame(worker, ended, code, ops, plan, cases)
                running.append(_Worker(ops, worker.indices, worker.skip, plan))
        progress(len(cases))
    return cases


def _listen(worker: _Worker, ops: list[Any], plan: Plan, cases: list[Case]) -> str | None:
    """Take what the worker has said; how it ended, if it did."""
    try:
        while worker.pipe.poll():
            said = worker.pipe.recv()
            worker.heard = time.monotonic()
            if said is None:
                return "done"
            if len(said) == 3:
                worker.current = said
                continue
            (index, mode, sample), status, message, detail = said
            worker.skip.add(said[0])
            worker.current = None
            cases.append(Case(ops[index].formatted_name, plan.modes[mode], sample, status, message, detail))
    except EOFError:
        return "crash"
    return None


def _blame(worker: _Worker, how: str, code: int | None, ops: list[Any], plan: Plan, cases: list[Case]) -> None:
    """Record the case a worker died of."""
    if worker.current is None:
        names = [ops[index].formatted_name for index in worker.indices]
        raise RuntimeError(f"a worker ended ({how}, exit code {code}) outside any case, with operators {names}")
    index, mode, sample = worker.current
    worker.skip.add(worker.current)
    message = f"no answer for {HANG_SECONDS:.0f} s" if how == "hang" else f"the process died (exit code {code})"
    cases.append(Case(ops[index].formatted_name, plan.modes[mode], sample, how, message))
