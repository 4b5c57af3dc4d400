"""The backend of ``docs/tutorial/emit-code.md``: what it takes, it computes as the CPU does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchport.testing import Plan, assert_conforms, conform

EXAMPLE = Path(__file__).parents[3] / "examples" / "c_backend.py"
OPERATORS = (
    "add sub mul div neg exp tanh sqrt pow le where sum mean mm addmm permute expand view select full_like "
    "nn.functional.relu nn.functional.linear nn.functional.mse_loss"
)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="it compiles C, and there is no compiler called cc")
def test_operators_on_samples_of_pytorch() -> None:
    pattern = "^(" + "|".join(OPERATORS.replace(".", r"\.").split()) + ")$"
    variants = ("forward", "backward", "noncontiguous", "edge")
    report = conform(Plan(f"{EXAMPLE}:CBackend", pattern, ("float32", "int64", "bool"), ("lazy",), variants, samples=2))
    assert_conforms(report)
    assert report.totals()["native"] > 150
    assert not report.totals()["unsupported"]
