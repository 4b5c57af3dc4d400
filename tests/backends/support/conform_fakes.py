"""Backends with one fault each, for the conformance kit to find; workers get them as ``conform_fakes.py:Class``."""

from __future__ import annotations

import ctypes
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from torchport import CompileSpecs, FreeableBuffer, InitContext, Processed, Support
from torchport.backend.serialize import decode, encode
from torchport.backends.reference import ReferenceBackend

aten = torch.ops.aten


class _Faulty(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, op: Any, fault: Callable[[Any], Any]) -> None:
        super().__init__(module)
        self.op, self.fault = op, fault

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        return self.fault(result) if target is self.op else result


class _Fake(ReferenceBackend):
    """Correct but for one operator. Its results are checked as ``reference``'s are."""

    op: ClassVar[Any]

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return Processed(encode(graph))

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Callable[..., Any]:
        faulty = _Faulty(decode(processed.data), self.op, self.fault)
        return lambda values, held: faulty.run(*values)

    def fault(self, result: Any) -> Any:
        raise NotImplementedError


class SlightlyWrong(_Fake):
    """``sin`` is off by a thousandth."""

    name = "slightly_wrong"
    op = aten.sin.default

    def fault(self, result: Any) -> Any:
        return result * 1.001


class Crashing(_Fake):
    """``sin`` reads address 0."""

    name = "crashing"
    op = aten.sin.default

    def fault(self, result: Any) -> Any:
        return ctypes.string_at(0)


class Hanging(_Fake):
    """``sin`` never ends."""

    name = "hanging"
    op = aten.sin.default

    def fault(self, result: Any) -> Any:
        while True:
            time.sleep(60)


class FiveOps(ReferenceBackend):
    """Takes five operators, and ``silu`` by its decomposition into two of them."""

    name = "five_ops"
    takes: ClassVar[Sequence[Any]] = (
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.sub.Tensor,
        aten.sigmoid.default,
        aten.mm.default,
    )

    def register_kernels(self, registrar: Any) -> None:
        pass

    def supports(self, node: fx.Node) -> Support:
        if node.target in self.takes or node.target is operator.getitem:
            return Support.yes()
        return Support.no("this engine has five operators")


class Unloadable(ReferenceBackend):
    """Cannot run here."""

    name = "unloadable"

    def is_available(self) -> bool:
        return False

    def unavailable_reason(self) -> str:
        return "no such chip in this machine"


class CrashingAtStart(ReferenceBackend):
    """Takes the process with it while it loads."""

    name = "crashing_at_start"

    def __init__(self) -> None:
        ctypes.string_at(0)
