"""torchport's own modules: no circle of imports, few inside functions, each with a reason; one name for one class."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import torchport

ROOT = Path(torchport.__file__).parent
AT_MOST_INSIDE_FUNCTIONS = 43


def _modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["torchport", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _targets(importer: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules of torchport that an import statement runs."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in MODULES)
        return
    base = node.module or ""
    if node.level:
        package = importer.split(".")
        package = package if MODULES[importer].name == "__init__.py" else package[:-1]
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
    for alias in node.names:
        full = f"{base}.{alias.name}"
        if full in MODULES:
            yield full
        elif base in MODULES:
            yield base


@functools.cache
def _imports() -> list[tuple[str, str, ast.stmt, bool]]:
    """(importer, imported, statement, whether inside a function); what only type checkers run is left out."""

    def walk(name: str, node: ast.AST, inside: bool) -> Iterator[tuple[str, str, ast.stmt, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield from ((name, target, child, inside) for target in _targets(name, child) if target != name)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(name, child, inside or function)

    every = (walk(name, ast.parse(path.read_text(encoding="utf-8")), False) for name, path in MODULES.items())
    return [found for of_module in every for found in of_module]


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in arrows.get(module, ()):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in arrows:
        if module not in index:
            visit(module)
    return found


def test_a_circle_is_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_module_imports_itself_by_way_of_others() -> None:
    arrows: dict[str, set[str]] = {}
    for importer, imported, _, _ in _imports():
        if importer != "torchport":  # its own imports are lazy, or for type checkers
            arrows.setdefault(importer, set()).add(imported)
    assert len(arrows) > 150
    assert not _circles(arrows)


def test_imports_inside_functions_are_few_and_say_why() -> None:
    found = [(importer, imported, node) for importer, imported, node, inside in _imports() if inside]
    assert len(found) <= AT_MOST_INSIDE_FUNCTIONS, sorted((importer, imported) for importer, imported, _ in found)
    unexplained = []
    for importer, imported, node in found:
        line = MODULES[importer].read_text(encoding="utf-8").splitlines()[node.lineno - 1]
        if "#" not in line:
            unexplained.append(f"{importer} -> {imported} ({node.lineno})")
    assert not unexplained, "an import inside a function says why on its line: # on demand: …"


def test_no_two_classes_have_one_name() -> None:
    """A name stands for one thing, so that a reader who finds a class by its name has found the right one."""
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert len(homes) > 300
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
