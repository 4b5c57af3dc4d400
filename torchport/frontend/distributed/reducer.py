"""What DDP's reducer does otherwise for modules of this device: where it keeps a note, and its first bucket.

It notes which parameters a step has used, for ``find_unused_parameters`` and ``static_graph``. It keeps the note on the
CPU, and a copy beside the parameters for the ranks to add up. The copy of another accelerator goes through pinned
memory, whose C++ allocator a device in Python has none of. So the copy of this device is a tensor of the CPU, which the
group adds up as it does any. It is the only tensor of int32 that the reducer makes.

Its first bucket is a small one, whose exchange begins early in the backward pass. On this device what is traced is cut
at every exchange: the backward pass's first gradients would be computed apart from the rest, which costs more than the
early megabyte saves. So the first bucket is as large as the others, unless the program says what it is to be.

Private torch API used here: ``torch.nn.parallel.distributed._get_device_index``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from ...run.device_runtime import runtimes
from ..device.inplace import overriding
from ..device.names import NAME
from ..device.opaque import opaque
from ..device.patches import replace

__all__ = ["install"]

_WRAPPER: Final = "torch.nn.parallel.distributed"
_lock: Final = threading.Lock()
_done: Final[list[bool]] = []


def install() -> None:
    """Wrap what makes the note, once in a process."""
    if _done:
        return
    _done.append(True)
    reducer: Any = dist.Reducer
    replace("torch.distributed.Reducer.__init__", _with_note_on_cpu(_with_one_size(reducer.__init__)))
    replace("torch.distributed.Reducer._set_static_graph", _with_note_on_cpu(reducer._set_static_graph))
    replace(f"{_WRAPPER}._get_device_index", _where_it_is(sys.modules[_WRAPPER]._get_device_index))


_FIRST_BUCKET: Final = 1 << 20
"""Bytes of DDP's first bucket where the program has not said otherwise."""
_CAP: Final = 5
_FIRST_CAP: Final = 9
"""The positions of the limits of buckets among the reducer's arguments, in PyTorch 2.11 to 2.15."""


def _with_one_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """Buckets that are made anew after the first step are all of one size. The first step's are PyTorch's."""

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        untold = len(args) > _FIRST_CAP and args[_FIRST_CAP] == _FIRST_BUCKET
        if untold and any(one.device.type == NAME for one in args[0]):
            args = (*args[:_FIRST_CAP], max(_FIRST_BUCKET, args[_CAP]), *args[_FIRST_CAP + 1 :])
        return original(self, *args, **kwargs)

    return make


def _where_it_is(original: Callable[..., int]) -> Callable[..., int]:
    """DDP moves inputs to ``device_ids[0]``: for this rank's own number that is where the module lies already."""

    @functools.wraps(original)
    def get_device_index(*args: Any, **kwargs: Any) -> int:
        return runtimes.get(original(*args, **kwargs)).index

    return get_device_index


def _with_note_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _note_on_cpu():
            return original(*args, **kwargs)

    return call


@contextmanager
def _note_on_cpu() -> Iterator[None]:
    """This thread's empty int32 tensors of the device are made on the CPU."""
    mine = threading.get_ident()
    with _lock:
        stock: Any = torch.library.get_kernel("aten::empty.memory_format", "PrivateUse1")

        def empty(keys: Any, size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
            if dtype is torch.int32 and threading.get_ident() == mine:
                return torch.empty(size, dtype=dtype, device="cpu")
            return stock.call_boxed(keys, size, dtype=dtype, **options)

        library = torch.library.Library("aten", "IMPL")
        try:
            with overriding():
                library.impl("empty.memory_format", opaque(empty), "PrivateUse1", with_keyset=True, allow_override=True)
            yield
        finally:
            library._destroy()
