"""The lazy device seen from outside: why things were compiled, dumps, counters, and what the analysis says."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import pytest
import torch
from everyday_support import counted, needs_counters, ramp
from torch import nn

import torchport

pytestmark = needs_counters


@pytest.fixture(autouse=True)
def afresh(device: torch.device) -> Iterator[None]:
    """A device of its own, so that no other test's traces are the nearest."""
    torchport.sync()
    torchport.metrics.reset()
    yield
    torchport.metrics.reset()


@pytest.fixture
def port() -> torch.device:
    return fakes.Fake.install().device


def last() -> torchport.CompileReason:
    return torchport.compile_reasons()[-1]


# -- why -------------------------------------------------------------------------------------------------------------
def changed(port: torch.device, before: Callable[[torch.Tensor], Any], after: Callable[[torch.Tensor], Any]) -> Any:
    x = ramp(2, 3, device=port)
    for program in (before, before, after):
        kept = (x + 0, program(x))
        torchport.sync()
        del kept
    assert len(torchport.compile_reasons()) == 2
    return last()


def test_an_operator(port: torch.device) -> None:
    reason = changed(port, lambda x: x.sin().exp(), lambda x: x.cos().exp())
    assert reason.kind == "op"
    assert (reason.op, reason.known_op) == ("aten.cos.default", "aten.sin.default")
    assert reason.shared == 1
    assert "test_lazy_seen.py" in reason.line
    assert "test_lazy_seen.py" in reason.known_line
    text = str(reason)
    assert "aten.cos.default instead of aten.sin.default" in text
    assert reason.line in text
    assert reason.known_line in text


def test_a_scalar(port: torch.device) -> None:
    reason = changed(port, lambda x: x + 2, lambda x: x + 3)
    assert reason.kind == "scalar"
    assert "3 instead of 2" in reason.changed
    assert "'other'" in reason.changed
    assert "float" in reason.advice


def test_a_dimension(port: torch.device) -> None:
    reason = changed(port, lambda x: x.sum(0), lambda x: x.sum(1))
    assert reason.kind == "scalar"
    assert "'dim'" in reason.changed


@pytest.mark.parametrize(
    ("first", "second", "kind", "words"),
    [
        ((2, 3), (4, 3), "shape", "float32[4, 3] instead of float32[2, 3]"),
        (torch.float32, torch.float64, "dtype", "float64[2, 3] instead of float32[2, 3]"),
        (False, True, "strides", "strides [1, 2]"),
    ],
)
def test_an_input(port: torch.device, first: Any, second: Any, kind: str, words: str) -> None:
    for form in (first, second):
        x = torch.ones(form if isinstance(form, tuple) else (2, 3))
        x = x.to(form) if isinstance(form, torch.dtype) else x
        x = (torch.ones(3, 2).to(port).t() if form is True else x.to(port)).detach()
        torchport.sync()
        kept = x * 1.5
        torchport.sync()
        del kept
    assert last().kind == kind
    assert words in last().changed


def test_an_operand(port: torch.device) -> None:
    y = ramp(2, 3, device=port)
    reason = changed(port, lambda x: (x + y) * y, lambda x: (x + y) * x)
    assert reason.kind == "operand"


def test_what_is_kept(port: torch.device) -> None:
    x = ramp(3, device=port)
    for keep in (False, True):
        a = x.sin()
        b = a.exp()
        if not keep:
            del a
        torchport.sync()
        del b
    assert last().kind == "values"
    assert last().op == "aten.sin.default"
    assert "1 more" in last().changed


def test_a_trace_that_ends_elsewhere(port: torch.device) -> None:
    x = ramp(3, device=port)
    kept = x.sin().exp()
    torchport.sync()
    del kept
    kept = x.sin()
    torchport.sync()
    assert last().kind == "shorter"
    assert last().known_op == "aten.exp.default"
    del kept
    kept = x.sin().exp().cos()
    torchport.sync()
    del kept
    assert last().kind == "longer"
    assert last().op == "aten.cos.default"


def test_the_first_ones(port: torch.device) -> None:
    (ramp(3, device=port) + 1).sum().item()
    assert last().kind in ("first", "device")
    other = fakes.Fake.install().device
    (ramp(3, device=other) + 1).sum().item()
    assert last().kind == "device"
    assert str(other) in last().changed


def test_a_computation_that_was_dropped(port: torch.device) -> None:
    x = ramp(3, device=port)
    with torchport.config.override(max_computations=1):
        for _ in range(2):
            (x + 1.5).sum().item()
            (x * 1.5).sum().item()
    assert last().kind == "dropped"
    assert "max_computations" in last().advice


def test_known_computations_give_no_reason_and_reasons_are_logged(
    port: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    x = ramp(3, device=port)
    with caplog.at_level(logging.INFO, "torchport.compile"):
        for _ in range(3):
            (x + 1.5).sum().item()
    assert len(torchport.compile_reasons()) == 1
    assert len(caplog.messages) == 1
    assert "the newest compilations" not in torchport.metrics.report() or last().kind == "device"


# -- dumps -----------------------------------------------------------------------------------------------------------
GOLDEN = """\
%arg0 : float32[2, 3]
%add_tensor = aten.add.Tensor(%arg0, 2) : float32[2, 3]  # LINE
%sum_default = aten.sum.default(%add_tensor) : float32[]  # LINE
return %sum_default"""


def without_lines(text: str) -> str:
    return "\n".join(line.split("  # ")[0] + ("  # LINE" if "  # " in line else "") for line in text.splitlines())


def test_a_dump_as_text(port: torch.device) -> None:
    y = (ramp(2, 3, device=port) + 2).sum()
    text = torchport.dump(y)
    assert without_lines(text) == GOLDEN
    assert f"{__file__}:" in text
    assert "test_a_dump_as_text" in text
    with counted() as counts:
        torchport.dump(y, "fx")
    assert counts["Flush: sync"] <= 1, "dumping computes nothing"
    assert y.item() == 27
    assert torchport.dump() == "nothing is pending"


def test_a_dump_of_one_of_several(port: torch.device) -> None:
    x = ramp(2, 3, device=port)
    a, b = x.sin(), x.cos()
    assert "sin" in torchport.dump(a)
    assert "cos" not in torchport.dump(a)
    assert "cos" in torchport.dump({"values": [a, b]})
    assert "sin" in torchport.dump()
    with pytest.raises(torchport.UnsupportedOp):
        torchport.dump(torch.ones(1))


def test_a_dump_as_python_and_of_the_backend(port: torch.device) -> None:
    y = ramp(2, 3, device=port).sin()
    assert "torch.ops.aten.sin.default" in torchport.dump(y, "fx")
    assert "bytes" in torchport.dump(y, "backend")
    with pytest.raises(torchport.ConfigError, match="text, fx, dot, backend"):
        torchport.dump(y, "pdf")


def test_a_dump_as_dot(port: torch.device) -> None:
    y = (ramp(2, 3, device=port) * 2).sin()
    dot = torchport.dump(y, "dot")
    assert dot.startswith("digraph G {")
    assert dot.endswith("}")
    assert dot.count("->") == 3
    assert "test_a_dump_as_dot" in dot
    for line in dot.splitlines()[2:-1]:
        assert line.endswith(";")
        assert line.count('"') - line.count('\\"') in (0, 2)


def test_the_trie_as_dot(port: torch.device) -> None:
    x = ramp(2, 3, device=port)
    for fn in (torch.sin, torch.cos):
        fn(x).sum().item()
    trie = torchport.dump_trie(port)
    assert trie.count("n0 -> ") == 2
    assert trie.count("peripheries=2") == 2
    assert "aten.cos.default" in trie
    assert torchport.dump_trie(port, limit=1).count(" -> ") == 1


# -- counters --------------------------------------------------------------------------------------------------------
def test_the_counter_of_each_operator(port: torch.device) -> None:
    x = ramp(2, 3, device=port)
    for _ in range(3):
        (x.sin() + x.sin()).sum().item()
    assert torchport.metrics.counter("lazy::sin") == 6
    assert torchport.metrics.counter("lazy::add.Tensor") == 3
    assert torchport.metrics.snapshot()["counters"]["lazy::sum"] == 3
    assert torchport.metrics.counter("lazy::cos") == 0
    torch.nonzero(x)
    assert torchport.metrics.counter("lazy::nonzero") == 0
    assert torchport.metrics.counter("KernelCall") == 1


def test_nothing_is_counted_at_import() -> None:
    program = "import torch, torchport; print(torchport.metrics.report()); print(torchport.compile_reasons())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["nothing counted yet", "[]"]


def test_the_report(port: torch.device) -> None:
    x = ramp(2, 3, device=port)
    (x + 1).sum().item()
    (x + 2).sum().item()
    report = torchport.metrics.report()
    for name in ("UncachedCompile", "Execute", "CompileTime", "ExecuteTime", "TransferToDeviceTime", "p1=", "p99=",
                 "rate=", "TransferFromDeviceTime", "the newest compilations:", "2 instead of 1"):  # fmt: skip
        assert name in report
    snapshot = torchport.metrics.snapshot()
    assert snapshot["samples"]["TransferFromDeviceTime"] == 2


# -- analysis --------------------------------------------------------------------------------------------------------
def kinds() -> dict[str, torchport.Finding]:
    return {finding.kind: finding for finding in torchport.analyze()}


def train(port: torch.device, body: Callable[[torch.Tensor, int], Any], steps: int = 6) -> None:
    net = nn.Linear(3, 1).to(port)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        loss = net(torch.ones(2, 3).to(port)).square().mean()
        body(loss, step)
        loss.backward()
        opt.step()


def test_a_quiet_program_has_no_findings(port: torch.device) -> None:
    train(port, lambda loss, step: None)
    assert torchport.analyze() == []


def test_a_value_read_in_every_step(port: torch.device) -> None:
    train(port, lambda loss, step: loss.item())
    finding = kinds()["reads"]
    assert "6 of 6 steps" in finding.seen
    assert "test_lazy_seen.py" in str(finding.line)
    assert "step_closure" in finding.advice


def test_shapes_that_never_settle(port: torch.device) -> None:
    for size in range(3, 9):
        torch.ones(size).to(port).sin().sum().item()
    finding = kinds()["compiles"]
    assert "compilations because of" in finding.seen
    assert "bucket" in finding.advice
    assert finding.times == 5


def test_an_integer_that_changes(port: torch.device) -> None:
    x = ramp(3, device=port)
    for step in range(6):
        (x * (step + 2)).sum().item()
    assert "float" in kinds()["compiles"].advice


def test_an_operator_that_falls_back() -> None:
    refusing = fakes.Refusing.install(register_kernels=lambda *_: None)
    x = torch.ones(3).to(refusing.device)
    for _ in range(4):
        y = (x + 1).sin()
        y.sum().item()
    finding = kinds()["fallback"]
    assert "aten.sin.default ran on the host 4 times" in finding.seen
    assert "test_an_operator_that_falls_back" in finding.seen


def test_computations_dropped_and_failed(port: torch.device) -> None:
    x = ramp(3, device=port)
    with torchport.config.override(max_computations=1):
        for _ in range(3):
            x.sin().sum().item()
            x.cos().sum().item()
    assert "max_computations" in kinds()["memory"].advice
