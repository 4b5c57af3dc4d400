"""PyTorch's own operator, module and optimizer samples on ``port`` against the CPU, by the conformance kit.

A part of them here; all: ``torchport conform reference``.
"""

from __future__ import annotations

import os

import pytest

from torchport.testing import FRONTENDS, Plan, Report, assert_conforms, conform
from torchport.testing.frontends import available_frontends

BACKEND = os.environ.get("TORCHPORT_TEST_BACKEND", "reference")


def judge(report: Report, at_least: int, eager: bool = False) -> None:
    """Every case passes, most of them in the graph (or at once); what does not has its reason in a table of limits."""
    totals = report.totals()
    assert totals["native"] + (totals["kernel"] if eager else 0) >= at_least
    assert not totals["not run"]
    assert totals["skipped"] <= 0.05 * totals.total(), "what the CPU cannot run is the exception"
    assert_conforms(report)


def test_a_sample_of_every_operator_module_and_optimizer() -> None:
    variants = ("forward", "inplace", "out", "training", "step")
    judge(conform(Plan(BACKEND, variants=variants, samples=1)), at_least=1_000)


@pytest.mark.slow
def test_gradients_of_every_third_operator() -> None:
    report = conform(Plan(BACKEND, ops="^[a-h]|^nn.functional.[g-m]", variants=("backward",), samples=1))
    judge(report, at_least=150)


@pytest.mark.parametrize("frontend", [frontend for frontend in FRONTENDS if frontend != "lazy"])
def test_the_other_frontends(frontend: str) -> None:
    assert not available_frontends()[frontend]
    ops = "^(add|sum|mm|softmax|cumsum|nn.functional.(gelu|linear|conv2d)|index_select|module:nn.(Linear|BatchNorm1d))$"
    report = conform(Plan(BACKEND, ops, frontends=(frontend,), variants=("forward", "backward", "training"), samples=1))
    judge(report, at_least=8, eager=frontend == "eager")
    assert {key[1] for key in report.cells} == {frontend}


@pytest.mark.slow
def test_every_sample() -> None:
    judge(conform(Plan(BACKEND)), at_least=50_000)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64"])
def test_samples_of_every_dtype(dtype: str) -> None:
    judge(conform(Plan(BACKEND, dtypes=(dtype,), samples=2)), at_least=700)
