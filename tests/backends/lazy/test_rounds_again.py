"""Loops that read a value each round, and copies between host and device, where operators are interpreted at once.

From the second round on C++ begins a round, and reads and copies what is small: no Python kernel runs.
"""

from __future__ import annotations

import gc
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from native_support import compiles, said_without_and_with, with_libraries

import torchport
from torchport.core import metrics
from torchport.core.config import config
from torchport.core.errors import UnsupportedOp
from torchport.run import direct, regions
from torchport.run.device_runtime import DeviceRuntime
from torchport.run.worth import costs
from torchport.trace.threads import threads
from torchport.trace.trie import Node

pytestmark = compiles

PYTHON_KERNELS = {"kernel", "record", "run", "host_tensor", "_to_copy", "_host_to_device", "_local_scalar_dense"}


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with with_libraries(compile_after=1e9):  # nothing is recorded but where a test says so
        yield


def _called(program: Callable[[], object]) -> set[str]:
    """The names of torchport's Python functions that a program calls."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and ("torchport" in code.co_filename or code.co_filename.startswith("<")):
            names.add(code.co_name)

    sys.setprofile(note)
    try:
        program()
    finally:
        sys.setprofile(None)
    return names


def _image(device: str) -> torch.Tensor:
    return torch.sin(torch.arange(12.0)).reshape(3, 4).to(device)


def _loop(device: str) -> list[float]:
    x = torch.ones([], device=device)
    said = []
    while x.item() < 20:
        x = x * 1.5 + 1
        said.append(x.item())
    return said


def _written(device: str) -> list[float]:
    x, said = _image(device), []
    for k in range(4):
        x.mul_(0.5 + k)
        said.append(x.sum().item())
    return said


def _of_views(device: str) -> list[float]:
    x = _image(device)
    return [(y + y).sum().item() + (y + x[:3, :3]).sum().item() for y in (x[:, :3], x[:, 1:], x.t()[:3, :3])]


def _of_numbers(device: str) -> list[float]:
    x = _image(device)[0]
    numbers = (1, 2, 1.0, 0.0, -0.0, 0.1, float("inf"), float("-inf"), True)
    return [(x[:1] * number).sum().item() for number in numbers for _ in range(2)]


def _of_factories(device: str) -> list[Any]:
    made = []
    for n in (2, 3, 2):
        made.append(torch.full((n,), 0.5, device=device).sum().item())
        made.append(torch.arange(n, device=device).tolist())
        made.append(torch.zeros(n, 2, dtype=torch.bool, device=device).any().item())
    return made


def _of_gradients(device: str) -> list[Any]:
    said = []
    for k in range(3):
        x = _image(device).requires_grad_()
        loss = (x * x * (k + 1)).sum()
        said.append(loss.item())
        loss.backward()
        assert x.grad is not None
        said.append(x.grad.cpu().tolist())
    return said


def _of_the_host(device: str) -> list[Any]:
    said = []
    for k in range(4):
        seen = torch.tensor([[float(k), 1.0], [2.0, 3.0]], device=device)
        mask = torch.tensor([True, False]).to(device)
        scores = (seen @ seen.t())[mask[0].long()]
        said.append(scores.cpu().numpy().tolist())
        said.append(torch.as_tensor(k, device=device).item())
        said.append(scores.argmax().item())
    return said


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "until": _loop, "in place": _written, "views": _of_views, "numbers": _of_numbers, "factories": _of_factories,
    "gradients": _of_gradients, "from the host": _of_the_host,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_each_time_it_is_what_the_cpu_gives(program: Callable[[str], Any], mode: str) -> None:
    wanted = program("cpu")
    with torchport.mode(mode):
        for _ in range(5):
            assert repr(program("port")) == repr(wanted)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("name", ["until", "factories", "from the host"])
def test_no_python_kernel_runs_once_it_is_known(monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    program = PROGRAMS[name]
    with torchport.mode(mode):
        for _ in range(3):
            program("port")
        allowed = {"_to_copy"} if name == "from the host" else set()  # from bool to int64
        run: Any = direct.run
        in_python: list[Any] = []
        monkeypatch.setattr(direct, "run", lambda *call: in_python.append(call[1]) or run(*call))
        found = _called(lambda: program("port"))
    # Programs of other tests may have regions that begin with an operator of this one, which Python then looks at.
    anchors = {serial for serial, _ in regions.begun_with}
    assert not [kernel.op for kernel in in_python if kernel.serial not in anchors]
    assert in_python or not (found & PYTHON_KERNELS) - allowed
    assert "note_read" in found, "nothing was seen"


def test_a_path_is_recorded_and_compiled_though_its_rounds_begin_in_cpp() -> None:
    x = _image("port")

    def round_() -> float:
        y = x
        for k in range(10):
            y = y * (k + 0.5) - x
        return y.sum().item()

    wanted = [round_() for _ in range(3)]
    names = _called(round_)
    assert "reopen" in names, names
    before = metrics.counter("TakenOver")
    with costs.ignored():
        said = [round_() for _ in range(8)]
        assert torchport.compiled(wait=True)
        said += [round_() for _ in range(4)]
    assert set(said) == set(wanted)
    assert metrics.counter("TakenOver") > before
    before = metrics.counter("InterpretedOps")
    assert round_() == wanted[0]
    assert metrics.counter("InterpretedOps") == before, "the compiled computation was not used"


def test_warm_compiles_it() -> None:
    x = _image("port")

    def round_() -> float:
        y = x
        for _ in range(12):
            y = torch.tanh(y) + 0.25
        return y.sum().item()

    wanted, *_ = [round_() for _ in range(4)]
    torchport.warm(round_)
    before = metrics.counter("Execute")
    assert round_() == wanted
    assert metrics.counter("Execute") == before + 1


def test_other_settings_hold_at_once() -> None:
    x = torch.ones(3, device="port")

    def round_() -> list[float]:
        return (x * 3 - 1).tolist()

    assert [round_() for _ in range(4)] == [[2.0] * 3] * 4
    with config.override(tiers="off"):
        before = metrics.counter("Execute")
        assert round_() == [2.0] * 3
        assert metrics.counter("Execute") == before + 1
    before = metrics.counter("Execute")
    torchport.use("add_sub")
    try:
        assert (x + x).tolist() == [2.0] * 3
        assert metrics.counter("Execute") == before + 1
    finally:
        torchport.use("reference")
    assert round_() == [2.0] * 3


def test_sizes_that_come_once_leave_nothing_between_the_values() -> None:
    """What is kept of each size would keep the memory of values of one size from serving the next."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def grown(first: int, last: int) -> float:
        before = resident()
        for n in range(first, last):
            torch.zeros(n).to("port").sum().item()
        return resident() - before

    grown(1, 50)
    assert grown(50, 4000) < 15  # MiB: it was 45 with an allocation for each size


def test_errors_are_the_cpus_and_name_the_line() -> None:
    x, y = torch.ones(3, device="port"), torch.ones(2, device="port")
    for _ in range(3):
        assert (x + x).sum().item() == 6.0
        with pytest.raises(RuntimeError, match="must match the size") as caught:
            x.add(y)
        assert any("test_rounds_again.py" in note for note in caught.value.__notes__)


def test_an_interrupt_where_a_round_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, device="port")

    def round_() -> float:
        return (x + 1).sum().item()

    assert [round_() for _ in range(3)] == [6.0] * 3
    with monkeypatch.context() as patch:

        def interrupted(*_: Any) -> bool:
            raise KeyboardInterrupt

        patch.setattr(DeviceRuntime, "is_worth_recording", interrupted)
        with pytest.raises(KeyboardInterrupt):
            round_()
    assert [round_() for _ in range(3)] == [6.0] * 3


def test_threads_have_paths_of_their_own() -> None:
    wanted = _loop("cpu")
    said: list[bool] = []

    def work() -> None:
        said.extend(_loop("port") == wanted for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert said == [True] * 80


def test_a_trie_that_is_dropped_is_freed() -> None:
    def nodes() -> int:
        metrics.metrics.reset()  # the report has the newest places at which something was computed
        gc.collect()
        return sum(type(one) is Node for one in gc.get_objects())

    counts = []
    for _ in range(4):
        _loop("port")
        _loop("port")
        with config.override(tiers="off"):
            _loop("port")  # nodes
        torchport.use("add_sub")
        torchport.use("reference")
        (torch.ones(1, device="port") + 1).item()
        counts.append(nodes())
    assert counts[-1] <= counts[1], counts


# -- copies --------------------------------------------------------------------------------------------------------
SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "a number": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "with gaps": lambda: torch.arange(12.0)[::2],
    "channels last": lambda: torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "integers": lambda: torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
    "truths": lambda: torch.tensor([True, False]),
    "halves": lambda: torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0, 3),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "large": lambda: torch.arange(40_000.0),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_copy_to_the_device_and_back(source: Callable[[], torch.Tensor]) -> None:
    host = source()
    for dtype in (None, torch.complex128 if host.is_complex() else torch.float64):
        options: Any = {} if dtype is None else {"dtype": dtype}
        there = host.to("port", **options)
        wanted = host.to("cpu", copy=True, **options)
        back = there.cpu()
        assert (there.dtype, tuple(there.shape), there.stride()) == (wanted.dtype, tuple(wanted.shape), wanted.stride())
        assert back.resolve_conj().tolist() == wanted.resolve_conj().tolist()
        assert back.requires_grad == wanted.requires_grad
        assert there.to("cpu", torch.complex64 if host.is_complex() else torch.float32).dtype in (
            torch.complex64, torch.float32,
        )  # fmt: skip


def test_copies_share_no_memory_with_what_they_are_copies_of() -> None:
    host = torch.ones(4)
    for _ in range(3):
        there = host.to("port")
        first = there.cpu()
        host.add_(1)
        there.mul_(3)
        second = there.cpu()
        second.sub_(100)
        assert there.tolist() == [3 * value for value in first.tolist()]
        first.zero_()
        assert there.cpu().tolist() == [3 * (value - 1) for value in host.tolist()]


def test_a_batch_ends_a_path_and_a_number_does_not() -> None:
    x = torch.ones(3, device="port")
    for _ in range(3):
        y = x + 1
        interpreted = threads.of(0).direct
        z = torch.tensor(2.0).to("port")
        assert threads.of(0).direct == interpreted > 1
        batch = torch.ones(3).to("port")
        assert threads.of(0).direct == 0
        assert (y * z + batch).tolist() == [5.0] * 3


def test_copies_are_counted() -> None:
    (torch.ones(2, device="port") + 1).tolist()
    before = metrics.counter("TransferToDevice")
    torch.tensor([1.0, 2.0], device="port")
    torch.ones(3).to("port")
    assert metrics.counter("TransferToDevice") == before + 2


def test_gradients_go_through_copies() -> None:
    for _ in range(3):
        host = torch.ones(3, requires_grad=True)
        (host.to("port") * torch.arange(3.0, device="port")).cpu().sum().backward()
        assert host.grad is not None
        assert host.grad.tolist() == [0.0, 1.0, 2.0]


def test_tensors_without_contents_are_zeros() -> None:
    for _ in range(3):
        x = torch.ones(2, 3, device="port")
        made = [
            torch.empty(2, 3, device="port"), torch.empty_like(x.t()), x.new_empty(4), torch.empty((), device="port"),
            torch.empty_strided((2, 3), (1, 2), device="port"), torch.empty(0, device="port"),
            torch.empty(1, 2, 2, 2, device="port", memory_format=torch.channels_last),
        ]  # fmt: skip
        assert [one.count_nonzero().item() for one in made] == [0] * 7
        assert made[1].stride() == torch.empty_like(torch.ones(2, 3).t()).stride()
        assert made[4].stride() == (1, 2)
        assert made[6].is_contiguous(memory_format=torch.channels_last)
        with pytest.raises(UnsupportedOp, match="more than once"):
            x.new_empty_strided((2, 2), (0, 1))


@pytest.mark.parametrize("name", ["xla", "inductor"])
def test_what_comes_from_the_host_while_an_engine_computes(name: str) -> None:
    if not torchport.get_backend(name).is_available():
        pytest.skip("the engine is not installed")
    weights = torch.linspace(-1, 1, 16).reshape(4, 4)

    def round_(device: str, k: int) -> float:
        x = torch.full((2, 4), float(k)).to(device)
        held = weights.to(device)
        for _ in range(5):
            x = torch.tanh(x @ held) + 0.5
        return round(x.sum().item(), 4)

    torchport.use(name)
    try:
        wanted = [round_("cpu", k) for k in range(4)]
        assert [round_("port", k) for k in range(4)] == wanted
        torchport.warm(round_, "port", 1)
        assert [round_("port", k) for k in range(4)] == wanted
        with torchport.mode("eager"):
            assert [round_("port", k) for k in range(4)] == wanted
        assert [round_("port", k) for k in range(4)] == wanted
    finally:
        torchport.use("reference")


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_inference_mode_is_no_reason_to_go_to_python(outside: Callable[[], Any]) -> None:
    x, y = _image("port"), torch.zeros(3, 4, device="port")

    def program() -> list[float]:
        with outside():
            y.mul_(0).add_(x).mul_(2).add_(1)
            scores = torch.full((4, 3), 0.5, device="port").mm((x + y[:1]).to(torch.float32))
            host = torch.tensor([1.0, 2.0, 3.0, 4.0]).to("port")
            return [*(scores * host).sum(0).cpu().tolist(), y[0].sum().item()]

    wanted = program()
    assert [program() for _ in range(3)] == [wanted] * 3
    assert not _called(program) & PYTHON_KERNELS
    kept = _made_inside(outside)
    kept.mul_(2)  # what was made inside may be used outside, as far as PyTorch allows it
    assert kept.tolist() == [6.0, 6.0]
    weights = torch.ones(2, device="port", requires_grad=True)
    (weights * kept.clone()).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [6.0, 6.0]


def _made_inside(outside: Callable[[], Any]) -> torch.Tensor:
    with outside():
        made = torch.ones(2, device="port") * 3
    return made.clone() if made.is_inference() else made


FIRST = """
import torch
from torch.nn import functional as F

def told(device):
    with torch.inference_mode():
        x = torch.arange(6.0).reshape(2, 3).to(device)
        heads = x.reshape(1, 1, 2, 3)
        seen = round(F.scaled_dot_product_attention(heads, heads, heads).sum().item(), 4)
        return seen, F.linear(x, x).tolist(), F.layer_norm(x, (3,)).cpu().sum().item(), torch.relu_(x).tolist()

print(told("port"))
print(told("cpu"))
"""


def test_inference_mode_may_be_how_a_process_begins() -> None:
    for said in said_without_and_with(FIRST):
        assert said[0] == said[1]
