"""From generated C++ to a shared library: what is the same for every graph is compiled once, the rest in parallel.

``torch._inductor``'s own build compiles everything per graph, one file after the other. Here the headers are
precompiled once per machine, and wrapper and kernels are compiled at the same time. Most wrappers need a small runtime
only, which is the header ``model.h``. For the others Inductor's runtime interface and the model's constructor (most of
a small graph's build) are object files made once. The shared parts live in ``torchport`` inside Inductor's cache
directory, each under a name that hashes the compiler, its flags and the torch version; they appear by ``rename``, so
any number of processes may build them at once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from torchport.core.collection import made_to_stay
from torchport.core.compilers import run_beside, run_compiler, side_by_side
from torchport.core.errors import CompileError
from torchport.core.forks import guarded_lock

from .source import Wrapper

__all__ = ["Toolchain", "begin", "build_library", "constants_assembly", "import_compiler"]

log: Final = logging.getLogger("torchport.compile")
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
    kernel_header: str
    own_header: str
    """Text of the runtime that most wrappers need."""
    wrapper_header: str
    """Inductor's, for the others."""
    interface: str
    """Source of Inductor's runtime interface (the C ABI), which does not depend on the graph."""
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


_PARTS: Final = ("kernels", "own", "wrapper", "interface", "model", "libtorch", "libtorch_cpu")


class _OfWrapper(CompileError):
    """It was the wrapper that does not compile."""


class _Shared:
    """The parts that graphs share: precompiled headers and object files, each built when it is first asked for."""

    def __init__(self, toolchain: Toolchain) -> None:
        self._toolchain = toolchain
        self._identity = f"{toolchain.fingerprint}\0{_compiler_identity(toolchain.compiler)}"
        self._made: dict[str, str] = {}
        self._locks = {name: threading.Lock() for name in _PARTS}
        self.own_fails = False
        """Whether the small runtime does not compile here, and every wrapper gets Inductor's."""

    def of(self, name: str) -> str:
        """The path of a header to include (``kernels``, ``own``, ``wrapper``), or of what is linked: an object
        (``interface``, ``model``) or an empty library (``libtorch``, ``libtorch_cpu``)."""
        if name not in self._made:
            with self._locks[name]:
                if name not in self._made:
                    self._made[name] = self._build(name)
        return self._made[name]

    def _build(self, name: str) -> str:
        toolchain = self._toolchain
        if name == "kernels":
            return self._header(f"#include <{toolchain.kernel_header}>\n", toolchain.kernel_flags)
        if name == "own":
            return self._header(toolchain.own_header, toolchain.wrapper_flags)
        if name == "wrapper":
            return self._header(f"#include <{toolchain.wrapper_header}>\n", toolchain.wrapper_flags)
        if name.startswith("lib"):
            return self._empty_library(name)
        return self._object(name, toolchain.interface if name == "interface" else toolchain.model)

    def link_flags(self) -> list[str]:
        """The flags, with empty libraries for PyTorch's own: the linker need not read 400 MB to note their names."""
        if sys.platform != "linux":
            return list(self._toolchain.link_flags)
        names = {"-ltorch": "libtorch", "-ltorch_cpu": "libtorch_cpu"}
        flags = [self.of(names[flag]) if flag in names else flag for flag in self._toolchain.link_flags]
        return ["-Wl,--no-as-needed", *flags]

    def _empty_library(self, name: str) -> str:
        """An empty library's path; the flag that links PyTorch's own where its name has a version, or this fails."""
        library = f"{name}.so"
        real = Path(torch.__file__).parent / "lib" / library
        if real.exists() and not real.is_symlink():
            command = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", f"{name}.cpp", "-o", library]
            with suppress(CompileError):
                return str(self._built(f"{name}.cpp", "", command) / library)
        return f"-l{name.removeprefix('lib')}"

    def _header(self, text: str, flags: Sequence[str]) -> str:
        """A header to ``-include``, whose precompiled form lies next to it where that is worth making."""
        command = ["-x", "c++-header", "header.h", "-o", "header.h.gch", *flags] if self._toolchain.precompile else []
        return str(self._built("header.h", text, command) / "header.h")

    def _object(self, name: str, text: str) -> str:
        flags = [*self._toolchain.wrapper_flags, "-include", self.of("wrapper")]
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
            if command:
                _call([*self._toolchain.compiler, *command], inside)
            try:
                inside.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was faster
                    raise
        return folder


_shared: dict[Toolchain, _Shared] = {}
os.register_at_fork(after_in_child=_shared.clear)  # a thread of the parent's may hold the lock of a part


def _shared_parts(toolchain: Toolchain) -> _Shared:
    with _shared_lock:
        if toolchain not in _shared:
            _shared[toolchain] = _Shared(toolchain)
        return _shared[toolchain]


def begin(toolchain: Toolchain) -> None:
    """Have a thread make what nearly every graph needs, while Inductor is still writing this one's C++."""

    def make(name: str) -> None:
        with suppress(CompileError, OSError):  # whoever needs it tries again, and says why
            _shared_parts(toolchain).of(name)

    if toolchain.precompile and toolchain not in _shared:
        with suppress(RuntimeError):  # no further thread can be started
            for name in ("own", "kernels"):
                run_beside(functools.partial(make, name))


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
    with_inductors = Wrapper(wrapper.text, shared_model=True)
    if wrapper.own_runtime and not shared.own_fails:
        try:
            shared.of("own")
        except CompileError as error:
            shared.own_fails = True
            log.info("torchport's small runtime does not compile here, and graphs get Inductor's: %s", error)
    if not wrapper.own_runtime or shared.own_fails:
        return _build(toolchain, with_inductors if wrapper.own_runtime else wrapper, kernels, constants)
    try:
        return _build(toolchain, wrapper, kernels, constants)
    except _OfWrapper as error:
        log.info("a wrapper needs more than torchport's small runtime, and gets Inductor's: %s", error)
    return _build(toolchain, with_inductors, kernels, constants)


def _build(toolchain: Toolchain, wrapper: Wrapper, kernels: Sequence[str], constants: bytes) -> bytes:
    shared = _shared_parts(toolchain)
    sources = {"wrapper.cpp": wrapper.text}
    sources |= {f"kernels{number}.cpp": text for number, text in enumerate(kernels)}
    if not (wrapper.shared_model or wrapper.own_runtime):
        sources["constants.s"] = constants_assembly(constants)
    with tempfile.TemporaryDirectory(prefix="torchport-inductor-", ignore_cleanup_errors=True) as private:
        folder = Path(private)

        def compile_one(name: str) -> str:
            (folder / name).write_text(sources[name])
            target = name.rsplit(".", 1)[0] + ".o"
            command = [*toolchain.compiler, "-c", name, "-o", target]
            if name == "wrapper.cpp":
                header = shared.of("own" if wrapper.own_runtime else "wrapper")
                command += [*toolchain.wrapper_flags, "-include", header]
            elif name.endswith(".cpp"):
                command += [*toolchain.kernel_flags, "-include", shared.of("kernels")]
            try:
                _call(command, folder)
            except CompileError as error:
                if name == "wrapper.cpp":
                    raise _OfWrapper(error.message) from error
                raise
            return target

        free = threading.BoundedSemaphore(os.cpu_count() or 1)

        def in_turn(name: str) -> str:
            with free:
                return compile_one(name)

        objects = side_by_side(functools.partial(in_turn, name) for name in sources)
        if not wrapper.own_runtime:
            objects.append(shared.of("interface"))
        if wrapper.shared_model:
            objects.append(shared.of("model"))
        _call([*toolchain.compiler, *objects, "-o", "model.so", *shared.link_flags()], folder)
        return (folder / "model.so").read_bytes()
