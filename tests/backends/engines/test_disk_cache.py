"""The disk cache behind every frontend: what is a hit, what is not, and that nothing is ever wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cache_engine
import pytest
import torch
from cache_engine import Changes, Kept, compiled
from helpers_graphs import normal_form
from torch import nn

import torchport
from torchport import metrics
from torchport.backend import compile_key, kept
from torchport.backend.compiler import computations
from torchport.backend.registry import registry
from torchport.backend.serialize import fingerprint
from torchport.cache import folder as folder_module
from torchport.cache.current import disk_cache
from torchport.core.config import config
from torchport.core.errors import CacheMiss, GraphError
from torchport.core.specs import CompileSpecs

COUNTED = ("DiskCacheHit", "DiskCacheMiss", "DiskCacheRefused", "UncachedCompile")
HERE = Path(__file__).parents[1] / "support"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """The backend bound to ``port:0`` and ``port:1``, with an empty cache in a folder of the test's own."""
    monkeypatch.setenv(cache_engine.LOG, str(tmp_path / "compiled"))
    torchport.register(Kept)
    folder_module._said.clear()
    with config.override(cache="on", cache_dir=str(tmp_path / "cache")):
        torchport.use("kept")
        yield registry.get("kept")  # type: ignore[misc]
    torchport.use("reference")
    registry.unregister("kept")
    compile_key._fixed.clear()


def _next_process() -> None:
    """Forget what a process remembers of what it compiled, and count anew."""
    torchport.sync()
    computations.clear()
    torchport.use("reference")
    torchport.use("kept")
    metrics.reset()


def _counts() -> tuple[int, ...]:
    return tuple(int(metrics.counter(name)) for name in COUNTED)


def _step(device: str | torch.device = "port") -> torch.Tensor:
    x = torch.arange(6.0).reshape(2, 3).to(device)
    return (torch.tanh(x @ x.t()) * 0.5).cpu()


def _expected() -> torch.Tensor:
    x = torch.arange(6.0).reshape(2, 3)
    return torch.tanh(x @ x.t()) * 0.5


# -- hits and misses ---------------------------------------------------------------------------------------------------
def test_a_later_process_compiles_nothing(engine: Kept) -> None:
    _next_process()
    first = _step()
    hit, miss, refused, built = _counts()
    assert (hit, refused) == (0, 0)
    assert miss == built > 0
    _next_process()
    assert torch.equal(_step(), first)
    assert torch.equal(first, _expected())
    assert _counts() == (built, 0, 0, 0)
    assert len(compiled()) == built


def test_a_training_step_is_found_again(engine: Kept) -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 2)).to("port")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses: list[float] = []
        for _ in range(3):
            loss = model(torch.ones(3, 4, device="port")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    _next_process()
    first = train()
    _next_process()
    assert train() == first
    hits, misses, refused, built = _counts()
    assert hits > 0
    assert (misses, refused, built) == (0, 0, 0)


def test_torch_compile_shares_it(engine: Kept) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ x.t()) * 0.5

    x = torch.arange(6.0).reshape(2, 3)
    for missed in (True, False):
        torch.compiler.reset()
        _next_process()
        made: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
            compute, backend="torchport", options={"backend": "kept"}
        )
        torch.testing.assert_close(made(x), compute(x))
        assert _counts() == ((0, 1, 0, 1) if missed else (1, 0, 0, 0))
    torch.compiler.reset()


def test_another_device_of_the_kind_is_a_hit(engine: Kept) -> None:
    _next_process()
    _step("port:0")
    _next_process()
    assert torch.equal(_step(torchport.device("kept", 1)), _expected())
    hits, misses, *_ = _counts()
    assert hits > 0
    assert misses == 0


def test_off_reads_and_writes_nothing(engine: Kept) -> None:
    _next_process()
    with config.override(cache="off"):
        _step()
    assert _counts()[:3] == (0, 0, 0)
    assert not list(Path(config.cache_dir).glob("*.entry"))


def test_read_only_reads(engine: Kept) -> None:
    _next_process()
    _step()
    there = sorted(Path(config.cache_dir).iterdir())
    _next_process()
    with config.override(cache="read-only"):
        _step()
        assert _counts()[1:] == (0, 0, 0)
        torch.ones(7, device="port").sum().cpu()
    assert _counts()[1] > 0
    assert sorted(Path(config.cache_dir).iterdir()) == there


def test_cache_only_raises_and_shows_what_is_nearest(engine: Kept) -> None:
    with config.override(cache="cache-only"):
        _next_process()
        Path(config.cache_dir).mkdir(mode=0o700, exist_ok=True)
        with pytest.raises(CacheMiss, match="it has no entry at all"):
            _step()
    _next_process()
    _step()
    _next_process()
    with config.override(cache="cache-only"):
        assert torch.equal(_step(), _expected())
        with pytest.raises(CacheMiss) as caught:
            (torch.ones(4, device="port").cos() * 0.5).cpu()
    message = str(caught.value)
    assert "the nearest entry is" in message
    for name in ("graph", "inputs", "outputs"):
        assert f"\n    {name}: " in message
    for name in ("torch", "machine", "backend", "settings", "specs"):
        assert f"\n    {name}: " not in message, "these are the same"
    assert len(compiled()) == _compiled_once()


def _compiled_once() -> int:
    folder = disk_cache()
    assert folder is not None
    return len(folder.list())


def test_a_backend_that_another_process_cannot_make_is_not_cached(engine: Kept, tmp_path: Path) -> None:
    class Local(Kept):
        name = "local"

    torchport.register(Local)
    try:
        torchport.use("local")
        metrics.reset()
        assert torch.equal(_step(), _expected())
        assert metrics.counter("NotCacheable") > 0
        assert _counts()[:3] == (0, 0, 0)
    finally:
        torchport.use("reference")
        registry.unregister("local")


def test_reference_is_not_cached(engine: Kept) -> None:
    torchport.use("reference")
    computations.clear()
    metrics.reset()
    _step()
    assert metrics.counter("NotCacheable") > 0
    assert metrics.counter("DiskCacheWrite") == 0


# -- what goes wrong ---------------------------------------------------------------------------------------------------
def test_what_the_engine_refuses_is_counted_and_compiled_again(engine: Kept, capfd: pytest.CaptureFixture[str]) -> None:
    _next_process()
    _step()
    built = len(compiled())
    _next_process()
    engine = registry.get("kept")  # type: ignore[assignment]
    engine.refuses = "not on this machine"
    assert torch.equal(_step(), _expected())
    hits, misses, refused, again = _counts()
    assert (refused, misses, again) == (1, 1, 1)
    assert hits == built - 1
    assert "found but refused" in capfd.readouterr().err
    _next_process()
    _step()
    assert _counts() == (built, 0, 0, 0), "what was compiled again was kept"


def test_what_the_engine_compiles_again_by_itself_is_counted(engine: Kept) -> None:
    _next_process()
    _step()
    built = len(compiled())
    _next_process()
    registry.get("kept").grumbles = "another driver"  # type: ignore[attr-defined]
    assert torch.equal(_step(), _expected())
    assert _counts() == (0, 0, built, built)
    assert _compiled_once() == 0
    registry.get("kept").grumbles = ""  # type: ignore[attr-defined]


def test_damaged_entries_are_compiled_again(engine: Kept) -> None:
    _next_process()
    _step()
    built = len(compiled())
    for path in Path(config.cache_dir).glob("*.entry"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    _next_process()
    assert torch.equal(_step(), _expected())
    assert _counts() == (0, built, 0, built)
    assert metrics.counter("DiskCacheDamaged") >= built
    _next_process()
    _step()
    assert _counts() == (built, 0, 0, 0)


def test_debug_mode_finds_a_backend_that_changes_the_graph(engine: Kept) -> None:
    graph = _graph(lambda x, y: x * y, torch.ones(2), torch.ones(2))
    torchport.register(Changes)
    try:
        changes = registry.get("changes")
        with config.override(verify_graphs=True), pytest.raises(GraphError, match=r"changed what it was given \(graph"):
            kept.find_or_prepare(changes, CompileSpecs(), graph, fingerprint(graph))
        assert _compiled_once() == 0
    finally:
        registry.unregister("changes")


# -- keys --------------------------------------------------------------------------------------------------------------
def _graph(function: Callable[..., Any], *args: torch.Tensor) -> Any:
    return normal_form(function, args)[0]


def _manifest(engine: Kept, function: Callable[..., Any], *args: torch.Tensor, **options: str) -> dict[str, str]:
    graph = _graph(function, *args)
    return _manifest_of(engine, graph, **options)


def _manifest_of(engine: Kept, graph: Any, **options: str) -> dict[str, str]:
    folder = disk_cache()
    assert folder is not None
    made: list[dict[str, str]] = []
    original = kept.key_of
    kept.key_of = lambda manifest: made.append(dict(manifest)) or original(manifest)  # type: ignore[assignment]
    try:
        kept.find_or_prepare(engine, CompileSpecs(options), graph, fingerprint(graph))
    finally:
        kept.key_of = original  # type: ignore[assignment]
    return made[0]


def _product(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x * y).sum(0)


def test_names_and_lines_are_not_in_the_key(engine: Kept) -> None:
    def renamed(weight_of_layer_7: torch.Tensor, rank_3: torch.Tensor) -> Any:
        return (weight_of_layer_7 * rank_3).sum(0)

    x = torch.ones(2, 3)
    plain = _manifest(engine, _product, x, x)
    assert _manifest(engine, renamed, x, x) == plain
    graph = _graph(_product, x, x)
    for number, node in enumerate(graph.graph.nodes):
        node.name = f"other_{number}"
        node.meta.update(source=f"elsewhere.py:{number}", debug_handle=1_000 + number)
    assert _manifest_of(engine, graph) == plain


@pytest.mark.parametrize(
    ("what", "components"),
    [
        ("shape", {"graph", "inputs", "outputs", "values"}),
        ("dtype", {"graph", "inputs", "outputs", "values"}),
        ("layout", {"graph", "inputs", "values"}),
        ("operator", {"graph"}),
        ("constant", {"graph", "outputs", "values"}),
        ("output", {"graph", "outputs", "values"}),
        ("donated", {"graph"}),
        ("spec", {"specs"}),
        ("precision", {"settings"}),
        ("threads", {"settings"}),
        ("default dtype", {"settings"}),
        ("deterministic", {"settings"}),
        ("engine's environment", {"engine: flags"}),
        ("engine's build", {"engine"}),
        ("backend's version", {"backend"}),
        ("backend's code", {"backend's code"}),
        ("torch", {"torch"}),
        ("machine", {"machine"}),
        ("torchport", {"torchport"}),
        ("device", {"device"}),
    ],
)
def test_each_component_changes_the_key(
    engine: Kept, what: str, components: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = torch.ones(4, 4)
    before = _manifest(engine, _product, x, x)
    compile_key._fixed.clear()
    function: Callable[..., Any] = _product
    args, options = (x, x), dict[str, str]()
    with pytest.MonkeyPatch.context() as patch:
        if what == "shape":
            args = (torch.ones(4, 5), torch.ones(4, 5))
        elif what == "dtype":
            args = (x.double(), x.double())
        elif what == "layout":
            args = (x.t(), x.t())
        elif what == "operator":
            function = lambda x, y: (x + y).sum(0)  # noqa: E731
        elif what == "constant":
            function = lambda x, y: (x * y).sum(0, keepdim=True)  # noqa: E731
        elif what == "output":
            function = lambda x, y: ((x * y).sum(0), x.cos())  # noqa: E731
        elif what == "spec":
            options = {"level": "2"}
        elif what == "precision":
            torch.set_float32_matmul_precision("medium")
        elif what == "threads":
            patch.setattr(torch, "get_num_threads", lambda: 77)
        elif what == "default dtype":
            torch.set_default_dtype(torch.float64)
        elif what == "deterministic":
            torch.use_deterministic_algorithms(True)
        elif what == "engine's environment":
            patch.setattr(engine, "settings", {"flags": "-O9"})
        elif what == "engine's build":
            (tmp_path / "null").write_bytes(b"another build")
            patch.setattr(engine, "engine", str(tmp_path / "null"))
        elif what == "backend's version":
            patch.setattr(type(engine), "version", "2")
        elif what == "backend's code":
            patch.setattr(compile_key, "_code_of", lambda backend, digests: "other")
        elif what == "torch":
            patch.setattr(compile_key, "torch_build", lambda: "2.13.0 other")
        elif what == "machine":
            patch.setattr(compile_key, "machine", lambda: "linux other")
        elif what == "torchport":
            patch.setattr(compile_key, "_OWN_CODE", ("core",))
        elif what == "device":
            patch.setattr(engine, "devices", lambda: (torchport.BackendDevice("npu", 0),))
        graph = _graph(function, *args)
        if what == "donated":
            next(iter(graph.graph.nodes)).meta["donated"] = True
        try:
            after = _manifest_of(engine, graph, **options)
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            compile_key._fixed.clear()
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == components


def test_an_edit_of_a_backends_file_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.cache.digests import Digests

    memory = tmp_path / "digests.json"
    source = tmp_path / "engine.py"
    source.write_text("one = 1\n")
    first = Digests(memory)
    before = first.file(source)
    first.save()
    assert Digests(memory).file(source) == before
    source.write_text("one = 2\n")
    assert Digests(memory).file(source) != before
    memory.write_text("{ damaged")
    source.write_text("one = 1\n")
    assert Digests(memory).file(source) == before
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1")
    folder = Digests(memory).sources(str(package))
    (package / "b.py").write_text("2")
    assert Digests(None).sources(str(package)) != folder


# -- several processes -------------------------------------------------------------------------------------------------
PROGRAM = """
import os, sys
sys.path.insert(0, {here!r})
import torch, torchport, cache_engine
from torch import nn
torchport.register(cache_engine.Kept)
torchport.use("kept")
{body}
counts = torchport.metrics.snapshot()["counters"]
compilers = any(name.partition(".")[2].partition(".")[0] in ("_inductor", "_dynamo") for name in sys.modules)
names = ("DiskCacheHit", "DiskCacheMiss", "UncachedCompile")
print(*(int(counts.get(name, 0)) for name in names), int(compilers or "sympy" in sys.modules))
"""

MODEL = """
torchport.use("kept", {index})
torch.manual_seed(0)
{names}
model = Model().to("port")
with torch.no_grad():
    print(model(torch.ones(2, 3, device="port")).sum().item())
"""
NAMES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.{a}, self.{b} = nn.Linear(3, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.{b}(torch.tanh(self.{a}(x)))
"""


def _program(body: str) -> str:
    return PROGRAM.format(here=str(HERE), body=textwrap.dedent(body))


def _start(body: str, tmp_path: Path, **environ: str) -> subprocess.Popen[str]:
    variables = {
        **os.environ, "TORCHPORT_CACHE": "on", "TORCHPORT_CACHE_DIR": str(tmp_path / "cache"),
        cache_engine.LOG: str(tmp_path / "compiled"), "PYTHONPATH": str(HERE.parents[2]), **environ,
    }  # fmt: skip
    folder = environ.get("PWD", str(tmp_path))
    return subprocess.Popen(
        [sys.executable, "-c", _program(body)],
        env=variables, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _ended(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.splitlines()


def _entries(tmp_path: Path) -> int:
    """How many entries hold what a backend compiled."""
    folder = folder_module.CacheFolder(tmp_path / "cache", 1 << 30)
    described = [folder.description(one.key) for one in folder.list()]
    return sum(one is not None and one.about["backend"] == "kept" for one in described)


def test_keys_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """Other hash seeds, working folders, parameter names and device indices."""
    (tmp_path / "elsewhere").mkdir()
    first = MODEL.format(index=0, names=NAMES.format(a="one", b="two"))
    other = MODEL.format(index=1, names=NAMES.format(a="zweites", b="a_first"))
    value, counts = _ended(_start(first, tmp_path, PYTHONHASHSEED="1"))
    again, found = _ended(_start(other, tmp_path, PYTHONHASHSEED="2", PWD=str(tmp_path / "elsewhere")))
    _, misses, built, _ = map(int, counts.split())
    assert misses == built > 0
    assert again == value
    assert [int(one) for one in found.split()[:3]] == [built, 0, 0]


@pytest.mark.slow
def test_ten_processes_at_once_compile_each_thing_once(tmp_path: Path) -> None:
    body = """
        import time
        preprocess = cache_engine.Kept.preprocess
        def slowly(self, graph, specs):
            time.sleep(0.5)
            return preprocess(self, graph, specs)
        cache_engine.Kept.preprocess = slowly
        """ + textwrap.indent(MODEL.format(index=0, names=NAMES.format(a="one", b="two")), "        ")
    lines = [_ended(process) for process in [_start(body, tmp_path) for _ in range(10)]]
    assert len({value for value, _ in lines}) == 1
    assert _entries(tmp_path) == len((tmp_path / "compiled").read_text().split()) > 0
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix in (".tmp", ".lock", ".loading")]


@pytest.mark.slow
def test_the_process_that_compiles_fills_it_and_reads_it(tmp_path: Path) -> None:
    body = """
        from torchport.core.config import config
        from torchport.worker.service import service
        config.tiers = "on"
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).to("port")
        from torchport.run import worth
        with torch.no_grad(), worth.costs.ignored():
            for _ in range(4):
                print(model(torch.ones(2, 3, device="port")).sum().item() != 0)
            assert service.wait(120)
            model(torch.ones(2, 3, device="port")).sum().item()
        print(torchport.metrics.counter("TakenOver") > 0, os.getpid())
        """
    *_, taken, counts = _ended(_start(body, tmp_path))
    pid = taken.split()[1]
    assert taken.startswith("True")
    assert pid not in (tmp_path / "compiled").read_text().split(), "another process compiled"
    assert int(counts.split()[1]) > 0
    before = (tmp_path / "compiled").read_text()
    *_, counts = _ended(_start(body, tmp_path))
    assert int(counts.split()[0]) > 0
    assert int(counts.split()[1]) == 0
    assert (tmp_path / "compiled").read_text() == before


@pytest.mark.slow
def test_warm_fills_it_for_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_program(MODEL.format(index=0, names=NAMES.format(a="one", b="two"))))
    environ = {
        **os.environ, "TORCHPORT_CACHE": "on", "TORCHPORT_CACHE_DIR": str(tmp_path / "cache"),
        cache_engine.LOG: str(tmp_path / "compiled"), "PYTHONPATH": str(HERE.parents[2]),
    }  # fmt: skip

    def run(*command: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *command],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    value, _, told = run("-m", "torchport.cli", "warm", "--workers", "2", str(script), "an argument")
    entries = _entries(tmp_path)
    assert told.startswith(f"{entries} compiled, 0 known already")
    again, counts = run(str(script))
    assert again == value
    assert [int(one) for one in counts.split()[:3]] == [entries, 0, 0]
    assert f"0 compiled, {entries} known already" in run("-m", "torchport.cli", "warm", str(script))[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inductor", "xla", "openvino"])
def test_a_hit_imports_no_compiler(tmp_path: Path, name: str) -> None:
    if registry.get_optional(name) is None:
        pytest.skip(f"{name} is not installed")
    body = f"""
        torchport.use("{name}")
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4), nn.LayerNorm(4)
        model = nn.Sequential(*layers).eval()
        with torch.no_grad():
            print(model.to("port")(torch.ones(2, 3, 4, 4, device="port")).sum().item())
        print(*sorted(m for m in sys.modules if m in {COMPILING!r}))
        """
    value, _, counts = _ended(_start(body, tmp_path))
    again, imported, found = _ended(_start(body, tmp_path))
    assert again == value
    assert imported == ""
    built = int(counts.split()[2])
    assert built > 0
    assert [int(one) for one in found.split()] == [built, 0, 0, 0]


COMPILING = ("torch._inductor", "torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes")
"""What only compiling needs."""
