"""From generated C++ to a shared library: what is the same for every graph is compiled once, the rest in parallel.

Three things make this several times faster than ``torch._inductor``'s own build (which compiles everything per graph,
one file after the other): the runtime interface (``interface.cpp``, about half of a small graph's build) is an object
file made once per machine, both headers are precompiled once, and wrapper and kernels are compiled at the same time.
The shared parts live in ``torchport`` inside Inductor's cache directory, each under a name that hashes the compiler, its
flags and the torch version; they appear by ``rename``, so any number of processes may build them at once.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torchport.core.errors import CompileError

__all__ = ["Toolchain", "build_library", "constants_assembly"]

_shared_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Toolchain:
    """How to call the C++ compiler. Flags are argument lists."""

    compiler: tuple[str, ...]
    wrapper_flags: tuple[str, ...]
    kernel_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    wrapper_header: str
    kernel_header: str
    interface: str
    """Source of the runtime interface, which does not depend on the graph."""
    cache_dir: Path
    fingerprint: str
    """Torch version and whatever else decides what the headers hold."""


def _call(command: Sequence[str], directory: Path) -> None:
    done = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        output = done.stdout.decode(errors="replace")
        shown = output if len(output) < 6_000 else output[:3_000] + "\n...\n" + output[-3_000:]
        raise CompileError(f"the C++ compiler failed ({done.returncode}): {shlex.join(command[:1])}\n{shown}")


def _compiler_identity(compiler: Sequence[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CompileError(f"cannot run the C++ compiler {shlex.join(compiler)}: {error}; set CXX") from error
    return done.stdout.decode(errors="replace")


class _Shared:
    """The parts that every graph shares, built on first use; paths are ``None`` where building one failed."""

    def __init__(self, toolchain: Toolchain) -> None:
        self.toolchain = toolchain
        identity = "\0".join([toolchain.fingerprint, _compiler_identity(toolchain.compiler), toolchain.interface])
        self._identity = identity.encode()
        with ThreadPoolExecutor(2) as pool:
            wrapper = pool.submit(self._header, toolchain.wrapper_header, toolchain.wrapper_flags)
            kernel = pool.submit(self._header, toolchain.kernel_header, toolchain.kernel_flags)
            self.wrapper_header = wrapper.result()
            self.kernel_header = kernel.result()
        self.interface = self._object()

    def _path(self, kind: str, flags: Sequence[str], content: str) -> Path:
        digest = hashlib.sha256(self._identity)
        digest.update("\0".join([kind, content, *self.toolchain.compiler, *flags]).encode())
        return self.toolchain.cache_dir / f"{kind}-{digest.hexdigest()[:24]}"

    def _header(self, header: str, flags: Sequence[str]) -> Path | None:
        """A header to ``-include`` whose precompiled form lies next to it."""
        content = f"#include <{header}>\n"
        folder = self._path("header", flags, content)
        path = folder / "header.h"
        if path.exists():
            return path
        return self._publish(folder, "header.h", content, ["-x", "c++-header", "header.h", "-o", "header.h.gch"], flags)

    def _object(self) -> Path | None:
        flags = self.toolchain.wrapper_flags
        folder = self._path("interface", flags, self.toolchain.interface)
        path = folder / "interface.o"
        if path.exists():
            return path
        content = f"#include <{self.toolchain.wrapper_header}>\n{self.toolchain.interface}"
        command = ["-c", "interface.cpp", "-o", "interface.o"]
        made = self._publish(folder, "interface.cpp", content, command, flags)
        return made and made.with_suffix(".o")

    def _publish(
        self, folder: Path, name: str, content: str, command: Sequence[str], flags: Sequence[str]
    ) -> Path | None:
        """Build in a private folder and rename it into place; a folder that is already there wins."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as private:
            inside = Path(private) / "made"
            inside.mkdir()
            (inside / name).write_text(content)
            _call([*self.toolchain.compiler, *command, *flags], inside)
            try:
                inside.rename(folder)
            except OSError:
                if not (folder / name).exists():
                    raise
        return folder / name


_shared: dict[Toolchain, _Shared] = {}


def _shared_parts(toolchain: Toolchain) -> _Shared:
    with _shared_lock:
        if toolchain not in _shared:
            _shared[toolchain] = _Shared(toolchain)
        return _shared[toolchain]


def constants_assembly(constants: bytes) -> str:
    """Assembly that puts bytes between the two symbols the runtime looks for."""
    words = [f"\t.byte {','.join(map(str, constants[i : i + 64]))}" for i in range(0, len(constants), 64)]
    start, end = "_binary_constants_bin_start", "_binary_constants_bin_end"
    lines = ['\t.section .ldata,"aw"', "\t.balign 64", f"\t.globl {start}", f"{start}:", *(words or ["\t.space 1"])]
    lines += [f"\t.globl {end}", f"{end}:", '\t.section .note.GNU-stack,"",@progbits', ""]
    return "\n".join(lines)


def build_library(toolchain: Toolchain, wrapper: str, kernels: Sequence[str], constants: bytes) -> bytes:
    """Compile and link; returns the shared library's bytes. Raises :class:`CompileError` with the compiler's output."""
    shared = _shared_parts(toolchain)
    with tempfile.TemporaryDirectory(prefix="torchport-inductor-", ignore_cleanup_errors=True) as private:
        folder = Path(private)
        sources = {"wrapper.cpp": wrapper, "constants.s": constants_assembly(constants)}
        sources |= {f"kernel{number}.cpp": text for number, text in enumerate(kernels)}
        for name, text in sources.items():
            (folder / name).write_text(text)

        def compile_one(name: str) -> str:
            target = name.rsplit(".", 1)[0] + ".o"
            command = [*toolchain.compiler, "-c", name, "-o", target]
            if name.endswith(".cpp"):
                is_wrapper = name == "wrapper.cpp"
                header = shared.wrapper_header if is_wrapper else shared.kernel_header
                command += toolchain.wrapper_flags if is_wrapper else toolchain.kernel_flags
                command += ["-include", str(header)]
            _call(command, folder)
            return target

        with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1))) as pool:
            objects = list(pool.map(compile_one, sources))
        _call([*toolchain.compiler, *objects, str(shared.interface), "-o", "model.so", *toolchain.link_flags], folder)
        return (folder / "model.so").read_bytes()
