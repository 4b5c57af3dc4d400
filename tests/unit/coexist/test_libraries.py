"""Libraries with a list of devices of their own: the warning, and what changes when a module is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchport.frontend.device.patches import when_imported

# What counts of accelerate's PartialState: a device from a variable, or the CPU since no device of its list is there.
STATE = """
import os, torch

class PartialState:
    shared = {}

    def __init__(self, cpu=False, **kwargs):
        self.__dict__ = self.shared
        if not self.shared:
            self._cpu = cpu
            self.device = torch.device(os.environ.get("ACCELERATE_TORCH_DEVICE", "cpu"))
"""
CONNECTOR = """
class _AcceleratorConnector:
    @staticmethod
    def _choose_auto_accelerator():
        return "cpu"
"""
PROGRAM = """
import warnings, torch
from accelerate.state import PartialState

def said(make):
    PartialState.shared.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(w.message)[:42] for w in caught]

from torchport.frontend.device import libraries
print(said(PartialState))            # nobody has used the device
(torch.ones(1, device="port") + 1).item()
print(said(lambda: PartialState(cpu=True)))
os = __import__("os")
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
print(said(PartialState))            # told so
del os.environ["ACCELERATE_TORCH_DEVICE"]
print(said(PartialState), said(PartialState))
libraries._warned.clear()
import lightning.pytorch.trainer.connectors.accelerator_connector as connector  # after the device was used
kind = connector._AcceleratorConnector
print(said(kind._choose_auto_accelerator), kind()._choose_auto_accelerator())
"""


def test_a_library_that_picks_the_cpu_while_the_device_is_in_use_is_told_of_once(tmp_path: Path) -> None:
    for name, text in (
        ("accelerate/state.py", STATE),
        ("lightning/pytorch/trainer/connectors/accelerator_connector.py", CONNECTOR),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    environment = {**os.environ, "TORCHPORT_BACKEND": "reference"}
    environment.pop("ACCELERATE_TORCH_DEVICE", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[]",
        "[]",
        "[]",
        "['accelerate (and a Trainer of transformers)'] []",
        "['Lightning works on the CPU, though this pr'] cpu",
    ]


def test_a_module_is_changed_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    changed: list[str] = []
    when_imported("imported_late", lambda module: changed.append(module.__name__))
    when_imported("imported_late", lambda module: setattr(module, "value", module.value + 1))
    assert changed == []
    import imported_late  # pyright: ignore[reportMissingImports]

    assert (changed, imported_late.value) == (["imported_late"], 2)
    assert "exec_module" not in vars(imported_late.__spec__.loader)
    when_imported("imported_late", lambda module: changed.append("now"))
    assert changed == ["imported_late", "now"]
    monkeypatch.delitem(sys.modules, "imported_late")


@pytest.mark.slow
def test_a_pretrained_model_is_saved_from_the_device(tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.ones(1, device="port")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("port").save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
