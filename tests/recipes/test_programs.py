"""The programs that the libraries' page prints run as they are printed, each in a process and a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from table import programs

LIBRARIES: Final = ("transformers", "accelerate", "diffusers", "peft", "lightning")
OURS: Final = {"ACCELERATE_TORCH_DEVICE", "TORCHPORT_TIERS"}
"""Variables of the tests' environment that a reader does not have."""


def blocks() -> dict[str, str]:
    """Each library and its program, in the page's order."""
    found = re.findall(r"^(\w+): [^\n]*\n\n```python\n(.*?)^```", programs(), re.DOTALL | re.MULTILINE)
    return {name.lower(): code for name, code in found}


def test_the_page_prints_one_for_each_library() -> None:
    assert tuple(blocks()) == LIBRARIES
    for name, code in blocks().items():
        assert re.search(rf"^(from|import) {name}\b", code, re.MULTILINE)
        assert '"port"' in code
        assert "torchport" not in code


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_program_runs_as_it_is_printed(name: str, tmp_path: Path) -> None:
    code = blocks()[name]
    used = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    if absent := sorted(one for one in used if find_spec(one) is None):
        pytest.skip(f"not installed: {', '.join(absent)}")
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in OURS}
    done = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("port "), said
    assert "False" not in last, said
