"""The folder of the disk cache: whatever happens to it, what comes out is right or is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_support import LIMIT, ROOT, entry, in_child, is_sound, run_alone, works

from torchport.cache import current
from torchport.cache import folder as folder_module
from torchport.cache.folder import CacheFolder, trouble_with
from torchport.core import metrics
from torchport.core.config import config
from torchport.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _silence_once() -> Iterator[None]:
    """Every test hears what is said once per process."""
    folder_module._said.clear()
    yield
    folder_module._said.clear()


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    path = tmp_path / "cache"
    assert trouble_with(path, create=True) == ""
    return CacheFolder(path, LIMIT)


# -- entries -----------------------------------------------------------------------------------------------------------
def test_an_entry_is_kept_for_others(folder: CacheFolder) -> None:
    one = entry(1)
    assert folder.read(one.key) is None
    assert folder.write(one)
    other = CacheFolder(folder.path, LIMIT)
    assert other.read(one.key) == one
    assert [listed.key for listed in other.list()] == [one.key]
    assert oct((folder.path / f"{one.key}.entry").stat().st_mode & 0o777) == "0o600"


def test_a_folder_that_is_read_only_by_setting_is_not_written(folder: CacheFolder) -> None:
    folder.write(entry(1))
    before = {path: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    reader = CacheFolder(folder.path, LIMIT, writable=False)
    assert reader.read(entry(1).key) == entry(1)
    assert not reader.write(entry(2))
    with reader.compiling(entry(2).key, 1.0), reader.loading(entry(1).key):
        assert {path: path.stat().st_mtime_ns for path in folder.path.iterdir()} == before


@pytest.mark.parametrize("change", ["cut", "flip", "empty", "other", "longer"])
def test_a_changed_entry_is_not_used_and_is_replaced(
    folder: CacheFolder, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    one = entry(1)
    folder.write(one)
    path = folder.path / f"{one.key}.entry"
    data = path.read_bytes()
    folder.write(entry(2))
    path.write_bytes({
        "cut": data[:-1], "flip": data[:-1] + bytes([data[-1] ^ 1]), "empty": b"", "longer": data + b"\0",
        "other": (folder.path / f"{entry(2).key}.entry").read_bytes(),
    }[change])  # fmt: skip
    before = metrics.counter("DiskCacheDamaged")
    assert folder.read(one.key) is None
    assert metrics.counter("DiskCacheDamaged") == before + 1
    assert f"{one.key}.entry is not used" in capfd.readouterr().err
    assert folder.write(one)
    assert folder.read(one.key) == one


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "writable"])
def test_what_is_no_file_of_ours_is_not_read(
    folder: CacheFolder, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = entry(1)
    path = folder.path / f"{one.key}.entry"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        folder.write(one)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        folder.write(one)
        path.chmod(0o666)
    assert folder.read(one.key) is None
    assert "is not used" in capfd.readouterr().err


def test_strangers_are_left_alone(folder: CacheFolder) -> None:
    folder.write(entry(1))
    (folder.path / "notes.txt").write_text("mine")
    (folder.path / "more.entry").write_text("mine, too")
    assert folder.strangers() == ["more.entry", "notes.txt"]
    assert folder.clear() == 1
    assert sorted(os.listdir(folder.path)) == ["more.entry", "notes.txt"]
    assert folder.read(entry(1).key) is None
    works(folder, 2)


# -- size --------------------------------------------------------------------------------------------------------------
def test_what_was_used_least_recently_goes_first(folder: CacheFolder) -> None:
    entries = [entry(number, 1_000) for number in range(8)]
    for age, one in enumerate(entries):
        folder.write(one)
        os.utime(folder.path / f"{one.key}.entry", (time.time() - 100 * age, time.time() - 100 * age))
    assert folder.read(entries[-1].key) is not None  # the oldest is used again
    size = folder.list()[0].size
    assert folder.evict(4 * size) == 5
    kept = {listed.key for listed in folder.list()}
    assert kept == {entries[0].key, entries[1].key, entries[-1].key}
    assert folder.evict(4 * size) == 0


def test_paths_are_noted_and_go_with_what_they_led_to(folder: CacheFolder) -> None:
    first, second = "1" * 64, "2" * 64
    assert not folder.knows_path(first)
    folder.note_path(first)
    folder.note_path(second)
    assert folder.knows_path(first)
    assert CacheFolder(folder.path, LIMIT, writable=False).knows_path(second)
    assert folder.list() == []
    assert folder.strangers() == []
    for number, used in ((1, 1000), (2, 6000)):
        assert folder.write(entry(number))
        os.utime(folder.path / f"{entry(number).key}.entry", (used, used))
    os.utime(folder.path / f"{second}.path", (2000, 2000))  # more than an hour before the entry that is left was used
    assert folder.evict(int(1.2 * folder.list()[0].size)) == 1
    assert [one.key for one in folder.paths()] == [first]  # the other was last used before what is left
    folder.forget_path(first)
    folder.forget_path(first)
    assert not folder.knows_path(first)
    folder.note_path(first)
    assert folder.clear() == 1
    assert not folder.knows_path(first)
    CacheFolder(folder.path, LIMIT, writable=False).note_path(first)
    assert not folder.knows_path(first)


def test_no_more_paths_are_kept_than_are_looked_through_quickly(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_PATHS_AT_MOST", 5)
    for number in range(9):
        folder.note_path(f"{number:064x}")
        os.utime(folder.path / f"{number:064x}.path", (1000 + number, 1000 + number))
    assert folder.write(entry(1))
    assert sorted(int(one.key, 16) for one in folder.paths()) == [4, 5, 6, 7, 8]


def test_a_path_s_place_that_is_a_link_is_not_written_through(folder: CacheFolder, tmp_path: Path) -> None:
    (folder.path / f"{'3' * 64}.path").symlink_to(tmp_path / "elsewhere")
    folder.note_path("3" * 64)
    assert not (tmp_path / "elsewhere").exists()


def test_writing_keeps_the_folder_within_its_size(folder: CacheFolder) -> None:
    small = CacheFolder(folder.path, 20_000)
    for number in range(30):
        assert small.write(entry(number, 1_500))
        assert sum(listed.size for listed in small.list()) <= 20_000
    assert small.read(entry(29, 1_500).key) is not None


def test_an_entry_larger_than_the_folder_may_be_is_not_kept(
    folder: CacheFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    small = CacheFolder(folder.path, 1_000)
    assert not small.write(entry(1))
    assert not small.list()
    assert "config.cache_size is 1,000" in capfd.readouterr().err


def test_eviction_that_fails_does_not_keep_from_writing(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = CacheFolder(folder.path, 10_000)
    unlink = os.unlink

    def refuse(path: str) -> None:
        if str(path).endswith(".entry"):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    for number in range(6):
        assert small.write(entry(number))
    assert len(small.list()) == 6
    assert capfd.readouterr().err.count("cannot be removed: Operation not permitted") == 1
    monkeypatch.undo()
    assert small.write(entry(6))
    assert sum(listed.size for listed in small.list()) <= 10_000


@pytest.mark.parametrize("jump", [-10 * 365 * 86_400, 10 * 365 * 86_400])
def test_a_clock_that_jumps_costs_entries_at_most(folder: CacheFolder, jump: int) -> None:
    small = CacheFolder(folder.path, 12_000)
    now = time.time()
    for number in range(3):
        small.write(entry(number))
        os.utime(folder.path / f"{entry(number).key}.entry", (now + jump, now + jump))
    for number in range(3, 12):
        assert small.write(entry(number))
        assert small.read(entry(number).key) == entry(number)
        assert sum(listed.size for listed in small.list()) <= 12_000
        assert all(listed.used <= time.time() + 1 for listed in small.list()), "an entry from the future stays for ever"


# -- places that cannot be used ----------------------------------------------------------------------------------------
def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert trouble_with(path, create=True) == ""
    assert oct(path.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert "entries are code" in trouble_with(tmp_path, create=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12_345, -1)
    assert "it belongs to user 12345" in trouble_with(tmp_path, create=True)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert trouble_with(tmp_path / "file", create=True) == "it is no folder"
    assert trouble_with(tmp_path / "file" / "below", create=True) != ""


def test_settings_name_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with config.override(cache="on", cache_dir=""):
        found = current.disk_cache()
        assert found is not None
        assert found.path == tmp_path / "xdg" / "torchport"
    with config.override(cache="on", cache_dir=str(tmp_path / "own"), cache_size="1K"):
        found = current.disk_cache()
        assert found is not None
        assert (found.path, found.limit, found.writable) == (tmp_path / "own", 1_024, True)
    with config.override(cache="read-only", cache_dir=str(tmp_path / "own")):
        found = current.disk_cache()
        assert found is not None
        assert not found.writable
    with config.override(cache="off"):
        assert current.disk_cache() is None


def test_a_folder_that_cannot_be_used_is_said_once_and_refused_where_nothing_else_is_allowed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    with config.override(cache="on", cache_dir=str(tmp_path)):
        assert current.disk_cache() is None
        assert current.disk_cache() is None
    assert capfd.readouterr().err.count("is not used as a cache: others may write to it (mode 777)") == 1
    with config.override(cache="cache-only", cache_dir=str(tmp_path)), pytest.raises(ConfigError, match="mode 777"):
        current.disk_cache()


def test_a_full_disk_is_said_once(folder: CacheFolder) -> None:
    program = """if True:
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, "tests/unit/cache")
        from cache_support import LIMIT, entry, works
        from torchport.cache.folder import CacheFolder
        folder = CacheFolder(Path(sys.argv[1]), LIMIT)
        folder.write(entry(1, 500))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, resource.RLIM_INFINITY))
        print(folder.write(entry(2, 9_000)), folder.write(entry(3, 9_000)))
        print(folder.read(entry(1, 500).key) == entry(1, 500), folder.read(entry(2, 9_000).key))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        works(folder, 4)
        """
    done = run_alone(program, str(folder.path))
    assert done.stdout == "False False\nTrue None\n", done.stderr
    assert done.stderr.count("nothing can be kept in") == 1
    is_sound(folder)
    assert not [name for name in os.listdir(folder.path) if name.endswith(".tmp")]


def test_a_folder_that_nobody_may_write_to_is_read(folder: CacheFolder) -> None:
    folder.write(entry(1))
    user = 65_534 if os.geteuid() == 0 else os.geteuid()
    for path in (folder.path, *folder.path.iterdir()):
        os.chown(path, user, -1)
    above = folder.path
    while above != above.parent and os.geteuid() == 0:  # pytest's folders are root's alone
        above = above.parent
        if above.stat().st_uid == 0 and above.stat().st_mode & 0o5 == 0:
            above.chmod(above.stat().st_mode | 0o5)
    folder.path.chmod(0o500)

    def as_that_user() -> None:
        if os.geteuid() == 0:
            os.setegid(user)
            os.seteuid(user)
        assert trouble_with(folder.path, create=True) == ""
        assert folder.read(entry(1).key) == entry(1)
        with folder.compiling(entry(2).key, 1.0):
            assert not folder.write(entry(2))
        with folder.loading(entry(1).key):
            pass
        assert folder.evict(0) == 0
        assert folder.read(entry(1).key) == entry(1)

    assert in_child(as_that_user) == 0
    folder.path.chmod(0o700)


def test_a_folder_that_goes_away_costs_nothing_but_compiling(folder: CacheFolder) -> None:
    folder.write(entry(1))
    folder.clear()
    folder.path.rmdir()
    assert folder.read(entry(1).key) is None
    with folder.compiling(entry(1).key, 1.0):
        assert not folder.write(entry(1))
    assert folder.list() == []
    assert folder.strangers() == []


# -- several processes -------------------------------------------------------------------------------------------------
def test_who_is_second_waits_for_the_first(folder: CacheFolder) -> None:
    one, order = entry(1), list[str]()
    inside = threading.Event()

    def first() -> None:
        with folder.compiling(one.key, 10.0):
            inside.set()
            time.sleep(0.1)
            order.append("first")
            folder.write(one)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with folder.compiling(one.key, 10.0):
        order.append("second")
        assert folder.read(one.key) == one
    thread.join(10)
    assert order == ["first", "second"]
    assert not [name for name in os.listdir(folder.path) if name.endswith(".lock")]


def test_nobody_waits_for_ever(folder: CacheFolder) -> None:
    with folder.compiling(entry(1).key, 1.0), folder.compiling(entry(1).key, 0.05):
        assert folder.write(entry(1))


def test_a_lock_ends_with_its_process(folder: CacheFolder) -> None:
    def hold_and_die() -> None:
        with folder.compiling(entry(1).key, 1.0):
            os._exit(3)

    assert os.waitstatus_to_exitcode(in_child(hold_and_die)) == 3
    begun = time.monotonic()
    with folder.compiling(entry(1).key, 30.0):
        assert time.monotonic() - begun < 20
    assert not folder.list()


def test_a_forked_child_does_not_keep_its_parents_lock(folder: CacheFolder) -> None:
    with folder.compiling(entry(1).key, 1.0):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        begun = time.monotonic()
        with folder.compiling(entry(1).key, 25.0):
            assert time.monotonic() - begun < 20
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_an_entry_that_ends_its_process_is_skipped_by_the_next(
    folder: CacheFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    one = entry(1)

    def load_and_die() -> None:
        assert folder.read(one.key) == one
        with folder.loading(one.key):
            os.kill(os.getpid(), signal.SIGKILL)

    for time_ in range(2):
        assert folder.write(one)
        assert os.WIFSIGNALED(in_child(load_and_die))
        assert folder.read(one.key) is None, "the next does not load it"
        assert not folder.list()
        assert ("ended another process" in capfd.readouterr().err) == (time_ == 0), "said once"
    assert not folder.write(one), "after the second time it is not kept any more"
    assert folder.read(one.key) is None
    folder.clear()
    assert folder.write(one)
    assert folder.read(one.key) == one


def test_an_entry_that_two_load_at_once_is_no_crash(folder: CacheFolder) -> None:
    one = entry(1)
    folder.write(one)
    with folder.loading(one.key):
        assert folder.read(one.key) == one
        with folder.loading(one.key):
            assert folder.read(one.key) == one
        assert folder.read(one.key) == one
    assert folder.read(one.key) == one
    assert not [name for name in os.listdir(folder.path) if name.endswith(".loading")]


def test_an_error_while_loading_is_no_crash(folder: CacheFolder) -> None:
    folder.write(entry(1))
    with pytest.raises(KeyError), folder.loading(entry(1).key):
        raise KeyError
    assert folder.read(entry(1).key) == entry(1)


def _killed(folder: CacheFolder, *what: str, timeout: float) -> int:
    program = Path(__file__).with_name("kill_program.py")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program), str(folder.path), *what],
        env=environ, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout)


def test_a_process_killed_at_any_system_call_leaves_nothing_broken(folder: CacheFolder) -> None:
    assert _killed(folder, "calls", timeout=60) > 20


@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_processes_killed_at_random_points_leave_nothing_broken(folder: CacheFolder, times: int) -> None:
    assert _killed(folder, "times", str(times), timeout=120) > times // 4
