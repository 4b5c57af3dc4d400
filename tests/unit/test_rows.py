"""The page of rows that train: its table is what is measured. The page of random numbers: its list is the code's."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from torchport.backend.random import RANDOM
from torchport.core import releases

DOCS = Path(__file__).parents[2] / "docs"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> Iterator[ModuleType]:
    pytest.importorskip("transformers", reason="the models are transformers'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS.parent / "examples"))
        spec = importlib.util.spec_from_file_location("measured_rows", DOCS / "_site" / "rows.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.skipif(
    releases.version() not in {(2, 13), (2, 14)}, reason="the table is PyTorch 2.13's; others decompose otherwise"
)
@pytest.mark.parametrize(
    ("model", "stage"),
    [
        ("GPT-2", 1),
        ("GPT-2", 2),
        pytest.param("GPT-2", 3, marks=SLOW),
        ("ResNet-18", 1),
        pytest.param("ResNet-18", 2, marks=SLOW),
        ("ResNet-18", 3),
    ],
)
def test_a_column_of_the_table_is_what_is_measured(rows: ModuleType, model: str, stage: int) -> None:
    columns, _ = rows.shown()
    assert rows.column(model, stage) == columns[f"{model}: {stage}"], "run: python docs/_site/rows.py"


@pytest.mark.slow
def test_what_dropout_adds_is_what_is_measured(rows: ModuleType) -> None:
    columns, more = rows.shown()
    measured = rows.column("GPT-2", 2, dropout=0.1)
    assert measured.keys() - columns["GPT-2: 2"].keys() == set(more)


def test_the_page_lists_the_random_operators() -> None:
    page = (DOCS / "howto" / "random-numbers.md").read_text(encoding="utf-8")
    table = page.partition("| distribution | how | operators |")[2].partition("\n\n")[0]
    named = [op for line in table.splitlines()[2:] for op in re.findall(r"`([\w.]+)`", line.strip(" |").split("|")[2])]
    assert len(named) == len(set(named))
    assert {f"aten.{op}" for op in named} == {str(op) for op in RANDOM}
