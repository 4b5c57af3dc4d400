"""Two reports compared: regressions first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .plan import FAILED, PASSED
from .report import Cell, Key, Report, percent

__all__ = ["KINDS", "Change", "changes", "difference_text"]

KINDS: Final = ("regression", "new failure", "gone", "degraded", "improved", "fixed")
"""``regression``: failed now, not before; ``new failure``: fails and was not run before; ``gone``: was run before and
is not now; ``degraded`` and ``improved``: passes another way, or is no longer (newly) judged; ``fixed``: passes now."""

_RANK: Final = {status: rank for rank, status in enumerate((*PASSED, "limit", "unsupported"))}


@dataclass(frozen=True, slots=True)
class Change:
    """One cell that is not as it was. ``samples`` are the cases that made it a regression or fixed it."""

    kind: str
    op: str
    frontend: str
    dtype: str
    variant: str
    before: str
    after: str
    samples: tuple[int, ...] = ()
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def _judged(cell: Cell | None) -> bool:
    return cell is not None and any(cell.counts[s] for s in (*PASSED, *FAILED, "unsupported", "limit"))


def _change(key: Key, old: Cell | None, new: Cell | None, messages: dict[tuple[Key, int], str]) -> Change | None:
    before = old.worst if old is not None else "not run"
    after = new.worst if new is not None else "not run"
    failing = set(new.failed_samples) if new is not None else set[int]()
    failed = set(old.failed_samples) if old is not None else set[int]()

    def made(kind: str, samples: set[int]) -> Change:
        said = next((messages[key, n] for n in sorted(samples) if (key, n) in messages), "")
        return Change(kind, *key, before, after, tuple(sorted(samples)), said)

    if not _judged(new):
        return made("gone", set()) if _judged(old) else None
    if not _judged(old):
        return made("new failure", failing) if failing else None
    if failing - failed:
        return made("regression", failing - failed)
    if failed - failing:
        return made("fixed", failed - failing)
    gap = _RANK.get(after, 0) - _RANK.get(before, 0)
    if before in _RANK and after in _RANK and gap:
        return made("degraded" if gap > 0 else "improved", set())
    return None


def changes(old: Report, new: Report) -> list[Change]:
    """Every cell that changed, regressions first."""
    messages: dict[tuple[Key, int], str] = {}
    for result in new.failures:
        case = result.case
        messages[(case.op, case.frontend, case.dtype, case.variant), case.sample] = f"{result.status}: {result.message}"
    keys = sorted({*old.cells, *new.cells})
    found = [_change(key, old.cells.get(key), new.cells.get(key), messages) for key in keys]
    return sorted((c for c in found if c is not None), key=lambda c: KINDS.index(c.kind))


def difference_text(old: Report, new: Report, found: Sequence[Change], shown: int = 40) -> str:
    """The changes as text, with the totals of both reports."""
    lines: list[str] = []
    for kind in KINDS:
        members = [change for change in found if change.kind == kind]
        if not members:
            continue
        lines.append(f"{kind}: {len(members)}")
        for c in members[:shown]:
            cases = f" samples {', '.join(map(str, c.samples[:8]))}" if c.samples else ""
            lines.append(f"  {c.op} {c.variant} {c.dtype} {c.frontend}: {c.before} → {c.after}{cases}")
            if c.message:
                lines.append(f"      {c.message[:200]}")
        if len(members) > shown:
            lines.append(f"  … and {len(members) - shown} more")
    if not found:
        lines.append("no cell changed")
    before, after = old.rate(old.totals()), new.rate(new.totals())
    lines.append(f"passed: {percent(before)} → {percent(after)}")
    differing = sorted(k for k in new.settings if k != "backend" and old.settings.get(k) != new.settings[k])
    if differing:
        lines.append(f"note: the runs had other settings ({', '.join(differing)}), so other cases may have been chosen")
    return "\n".join(lines)
