"""From generated C++ to a shared library: what is the same for every graph is compiled once, the rest in parallel.

``torch._inductor``'s own build compiles everything per graph, one file after the other. Here the runtime interface and
the model's constructor (most of a small graph's build) are object files made once per machine, both headers are
precompiled once, and wrapper and kernels are compiled at the same time. The shared parts live in ``torchport`` inside
Inductor's cache directory, each under a name that hashes the compiler, its flags and the torch version; they appear by
``rename``, so any number of processes may build them at once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shlex
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchport.core.collection import made_to_stay
from torchport.core.compilers import run_compiler, side_by_side
from torchport.core.errors import CompileError
from torchport.core.forks import guarded_lock

from .source import Wrapper

__all__ = ["Toolchain", "build_library", "constants_assembly", "import_compiler"]

_shared_lock = guarded_lock()


@functools.cache
def import_compiler() -> None:
    """Import what compiling needs of Inductor, in one go: two seconds, of which collecting garbage would be a fifth."""
    with made_to_stay(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own use of what it has deprecated
        for name in ("compile_fx", "graph", "lowering", "codegen.cpp_wrapper_cpu"):
            importlib.import_module(f"torch._inductor.{name}")


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
    """Source of the runtime interface (the C ABI), which does not depend on the graph."""
    model: str
    """Source of the model's constructor, for graphs without constants."""
    cache_dir: Path
    precompile: bool
    """Whether precompiled headers (150 MB each, per set of flags) are worth making."""
    fingerprint: str
    """Torch version and whatever else decides what the headers hold."""


def _call(command: Sequence[str], directory: Path) -> None:
    status, output = run_compiler(command, directory)
    if status:
        shown = output if len(output) < 6_000 else output[:3_000] + "\n...\n" + output[-3_000:]
        raise CompileError(f"the C++ compiler failed ({status}): {shlex.join(command[:1])}\n{shown}")


def _compiler_identity(compiler: Sequence[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CompileError(f"cannot run the C++ compiler {shlex.join(compiler)}: {error}; set CXX") from error
    return done.stdout.decode(errors="replace")


class _Shared:
    """The parts that every graph shares: two precompiled headers and two object files, built where they are missing."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._toolchain = toolchain
        self._identity = f"{toolchain.fingerprint}\0{_compiler_identity(toolchain.compiler)}"
        self.wrapper_header, self.kernel_header = side_by_side(
            functools.partial(self._header, header, flags)
            for header, flags in (
                (toolchain.wrapper_header, toolchain.wrapper_flags),
                (toolchain.kernel_header, toolchain.kernel_flags),
            )
        )
        self.interface, self.model = side_by_side(
            functools.partial(self._object, name, text)
            for name, text in (("interface", toolchain.interface), ("model", toolchain.model))
        )

    def _header(self, header: str, flags: Sequence[str]) -> str:
        """A header to ``-include`` whose precompiled form lies next to it."""
        if not self._toolchain.precompile:
            return header
        command = ["-x", "c++-header", "header.h", "-o", "header.h.gch", *flags]
        return str(self._built("header.h", f"#include <{header}>\n", command) / "header.h")

    def _object(self, name: str, text: str) -> str:
        flags = [*self._toolchain.wrapper_flags, "-include", self.wrapper_header]
        return str(self._built(f"{name}.cpp", text, ["-c", f"{name}.cpp", "-o", f"{name}.o", *flags]) / f"{name}.o")

    def _built(self, name: str, content: str, command: Sequence[str]) -> Path:
        """The folder with what ``command`` makes of a file; built in private and renamed into place if not there."""
        digest = hashlib.sha256(
            "\0".join([self._identity, name, content, *self._toolchain.compiler, *command]).encode()
        )
        folder = self._toolchain.cache_dir / f"{name.split('.')[0]}-{digest.hexdigest()[:24]}"
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-", ignore_cleanup_errors=True) as private:
            inside = Path(private) / "made"
            inside.mkdir()
            (inside / name).write_text(content)
            _call([*self._toolchain.compiler, *command], inside)
            try:
                inside.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
        return folder


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


def build_library(toolchain: Toolchain, wrapper: Wrapper, kernels: Sequence[str], constants: bytes) -> bytes:
    """Compile and link; returns the shared library's bytes. Raises :class:`CompileError` with the compiler's output."""
    shared = _shared_parts(toolchain)
    sources = {"wrapper.cpp": wrapper.text}
    sources |= {f"kernels{number}.cpp": text for number, text in enumerate(kernels)}
    if not wrapper.shared_model:
        sources["constants.s"] = constants_assembly(constants)
    with tempfile.TemporaryDirectory(prefix="torchport-inductor-", ignore_cleanup_errors=True) as private:
        folder = Path(private)

        def compile_one(name: str) -> str:
            (folder / name).write_text(sources[name])
            target = name.rsplit(".", 1)[0] + ".o"
            command = [*toolchain.compiler, "-c", name, "-o", target]
            if name == "wrapper.cpp":
                command += [*toolchain.wrapper_flags, "-include", shared.wrapper_header]
            elif name.endswith(".cpp"):
                command += [*toolchain.kernel_flags, "-include", shared.kernel_header]
            _call(command, folder)
            return target

        free = threading.BoundedSemaphore(os.cpu_count() or 1)

        def in_turn(name: str) -> str:
            with free:
                return compile_one(name)

        objects = [*side_by_side(functools.partial(in_turn, name) for name in sources), shared.interface]
        if wrapper.shared_model:
            objects.append(shared.model)
        _call([*toolchain.compiler, *objects, "-o", "model.so", *toolchain.link_flags], folder)
        return (folder / "model.so").read_bytes()
