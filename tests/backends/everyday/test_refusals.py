"""What the CPU refuses is refused at the call, what it takes is taken: named calls, and a seeded part of the sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import refusals
import torch
from everyday_support import needs_counters

import torchport


def _ones(device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, dtype=dtype, device=device)


def _write(write: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    def call(device: Any) -> Any:
        x = torch.arange(6.0, device=device)
        write(x)
        return x

    return call


CALLS: dict[str, Callable[[Any], Any]] = {
    "full_like of a number that does not fit": lambda d: torch.full_like(_ones(d), 1e300),
    "full_like of integers": lambda d: torch.full_like(_ones(d, torch.int64), 1e30),
    "full": lambda d: torch.full((2,), 70000.0, dtype=torch.float16, device=d),
    "full, large": lambda d: torch.full((300, 300), 1e300, device=d),
    "new_full": lambda d: _ones(d).new_full((2,), 300, dtype=torch.uint8),
    "fill_": lambda d: _ones(d).fill_(1e300),
    "fill_ of a number that fits": lambda d: _ones(d, torch.uint8).fill_(200.5),
    "masked_fill": lambda d: _ones(d).masked_fill(_ones(d) > 0, -1e300),
    "clamp": lambda d: _ones(d).clamp(max=1e300),
    "clamp to a complex number": lambda d: _ones(d).clamp(1j),
    "add has no such limit": lambda d: _ones(d) + 1e300,
    "pow_ of bool": lambda d: _ones(d, torch.bool).pow_(True),
    "shift in place by a bool": lambda d: _ones(d, torch.int32).__ilshift__(True),
    "copy_ of a number": lambda d: _ones(d).copy_(2),  # type: ignore[arg-type]
    "bool.add_ with a float alpha": lambda d: _ones(d, torch.bool).add_(_ones(d, torch.bool), alpha=0.5),
    "bernoulli_ of complex": lambda d: _ones(d, torch.complex64).bernoulli_(),
    "ceil of complex": lambda d: _ones(d, torch.complex64).ceil(),
    "a broadcast in place": lambda d: torch.ones(1, dtype=torch.int32, device=d).bitwise_and_(_ones(d, torch.int32)),
    "a cast in place": lambda d: _ones(d).eq_(torch.tensor([0.0, 1.0, 1.0, 2.0], device=d)),
    "a cast that is refused": lambda d: _ones(d, torch.int64).add_(0.5),
    "out= of a dtype that cannot hold it": lambda d: torch.sin(_ones(d), out=_ones(d, torch.int32)),
    "out= of a dtype that can": lambda d: torch.add(_ones(d), 1, out=_ones(d, torch.float64)),
    "out= that shares memory with itself": lambda d: torch.sin(_ones(d), out=torch.ones(1, device=d).expand(4)),
    "copy_ to an overlapping view": _write(lambda x: x[1:].copy_(x[:-1])),
    "add_ of an overlapping view": _write(lambda x: x[1:].add_(x[:-1])),
    "add_ of an overlapping view of a view": _write(lambda x: x[1:][1:].add_(x[:-1][:-1])),
    "add_ of a view beside it": _write(lambda x: x[:3].add_(x[3:])),
    "resize_ to a larger size": lambda d: _ones(d).mul_(2).resize_(3, 3).shape,
    "resize_ of what was written": lambda d: _ones(d).add_(_ones(d)).resize_(8).shape,
    "out= of another shape": lambda d: torch.kron(_ones(d), _ones(d), out=torch.ones(1, device=d)),
    "a rounding mode of None": lambda d: torch.div(_ones(d), 2, rounding_mode=None),
    "add_ of itself": _write(lambda x: x.add_(x)),
    "add_ of another view of the same": _write(lambda x: x[1:].add_(x[1:])),
    "an item of an overlapping view": _write(lambda x: x.__setitem__(slice(1, None), x[:-1])),
    "out= over an overlapping view": _write(lambda x: torch.sin(x[:-1], out=x[1:])),
    "index_add_ of itself": _write(lambda x: x.index_add_(0, torch.zeros(6, dtype=torch.int64, device=x.device), x)),
    "linspace of CPU tensors": lambda d: torch.linspace(torch.tensor(0.0), torch.tensor(1.0), 3, device=d) + 1,
    "linspace of one CPU tensor": lambda d: torch.linspace(0, torch.tensor(2), 3, device=d) + 1,
    "linspace of tensors there": lambda d: torch.linspace(*torch.ones(2, device=d), 3, device=d) + 1,
    "linspace of a vector": lambda d: torch.linspace(torch.ones(1), 1, 3, device=d),
    "logspace of CPU tensors": lambda d: torch.logspace(torch.tensor(0.0), torch.tensor(1.0), 3, device=d) * 2,
    "linspace on the CPU": lambda d: torch.linspace(*torch.ones(2, device=d), 3, device="cpu") + torch.ones(3),
    "where with a CPU number": lambda d: torch.where(_ones(d) > 0, torch.tensor(2.0), torch.tensor(3.0)),
    "new_full of a CPU tensor": lambda d: _ones(d).new_full((2,), torch.tensor(3.0)),  # type: ignore[arg-type]
    "full of a CPU tensor": lambda d: torch.full((2,), torch.tensor(3.0), device=d),  # type: ignore[call-overload]
    "rand_like on the CPU": lambda d: torch.rand_like(_ones(d), device="cpu") * 0 + torch.ones(4),
    "full_like on the CPU": lambda d: torch.full_like(_ones(d), 2, device="cpu") + torch.ones(4),
    "new_zeros on the CPU": lambda d: _ones(d).new_zeros(2, device="cpu") + torch.ones(2),
}


def judged(call: Callable[[Any], Any], device: Any) -> refusals.Difference:
    case = refusals.Case("named", "", "", lambda maker: call(maker.device))
    cpu, port = refusals.run(case, "cpu"), refusals.run(case, device)
    return refusals.Difference(refusals.judge(case, cpu, port), case, cpu, port)


@pytest.mark.parametrize("mode", ["lazy", "eager", "index above 0"])
def test_named_calls(device: torch.device, mode: str) -> None:
    place: Any = torch.device("port", _other_index()) if mode == "index above 0" else device
    with torchport.mode("eager" if mode == "eager" else "lazy"):
        differences = {name: judged(call, place) for name, call in CALLS.items()}
    wrong = [f"{name}: {difference}" for name, difference in differences.items() if difference.how != "same"]
    assert not wrong, "\n".join(wrong)


def _other_index() -> int:
    from torchport.backend.registry import registry
    from torchport.run.device_runtime import runtimes

    return runtimes.bind(registry.get("reference"), least=1)


@needs_counters
def test_a_number_is_checked_on_a_path_that_is_known(device: torch.device) -> None:
    def fill(number: float) -> torch.Tensor:
        return torch.zeros(3, device=device).fill_(number).add_(1.0).cpu()

    for number in (2.5, 3.5, 4.5, 5.5):
        assert fill(number)[0] == number + 1
    torchport.metrics.reset()
    assert fill(6.5)[0] == 7.5
    assert torchport.metrics.counter("Compile") == 0, "still one computation for every number of that size"
    with pytest.raises(RuntimeError, match="without overflow"):
        fill(1e300)
    assert fill(300.5)[0] == 301.5


def test_a_view_is_checked_on_a_path_that_is_known(device: torch.device) -> None:
    """Views that are values by now look alike, whether they overlap or not."""

    def add(first: slice, second: slice) -> torch.Tensor:
        x = torch.arange(8.0, device=device)
        a, b = x[first], x[second]
        torchport.sync()
        a.add_(b)
        return x.cpu()

    for _ in range(4):
        assert add(slice(0, 4), slice(4, 8)).tolist() == [4, 6, 8, 10, 4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="single memory location"):
        add(slice(0, 4), slice(2, 6))


@pytest.mark.parametrize("default", [False, True])
def test_linspace_of_tensors_in_compiled_code(device: torch.device, fresh_compiler: None, default: bool) -> None:
    def program(low: torch.Tensor, high: torch.Tensor, place: Any) -> torch.Tensor:
        return torch.linspace(low, high, 4, device=place) * 2 + torch.logspace(low, 1.0, 4, device=place)

    low, high = torch.tensor(0.5), torch.tensor(2.0)
    want = program(low, high, "cpu")
    torch.set_default_device(device if default else None)
    got = torch.compile(program, backend="torchport")(low, high, None if default else device)
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_ldexp_in_place_of_integers_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, device=device).to(dtype)
    with pytest.raises(RuntimeError, match="ldexp can't be cast to the desired output type"):
        x.ldexp_(torch.ones(3, device=device))
    assert torch.equal(x.cpu(), torch.ones(2, 3).to(dtype))


def _differences(cases: Sequence[refusals.Case], backend: str) -> list[str]:
    _, differences = refusals.sweep(iter(cases))
    return [str(difference) for difference in differences if refusals.reason(difference, backend) is None]


def test_a_part_of_the_sweep(device: torch.device, backend: str) -> None:
    cases = [case for number, case in enumerate(refusals.drawn_cases(1, seed=3)) if number % 8 == 0]
    assert len(cases) > 120
    assert not (found := _differences(cases, backend)), "\n".join(found)


@pytest.mark.slow
def test_the_sweep(device: torch.device, backend: str) -> None:
    found = _differences([*refusals.drawn_cases(10, seed=1), *refusals.error_cases()], backend)
    assert not found, "\n".join(found)


def test_a_known_call_with_out_is_not_asked_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.frontend.device import writes

    asked: list[Any] = []
    original = writes.refuse_as_cpu
    monkeypatch.setattr(writes, "refuse_as_cpu", lambda *call: asked.append(call) or original(*call))
    x, out = torch.ones(3, 7, device=device), torch.empty(3, 7, device=device)
    for _ in range(4):
        torch.add(x, 2, out=out)
        torch.mul(out, x, out=out)
        torch.cat([x, x], out=torch.empty(6, 7, device=device))
    assert out.tolist() == [[3.0] * 7] * 3
    assert len(asked) <= 3


def test_another_call_with_out_is_asked_though_one_like_it_is_known(device: torch.device) -> None:
    x, row = torch.ones(4, device=device), torch.zeros(8, device=device)
    torch.add(x, 1, out=torch.empty(4, device=device))
    torch.add(row[:4], x, out=row[4:])
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, 1, out=torch.empty(4, dtype=torch.int32, device=device))
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.add(x, 1, out=torch.empty(1, device=device).expand(4))
    with pytest.raises(RuntimeError, match="input tensor and the written-to tensor"):
        torch.add(row[1:5], x, out=row[2:6])
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, 1j, out=torch.empty(4, device=device))
    for _ in range(2):  # a tensor of its own gets another shape, a view does not
        torch.add(x, 1, out=torch.empty(0, device=device))
        with pytest.raises(torchport.UnsupportedOp, match="is a view"):
            torch.add(x, 1, out=row[:0])
