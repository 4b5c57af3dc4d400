"""Backends whose values have a form of their own: the interpreter gets CPU tensors, everything else that form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import fakes
import pytest
import torch
from tier_training import are_equal, train
from torch import nn

import torchport
from torchport.backend import host
from torchport.backend.interface import BackendData, BackendDevice, ExecutionContext, KernelRegistrar, TensorData
from torchport.core.config import config
from torchport.core.specs import TensorSpec
from torchport.run import device_runtime, worth
from torchport.run.host_forms import HostForm, host_form
from torchport.trace.threads import threads
from torchport.trace.wrapping import unwrap


class BoxData(BackendData):
    """A value in a box."""

    __slots__ = ("box",)

    def __init__(self, device: BackendDevice, spec: TensorSpec, box: list[torch.Tensor]) -> None:
        super().__init__(device, spec)
        self.box = box


class Boxes(fakes.Fake):
    """Its values are boxes with a CPU tensor in them; whatever else it is given is an error."""

    name = "boxes"
    copies: ClassVar[bool] = False

    def __init__(self) -> None:
        self.packed = 0

    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        self.packed += 1
        return BoxData(device, TensorSpec.of(tensor), [tensor.clone() if self.copies else tensor])

    def from_device(self, data: BackendData) -> torch.Tensor:
        assert isinstance(data, BoxData), type(data)
        return data.box[0].clone() if self.copies else data.box[0]

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        tensors = [TensorData(arg.device, arg.spec, self.from_device(arg)) for arg in args]
        results: Any = super().execute(handle, tensors, ExecutionContext(context.device, context.outputs))
        for at in context.donated:  # as an engine that computes in it would
            if tensors[at].tensor.is_floating_point():
                args[at].box[0].fill_(torch.nan)
        return [BoxData(context.device, one.spec, [one.tensor]) for one in results]

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        def sinc(value: BackendData) -> BackendData:
            return self.to_device(self.from_device(value).sinc(), value.device)

        registrar.impl("sinc", "Dense", sinc)


@pytest.fixture(params=[(0, False), (0, True), (1, False)], ids=["index 0", "donation", "another index"])
def boxes(request: pytest.FixtureRequest) -> Iterator[Any]:
    index, donation = request.param
    backend = Boxes.install(donation=donation, restores_donated=False)
    if index == 0:
        torchport.use(backend.name)
        backend.device = torch.device("port", 0)
    with config.override(tiers="auto", compile_workers=0):
        _forget(backend)
        yield backend
    torchport.use("reference")


def _runtime(backend: Any) -> Any:
    return threads.of(backend.device.index or 0).runtime


def _forget(backend: Any) -> None:
    torchport.sync()
    _runtime(backend).forget_decisions()


def _value(tensor: torch.Tensor) -> Any:
    return unwrap(tensor).value  # type: ignore[attr-defined]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 3))


def test_how_values_and_cpu_tensors_go_together_is_found_out() -> None:
    cpu = BackendDevice("cpu")
    assert host_form(torchport.get_backend("reference"), cpu) is HostForm.OWN
    assert host_form(Boxes(), cpu) is HostForm.SHARED
    copying = Boxes.install(copies=True)
    assert host_form(copying, cpu) is HostForm.NONE
    with config.override(tiers="on"):
        assert not _runtime(copying).interprets
        torch.testing.assert_close((torch.ones(300, device=copying.device) + 1).cpu(), torch.full((300,), 2.0))


@pytest.mark.parametrize("check_backends", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_what_takes_over_is_given_the_backends_own_form(
    monkeypatch: pytest.MonkeyPatch, boxes: Any, at: int, check_backends: bool
) -> None:
    monkeypatch.setattr(config, "check_backends", check_backends)
    with config.override(tiers="off"):
        wanted = train(_net, 12, boxes.device)
    _forget(boxes)
    runs: list[None] = []
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: sights.times >= 1)

    def expected(backend: str, operators: int) -> float:
        runs.append(None)
        return 0.0 if len(runs) > at else float("inf")

    monkeypatch.setattr(worth.costs, "expected", expected)
    before = torchport.metrics.counter("TakenOver")
    found = train(_net, 12, boxes.device)
    assert torchport.metrics.counter("TakenOver") > before
    assert are_equal(found, wanted)


def test_a_handle_keeps_the_form_that_was_needed(monkeypatch: pytest.MonkeyPatch, boxes: Any) -> None:
    weight = torch.randn(4, 4).to(boxes.device)
    assert isinstance(_value(weight), BoxData)
    interpreted = weight @ weight  # never seen
    assert type(_value(weight)) is type(_value(interpreted)) is TensorData
    with config.override(tiers="off"):
        for _ in range(3):
            ((interpreted + weight) * 2).sum().item()
            if _ == 0:
                packed = boxes.packed
        assert boxes.packed == packed  # the first run has made them, and the handles have kept them
    assert isinstance(_value(weight), BoxData)
    assert isinstance(_value(interpreted), BoxData)
    torch.testing.assert_close(interpreted.cpu(), weight.cpu() @ weight.cpu())


def test_kernels_of_the_backends_get_its_own_form(boxes: Any) -> None:
    x = torch.linspace(-1, 1, 9)
    ours = x.to(boxes.device) * 2
    assert type(_value(ours)) is TensorData
    torch.testing.assert_close((ours.sinc() + 1).cpu(), (x * 2).sinc() + 1)


def _attention(device: Any, gradients: bool) -> tuple[list[torch.Tensor], int]:
    """Attention with a mask and its gradients, on the CPU's random numbers; and how many operators were interpreted."""
    torch.manual_seed(0)
    before = torchport.metrics.counter("InterpretedOps")
    given = [torch.randn(2, 3, 5, 4).to(device).requires_grad_(gradients) for _ in range(3)]
    query, key, value = given
    mask = torch.ones(5, 5, dtype=torch.bool).tril().to(device)
    made = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    values = [made, nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)]
    if gradients:
        sum(one.square().sum() for one in values).backward()  # type: ignore[union-attr]
        values += [one.grad for one in given if one.grad is not None]
    found = [one.detach().cpu() for one in values]
    return found, torchport.metrics.counter("InterpretedOps") - before


@pytest.mark.parametrize("gradients", [False, True])
def test_attention_is_the_cpus_where_it_is_interpreted_at_once(boxes: Any, gradients: bool) -> None:
    host.register_attention_at_once(_runtime(boxes).kernels)
    _forget(boxes)
    wanted, _ = _attention("cpu", gradients)
    found, operators = _attention(boxes.device, gradients)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
    assert (operators > 30) == gradients, operators
    with config.override(tiers="off"):
        recorded, _ = _attention(boxes.device, gradients)
    for got, want in zip(recorded, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("engine", ["xla", "openvino"])
def test_the_first_value_of_a_process(engine: str, mode: str) -> None:
    """Made, read, and given to the engine, before anything was brought to the device."""
    if not torchport.get_backend(engine).is_available():
        pytest.skip(torchport.get_backend(engine).unavailable_reason())
    code = f"""
import torch, torchport
torchport.use({engine!r})
with torchport.mode({mode!r}):
    x = torch.ones(3, 40, device="port")
    print(x.cpu().sum().item(), (x + 1).sum().item())
torchport.config.tiers = "off"
print((x * 2).sum().item())
"""
    env = {**os.environ, "TORCHPORT_TIERS": "auto"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["120.0", "240.0", "240.0"]


def test_views_and_writes_are_the_cpus(boxes: Any) -> None:
    x = torch.arange(12.0).view(3, 4)
    ours = x.to(boxes.device)
    for tensor in (x := x.clone(), ours):
        tensor.t()[1] += 5
        tensor[:, 2].mul_(3)
    with config.override(tiers="off"):
        ours.t().add_(1)
    torch.testing.assert_close(ours.cpu(), x + 1)
    torch.testing.assert_close((ours.t() @ ours).cpu(), (x + 1).t() @ (x + 1))


def test_values_without_elements_are_interpreted_too(boxes: Any) -> None:
    """A backend may give their strides as it likes."""
    empty = torch.empty(0).to(boxes.device)
    _value(empty).box[0] = torch.empty_strided((0,), (0,))
    before = torchport.metrics.counter("Flush")
    torch.testing.assert_close(
        torch.cat([empty.view(0, 3), torch.ones(2, 3, device=boxes.device)]).cpu(), torch.ones(2, 3)
    )
    assert torchport.metrics.counter("Flush") == before


def test_values_move_to_another_index_and_back(boxes: Any) -> None:
    made = torch.ones(3, 3, device=boxes.device) + 1
    other = torchport.device("inductor" if boxes.device.index else "reference")
    torch.testing.assert_close((made.to(other) * 2).to(boxes.device).add(made).cpu(), torch.full((3, 3), 6.0))


def test_a_swap_is_verified_on_both_forms(capfd: pytest.CaptureFixture[str], boxes: Any) -> None:
    with config.override(verify_swap=2), worth.costs.ignored():
        found = train(_net, 10, boxes.device)
    assert "the largest difference in 2 runs was 0" in capfd.readouterr().err
    assert len(found) == 16
