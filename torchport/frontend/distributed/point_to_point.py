"""``send`` and ``recv``: a header tells what comes, so that a misfit is an error and not the end of the process.

gloo pairs messages by sender and tag, and ends the process where a message is longer than what was made ready for it.
So each message is two: a header of fixed length with the sender's statement, and the values, which the receiver makes
room for once it has seen that they fit. A thread per receive waits for the header, since gloo cannot be asked whether
it is there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future as Promise
from datetime import timedelta
from typing import Final

import torch

from ...core import metrics
from ...core.errors import CollectiveError, TorchportError
from ...core.frames import user_line
from ...core.specs import TensorSpec
from ...core.traffic import Collective
from ...run.device_runtime import runtimes
from ...trace.handle import LazyTensor
from .communicator import POLL, Communicator
from .staging import as_bytes, describe, host_values
from .transfer import Received, Transfer, taken

__all__ = ["receive", "send"]

HEADER: Final = 512
"""Bytes of a header: what comes, and the user's line, cut where it is longer."""
_OURS: Final = 1 << 30
"""Tags from here on are of this module; a CPU tensor of the same group may have the ones below."""
_TAGS: Final = (1 << 29) - 1  # tags of gloo are 31 bits
_NOBODYS: Final = _OURS + 2 * _TAGS
"""A tag that no message has."""

_last: Final[dict[tuple[int, int, int], threading.Event]] = {}
"""By communicator, rank and tag, when the last receive has been posted: values must be in the order of headers."""


def _tags(tag: int) -> tuple[int, int]:
    """The tags of a message's header and of its values."""
    if not 0 <= tag < _TAGS:
        raise ValueError(f"a tag is a number from 0 to {_TAGS - 1}, got {tag}")
    return _OURS + 2 * tag, _OURS + 2 * tag + 1


def _header(text: str) -> torch.Tensor:
    raw = text.encode()[:HEADER]
    return torch.frombuffer(bytearray(raw.ljust(HEADER, b"\0")), dtype=torch.uint8)


def _text(header: torch.Tensor) -> str:
    return bytes(header.tolist()).rstrip(b"\0").decode(errors="replace")


_waiting: Final[dict[threading.Thread, Communicator]] = {}
"""Threads that wait in gloo."""


@functools.cache
def _wake_at_exit() -> None:
    atexit.register(_wake)


def _wake() -> None:
    """Have gloo give up before Python ends: a thread that came back from it later would end the process badly.

    gloo has no other way than a time limit that is over, which ends every wait of its group. It refuses to receive from
    a rank that it has lost, at once and without an end to the waits for others; so each is tried.
    """
    threads = dict(_waiting)
    for communicator in set(threads.values()):
        communicator.leave()
        for other in range(communicator.size):
            with contextlib.suppress(RuntimeError):
                if other != communicator.rank:
                    nothing = communicator.gloo.recv([torch.zeros(1, device="cpu")], other, _NOBODYS)
                    nothing.wait(timedelta(milliseconds=1))
    for thread in threads:
        thread.join(5)


def _in_background(communicator: Communicator, call: Callable[[], None], name: str) -> Promise[None]:
    _wake_at_exit()
    promise: Promise[None] = Promise()

    def run() -> None:
        try:
            call()
            promise.set_result(None)
        except BaseException as error:
            promise.set_exception(error)
        finally:
            _waiting.pop(thread, None)

    thread = threading.Thread(target=run, name=f"torchport {name}", daemon=True)
    _waiting[thread] = communicator
    thread.start()
    return promise


def _arrive(
    communicator: Communicator,
    promise: Promise[None],
    peer: int | None,
    what: str,
    record: Collective,
    met: threading.Event,
) -> Callable[[], None]:
    """Waits for what is done in the background, and looks after the other side meanwhile; ``met``: it has answered."""

    def attempt() -> bool | None:
        try:
            promise.result(POLL)
        except TimeoutError:
            if not promise.done():
                return None
        except RuntimeError:
            pass
        return True

    def absent() -> list[int]:
        return [r for r in communicator.ranks if r != communicator.ranks[communicator.rank]] if peer is None else [peer]

    def arrive() -> None:
        start = time.perf_counter()
        communicator.wait(attempt, absent, what, communicator.timeout, lambda: peer is not None and not met.is_set())
        error = promise.exception()
        if isinstance(error, TorchportError):
            raise error
        if error is not None:
            communicator.blame(error, what)  # type: ignore[arg-type]
        taken(record, start)

    return arrive


def _place(communicator: Communicator, what: str) -> str:
    line = user_line() or "a line of PyTorch's"
    communicator.note(f"{what} at {line}")
    return line


def _record(communicator: Communicator, what: str, line: str, tensor: torch.Tensor) -> Collective:
    record = communicator.record(what, line)
    record.start(tensor.numel() * tensor.element_size())
    metrics.count("CollectiveBytes", record.nbytes)
    return record


def send(communicator: Communicator, tensor: LazyTensor, to: int, tag: int) -> Transfer:
    """Send a tensor's values to rank ``to`` of the group."""
    first, second = _tags(tag)
    (host,) = host_values("send", [tensor])
    what = f"send to rank {communicator.ranks[to]} of {describe([tensor])} with tag {tag}"
    line = _place(communicator, what)
    gloo, header = communicator.gloo, _header(f"{describe([tensor])}\n{line}")
    place = f"{what}\n    at {line}"
    works = [communicator.post(lambda: gloo.send([header], to, first), place)]
    if host.numel():
        works.append(communicator.post(lambda: gloo.send([as_bytes(host)], to, second), place))
    kept, met = [header, host], threading.Event()

    def wait() -> None:
        for work in works:
            work.wait()
            met.set()
        kept.clear()

    promise = _in_background(communicator, wait, "send")
    runtime = runtimes.get(tensor.get_device())
    record = _record(communicator, what, line, host)
    return Transfer(runtime, _arrive(communicator, promise, communicator.ranks[to], place, record, met))


def receive(
    communicator: Communicator, tensor: LazyTensor, source: int | None, tag: int
) -> tuple[Transfer, LazyTensor, Received]:
    """A new handle for a tensor that gets its values from rank ``source`` of the group, or from whichever sends."""
    first, second = _tags(tag)
    gloo, expected = communicator.gloo, describe([tensor])
    sender = "any rank" if source is None else f"rank {communicator.ranks[source]}"
    what = f"receive from {sender} of {expected} with tag {tag}"
    line = _place(communicator, what)
    header = torch.zeros(HEADER, dtype=torch.uint8, device="cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    received = Received(source)
    key = (id(communicator), -1 if source is None else source, tag)
    before, posted, met = _last.get(key), threading.Event(), threading.Event()
    _last[key] = posted
    place = f"{what}\n    at {line}"
    coming = communicator.post(
        lambda: gloo.recv_anysource([header], first) if source is None else gloo.recv([header], source, first), place
    )

    def wait() -> None:
        try:
            coming.wait()
            met.set()
            if source is None:
                received.source = coming._source_rank()
            comes, _, where = _text(header).partition("\n")
            if comes != expected:
                rank = communicator.ranks[received.source or 0]
                raise CollectiveError(
                    f"rank {rank} sends {comes}\n    at {where}\n  but rank {communicator.ranks[communicator.rank]} "
                    f"receives {expected}\n    at {line}"
                )
            if before is not None:
                before.wait()
            values = gloo.recv([as_bytes(host)], received.source, second) if host.numel() else None
        finally:
            posted.set()
            if _last.get(key) is posted:
                del _last[key]
        if values is not None:
            values.wait()

    promise = _in_background(communicator, wait, "receive")
    peer = None if source is None else communicator.ranks[source]
    runtime = runtimes.get(tensor.get_device())
    record = _record(communicator, what, line, host)
    transfer = Transfer(runtime, _arrive(communicator, promise, peer, place, record, met))
    return transfer, transfer.result(TensorSpec.of(host), lambda: host), received
