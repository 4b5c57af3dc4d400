"""The ``xla`` backend at the end of a process: what is open is closed, and memory that XLA still has is waited for."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from torchport.backends.xla import XlaBackend

_backend = XlaBackend()
pytestmark = pytest.mark.skipif(not _backend.is_available(), reason=_backend.unavailable_reason())

ENDING = """
import atexit
def told():  # registered first, so it runs last
    from torchport.backends.xla.program import _open
    print(sorted(program._plain is None for program in _open))
atexit.register(told)
"""
USES = {
    "lazy": "import torch, torchport; torchport.use('xla'); "
    "y = torch.ones(3, device='port') + 1; y.tolist(); z = y + 1",
    "compile": "import torch; f = torch.compile(lambda x: x + 1, backend='torchport', options={'backend': 'xla'}); "
    "f(torch.ones(3))",
    "aot": "import torch; from torchport import aot; "
    "f = aot.lower(torch.nn.ReLU(), (torch.ones(3),), backend='xla'); f(torch.ones(3))",
}


@pytest.mark.slow
@pytest.mark.parametrize("frontend", USES)
def test_executables_are_released_when_the_process_ends(frontend: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING + USES[frontend]], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "True" in done.stdout
    assert "False" not in done.stdout


def test_the_end_waits_for_memory_that_xla_still_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of XLA's that gives memory back while the interpreter ends made it end in ``std::terminate``."""
    import jax

    from torchport.backends.xla import values

    array = values.to_array(torch.zeros(128), jax.devices()[0], True)
    (alias, _), *_ = [held for held in values._lent.values() if held[1]() is array]
    assert values.wait_for_lent_memory(0)  # an array that somebody holds is given back by whoever holds it
    kept = alias()
    del array
    gc.collect()
    assert not values.wait_for_lent_memory(0.01)
    del kept
    assert values.wait_for_lent_memory(5)
    assert alias() is None
