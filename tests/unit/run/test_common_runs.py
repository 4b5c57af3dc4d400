"""Regions: what two rounds have in common, with which operator it begins, and how far it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchport.run import regions
from torchport.run.regions import (
    LOGS,
    Anchor,
    Calls,
    Log,
    Regions,
    Rounds,
    common_runs,
    described,
    may_have_common_runs,
    shapes_of,
)
from torchport.trace.trie import Node

SHORTEST = 24


@pytest.fixture(autouse=True)
def _short_regions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "SHORTEST", SHORTEST)
        yield


def kernel(serial: int) -> Any:
    return SimpleNamespace(serial=serial)


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def log_of(calls: Sequence[tuple[int, torch.Tensor]]) -> Log:
    log = Log(Calls())
    for serial, value in calls:
        log.add(kernel(serial), (value,), {})
    return log


def a_round(size: int, length: int = 40) -> list[tuple[int, torch.Tensor]]:
    """Three operators whose shapes vary, and a forward pass whose shapes do not."""
    return [*((1, tensor(size)),) * 3, *((10 + at % 7 + (at == 0) * 50, tensor(2, 2)) for at in range(length))]


def compared(programs: Sequence[Sequence[tuple[int, torch.Tensor]]]) -> Regions:
    found, rounds = Regions(), Rounds()
    rounds.count = LOGS
    for calls in programs:
        log = found.begin_round(rounds, lambda seconds, ops, runs: True)
        assert log is not None
        for serial, value in calls:
            log.add(kernel(serial), (value,), {})
    assert found.begin_round(rounds, lambda seconds, ops, runs: True) is None
    return found


def as_texts(*logs: Sequence[int]) -> list[str]:
    return ["".join(map(chr, log)) for log in logs]


# -- what is noted -----------------------------------------------------------------------------------------------
def test_a_call_is_described_by_shapes_and_constants_and_not_by_values_or_scalar_inputs() -> None:
    x = tensor(2, 3)
    call = described(kernel(1), (x, 2, 0.5, [x, x], None), {"dim": 1})
    assert call == described(kernel(1), (tensor(2, 3), 2, 0.25, [x, x], None), {"dim": 1})
    for args, kwargs in (
        ((tensor(3, 2), 2, 0.5, [x, x], None), {"dim": 1}),
        ((x.double(), 2, 0.5, [x, x], None), {"dim": 1}),
        ((x, 3, 0.5, [x, x], None), {"dim": 1}),
        ((x, True, 0.5, [x, x], None), {"dim": 1}),
        ((x, 2, 0.5, [x], None), {"dim": 1}),
        ((x, 2, 0.5, [x, x], None), {"dim": 2}),
    ):
        assert described(kernel(1), args, kwargs) != call


def test_shapes_are_told_apart_where_their_sizes_alone_would_not_do() -> None:
    assert shapes_of((tensor(2, 3), 5, [tensor(4)], None)) == (2, 2, 3, 1, 4)
    assert shapes_of((tensor(1, 2), tensor())) != shapes_of((tensor(1), tensor(2)))


def test_a_log_ends_where_it_is_too_long_and_takes_what_has_no_hash() -> None:
    log = log_of([(at, tensor(2)) for at in range(regions.LONGEST_LOG + 5)])
    assert len(log.numbers) == regions.LONGEST_LOG
    log = Log(Calls())
    for _ in range(2):
        log.add(kernel(1), ({},), {})
    assert log.numbers[0] != log.numbers[1]


# -- what rounds have in common ----------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 5), max_size=60), st.lists(st.integers(0, 5), max_size=60))
def test_common_runs_are_in_both_in_order_and_long_enough(first: list[int], second: list[int]) -> None:
    at = 0
    text = "".join(map(str, second))
    for run in common_runs(first, second):
        assert len(run) >= SHORTEST
        at = text.index("".join(map(str, run)), at) + len(run)


_PIECES = st.lists(st.integers(0, 40), max_size=30)


@given(_PIECES, _PIECES, _PIECES, _PIECES, st.integers(SHORTEST - 2, SHORTEST + 20))
def test_what_is_not_compared_has_no_run_in_common(
    before: list[int], after: list[int], others: list[int], rest: list[int], length: int
) -> None:
    run = list(range(100, 100 + length))
    first, second = [*before, *run, *after], [*others, *run, *rest]
    texts = as_texts(first, second)
    if common_runs(first, second):
        assert may_have_common_runs(*texts)
    assert not may_have_common_runs(*as_texts(list(range(60)), list(range(60, 0, -1))))


def test_the_same_few_operators_over_and_over_are_not_compared() -> None:
    assert common_runs([1] * 4_000, [1] * 4_000) == []
    assert common_runs([1] * SHORTEST, [1] * SHORTEST) == [[1] * SHORTEST]


def test_a_forward_pass_between_sizes_that_grow_is_found() -> None:
    found = compared([a_round(size) for size in range(3, 3 + LOGS)])
    (serial, shape), anchor = (60, tensor(2, 2)), None
    assert found.serials == {serial}
    anchor = found.anchor(kernel(serial), (shape,), {})
    assert anchor is not None
    assert found.anchor(kernel(serial), (tensor(2, 3),), {}) is None
    assert found.anchor(kernel(serial), ({},), {}) is None


def test_phases_that_alternate_are_compared_each_with_its_own_kind() -> None:
    rounds = [a_round(size) if size % 2 else [(3, tensor(size))] * 40 for size in range(3, 3 + LOGS)]
    assert compared(rounds).serials == {60}


def test_rounds_that_have_nothing_in_common_have_no_regions() -> None:
    assert compared([[(10 + at, tensor(size)) for at in range(50)] for size in range(LOGS)]).serials == set()


def test_who_looks_for_anchors_hears_of_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, tuple[int, ...]]] = []
    monkeypatch.setattr(regions, "begun_with", {})
    monkeypatch.setattr(regions, "on_anchor", [lambda serial, shapes: heard.append((serial, shapes))])
    for _ in range(2):  # two devices, or one that has forgotten its decisions
        compared([a_round(size) for size in range(3, 3 + LOGS)])
    assert heard == [(60, (2, 2, 2))] == list(regions.begun_with)


def test_rounds_are_noted_when_they_have_cost_enough_and_later_less_often() -> None:
    found, rounds = Regions(), Rounds()
    worth = False
    asked: list[bool] = []

    def is_worth(seconds: float, ops: int, runs: int) -> bool:
        asked.append(worth)
        return worth

    logs = [found.begin_round(rounds, is_worth) for _ in range(2 * LOGS)]
    assert logs == [None] * 2 * LOGS
    assert len(asked) == LOGS + 1  # not while there were too few rounds
    worth = True
    assert sum(found.begin_round(rounds, is_worth) is not None for _ in range(LOGS + 1)) == LOGS
    assert rounds.next_look > 2 * LOGS
    assert [found.begin_round(rounds, is_worth) for _ in range(rounds.next_look - 1)] == [None] * (rounds.next_look - 1)


# -- how far a region goes ---------------------------------------------------------------------------------------
def path(*serials: int) -> Node:
    node = Node.root()
    for serial in serials:
        node = Node(node, (serial,), None)
    return node


def test_a_region_goes_on_with_its_operators_in_order() -> None:
    anchor = Anchor()
    anchor.add([1, 2, 3])
    anchor.add([1, 2, 4, 5])
    assert anchor.goes_on(path(), 1)
    assert anchor.goes_on(path(1, 2), 3)
    assert anchor.goes_on(path(1, 2), 4)
    assert not anchor.goes_on(path(1, 2), 5)
    assert not anchor.goes_on(path(1, 2, 3), 4)
    assert not anchor.goes_on(path(7), 2)


def test_following_a_path_step_by_step_gives_the_same_answers() -> None:
    anchor = Anchor()
    anchor.add([1, 2, 3, 4])
    node = Node.root()
    for serial in (1, 2, 3, 4):
        assert anchor.goes_on(node, serial)
        assert not anchor.goes_on(node, 9)
        node = Node(node, (serial,), None)
    assert not anchor.goes_on(node, 1)


def test_recording_ends_when_the_sizes_never_come_back() -> None:
    anchor = Anchor()
    anchor.add([1, 2])
    answers = [anchor.goes_on(path(), 1) for _ in range(regions.RECORDINGS * 2 + 1)]
    assert answers == [True] * regions.RECORDINGS * 2 + [False]
