"""What is known of a computation that began interpreted: for people who ask in which tier it runs, and since when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["TierRecord"]


@dataclass(slots=True, eq=False)
class TierRecord:
    """A computation that was interpreted when it was new.

    ``frontend``: ``lazy`` or ``torch.compile``. ``device``: where it runs. ``operators``: how many it has. ``tier``:
    ``interpreted``, ``compiling`` (interpreted, while another process compiles it), ``checked`` (both run, for
    ``config.verify_swap``), ``tried`` (both run in turn, and the quicker one stays), ``compiled`` or ``stays
    interpreted``. ``runs``, ``seconds``: how often it was interpreted,
    and what that took. ``expected``: seconds that compiling was expected to take when it was asked for. ``took_over``:
    seconds from its first run to the compiled computation's; ``None`` before. ``why``: why it stays interpreted.
    ``form``: for what was compiled in pieces, that it was, or that the whole has taken over. ``sizes``: for what
    differs in sizes alone from what is compiled already, which.
    """

    frontend: str
    device: str
    operators: int
    tier: str = "interpreted"
    runs: int = 0
    seconds: float = 0.0
    expected: float = 0.0
    took_over: float | None = None
    why: str = ""
    form: str = ""
    sizes: str = ""
    since: float = field(default_factory=time.monotonic)

    def take_over(self) -> float:
        """The compiled computation runs from now on; seconds since the first run."""
        self.tier = "compiled"
        self.took_over = time.monotonic() - self.since
        return self.took_over

    def stay(self, why: str) -> None:
        """It stays interpreted."""
        self.tier, self.why, self.took_over = "stays interpreted", why, None

    def __str__(self) -> str:
        runs = f"interpreted {self.runs} times in {self.seconds:.3f} s"
        after = "" if self.took_over is None else f", compiled after {self.took_over:.1f} s"
        why = f": {self.why.splitlines()[0]}" if self.why else ""
        form = "".join(f", {one}" for one in (self.form, self.sizes) if one)
        return f"{self.frontend}, {self.operators} operators on {self.device}: {self.tier}{form}{why}; {runs}{after}"
