"""A failing case or program, reduced to the smallest graph that still fails and written as a Python file.

Everything that may crash runs in a process of its own: finding the graphs, and each trial.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..backend.interface import ExecutionContext, FreeableBuffer, InitContext
from ..backend.normal_form import input_specs, output_specs
from ..backend.registry import resolve_device
from ..backend.serialize import decode, encode
from ..core.errors import BackendUnavailable, TorchportError
from ..core.files import writing
from ..core.specs import CompileSpecs
from .judge import Judge
from .plan import DEFAULT_SEED, PASSED, Case, Share, Unit
from .pool import death_of, process_context, start_process, tail_of
from .probe import Probe
from .program_text import program_text
from .shrink import GraphSample, operators_of, shrink, with_inputs
from .target import load_backend
from .values import Mismatch, compare
from .worker import quiet

__all__ = ["Minimised", "minimise_case", "minimise_script"]


@dataclass(frozen=True)
class Minimised:
    """What was found: how the program fails, its size before and after (operators), and the file.

    ``confirmed``: whether the file, run by itself, fails.
    """

    verdict: str
    before: int
    after: int
    trials: int
    path: Path
    confirmed: bool

    def text(self) -> str:
        """What to print."""
        sure = "running it fails" if self.confirmed else "run alone it passes: only the graph as a whole fails"
        return (
            f"{self.verdict}\nreduced from {self.before} to {self.after} operators in {self.trials} trials\n"
            f"written to {self.path}; {sure}"
        )


# -- in processes of their own -----------------------------------------------------------------------------------------
class _Recorder:
    """Writes each graph before it is compiled, and its arguments before it is executed: a crash finds them there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.names: dict[int, str] = {}

    def compile(self, graph: Any) -> None:
        name = f"{self.count:05d}"
        self.count += 1
        self.names[id(graph)] = name
        (self.folder / f"{name}.json").write_bytes(encode(graph))

    def execute(self, backend: Any, graph: Any, args: Any) -> None:
        name = self.names.get(id(graph))
        path = self.folder / f"{name}.pt"
        if name is not None and not path.exists():
            torch.save([backend.from_device(arg).clone() for arg in args], path)


def _record(pipe: Connection, target: str, case: Case | None, script: str, seed: int, folder: str) -> None:
    """Run the case or the script with every graph recorded."""
    quiet(f"{folder}/log")
    recorder = _Recorder(Path(folder))
    try:
        backend = load_backend(target)
        Probe(backend, recorder.compile, lambda graph, args: recorder.execute(backend, graph, args))
        if case is None:
            _run_script(backend.name, script)
            pipe.send("done")
        else:
            judge = Judge(backend, target, seed=seed)
            unit = Unit(case.op, case.dtype, (Share(case.frontend, (case.variant,), None),))
            found = (judge.run(*given) for given in judge.cases(unit) if given[0] == case)
            result = next(found, None)
            pipe.send("no such case" if result is None else f"{result.status}: {result.message}")
    except BaseException as error:
        pipe.send(f"raised: {type(error).__name__}: {error}")
    pipe.close()
    os._exit(0)


def _run_script(name: str, script: str) -> None:
    import runpy

    import torchport  # on demand: public names are looked up when they are used

    torchport.use(name)
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    torchport.sync()


def _try_graphs(pipe: Connection, target: str, log: str) -> None:
    """Answer (encoded graph, saved inputs) with a verdict, until ``None``."""
    quiet(log)
    backend = load_backend(target)
    pipe.send("ready")
    while (given := pipe.recv()) is not None:
        pipe.send(_verdict(backend, GraphSample(decode(given[0]), tuple(torch.load(io.BytesIO(given[1]))))))
    os._exit(0)


def _verdict(backend: Any, program: GraphSample) -> str:
    """``passes``, ``wrong: …`` or ``raised: …``; ``invalid: …`` if the CPU cannot run it."""
    graph = with_inputs(program, program.inputs).graph
    try:
        with torch.no_grad():
            expected = graph(*[t.clone() for t in program.inputs])
    except Exception as error:
        return f"invalid: {error}"
    device = resolve_device(backend, 0)
    context = InitContext(device, input_specs(graph), output_specs(graph))
    try:
        processed = backend.preprocess(graph, CompileSpecs())
        handle = backend.init(FreeableBuffer(processed.data), CompileSpecs(), context)
        args = [backend.to_device(t.clone(), device) for t in program.inputs]
        results = backend.execute(handle, args, ExecutionContext(device, context.outputs))
        actual = [backend.from_device(result) for result in results]
    except Exception as error:
        return f"raised: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    try:
        compare(actual, list(expected))
    except Mismatch as error:
        return f"wrong: {error}"
    return "passes"


# -- trials ------------------------------------------------------------------------------------------------------------
class _Trials:
    """Tries programs in a process, and starts another one when that dies or hangs."""

    process: Any
    pipe: Any

    def __init__(self, target: str, folder: Path, seconds: float) -> None:
        self.target = target
        self.log = folder / "trials.log"
        self.seconds = seconds
        self.count = 0
        self.running = False

    def _start(self) -> None:
        context = process_context()
        self.pipe, theirs = context.Pipe()
        self.process = start_process(_try_graphs, theirs, self.target, str(self.log))
        theirs.close()
        self.running = True
        try:
            self.pipe.recv()
        except EOFError:
            raise BackendUnavailable(f"loading {self.target!r} ends its process:\n{tail_of(self.log)}") from None

    def verdict(self, program: GraphSample) -> str:
        """How the program ends."""
        if not self.running:
            self._start()
        self.count += 1
        inputs = io.BytesIO()
        torch.save(list(program.inputs), inputs)
        try:
            self.pipe.send((encode(program.graph), inputs.getvalue()))
            if self.pipe.poll(self.seconds):
                return self.pipe.recv()
            self.close()
            return f"hung: no answer for {self.seconds:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            how = death_of(self.process)
            self.close()
            return f"crashed: the process died ({how})"

    def close(self) -> None:
        """End the process."""
        if self.running:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.running = False


def _recorded(folder: Path) -> Iterator[GraphSample]:
    """The programs that were recorded; a graph that was never executed gets random inputs."""
    for path in sorted(folder.glob("*.json")):
        graph = decode(path.read_bytes())
        saved = path.with_suffix(".pt")
        if saved.exists():
            inputs = torch.load(saved)
        else:
            specs = [n.meta["spec"] for n in graph.graph.nodes if n.op == "placeholder"]
            torch.manual_seed(0)
            inputs = [torch.testing.make_tensor(s.shape, dtype=s.dtype, device="cpu", low=0, high=2) for s in specs]
        with contextlib.suppress(Exception):  # what cannot be rebuilt here cannot be reduced either
            yield with_inputs(GraphSample(graph, tuple(inputs)), inputs)


# -- from a case or a script -------------------------------------------------------------------------------------------
def minimise_case(target: str, case: Case, out: Path, *, seed: int = DEFAULT_SEED, seconds: float = 60.0) -> Minimised:
    """Reduce a failing case of a report. Raises :class:`TorchportError` if it does not fail, or no graph of it does."""
    return _minimise(target, case, "", out, seed, seconds)


def minimise_script(target: str, script: Path, out: Path, *, seconds: float = 60.0) -> Minimised:
    """Reduce a failing program that computes on ``torch.device("port")``. Raises as :func:`minimise_case` does."""
    return _minimise(target, None, str(script), out, DEFAULT_SEED, seconds)


def _minimise(target: str, case: Case | None, script: str, out: Path, seed: int, seconds: float) -> Minimised:
    with tempfile.TemporaryDirectory(prefix="torchport-minimise-") as name:
        folder = Path(name)
        end = _run_recorded(target, case, script, seed, folder, seconds)
        if end == "no such case":
            raise TorchportError(f"there is no case {case}: PyTorch has no such sample for this dtype and variant")
        with contextlib.closing(_Trials(target, folder, seconds)) as trials:
            program, verdict = _first_failing(folder, trials, end)
            before = program.size[0]
            kind = verdict.partition(":")[0]
            smallest = shrink(program, lambda p: trials.verdict(p).partition(":")[0] == kind)
            verdict = trials.verdict(smallest)
            what = str(case) if case is not None else script
            with writing(out):
                out.write_text(program_text(smallest, target, verdict, what, before), encoding="utf-8")
            confirmed = _fails_alone(out, seconds)
            return Minimised(verdict, before, len(operators_of(smallest.graph)), trials.count, out, confirmed)


def _run_recorded(target: str, case: Case | None, script: str, seed: int, folder: Path, seconds: float) -> str:
    context = process_context()
    ours, theirs = context.Pipe()
    process = start_process(_record, theirs, target, case, script, seed, str(folder))
    theirs.close()
    try:
        return ours.recv() if ours.poll(max(seconds * 3, 60.0)) else "hung"
    except EOFError:
        process.join()
        return f"crashed ({death_of(process)})"
    finally:
        process.kill()
        process.join()


def _first_failing(folder: Path, trials: _Trials, end: str) -> tuple[GraphSample, str]:
    count = 0
    for program in _recorded(folder):
        count += 1
        verdict = trials.verdict(program)
        if not verdict.startswith(("passes", "invalid")):
            return program, verdict
    if end.startswith((*PASSED, "done")):
        raise TorchportError(f"nothing fails: the whole passes, and so does each of its {count} graphs by itself")
    raise TorchportError(
        f"none of the {count} graphs that reached the backend fails by itself, while the whole ended: {end}. "
        f"The fault is then not in what the backend computes\n{tail_of(folder / 'log', 800)}"
    )


def _fails_alone(path: Path, seconds: float) -> bool:
    """Whether the written file fails when it is run."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(path)], capture_output=True, timeout=seconds + 60, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0
