"""``torchport.cli``: help, version, and every error as one readable line with exit code 2."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import torchport
from torchport import cli


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
