"""A backend that takes a handful of operators: the rest runs between its segments, and nothing is flushed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import fakes
import pytest
import torch
from everyday_support import counted, needs_counters, ramp, randn, same
from torch import fx, nn

import torchport
from torchport import Capabilities, Support
from torchport.backend import segments

pytestmark = needs_counters

FEW = ("aten.addmm.default", "aten.mm.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.relu.default")
VIEWS = ("aten.view.default", "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.expand.default")


class Partial(fakes.CountingBackend):
    """Takes a few operators and some views."""

    name = "partial"
    takes: ClassVar[tuple[str, ...]] = (*FEW, *VIEWS)

    def supports(self, node: fx.Node) -> Support:
        return Support.yes() if str(node.target) in self.takes else Support.no("it is none of the few")


class Donating(Partial):
    """As above; it writes over what it is given for good."""

    name = "donating"
    capabilities = Capabilities(donation=True, restores_donated=True)


def partial(**attributes: Any) -> Any:
    """A backend of the few that runs nothing but graphs: it has no kernels for single operators."""
    return Partial.install(register_kernels=lambda *_: None, **attributes)


def around(x: torch.Tensor) -> torch.Tensor:
    return ((x + 1.5).sin().cos() * 2).relu()


def test_what_is_refused_is_a_segment_of_its_own() -> None:
    backend = partial()
    x = ramp(2, 3, device=backend.device)
    with counted() as counts:
        same(around(x).cpu(), around(ramp(2, 3, device="cpu")), rtol=1e-5)
    assert (counts["Flush"], counts["Execute"], counts["UncachedCompile"]) == (1, 3, 2)
    assert (counts["Fallback"], counts["aten::sin"], counts["aten::cos"]) == (2, 1, 1)
    assert backend.executed["aten.add.Tensor"] == 1
    with counted() as counts:
        for _ in range(3):
            around(x).cpu()
    assert (counts["Flush"], counts["Execute"], counts["UncachedCompile"]) == (3, 9, 0)
    assert counts["aten::sin"] == 3


def test_torch_compile_splits_alike(fresh_compiler: None) -> None:
    backend = partial()
    run = torch.compile(around, backend="torchport", options={"backend": backend.name})
    x = ramp(2, 3, device="cpu")
    for place in ("cpu", backend.device):
        with counted() as counts:
            same(run(x.to(place)).cpu(), around(x), rtol=1e-5)
        assert (counts["Execute"], counts["Fallback"]) == (3, 2)


def test_few_cheap_operators_between_two_of_the_hosts_are_the_hosts() -> None:
    backend = partial()
    x = ramp(4, device=backend.device)

    def island(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2 + 1).cos()

    with counted() as counts:
        same(island(x).cpu(), island(ramp(4, device="cpu")), rtol=1e-5)
    assert (counts["Execute"], counts["Fallback"]) == (1, 2)
    assert not backend.executed


def test_an_island_that_is_worth_a_call_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CALL", 1e-9)
    backend = partial()
    x = ramp(4, device=backend.device)
    with counted() as counts:
        same((x.sin() * 2).cos().cpu(), (ramp(4, device="cpu").sin() * 2).cos(), rtol=1e-5)
    assert counts["Execute"] == 3
    assert backend.executed["aten.mul.Tensor"] == 1


def test_views_do_not_cross() -> None:
    """Each segment takes the views it needs by itself: the weight is not copied because someone else transposes it."""
    backend = partial()
    weight, x = randn(8, 8, device=backend.device), randn(4, 8, device=backend.device)

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = x @ w.t()
        return first.t().sin().reshape(2, 16), (first.view(2, 2, 8).transpose(1, 2) * 2).sum(), w.t().tan()

    with counted() as counts:
        got = fn(x, weight)
        torchport.sync()
    same(tuple(one.cpu() for one in got), fn(x.cpu(), weight.cpu()), rtol=1e-4, atol=1e-5)
    assert counts["Execute"] <= 3
    assert counts["Flush"] == 1
    assert "aten.clone.default" not in backend.executed


def test_writes_and_views_across_segments() -> None:
    def fn(d: torch.device | str) -> list[torch.Tensor]:
        x = ramp(4, 6, device=d)
        row, column = x[1], x[:, 2]
        row.mul_(2).sin_()
        column.add_(row[1])
        x[0] = x[3].cos()
        y = x.t()
        y[5].relu_().add_(1)
        x.copy_(torch.cumsum(x, 1))
        return [x, row, column, y, y.reshape(3, 8).tanh()]

    backend = partial()
    with counted() as counts:
        got = fn(backend.device)
        torchport.sync()
    assert counts["Flush"] == 1
    for ours, theirs in zip(got, fn("cpu"), strict=True):
        same(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    """Convolution, norm, dropout, an embedding and attention: mostly not of the few."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 11))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = self.norm(x)
        return self.mlp(x + self.attend(y, y, y, need_weights=False)[0])


def _train(device: torch.device, steps: int = 3) -> list[Any]:
    torch.manual_seed(3)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    ids = (torch.arange(14).reshape(2, 7) * 5 % 11).to(device)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten().roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *(parameter.detach().cpu() for parameter in net.parameters())]


@pytest.mark.parametrize("execution", ["inline", "worker"])
@pytest.mark.parametrize("kind", [Partial, Donating])
def test_training_draws_the_same_numbers(kind: Any, execution: str) -> None:
    backend, whole = kind.install(register_kernels=lambda *_: None), fakes.Fake.install()
    with torchport.config.override(execution=execution):
        with counted() as counts:
            got = _train(backend.device)
        same(got, _train(whole.device), rtol=1e-4, atol=1e-6)
    assert not any(name.startswith("Flush: host") for name in counts)
    assert counts["Flush: step"] == 3
    assert backend.executed["aten.addmm.default"] or backend.executed["aten.mm.default"]


def test_random_operators_draw_what_they_draw_everywhere() -> None:
    def fn(device: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x = torch.rand(3, 4, device=device)
        made = [x, torch.randn(5, device=device), nn.functional.dropout(x, 0.5), torch.randint(9, (4,), device=device)]
        return [one.cpu() for one in [*made, torch.randperm(6, device=device), x.bernoulli()]]

    same(fn(partial().device), fn(fakes.Fake.install().device))


def test_the_policy_names_operator_and_line_at_the_call() -> None:
    backend = partial()
    x = ramp(3, device=backend.device) + 1
    with torchport.config.override(fallback="error"), pytest.raises(torchport.UnsupportedOp) as caught:
        x.sin()
    assert (caught.value.op, "none of the few" in str(caught.value)) == ("aten.sin.default", True)
    assert "test_segments.py" in str(caught.value.source)
    assert x.tolist() == [1, 2, 3]


def test_the_policy_holds_for_what_was_recorded_before() -> None:
    backend = partial()
    for recorded in (False, True):  # the plan is known the second time
        x = ramp(3, device=backend.device)
        y, z = x.sin(), x + 1
        with torchport.config.override(fallback="error"), pytest.raises(torchport.UnsupportedOp, match=r"aten\.sin"):
            y.cpu()
        assert z.tolist() == [1, 2, 3]
        if not recorded:
            same(ramp(3, device=backend.device).sin().cpu(), torch.arange(3.0).sin())
    with torchport.config.override(fallback="warn"), pytest.warns(UserWarning, match=r"aten::sin runs on the host"):
        ramp(3, device=backend.device).sin().cpu()


def test_a_value_read_by_another_thread_is_counted() -> None:
    import threading

    backend = partial()
    found: list[Any] = []
    with counted() as counts:
        y = ramp(3, device=backend.device).sin()
        thread = threading.Thread(target=lambda: found.append(y.tolist()))
        thread.start()
        thread.join(60)
    assert found == [pytest.approx(torch.arange(3.0).sin().tolist())]
    assert counts["aten::sin"] == 1


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_an_error_on_the_host_takes_only_what_depends_on_it(mode: Any) -> None:
    backend = partial()
    table, ids = ramp(4, 2, device=backend.device), torch.tensor([1, 9]).to(backend.device)
    with torchport.mode(mode):
        if mode == "eager":
            with pytest.raises(torchport.ExecutionError, match=r"out of range(.|\n)*aten\.embedding"):
                nn.functional.embedding(ids, table)
            return
        wrong, right = nn.functional.embedding(ids, table) * 2, (table + 1).sin()
        with pytest.raises(torchport.ExecutionError, match=r"out of range(.|\n)*aten\.embedding") as caught:
            wrong.tolist()
    assert "test_segments.py" in str(caught.value)
    same(right.cpu(), (ramp(4, 2, device="cpu") + 1).sin())


def test_an_error_in_a_segment_of_the_backends() -> None:
    class Breaking(Partial):
        name = "breaking"

        def execute(self, handle: Any, args: Sequence[Any], context: Any) -> Any:
            if handle[1]["aten.relu.default"]:
                raise OSError("the wire is cut")
            return super().execute(handle, args, context)

    backend = Breaking.install(register_kernels=lambda *_: None)
    x = ramp(3, device=backend.device)
    fine, broken = (x + 1).sin(), (x + 1).cos().relu()
    with pytest.raises(torchport.ExecutionError, match=r"OSError: the wire is cut(.|\n)*aten\.relu"):
        broken.tolist()
    same(fine.cpu(), (torch.arange(3.0) + 1).sin())


def test_eager_mode_and_tiers() -> None:
    backend = partial()
    x = ramp(2, 3, device=backend.device)
    expected = around(ramp(2, 3, device="cpu"))
    with torchport.mode("eager"), counted() as counts:
        same(around(x).cpu(), expected, rtol=1e-5)
    assert counts["Fallback"] == 2
    with torchport.config.override(tiers="on"):
        for _ in range(8):
            same(around(x).cpu(), expected, rtol=1e-5)


def test_dropped_segments_are_compiled_again() -> None:
    backend = partial()
    x = ramp(2, 3, device=backend.device)
    expected = around(ramp(2, 3, device="cpu"))
    with torchport.config.override(max_computations=2), counted() as counts:
        for _ in range(2):
            same(around(x).cpu(), expected, rtol=1e-5)
            ((x + x).cos() * x).cpu()
    assert counts["DroppedComputation"] >= 4
    assert counts["UncachedCompile"] == 8


def test_what_depends_on_values_still_runs_at_once() -> None:
    backend = partial()
    x = ramp(4, device=backend.device)
    with counted() as counts:
        assert ((x + 1).sin() > 0).nonzero().tolist() == ((torch.arange(4.0) + 1).sin() > 0).nonzero().tolist()
    assert counts["Flush: host"] == 1
    assert counts["aten::nonzero"] == 1
