"""Arithmetic on lists of tensors that is put off (``native/put_off.h``): nobody sees a difference but its time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import compiles, with_libraries
from torch.utils._python_dispatch import TorchDispatchMode

import torchport
from torchport.run import direct

pytestmark = compiles

Tensors = list[torch.Tensor]
SHAPES = [(70_001,), (3,), (257, 129), (), (2, 3, 5), (200_003,)]
"""Less than a piece and more, and no multiple of any vector."""


def _settle() -> int:
    """How many calls were put off, which are computed now."""
    return sum(settle(0) for settle in direct.settle)  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with with_libraries(), torchport.mode("eager"):
        yield
        _settle()


def _made(device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Results of operators, which is what only C++ has seen."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.rand(shape, generator=generator).to(dtype).to(device) for shape in SHAPES]
    made = [one + 0.5 for one in numbers]  # Python runs the first operators, until one is not known
    return [one * 1.0 for one in made]


def _same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


CALLS: dict[str, Callable[[Tensors, Tensors, Tensors], Any]] = {
    "add": lambda x, y, z: torch._foreach_add_(x, y, alpha=0.3),
    "add, number": lambda x, y, z: torch._foreach_add_(x, 1e-3),
    "add, numbers": lambda x, y, z: torch._foreach_add_(x, [0.1 * at for at in range(len(x))]),
    "add, whole number": lambda x, y, z: torch._foreach_add_(x, 2),
    "sub": lambda x, y, z: torch._foreach_sub_(x, y, alpha=2),
    "sub, number": lambda x, y, z: torch._foreach_sub_(x, 0.7),
    "mul": lambda x, y, z: torch._foreach_mul_(x, y),
    "mul, number": lambda x, y, z: torch._foreach_mul_(x, 0.999),
    "mul, numbers": lambda x, y, z: torch._foreach_mul_(x, [0.9, 0.8, 1.1, 1, 0.7, 1.2]),
    "div": lambda x, y, z: torch._foreach_div_(x, y),
    "div, number": lambda x, y, z: torch._foreach_div_(x, 0.37),
    "div, numbers": lambda x, y, z: torch._foreach_div_(x, [0.9, 0.8, 1.1, 1.3, 0.7, 1.2]),
    "addcmul": lambda x, y, z: torch._foreach_addcmul_(x, y, z, value=0.01),
    "addcmul, twice the same": lambda x, y, z: torch._foreach_addcmul_(x, y, y, value=0.01),
    "addcmul, numbers": lambda x, y, z: torch._foreach_addcmul_(x, y, z, [0.1, -0.2, 0.3, 0.4, 0.5, 0.6]),
    "addcdiv": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, value=-0.01),
    "addcdiv, numbers": lambda x, y, z: torch._foreach_addcdiv_(x, y, z, [-0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    "lerp": lambda x, y, z: torch._foreach_lerp_(x, y, 0.1),
    "lerp, far": lambda x, y, z: torch._foreach_lerp_(x, y, 0.9),
    "sqrt": lambda x, y, z: torch._foreach_sqrt_(x),
    "neg": lambda x, y, z: torch._foreach_neg_(x),
    "reciprocal": lambda x, y, z: torch._foreach_reciprocal_(x),
    "sqrt of others": lambda x, y, z: x.__setitem__(slice(None), torch._foreach_sqrt(y)),
    "sum of others": lambda x, y, z: x.__setitem__(slice(None), torch._foreach_add(y, z)),
    "product of others": lambda x, y, z: x.__setitem__(slice(None), torch._foreach_mul(y, 3.3)),
}


def _wild(device: str, seed: int, dtype: torch.dtype) -> Tensors:
    """Numbers of all sizes and signs, some next to zero, infinite, or none."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, torch.finfo(dtype).max], dtype=dtype)
    made = []
    for shape in SHAPES:
        numbers = torch.randn(shape, generator=generator, dtype=dtype)
        numbers = numbers * 10 ** torch.randint(-8, 8, shape, generator=generator).to(dtype)
        which = torch.randint(0, 200, shape, generator=generator)
        made.append(torch.where(which < 7, special[which.clamp(max=6)], numbers).to(device))
    return [one * 1.0 for one in [one + 0.0 for one in made]]


@pytest.mark.parametrize("make", [_made, _wild])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_each_is_put_off_and_gives_the_cpus_numbers(
    call: Callable[..., Any], dtype: torch.dtype, make: Callable[[str, int, torch.dtype], Tensors]
) -> None:
    lists = {device: [make(device, seed, dtype) for seed in range(3)] for device in ("cpu", "port")}
    for given_lists in lists.values():
        call(*given_lists)
    assert _settle() == 1
    for found, wanted in zip(lists["port"], lists["cpu"], strict=True):
        _same(found, wanted)
        for one, other in zip(found, wanted, strict=True):
            here = one.cpu()
            assert torch.equal(here[~here.isnan()].signbit(), other[~other.isnan()].signbit())


def test_what_is_not_arithmetic_is_computed_at_once() -> None:
    x, wanted = _made("port"), _made("cpu")
    for one in (x, wanted):
        torch._foreach_mul_(one, 2.0)
        torch._foreach_exp_(one)
    assert _settle() == 0
    _same(x, wanted)


def test_small_lists_are_computed_at_once() -> None:
    x = [torch.ones(3, device="port") + 1, torch.ones(100, device="port") + 1]
    torch._foreach_mul_(x, 2.0)
    assert _settle() == 0
    assert x[0].tolist() == [4.0] * 3


WRONG: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "a truth from numbers": lambda x, y: torch._foreach_sub_(x, True),
    "truths from numbers": lambda x, y: torch._foreach_sub_(x, [True] * len(x)),
    "a truth as a factor": lambda x, y: torch._foreach_add_(x, y, alpha=True),
    "a factor that is too large": lambda x, y: torch._foreach_add_(x, y, alpha=1e300),
    "a number that is too large": lambda x, y: torch._foreach_addcmul_(x, y, y, value=-1e300),
    "a weight that is too large": lambda x, y: torch._foreach_lerp_(x, y, 1e300),
    "a number with an imaginary part": lambda x, y: torch._foreach_mul_(x, 1j),
    "too few numbers": lambda x, y: torch._foreach_mul_(x, [1.0]),
    "too few tensors": lambda x, y: torch._foreach_mul_(x, y[:2]),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_what_the_cpu_refuses_is_refused_at_the_call_and_nothing_is_lost(call: Callable[..., Any]) -> None:
    x, y, wanted = _made("port"), _made("port", 1), _made("cpu")
    with pytest.raises(RuntimeError):
        call(wanted, _made("cpu", 1))
    wanted = _made("cpu")
    for one in (x, wanted):
        torch._foreach_add_(one, 1.0)
    with pytest.raises((RuntimeError, TypeError)):
        call(x, y)
    assert (torch.ones(3, device="port") + 1).tolist() == [2.0] * 3
    _same(x, wanted)


def test_numbers_that_are_none_are_taken() -> None:
    lists = {device: _made(device) for device in ("cpu", "port")}
    for one in lists.values():
        torch._foreach_mul_(one[:1], float("inf"))
        torch._foreach_add_(one, float("nan"))
    _same(lists["port"], lists["cpu"])


def test_results_have_the_cpus_strides() -> None:
    """Dimensions of size 1 have strides of their own."""

    def program(device: str) -> Tensors:
        x = torch.arange(50_000.0).to(device).reshape(1, 50_000, 1).transpose(0, 2)
        y = torch.arange(60_000.0).to(device).as_strided((300, 200), (1, 300))
        z = torch.arange(70_000.0).to(device).reshape(7, 1, 10, 1000)
        made = [one * 1.0 for one in (x, y, z, z.contiguous(memory_format=torch.channels_last))]
        return [*torch._foreach_neg(made), *torch._foreach_mul(made, 2.0)]

    wanted = program("cpu")
    for _ in range(2):
        _same(program("port"), wanted)


def test_numbers_next_to_zero_are_what_they_were_at_the_call() -> None:
    def program(device: str, at_call: bool) -> torch.Tensor:
        x = [torch.full((70_000,), 4e-39).to(device) * 1.0]
        x = [one * 1.0 for one in x]
        torch.set_flush_denormal(at_call)
        torch._foreach_mul_(x, 0.5)
        torch.set_flush_denormal(not at_call)
        found = x[0][:3].cpu()
        torch.set_flush_denormal(False)
        return found

    try:
        for at_call in (True, False):
            assert program("port", at_call).tolist() == program("cpu", at_call).tolist()
    finally:
        torch.set_flush_denormal(False)


def test_what_nobody_can_ask_for_is_not_computed() -> None:
    x, y = _made("port"), _made("port", 1)
    torch._foreach_mul_(x, 2.0)
    roots = torch._foreach_sqrt(x)
    torch._foreach_add_(y, roots)
    del x, roots
    assert _settle() == 3, "one list is held"
    torch._foreach_add_(y, 1.0)
    del y
    assert _settle() == 0
    z = _made("port")
    torch._foreach_add_(z, 1.0)
    made = torch.zeros(3, device="port")
    assert _settle() == 0, "new memory is not wanted on top"
    del made


def test_a_small_list_after_one_that_waits_is_not_shown_to_python() -> None:
    x, small = _made("port"), [one * 1.0 for one in _made("port")[1:2]]
    torch._foreach_mul_(x, 2.0)
    torch._foreach_mul_(small, 2.0)
    torch._foreach_mul_(small, 0.5)
    keys = [str(torch._C._dispatch_keys(torch._from_functional_tensor(one))) for one in small]
    assert all("DeferredInit" in one for one in keys)
    _same(small, _made("cpu")[1:2])


# -- who looks ------------------------------------------------------------------------------------------------------
LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a copy": lambda x: x.cpu(),
    "a number": lambda x: torch.tensor(x[5].item()),
    "an operator": lambda x: (x * 2).cpu(),
    "a view": lambda x: x[3:9].cpu(),
    "a view that is written to": lambda x: (x[3:9].zero_(), x.cpu())[1],
    "another tensor of it": lambda x: (x.detach().mul_(2), x.cpu())[1],
    "its text": lambda x: torch.tensor(list(repr(x).replace(", device='port:0'", "").encode())),
    "an in-place operator": lambda x: x.exp_().cpu(),
    "a write": lambda x: (x.copy_(torch.ones_like(x)), x.cpu())[1],
    "zeros": lambda x: (torch._foreach_zero_([x]), x.cpu())[1],
    "norms": lambda x: torch._foreach_norm([x])[0].cpu(),
    "out=": lambda x: torch.add(x, 1, out=torch.empty_like(x)).cpu(),
    "a mode that looks": lambda x: _under_a_mode(lambda: x + 1).cpu(),
    "inference mode": lambda x: _inferred(x).cpu(),
    "a gradient": lambda x: torch.autograd.grad((x.requires_grad_() * x).sum(), x)[0].cpu(),
    "another list": lambda x: torch._foreach_add([x[:40_000]], [x[1:40_001]])[0].cpu(),
    "itself": lambda x: torch._foreach_add([x], [x])[0].cpu(),
    "one tensor twice": lambda x: (torch._foreach_add_([x, x], 1.0), x.cpu())[1],
    "a deep copy": lambda x: __import__("copy").deepcopy(x).cpu(),
    "a compiled function": lambda x: torch.compile(lambda y: y + 1, backend="eager")(x).cpu(),
    "lazy mode": lambda x: _lazily(x).cpu(),
}


def _under_a_mode(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "foreach" not in str(func)
            assert "lerp" not in str(func)
            return func(*args, **(kwargs or {}))

    with Looks():
        return compute()


def _inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


def _lazily(x: torch.Tensor) -> torch.Tensor:
    with torchport.mode("lazy"):
        return x * 2 + 1


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_whoever_looks_sees_the_results(look: Callable[[torch.Tensor], Any]) -> None:
    def program(device: str) -> list[torch.Tensor]:
        x, y = _made(device), _made(device, 1)
        torch._foreach_mul_(x, 0.9)
        torch._foreach_lerp_(x, y, 0.1)
        roots = torch._foreach_sqrt(x)
        torch._foreach_addcdiv_(x, y, roots, value=-0.01)
        found = [look(x[0]), look(roots[5])]
        return [*found, *(one.detach().cpu() for one in (*x, *y, *roots))]

    wanted = program("cpu")
    for _ in range(2):
        for one, other in zip(program("port"), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_memory_that_others_have_is_not_written_later() -> None:
    """A view, NumPy's array, or a second tensor: whoever has one reads it whenever they like."""
    x = _made("port")
    view, shared = x[0][:5], x[2].numpy() if hasattr(x[2], "numpy") and x[2].device.type == "cpu" else None
    torch._foreach_add_(x, 1.0)
    assert _settle() == 0
    assert shared is None
    assert torch.equal(view.cpu(), x[0].cpu()[:5])


def test_what_is_read_may_be_written_afterwards() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x, y = _made(device), _made(device, 1)
        torch._foreach_add_(x, y)
        torch._foreach_mul_(y, 2.0)  # in place, of what is still to be read
        y[0].zero_()
        torch._foreach_add_(x, y)
        del y
        return [one.cpu() for one in x]

    for one, other in zip(program("port"), program("cpu"), strict=True):
        assert torch.equal(one, other)


def test_more_calls_than_are_kept_and_other_lists() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x, y, few = _made(device), _made(device, 1), _made(device, 2)[:1]
        for at in range(150):
            torch._foreach_mul_(x, 1.001)
            torch._foreach_add_(x, y, alpha=0.01)
            if at % 40 == 3:
                torch._foreach_add_(few, 1.0)
                torch._foreach_sub_(y, [*few, *x[1:]])
                torch._foreach_add_(x[:3], y[:3])
        return [one.cpu() for one in (*x, *y, *few)]

    for one, other in zip(program("port"), program("cpu"), strict=True):
        assert torch.equal(one, other)


Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*CALLS, "look", "view", "part", "mixed", "drop", "keep"]),
        st.integers(0, 3), st.integers(0, 3), st.integers(0, 3),
    ),
    max_size=14,
)  # fmt: skip


def _run(device: str, steps: Sequence[Step]) -> list[torch.Tensor]:
    lists = [_made(device, seed) for seed in range(4)]
    seen: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for name, a, b, c in steps:
        x, y = lists[a], lists[b]
        if name == "look":
            seen.append(x[c].cpu().clone())
        elif name == "view":
            kept.append(x[0][c : c + 4])
        elif name == "part":
            x[0][c : c + 4].mul_(0.5)
        elif name == "mixed":
            torch._foreach_add_([*x[:2], *y[2:]], 0.25)
        elif name == "drop":
            lists[a] = [one * 1 for one in y]
        elif name == "keep":
            kept.append(x[c].detach())
        else:
            CALLS[name](x, y, lists[c])
    return [*seen, *(one.cpu() for one in kept), *(one.cpu() for part in lists for one in part)]


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_program_gives_what_the_cpu_gives(steps: list[Step]) -> None:
    for one, other in zip(_run("port", steps), _run("cpu", steps), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- optimizers -----------------------------------------------------------------------------------------------------
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=1e-2, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, **k),
    "AMSGrad": lambda p, **k: torch.optim.Adam(p, lr=1e-2, amsgrad=True, maximize=True, **k),
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
    "plain SGD": lambda p, **k: torch.optim.SGD(p, lr=1e-2, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=1e-2, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=1e-2, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, lr=1e-2, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, lr=1e-2, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, lr=1e-2, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, lr=1e-2, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, lr=1e-2, **k),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_give_the_cpus_numbers(make: Callable[..., torch.optim.Optimizer], groups: int) -> None:
    def program(device: str) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(one.to(device)) for one in _made("cpu")]
        parts: Any = parameters if groups == 1 else [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.1}]
        optimizer = make(parts, foreach=True)
        for step in range(5):
            for parameter, noise in zip(parameters, _made(device, step + 1), strict=True):
                parameter.grad = noise * parameter.detach()
            optimizer.step()
        return [one.detach().cpu() for one in parameters]

    for one, other in zip(program("port"), program("cpu"), strict=True):
        assert torch.equal(one, other)


def test_a_step_of_adam_is_put_off_as_a_whole() -> None:
    parameters = [torch.nn.Parameter(one.to("port")) for one in _made("cpu")]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.1
        optimizer.step()
        count = _settle()
    assert count == 8


# -- where nobody looks ------------------------------------------------------------------------------------------------
def test_other_threads_see_the_results() -> None:
    wanted = _made("cpu")
    for _ in range(20):
        torch._foreach_mul_(wanted, 1.01)
    found: list[list[torch.Tensor]] = []

    def look(x: Tensors) -> None:
        found.append([one.cpu() for one in x])

    x = _made("port")
    for _ in range(20):
        torch._foreach_mul_(x, 1.01)
    workers = [threading.Thread(target=look, args=(x,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == len(workers)
    for one in found:
        _same(one, wanted)


def test_threads_compute_their_own() -> None:
    results: dict[int, Tensors] = {}

    def work(seed: int) -> None:
        x, y = _made("port", seed), _made("port", seed + 100)
        for at in range(30):
            torch._foreach_mul_(x, 1.001)
            torch._foreach_add_(x, y, alpha=0.01)
            if at % 7 == seed % 7:
                x[0].cpu()
        results[seed] = [one.cpu() for one in x]

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed in range(4):
        x, y = _made("cpu", seed), _made("cpu", seed + 100)
        for _ in range(30):
            torch._foreach_mul_(x, 1.001)
            torch._foreach_add_(x, y, alpha=0.01)
        _same(results[seed], x)


def test_a_fork_while_another_thread_computes() -> None:
    """A child has none of the other threads, and waits for none."""
    program = """
import os, signal, threading, torch, torchport
torchport.use("reference")
def work(stop):
    x = [torch.ones(3_000_000).to("port") * 1.0]
    x = [one * 1.0 for one in x]
    while not stop.is_set():
        for _ in range(10):
            torch._foreach_mul_(x, 1.0)
        x[0][:1].cpu()
with torchport.mode("eager"):
    small = [torch.ones(50_000).to("port") * 1.0]
    small = [one * 1.0 for one in small]
    stop = threading.Event()
    other = threading.Thread(target=work, args=(stop,))
    other.start()
    for at in range(20):
        torch._foreach_add_(small, 1.0)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                small[0][:3].cpu()
            except Exception:  # the device may say that it is the parent's
                pass
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status == 0, status
    stop.set()
    other.join()
    assert small[0][:2].tolist() == [21.0, 21.0]
    small = [one * 1.0 for one in small]
    small = [one * 1.0 for one in small]
    torch._foreach_add_(small, 1.0)
    print(sum(settle(0) for settle in __import__("torchport.run.direct").run.direct.settle))
"""
    done = _run_program(program)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stdout + done.stderr[-3000:]


def _run_program(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "TORCHPORT_TIERS": "auto", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("kernels", ["", "avx2", "default"])
@pytest.mark.parametrize("threads", [1, 2])
def test_in_a_process_of_its_own(threads: int, kernels: str) -> None:
    """Numbers do not depend on how many threads compute; a program may end, or fork, while something is put off.

    PyTorch's kernels for old processors round a product before they add it.
    """
    program = f"""
import os, torch, torchport
from torchport.run import direct
torch.set_num_threads({threads})
torchport.use("reference")
def run(device):
    x = [torch.arange(n, dtype=torch.float32).to(device) / n + 1 for n in (300_001, 5, 40_000)]
    y = [one * 0.3 for one in x]
    x = [one + 0.5 for one in x]
    for _ in range(3):
        torch._foreach_lerp_(x, y, 0.1)
        torch._foreach_addcmul_(x, y, y, value=0.3)
        torch._foreach_addcdiv_(x, y, torch._foreach_sqrt(x), value=-0.01)
    return x
with torchport.mode("eager"):
    for _ in range(2):
        x, wanted = run("port"), run("cpu")
        print(sum(settle(0) for settle in direct.settle))
    x = run("port")
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(one.cpu(), other) for one, other in zip(x, wanted))
    kept = run("port")
print("ended")
"""
    done = _run_program(program, **({"ATEN_CPU_CAPABILITY": kernels} if kernels else {}))
    assert (done.returncode, done.stdout.split()[1:]) == (0, ["12", "ended"]), done.stdout + done.stderr[-3000:]
