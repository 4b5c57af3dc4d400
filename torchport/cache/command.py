"""``torchport cache``: what is in the disk cache, and moving it about. Imports neither PyTorch nor a backend."""

from __future__ import annotations

import argparse
import io
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from time import localtime, strftime
from typing import Any

from ..core.config import config, parse_size
from ..core.errors import TorchportError
from ..core.files import writing
from .current import folder_in_settings
from .entry import Damaged, Description, decode
from .folder import CacheFolder, Listed, trouble_with

__all__ = ["add_commands", "export_entries", "import_entries"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def add_commands(commands: Any) -> None:
    """Add ``cache`` and its own commands to a command line."""
    cache = commands.add_parser("cache", help="the disk cache of compiled computations")
    cache.add_argument("--dir", metavar="DIR", help="another folder than the settings name")
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text)
        made.set_defaults(run=run)
        return made

    action("list", _list, "every entry, last used first")
    info = action("info", _info, "what an entry holds and what its key is made of")
    info.add_argument("key", metavar="KEY", help="a key, or how one begins")
    prune = action("prune", _prune, "remove what was used least recently")
    prune.add_argument("--max", metavar="SIZE", type=_size, help="bytes to keep, such as 5G (default: cache_size)")
    action("clear", _clear, "remove every entry")
    out = action("export", _export, "write every entry to one file, for another machine")
    out.add_argument("file", metavar="FILE")
    into = action("import", _import, "take the entries of such a file; they are code, so know where it comes from")
    into.add_argument("file", metavar="FILE")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not {error}") from None


def _shown(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def _open(arguments: argparse.Namespace, create: bool = False) -> CacheFolder:
    """The folder. Raises :class:`TorchportError` where it cannot be used."""
    path = Path(arguments.dir).expanduser().absolute() if arguments.dir else folder_in_settings()
    trouble = trouble_with(path, create)
    if trouble:
        raise TorchportError(f"{path} cannot be used as a cache: {trouble}")
    return CacheFolder(path, config.cache_size)


def _when(seconds: float) -> str:
    return strftime("%Y-%m-%d %H:%M", localtime(seconds))


def _row(one: Listed, found: Description | None) -> Sequence[str]:
    if found is None:
        return (one.key[:12], "damaged", "", _shown(one.size), "", _when(one.used))
    about = found.about
    operators, seconds = about.get("operators", ""), about.get("seconds", "")
    return (
        one.key[:12],
        str(about.get("backend", "")),
        f"{operators}",
        _shown(one.size),
        f"{seconds}",
        _when(one.used),
    )


def _list(arguments: argparse.Namespace) -> int:
    folder = _open(arguments)
    entries = folder.list()
    rows = [("key", "backend", "operators", "size", "seconds to compile", "last used")]
    rows += [_row(one, folder.description(one.key)) for one in entries]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows if entries else ():
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    total = sum(one.size for one in entries)
    plural = "entry" if len(entries) == 1 else "entries"
    print(f"{len(entries)} {plural}, {_shown(total)} of {_shown(folder.limit)}, in {folder.path}")
    strangers = folder.strangers()
    if strangers:
        print(f"not the cache's, and left alone: {', '.join(strangers)}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    folder = _open(arguments)
    matching = [one for one in folder.list() if one.key.startswith(arguments.key)]
    if len(matching) != 1:
        raise TorchportError(
            f"{len(matching)} entries in {folder.path} begin with {arguments.key!r}; torchport cache list shows them"
        )
    one = matching[0]
    found = folder.description(one.key)
    if found is None:
        raise TorchportError(f"the entry {one.key} in {folder.path} is damaged; it is compiled again when it is needed")
    print(f"key        {one.key}")
    print(f"data       {found.size:,} bytes")
    print(f"last used  {_when(one.used)}")
    for name, value in found.about.items():
        shown = _when(value) if name == "written" else "; ".join(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]
        print(f"{name:<9}  {shown}")
    print("the key is made of")
    for name, value in sorted(found.manifest.items()):
        print(f"  {name}: {value}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    folder = _open(arguments)
    removed = folder.evict(folder.limit if arguments.max is None else arguments.max)
    left = folder.list()
    print(f"{removed} removed, {len(left)} left: {_shown(sum(one.size for one in left))}")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    folder = _open(arguments)
    with writing(folder.path):
        print(f"{folder.clear()} removed")
    return 0


def export_entries(folder: CacheFolder, path: str | os.PathLike[str]) -> int:
    """Write every whole entry to one file, a tar archive; how many. Raises :class:`TorchportError`."""
    written = 0
    with writing(path), tarfile.open(path, "w") as archive:
        for one in folder.list():
            try:
                data = (folder.path / f"{one.key}.entry").read_bytes()
                decode(data, one.key)
            except (OSError, Damaged):
                continue
            member = tarfile.TarInfo(f"{one.key}.entry")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
            written += 1
        for one in folder.paths():
            archive.addfile(tarfile.TarInfo(f"{one.key}.path"))
    return written


def import_entries(folder: CacheFolder, path: str | os.PathLike[str]) -> tuple[int, int]:
    """Take the entries of a file that :func:`export_entries` wrote: how many were new, and how many were there.

    Each is checked before it is written; no name in the archive is used as a path. Raises :class:`TorchportError`.
    """
    new = known = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, kind = member.name.partition(".")
                if kind == "path" and member.isreg() and re.fullmatch(r"[0-9a-f]{64}", key):
                    folder.note_path(key)
                    continue
                content = archive.extractfile(member) if kind == "entry" and member.isreg() else None
                if content is None:
                    raise Damaged(f"it holds {member.name!r}, which is no entry")
                entry = decode(content.read(), key)
                if folder.read(key) is not None:
                    known += 1
                    continue
                with folder.compiling(key, config.compile_timeout):
                    if not folder.write(entry):
                        raise TorchportError(f"entries cannot be written to {folder.path}")
                new += 1
    except (tarfile.TarError, OSError, Damaged) as error:
        raise TorchportError(f"{os.fspath(path)} is no whole export of a cache: {error}") from error
    return new, known


def _export(arguments: argparse.Namespace) -> int:
    folder = _open(arguments)
    written = export_entries(folder, arguments.file)
    size = os.path.getsize(arguments.file)
    print(f"{written} entries, {_shown(size)}, in {arguments.file}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    folder = _open(arguments, create=True)
    new, known = import_entries(folder, arguments.file)
    print(f"{new} new, {known} known, in {folder.path}")
    return 0
