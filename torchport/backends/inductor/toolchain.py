"""The C++ compiler and the flags that Inductor would use, from its private parts; checked on torch 2.13.

==============================================================  ===================================================
name                                                            why
==============================================================  ===================================================
torch._inductor.cpp_builder.CppTorchDeviceOptions, is_gcc       compiler flags for wrapper, kernels and linking
torch._inductor.cpu_vec_isa.pick_vec_isa                        the CPU's vector instructions, for those flags
torch._inductor.runtime.cache_dir_utils.cache_dir               where Inductor keeps its files
_inductor/codegen/aoti_runtime/interface.cpp (file)             the C ABI's source, compiled once and not per graph
==============================================================  ===================================================
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from . import machine
from .build import Toolchain
from .source import MODEL, quiet_interface

__all__ = ["interface_source", "toolchain_in_force"]


def interface_source() -> str:
    """C++ of Inductor's runtime interface."""
    from torch._inductor import config

    return (Path(config.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp").read_text()


def toolchain_in_force(precompile: bool) -> Toolchain:
    """The compiler and flags Inductor would use, under the options in force."""
    from torch._inductor import cpp_builder
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    isa = pick_vec_isa()
    gcc = ["-fno-gnu-unique"] if cpp_builder.is_gcc() else []  # else libraries share variables of inline functions
    symbolic = ["-Wl,-Bsymbolic"] if sys.platform == "linux" else []  # a library uses its own kernels

    def flags(options: Any) -> tuple[str, ...]:
        arguments = [f"-D{name.strip()}" for name in options.get_definitions()]
        arguments += [f"-{flag}" for flag in options.get_cflags()]
        arguments += [f"-I{path}" for path in options.get_include_dirs()]
        arguments += options.get_passthrough_args()
        return tuple(shlex.split(" ".join([*arguments, *gcc])))

    common: dict[str, Any] = {"vec_isa": isa, "device_type": "cpu", "aot_mode": True}
    wrapper = cpp_builder.CppTorchDeviceOptions(compile_only=True, min_optimize=True, **common)
    kernel = cpp_builder.CppTorchDeviceOptions(compile_only=True, **common)
    link = cpp_builder.CppTorchDeviceOptions(**common)
    link_arguments = [f"-{flag}" for flag in [*link.get_cflags(), *link.get_ldflags()]]
    link_arguments += [f"-L{path}" for path in link.get_libraries_dirs()]
    link_arguments += [f"-l{name}" for name in link.get_libraries()]
    return Toolchain(
        compiler=tuple(shlex.split(wrapper.get_compiler())),
        wrapper_flags=flags(wrapper),
        kernel_flags=flags(kernel),
        link_flags=tuple(shlex.split(" ".join([*link_arguments, *symbolic]))),
        kernel_header="torch/csrc/inductor/cpp_prefix.h",
        own_header=Path(__file__).with_name("model.h").read_text(),
        wrapper_header="torch/csrc/inductor/aoti_include/cpu.h",
        interface=quiet_interface(interface_source()),
        model=MODEL,
        cache_dir=Path(cache_dir()) / "torchport",
        precompile=precompile,
        fingerprint=f"{torch.__version__} {machine.here(native=True)}",
    )
