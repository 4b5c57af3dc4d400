"""Writes to what shares memory: kinds of view one by one, and random programs (:mod:`alias_fuzz`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from alias_fuzz import compare, expected, frontend_of, observe, raised, refused, run_seed, upstream
from alias_programs import Base, Holder, Program
from everyday_support import needs_counters

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    needs_counters,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own look at it
]

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda b: b,
    "t": lambda b: b.t(),
    "transpose": lambda b: b.transpose(0, 1),
    "permute": lambda b: b.permute(1, 0),
    "view": lambda b: b.view(4, 4),
    "reshape": lambda b: b.reshape(2, 8).reshape(4, 4),
    "expand": lambda b: b[:1].expand(4, 4),
    "slice": lambda b: b[:, :],
    "steps": lambda b: b[::2].repeat_interleave(2, 0)[:4],
    "select": lambda b: b[0],
    "narrow": lambda b: b.narrow(0, 0, 4),
    "unsqueeze": lambda b: b.unsqueeze(0)[0],
    "squeeze": lambda b: b.unsqueeze(-1).squeeze(-1),
    "diagonal": lambda b: b.diagonal(),
    "unfold": lambda b: b.unfold(0, 4, 1)[0],
    "as_strided": lambda b: b.as_strided((4, 4), (1, 4)),
    "split": lambda b: b.split(4)[0],
    "chunk": lambda b: b.chunk(1, 1)[0],
    "unbind": lambda b: b.unbind(1)[0],
    "flatten": lambda b: b.flatten().view(4, 4),
    "real": lambda b: torch.view_as_complex(b.view(4, 2, 2)).real.repeat(1, 2),
    "movedim": lambda b: b.movedim(0, 1),
    "swapaxes": lambda b: b.swapaxes(0, 1),
    "mT": lambda b: b.mT,
    "dtype": lambda b: b.view(torch.int32).view(torch.float32),
    "detach": lambda b: b.detach(),
    "contiguous": lambda b: b.contiguous(),
    "copied to new": lambda b: torch.empty_like(b).copy_(b),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "set, then the source": lambda h, source, b: (h.__setitem__(slice(None), source), b.mul_(2)),
    "copy, then the source": lambda h, source, b: (h.copy_(source), b.add_(1)),
    "the source, then set": lambda h, source, b: (b.add_(2), h.__setitem__(slice(None), source)),
    "each to the other": lambda h, source, b: (h.copy_(source), b.copy_(h.t()), h.t().add_(1)),
}


def check(fn: Callable[..., Any], place: torch.device, backend: str, tensors: list[torch.Tensor]) -> None:
    """The inputs, the results, and the inputs again after the results were written to, as in eager."""
    here, there = [t.clone() for t in tensors], [t.clone().to(place) for t in tensors]
    theirs = fn(*here)
    ours = torch.compile(fn, backend="torchport", options={"backend": backend})(*there)
    for one, other in zip((*there, *ours), (*here, *theirs), strict=True):
        torch.testing.assert_close(one.cpu(), other)
    for one, other in zip(ours, theirs, strict=True):
        one.fill_(50)
        other.fill_(50)
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize(
    "write", [next(iter(WRITES)), *(pytest.param(w, marks=pytest.mark.slow) for w in [*WRITES][1:])]
)
def test_each_kind_of_view_and_a_write_to_its_source(place: torch.device, backend: str, write: str) -> None:
    """In one graph: what is copied from one input to another is read before that input gets its new value."""

    def fn(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for at, view in enumerate(VIEWS.values()):
            # The source is the first input of the two, so it is the first to get its new value.
            source = view(tensors[2 * at])
            WRITES[write](tensors[2 * at + 1], source, tensors[2 * at])
        return ()

    drawn = torch.randint(-3, 4, (2 * len(VIEWS), 4, 4), generator=torch.Generator().manual_seed(0)).float()
    check(fn, place, backend, list(drawn))


def test_results_that_are_copies_have_memory_of_their_own(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copied, y = torch.empty_like(x).copy_(x), x * 2
        h.copy_(y)
        return copied, y, torch.empty_like(y).copy_(y), torch.empty_like(x).copy_(x.t()), x.to(x.dtype, copy=True)

    check(fn, place, backend, [torch.arange(9.0).reshape(3, 3), torch.zeros(3, 3)])


def test_views_of_a_copy_are_views_of_one_another(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copied = torch.empty_like(x).copy_(x)
        h.copy_(x)
        return copied.t(), copied[1:], copied, copied.split(1)[1]

    check(fn, place, backend, [torch.arange(9.0).reshape(3, 3), torch.zeros(3, 3)])


def test_inputs_that_share_memory(place: torch.device, backend: str) -> None:
    def fn(h: torch.Tensor, b: torch.Tensor, same: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h.copy_(b)
        b.mul_(2)
        return same + 1, h.t()

    for view in (lambda b: b, lambda b: b.t(), lambda b: b[1:]):
        results = []
        run_compiled = torch.compile(fn, backend="torchport", options={"backend": backend}, dynamic=False)
        for device, run in ((torch.device("cpu"), fn), (place, run_compiled)):
            h, b = torch.zeros(3, 3).to(device), torch.arange(9.0).reshape(3, 3).to(device)
            results.append([value.cpu() for value in (*run(h, b, view(b)), h, b)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_results_that_are_views_of_inputs_that_share_memory(backend: str) -> None:
    """AOTAutograd would repeat the views on the memory that the inputs share, which has another shape."""

    def fn(b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b.mul_(2)
        return rows.t(), rows[1:], b.view(-1)

    results = []
    for run in (fn, torch.compile(fn, backend="torchport", options={"backend": backend})):
        b = torch.arange(9.0).reshape(3, 3)
        found = run(b, b[1:])
        for at, result in enumerate(found):
            result.add_(at + 1)
        results.append([b, *found])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


class Buffers(torch.nn.Module):
    """Keeps what it was given last, and gives the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 2))
        self.register_buffer("before", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.t()
        last = self.last
        self.before.copy_(last)
        last[:] = given
        x.mul_(2)
        return self.before


def test_buffers(place: torch.device, backend: str) -> None:
    theirs, ours = Buffers(), Buffers().to(place)
    run = torch.compile(ours, backend="torchport", options={"backend": backend})
    for step in range(3):
        x = torch.arange(4.0).reshape(2, 2) + step
        y = x.clone().to(place)
        torch.testing.assert_close(run(y).cpu(), theirs(x))
        for got, want in ((ours.last, theirs.last), (ours.before, theirs.before), (y, x)):
            torch.testing.assert_close(got.cpu(), want)


def test_autograd_does_not_see_a_write_under_no_grad(place: torch.device, backend: str) -> None:
    """The gradient goes to what was overwritten, as in eager: only the graph may make such a write."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.fill_(4)
        y.mul_(2)
        return y + 1

    results = []
    for device, run in (
        (torch.device("cpu"), fn),
        (place, torch.compile(fn, backend="torchport", options={"backend": backend})),
    ):
        leaf, y = torch.ones(2, 2, device=device, requires_grad=True), torch.ones(2).to(device)
        x = leaf * 1
        result = run(x, y)
        x.square().sum().backward()
        assert leaf.grad is not None
        results.append([value.detach().cpu() for value in (leaf.grad, x, y, result)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_backward_gets_what_an_input_was_before_the_write(place: torch.device, backend: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.pow_(2)

    grads = []
    for device, run in (
        (torch.device("cpu"), fn),
        (place, torch.compile(fn, backend="torchport", options={"backend": backend})),
    ):
        leaf = torch.full((4, 2), 3.0, device=device, requires_grad=True)
        run((leaf * 1)[1:]).square().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(*grads)


def test_a_number_is_copied_and_the_diagonal_of_a_view_is_filled(device: torch.device) -> None:
    for make in (
        lambda d: torch.arange(8.0, device=d).reshape(2, 4)[:, 2:],
        lambda d: torch.view_as_real(torch.zeros(4, dtype=torch.complex64, device=d)),
        lambda d: torch.zeros(7, 2, device=d),
        lambda d: torch.zeros(3, 3, 3, device=d).transpose(0, 2),
    ):
        for wrap in (False, True):
            ours, theirs = make(device), make("cpu")
            ours.fill_diagonal_(9, wrap).mul_(2)
            theirs.fill_diagonal_(9, wrap).mul_(2)
            torch.testing.assert_close(ours.cpu(), theirs)
        torch.testing.assert_close(ours.copy_(1.5).cpu(), theirs.copy_(1.5))
    for shape in ((3,), (2, 3, 3)):
        with pytest.raises(RuntimeError, match="dimension"):
            torch.zeros(shape, device=device).fill_diagonal_(1)


# -- random programs --------------------------------------------------------------------------------------------------
def run_many(frontend: str, backend: str, first: int, count: int) -> None:
    compared = 0
    for seed in range(first, first + count):
        if seed % 20 == 0:
            torch._dynamo.reset()
        why, program = run_seed(seed, frontend, backend)
        compared += program is not None
        if why is None or program is None or refused(why):
            continue
        theirs = upstream(program, frontend_of(frontend, seed)) if frontend != "lazy" else None
        if theirs is None or not (raised(theirs) and raised(why)):
            options = f"--only {seed} --frontend {frontend} --backend {backend} --minimise"
            pytest.fail(f"{why}\npython tests/backends/support/alias_fuzz.py {options}")
    assert compared > count // 2


@pytest.mark.parametrize(("frontend", "count"), [("lazy", 40), ("compile", 5)])
def test_random_programs(frontend: str, count: int) -> None:
    import torchport

    torchport.use("reference")
    run_many(frontend, "reference", 0, count)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:inputs of a compiled function share memory otherwise")
@pytest.mark.filterwarnings("ignore:a function given to torch.compile runs operator by operator")
@pytest.mark.parametrize(("frontend", "count"), [("lazy", 300), ("compile", 40)])
def test_more_random_programs(frontend: str, count: int) -> None:
    import torchport

    torchport.use("reference")
    run_many(frontend, "reference", 40, count)


def test_the_comparison_sees_what_it_is_for() -> None:
    """A result that is its input, a write that is lost, and a gradient that is another are differences."""
    base, holder = Base((4,), "torch.float32", "made"), Holder("a0", "argument", 0, "x")
    program = Program((base,), (holder,), ("a0.mul_(2)", "v0 = a0 + 1"), ("v0",), ((4, 0),), False)
    want, writable = expected(program)
    for wrong in (("v0 = a0.mul_(2)",), ("a0 = a0 * 2", "v0 = a0 + 1"), ("a0.data.mul_(2)", "v0 = a0 + 1")):
        changed = Program((base,), (holder,), wrong, ("v0",), ((4, 0),), False)
        assert compare(observe(changed, "cpu", lambda fn: fn, writable)[0], want) is not None
    assert compare(observe(program, "cpu", lambda fn: fn, writable)[0], want) is None


def test_other_memory_for_an_input_is_refused(place: torch.device, backend: str) -> None:
    def fn(y: torch.Tensor) -> torch.Tensor:
        y.data = y * 2
        return y + 1

    run = torch.compile(fn, backend="torchport", options={"backend": backend})
    with pytest.raises(Exception, match="replaces the memory of an input"):
        run(torch.ones(2).to(place))
