"""What is made to stay is not looked through by the garbage collector, and nothing else changes."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from torchport.core.collection import MANY, made_to_stay


class _Ring:
    """Garbage that only the collector finds."""

    freed = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        _Ring.freed += 1


def test_garbage_is_found_later() -> None:
    gc.collect()
    _Ring.freed = 0
    with made_to_stay():
        assert not gc.isenabled()
        _Ring()
        kept = [[at] for at in range(2 * MANY)]
    assert gc.isenabled()
    assert _Ring.freed == 0
    gc.collect()
    assert _Ring.freed == 1
    assert len(kept) == 2 * MANY


def test_what_the_program_has_set_stays() -> None:
    gc.disable()
    try:
        with made_to_stay():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), made_to_stay():
        raise KeyError
    assert gc.isenabled()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with made_to_stay():
            kept = [[at] for at in range(2 * MANY)]
        assert gc.get_freeze_count() >= frozen - 100 > 0  # some were freed meanwhile, by their counts
        del kept
    finally:
        gc.unfreeze()


PROGRAM = """
import gc, torch
gc.collect()
# Python looks at old objects when a quarter as many have come: a few more, and it would.
more = [[at] for at in range(len(gc.get_objects()) * 6 // 25)]
before = gc.get_stats()
import torchport
torchport.use("reference")
x = torch.ones(2, device="port")
after = gc.get_stats()
print(after[2]["collections"] - before[2]["collections"], gc.get_freeze_count(), gc.isenabled())
"""


def test_the_first_use_of_the_device_does_not_look_through_the_heap() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["0", "0", "True"], done.stderr
