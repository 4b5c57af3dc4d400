"""``torch.compile(model, backend="torchport")``; found by PyTorch through the entry point ``torch_dynamo_backends``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.varying import take_put_by

__all__ = ["torchport_backend"]


def torchport_backend(
    graph: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """What Dynamo calls with each graph it captures; see :func:`.dynamo.compile_captured`."""
    from .dynamo import compile_captured  # on demand: Dynamo finds the backend without loading it

    return compile_captured(graph, example_inputs, options, mode)


def _tell_dynamo() -> None:
    """Mark what was marked before Dynamo was there: it finds this module before it looks at any tensor."""
    marked = take_put_by()
    if marked:
        from torch._dynamo import mark_dynamic  # on demand: somebody else may import this module

        for tensor, made in marked:
            mark_dynamic(tensor, made.dim, min=made.low, max=made.high)


_tell_dynamo()
