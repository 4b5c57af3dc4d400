"""``torchport new``: what it writes is clean and runs; what it refuses, and that it then leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torchport
from torchport import cli
from torchport.scaffold import new_package
from torchport.scaffold.generate import FILES, KINDS

ROOT = Path(torchport.__file__).parents[1]
LONG = "a_backend_with_a_name_of_forty_characters"


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """Standard output; the test fails with all of it if the command does."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated package, with the metadata that installing it would write: its entry point is found."""
    folder = new_package("my_chip", tmp_path_factory.mktemp("new") / "torchport-my-chip")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / "src" / "torchport_my_chip-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["torchport.backends"].items()
    (metadata / "entry_points.txt").write_text(
        "[torchport.backends]\n" + "".join(f"{name} = {value}\n" for name, value in points)
    )
    return folder


def path_of(package: Path) -> str:
    return os.pathsep.join((str(package / "src"), str(ROOT)))


# -- what is written ---------------------------------------------------------------------------------------------------
def test_files_names_and_entry_point(package: Path) -> None:
    written = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    expected = {path.replace("$${package}", "torchport_my_chip") for path in FILES}
    assert {path for path in written if "dist-info" not in path} == expected
    for path in expected:
        text = (package / path).read_text(encoding="utf-8")
        assert "$$" not in text, path
        assert not text or text.endswith("\n"), path
    project = tomllib.loads((package / "pyproject.toml").read_text())
    assert project["project"]["name"] == "torchport-my-chip"
    assert project["project"]["entry-points"]["torchport.backends"] == {
        "my_chip": "torchport_my_chip.backend:MyChipBackend"
    }
    (needed,) = project["project"]["dependencies"]
    assert torchport.__version__.startswith(needed.removeprefix("torchport==").removesuffix("*"))


@pytest.mark.parametrize("name", ["x", "my_chip", LONG])
def test_generated_code_is_formatted_and_lint_free(name: str, tmp_path: Path) -> None:
    folder = new_package(name, tmp_path / name)
    ruff = [sys.executable, "-m", "ruff"]
    run(*ruff, "check", "--no-cache", ".", cwd=folder)
    run(*ruff, "format", "--no-cache", "--check", ".", cwd=folder)
    wide = [line for path in folder.rglob("*.py") for line in path.read_text().splitlines() if len(line) > 120]
    assert not wide


def test_generated_code_is_typed(package: Path) -> None:
    """Strictly, less what torch's own incomplete annotations make impossible."""
    config = {
        "include": ["src", "tests"],
        "extraPaths": ["src", str(ROOT)],
        "typeCheckingMode": "strict",
        **{f"reportUnknown{kind}Type": False for kind in ("Member", "Variable", "Argument")},
    }
    (package / "pyrightconfig.json").write_text(json.dumps(config))
    try:
        run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, cwd=package)
    finally:
        (package / "pyrightconfig.json").unlink()


def test_the_workflow_is_yaml_with_the_commands_of_the_readme(package: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
    workflow = yaml.safe_load((package / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert 'pip install -e ".[test]"' in commands
    assert any(command.startswith("torchport conform my_chip --quick") for command in commands)
    readme = (package / "README.md").read_text()
    assert 'pip install -e ".[test]"' in readme
    assert "torchport conform my_chip --quick" in readme
    for link in re.findall(r"\]\(([^)\s]+)\)", readme):
        assert (package / link).exists()


@pytest.mark.slow
def test_the_readme_and_the_tests_run(package: Path) -> None:
    """All tests but the two that load Dynamo and PyTorch's operator database; those run in the slow test below."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (package / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (package / "tests" / "readme.py").write_text(f"def test_readme():\n    exec({block!r}, {{}})\n")
    quiet = ("-q", "-p", "no:cacheprovider", "-W", "error", "--import-mode=importlib")
    try:
        said = run(
            sys.executable, "-m", "pytest", *quiet, "-k", "readme or training or file", "tests/readme.py",
            "tests/test_backend.py", cwd=package, PYTHONPATH=path_of(package),
        )  # fmt: skip
    finally:
        (package / "tests" / "readme.py").unlink()
    assert "5 passed" in said


# -- what a package may begin as ---------------------------------------------------------------------------------------
_NEEDS = {"onnx": ("onnx", "onnxruntime"), "pjrt": ("jax",)}


def _package_of_kind(kind: str, folder: Path) -> Path:
    made = new_package(f"my_{kind}", folder / kind, kind)
    metadata = made / "src" / f"torchport_my_{kind}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: torchport-my-{kind}\nVersion: 0.1.0\n")
    (point,) = tomllib.loads((made / "pyproject.toml").read_text())["project"]["entry-points"][
        "torchport.backends"
    ].items()
    (metadata / "entry_points.txt").write_text(f"[torchport.backends]\n{point[0]} = {point[1]}\n")
    return made


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reference"])
def test_each_kind_is_clean(kind: str, tmp_path: Path) -> None:
    for name in ("my_chip", LONG):
        folder = new_package(name, tmp_path / name, kind)
        ruff = [sys.executable, "-m", "ruff"]
        run(*ruff, "check", "--no-cache", ".", cwd=folder)
        run(*ruff, "format", "--no-cache", "--check", ".", cwd=folder)
        for path in folder.rglob("*"):
            assert path.is_dir() or "$$" not in path.read_text(encoding="utf-8"), path
    needed = tomllib.loads((tmp_path / "my_chip" / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [one for one in needed if not one.startswith("torchport")] == list(KINDS[kind][2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reference"])
def test_each_kind_passes_its_own_tests(kind: str, tmp_path: Path) -> None:
    """Training in both modes, one computation per step, torch.compile, a program file, operators of the database."""
    for needed in _NEEDS.get(kind, ()):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed, which the engine of this kind is made of")
    package = _package_of_kind(kind, tmp_path)
    said = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests",
        cwd=package, PYTHONPATH=os.pathsep.join((path_of(package), os.environ.get("PYTHONPATH", ""))),
    )  # fmt: skip
    assert re.search(r"\d+ passed", said)
    assert "skipped" not in said


def test_a_pjrt_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    package = _package_of_kind("pjrt", tmp_path)
    said = run(
        sys.executable, "-m", "torchport.cli", "backends", PYTHONPATH=path_of(package),
        MY_PJRT_PJRT_PLUGIN="/nowhere/plugin.so",
    )  # fmt: skip
    assert "MY_PJRT_PJRT_PLUGIN is /nowhere/plugin.so, which is no file" in said


def test_a_kind_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(torchport.TorchportError, match="cannot begin as 'tvm'; it can as reference, fx, table"):
        new_package("my_chip", tmp_path / "new", "tvm")
    assert not list(tmp_path.iterdir())


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MyChip", "'mychip'"),
        ("my-chip", "'my_chip'"),
        ("my__chip", "'my_chip'"),
        ("_chip", "'chip'"),
        ("chip_", "'chip'"),
        ("7up", "a letter first, as 'my_chip'"),
        ("", "a letter first, as 'my_chip'"),
        ("class", "a letter first, as 'my_chip'"),
        ("chip\n", "'chip'"),
        ("../chip", "'chip'"),
        ("größe", "'gr_e'"),
        ("reference", "a backend 'reference' is installed already"),
    ],
)
def test_a_name_that_cannot_be(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(torchport.TorchportError, match=re.escape(said)):
        new_package(name, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_module_of_that_name_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchport_taken.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(torchport.TorchportError, match="a module torchport_taken is installed already"):
        new_package("taken", tmp_path / "new")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.py").write_text("years of it")
    with pytest.raises(torchport.TorchportError, match="exists and is not an empty folder; give another one"):
        new_package("my_chip", tmp_path / "mine")
    with pytest.raises(torchport.TorchportError, match="exists and is not an empty folder"):
        new_package("my_chip", tmp_path / "mine" / "work.py")
    with pytest.raises(torchport.TorchportError, match="cannot write"):
        new_package("my_chip", tmp_path / "mine" / "work.py" / "deeper")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "work.py"]
    assert (tmp_path / "mine" / "work.py").read_text() == "years of it"


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    assert (new_package("my_chip", tmp_path) / "pyproject.toml").exists()


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "zz.txt", "no such template")  # type: ignore[arg-type]
    with pytest.raises(torchport.TorchportError, match="cannot write"):
        new_package("my_chip", tmp_path / "new")
    assert not list(tmp_path.iterdir())


# -- the command -------------------------------------------------------------------------------------------------------
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my_chip"]) == 0
    said = capsys.readouterr().out
    assert "pip install -e 'torchport-my-chip[test]'\n" in said
    assert "torchport conform my_chip --quick\n" in said
    assert (tmp_path / "torchport-my-chip" / "src" / "torchport_my_chip" / "backend.py").exists()
    assert cli.main(["new", "my_chip"]) == 2
    assert capsys.readouterr().err.startswith("torchport: torchport-my-chip exists")


# -- exactly what an author does ---------------------------------------------------------------------------------------
def _checkout(to: Path) -> Path:
    """The parts that are installed, so that building leaves nothing in the tree."""
    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    shutil.copytree(ROOT / "torchport", to / "torchport", ignore=shutil.ignore_patterns("__pycache__"))
    return to


def _pip(bin_: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = (str(bin_ / "python"), "-m", "pip", "install", "-q", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.slow
def test_from_nothing_to_a_conforming_backend(tmp_path: Path) -> None:
    """A fresh virtual environment, torch, torchport, the new package: the kit passes, and so do its own tests."""
    venv.create(tmp_path / "venv", with_pip=True)
    bin_ = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    version = torch.__version__.split("+")[0]
    done = _pip(bin_, f"torch=={version}")
    if done.returncode != 0:
        pytest.skip(f"pip cannot install torch {version} here: {done.stderr.strip().splitlines()[-1]}")
    done = _pip(bin_, str(_checkout(tmp_path / "checkout")))
    assert done.returncode == 0, done.stderr

    clean = {"PYTHONPATH": "", "TORCHPORT_BACKEND": "", "OMP_NUM_THREADS": "1"}
    run(str(bin_ / "torchport"), "new", "mychip", cwd=tmp_path, **clean)
    package = tmp_path / "torchport-mychip"
    done = _pip(bin_, "-e", f"{package}[test]")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mychip +available", run(str(bin_ / "torchport"), "backends", **clean), re.MULTILINE)
    run(str(bin_ / "torchport"), "conform", "mychip", "--quick", cwd=tmp_path, **clean)
    report = json.loads((tmp_path / "conformance-mychip" / "report.json").read_text())
    assert report["totals"]["native"] > 300
    said = run(str(bin_ / "python"), "-m", "pytest", "-q", cwd=package, **clean)
    assert re.search(r"\d+ passed", said)
    assert "failed" not in said
