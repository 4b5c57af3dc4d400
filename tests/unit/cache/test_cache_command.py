"""``torchport cache``: looking at the disk cache, keeping it small, and moving it to another machine."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from cache_support import LIMIT, entry, run_alone

from torchport.cache.command import export_entries, import_entries
from torchport.cache.folder import CacheFolder, trouble_with
from torchport.cli import main
from torchport.core.errors import TorchportError


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    path = tmp_path / "cache"
    assert trouble_with(path, create=True) == ""
    made = CacheFolder(path, LIMIT)
    for number in range(3):
        assert made.write(entry(number))
    return made


def _said(folder: CacheFolder, capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> str:
    assert main(["cache", "--dir", str(folder.path), *args]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_list_shows_every_entry_and_what_is_not_the_caches(
    folder: CacheFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.path / "notes.txt").write_text("")
    (folder.path / f"{entry(1).key}.entry").write_bytes(b"no entry")
    said = _said(folder, capsys, "list")
    for number in range(3):
        assert entry(number).key[:12] in said
    assert said.count("damaged") == 1
    assert "3 entries, " in said
    assert "left alone: notes.txt" in said


def test_info_shows_what_the_key_is_made_of(folder: CacheFolder, capsys: pytest.CaptureFixture[str]) -> None:
    one = entry(2)
    said = _said(folder, capsys, "info", one.key[:10])
    for name, value in one.manifest.items():
        assert f"{name}: {value}" in said
    assert "3,000 bytes" in said
    assert "0 entries" in _said(folder, capsys, "info", "zz", status=2)
    assert "3 entries" in _said(folder, capsys, "info", "", status=2)


def test_prune_and_clear(folder: CacheFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert _said(folder, capsys, "prune", "--max", "1G").startswith("0 removed, 3 left")
    assert _said(folder, capsys, "prune", "--max", "8K").startswith("1 removed, 2 left")
    assert _said(folder, capsys, "clear") == "2 removed\n"
    assert not folder.list()
    assert "a number of bytes" in _said(folder, capsys, "prune", "--max", "much", status=2)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--dir", str(tmp_path / "none"), "list"]) == 2
    assert "cannot be used as a cache: No such file" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_entries_move_to_another_folder(
    folder: CacheFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "cache.tar")
    (folder.path / f"{entry(1).key}.entry").write_bytes(b"no entry")
    folder.note_path("a" * 64)
    assert _said(folder, capsys, "export", file).startswith("2 entries, ")
    other = CacheFolder(tmp_path / "other", LIMIT)
    assert _said(other, capsys, "import", file).startswith("2 new, 0 known")
    assert other.read(entry(0).key) == entry(0)
    assert other.read(entry(2).key) == entry(2)
    assert other.knows_path("a" * 64)
    assert _said(other, capsys, "import", file).startswith("0 new, 2 known")


@pytest.mark.parametrize("kind", ["text", "cut", "names", "content", "link"])
def test_what_is_no_export_is_refused(folder: CacheFolder, tmp_path: Path, kind: str) -> None:
    file, outside = tmp_path / "cache.tar", tmp_path / "outside.entry"
    export_entries(folder, file)
    if kind == "text":
        file.write_text("no archive")
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:3_000])
    else:
        outside.write_bytes((folder.path / f"{entry(0).key}.entry").read_bytes())
        with tarfile.open(file, "w") as archive:
            if kind == "names":
                archive.add(outside, "../../outside.entry")
            elif kind == "content":
                archive.add(outside, f"{entry(1).key}.entry")
            else:
                link = tarfile.TarInfo(f"{entry(0).key}.entry")
                link.type, link.linkname = tarfile.SYMTYPE, str(outside)
                archive.addfile(link)
    other = CacheFolder(tmp_path / "other", LIMIT)
    assert trouble_with(other.path, create=True) == ""
    with pytest.raises(TorchportError, match="is no whole export of a cache"):
        import_entries(other, file)
    assert not [one for one in other.list() if one.key == entry(1).key]


def test_the_commands_import_no_pytorch(folder: CacheFolder) -> None:
    program = """if True:
        import sys
        from pathlib import Path
        from torchport.cache.command import import_entries
        from torchport.cache.folder import CacheFolder
        print(len(CacheFolder(Path(sys.argv[1]), 1 << 20).list()), "torch" in sys.modules)
        """
    done = run_alone(program, str(folder.path))
    assert done.stdout == "3 False\n", done.stderr
