"""A failing case as a few lines of Python that anybody can run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .plan import Case

__all__ = ["literal", "reproducer"]

_LARGEST_LITERAL = 24


def literal(value: Any, longest: int = _LARGEST_LITERAL) -> str:
    """A Python expression that gives the value again. Raises ``ValueError`` where there is no short one."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, longest)
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(literal(v) for v in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(literal(v) for v in value)}]"
    if isinstance(value, float) and value != value:
        return "float('nan')"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f"float('{value}')"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (torch.device, torch.memory_format, torch.layout)):
        return f"torch.device('{value}')" if isinstance(value, torch.device) else str(value)
    raise ValueError(f"no literal for a {type(value).__name__}")


def _tensor(tensor: torch.Tensor, longest: int) -> str:
    if tensor.numel() > longest or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError("too large for a literal")
    values = str(tensor.detach().resolve_conj().tolist())
    values = values.replace("nan", "float('nan')").replace("inf", "float('inf')")
    empty = f".reshape({list(tensor.shape)})" if tensor.numel() == 0 else ""
    return f"torch.tensor({values}, dtype={tensor.dtype}){empty}"


def _path(name: str, function: Any) -> str:
    """``torch.nn.functional.gelu`` where that is the function. Raises ``ValueError`` where it is not."""
    try:
        if functools.reduce(getattr, name.split("."), torch) is not function:
            raise ValueError(name)
    except AttributeError:
        raise ValueError(name) from None
    return f"torch.{name}"


def _plain(case: Case, subject: Any, sample: Any, name: str) -> str:
    """Five lines of plain PyTorch. Raises ``ValueError`` where they cannot say it."""
    if case.variant not in ("forward", "edge") or case.frontend != "lazy" or not isinstance(sample.input, torch.Tensor):
        raise ValueError("only the plain call is written out")
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(sample.kwargs)):
        raise ValueError("tensors in keyword arguments")
    function = _path(subject.op.name, subject.op.op)
    values = [sample.input, *sample.args]
    rest = "".join(f", {key}={literal(value)}" for key, value in sample.kwargs.items())
    names = [f"x{n}" if isinstance(value, torch.Tensor) else literal(value) for n, value in enumerate(values)]
    tensors = [(f"x{n}", literal(value)) for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
    there = [f"{name}.to(device)" if name.startswith("x") else name for name in names]
    return "\n".join(
        [
            f"import torch, torchport; device = torchport.device({name!r})",
            "; ".join(f"{variable} = {text}" for variable, text in tensors),
            f"expected = {function}({', '.join(names)}{rest})",
            f"actual = {function}({', '.join(there)}{rest})",
            "torch.testing.assert_close(actual.cpu(), expected)",
        ]
    )


def reproducer(case: Case, subject: Any, sample: Any, target: str) -> str:
    """Plain PyTorch where that is short enough, else a call of the kit that runs this one case."""
    try:
        if ":" in target or ":" in case.op:
            raise ValueError(target)
        return _plain(case, subject, sample, target)
    except (ValueError, AttributeError):
        return f"from torchport.testing import run_case\nprint(run_case({target!r}, {str(case)!r}))"
