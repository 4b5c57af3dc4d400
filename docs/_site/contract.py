"""Writes ``docs/reference/contract.md``: every public name of the contract in tables, taken from the code.

``python docs/_site/contract.py`` writes the page; ``tests/unit/test_contract.py`` compares it with the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "contract.md"
sys.path.insert(0, str(ROOT))

from torchport.backend import interface, optional  # noqa: E402  # the checkout's, wherever this is run
from torchport.backend.interface import Backend, Capabilities  # noqa: E402

REQUIRED = sorted(Backend.__abstractmethods__)


def _class(kind: type[Any]) -> ast.ClassDef:
    tree = ast.parse(Path(inspect.getsourcefile(kind) or "").read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)


def methods(kind: type[Any]) -> list[str]:
    """The public methods that a class defines, in order."""
    return [one.name for one in _class(kind).body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]


def attributes(kind: type[Any]) -> dict[str, str]:
    """The public attributes that a class declares, in order, with their docstrings."""
    found: dict[str, str] = {}
    body = _class(kind).body
    for one, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            text = after.value if isinstance(after, ast.Expr) else None
            found[one.target.id] = inspect.cleandoc(str(text.value)) if isinstance(text, ast.Constant) else ""
    return found


def lines(kind: type[Any]) -> tuple[int, int]:
    """The lines of a class, and those of its docstring."""
    node = _class(kind)
    text = node.body[0]
    return (node.end_lineno or 0) - node.lineno + 1, (text.end_lineno or 0) - text.lineno + 1


def _text(text: str | None) -> str:
    """The first paragraph of a docstring as one line of Markdown, in a table."""
    first = " ".join((text or "").split("\n\n")[0].split())
    first = re.sub(r":\w+:`[.~]?([^`]+)`", r"`\1`", first).replace("``", "`")
    return first.replace("|", "\\|")


def _link(name: str, owner: str = "") -> str:
    return f"[`{name}`](backend.md#torchport.{owner + '.' if owner else ''}{name})"


def _table(header: list[str], rows: Iterator[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _method_rows() -> Iterator[list[str]]:
    for name in methods(Backend):
        method = getattr(Backend, name)
        given = ", ".join(one for one in inspect.signature(method).parameters if one != "self")
        required = "**required**" if name in REQUIRED else "default"
        yield [_link(name, "Backend"), f"`{given}`" if given else "", required, _text(method.__doc__)]


def _capability_rows() -> Iterator[list[str]]:
    texts = attributes(Capabilities)
    default = Capabilities()
    for one in dataclasses.fields(Capabilities):
        yield [_link(one.name, "Capabilities"), f"`{getattr(default, one.name)}`", _text(texts[one.name])]


def _protocol_rows() -> Iterator[list[str]]:
    for protocol in optional.PROTOCOLS:
        what, called = (protocol.__doc__ or "").split("\n\n")[:2]
        for name in methods(protocol):
            does = _text(getattr(protocol, name).__doc__)
            yield [_link(protocol.__name__), f"`{name}`", f"{_text(what)} {does}", _text(called)]


def _others() -> list[str]:
    """What the methods take and give: the other public names of the contract's modules."""
    protocols = {protocol.__name__ for protocol in optional.PROTOCOLS}
    names = [name for module in (interface, optional) for name in module.__all__ if name[0].isupper()]
    known = {"Backend", "Capabilities", "PROTOCOLS", "OptionalMethods", *protocols}
    return sorted(name for name in names if name not in known)


def render() -> str:
    """The page."""
    total, text = lines(Backend)
    count = len(methods(Backend)), len(attributes(Backend)), len(dataclasses.fields(Capabilities))
    parts = [
        "# The contract in one table",
        "",
        "<!-- Written by docs/_site/contract.py; tests/unit/test_contract.py compares it with the code. -->",
        "",
        f"[`Backend`](backend.md#torchport.Backend) is {total} lines with its docstrings ({text} of them the class's "
        f"own): {count[0]} methods, of which {len(REQUIRED)} are required, and {count[1]} attributes, one of which "
        f"holds {count[2]} capabilities. {len(optional.PROTOCOLS)} optional protocols have "
        f"{sum(len(methods(one)) for one in optional.PROTOCOLS)} methods.",
        "",
        "## Attributes",
        "",
        *_table(["attribute", "what"], ([_link(n, "Backend"), _text(t)] for n, t in attributes(Backend).items())),
        "",
        "## Methods",
        "",
        *_table(["method", "takes", "", "what"], _method_rows()),
        "",
        "## Capabilities",
        "",
        "`capabilities = torchport.Capabilities(donation=True)` in the class. The defaults hold for every backend.",
        "",
        *_table(["field", "default", "what"], _capability_rows()),
        "",
        "## Optional protocols",
        "",
        "A backend satisfies a protocol by having its methods; nothing is inherited or declared. torchport finds out "
        "once, when the backend is registered.",
        "",
        *_table(["protocol", "method", "what", "when it is called"], _protocol_rows()),
        "",
        "## What methods take and give",
        "",
        ", ".join(f"`{name}`" for name in _others()) + ".",
        "",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
