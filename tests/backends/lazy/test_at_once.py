"""Factories, copies to another dtype and attention, where operators are interpreted at once: no Python kernel runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_support import compiles, said_without_and_with, with_libraries
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._python_dispatch import TorchDispatchMode

import torchport
from torchport.frontend.device import routes
from torchport.run import direct

pytestmark = compiles


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Eager mode is where nothing is recorded, ever."""
    with with_libraries(), torchport.mode("eager"):
        yield


def _image(device: str) -> torch.Tensor:
    return torch.arange(36.0).reshape(1, 2, 3, 6).to(device) / 7


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "full": lambda d: [torch.full((2, 3), value, device=d) for value in (1, 0.5, True)],
    "full of a dtype": lambda d: torch.full((2,), 3, dtype=torch.float16, device=d),
    "arange": lambda d: [torch.arange(5, device=d), torch.arange(1, 7, device=d), torch.arange(0, 1, 0.25, device=d)],
    "ones and zeros": lambda d: [torch.ones(2, 3, device=d), torch.zeros((), dtype=torch.bool, device=d)],
    "not pinned": lambda d: torch.ones(2, device=d, pin_memory=False),
    "on index 0": lambda d: torch.ones(2, device=d if d == "cpu" else "port:0"),
    "written to": lambda d: torch.zeros(3, device=d).add_(2)[1:].mul_(3),
    "a leaf": lambda d: torch.ones(3, device=d, requires_grad=True) * 2,
    "to integers": lambda d: _image(d).to(torch.int32),
    "to half": lambda d: [_image(d).half(), _image(d)[:, :1].double(), _image(d).to(torch.bfloat16)],
    "of a view": lambda d: [_image(d).transpose(1, 3).long(), _image(d)[..., ::2].int(), _image(d).mT.float()],
    "to another order": lambda d: _image(d).to(torch.float64, memory_format=torch.channels_last),
    "copied into a part": lambda d: _copied(torch.zeros(3, 4, device=d), (slice(1, None), slice(None, None, 2))),
    "copied into columns": lambda d: _copied(torch.zeros(3, 4, device=d).t(), (slice(1, 3),)),
    "copied into another dtype": lambda d: _copied(torch.zeros(2, 3, device=d, dtype=torch.int32), ()),
    "copied into a part of another dtype": lambda d: _copied(torch.zeros(2, 3, 2, device=d).half(), (..., 1)),
    "copied into a part of a part": lambda d: _copied(
        torch.zeros(4, 4, 4, device=d)[1:, :, 2], (slice(2), slice(1, 4))
    ),
    "copied from an expanded tensor": lambda d: _copied(
        torch.zeros(3, 4, device=d).t(), (), torch.ones(3, device=d).expand(4, 3)
    ),
}


def _copied(target: torch.Tensor, part: tuple[Any, ...], source: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What ``copy_`` into a part, and a write to it, leave behind: the target, its base, the source, and more views."""
    written = target[part] if part else target
    if source is None:
        source = torch.arange(float(written.numel())).reshape(written.shape).to(target.device) * 1.5
    result = written.copy_(source)
    assert result is written
    source = source + 0
    written.add_(1)
    base = target._base if target._base is not None else target
    return [target, base, written, source, base.reshape(-1), base.t() * 2 if base.dim() == 2 else base.mT * 2]


def _told(values: Any) -> list[Any]:
    values = values if isinstance(values, list) else [values]
    return [(v.detach().cpu().tolist(), v.dtype, v.stride(), tuple(v.shape), v.requires_grad) for v in values]


def _in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a Python kernel that runs an operator is an error."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a Python kernel ran")

    monkeypatch.setattr(direct, "run", refused)
    monkeypatch.setattr(routes, "call_autograd_kernel", refused)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_once_it_is_known_no_python_kernel_runs(monkeypatch: pytest.MonkeyPatch, program: Callable[[str], Any]) -> None:
    wanted = _told(program("cpu"))
    assert _told(program("port")) == wanted
    _in_cpp(monkeypatch)
    assert _told(program("port")) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_default_dtype_is_the_programs(dtype: torch.dtype) -> None:
    default = torch.get_default_dtype()
    assert torch.full((2,), 1.5, device="port").dtype is torch.arange(0.0, 2.0, device="port").dtype is default
    try:
        torch.set_default_dtype(torch.float64)
        for _ in range(3):
            assert torch.full((2,), 1.5, device="port").dtype is torch.float64
            assert torch.arange(0.0, 2.0, device="port").dtype is torch.float64
    finally:
        torch.set_default_dtype(default)
    assert torch.full((2,), 1, dtype=dtype, device="port").dtype is dtype


_PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads": lambda x: x[..., :4].view(2, 5, 2, 2).transpose(1, 2),
    "rows": lambda x: x[:, ::2].permute(2, 0, 1),
    "one dimension of two": lambda x: x[..., 3:9].view(10, 6).t(),
    "as integers": lambda x: x[0, ::2].view(torch.int32).t(),
    "a part of a part": lambda x: x[1:].transpose(1, 2)[:, 2:8].unflatten(1, (3, 2)).transpose(0, 2),
    "complex": lambda x: torch.view_as_complex(x.view(2, 5, 6, 2))[..., ::2].transpose(0, 1),
}
_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "copy_": lambda q: q.copy_(torch.arange(q.numel()).reshape(q.shape).to(q.device)),
    "mul_": lambda q: q.mul_(3),
    "masked_fill_": lambda q: q.masked_fill_(q.abs() > 60, 7),
    "cumsum_": lambda q: q.cumsum_(0),
    "tril_": lambda q: q.tril_(),
    "index_copy_": lambda q: q.index_copy_(1, torch.tensor([0]).to(q.device), q[:, 1:2] * 2),
}


@pytest.mark.parametrize("write", _WRITES)
@pytest.mark.parametrize("part", _PARTS)
def test_what_is_written_to_a_view_of_a_part_finds_its_way_back(part: str, write: str) -> None:
    """The strides of some results are not the part's, and the way back is by views that go by strides."""

    def program(device: str) -> list[Any]:
        x = (torch.arange(120.0).reshape(2, 5, 12).to(device) + 1) * 1.0
        q = _PARTS[part](x)
        _WRITES[write](q)
        _WRITES[write](q)
        return _told([x, torch.view_as_real(q) if q.is_complex() else q, x.view(-1), x[0].t() * 2])

    wanted = program("cpu")
    for _ in range(4):
        assert program("port") == wanted


def test_a_copy_into_a_part_shares_no_memory_with_its_source() -> None:
    for _ in range(3):  # the first goes to Python
        source = torch.ones(3, 4, device="port") + 0
        target = torch.zeros(4, 3, device="port")
        target.t().copy_(source)
        source.add_(1)
        assert target.tolist() == [[1.0] * 3] * 4
        target.mul_(5)
        assert source.tolist() == [[2.0] * 4] * 3


def test_a_copy_to_where_elements_share_memory_is_refused() -> None:
    for _ in range(3):
        target = torch.zeros(3, device="port").expand(2, 3)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            target.copy_(torch.ones(2, 3, device="port"))
        overlapping = torch.zeros(5, device="port").as_strided((3, 3), (1, 1))
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            overlapping.copy_(torch.ones(3, 3, device="port"))
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.zeros(3).expand(2, 3).copy_(torch.ones(2, 3))


def test_a_part_may_be_copied_from_the_rest() -> None:
    def program(device: str) -> list[Any]:
        x = torch.arange(12.0, device=device).reshape(3, 4)
        x[0] = x[1]
        x[:, 1] = x[:, 2]
        x[1:].copy_(x[1:].clone().flip(0))
        x[0:0, 1:2].copy_(torch.ones(0, 1, device=device))
        return x.tolist()

    for _ in range(3):
        assert program("port") == program("cpu")


def test_gradients_go_through_a_copy_into_a_part() -> None:
    def program(device: str) -> list[Any]:
        w = torch.arange(1.0, 4.0, device=device).requires_grad_()
        x = torch.zeros(2, 3, device=device)
        x[1] = w * w
        x[0].copy_(x[1].detach())
        (x * x).sum().backward()
        assert w.grad is not None
        return [x.tolist(), w.grad.tolist(), x._version, x.requires_grad]

    for _ in range(3):
        assert program("port") == program("cpu")


def test_numbers_of_the_programs_own_keep_what_they_say() -> None:
    """A CPU tensor without dimensions may stand beside the device's, also as a conjugate or a negative."""

    def program(device: str) -> list[Any]:
        x = torch.arange(3.0, device=device).to(torch.complex64) * (1 + 2j)
        conjugate, part = torch.tensor(1 + 2j).conj(), torch.tensor(1 + 2j).conj().imag
        assert conjugate.is_conj()
        assert part.is_neg()
        weight = torch.tensor(3.0, requires_grad=True)
        y = x.real * weight - torch._efficientzerotensor(()) - weight
        y.sum().backward()
        assert weight.grad is not None
        said = [(x * conjugate).tolist(), (x.real + part).tolist(), torch.stack([x.imag]).mul(part).tolist()]
        return [*said, y.tolist(), weight.grad.tolist(), (x * 2 - 1.5 + True).tolist()]

    for _ in range(3):
        assert program("port") == program("cpu")


@pytest.mark.parametrize("on", ["autocast", "mode", "transform", "inference"])
def test_what_is_on_in_the_program_is_heeded_after_it_was_off(on: str) -> None:
    """C++ looks for the dispatch keys of what is on (``is_default``)."""

    def program(device: str) -> list[Any]:
        x, y = torch.ones(2, 2, device=device), torch.full((2, 2), 3.0, device=device)
        if on == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return [(x + y).tolist(), str((x + y).dtype)]
        if on == "mode":
            with _Named() as mode:
                said = (x + y).tolist()
            return [said, [name for name in mode.names if name == "add.Tensor"]]
        if on == "transform":
            return [torch.func.vmap(torch.add)(x, y).tolist(), torch.func.grad(lambda t: (t * y).sum())(x).tolist()]
        with torch.inference_mode():
            return [(x + y).tolist(), torch.is_inference_mode_enabled()]

    for _ in range(3):
        x = torch.ones(2, 2, device="port")
        assert (x + x).tolist() == [[2.0, 2.0], [2.0, 2.0]]
        assert program("port") == program("cpu")


class _Named(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def test_a_backend_may_get_a_kernel_of_an_operator_that_was_interpreted() -> None:
    """C++ remembers that a runtime interprets an operator, until the backend's kernels change."""
    runtime: Any = torchport.run.device_runtime.runtimes.get(0)
    x = torch.ones(3, device="port")
    for _ in range(3):
        assert x.neg().tolist() == [-1.0] * 3
    handle = runtime.kernels.impl("aten::neg", "Dense", lambda one: type(one)(one.device, one.spec, one.tensor * 7))
    try:
        for _ in range(3):
            assert x.neg().tolist() == [7.0] * 3
    finally:
        handle.remove()
    for _ in range(3):
        assert x.neg().tolist() == [-1.0] * 3


def test_threads_have_traces_of_their_own() -> None:
    """C++ remembers the trace of each thread."""
    said: list[list[float]] = []

    def run(at: int) -> None:
        x = torch.full((3,), float(at), device="port")
        for _ in range(20):
            x = x + 1
        said.append(x.tolist())

    for _ in range(2):  # threads that have ended leave their numbers, and memory, to others
        threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        run(10)
        for thread in threads:
            thread.join()
    assert sorted(said) == sorted([[at + 20.0] * 3 for at in (0, 1, 2, 3, 10)] * 2)


def test_a_finalizer_may_compute_when_its_thread_is_ending() -> None:
    """``threading.local`` is gone then, and what C++ knew of the thread with it."""
    program = """
import threading, torch, torchport
torchport.use("reference")
torchport.config.tiers, torchport.config.compile_after = "auto", 1e9
said, of_thread = [], threading.local()

class Holds:
    def __init__(self):
        self.x = torch.arange(9.0).to("port") * 2
    def __del__(self):
        said.append((self.x * 2 + 1).sum().item())

def run():
    for _ in range(4):
        one = Holds()
        (one.x + 1).sum().item()
    of_thread.one = one

for _ in range(10):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
print(len(said), set(said))
"""
    assert said_without_and_with(program) == [["40 {153.0}"]] * 2


def test_what_the_cpu_refuses_is_refused_with_the_users_line() -> None:
    torch.full((2,), 1, device="port")
    with pytest.raises(RuntimeError, match="negative") as caught:
        torch.full((-2,), 1, device="port")
    assert any("test_at_once.py" in note for note in caught.value.__notes__)


def test_gradients_go_through_a_copy() -> None:
    def gradient(device: str) -> Any:
        x = torch.arange(4.0).to(device).requires_grad_()
        (x.double() * torch.full((4,), 3.0, device=device)).sum().backward()
        assert x.grad is not None
        return x.grad.dtype, x.grad.tolist()

    for _ in range(3):
        assert gradient("port") == gradient("cpu")


# -- attention -----------------------------------------------------------------------------------------------------
def _heads(device: str, rows: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.sin(torch.arange(2 * 3 * rows * 8, dtype=torch.float64)).reshape(2, 3, rows, 8)
    return made.to(dtype).to(device)


def _to_itself(x: torch.Tensor) -> torch.Tensor:
    return attend(x, x, x)


ATTENTION: dict[str, Callable[[str], torch.Tensor]] = {
    "plain": lambda d: attend(_heads(d), _heads(d, 7), _heads(d, 7)),
    "causal": lambda d: attend(_heads(d), _heads(d), _heads(d), is_causal=True),
    "scaled": lambda d: attend(_heads(d), _heads(d), _heads(d), scale=0.3),
    "a mask": lambda d: attend(_heads(d), _heads(d, 7), _heads(d, 7), _heads(d, 5)[0, 0, :, :7]),
    "a mask of truths": lambda d: attend(_heads(d), _heads(d), _heads(d), _heads(d)[:, :1, :, :5] > -0.9),
    "a mask in columns": lambda d: attend(_heads(d), _heads(d), _heads(d), _heads(d)[0, 0, :, :5].t()),
    "heads apart": lambda d: _to_itself(_heads(d).transpose(1, 2).contiguous().transpose(1, 2)),
    "columns first": lambda d: _to_itself(_heads(d, 8).mT),
    "halves": lambda d: _to_itself(_heads(d, dtype=torch.bfloat16)),
    "doubles": lambda d: _to_itself(_heads(d, dtype=torch.float64)),
}
WRITTEN_OUT: dict[str, Callable[[str], torch.Tensor]] = {
    "three dimensions": lambda d: attend(_heads(d)[0], _heads(d)[0], _heads(d)[0]),
    "shared keys": lambda d: attend(_heads(d), _heads(d)[:, :1], _heads(d)[:, :1], enable_gqa=True),
    "one key for all": lambda d: attend(_heads(d), _heads(d)[:, :1], _heads(d)[:, :1]),
    "no rows": lambda d: attend(_heads(d)[:, :, :0], _heads(d), _heads(d)),
    "no keys": lambda d: attend(_heads(d), _heads(d)[:, :, :0], _heads(d)[:, :, :0]),
    "a mask with a gradient": lambda d: attend(
        _heads(d), _heads(d), _heads(d), _heads(d)[0, 0, :, :5].clone().requires_grad_()
    ),
}


@pytest.mark.parametrize("program", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention_is_chosen_without_python(monkeypatch: pytest.MonkeyPatch, program: Any) -> None:
    wanted = program("cpu")
    for _ in range(2):
        torch.testing.assert_close(program("port").cpu(), wanted, equal_nan=True)
    _in_cpp(monkeypatch)
    found = program("port")
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found.cpu(), wanted, equal_nan=True)


@pytest.mark.parametrize("program", WRITTEN_OUT.values(), ids=WRITTEN_OUT.keys())
def test_what_the_fused_operator_does_not_take_is_written_out(program: Any) -> None:
    for _ in range(3):
        torch.testing.assert_close(program("port").cpu(), program("cpu"), equal_nan=True)


@pytest.mark.parametrize(("mode", "masked"), [*itertools.product(("eager", "lazy"), (False, True))])
def test_attention_has_gradients(mode: str, masked: bool) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        q, k, v = (_heads(device).requires_grad_() for _ in range(3))
        attend(q, k, v, _heads(device)[0, 0, :, :5] if masked else None).square().sum().backward()
        return [x.grad.cpu() for x in (q, k, v)]  # type: ignore[union-attr]

    with torchport.mode(mode):
        for _ in range(3):
            torch.testing.assert_close(gradients("port"), gradients("cpu"))


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_program_may_choose_how_attention_is_computed(mode: str) -> None:
    """``sdpa_kernel`` is heeded: the operator that is fused has no derivative of its derivative."""

    def program(device: str) -> torch.Tensor:
        q, k, v = (torch.arange(40.0).add(at).sin().reshape(1, 2, 5, 4).to(device).requires_grad_() for at in range(3))
        (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), q)[0].cpu()

    with torchport.mode(mode):
        for _ in range(3):
            with sdpa_kernel(SDPBackend.MATH):
                torch.testing.assert_close(program("port"), program("cpu"))
        for device in ("cpu", "port"):
            with pytest.raises(RuntimeError, match="flash_attention_for_cpu_backward is not implemented"):
                program(device)


def test_a_backend_may_change_its_attention() -> None:
    """What is known of a backend's kernels is asked again when they change."""
    runtime: Any = torchport.run.device_runtime.runtimes.get(0)
    q = _heads("port")
    wanted = attend(q, q, q)

    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return query * 2

    handle = runtime.kernels.impl("aten::scaled_dot_product_attention", "Autograd", twice)
    try:
        torch.testing.assert_close(attend(q, q, q).cpu(), q.cpu() * 2)
    finally:
        handle.remove()
    torch.testing.assert_close(attend(q, q, q).cpu(), wanted.cpu())
