"""Program files changed in their structure, with checksums that fit: an error in words, or what the file says.

For large numbers: ``python tests/unit/program/fuzz_structure.py --count 200000 --seed 1``. The files are lowered
models. Cases run in forked processes; each may take :data:`SECONDS` of processor time and as much memory beyond what
was there as :func:`allowance` says. A case is wrong if it ends in anything but an error of ours or a result, if the
result is not what the changed file says (an interpreter of our own, :func:`interpret`, runs it too) or not what its
``meta()`` says, if an input was written to, or if anything was written to the folder.

Compiled code (``--engine inductor`` and the others) is code: of such files everything else is changed with checksums
that fit, and the code without.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz
import torch
from structure_changes import Entries, Json, Seed, document_of, mutated
from structure_seeds import ENGINES

from torchport import runtime
from torchport.core.errors import MethodError, TorchportError

SECONDS = 2.0
"""Processor time of a case."""
EVERY = 50
"""Cases after which memory is bounded anew, and the folder looked at: both take longer than a case."""
UNDEFINED = re.compile(rb'"aten\.(new_)?empty')
"""Operators whose results nothing defines, so that no two runs need agree."""
STUCK = 30
"""Seconds after which a case is ended."""


def allowance(size: int) -> int:
    """Bytes of memory for a file of this size."""
    return 10 * size + (200 << 20)


def read_seeds(folder: Path) -> list[Seed]:
    """What :func:`make_seeds` wrote."""
    found: list[Seed] = []
    for path in sorted(folder.glob("*.pt2")):
        data = path.read_bytes()
        saved = torch.load(path.with_suffix(".pt"), weights_only=True)
        beside = {one.name: one.read_bytes() for one in folder.glob(f"{path.stem}.safetensors")}
        entries = dict(fuzz._entries(data))
        found.append(Seed(path.stem, data, entries, beside, saved["inputs"], saved["outputs"]))
    return found


# -- what a file says, by an interpreter of our own --------------------------------------------------------------------
def _argument(value: Json, values: Mapping[int, Any] | Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_argument(one, values) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "n":
        return values[inner]
    if kind in "fc":
        return float(inner) if kind == "f" else complex(float(inner[0]), float(inner[1]))
    return torch.device(inner) if kind == "d" else getattr(torch, inner.removeprefix("torch."))


def _apply(name: str, args: Json, kwargs: Json, values: Any) -> Any:
    if name == "getitem":
        return _argument(args[0], values)[args[1]]
    space, packet, overload = name.split(".")
    op = getattr(getattr(getattr(torch.ops, space), packet), overload)
    return op(*_argument(args, values), **{key: _argument(one, values) for key, one in kwargs.items()})


def _run_graph(graph: Json, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    values: list[Any] = [one.clone() for one in args]
    for name, given, kwargs, _, _ in graph["calls"]:
        values.append(_apply(name, given, kwargs, values))
    return [_argument(one, values) for one in graph["outputs"]]


def _constant(row: Json, entries: Entries, weights: Mapping[str, bytes]) -> torch.Tensor:
    _, (dtype, shape, strides), entry, offset, external, _ = row
    kind = getattr(torch, dtype)
    if external:
        data = weights[external]
        (length,) = struct.unpack_from("<Q", data)
        begin, end = json.loads(data[8 : 8 + length])[entry]["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
    else:
        raw = entries[entry][offset:]
    if strides is None:
        made = torch.empty(shape).stride()
        strides = list(made)
    last = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flat = torch.frombuffer(bytearray(raw[: last * kind.itemsize] or b"\0" * 16), dtype=torch.uint8)
    return flat[: flat.numel() // kind.itemsize * kind.itemsize].view(kind).as_strided(shape, strides)


def interpret(data: bytes, weights: Mapping[str, bytes], method: str, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What a file says that a method of it gives, for programs of ``reference``."""
    entries = dict(fuzz._entries(data))
    document = document_of(entries)
    said = document["methods"][method]
    values: dict[int, Any] = dict(enumerate(one.clone() for one in inputs))
    constants = document["constants"]
    for number, which in said["constants"]:
        values[number] = _constant(constants[which], entries, weights)
    with torch.no_grad():
        for step in said["instructions"]:
            if "delegate" in step:
                delegate = said["delegates"][step["delegate"]]
                bound, given = dict(delegate["constants"]), iter(step["args"])
                args = [
                    _constant(constants[bound[at]], entries, weights) if at in bound else values[next(given)]
                    for at in range(len(delegate["inputs"]))
                ]
                made: Sequence[Any] = _run_graph(json.loads(entries[delegate["entry"]]), args)
            else:
                result = _apply(step["op"], step["args"], step["kwargs"], values)
                made = result if step["several"] else [result]
            values.update({n: one for n, one in zip(step["results"], made, strict=True) if n is not None})
    return [_literal(one[2]) if one[0] is None else values[one[0]] for one in said["outputs"]]


def _literal(value: Json) -> Any:
    return float(value["f"]) if isinstance(value, dict) else value


# -- running -----------------------------------------------------------------------------------------------------------
class Wrong(AssertionError):
    """A case that is not as it should be."""


def _alike(one: Any, other: Any, exact: bool) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and repr(one) == repr(other)
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    if exact:
        return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    return torch.allclose(one, other, 1e-3, 1e-3, equal_nan=True)


def _check_meta(meta: runtime.MethodMeta, results: Sequence[Any]) -> None:
    if len(results) != len(meta.outputs):
        raise Wrong(f"{len(results)} results, but meta() says {len(meta.outputs)}")
    for said, value in zip(meta.outputs, results, strict=True):
        if not said.dtype:
            continue
        if str(value.dtype) != f"torch.{said.dtype}" or (not said.dynamic and tuple(value.shape) != said.shape):
            raise Wrong(f"meta() says {said}, but the call gave {value.dtype}{list(value.shape)}")
        wide = [at for at, size in enumerate(value.shape) if size > 1] if value.numel() else []
        if not said.dynamic and any(value.stride(at) != said.strides[at] for at in wide):
            raise Wrong(f"meta() says strides {said.strides}, but the call gave {value.stride()}")


def _fitting(meta: runtime.MethodMeta) -> tuple[Any, ...] | None:
    """Inputs as the file says, if they are small."""
    if any(one.nbytes > 1 << 20 or one.dynamic for one in meta.inputs):
        return None
    return tuple(
        one.literal if not one.dtype else torch.ones(one.shape, dtype=getattr(torch, one.dtype)) for one in meta.inputs
    )


def _beside(weights: Mapping[str, bytes], folder: Path) -> dict[str, Path]:
    """Checkpoints as files, by name."""
    for name, content in weights.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in weights}


@dataclass(frozen=True)
class Case:
    """A changed file: in memory or on the disk, and the checkpoint beside it."""

    original: Seed
    data: bytes
    source: Any
    weights: Mapping[str, bytes]
    place: Mapping[str, Path]
    kind: str


def case_of(seed: int, number: int, seeds: Sequence[Seed], folder: Path) -> Case:
    """The case of a number."""
    r = random.Random(f"structure/{seed}/{number}")
    original = r.choice(seeds)
    data, weights, kind = mutated(r, original, seeds)
    source: Any = data
    if r.random() < 0.2:
        source = folder / "case.pt2"
        source.write_bytes(data)
    return Case(original, data, source, weights, _beside(weights, folder), kind)


def run_case(case: Case) -> str:
    """What happened: ``"error"``, ``"right"`` or ``"other"`` (what a file says that says something else)."""
    original, data, source, weights = case.original, case.data, case.source, case.weights
    place, kind = case.place, case.kind
    runtime.check_header(source)
    program = runtime.load(source, external_data=place)
    assert isinstance(program.debug_info.handles, dict)
    for name in program.methods:
        program.meta(name)
    outcome = "error"
    for name in program.methods[:2]:
        try:
            outcome = _run_method(program, name, original, data, weights, kind)
        except TorchportError as error:
            str(error)
    return outcome


def _run_method(
    program: runtime.Program, name: str, original: Seed, data: bytes, weights: Mapping[str, bytes], kind: str
) -> str:
    method = program.load_method(name)
    meta = program.meta(name)
    given = original.inputs.get(name, next(iter(original.inputs.values())))
    number = len(data)
    try:
        inputs = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in given)
        torch.manual_seed(number)
        results = method(*inputs)
    except MethodError:
        fitting = _fitting(meta)
        if fitting is None or kind == "bytes":
            raise
        given = fitting
        torch.manual_seed(number)
        inputs = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in given)
        results = method(*inputs)
    if not all(_alike(one, other, True) for one, other in zip(inputs, given, strict=True)):
        raise Wrong("an input was written to")
    _check_meta(meta, results)
    same = name in original.expected and len(results) == len(original.expected[name])
    same = same and all(
        _alike(a, b, not original.native) for a, b in zip(results, original.expected[name], strict=True)
    )
    if same:
        return "right"
    if kind != "signed":
        raise Wrong(f"a result of damaged data: {results}")
    if original.native or program.package.document.dynamic.get(name):
        return "other"
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if UNDEFINED.search(data):
        return "other"
    torch.manual_seed(number)
    said = interpret(data, weights, name, tensors)
    if not all(_alike(one, other, False) for one, other in zip(results, said, strict=True)):
        raise Wrong(f"the file says {said}, but the call gave {results}")
    return "other"


def _limit(beyond: int) -> None:
    """Bound memory to what is used now and this much more; -1: no bound."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (hard if beyond < 0 else used + beyond, hard))


def _one(seed: int, number: int, seeds: Sequence[Seed], folder: Path, again: bool = True) -> tuple[str, str]:
    """A case's outcome, and in words what was wrong with it."""
    case = case_of(seed, number, seeds, folder)
    started = time.perf_counter() if again else time.process_time()
    found, wrong = "error", ""
    try:
        found = run_case(case)
    except TorchportError as error:
        str(error)
    except BaseException as error:
        _limit(-1)
        where = traceback.extract_tb(error.__traceback__)[-1]
        found, wrong = "wrong", f"{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"
    took = (time.perf_counter() if again else time.process_time()) - started
    if took > SECONDS and again:  # others may have had the processor: once more, by the time that this process had
        return _one(seed, number, seeds, folder, again=False)
    return found, wrong or (f"took {took:.1f} s of processor time" if took > SECONDS else "")


def _clean(folder: Path) -> str:
    """Remove a case's files; says if there are others."""
    others = [path.name for path in folder.iterdir() if path.suffix not in (".pt2", ".safetensors")]
    for path in folder.iterdir():
        path.unlink()
    return f"wrote {others}" if others else ""


def _child(seed: int, numbers: range, seeds: Sequence[Seed], folder: Path, status: mmap.mmap, write: int) -> None:
    """Run cases, and tell what happened in lines."""
    os.chdir(folder)
    with os.fdopen(write, "w") as out:
        for one in seeds:  # what an engine imports and keeps belongs to no case
            program = runtime.load(one.data, external_data=_beside(one.weights, folder))
            for name, given in one.inputs.items():
                program.load_method(name)(*given)
        smallest = min(len(one.data) for one in seeds)
        for number in numbers:
            if number % EVERY == 0 or number == numbers.start:
                _limit(allowance(smallest))
            status[:8] = struct.pack("<q", number)
            signal.alarm(STUCK)
            found, wrong = _one(seed, number, seeds, folder)
            signal.alarm(0)
            if number % EVERY == 0 or number == numbers.stop - 1:
                wrong = wrong or _clean(folder)
            if wrong:
                _limit(allowance(smallest))
            out.write(json.dumps([number, found, wrong]) + "\n")


def run_many(
    seed: int, count: int, seeds: Sequence[Seed], batch: int = 1000, start: int = 0
) -> tuple[Counter[str], list[str]]:
    """Cases in forked processes; counts, and what went wrong in words."""
    total: Counter[str] = Counter()
    failures: list[str] = []
    status = mmap.mmap(-1, 8)
    at, end = start, start + count
    while at < end:
        numbers = range(at, min(at + batch, end))
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, tempfile.TemporaryFile("w+") as errors:
            read, write = os.pipe()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                os.close(read)
                os.dup2(errors.fileno(), 2)
                os.dup2(errors.fileno(), 1)
                _child(seed, numbers, seeds, Path(folder), status, write)
                os._exit(0)
            os.close(write)
            with os.fdopen(read) as lines:
                done = [json.loads(line) for line in lines.read().splitlines() if line.endswith("]")]
            _, code = os.waitpid(child, 0)
            for number, found, wrong in done:
                total[found] += 1
                if wrong:
                    failures.append(f"case {number} of seed {seed}: {wrong}")
            at = numbers.stop
            if code:
                (number,) = struct.unpack("<q", status[:8])
                known = {one for one, _, _ in done}
                total["signal"] += 1
                # What the child had not passed on when it ended is counted again, since it ran well.
                total["rerun"] += sum(one not in known for one in range(numbers.start, number))
                signal_name = signal.Signals(code & 127).name if code & 127 else f"exit {code >> 8}"
                failures.append(f"case {number} of seed {seed}: {signal_name}")
                at = number + 1
    return total, failures


def seeds_of(engine: str, folder: Path) -> list[Seed]:
    """Lowered models of an engine, made in a process of their own: engines have threads, which no fork has."""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "structure_seeds.py"), engine, str(folder)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return read_seeds(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="program files changed in their structure")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=ENGINES, default="reference")
    parser.add_argument("--seeds", type=Path, help="a folder for the lowered models, kept")
    parser.add_argument("--only", type=int, help="run one case in this process and show what it raises")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.seeds or Path(temporary)
        seeds = read_seeds(folder) if options.seeds and options.seeds.is_dir() else seeds_of(options.engine, folder)
        if options.only is not None:
            with tempfile.TemporaryDirectory() as scratch:
                print(run_case(case_of(options.seed, options.only, seeds, Path(scratch))))
            return 0
        started = time.monotonic()
        failures: list[str] = []
        total: Counter[str] = Counter()
        step = 5_000
        for at in range(options.start, options.start + options.count, step):
            size = min(step, options.start + options.count - at)
            found, wrong = run_many(options.seed, size, seeds, start=at)
            total += found
            failures += wrong
            took = time.monotonic() - started
            print(f"{sum(total.values()):,} cases in {took:.0f} s: {dict(total)}", flush=True)
            for failure in wrong:
                print(f"FAILED {failure}", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
