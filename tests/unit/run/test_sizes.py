"""Sizes that vary: one skeleton, and each further set of its sizes has to be worth more before it is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchport
from torchport import metrics
from torchport.core.config import config
from torchport.run import sizes, worth
from torchport.run.sizes import FREE, Family, family_of


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), unique=True, min_size=1, max_size=20))
def test_the_first_sizes_cost_nothing_more_and_then_each_twice_as_much(compiled: list[tuple[int, ...]]) -> None:
    family = Family()
    seen: list[int] = []
    for one in compiled:
        seen.append(family.factor(one))
        family.add(one)
    assert seen == [1 if at < FREE else 2 ** (at - FREE + 1) for at in range(len(compiled))]
    assert family.factor(compiled[0]) <= seen[-1]  # what is compiled does not count against itself
    family.add(compiled[0])
    assert len(family.compiled) == len(compiled)


def test_what_varies_is_told_by_name() -> None:
    family = Family()
    names = ["dimension 0 of input 0", "dimension 1 of input 0"]
    assert not family.varied((2, 8), names)
    for length in (8, 9):
        family.add((2, length, length + 1))
    assert family.varied((2, 12, 13), names) == "dimension 1 of input 0 was 8, 9 and is 12"


def test_as_many_skeletons_are_remembered_as_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "FAMILIES", 3)
    monkeypatch.setattr(sizes, "families", type(sizes.families)())
    first = family_of(b"a")
    for key in (b"b", b"c", b"a", b"d"):
        family_of(key)
    assert family_of(b"a") is first
    assert b"b" not in sizes.families


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted at first, and compiled by the program itself when it has cost a little."""
    torchport.use("reference")
    monkeypatch.setattr(worth.costs, "_per_operator", {"reference": 2e-5})
    monkeypatch.setattr(worth.costs, "note", lambda *args: None)
    monkeypatch.setattr(sizes, "families", type(sizes.families)())
    monkeypatch.setattr(worth.CompileCosts, "FIXED", 0)
    monkeypatch.setattr(worth, "FEW", 0)
    monkeypatch.setattr(worth, "RECORDING", 0.0)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2), nn.Softmax(-1)).eval()


@pytest.mark.usefixtures("here")
def test_fifty_lengths_are_few_compilations_and_right() -> None:
    model = _model()
    inputs = [torch.randn(2, length, 4, generator=torch.Generator().manual_seed(length)) for length in range(3, 53)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        ported = model.to("port")
        with config.override(tiers="on", compile_workers=0):
            metrics.reset()
            for _ in range(12):
                for x, want in zip(inputs, wanted, strict=True):
                    torch.testing.assert_close(ported(x.to("port")).cpu(), want)
            compiled = metrics.counter("UncachedCompile")
    # Without the families all fifty were compiled, each when it had come back a few times.
    assert FREE <= compiled <= 20


@pytest.mark.usefixtures("here")
def test_other_numbers_and_operators_are_other_skeletons() -> None:
    x = torch.randn(3, 4).to("port")
    with config.override(tiers="on", compile_workers=0):
        for fn in (
            lambda y: y.sum(0).tanh().exp(),
            lambda y: y.sum(0).exp().tanh(),
            lambda y: y.sum(0, keepdim=True).tanh().exp(),
            lambda y: y.double().sum(0).tanh().exp(),
        ):
            for _ in range(40):
                fn(x).cpu()
    found = [family.compiled for family in sizes.families.values()]
    assert len(found) >= 4  # at its first sight one of them keeps other values, too
    assert all(len(one) == 1 for one in found)


@pytest.mark.usefixtures("here")
def test_the_record_says_what_varied() -> None:
    with config.override(tiers="on", compile_workers=0):
        for length in (5, 7):
            x = torch.randn(3, length).to("port")
            for _ in range(60):
                (x.sin().cos().tanh().exp() * 2.0).cpu()
    told = [record.sizes for record in torchport.tiers() if record.sizes]
    assert "size 2 of it that is compiled: dimension 1 of input 0 was 5 and is 7" in told


def _kept(tensor: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    between = (tensor * 2).tanh()
    return (between + 1).sum(), between if keep else None


def test_what_was_wanted_at_other_sizes_is_computed_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a value is wanted that a reference cycle holds depends on when the collector ran."""
    monkeypatch.setattr(sizes, "_wanted", type(sizes._wanted)())
    torchport.use("reference")
    with config.override(tiers="off"):
        results = {}
        for length, keep in ((5, True), (6, False), (7, False), (8, True)):
            x = torch.arange(float(length))
            total, between = _kept(x.to("port"), keep)
            torch.testing.assert_close(total.cpu(), _kept(x, False)[0])
            if between is not None:
                torch.testing.assert_close(between.cpu(), (x * 2).tanh())
            results[length] = list(sizes._wanted.values())
        # One set of values for all four lengths, with that which is not always wanted among them.
        (known,) = results[8]
        assert [(len(values), count) for values, count in known.items()] == [(2, 4)]


@pytest.mark.parametrize(
    ("first", "kept", "computed"), [(15, [0, 1, 0, 0], [1, 2, 2, 2]), (25, [0, 0, 1, 0], [1, 1, 2, 1])]
)
def test_what_most_sizes_compute_is_computed_at_further_ones(
    first: int, kept: list[int], computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, where a size at which less was wanted came first."""
    from torchport.run import flush

    monkeypatch.setattr(sizes, "_wanted", type(sizes._wanted)())
    made: list[int] = []

    def counted(*args: Any) -> tuple[int, ...]:
        found = sizes.widened(*args)
        made.append(len(found))
        return found

    monkeypatch.setattr(flush, "widened", counted)
    torchport.use("reference")
    with config.override(tiers="off"):
        for at, keep in enumerate(kept):
            x = torch.arange(float(first + at))
            total, _between = _kept(x.to("port"), bool(keep))
            torch.testing.assert_close(total.cpu(), _kept(x, False)[0])
    assert made == computed


def test_what_was_all_wanted_once_is_not_computed_ever_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_wanted", type(sizes._wanted)())
    torchport.use("reference")
    with config.override(tiers="off"):
        for length, keep in ((5, True), (6, False)):
            values = [torch.arange(float(length)).to("port")]
            for _ in range(8):
                values.append(values[-1] * 1.5)
            last, held = values[-1], values if keep else None
            del values
            torch.testing.assert_close(last.cpu(), torch.arange(float(length)) * 1.5**8)
            del held
    (known,) = sizes._wanted.values()
    assert sorted(map(len, known)) == [1, 8]
