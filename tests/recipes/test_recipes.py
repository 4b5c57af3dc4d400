"""The recipes run, each in a process of its own; ``pip install -e .[recipes]`` installs what they use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recipes import RECIPES, missing
from speed import figures
from table import BACKENDS, outcome


@pytest.mark.slow
@pytest.mark.parametrize("on", BACKENDS)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, on: str) -> None:
    if absent := missing(name):
        pytest.skip(f"not installed: {', '.join(absent)}")
    assert outcome(name, on)[1] == "works"


@pytest.mark.slow
def test_a_training_step_is_measured_on_both_sides() -> None:
    pytest.importorskip("lightning")
    found = figures("lightning_fabric", "reference", rounds=2)
    assert not isinstance(found, str), found
    assert min(found) > 0
