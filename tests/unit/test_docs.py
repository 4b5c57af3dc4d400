"""The pages: their code runs, their links lead somewhere, and what they list is what the code has."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch._library import custom_ops
from torch._subclasses.fake_tensor import FakeTensorMode

import torchport
from torchport.core import releases

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "_site" not in page.parts)]
INTERNALS = ROOT / "docs" / "torch-internals.md"
EXAMPLES = ROOT / "examples"
NEED_C = ("emit-code.md", "make-it-fast.md")
RUN_ELSEWHERE = ("dispatch.md", "ecosystem.md")
"""By tests of its own."""


def _blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


# -- code ----------------------------------------------------------------------------------------------------------
_RUNNER = """
import sys, types
import torchport
for name, blocks in {blocks!r}:
    page = sys.modules["page"] = types.ModuleType("page")
    before = set(torchport.registry.names())
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"<{{name}}, block {{number}}>", "exec"), page.__dict__)
    torchport.use("reference")
    for backend in set(torchport.registry.names()) - before:
        torchport.registry.unregister(backend)
    for example in {examples!r}:
        sys.modules.pop(example, None)
"""


def _run_pages(pages: list[Path]) -> None:
    """Each page's blocks in order; their ``assert`` lines are the page's claims. One process for all pages."""
    blocks = [(page.relative_to(ROOT).as_posix(), _blocks(page)) for page in pages]
    examples = [path.stem for path in EXAMPLES.glob("*.py")]
    with tempfile.TemporaryDirectory() as folder:  # for the files that pages write
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", _RUNNER.format(blocks=blocks, examples=examples)],
            cwd=folder,
            env={
                # With tiers, as readers have them.
                **{name: value for name, value in os.environ.items() if name != "TORCHPORT_TIERS"},
                "TORCHPORT_BACKEND": "reference",
                "PYTHONPATH": os.pathsep.join((str(EXAMPLES), str(ROOT), os.environ.get("PYTHONPATH", ""))),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


WITH_CODE = [page for page in PAGES if _blocks(page) and page.name not in RUN_ELSEWHERE]


def test_code_on_the_pages_runs() -> None:
    pages = [page for page in WITH_CODE if page.name not in NEED_C]
    assert len(pages) > 5
    _run_pages(pages)


@pytest.mark.skipif(shutil.which("cc") is None, reason="the pages compile C, and there is no compiler called cc")
def test_code_on_the_pages_about_c_runs() -> None:
    pages = [page for page in WITH_CODE if page.name in NEED_C]
    assert len(pages) == len(NEED_C)
    _run_pages(pages)


def test_readme_example_is_ten_lines() -> None:
    first = _blocks(ROOT / "README.md")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10


def test_the_smallest_backend_is_on_its_page_and_short() -> None:
    source = (EXAMPLES / "tiny_backend.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 60
    assert source in _blocks(DOCS / "write-a-backend.md")


def test_the_backend_that_emits_c_is_on_its_page_in_pieces() -> None:
    source = (EXAMPLES / "c_backend.py").read_text(encoding="utf-8")
    page = DOCS / "tutorial" / "emit-code.md"
    pieces = [block for block in _blocks(page) if block in source]
    assert len(pieces) >= 5
    assert "".join("".join(pieces).split()) == "".join(source.split())
    assert f"is {len(source.splitlines())} lines" in page.read_text(encoding="utf-8")


# -- links ---------------------------------------------------------------------------------------------------------
def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.parent != DOCS / "reference":  # those are made when the site is built, and checked then
            assert anchor in _anchors(target), f"{page.name} links to {link}"


# -- claims --------------------------------------------------------------------------------------------------------
def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _resolve(name: str) -> object:
    found: object = torchport
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and isinstance(found, types.ModuleType):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_and_files_in_the_text_exist(page: Path) -> None:
    text = _prose(page)
    for name in set(re.findall(r"`(torchport(?:\.[A-Za-z]\w*)+)[`(]", text)):
        if not name.startswith("torchport.backends"):  # a group of entry points; the modules need their engines
            _resolve(name)
    folders = {path.name for path in (ROOT / "torchport").iterdir() if path.is_dir()}
    for name in set(re.findall(r"`((?:\w+/)+\w+\.py)`", text)):
        if name.split("/")[0] in folders:
            assert (ROOT / "torchport" / name).exists(), f"{page.name}: {name}"


def test_commands_on_the_pages_are_commands() -> None:
    from torchport.cli import _parser

    lines = [
        line
        for page in PAGES
        for block in _blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("torchport ")
    ]
    assert len(lines) > 5
    for line in lines:
        _parser().parse_args(shlex.split(line, comments=True)[1:])


# -- the reference -------------------------------------------------------------------------------------------------
def _on_the_reference() -> set[str]:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"^::: (torchport\.[\w.]+)$", pages, re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    shown = _on_the_reference()
    errors = {f"torchport.{name}" for name in torchport.errors.__all__}
    assert {f"torchport.{name}" for name in torchport.__all__} - errors <= shown
    assert errors & shown == set(), "they are on the page of torchport.errors"
    for module in ("aot", "runtime", "testing", "dispatch", "errors"):
        assert f"torchport.{module}" in shown


def test_the_reference_names_what_there_is() -> None:
    for name in _on_the_reference():
        place, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError:
            module = functools.reduce(getattr, place.split(".")[1:], torchport)
        assert hasattr(module, attribute) or importlib.import_module(name), name


# -- private PyTorch APIs ------------------------------------------------------------------------------------------
_OPERATOR = re.compile(r"torch\.ops\.\w+\.\w+(\.(?!_handle)\w+)?")
_NOT_PYTORCH = {
    ("backends.inductor.library", "_handle"),  # of ctypes.CDLL
    *((place, name) for place in ("run.queue", "core.forks") for name in ("_at_fork_reinit", "_is_owned")),  # of locks
    ("backends.xla", "_backends"),  # of jax._src.xla_bridge
    ("backends.executorch", "_load_program_from_buffer"),  # of executorch.extension.pybindings._C
    ("backend.forked", "_exit"),  # of the C library
    ("trace.finalizers", "_is_owned"),  # the same
    ("testing.worker", "_resource_tracker"),  # of multiprocessing
    ("testing.worker", "_fd"),
}
_INSTANCES = {
    "torch._ops.OpOverload.": torch.ops.aten.add.Tensor,
    "torch._ops.OpOverloadPacket.": torch.ops.aten.add,
    "torch.nn.Module.": torch.nn.Module(),
    "torch._subclasses.fake_tensor.FakeTensorMode.": FakeTensorMode(),
    "torch._library.custom_ops.CustomOpDef.": next(iter(custom_ops.OPDEFS.values())),
    "torch.distributed.rendezvous.": importlib.import_module("torch.distributed.rendezvous"),
}
"""Objects that have the attributes which their classes only promise, and a module that a function's name hides."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


class _Uses(ast.NodeVisitor):
    """Private names of PyTorch in a module: dotted from ``torch`` where that can be told, else ``.name`` of an object.

    Private: a part of the dotted name begins with one underscore, or it lies in ``torch.fx.experimental``; a keyword
    argument counts as ``function(_keyword=)``. Operators (``torch.ops.aten._to_copy``) are PyTorch's operator set.
    """

    def __init__(self, module: str, own: set[str]) -> None:
        self.module = module
        self.own = own
        self.names: dict[str, str] = {}
        self.found: set[str] = set()

    def dotted(self, node: ast.AST) -> str | None:
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=attr):
                base = self.dotted(value)
                return None if base is None else f"{base}.{attr}"
            case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
                return self.dotted(value)
        return None

    def use(self, name: str) -> None:
        if not name.startswith("torch."):
            return
        name = name.split(".__")[0]
        rest = _OPERATOR.sub("", name)
        if rest != name:
            self.found.update(f".{part}" for part in rest.split(".") if _is_private(part))
        elif name.startswith("torch.fx.experimental.") or any(map(_is_private, name.split("."))):
            self.found.add(name)

    def use_attribute(self, name: object) -> None:
        if isinstance(name, str) and _is_private(name) and name not in self.own:
            self.found.update({f".{name}"} if (self.module, name) not in _NOT_PYTORCH else ())

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.split(".")[0]
            self.names[alias.asname or top] = alias.name if alias.asname else top
            self.use(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.use(f"{node.module}.{alias.name}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self.names
        parameters = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        self.names = {name: value for name, value in outside.items() if name not in parameters}
        self.generic_visit(node)
        self.names = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if len(node.targets) == 1:
            self._alias(node.targets[0], node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._alias(node.target, node.value)

    def _alias(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and (name := self.dotted(value)) is not None:
            self.names[target.id] = name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name is not None:
            self.use(name)  # its parts are not uses of their own
            return
        self.use_attribute(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            self.use_attribute(getattr(node.args[1], "value", None))
        function = self.dotted(node.func)
        if function is not None and function.startswith("torch."):
            self.found.update(f"{function}({k.arg}=)" for k in node.keywords if k.arg and _is_private(k.arg))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        # Names of methods that a shim replaces come as text.
        if isinstance(node.value, str) and _is_private(node.value) and hasattr(torch.Tensor, node.value):
            self.found.add(f"torch.Tensor.{node.value}")


def _own_attributes(trees: list[ast.Module]) -> set[str]:
    """Private attributes that torchport's own classes define."""
    own: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                    own.add(attr)
                case ast.ClassDef(body=body):
                    for item in body:
                        targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
                        own.update(target.id for target in targets if isinstance(target, ast.Name))
                        own.update([item.name] if isinstance(item, ast.FunctionDef) else [])
    return own


@functools.cache
def _used() -> frozenset[tuple[str, str]]:
    """Pairs of a private name and a module that uses it; a name that others of the module begin with is left out."""
    trees: dict[str, ast.Module] = {}
    for path in sorted((ROOT / "torchport").rglob("*.py")):
        name = path.relative_to(ROOT / "torchport").with_suffix("").as_posix().replace("/", ".")
        trees[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    own = _own_attributes(list(trees.values()))
    pairs: set[tuple[str, str]] = set()
    for module, tree in trees.items():
        uses = _Uses(module, own)
        uses.visit(tree)
        found = uses.found
        pairs |= {(name, module) for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return frozenset(pairs)


def _listed() -> set[tuple[str, str]]:
    """The same from the page: a private name in a table's first column, modules in the second."""
    rows = re.findall(r"^\| `(torch\.[^`]+)` \| ([^|]+) \|", INTERNALS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a name is listed twice"
    return {(name, module) for name, modules in rows for module in re.findall(r"`([^`]+)`", modules)}


def _covers(listed: tuple[str, str], used: tuple[str, str]) -> bool:
    (name, module), (found, where) = listed, used
    if module != where:
        return False
    return name.endswith(found) if found.startswith(".") else found == name or found.startswith(f"{name}.")


def test_private_apis_that_are_used_are_listed() -> None:
    listed = _listed()
    missing = {use for use in _used() if not any(_covers(entry, use) for entry in listed)}
    assert not missing, "used, but not in docs/torch-internals.md (name, module)"


def test_private_apis_that_are_listed_are_used() -> None:
    stale = {entry for entry in _listed() if not any(_covers(entry, use) for use in _used())}
    assert not stale, "in docs/torch-internals.md, but not used (name, module)"


def test_private_apis_exist_in_the_torch_they_were_checked_on() -> None:
    checked = re.search(r"Checked on torch ([\d., and]+);", INTERNALS.read_text(encoding="utf-8"))
    assert checked
    assert tuple(re.findall(r"\d+\.\d+\.\d+", checked[1])) == releases.TESTED
    for name in sorted({name.split("(")[0] for name, _ in _listed()}):
        if name in releases.UNTIL and not releases.has(name):
            continue
        prefix = next((prefix for prefix in _INSTANCES if name.startswith(prefix)), "")
        found = _INSTANCES[prefix] if prefix else torch
        for part in name.removeprefix(prefix or "torch.").split("."):
            if not hasattr(found, part) and isinstance(found, types.ModuleType):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch's modules warn about each other
                    importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
        assert not isinstance(found, types.ModuleType) or name == "torch._inductor.config", f"{name}: list its members"


def test_the_scan_finds_what_it_should() -> None:
    code = """
import torch
from torch._decomp import get_decompositions as get
def f(x, module):
    import torch._tensor_str as module
    c = torch._C
    c._jit_thing(x._schema, _flag=1)
    return torch.ops.aten._to_copy.default, module._str_intern, getattr(x, "_hidden"), self._own, x.__dict__
def g(module):
    return module._other
"""
    uses = _Uses("m", {"_own"})
    uses.visit(ast.parse(code))
    assert uses.found - {"torch._C", "torch._tensor_str"} == {
        "torch._decomp.get_decompositions", "torch._C._jit_thing", "torch._C._jit_thing(_flag=)", "._schema",
        "torch._tensor_str._str_intern", "._hidden", "._other",
    }  # fmt: skip


def test_c_names_are_listed() -> None:
    folders = ("torchport/backends/inductor", "torchport/native")
    files = [path for folder in folders for path in (ROOT / folder).glob("*.[cph]*")]
    text = "".join(path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".cpp", ".h"))
    names = r"dll\.(AOTInductor\w+)|((?:torch/csrc|ATen|c10)/[\w/]+\.h)|\"(torch_exception\w+)\"|(\w+\.cpp)\""
    used = {name for match in re.findall(names, text) for name in match if name}
    used -= {"wrapper.cpp", "kernels.cpp", "model.cpp"}  # files of ours
    used -= {"guard.cpp", "flush.cpp", "follow.cpp", "steps.cpp"}
    section = INTERNALS.read_text(encoding="utf-8").partition("\n## C and C++\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    assert listed == used


if __name__ == "__main__":
    for name, module in sorted(_used()):
        print(name, module)
