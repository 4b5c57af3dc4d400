"""Random programs at sizes that vary, on the engines: results are the CPU's, whichever computation they came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from sizes_fuzz import check, draw_program

import torchport
from torchport.backend.registry import registry
from torchport.core.config import config

PROGRAMS = {"xla": 40, "openvino": 40, "inductor": 5}


@pytest.fixture(params=PROGRAMS)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """An engine, without tiers or a disk cache."""
    if not registry.get(request.param).is_available():
        pytest.skip(f"{request.param} is not installed")
    with config.override(tiers="off", cache="off"):
        torchport.use(request.param)
        yield request.param
    torchport.use("reference")


@pytest.mark.slow
def test_random_programs_are_the_cpus_at_every_size(engine: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(PROGRAMS[engine]):
        program = draw_program(seed)
        assert not check(program, counts), str(program)
    assert counts["OtherSizes"] > counts["runs"] // 20, counts
