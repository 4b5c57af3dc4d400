"""The package as installed: light to import, complete, and never in the way of ``import torch``."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchport
from torchport.core import releases

ROOT = Path(torchport.__file__).parent
PROJECT = ROOT.parent / "pyproject.toml"
HEAVY = ("torch._dynamo", "torch._inductor", "jax", "openvino", "executorch", "transformers", "triton")


def python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def loaded_by(code: str) -> set[str]:
    done = python(f"import sys\n{code}\nimport json; print(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_torchport_imports_no_torch() -> None:
    loaded = loaded_by("import torchport; torchport.errors; torchport.config; torchport.metrics")
    assert "torch" not in loaded
    assert not loaded.intersection(HEAVY)


def test_importing_torch_sets_up_the_device_without_any_engine() -> None:
    loaded = loaded_by("import torch; assert torch.device('port').type == 'port'")
    # Each module more is time that every program with PyTorch in it pays.
    device = (
        "accelerator", "defaults", "first_factories", "fork", "generators", "libraries", "lightning", "module", "names",
        "opaque", "parameters", "patches", "ready", "register", "storages", "streams",
    )  # fmt: skip
    expected = {"torchport", "torchport.core", "torchport.core.forks", "torchport.core.random_state"}
    expected |= {"torchport.core.releases"}
    expected |= {"torchport.frontend", "torchport.frontend.device", "torchport.frontend.register"}
    expected |= {"torchport.frontend.distributed", "torchport.frontend.distributed.register"}
    expected |= {"torchport.frontend.spmd", "torchport.frontend.spmd.register"}
    expected |= {f"torchport.frontend.device.{name}" for name in device}
    assert {name for name in loaded if name.partition(".")[0] == "torchport"} == expected
    assert not loaded.intersection(HEAVY)
    assert not [name for name in loaded if name.startswith("torchport.backends")]


def test_the_command_line_loads_no_database_of_operators() -> None:
    """It takes seconds, and needs a package that only conformance asks for."""
    loaded = loaded_by("from torchport import cli; cli.main(['backends'])")
    assert "torchport.testing.command" in loaded
    assert not loaded.intersection({"torchport.testing.torch_api", "expecttest", *HEAVY} - {"torch._inductor"})


def test_seeds_and_states_before_the_first_use_need_no_lazy_core() -> None:
    device_type = "" if releases.version() >= (2, 13) else "device_type='port'"  # before, CUDA's where nothing is said
    code = (
        "import sys, torch; before = torch.port.get_rng_state(); torch.manual_seed(7)\n"
        f"with torch.random.fork_rng({device_type}): torch.manual_seed(8)\n"
        "assert torch.port.get_rng_state().tolist()[:2] == [7, 0] and not torch.port.is_initialized()\n"
        "assert 'torchport.run' not in sys.modules\n"
        "x = torch.rand(3, device='port').tolist(); torch.manual_seed(7)\n"
        "assert torch.rand(3, device='port').tolist() == x\n"
        "from torchport.run.device_runtime import DEFAULT_SEED\n"
        "assert before.tolist() == list(DEFAULT_SEED.to_bytes(8, 'little')) + [0] * 8; print('done')"
    )
    done = python(code, TORCHPORT_BACKEND="reference")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_importing_torch_and_using_the_device_warns_of_nothing() -> None:
    done = python("import torch; print(torch.device('port')); print((torch.ones(2, device='port') + 1).sum().item())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "port\n4.0\n", "")


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in torchport.__all__:
        assert getattr(torchport, name) is not None
    assert set(torchport.__all__) <= set(dir(torchport))
    assert len(set(torchport.__all__)) == len(torchport.__all__)
    with pytest.raises(AttributeError, match="'torchport' has no attribute 'nothing'"):
        _ = torchport.nothing


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(torchport.__all__)


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=["warnings shown", "warnings are errors"])
@pytest.mark.parametrize(
    "broken", ["raise OSError('no chip')", "raise ImportError('half installed')", "import torch.no"]
)
def test_a_device_that_fails_to_set_up_never_breaks_import_torch(flags: tuple[str, ...], broken: str) -> None:
    code = (
        "import sys\n"
        "class Loader:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torchport.frontend.device.register':\n"
        f"            {broken}\n"
        "sys.meta_path.insert(0, Loader())\n"
        "import torch\n"
        "print(torch.ones(2).sum().item())\n"
    )
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert "torchport: torch.device('port') is not available" in done.stderr


def test_autoload_can_be_switched_off_and_torchport_still_works() -> None:
    code = (
        "import sys, torch; assert 'torchport' not in sys.modules; import torchport; print(torchport.list_backends())"
    )
    done = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout


def test_the_installed_entry_points_are_the_projects() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    installed = importlib.metadata.distribution("torchport").entry_points
    declared = {("console_scripts", name): value for name, value in project["scripts"].items()}
    for group, points in project["entry-points"].items():
        declared.update({(group, name): value for name, value in points.items()})
    assert {(point.group, point.name): point.value for point in installed} == declared
    for point in installed:
        assert point.load() is not None


def test_one_version() -> None:
    version = torchport.__version__
    assert tomllib.loads(PROJECT.read_text())["project"]["version"] == version
    assert importlib.metadata.version("torchport") == version
    assert version in (PROJECT.parent / "CHANGELOG.md").read_text()


def test_the_releases_of_torch_are_those_that_were_tested() -> None:
    (makefile,) = re.findall(r"^TORCH := (.*)$", (PROJECT.parent / "Makefile").read_text(), re.MULTILINE)
    (wanted,) = [d for d in tomllib.loads(PROJECT.read_text())["project"]["dependencies"] if d.startswith("torch>")]
    tested = sorted(releases.version(text) for text in releases.TESTED)
    (first, last), after = (tested[0], tested[-1]), (tested[-1][0], tested[-1][1] + 1)
    assert wanted == f"torch>={first[0]}.{first[1]},<{after[0]}.{after[1]}", (first, last)
    assert makefile in releases.TESTED


def test_names_that_releases_brought_or_dropped_are_there_when_it_is_said() -> None:
    import torch

    assert releases.version("2.13.0+cpu") == (2, 13)
    assert releases.has("torch.Tensor.data")
    for name in (*releases.SINCE, *releases.UNTIL):
        *path, last = name.split(".")[1:]
        importlib.import_module("torch._dynamo")  # which the module below needs to be imported first
        importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
        owner = functools.reduce(getattr, path, torch)
        assert hasattr(owner, last) == releases.has(name), name


def test_what_is_said_of_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for version, said in (
        ("2.13.0+cpu", "tested"),
        ("2.12.0+cu130", "not tested"),
        ("2.13.9", "another patch"),
        ("3.1.0", "not tested"),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        assert said in releases.said()


def test_the_package_is_typed() -> None:
    assert (ROOT / "py.typed").exists()
