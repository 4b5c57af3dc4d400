"""Random programs of views and writes, on the lazy device and through torch.compile, compared with eager on the CPU.

Run as a program for large numbers: ``python tests/backends/support/alias_fuzz.py --frontend compile --count 20000``.
After each call it compares results, the memory of all inputs, buffers, and gradients; then it writes to each result,
and compares what that changed. ``--only SEED --minimise`` shortens a program that differs and prints it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from alias_programs import Program, State, draw, holds_no_bool, overlaps_itself, share_memory

Seen: TypeAlias = list[tuple[str, Any]]
"""What was observed, in order, with a label each."""
FRONTENDS = ("lazy", "compile", "compile-cpu", "compile-port")

RAISED = "raised"
_ALLOWED = ("one of the variables needed for gradient computation has been modified by an inplace operation",)
"""What eager's autograd refuses after a write, and a graph without writes has no reason to."""


REFUSALS = (
    "where a view begins in its base is not known on this device",
    "it would count in the memory of a tensor of",
    "a write through as_strided() of a detached tensor, or of another view whose base is not known",
    "one may be a conjugate view, which this device does not tell from its base",
    "encountered a mutation on a view chain",  # where ``as_strided`` is among the views: functionalization's own
)
"""What the device refuses in words, before anything is computed: it has no memory to count in."""


_FLUSHING = ("xla",)
"""Engines to which a float too small to be normal is zero: integers that are viewed as floats, here, nearly always."""
_REINTERPRETED = ("view(torch.int32)", "view(torch.float32)")


class Refused(Exception):
    """The program raises in eager."""


def _snapshot(state: State, results: Any, label: str, seen: Seen) -> None:
    for name, values in (("result", dict(enumerate(results))), ("memory", state.bases)):
        for at, value in values.items():
            held = value.detach()
            seen.append((f"{label}: {name} {at}", held.resolve_conj().resolve_neg().to("cpu", copy=True)))
            seen.append((f"{label}: {name} {at} requires grad", value.requires_grad))


def _backward(state: State, results: Any, label: str, seen: Seen) -> None:
    # Each counts, also where two are one object in eager: those that torch.compile gives may be two of one memory.
    wanted = [v for v in (*results, *state.bases.values()) if v.requires_grad and v.dtype.is_floating_point]
    if not wanted:
        return
    try:
        torch.stack([(v * v).double().sum() for v in wanted]).sum().backward()
    except RuntimeError as error:
        seen.append((f"{label}: backward", error))
        return
    for at, leaf in state.leaves.items():
        seen.append((f"{label}: gradient {at}", None if leaf.grad is None else leaf.grad.detach().cpu().clone()))


def _is_writable(result: torch.Tensor, state: State) -> bool:
    """Whether each element has a place of its own, in memory that holds anything: the CPU's."""
    # Arguments that share no memory with a call's others are copies of what the bases hold.
    apart = state.program.apart
    bools = any(base.dtype is torch.bool and (apart or share_memory(result, base)) for base in state.bases.values())
    return not overlaps_itself(result) and (result.dtype is torch.bool or not bools)


def _has_no_gradient_to_require(value: torch.Tensor) -> bool:
    return value.requires_grad and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _write(value: torch.Tensor, number: int) -> None:
    if value.dtype is torch.bool:
        value.logical_not_()
    else:
        value.mul_(2).add_(number)


def observe(
    program: Program, device: str, wrap: Callable[[Any], Any], writable: list[list[bool]] | None = None
) -> tuple[Seen, list[list[bool]]]:
    """Run a program. ``writable``, which the CPU's run finds out: the results whose elements have a place each."""
    state = State(program, device)
    run = wrap(state.function())
    seen: Seen = []
    found: list[list[bool]] = []
    for at, (n, seed) in enumerate(program.runs):
        try:
            arguments = state.arguments(n, seed, apart=program.apart and at % 2 == 1)
            results = [result for result in run(*arguments) if result is not None]
            if writable is None and any(map(holds_no_bool, (*results, *state.bases.values()))):
                raise RuntimeError("what is shown as a bool holds something else than 0 or 1")
            if writable is None and any(map(_has_no_gradient_to_require, (*results, *state.bases.values()))):
                raise RuntimeError("torch._foreach_copy_ makes integers require a gradient, which views cannot")
            _snapshot(state, results, f"run {at}", seen)
            _backward(state, results, f"run {at}", seen)
            found.append([_is_writable(r, state) for r in results] if writable is None else writable[at])
            with torch.no_grad():
                for position, result in enumerate(results):
                    if found[-1][position]:
                        _write(result.detach(), position + 1)
            _snapshot(state, results, f"run {at} after writes to its results", seen)
        except Exception as error:
            seen.append((f"run {at}", error))
            break
    return seen, found


def _differ(got: Any, want: Any) -> str | None:
    if isinstance(got, Exception) or isinstance(want, Exception):
        if isinstance(got, Exception) and isinstance(want, Exception):
            return None
        if isinstance(want, Exception) and any(text in str(want) for text in _ALLOWED):
            return None
        return f"{RAISED} {got!r}\n instead of {want!r}"
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        try:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
        except AssertionError:
            return f"{got}\n instead of {want}"
        return None
    return None if got is want or got == want else f"{got}\n instead of {want}"


def compare(got: Seen, want: Seen) -> str | None:
    """The first difference in words, or ``None``."""
    for (label, mine), (other, theirs) in zip(got, want, strict=False):
        if label != other:
            # One of the two has ended with an exception.
            ended = RAISED if isinstance(mine, Exception) else ""
            return f"{label}: {ended} {mine}\n instead of {other}: {theirs}"
        why = _differ(mine, theirs)
        if why is not None:
            return f"{label}: {why}"
        if isinstance(theirs, Exception):
            return None
    return None


def _compiled(program: Program, backend: str) -> Callable[[Any], Any]:
    def wrap(fn: Any) -> Any:
        return torch.compile(fn, backend="torchport", options={"backend": backend}, dynamic=program.dynamic)

    return wrap


def expected(program: Program) -> tuple[Seen, list[list[bool]]]:
    """What eager does. Raises :class:`Refused` if it does not take the program."""
    seen, writable = observe(program, "cpu", lambda fn: fn)
    if any(isinstance(value, Exception) for _, value in seen[:-1]) or isinstance(seen[-1][1], Exception):
        raise Refused(str([value for _, value in seen if isinstance(value, Exception)]))
    return seen, writable


def check(program: Program, frontend: str, backend: str) -> str | None:
    """The first difference of a program from eager, or ``None``. Raises :class:`Refused`."""
    want, writable = expected(program)
    if frontend == "lazy":
        got, _ = observe(program, "port", lambda fn: fn, writable)
    else:
        device = "port" if frontend == "compile-port" else "cpu"
        got, _ = observe(program, device, _compiled(program, backend), writable)
    return compare(got, want)


def upstream(program: Program, frontend: str) -> str | None:
    """What PyTorch's own part of torch.compile does differently from eager, without a compiler."""
    want, writable = expected(program)
    torch._dynamo.reset()

    def wrap(fn: Any) -> Any:
        return torch.compile(fn, backend="aot_eager", dynamic=program.dynamic)

    got, _ = observe(program, "port" if frontend == "compile-port" else "cpu", wrap, writable)
    return compare(got, want)


def refused(why: str) -> bool:
    """Whether a difference is one of the device's documented refusals."""
    return raised(why) and any(text in why for text in REFUSALS)


def raised(why: str) -> bool:
    """Whether a difference is an exception."""
    return RAISED in why


def minimise(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program with all left out that it does not need to fail."""
    changed = True
    while changed:
        changed = False
        for name in ("lines", "results", "runs", "holders"):
            for at in reversed(range(len(getattr(program, name)))):
                kept = tuple(v for i, v in enumerate(getattr(program, name)) if i != at)
                if kept or name in ("lines", "results"):
                    shorter = replace(program, **{name: kept})
                    if fails(shorter):
                        program, changed = shorter, True
        for at, line in enumerate(program.lines):
            plain = line.removeprefix("with torch.no_grad(): ")
            shorter = replace(program, lines=(*program.lines[:at], plain, *program.lines[at + 1 :]))
            if plain != line and fails(shorter):
                program, changed = shorter, True
        if program.dynamic and fails(replace(program, dynamic=False)):
            program, changed = replace(program, dynamic=False), True
        for at, base in enumerate(program.bases):
            shorter = replace(program, bases=(*program.bases[:at], replace(base, grad=""), *program.bases[at + 1 :]))
            if base.grad and fails(shorter):
                program, changed = shorter, True
    return program


def _fails(frontend: str, backend: str, kind: bool) -> Callable[[Program], bool]:
    """Whether a program differs; ``kind``: with an exception, or without one."""

    def fails(program: Program) -> bool:
        torch._dynamo.reset()
        try:
            why = check(program, frontend, backend)
        except Exception:
            return False
        return why is not None and raised(why) == kind

    return fails


def frontend_of(frontend: str, seed: int) -> str:
    """``compile`` is on tensors of the CPU or of the device."""
    return ("compile-cpu", "compile-port")[random.Random(seed).random() < 0.4] if frontend == "compile" else frontend


def shown(program: Program) -> str:
    """A program as text that runs when it is pasted beside this file."""
    return f"{program}\n{program.source()}"


def run_seed(seed: int, frontend: str, backend: str) -> tuple[str | None, Program | None]:
    """The difference that a seed's program shows, and the program; ``None`` for a program that eager refuses."""
    program = draw(seed)
    while True:
        try:
            return check(program, frontend_of(frontend, seed), backend), program
        except Refused:
            if len(program.runs) == 1:
                return None, None
            program = replace(program, runs=program.runs[:1])


def main() -> None:
    """Run many; ends with status 1 if any differs."""
    import torchport

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first program's; they count up")
    parser.add_argument("--only", type=int, help="this program alone")
    parser.add_argument("--frontend", choices=FRONTENDS, default="lazy")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--minimise", action="store_true", help="shorten programs that differ")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="a computation failed as a whole")
    torch.set_num_threads(1)
    torchport.use(options.backend)
    seeds = [options.only] if options.only is not None else range(options.seed, options.seed + options.count)
    counts: Counter[str] = Counter()
    start = time.monotonic()
    for number, seed in enumerate(seeds):
        if time.monotonic() - start > options.seconds:
            break
        if number % 50 == 0:
            torch._dynamo.reset()
        if options.backend in _FLUSHING and any(text in str(draw(seed)) for text in _REINTERPRETED):
            counts["left out: floats that are too small"] += 1
            continue
        why, program = run_seed(seed, options.frontend, options.backend)
        kind = "refused by eager" if program is None else "equal" if why is None else "different"
        if why is not None and program is not None:
            kind = _report(seed, program, why, options)
        counts[kind] += 1
        if number % 500 == 499:
            print(f"{number + 1} programs, {time.monotonic() - start:.0f} s, {dict(counts)}", flush=True)
    print(f"seeds {options.seed}…: {dict(counts)} in {time.monotonic() - start:.0f} s")
    sys.exit(1 if counts["different"] else 0)


def _report(seed: int, program: Program, why: str, options: argparse.Namespace) -> str:
    """Print a difference; gives what kind it is."""
    if refused(why):
        print(f"seed {seed}: the device refuses it: {why[:200]!r}", flush=True)
        return "refused by the device"
    frontend = frontend_of(options.frontend, seed)
    theirs = upstream(program, frontend) if frontend != "lazy" else None
    if theirs is not None and raised(theirs) and raised(why):
        # In words, and before anything is compiled here: AOTAutograd's and functionalization's own limits.
        print(f"seed {seed}: PyTorch refuses it: {theirs[:200]!r}", flush=True)
        return "refused by torch.compile"
    if options.minimise:
        program = minimise(program, _fails(frontend, options.backend, raised(why)))
        torch._dynamo.reset()
        why = check(program, frontend, options.backend) or why
        theirs = upstream(program, frontend) if frontend != "lazy" else None
    print(f"--- seed {seed}, {frontend} on {options.backend}: {why[:1500]}")
    print(
        f"PyTorch's part: {'as eager' if theirs is None else 'differs too: ' + theirs[:600]}\n{shown(program)}",
        flush=True,
    )
    return "different"


if __name__ == "__main__":
    main()
