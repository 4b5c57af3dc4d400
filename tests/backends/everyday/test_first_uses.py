"""The first use of the device in a process, whatever it is, does what a later one does.

What a test needs of a fresh process it gets: every other test of this folder has used the device before.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import first_uses
import pytest
import torch
from everyday_support import ON_PORT, same
from first_uses import AS_WARM, KINDS, result_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from torchport import metrics

pytestmark = pytest.mark.skipif(not ON_PORT, reason="a first use is one of the port device; this run is on the CPU")

QUICK = (
    "module_to_after_optimizer",
    "load_map_location",
    "factory_direct_operator",
    "checkpoint",
    "in_eight_threads",
    "optimizer_global_hook",
    "compile_module_to",
    "compile_frontend_writes_a_scalar",
)
"""Each found something of its own; the others are slow tests, as each is a process."""
FRESH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TORCHPORT_BACKEND": "reference", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=240)


def alike(value: Any) -> Any:
    """A result with its numbers to be compared as numbers are."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)
    if isinstance(value, list):
        return [alike(item) for item in value]
    return {key: alike(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the kinds that load something load."""
    import torchport

    torchport.use("reference")
    monkeypatch.setenv("FIRST_USES_SAVED", str(tmp_path))
    for device in ("cpu", "port"):
        first_uses.save(device)
    return tmp_path


@pytest.mark.parametrize("name", FRESH)
def test_a_first_use_is_as_any_other(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", name, "cpu", "warm"])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own are no errors in the other process either
        expected = result_of(name, "port" if name in AS_WARM else "cpu")
    done = in_a_process(first_uses.__file__, name, "port", FIRST_USES_SAVED=str(saved))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {name: alike(expected)}


def test_a_parameter_that_moves_keeps_its_weak_references_and_hooks(backend: str) -> None:
    assert result_of("module_to_with_references", "port") == alike(result_of("module_to_with_references", "cpu"))


def test_a_conversion_is_called_as_often_as_without_the_package(backend: str) -> None:
    shapes, *_ = result_of("apply_counts_calls", "cpu")
    assert shapes == [[2, 4], [2]]


def test_a_copy_of_a_fake_tensor_gives_back_no_more_than_was_taken(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.ones(1, device="port")
    taken: list[int] = []
    too_many: list[int] = []
    take, give_back = StorageWeakRef.__init__, torch.UntypedStorage._free_weak_ref

    def give(address: int) -> None:
        if address in taken:
            taken.remove(address)
            give_back(address)
        else:
            too_many.append(address)  # its memory may be another's by now

    def counted(self: Any, storage: Any) -> None:
        take(self, storage)
        taken.append(self.cdata)
        self._free_weak_ref = give

    monkeypatch.setattr(StorageWeakRef, "__init__", counted)
    with FakeTensorMode() as mode:
        x = torch.empty(2, 3, device="port")
        constant = torch.tensor(1.0)  # the mode holds a weak reference to its storage
        assert mode.fake_tensor_converter.constant_storage_mapping
        assert len(taken) == 1
        copied = copy.deepcopy(x)
    assert copied.device.type == "port"
    del x, constant, copied, mode
    gc.collect()
    assert (taken, too_many) == ([], [])


TRY_AGAIN = """
import sys, threading, torch
from torchport.frontend.device import install

def failing(module, name, error):
    real = getattr(module, name)
    def fails(*args):
        setattr(module, name, real)
        real(*args)
        raise error
    setattr(module, name, fails)

for module in sys.argv[1:]:
    error = KeyboardInterrupt if module == "autocast" else RuntimeError
    failing(getattr(install, module), "install", error(module))
    try:
        torch.ones(2, device="port")
    except error as found:
        assert str(found) == module, found
    else:
        raise AssertionError(module)
    assert not torch.port.is_initialized()

results, barrier = [], threading.Barrier(4)
def work():
    barrier.wait()
    x = torch.arange(3.0, device="port", requires_grad=True)
    (x * x).sum().backward()
    with torch.autocast("port", torch.bfloat16):
        results.append((x.grad.tolist(), (torch.eye(2).to("port") @ torch.ones(2, 2).to("port")).dtype))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert results == [([0.0, 2.0, 4.0], torch.bfloat16)] * 4, results
assert torch.load("port.pt")["a"].device.type == "port"
print(torch.port.is_initialized())
"""


@pytest.mark.parametrize(
    "steps",
    [
        ["placement", "autocast", "native"],
        pytest.param(["inplace", "strided", "composites", "custom", "routes", "shims", "fake"], marks=pytest.mark.slow),
    ],
)
def test_a_device_that_could_not_be_made_ready_is_tried_again(steps: list[str], saved: Path) -> None:
    script = f"import os\nos.chdir({str(saved)!r})\n{TRY_AGAIN}"
    done = in_a_process("-W", "error", "-c", script, *steps)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_backend_is_told_the_seed_that_was_set_before_its_first_use() -> None:
    from torchport.backends.reference import ReferenceBackend
    from torchport.run.device_runtime import Runtimes

    class Seeded(ReferenceBackend):
        name = "seeded"

        def __init__(self) -> None:
            super().__init__()
            self.seeds: list[int] = []

        def seed(self, seed: int) -> None:
            self.seeds.append(seed)

    backend, runtimes = Seeded(), Runtimes()
    runtimes.bind(backend)
    assert backend.seeds == []
    later = Seeded()
    runtimes.seed_all(3)
    runtimes.bind(later)
    assert (backend.seeds, later.seeds) == ([3], [3])


def test_what_was_traced_under_another_default_dtype_is_not_taken_for_this_one(backend: str) -> None:
    def use(device: str) -> list[torch.Tensor]:
        ints = torch.arange(1, 4, device=device)
        return [torch.ones(2, device=device) / 3, ints / 2, ints.sin(), torch.full((2,), 0.5, device=device).sum()]

    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            same(use("port"), use("cpu"))
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.compiled
def test_a_thread_that_began_in_inference_mode_computes_a_step_at_once(backend: str) -> None:
    executions: list[float] = []

    def work() -> None:
        with torch.inference_mode():
            torch.ones(2, device="port").sum().item()
        model = torch.nn.Linear(4, 1).to("port")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4).to("port")
        for _ in range(3):
            before = metrics.counter("Execute")
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            executions.append(metrics.counter("Execute") - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert executions[1:] == [1, 1]
