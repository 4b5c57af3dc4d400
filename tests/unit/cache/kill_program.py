"""Writes entries in children that are killed, and looks at what is left: ``kill_program.py FOLDER calls|times N``.

In a process of its own, since it forks: nothing here has threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from cache_support import LIMIT, end_at, entry, in_child, is_sound, one_write, works

from torchport.cache.folder import CacheFolder


def at_each_call(folder: CacheFolder) -> int:
    """End a write at each system call in turn, before and after it; how many there are."""
    call = 0
    while True:
        ended = 0
        for before in (True, False):
            one = entry(10_000 + 2 * call + before)

            def work(one: object = one, call: int = call, before: bool = before) -> None:
                end_at(call, before)
                one_write(folder, one)  # type: ignore[arg-type]

            status = in_child(work)
            ended += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            is_sound(folder)
            assert folder.read(one.key) in (None, one)
            one_write(folder, one)
            assert folder.read(one.key) == one
            works(folder, 1)
        if not ended:
            return call
        call += 1


def at_random_times(folder: CacheFolder, times: int) -> int:
    """End writers at random points; how many were in the middle of something."""
    draw = random.Random(times)
    caught = 0
    for number in range(times):

        def work(first: int = number * 100) -> None:
            for at in range(first, first + 100_000):
                one_write(folder, entry(at % 40, 20_000))
                folder.drop(entry(at % 40, 20_000).key)

        status = in_child(work, kill_after=draw.random() * 0.01)
        assert os.WIFSIGNALED(status), status
        is_sound(folder)
        caught += any(name.endswith((".tmp", ".lock", ".loading")) for name in os.listdir(folder.path))
        works(folder, 1_000)
    return caught


if __name__ == "__main__":
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # what is said of entries that ended a process
    opened = CacheFolder(Path(sys.argv[1]), LIMIT)
    print(at_each_call(opened) if sys.argv[2] == "calls" else at_random_times(opened, int(sys.argv[3])))
