"""Everyday PyTorch that asks for "the accelerator" rather than a device by name, and pinned host memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from everyday_support import ON_PORT, needs_counters, same
from torch.utils.data import DataLoader

from torchport.core import releases

pytestmark = needs_counters  # there is no accelerator where the tests run on the CPU

MEMORY = ["max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"]


def test_a_program_for_any_accelerator(device: torch.device) -> None:
    here = torch.accelerator.current_accelerator(check_available=True)
    assert here == torch.device("port")
    assert torch.accelerator.device_count() >= 1
    with torch.accelerator.device_index(0):
        x = torch.ones(2, 2, device=here)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    if releases.has("torch.accelerator.empty_host_cache"):
        torch.accelerator.empty_host_cache()
    assert (x @ x).tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_memory_figures_are_the_backends(device: torch.device) -> None:
    from torchport.run.device_runtime import runtimes

    runtime = runtimes.get(0)
    known = runtime.memory_info()
    for name in MEMORY:
        assert getattr(torch.accelerator, name)() == known.get("allocated", 0)
        assert getattr(torch.accelerator, name)("port:0") == known.get("allocated", 0)
    assert torch.accelerator.memory.get_memory_info() == (known.get("free", 0), known.get("total", 0))
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == known.get("allocated", 0)
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()


def test_record_stream_does_nothing(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 2
    y.record_stream(torch.port.current_stream())  # type: ignore[attr-defined]
    assert y.tolist() == [2.0] * 3


def test_streams_and_events_of_either_name(device: torch.device) -> None:
    """``torch.accelerator`` and the device module give the same; PyTorch's C++ stream takes the device's events."""
    stream = torch.accelerator.current_stream()
    event = torch.port.Event(enable_timing=True)  # type: ignore[attr-defined]
    event.record(stream)
    stream.wait_event(event)
    torch.Stream(device).wait_event(event)
    assert isinstance(event, torch.Event)
    assert stream == torch.port.current_stream()  # type: ignore[attr-defined]
    assert stream.record_event().query()
    event.synchronize()


def test_properties_by_key_and_as_attributes(device: torch.device) -> None:
    found = torch.port.get_device_properties(0)  # type: ignore[attr-defined]
    assert found.name == found["name"] == torch.port.get_device_name(0)  # type: ignore[attr-defined]
    assert found.total_memory > 0 or not found.hardware.startswith("cpu")
    with pytest.raises(AttributeError, match="nothing is known of 'warp_size'; there are: name, backend"):
        _ = found.warp_size
    known = torch.port.memory_stats()  # type: ignore[attr-defined]
    assert known.get("allocated_bytes.all.current", 0) == torch.port.memory_allocated()  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", ["set_device_index", "device_index"])
def test_another_index_cannot_be_the_current_one(device: torch.device, call: str) -> None:
    def use() -> Any:
        made = getattr(torch.accelerator, call)(1)
        return made.__enter__() if call == "device_index" else made

    with pytest.raises(RuntimeError, match="current device"):
        use()
    with pytest.raises(ValueError, match="current accelerator"):
        torch.accelerator.memory_allocated("cuda:0")


def test_a_data_loader_that_pins_memory(device: torch.device) -> None:
    loader = DataLoader(list(torch.arange(4.0)), batch_size=2, pin_memory=True)
    batches = [batch.to(device, non_blocking=True) for batch in loader]
    same([batch.cpu() for batch in batches], list(torch.arange(4.0).reshape(2, 2)))


WORKER = """
import torch, torchport
from torch.utils.data import DataLoader
torch.ones(2, device="port").sum().item()
loader = DataLoader(list(torch.arange(4.0)), batch_size=2, pin_memory=True, num_workers=1)
assert [batch.to("port", non_blocking=True).tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0]]
"""


def test_a_data_loader_with_a_worker_that_pins_memory() -> None:
    # In a process of its own: a fork of one that holds several engines' threads is theirs to survive.
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


BEFORE_USE = """
import warnings
import torch
from torch.utils.data import DataLoader
assert [b.tolist() for b in DataLoader([1.0, 2.0], pin_memory=True)] == [[1.0], [2.0]]
x = torch.arange(6.0).reshape(2, 3).t()
pinned = x.pin_memory()
assert pinned.is_pinned() and pinned[1:].is_pinned() and pinned.untyped_storage().is_pinned() and not x.is_pinned()
assert pinned.tolist() == x.tolist() and pinned.stride() == x.stride() and pinned.data_ptr() != x.data_ptr()
assert pinned.pin_memory() is pinned and not pinned.clone().is_pinned()
x.zero_()
assert pinned.sum() == 15
assert torch.UntypedStorage(8).pin_memory().is_pinned() and not torch.UntypedStorage(8).is_pinned()
weight = torch.nn.Parameter(torch.ones(2))
weight.pin_memory().sum().backward()
assert weight.grad.tolist() == [1.0, 1.0]
assert torch.eye(2).to_sparse().pin_memory().to_dense().tolist() == torch.eye(2).tolist()
assert [b.is_pinned() for b in DataLoader([1.0, 2.0], pin_memory=True)] == [True, True]
torch.accelerator.empty_cache()
torch.accelerator.empty_host_cache()
torch.accelerator.synchronize()
assert torch.accelerator.memory_allocated() == 0
assert not torch.port.is_initialized()
with warnings.catch_warnings(record=True) as warned:  # Dynamo looks at functions of Python behind a graph break
    warnings.simplefilter("always")
    compiled = torch.compile(lambda x: x + torch.accelerator.memory_allocated() + x.is_pinned(), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [1.0, 1.0]
assert not warned, [str(warning.message) for warning in warned]
assert torch.compile(lambda x: (x + 1).sum(), backend="aot_eager")(torch.ones(3)) == 6
assert torch.accelerator.current_stream().device == torch.device("port", 0)
assert not torch.port.is_initialized()
with torch.accelerator.current_stream() as stream:
    assert torch.accelerator.current_stream() == stream and stream.query()
"""


def test_none_of_it_makes_the_device_ready() -> None:
    assert ON_PORT
    done = subprocess.run([sys.executable, "-c", BEFORE_USE], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
