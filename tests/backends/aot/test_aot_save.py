"""Saving a program: on a full disk, over links and modes, with long names, with its weights beside it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aot_support import X, fresh
from torch import nn

from torchport import aot, runtime
from torchport.cli import main
from torchport.core.errors import ErrorCode, MethodError, ProgramError, TorchportError
from torchport.program.writer import atomic_file
from torchport.testing.page import write_page
from torchport.testing.report import Report

HERE = Path(__file__).resolve().parents[1] / "support"
KIB = 1024


@pytest.fixture(scope="module")
def lowered() -> Any:
    return aot.lower(nn.Linear(8, 2), (torch.ones(3, 8),), backend=fresh().name)


def _in_namespace(folder: Path) -> list[str]:
    """What to put before a command that mounts, for itself alone; skips where nothing lets us."""
    tried: list[str] = []
    for before in (["unshare", "-m"], ["unshare", "-Urm"]):
        command = [*before, "sh", "-c", 'mount -t tmpfs -o size=64k torchport-test "$0" && umount "$0"', str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            tried.append(str(error))
            continue
        if done.returncode == 0:
            return before
        tried.append(done.stderr.strip())
    pytest.skip(f"file systems cannot be mounted here: {'; '.join(tried)}")


def _save_with(engine: str, sizes: list[int], folder: Path) -> str:
    before = _in_namespace(folder)
    path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [*before, sys.executable, str(HERE / "save_on_full_disk.py"), engine, str(folder), *map(str, sizes)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2_000:]}"
    return done.stdout


def test_a_full_disk_while_saving_is_an_error_in_words_and_leaves_the_old_file(tmp_path: Path) -> None:
    said = _save_with("reference", [64 * KIB, 72 * KIB, 640 * KIB, 648 * KIB, 2048 * KIB, 2048 * KIB], tmp_path)
    assert "'old'" in said
    assert "'new'" in said


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "inductor", "xla", "openvino", "executorch"])
def test_every_size_of_a_full_disk(engine: str, tmp_path: Path) -> None:
    if engine != "reference":
        from torchport.backend.registry import registry

        if not registry.get_optional(engine):
            pytest.skip(f"{engine} cannot run here")
    said = _save_with(engine, list(range(64 * KIB, 2048 * KIB + 1, 8 * KIB)), tmp_path)
    assert "'old'" in said
    assert "'new'" in said


# -- where weights go --------------------------------------------------------------------------------------------------
def test_a_plain_name_for_weights_is_beside_the_program(
    lowered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lowered.save(tmp_path / "there" / "m.pt2", external_weights="w.safetensors")
    assert os.listdir(tmp_path / "here") == []
    assert sorted(os.listdir(tmp_path / "there")) == ["m.pt2", "w.safetensors"]
    x = torch.ones(3, 8)
    torch.testing.assert_close(runtime.load(tmp_path / "there" / "m.pt2").load_method()(x)[0], lowered(x))
    lowered.save("../there/n.pt2", external_weights="./v.safetensors")
    assert os.listdir(tmp_path / "here") == ["v.safetensors"], "a folder that is given is the one that is meant"


@pytest.mark.parametrize("how", ["same", "link", "hard link", "relative"])
def test_weights_cannot_take_the_programs_own_place(lowered: Any, tmp_path: Path, how: str) -> None:
    path = tmp_path / "m.pt2"
    lowered.save(path)
    before = path.read_bytes()
    weights = {"same": path, "relative": "m.pt2"}.get(how, tmp_path / "other.safetensors")
    if how == "link":
        os.symlink(path, weights)
    elif how == "hard link":
        os.link(path, weights)
    with pytest.raises(ProgramError, match="the program's own file") as caught:
        lowered.save(path, external_weights=weights)
    assert caught.value.code == ErrorCode.INVALID_ARGUMENT
    assert path.read_bytes() == before


def test_weights_of_a_program_that_was_not_saved_are_not_left(lowered: Any, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").mkdir()
    with pytest.raises(ProgramError, match="not a regular file"):
        lowered.save(tmp_path / "m.pt2", external_weights="w.safetensors")
    assert os.listdir(tmp_path) == ["m.pt2"]


# -- the file that is there --------------------------------------------------------------------------------------------
def test_a_link_stays_a_link_and_a_mode_stays_a_mode(lowered: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "m.pt2", tmp_path / "m.pt2"
    target.write_bytes(b"old")
    target.chmod(0o640)
    os.symlink(Path("real") / "m.pt2", link)
    lowered.save(link)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o7777 == 0o640
    assert runtime.load(target).methods == ("forward",)
    assert os.listdir(tmp_path / "real") == ["m.pt2"]
    dangling = tmp_path / "dangling.pt2"
    os.symlink("real/new.pt2", dangling)
    lowered.save(dangling)
    assert dangling.is_symlink()
    assert runtime.load(tmp_path / "real" / "new.pt2").methods == ("forward",)
    os.symlink("loop.pt2", tmp_path / "loop.pt2")
    with pytest.raises(ProgramError):
        lowered.save(tmp_path / "loop.pt2")


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt2")
    with pytest.raises(ProgramError, match="not a regular file"), atomic_file(tmp_path / "pipe.pt2"):
        pass
    assert (tmp_path / "pipe.pt2").is_fifo()


@pytest.mark.parametrize("sign", ["a", "é"])
def test_long_names(lowered: Any, tmp_path: Path, sign: str) -> None:
    room = (255 - len(".pt2")) // len(sign.encode())
    path = tmp_path / f"{sign * room}.pt2"
    lowered.save(path)
    assert runtime.load(path).methods == ("forward",)
    assert os.listdir(tmp_path) == [path.name]
    for wrong in (tmp_path / f"{sign * 256}.pt2", tmp_path / "nul\0l.pt2", tmp_path / ("d" * 300) / "m.pt2"):
        with pytest.raises(ProgramError) as caught:
            lowered.save(wrong)
        assert caught.value.code == ErrorCode.ACCESS_FAILED
    with pytest.raises(ProgramError):
        lowered.save(tmp_path / "m.pt2", external_weights=f"{sign * 300}.safetensors")
    assert os.listdir(tmp_path) == [path.name]


# -- loading and running -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["reference", "openvino"])
def test_programs_in_memory_and_arrays_that_cannot_be_written(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino" if engine == "openvino" else "torch")
    x = torch.ones(3, 8)
    made = aot.lower(nn.Linear(8, 2), (x,), backend=engine)
    made.save(tmp_path / "m.pt2")
    data = (tmp_path / "m.pt2").read_bytes()
    array = np.ones((3, 8), np.float32)
    array.flags.writeable = False
    expected = made(x).detach().numpy()
    with open(tmp_path / "m.pt2", "rb") as file:
        for source in (data, bytearray(data), memoryview(data), io.BytesIO(data), file):
            program = runtime.load(source)  # type: ignore[arg-type]
            np.testing.assert_allclose(program.load_method()(array)[0], expected, 1e-5)
    assert array.sum() == 24
    for wrong in (io.StringIO("text"), 3, memoryview(data)[::2]):
        with pytest.raises(ProgramError) as caught:
            runtime.load(wrong)  # type: ignore[arg-type]
        assert caught.value.code == ErrorCode.INVALID_ARGUMENT


def test_a_closed_method_says_so_also_without_delegates() -> None:
    alone = aot.lower(nn.ReLU(), (X,), backend="add_sub")
    assert not alone.program.meta().delegates
    method = alone.program.load_method()
    method(X)
    method.close()
    for call in (method, method.set_inputs):
        with pytest.raises(MethodError, match="was closed; load it again") as caught:
            call(X)
        assert caught.value.code == ErrorCode.INVALID_STATE
    with pytest.raises(MethodError):
        method.step()


def test_other_files_that_cannot_be_written_are_errors_in_words_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below a path where a file is, and on a device that is always full."""
    (tmp_path / "file").write_text("")
    for command in (["new", "elsewhere", "--dir"], ["conform", "reference", "--out"]):
        assert main([*command, str(tmp_path / "file" / "sub" / "there")]) == 2
        assert "cannot write" in capsys.readouterr().err
    report = Report({"name": "x"}, {})
    with pytest.raises(TorchportError, match="No space left on device; make room there"):
        write_page(Path("/dev/full"), report)
