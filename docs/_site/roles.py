"""Docstrings as Markdown: Sphinx roles become links where the name is on the site; tables and ``::`` blocks follow."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`([^`]+)`")
_BORDER = re.compile(r"=+(?: +=+)+")


def _resolve(name: str, scope: griffe.Object) -> str | None:
    """The full path of a name as the docstring's place sees it."""
    name = name.lstrip(".")
    if name.startswith("torchport."):
        return name
    first, _, rest = name.partition(".")
    place: Any = scope
    while place is not None:
        if first in place.members:
            return f"{place.path}.{name}" if not place.members[first].is_alias else _alias(place.members[first], rest)
        place = place.parent
    return None


def _alias(member: Any, rest: str) -> str:
    return f"{member.target_path}.{rest}" if rest else member.target_path


def _table(paragraph: str) -> str:
    """A reStructuredText simple table as a Markdown one, anything else as it is."""
    lines = paragraph.strip().splitlines()
    borders = [number for number, line in enumerate(lines) if _BORDER.fullmatch(line)]
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != len(lines) - 1:
        return paragraph
    columns = len(lines[0].split())
    rows = [re.split(r"(?<=``) +| {2,}", line, maxsplit=columns - 1) for line in lines if not _BORDER.fullmatch(line)]
    if len(borders) == 2:
        rows.insert(0, [""] * columns)
    rows.insert(1, ["---"] * columns)
    return "\n".join("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in row) + " |" for row in rows)


class Roles(griffe.Extension):
    """Rewrites the text of every docstring as it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """When a package is there as a whole, so that names can be looked up."""
        self._walk(pkg)

    def _walk(self, thing: Any) -> None:
        if thing.is_alias:
            return
        if thing.docstring is not None:
            thing.docstring.value = self._text(thing.docstring.value, thing)
        for member in thing.members.values():
            self._walk(member)

    def _text(self, text: str, scope: griffe.Object) -> str:
        def link(found: re.Match[str]) -> str:
            name = found[1].removeprefix("~")
            path = _resolve(name, scope)
            shown = name.removeprefix("torchport.").lstrip(".")
            if path is None:
                return f"`{shown}`"
            return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'

        text = _ROLE.sub(link, text)
        text = "\n\n".join(_table(paragraph) for paragraph in text.split("\n\n"))
        return re.sub(r"^::\n", "", re.sub(r"(?<=\w)::\n", ":\n", text), flags=re.MULTILINE)
