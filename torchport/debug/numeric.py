"""How far a delegate's numbers are from PyTorch's, operator by operator, on the same inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ..aot.emit import module_path
from ..aot.lowered import LoweredProgram, Piece
from ..backend.builder import GraphBuilder
from ..backend.compiler import compile_graph
from ..backend.interface import BackendDevice
from ..backend.normal_form import source_of

__all__ = ["Comparison", "Gap", "compare"]

_getitem: Any = operator.getitem


@dataclass(frozen=True, slots=True)
class Gap:
    """One operator's result on the backend against the reference.

    ``mse``: mean squared error; ``l1``: mean absolute error; ``max_abs``: the largest; ``snr``: signal to noise in dB
    (infinite for equal results).
    """

    debug_handle: int
    op: str
    delegate: str
    module: str
    source: str
    mse: float
    l1: float
    max_abs: float
    snr: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All gaps, in the order of the graph; ``first`` is the first beyond the bound, or ``None``."""

    gaps: tuple[Gap, ...]
    first: Gap | None

    def table(self) -> str:
        """One line per operator, the first beyond the bound marked."""
        lines = [f"  {'handle':>6}  {'max':>9}  {'MSE':>9}  {'SNR dB':>7}  operator"]
        for gap in self.gaps:
            mark = "→" if gap is self.first else " "
            place = " ".join(part for part in (gap.module, gap.source) if part)
            lines.append(
                f"{mark} {gap.debug_handle:>6}  {gap.max_abs:>9.2e}  {gap.mse:>9.2e}  {gap.snr:>7.1f}  "
                f"{gap.op} ({gap.delegate}) {place}".rstrip()
            )
        return "\n".join(lines)


def _gap(node: fx.Node, delegate: str, found: torch.Tensor, expected: torch.Tensor) -> Gap:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = torch.where(same, torch.zeros_like(expected), found - expected).abs()
    error = torch.where(error.isnan(), torch.full_like(error, math.inf), error)
    if not error.numel():
        error = torch.zeros(1, dtype=torch.float64)
    mse = float((error**2).mean())
    signal = float((expected.abs() ** 2).mean()) if expected.numel() else 0.0
    snr = math.inf if mse == 0 else 10 * math.log10(signal / mse) if signal and math.isfinite(mse) else -math.inf
    return Gap(
        node.meta.get("debug_handle", 0),
        str(node.target),
        delegate,
        module_path(node),
        source_of(node) or "",
        mse,
        float(error.mean()),
        float(error.max()),
        snr,
    )


class _Recording(fx.Interpreter):
    """Runs a graph with PyTorch's CPU operators; keeps every value, and what each delegate was given."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.given: dict[str, Sequence[Any]] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.given[str(target)] = args
        return super().call_module(target, args, dict(kwargs))


def _tapped(piece: Piece) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A delegate's graph that returns every tensor it computes."""
    builder = GraphBuilder()
    values: dict[fx.Node, fx.Node] = {}
    taps: list[fx.Node] = []
    for node in piece.graph.graph.nodes:
        if node.op == "output":
            continue
        values[node] = builder.graph.node_copy(node, lambda n: values[n])
        values[node].meta.pop("constant", None)
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor):
            taps.append(node)
    builder.debug_handle = 0
    builder.graph.output(tuple(builder.separate([values[node] for node in taps])))
    return fx.GraphModule(torch.nn.Module(), builder.graph), taps


def _on_backend(piece: Piece, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    backend = piece.backend
    device = next(iter(backend.devices()), BackendDevice("cpu"))
    computation = compile_graph(backend, device, piece.specs, graph)
    data = [backend.to_device(tensor.contiguous().clone(), device) for tensor in inputs]
    return [backend.from_device(one) for one in backend.execute(computation.handle, data, computation.context)]


def compare(
    lowered: LoweredProgram, *args: Any, method: str = "", max_error: float = 1e-3, **kwargs: Any
) -> Comparison:
    """Run a lowered program's delegates and PyTorch's CPU operators on the same inputs.

    Every delegate gets the reference's values as inputs and is compiled once more to return each operator's result, so
    that an error is seen where it arises and does not spread. (What an engine fuses may round differently then.)
    ``max_error``: the bound on the largest absolute error that :attr:`Comparison.first` is beyond.
    """
    name = method or lowered.methods[0]
    outer, exported = lowered.graph_module(name)
    flat = iter(lowered.flatten(name, args, kwargs))
    nodes = [node for node in outer.graph.nodes if node.op == "placeholder"]
    inputs = [
        next(flat) if spec.kind is InputKind.USER_INPUT else node.meta["constant"]
        for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True)
    ]
    gaps: list[Gap] = []
    with torch.no_grad():
        reference = _Recording(outer)
        reference.run(*inputs)
        for index, piece in enumerate(lowered.pieces[name]):
            given = reference.given[f"delegate_{index}"]
            inside = _Recording(piece.graph)
            inside.run(*given)
            graph, taps = _tapped(piece)
            found = _on_backend(piece, graph, given)
            who = f"{piece.backend.name} #{index}"
            gaps += [_gap(node, who, value, inside.env[node]) for node, value in zip(taps, found, strict=True)]
    first = next((gap for gap in gaps if not gap.max_abs <= max_error), None)
    return Comparison(tuple(gaps), first)
