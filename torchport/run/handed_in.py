"""Filling the disk cache: a program runs interpreted while everything that it needs is compiled in other processes.

What is handed in is what the program would compile: the same path, the same values, the same donations, so that the
same keys are asked for when it runs by itself. Off, unless :func:`torchport.run.warm_script.warm` has switched it on.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Final

from ..core.specs import TensorSpec
from ..worker.paths import NotSendable
from ..worker.request import path_request
from ..worker.service import Ticket, service
from .interpreted import InterpretedPlan, make_interpreted
from .kept_paths import noting

if TYPE_CHECKING:
    from ..trace.trie import Node
    from .device_runtime import DeviceRuntime

__all__ = ["Warming", "warming"]


class Warming:
    """Whether the cache is being filled, and what was handed in."""

    def __init__(self) -> None:
        self.active = False
        self.tickets: list[Ticket] = []
        self.here = 0
        """Computations that no other process can compile."""

    def plan(
        self,
        runtime: DeviceRuntime,
        node: Node,
        value_ids: tuple[int, ...],
        leaf_specs: Sequence[TensorSpec],
        donated: Set[int],
    ) -> InterpretedPlan | None:
        """Hand in what these values need and go on interpreted; ``None`` where it has to be compiled here."""
        path = node.path()
        try:
            request = path_request(
                (id(runtime), id(node), value_ids), runtime.backend, runtime.specs, path, value_ids, leaf_specs, donated
            )
        except NotSendable:
            self.here += 1
            return None
        self.tickets.append(service.submit(request, noting(None, runtime.backend, path, value_ids, list(leaf_specs))))
        return make_interpreted(runtime, path, value_ids, leaf_specs)


warming: Final = Warming()
