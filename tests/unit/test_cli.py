"""``torchport.cli``: help, version, and every error as one readable line with exit code 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchport
from torchport import cli, testing


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("arguments", [("--help",), *((f, "--help") for f in ("demo", "backends", "explain", "new"))])
def test_help(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "usage: torchport" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"torchport {torchport.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("fly",), "'fly'"),
        (("demo", "--only", "bert"), "'bert'"),
        (("demo", "--steps", "0"), "0 is not at least 1"),
        (("demo", "--steps", "many"), "many"),
        (("demo", "--fast"), "--fast"),
        (("explain",), "OP"),
        (("new",), "NAME"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("torchport: ")
    assert err.count("\n") == 1
    assert said in err
    assert "--help" in err


def test_backends_shows_each_with_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("backends", capsys=capsys)
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert "  available  (entry point torchport.backends.reference" in rows["reference"]
    assert set(rows) == {row.name for row in torchport.registry.list()}


def test_doctor_tells_versions_backends_and_what_libraries_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchport.debug import doctor

    def fail() -> Any:
        raise OSError("no file")

    monkeypatch.setattr(doctor, "SECTIONS", [*doctor.SECTIONS, ("broken", fail)])
    code, out, _ = run("doctor", capsys=capsys)
    assert code == 0
    assert f"torchport   {torchport.__version__}" in out
    assert "current_accelerator() is port" in out
    assert all(row.name in out for row in torchport.registry.list())
    assert "follow.cpp" in out
    assert "ACCELERATE_TORCH_DEVICE=port" in out
    assert out.endswith("broken\n  failed  OSError: no file\n")


def test_an_unknown_backend_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("demo", "--backends", "reference,chip", capsys=capsys)
    assert code == 2
    assert err.startswith("torchport: no backend is called 'chip'; installed are: ")
    assert "reference" in err


def test_errors_of_several_lines_become_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> int:
        raise torchport.CompileError("it broke", op="aten.add.Tensor", source="model.py:1 in f")

    monkeypatch.setattr(cli, "_backends", fail)
    code, _, err = run("backends", capsys=capsys)
    assert (code, err) == (2, "torchport: it broke op: aten.add.Tensor line: model.py:1 in f\n")


def test_demo_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.demo import main as demo_main

    seen: list[dict[str, Any]] = []

    def record(**options: Any) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr(demo_main, "run_demo", record)
    assert cli.main(["demo", "--backends", "reference, inductor,", "--only", "digits", "--quick", "--steps", "3"]) == 1
    assert cli.main(["demo"]) == 1
    assert seen == [
        {"backends": ["reference", "inductor"], "only": "digits", "quick": True, "steps": 3},
        {"backends": None, "only": None, "quick": False, "steps": None},
    ]


def test_explain_an_operator(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("explain", "aten::add.Tensor", capsys=capsys)
    assert code == 0
    assert "aten::add.Tensor" in out


def test_explain_an_unknown_operator_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("explain", "aten::addd.Tensor", capsys=capsys)
    assert code == 2
    assert err.startswith("torchport: ")
    assert err.count("\n") == 1


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "torchport.cli", "fly"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("torchport: ")
    assert "Traceback" not in done.stderr


# -- output that cannot be written, and interrupts -------------------------------------------------------------------
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
@pytest.mark.parametrize("arguments", [("backends",), ("--help",), ("explain", "aten::add.Tensor")])
def test_output_that_cannot_be_written_is_an_error_in_words(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main(arguments) == 2
    assert capsys.readouterr().err == "torchport: No space left on device\n"


def test_a_reader_who_has_gone_is_no_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert cli.main(["backends"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_a_run_in_order_and_says_how_to_go_on(
    number: signal.Signals,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    before = signal.getsignal(signal.SIGTERM)
    kept: list[bool] = []

    def interrupted(plan: Any, journal: Path, resume: bool, progress: Any) -> None:
        if kept:
            journal.parent.mkdir()
            journal.write_text("{}")
        os.kill(os.getpid(), number)

    monkeypatch.setattr(testing, "conform", interrupted)
    folder = tmp_path / "out"
    arguments = ("conform", "reference", "--out", str(folder))
    assert run(*arguments, capsys=capsys) == (code, "", f"torchport: {said}\n")
    assert not folder.exists()
    kept.append(True)
    hint = f"what was run is kept; go on with --resume --out {folder}\n"
    assert run(*arguments, capsys=capsys) == (code, "", f"{hint}torchport: {said}\n")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_of_an_unknown_backend_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchport.testing import run as testing_run

    def unknown(target: str) -> None:
        raise torchport.BackendNotFound(f"no backend is called {target!r}")

    monkeypatch.setattr(testing_run, "list_target", unknown)
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("conform", "nope"),
        ("conform", "nope", "--baseline", "missing.json"),
        ("compare", "missing.json", "missing.json", "--html", "page.html"),
        ("minimise", "nope", "--script", "missing.py"),
        ("new", "No-Name"),
        ("inspect", "missing.pt2"),
    ):
        code, out, err = run(*arguments, capsys=capsys)
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
    assert not list(tmp_path.iterdir())


INTERRUPT = """
import os, signal, subprocess, sys, time
command = [sys.executable, "-m", "torchport.cli", "conform", "reference", "--ops", "^(add|sin|cos)$", "--dtypes", "all"]
process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
while not os.path.exists("conformance-reference/journal.jsonl"):
    time.sleep(0.1)
time.sleep(float(sys.argv[1]))
os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
said = process.communicate(timeout=120)[1]
print(process.returncode, said)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 1])
def test_ctrl_c_reaches_a_run_and_its_workers(seconds: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(torchport.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.stdout.startswith("130 "), done
    assert "--resume" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# -- whatever is imported first --------------------------------------------------------------------------------------
FIRST = """
import importlib, os, pkgutil, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch, torch._dynamo
import importlib.abc, importlib.machinery
sys.dont_write_bytecode = True

class Again(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "The first ``import torch`` of a child ends as that of a fresh process does: PyTorch loads its devices."
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch" else None
    def create_module(self, spec):
        return torch
    def exec_module(self, module):
        sys.meta_path.remove(self)
        module._import_device_backends()

def first(action):
    "What an action says in a process in which torchport was not imported, nor, as far as that shows, PyTorch."
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
        sys.meta_path.insert(0, Again())
        del sys.modules["torch"]
        try:
            action()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said
"""
LEAVES = """
for name in ("frontend", "frontend.device.module", "frontend.device.register", "frontend.device.accelerator", "aot"):
    print(name, repr(first(lambda: importlib.import_module("torchport." + name))))
explain = ["explain", "aten::add.Tensor", "--device", "port"]
print("cli", repr(first(lambda: importlib.import_module("torchport.cli").main(explain) and sys.exit("failed"))))
"""
EVERYTHING = """
import torchport as known
names = [module.name for module in pkgutil.walk_packages(known.__path__, "torchport.")]
public = list(known.__all__)
for name in [name for name in sys.modules if name.split(".")[0] == "torchport"]:
    del sys.modules[name]
for name in names:
    print(name, repr(first(lambda: importlib.import_module(name))))
for name in public:
    print(name, repr(first(lambda: getattr(importlib.import_module("torchport"), name))))
"""


@pytest.mark.parametrize("what", [LEAVES, pytest.param(EVERYTHING, marks=pytest.mark.slow)], ids=["few", "all"])
def test_any_module_and_name_can_be_the_first_that_is_imported(what: str) -> None:
    """Modules are imported in children of a process that has only PyTorch: a fresh process each takes seconds."""
    environment = {**os.environ, "PYTHONPATH": str(Path(torchport.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", FIRST + what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6 if what is LEAVES else len(lines) > 200
    assert not [line for line in lines if not line.endswith(" ''")]
