"""Writes to inputs, which AOTAutograd puts at the end of a graph that is functional otherwise.

They become results, which are copied to the inputs once the computation has run. AOTAutograd would do the same, but
where autograd must not see a write, as under ``no_grad``, only the graph can make it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from ...core.errors import GraphError
from ...core.releases import operators

__all__ = ["Epilogue"]

_COPY: Final = torch.ops.aten.copy_.default
_OTHER_MEMORY: Final = (torch.ops.aten.set_.source_Tensor, *operators(torch.ops.aten, "shallow_copy_data_"))
"""``x.data = y`` is the second of them from PyTorch 2.14 on."""
_unseen: Final = torch._C._AutoDispatchBelowADInplaceOrView


class Epilogue:
    """The writes at the end of a graph. ``graph`` is the same without them, and has the new values as last results.

    Raises :class:`GraphError` where an input gets other memory.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        placeholders = graph.graph.find_nodes(op="placeholder")
        if any(graph.graph.find_nodes(op="call_function", target=op) for op in _OTHER_MEMORY):
            raise GraphError(
                "the program replaces the memory of an input (x.data = y, or set_), which AOTAutograd loses writes and "
                "views by; write x.copy_(y), or do it outside the compiled function"
            )
        copies = graph.graph.find_nodes(op="call_function", target=_COPY)
        found = [node for node in copies if node.args[0] in placeholders]
        self._writes = [placeholders.index(node.args[0]) for node in found]
        output = graph.graph.output_node()
        kept: Any = output.args[0]
        self._results = len(kept)
        self._read: dict[int, Collection[str]] = {}
        if not found:
            return
        functional = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node is output:
                # An input that was written is a result as itself; elsewhere ``copy_`` is the value that it copies.
                given = (*(n.args[0] if n in found else n for n in kept), *(write.args[1] for write in found))
                functional.output(map_arg(given, lambda n: values[n])).meta.update(node.meta)
            elif node in found:
                values[node] = values[node.args[1]]
            else:
                values[node] = functional.node_copy(node, lambda n: values[n])
        self.graph = fx.GraphModule(graph, functional)
        self.graph.meta.update(graph.meta)
        names = [write.args[0].name for write in found]  # type: ignore[union-attr]
        for at in range(len(found)):
            # The value may be a view of what it is copied to, so that is among what is written.
            self._read[self._results + at] = set(names[: at + 1])

    @property
    def read(self) -> dict[int, Collection[str]]:
        """Per result that is only read here, the names of the inputs that are written before or while it is read."""
        return self._read

    @property
    def writes(self) -> Sequence[int]:
        """Which of the graph's arguments are written, in the order of the writes."""
        return self._writes

    def run(self, targets: list[torch.Tensor], results: Sequence[Any], at_once: bool) -> Sequence[Any]:
        """Write the new values; gives the results that are left.

        ``at_once``: by one call for all, which does the same on the CPU in half the time. It takes no conjugate views.
        """
        count = self._results
        values: Any = results[count:]
        # As in the computation, autograd must not know: AOTAutograd tells it which inputs were written.
        with _unseen():
            if len(targets) == 1:
                targets[0].copy_(values[0])
            elif at_once and not any(target.is_conj() or target.is_neg() for target in targets):
                torch._foreach_copy_(targets, values)
            else:
                for target, value in zip(targets, values, strict=True):
                    target.copy_(value)
        return results[:count]
