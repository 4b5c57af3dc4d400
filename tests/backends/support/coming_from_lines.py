"""Runs every line of code on the page for those who come from other projects, in a process that may be changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

import torchport
from torchport import BackendDevice
from torchport.backend.execution import Computation
from torchport.backend.lowering_context import LoweringContext, LoweringTable
from torchport.backends.reference import ReferenceBackend

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from helpers_graphs import build, data_of, load  # noqa: E402 - beside this folder


def lines() -> Iterator[str]:
    """Each line of code in the last column of the page's tables."""
    for line in (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 3 and cells[2] != "a line of code":
            yield from re.findall(r"`([^`]+)`", cells[2])


class OnTwo(ReferenceBackend):
    """The reference backend with two devices."""

    name: ClassVar[str] = "mine"

    def devices(self) -> Sequence[BackendDevice]:
        return [BackendDevice("cpu", 0), BackendDevice("cpu", 1)]


class Text(LoweringContext[str, str]):
    """Writes operators as text."""

    def parameter(self, position: int, spec: torchport.TensorSpec, name: str) -> str:
        return name

    def build(self) -> str:
        return ", ".join(self.results)


class Timeline:
    """Keeps what a backend says while somebody is profiling."""

    def event(self, name: str, start: float, end: float, ident: Any = None, metadata: str = "") -> None:
        assert end >= start

    def memory(self, name: str, nbytes: int) -> None:
        assert nbytes >= 0

    def value(self, ident: int | str, value: object) -> None:
        assert ident


class Registrar:
    """Takes the kernel that the page registers."""

    def impl(self, op: str, key: str, fn: Any) -> None:
        assert (op, key) == ("aten::sin", "Dense")
        assert callable(fn)


def _names() -> dict[str, Any]:
    """What the lines speak of."""
    torchport.register(OnTwo)
    backend, tensor = torchport.get_backend("mine"), torch.arange(3.0)
    device, spec = backend.devices()[0], torchport.TensorSpec.of(tensor)
    graph = build(lambda made, inputs: [made.call_function(torch.ops.aten.sin.default, (inputs[0],))], [tensor])
    handle, running = load(backend, graph)
    table = LoweringTable()
    table(torch.ops.aten.sin.default)(lambda call, x: f"sin({x})")
    (data,) = data_of([tensor])
    return {
        "torch": torch, "torchport": torchport, "backend": backend, "registrar": Registrar(),
        "fn": torch.sin, "graph": graph, "tensor": tensor, "device": device, "spec": spec,
        "specs": torchport.CompileSpecs(), "handle": handle, "args": [data], "data": data, "running": running,
        "x": tensor.to(torchport.device("mine")), "value": "x", "table": table, "parse": bytes, "MyContext": Text,
        "placeholder": torchport.TensorData(device, spec, None),
        "error": torchport.DelegateError("no", code=torchport.ErrorCode.NOT_SUPPORTED), "start": 1.0, "end": 2.0,
        "computation": Computation(backend, device, (spec,), ("x",), (spec,), handle, running),
    }  # fmt: skip


def _context(line: str, names: dict[str, Any]) -> Any:
    """Whose ``context`` a line means: the runtime's when it executes or loads, or the lowering's."""
    if "context.temporary" in line:
        return names["running"]
    if "context.tracer" in line:
        return torchport.InitContext(names["device"], tracer=Timeline())
    if "backend.execute" in line:
        return names["running"]
    context = Text(names["table"])
    if "lower_graph" not in line:
        context.lower_graph(names["graph"])
        context.add_parameter(names["spec"], "y")
    return context


def run(line: str, names: dict[str, Any]) -> None:
    """Run one line. What raises on purpose, or returns, is no failure."""
    names["context"] = _context(line, names)
    if line.startswith("raise "):
        try:
            exec(line, names)
        except torchport.TorchportError:
            return
        raise AssertionError("nothing was raised")
    if line.startswith("return "):
        line = f"def _function():\n    {line}\n_function()"
    exec(line, names)


if __name__ == "__main__":
    known, failed, count = _names(), 0, 0
    for code in lines():
        count += 1
        known["Mine"] = type("Mine", (OnTwo,), {"name": f"mine_{count}"})  # a name is registered once
        known["processed"] = torchport.FreeableBuffer(b"code")
        try:
            run(code, dict(known))
        except Exception as error:  # told, with the line
            failed += 1
            print(f"{code}: {type(error).__name__}: {error}")
    print(f"{count} lines, {failed} failed")
    sys.exit(bool(failed))
