"""Ours against the C++ dispatcher of the torch wheel: zero differences.

Every run takes a seeded sample; the full sizes are marked slow.
"""

from __future__ import annotations

import random

import dispatch_truth as truth
import pytest
import torch

from torchport import dispatch
from torchport.dispatch import DispatchKey, torch_bridge

SAMPLE, FULL = "sample", pytest.param("full", marks=pytest.mark.slow)
sizes = pytest.mark.parametrize("size", [SAMPLE, FULL])


@sizes
def test_key_sets(size: str) -> None:
    assert truth.compare_keysets(random.Random(3), 3_000 if size == SAMPLE else 20_000) == []


def test_every_key_and_map() -> None:
    assert truth.compare_key_maps() == []


def test_key_numbers_and_classes_are_c10s() -> None:
    for functionality in dispatch.Functionality:
        assert torch._C._dispatch_key_name(truth.K(int(functionality))) == functionality.name
    assert [key for key in dispatch.runtime_keys() if key.backend is None or key.backend.builtin] == [
        DispatchKey("Undefined"),
        *(key for key in dispatch.DispatchKeySet.from_torch(torch._C._dispatch_keyset_full())),
    ]
    for key, theirs in truth.TORCH_KEYS.items():
        assert torch._C._dispatch_is_alias_key(theirs) == key.is_alias, key


def test_thread_defaults() -> None:
    included, excluded = dispatch.local_keys()
    assert (included, excluded) == torch_bridge.thread_keysets()


def test_keys_of_plain_tensors() -> None:
    cpu, meta = torch.ones(2), torch.ones(2, device="meta")
    assert torch_bridge.device_keys("cpu") == dispatch.DispatchKeySet.from_torch(torch._C._dispatch_keys(cpu))
    assert torch_bridge.device_keys("meta:0") == dispatch.DispatchKeySet.from_torch(torch._C._dispatch_keys(meta))


@sizes
def test_tables(size: str) -> None:
    differences, steps = truth.compare_tables(random.Random(5), 250 if size == SAMPLE else 2_000)
    assert differences == []
    assert steps > (2_000 if size == SAMPLE else 15_000)


@sizes
def test_fallbacks(size: str) -> None:
    differences, dumps = truth.compare_fallbacks(random.Random(7), 12 if size == SAMPLE else 200)
    assert differences == []
    assert dumps > (40 if size == SAMPLE else 700)


@sizes
def test_calls(size: str) -> None:
    differences, calls = truth.compare_calls(random.Random(11), 1_000 if size == SAMPLE else 5_000)
    assert differences == []
    assert calls >= (1_000 if size == SAMPLE else 5_000)


@sizes
def test_every_operator_of_pytorch(size: str) -> None:
    """What `explain` shows for stock operators is what PyTorch itself computes, row by row."""
    names = sorted(torch_bridge.stock_operator_names())
    if size == SAMPLE:
        names = random.Random(13).sample(names, 600)
    differences, rows = truth.compare_stock_operators(names)
    assert differences == []
    assert rows > 50 * len(names)
