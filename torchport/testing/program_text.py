"""A small graph as a Python program that anybody can run: plain calls, literal inputs, one comparison."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .reproduce import literal
from .shrink import GraphSample, operators_of
from .values import tolerance

__all__ = ["program_text"]

_LONGEST = 4096


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item) for item in value)}]"
    return literal(value)


def _call(node: fx.Node) -> str:
    args = [_argument(value) for value in node.args]
    if node.target is operator.getitem:
        return f"    {node.name} = {args[0]}[{args[1]}]"
    kwargs = [
        f"{key}={'x_device' if isinstance(value, torch.device) else _argument(value)}"
        for key, value in node.kwargs.items()
    ]
    return f"    {node.name} = torch.ops.{node.target}({', '.join([*args, *kwargs])})"


def _input(tensor: torch.Tensor) -> str:
    if tensor.numel() <= _LONGEST:
        return literal(tensor, longest=_LONGEST)
    low, high = (0, 1) if tensor.dtype == torch.bool else (-1, 1)
    return (
        f"torch.testing.make_tensor({tuple(tensor.shape)}, dtype={tensor.dtype}, device='cpu', low={low}, high={high})"
        "  # too many values to write out: others than those it was found with"
    )


def _device_lines(target: str) -> list[str]:
    if ":" not in target:
        return [f"device = torchport.device({target!r})"]
    return [
        "from torchport.testing import load_backend",
        "",
        f"device = torchport.device(load_backend({target!r}).name)",
    ]


def program_text(program: GraphSample, target: str, verdict: str, origin: str, before: int) -> str:
    """The program's source. It ends in an ``AssertionError``, or as the engine does, until the fault is mended."""
    graph = program.graph.graph
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    outputs: Any = graph.output_node().args[0]
    dtypes = {node.meta["val"].dtype for node in outputs}
    rtol, atol = (max(column) for column in zip(*(tolerance(dtype) for dtype in dtypes), strict=True))
    factories = any(isinstance(v, torch.device) for n in operators_of(program.graph) for v in n.kwargs.values())
    extra = ["x_device"] if factories else []
    said = " ".join(verdict.split()).replace("\\", "/").replace('"""', "'''")
    lines = [
        f'"""Reduced from {before} operators of {origin}.',
        "",
        said,
        '"""',
        "",
        "import torch",
        "import torchport",
        *_device_lines(target),
        "",
        "",
        f"def program({', '.join([*names, *extra])}):",
        *(_call(node) for node in graph.nodes if node.op == "call_function"),
        f"    return [{', '.join(node.name for node in outputs)}]",
        "",
        "",
        "inputs = [",
        *(f"    {_input(tensor)}," for tensor in program.inputs),
        "]",
        f"expected = program(*inputs{_cpu(factories)})",
        f"actual = program(*(x.to(device) for x in inputs){', device' if factories else ''})",
        "for a, b in zip(actual, expected, strict=True):",
        f"    torch.testing.assert_close(a.cpu(), b, rtol={rtol}, atol={atol}, equal_nan=True)",
        'print("agrees with the CPU")',
    ]
    return "\n".join(lines) + "\n"


def _cpu(factories: bool) -> str:
    return ", torch.device('cpu')" if factories else ""
