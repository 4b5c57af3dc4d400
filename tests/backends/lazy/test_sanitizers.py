"""The C++ libraries under AddressSanitizer and UBSan: no memory is misused, and a bug that is put in is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_support import COMPILER, compiles

from torchport import native

pytestmark = [pytest.mark.slow, compiles]

PROGRAM = Path(__file__).parents[1] / "support" / "sanitized_program.py"
FLAGS = (
    "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
    "-O0",
)  # fmt: skip
LIBRARIES = (native.guard, native.flush, native.follow, native.steps)
BUGS = """
  if (std::getenv("PLANTED_WRITE") != nullptr) {
    found.data()[PyList_GET_SIZE(handles)].first = 1; // behind what was reserved
  }
  if (std::getenv("PLANTED_OVERFLOW") != nullptr) {
    volatile int most = 2147483647;
    most = most + 1;
  }
"""


def _runtime(name: str) -> str | None:
    """The sanitizer's library, which a process that is not built with it has to load first."""
    done = subprocess.run(
        [str(COMPILER), f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=False
    )
    path = Path(done.stdout.strip())
    return str(path) if path.is_absolute() and path.exists() else None


def _build(library: native.NativeLibrary, folder: Path, temporary: Path) -> str:
    """What the compiler says against a library built from a folder's sources, put where it is looked for."""
    copy = native.NativeLibrary(folder / library.source.name, library.links)
    native._all.remove(copy)
    target = temporary / f"torchport-{os.getuid()}" / copy.path.name
    command = copy.command([str(COMPILER)], Path(sysconfig.get_paths()["include"]))
    done = subprocess.run(
        [*command, *FLAGS, "-o", str(target)], capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode == 0:
        target.chmod(0o700)
    return done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sources as they are and with bugs put in, built with the sanitizers, and where the libraries are."""
    temporary = tmp_path_factory.mktemp("sanitized")
    (temporary / f"torchport-{os.getuid()}").mkdir(mode=0o700)
    plain, planted = temporary / "plain", temporary / "planted"
    for folder in (plain, planted):
        folder.mkdir()
        for source in (*native.flush.source.parent.glob("*.cpp"), *native.flush.source.parent.glob("*.h")):
            shutil.copy(source, folder)
    text = (planted / "flush.cpp").read_text()
    before = "  std::stable_sort(found.begin()"
    assert text.count(before) == 1
    (planted / "flush.cpp").write_text("#include <cstdlib>\n" + text.replace(before, BUGS + before))
    jobs = [*((library, plain) for library in LIBRARIES), (native.flush, planted)]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda job: _build(*job, temporary), jobs))
    assert said == [""] * len(jobs)
    for library in (native.guard, native.follow, native.steps):  # the same sources, so the same names
        shutil.copy(plain / library.source.name, planted)
    return {"plain": plain, "planted": planted, "temporary": temporary}


def _run(folders: dict[str, Path], sources: str, **environment: str) -> subprocess.CompletedProcess[str]:
    runtimes = [_runtime("asan"), _runtime("ubsan")]
    if None in runtimes:
        pytest.skip("the compiler comes without the sanitizers' libraries")
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(folders[sources])],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={
            **os.environ,
            **environment,
            "LD_PRELOAD": " ".join(map(str, runtimes)),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python and PyTorch leave plenty behind
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TMPDIR": str(folders["temporary"]),
            "TORCHPORT_NATIVE": "1",
        },
    )


def test_no_memory_is_misused(folders: dict[str, Path]) -> None:
    done = _run(folders, "plain")
    assert done.returncode == 0, done.stderr[-6_000:]
    followed = int(done.stdout.split()[-1])
    assert followed > 100
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize(
    ("planted", "said"),
    [("PLANTED_WRITE", "AddressSanitizer: heap-buffer-overflow"), ("PLANTED_OVERFLOW", "signed integer overflow")],
)
def test_a_bug_that_is_put_in_is_found(folders: dict[str, Path], planted: str, said: str) -> None:
    assert _run(folders, "planted").returncode == 0
    done = _run(folders, "planted", **{planted: "1"})
    assert done.returncode != 0
    assert said in done.stderr
    # The source, or the library where that is unknown.
    assert re.search(r"flush(\.cpp:\d|-[0-9a-f]{24}\.so)", done.stderr)
