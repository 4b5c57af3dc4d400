"""What ranks tell each other before a collective, and what is wrong where they do not say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Statement", "disagreement"]


@dataclass(frozen=True)
class Statement:
    """What a rank is about to do: its ``signature``, which must be everyone's, and the user's line, which need not.

    ``sent`` and ``received``: how many rows go to each rank and come from it, where each rank has numbers of its own.
    """

    signature: str
    line: str
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def encode(self) -> str:
        """As the store keeps it."""
        rows = (self.signature, self.line, _text(self.sent), _text(self.received))
        return "\n".join(row.replace("\n", " ") for row in rows)

    @classmethod
    def decode(cls, text: bytes) -> Statement:
        """What :meth:`encode` wrote."""
        signature, line, sent, received = text.decode().split("\n")
        return cls(signature, line, _numbers(sent), _numbers(received))


def _text(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def disagreement(said: Mapping[int, Statement]) -> str | None:
    """What does not fit in the statements of a group's ranks, which are in the group's order; ``None`` if all does."""
    if len({(one.signature, bool(one.sent)) for one in said.values()}) == 1:
        misfit = _misfit(said)
        if misfit is None:
            return None
        first = misfit
    else:
        first = "the ranks are not about to do the same"
    width = max(len(str(rank)) for rank in said)
    rows = [f"  rank {rank:>{width}}: {one.signature}\n    at {one.line}" for rank, one in said.items()]
    return "\n".join([first, *rows])


def _misfit(said: Mapping[int, Statement]) -> str | None:
    ranks, statements = list(said), list(said.values())
    for at, sender in enumerate(statements):
        for to, count in enumerate(sender.sent):
            expected = statements[to].received[at]
            if count != expected:
                return f"rank {ranks[at]} sends {count} rows to rank {ranks[to]}, which expects {expected}"
    return None
