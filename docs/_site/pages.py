"""Pages the site has and ``docs/`` has not: the README, the change log, help texts, source files that pages link to.

A link of a page may leave ``docs/``, so that it works where the repository is browsed. On the site such a file gets a
page of its own that shows it. Pages that mkdocs.yml does not list come under "How it works".
"""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FROM_ROOT = {"overview.md": "README.md", "changelog.md": "CHANGELOG.md"}
"""Page → the file outside ``docs/`` that it is."""
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".txt": "text", ".json": "json", ".yml": "yaml"}
_MORE = "How it works"


def _place(page: str) -> str:
    """A page's path in the repository."""
    return FROM_ROOT.get(page, f"docs/{page}")


def _target(page: str, link: str) -> str | None:
    """The path in the repository that a relative link leads to."""
    path = link.partition("#")[0]
    if not path or "://" in link or link.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(_place(page)), path))


def _page_of(path: str) -> str | None:
    """The page of the site that stands for a file of the repository, if it is to have one."""
    for page, source in FROM_ROOT.items():
        if path == source:
            return page
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def _show(path: str) -> str:
    """The page of a source file."""
    language = _LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    fence = "`" * (max([3, *(len(ticks) for ticks in re.findall(r"^`+", text, re.MULTILINE))]) + 1)
    return f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def _command_line() -> str:
    """Every subcommand's help, as the program prints it."""
    sys.path.insert(0, str(ROOT))
    try:
        from torchport.cli import _parser
    finally:
        sys.path.remove(str(ROOT))
    parser = _parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts: list[str] = []
    for name, command in commands.choices.items():
        parts.append(f"## {name}\n\n```text\n{command.format_help()}```\n")
    return "\n".join(parts)


def _listed(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    values = nav.values() if isinstance(nav, dict) else nav
    return {page for value in values for page in _listed(value)}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and list those that mkdocs.yml forgot."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    shown: set[str] = set()
    for file in list(files.documentation_pages()):
        for _, link in _LINK.findall(file.content_string):
            target = _target(file.src_uri, link)
            page = None if target is None else _page_of(target)
            if target is not None and page is not None and page.startswith("source/") and page not in shown:
                shown.add(page)
                files.append(File.generated(config, page, content=_show(target)))
    places: dict[str, str] = {}
    for file in files.documentation_pages():
        if places.setdefault(file.dest_uri, file.src_uri) != file.src_uri:
            raise PluginError(f"{file.src_uri} and {places[file.dest_uri]} would be one page; rename one of them")
    listed = _listed(config["nav"])
    more = next(section[_MORE] for section in config["nav"] if _MORE in section)
    for file in files.documentation_pages():
        if file.src_uri not in listed and not file.src_uri.startswith(("source/", "_site/")):
            more.append(file.src_uri)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of ``docs/`` lead to the pages made above; those to folders become plain text."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    if uri == "reference/command-line.md":
        markdown += "\n" + _command_line()

    def rewrite(found: re.Match[str]) -> str:
        text, link = found.groups()
        target = _target(uri, link)
        if target is None:
            return found[0]
        to = _page_of(target)
        if to is None:
            return text if (ROOT / target).is_dir() else found[0]  # what leads nowhere is left for --strict to report
        anchor = link.partition("#")[1:]
        return f"[{text}]({posixpath.relpath(to, posixpath.dirname(uri) or '.')}{''.join(anchor)})"

    return _LINK.sub(rewrite, markdown)
