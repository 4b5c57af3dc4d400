"""``torchport warm``: run a script so that the next run finds in the disk cache all that this one would compile."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Sequence

from ..backend.inferences import keep_inferences
from ..cache.current import disk_cache
from ..core import metrics
from ..core.config import config
from ..core.errors import ConfigError, TorchportError
from ..worker.paths import NotSendable
from ..worker.service import Cancelled, service
from .handed_in import warming

__all__ = ["warm"]


def warm(script: str, args: Sequence[str] = (), workers: int | None = None) -> str:
    """Run a script interpreted while other processes compile all it needs; what came of that, for people.

    ``workers``: how many processes; one per core by default. Raises :class:`ConfigError` where nothing can be kept,
    :class:`TorchportError` where something did not compile, and what the script raises.
    """
    folder = disk_cache()
    if folder is None or not folder.writable:
        raise ConfigError(f"nothing can be kept on disk: config.cache is {config.cache!r}; set TORCHPORT_CACHE=on")
    given, begun = sys.argv, time.monotonic()
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with config.override(compile_workers=workers or os.cpu_count() or 1):
        warming.active = True
        try:
            _run(script)
            service.wait()
            keep_inferences()
        finally:
            warming.active = False
            del sys.path[0]
            sys.argv = given
    told, errors = _outcomes()
    text = f"{told} in {time.monotonic() - begun:.1f} s; the cache is {folder.path}"
    if errors:
        raise TorchportError(f"{text}; {len(errors)} did not compile: {errors[0]}")
    return text


def _run(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _outcomes() -> tuple[str, list[str]]:
    """What became of everything that was handed in, and what was compiled in this process."""
    found: Counter[str] = Counter(
        compiled=int(metrics.counter("DiskCacheMiss")), known=int(metrics.counter("DiskCacheHit"))
    )
    errors: list[str] = []
    for ticket in warming.tickets:
        try:
            found["known" if ticket.result(0).kept else "compiled"] += 1
        except (NotSendable, Cancelled) as error:
            errors.append(f"{ticket.request.label}: {error}")
        except TorchportError as error:
            errors.append(str(error))
    warming.tickets.clear()
    return f"{found['compiled']} compiled, {found['known']} known already", errors
