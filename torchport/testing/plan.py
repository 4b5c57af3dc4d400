"""What a conformance run consists of: cases, their results, units of work, and the plan that selects them.

Imports no torch: the parent process of a run stays light and cannot be hurt by an engine.
"""

from __future__ import annotations

import dataclasses
import random
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..core.errors import TorchportError

__all__ = [
    "DEFAULT_SEED",
    "DTYPES",
    "FAILED",
    "PASSED",
    "STATUSES",
    "VARIANTS",
    "Case",
    "Plan",
    "Result",
    "Share",
    "Subject",
    "Unit",
    "seed_of",
    "units_of",
]

PASSED: Final = ("native", "decomposed", "kernel", "fallback")
"""How a case passed: in the backend's graph as it is, after a decomposition, by a kernel of the backend's own that runs
at once, on the host."""
FAILED: Final = ("wrong", "raised", "crashed", "hung")
STATUSES: Final = (*PASSED, *FAILED, "unsupported", "limit", "skipped", "not run")
"""``unsupported``: the backend says so itself; ``limit``: fails for a reason that is on record; ``skipped``: PyTorch's
CPU cannot run the case, so there is nothing to compare with; ``not run``: the time bound came first."""

VARIANTS: Final = (
    "forward",
    "backward",
    "forward_ad",
    "inplace",
    "out",
    "view",
    "noncontiguous",
    "edge",
    "error",
    "training",
    "step",
)
"""``training`` is forward and backward of a module or model, ``step`` an optimizer's, the others are of operators."""

DTYPES: Final = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64")
DEFAULT_SEED: Final = 20_240_817


@dataclass(frozen=True, order=True, slots=True)
class Case:
    """One comparison with the CPU: which operator, how it is called, on what, and by which frontend."""

    op: str
    variant: str
    dtype: str
    sample: int
    frontend: str

    def __str__(self) -> str:
        return f"{self.op}/{self.variant}/{self.dtype}/{self.sample}/{self.frontend}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``str`` gave this text. Raises :class:`TorchportError` for other text."""
        parts = text.split("/")
        if len(parts) != 5 or not parts[3].isdigit():
            raise TorchportError(
                f"{text!r} names no case; write operator/variant/dtype/sample/frontend, as a report does"
            )
        return cls(parts[0], parts[1], parts[2], int(parts[3]), parts[4])


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case.

    ``largest_abs`` and ``largest_rel`` are the largest errors of a wrong value; ``host_ops`` the operators that ran on
    the host; ``figures`` what a model's run measured.
    """

    case: Case
    status: str
    message: str = ""
    largest_abs: float | None = None
    largest_rel: float | None = None
    host_ops: tuple[str, ...] = ()
    arguments: str = ""
    reproducer: str = ""
    detail: str = ""
    seconds: float = 0.0
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def failed(self) -> bool:
        """Whether the backend did not do what the CPU does."""
        return self.status in FAILED


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that can be run: an operator, ``module:…``, ``optim:…`` or ``model:…``, and with which dtypes."""

    name: str
    dtypes: tuple[str, ...]
    variants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A frontend's part of a unit: the variants it runs, and at most how many samples of each (``None``: all)."""

    frontend: str
    variants: tuple[str, ...]
    limit: int | None


@dataclass(frozen=True, slots=True)
class Unit:
    """What one worker does in one go: an operator with a dtype. ``key`` finds it again when a run is resumed."""

    op: str
    dtype: str
    shares: tuple[Share, ...]

    @property
    def key(self) -> str:
        return f"{self.op}/{self.dtype}/" + "+".join(
            f"{share.frontend}:{','.join(share.variants)}:{share.limit}" for share in self.shares
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run on which backend, and how long at most (seconds). Limits of 0 mean none."""

    backend: str
    ops: str = ""
    dtypes: tuple[str, ...] = ("float32",)
    frontends: tuple[str, ...] = ("lazy",)
    variants: tuple[str, ...] = VARIANTS
    samples: int = 0
    models: bool = False
    quick: bool = False
    strict: bool = False
    seed: int = DEFAULT_SEED
    jobs: int = 2
    case_seconds: float = 120.0
    budget: float = 0.0
    limits: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it goes on with."""
        left_out = {"jobs", "budget", "case_seconds", "limits"}
        values = {name: v for name, v in dataclasses.asdict(self).items() if name not in left_out}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def seed_of(*parts: object) -> int:
    """A seed that is a function of the parts, whatever ran before."""
    return zlib.crc32("|".join(map(str, parts)).encode())


def _share(plan: Plan, subject: Subject, dtype: str, frontend: str, frontend_limit: int | None) -> Share | None:
    variants = tuple(v for v in subject.variants if v in plan.variants)
    if dtype != "float32":
        variants = tuple(v for v in variants if v != "error")
    limit = plan.samples or None
    if frontend_limit is not None:
        limit = min(limit or frontend_limit, frontend_limit)
    return Share(frontend, variants, limit) if variants else None


def _selected(plan: Plan, subjects: Iterable[Subject]) -> list[Subject]:
    try:
        keep = re.compile(plan.ops)
    except re.error as error:
        raise TorchportError(f"--ops takes a regular expression, and {plan.ops!r} is none: {error}") from None
    found = [s for s in subjects if keep.search(s.name) and (plan.models or not s.name.startswith("model:"))]
    if not found:
        raise TorchportError(f"no operator's name matches {plan.ops!r}; names are PyTorch's, as nn.functional.gelu")
    return found


def units_of(plan: Plan, subjects: Sequence[Subject], frontends: Mapping[str, int | None]) -> list[Unit]:
    """The units of a plan, in the order they are handed out; ``frontends`` maps each to its most samples per variant.

    A seeded shuffle, the first dtype before the others: a run that meets its time bound has made a fair choice.
    The others are mixed.
    """
    chosen = _selected(plan, subjects)
    if plan.quick:
        return _quick_units(plan, chosen, frontends)
    first: list[Unit] = []
    others: list[Unit] = []
    for dtype in plan.dtypes:
        block = first if dtype == plan.dtypes[0] else others
        for subject in chosen:
            if dtype in subject.dtypes:
                shares = [_share(plan, subject, dtype, frontend, limit) for frontend, limit in frontends.items()]
                kept = tuple(share for share in shares if share is not None)
                if kept:
                    block.append(Unit(subject.name, dtype, kept))
    for block in (first, others):
        random.Random(seed_of(plan.seed, len(block))).shuffle(block)
    return [*first, *others]


def _quick_units(plan: Plan, chosen: Sequence[Subject], frontends: Mapping[str, int | None]) -> list[Unit]:
    """One sample of every operator's forward, and single samples of the rest among them.

    The kinds are mixed, so a run that meets its time bound has seen some of each; the forwards come a little sooner.
    """
    first, *others = frontends
    passes: list[tuple[str, tuple[str, ...], float]] = [
        (first, ("forward", "training", "step"), 1.0),
        (first, ("backward",), 0.5),
        *((frontend, ("forward",), 0.05) for frontend in others),
        (first, ("inplace", "out", "view", "noncontiguous", "edge", "forward_ad", "error"), 0.15),
    ]
    dtype = plan.dtypes[0]
    placed: list[tuple[float, Unit]] = []
    for number, (frontend, wanted, part) in enumerate(passes):
        block: list[Unit] = []
        for subject in chosen:
            variants = tuple(v for v in subject.variants if v in wanted and v in plan.variants)
            if variants and dtype in subject.dtypes:
                block.append(Unit(subject.name, dtype, (Share(frontend, variants, 1),)))
        random.Random(seed_of(plan.seed, number)).shuffle(block)
        kept = block[: max(1, round(len(block) * part)) if len(chosen) > 50 else len(block)]
        reach = _SOONER if number == 0 else 1.0
        placed += [(reach * (at + 0.5) / len(kept), unit) for at, unit in enumerate(kept)]
    return [unit for _, unit in sorted(placed, key=lambda one: one[0])]


_SOONER: Final = 0.8
"""The part of a quick run after which every operator's forward has been run."""
