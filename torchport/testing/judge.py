"""Runs one case: the CPU's answer, the device's, and what to call the difference."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..core.config import config
from ..core.errors import UnsupportedOp
from . import torch_api
from .frontends import FRONTENDS, Place
from .limits import Limit, find_limit
from .plan import Case, Result, Unit, seed_of
from .probe import Probe
from .reproduce import reproducer
from .subjects import Runnable, find
from .values import Mismatch, compare
from .variants import ACCEPTED

__all__ = ["Judge"]

_DRAWS = 12
_DRAWS_THAT_AGREE = 5
_CPU = Place(torch.device("cpu"), lambda fn, *args, **kwargs: fn(*args, **kwargs))


@dataclass
class _Truth:
    """The CPU's answer, or why there is none."""

    expected: Any = None
    missing: str = ""
    seconds: float = 0.0


class Judge:
    """Runs cases on one backend in this process."""

    def __init__(
        self, backend: Any, target: str, *, seed: int, strict: bool = False, limits: Sequence[Limit] = ()
    ) -> None:
        self.backend = backend
        self.target = target
        self.seed = seed
        self.strict = strict
        self.limits = limits
        self.probe = Probe(backend)
        self.places: dict[str, Place] = {}

    def place(self, frontend: str) -> Place:
        """The frontend's place for the backend, opened on first use."""
        if frontend not in self.places:
            self.places[frontend] = FRONTENDS[frontend].place(self.backend.name)
        return self.places[frontend]

    # -- the cases of a unit ---------------------------------------------------------------------------------
    def cases(self, unit: Unit) -> Iterator[tuple[Case, Runnable, Any]]:
        """Every case of a unit with its runnable and sample, in an order that depends on nothing but the unit."""
        subject = find(unit.op)
        for variant in dict.fromkeys(v for share in unit.shares for v in share.variants):
            frontends = {
                share.frontend: share.limit
                for share in unit.shares
                if variant in share.variants and variant in FRONTENDS[share.frontend].variants
            }
            if not frontends:
                continue
            samples = self._samples(subject, variant, unit.dtype)
            order = list(range(len(samples)))
            random.Random(seed_of(unit.op, unit.dtype, variant, self.seed)).shuffle(order)
            for rank, number in enumerate(order):
                for frontend, limit in frontends.items():
                    if limit is None or rank < limit:
                        yield Case(unit.op, variant, unit.dtype, number, frontend), subject, samples[number]

    def _samples(self, subject: Runnable, variant: str, dtype: str) -> list[Any]:
        try:
            return subject.samples(variant, torch_api.dtype_of(dtype), self.seed)
        except Exception:
            return []  # PyTorch has no samples of this kind on the CPU; the count in the report says so

    # -- one case --------------------------------------------------------------------------------------------
    def run(self, case: Case, subject: Runnable, sample: Any, truth: _Truth | None = None) -> Result:
        """What came of a case."""
        start = time.perf_counter()
        truth = truth or self.truth(case, subject, sample)
        if truth.missing:
            return Result(case, "skipped", truth.missing)
        place = self.place(case.frontend)
        self.probe.watch()
        with config.override(fallback="error" if self.strict else "allow"):
            result = self._compared(case, subject, sample, place, truth)
        seen = self.probe.seen()
        if result.status == "native":
            missed = place.executes and not seen.executed and case.variant != "error"
            hosts = ("the program never reached the backend",) if missed else seen.host_ops
            result = replace(result, status="fallback" if missed else seen.how, host_ops=hosts)
        if result.failed or result.status == "unsupported":
            result = replace(
                result, arguments=subject.arguments(sample), reproducer=reproducer(case, subject, sample, self.target)
            )
            limit = find_limit(self.limits, result)
            if limit is not None:
                result = replace(result, status="limit", message=f"{limit.reason} [{result.message}]")
        figures = result.figures
        seconds = time.perf_counter() - start
        if case.op.startswith("model:") and not result.failed:
            figures = self._figures(case, subject, sample, place, truth)
        return replace(result, seconds=seconds, figures=figures)

    def truth(self, case: Case, subject: Runnable, sample: Any) -> _Truth:
        """The CPU's answer."""
        try:
            start = time.perf_counter()
            expected = self._call(case, subject, sample, _CPU)
            seconds = time.perf_counter() - start
        except Exception as error:
            return _Truth(missing=f"the CPU raises {type(error).__name__}: {_first_line(error)}")
        if case.variant == "error" and expected == ACCEPTED:
            return _Truth(missing="the CPU accepts the call")
        return _Truth(expected, seconds=seconds)

    def _call(self, case: Case, subject: Runnable, sample: Any, place: Place) -> Any:
        seed = seed_of(case.op, case.variant, case.dtype, case.sample, self.seed)
        with place.around():
            return subject.run(case.variant, torch_api.dtype_of(case.dtype), sample, place, seed)

    def _compared(self, case: Case, subject: Runnable, sample: Any, place: Place, truth: _Truth) -> Result:
        """``native`` for now where the results agree."""
        try:
            actual = self._call(case, subject, sample, place)
            self._compare(case, subject, sample, place, actual, truth.expected)
        except Mismatch as error:
            message = str(error)
            if case.variant == "error":
                message = "accepts a call that the CPU refuses"
                message += " (with out=)" if "out" in getattr(sample, "kwargs", {}) else ""
            return Result(case, "wrong", message, error.largest_abs, error.largest_rel)
        except Exception as error:
            status = "unsupported" if _unsupported(error) else "raised"
            detail = "".join(traceback.format_exception(error, limit=-12))[-4000:]
            return Result(case, status, f"{type(error).__name__}: {_first_line(error)}", detail=detail)
        return Result(case, "native")

    def _compare(self, case: Case, subject: Runnable, sample: Any, place: Place, actual: Any, expected: Any) -> None:
        own = subject.tolerances(torch_api.dtype_of(case.dtype))
        device = place.device.type if _has_tensor_or_device(sample) else ""
        try:
            compare(actual, expected, own, device=device)
        except Mismatch:
            if subject.values_undefined:
                compare(actual, expected, how="shapes", device=device)
                return
            draws = self._draws(case, subject, sample, expected, own)
            if not draws:
                raise
            compare(actual, expected, how="statistics", device=device, draws=draws)

    def _draws(
        self, case: Case, subject: Runnable, sample: Any, expected: Any, own: tuple[tuple[float, float], ...]
    ) -> list[Any]:
        """Several draws of the CPU's, if it gives other values when it draws again; else none."""
        torch.manual_seed(self.seed + 1)
        drawn: list[Any] = []
        differ = False
        with (
            mock.patch("torchport.testing.variants.default_generators_seeded"),
            mock.patch("torchport.testing.subjects.default_generators_seeded"),
            mock.patch.object(torch, "manual_seed"),  # the database seeds, too: its wrapper_set_seed
        ):
            for _ in range(_DRAWS):
                drawn.append(self._call(case, subject, sample, _CPU))
                try:
                    compare(drawn[-1], expected, own)
                except Mismatch:
                    differ = True
                torch.rand(1)
                if not differ and len(drawn) >= _DRAWS_THAT_AGREE:
                    return []
        return drawn

    def _figures(self, case: Case, subject: Runnable, sample: Any, place: Place, truth: _Truth) -> Mapping[str, float]:
        """What a model's second run costs: compiles, host operators, and time against CPU eager's second run."""
        self._call(case, subject, sample, place)
        self.probe.watch()
        start = time.perf_counter()
        tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, self._call(case, subject, sample, place))
        seconds = time.perf_counter() - start
        seen = self.probe.seen()
        start = time.perf_counter()
        self._call(case, subject, sample, _CPU)
        eager = time.perf_counter() - start
        return {
            "seconds": seconds,
            "eager_seconds": eager,
            "compiles": seen.compiled,
            "executions": seen.executed,
            "host_ops": len(seen.host_ops),
        }


def _unsupported(error: BaseException | None) -> bool:
    """Whether an error is the backend's own word that it does not take an operator."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, UnsupportedOp):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _has_tensor_or_device(sample: Any) -> bool:
    """Whether the operator's device follows from its arguments."""
    given = getattr(sample, "input", None), getattr(sample, "args", ()), getattr(sample, "kwargs", {})
    leaves = tree_leaves(given)
    return any(isinstance(x, torch.Tensor | torch.device) or (isinstance(x, str) and x == "cpu") for x in leaves)
