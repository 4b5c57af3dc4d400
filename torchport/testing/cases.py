"""The kit in a test suite of one's own: cases as pytest parameters, or one assertion about a whole run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import TorchportError
from .judge import Judge
from .limits import limits_of
from .plan import DEFAULT_SEED, Case, Plan, Result, Share, Unit, units_of
from .report import Report, failures_by_kind, percent
from .subjects import catalogue
from .target import load_backend

__all__ = ["OpCase", "assert_conforms", "op_cases", "run_case"]


@functools.cache
def _judge(target: str, seed: int, strict: bool) -> Any:
    backend = load_backend(target)
    return Judge(backend, target, seed=seed, strict=strict, limits=limits_of(backend))


def run_case(backend: str, case: str | Case, *, seed: int = DEFAULT_SEED, strict: bool = False) -> Result:
    """Run one case, named as in a report, in this process: an engine's crash is this process's.

    Raises :class:`TorchportError` if there is no such case.
    """
    wanted = Case.parse(case) if isinstance(case, str) else case
    judge = _judge(backend, seed, strict)
    try:
        found = judge.cases(Unit(wanted.op, wanted.dtype, (Share(wanted.frontend, (wanted.variant,), None),)))
        for one, subject, sample in found:
            if one == wanted:
                return judge.run(one, subject, sample)
    except KeyError as error:
        raise TorchportError(f"there is no operator or frontend {error} in this version") from None
    raise TorchportError(f"there is no case {wanted}: PyTorch has no such sample for this dtype and variant")


@dataclass(frozen=True)
class OpCase:
    """A case bound to a backend, for a parametrised test: ``case.check()``."""

    backend: str
    case: Case
    seed: int = DEFAULT_SEED

    def check(self) -> Result:
        """Run the case; raises ``AssertionError`` with a reproducer if it fails.

        Where there is nothing to judge (the CPU cannot run it, a limit on record, or the backend says it does not take
        the operator) the test is skipped with that reason.
        """
        import pytest

        result = run_case(self.backend, self.case, seed=self.seed)
        if result.status in ("skipped", "unsupported", "limit"):
            pytest.skip(f"{result.status}: {result.message}")
        if result.failed:
            raise AssertionError(
                f"{self.case} {result.status}: {result.message}\narguments: {result.arguments}\n{result.reproducer}"
            )
        return result

    def __str__(self) -> str:
        return str(self.case).replace("/", "-")


def op_cases(
    backend: str,
    ops: str = "",
    *,
    dtypes: Sequence[str] = ("float32",),
    variants: Sequence[str] = ("forward",),
    frontends: Sequence[str] = ("lazy",),
    samples: int = 1,
    seed: int = DEFAULT_SEED,
) -> list[Any]:
    """Cases for ``@pytest.mark.parametrize("case", op_cases("mine"))``; each test calls ``case.check()``.

    ``ops`` is a regular expression on PyTorch's names; ``samples`` the most per operator, dtype, variant and frontend
    (0: all). The choice is seeded. Listing imports PyTorch's databases (about 5 s).
    """
    import pytest

    plan = Plan(backend, ops, tuple(dtypes), tuple(frontends), tuple(variants), samples)
    judge = _judge(backend, seed, False)
    units = units_of(plan, catalogue(), dict.fromkeys(frontends, samples or None))
    cases = sorted(case for unit in units for case, _, _ in judge.cases(unit))
    return [pytest.param(OpCase(backend, case, seed), id=str(case).replace("/", "-")) for case in cases]


def assert_conforms(report: Report, *, at_least: float = 1.0) -> None:
    """Raise ``AssertionError`` with the failures, grouped, unless so large a part of the judged cases passed."""
    rate = report.rate(report.totals())
    if rate is None or rate < at_least:  # what judged nothing has shown nothing
        raise AssertionError(
            f"{percent(rate)} of the cases pass, not {at_least:.2%}\n"
            f"{report.summary()}\n{failures_by_kind(report.failures)}"
        )
