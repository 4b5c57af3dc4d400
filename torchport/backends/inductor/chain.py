"""Libraries that are called in order by one call of ``caller.cpp``: the pieces of a graph, without Python between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchport.backend.interface import BackendData, ExecutionContext, TensorData
from torchport.backend.optional import Chain, ChainRun
from torchport.core.errors import ExecutionError
from torchport.core.threads import FewerThreads

from . import caller
from .library import Library, plain_message

__all__ = ["linked"]


def linked(chain: Chain) -> ChainRun | None:
    """What runs the libraries of a chain; ``None`` if Python has to call one of them."""
    functions = caller.load()
    calls: list[Any] = []
    for call in chain.calls:
        library = call.handle
        link = library.link if isinstance(library, Library) else None
        if link is None:
            return None
        calls.append((link[0], call.inputs, call.outputs, link[1]))
    if functions is None:
        return None
    made = functions.chain(chain.inputs, chain.values, chain.parts, tuple(calls), chain.results)
    inputs, results = chain.inputs, chain.results
    kept = frozenset(results)

    def run(args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        given = tuple(context.donated - kept) if context.donated else ()
        # In a thread that has not run torch yet OpenMP would use every core: this call gives it torch's number.
        torch.get_num_threads()
        with FewerThreads():
            values = functions.run_chain(made, args, given)
        if values.__class__ is str:
            raise ExecutionError(f"the compiled computation failed: {plain_message(values)}")
        device = context.device
        return [
            args[number] if number < inputs else TensorData(device, spec, value)
            for number, spec, value in zip(results, context.outputs, values, strict=True)
        ]

    return run
