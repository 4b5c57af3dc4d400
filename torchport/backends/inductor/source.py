"""Edits of the C++ that Inductor generates: less to compile, and no way to take the process down.

Each edit looks for text that torch 2.13 is known to generate. Where it is not found the edit is left out if the result
is merely slower to build, and raises ``ValueError`` if it would be wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MODEL", "Wrapper", "guard_kernels", "quiet_interface", "split_kernels", "strip_wrapper"]

MODEL = r"""
#include <torch/csrc/inductor/aoti_runtime/model.h>

// The part of a model that is the same for every graph without constants.
extern "C" {
extern const size_t torchport_inputs;
extern const size_t torchport_outputs;
}

alignas(64) uint8_t _binary_constants_bin_start[64]{};
alignas(64) uint8_t _binary_constants_bin_end[64]{};

namespace torch::aot_inductor {
AOTInductorModel::AOTInductorModel(
    std::shared_ptr<ConstantMap> constants_map,
    std::shared_ptr<std::vector<ConstantHandle>> constants_array,
    const std::string& device_str,
    std::optional<std::string> cubin_dir)
    : AOTInductorModelBase(torchport_inputs, torchport_outputs, 0, device_str, std::move(cubin_dir), true) {
  for (auto& info : inputs_info_) info.name = "input";
  for (auto& info : outputs_info_) info.name = "output";
  update_constants_map(std::move(constants_map));
  update_constants_array(std::move(constants_array));
  kernels_ = std::make_unique<AOTInductorModelKernelsBase>();
}
std::unordered_map<std::string, AtenTensorHandle> AOTInductorModel::const_run_impl(
    DeviceStreamType, AOTIProxyExecutorHandle, bool) {
  return {};
}
void AOTInductorModel::_const_run_impl(
    std::vector<AtenTensorHandle>&, DeviceStreamType, AOTIProxyExecutorHandle) {}
} // namespace torch::aot_inductor
"""
"""C++ of the model's constructor. In the generated wrapper it holds most of the time to compile a small graph."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The wrapper's C++, and which parts of a runtime it is compiled and linked with."""

    text: str
    shared_model: bool
    """Whether it needs :data:`MODEL` (else it defines the constructor itself)."""
    own_runtime: bool = False
    """Whether ``model.h`` is all it needs, which is read in a quarter of the time that Inductor's own headers take."""


def quiet_interface(text: str) -> str:
    """``interface.cpp`` without printing errors: the caller gets them as exceptions."""
    return re.sub(r'std::cerr << "(?:Error: "|Unknown exception).*?;', "", text)


_INDUCTORS_HEADER = "#include <torch/csrc/inductor/aoti_include/cpu.h>"
_MODELS_HEADER = "#include <torch/csrc/inductor/aoti_runtime/model.h>"
_DECLARATIONS = "#include <torch/csrc/inductor/aoti_torch/c/shim_"
"""Headers of operators' C functions, which any runtime may include."""


def strip_wrapper(
    text: str, interface: str, inputs: int, outputs: int, constants: bool, by_name: bool = False
) -> Wrapper:
    """The wrapper without what is linked in instead, and without the checks it would not run.

    ``by_name``: it calls operators through Inductor's proxy executor, which only Inductor's own runtime has.

    The checks compare shapes when ``AOTI_RUNTIME_CHECK_INPUTS`` is set; torchport checks every call itself. They are
    half of the lines of a training step's wrapper. Raises ``ValueError`` if torch's ``interface`` is not in it.
    """
    if interface.strip() not in text:
        raise ValueError("the generated wrapper does not hold torch's interface.cpp")
    text = text.replace(interface.strip(), _MODELS_HEADER, 1)
    checks = r"^AOTI_NOINLINE static void check_input_0\(.*?(?=^static bool _check_aoti_runtime_check_inputs_env)"
    text = re.sub(checks, "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *check_input_\d+\(input_handles\);\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *if \(_check_aoti_runtime_check_inputs_env\(\)\) \{.*\}\n", "", text, flags=re.MULTILINE)
    # Inductor drops the error code of some fallbacks (scatter): their failure would go unnoticed.
    text = re.sub(r"^( *)(aoti_torch_cpu_\w+\(.*\));$", r"\1AOTI_TORCH_ERROR_CODE_CHECK(\2);", text, flags=re.MULTILINE)
    if constants:
        return Wrapper(text, shared_model=False)
    constructor = (
        r"^namespace torch::aot_inductor \{\nnamespace \{\nclass AOTInductorModelKernels .*?"
        r"^\} // namespace torch::aot_inductor\nusing namespace torch::aot_inductor;\n"
    )
    shorter, found = re.subn(constructor, "", text, count=1, flags=re.MULTILINE | re.DOTALL)
    folding = r"^void AOTInductorModel::_const_run_impl\([^{}]*\{\}\n"
    shorter, empty = re.subn(folding, "", shorter, count=1, flags=re.MULTILINE)
    if not (found and empty):
        return Wrapper(text, shared_model=False)
    shorter = re.sub(r"^.*auto& kernels = static_cast<AOTInductorModelKernels&>.*\n", "", shorter, flags=re.MULTILINE)
    sizes = f"extern const size_t torchport_inputs = {inputs};\nextern const size_t torchport_outputs = {outputs};\n"
    body = shorter.replace(
        "namespace torch::aot_inductor {", f'extern "C" {{\n{sizes}}}\nusing namespace torch::aot_inductor;\n'
        "namespace torch::aot_inductor {", 1,
    )  # fmt: skip
    ours = {_INDUCTORS_HEADER, _MODELS_HEADER}
    others = set(re.findall(r"^#include .*$", body, flags=re.MULTILINE)) - ours
    if by_name or not all(header.startswith(_DECLARATIONS) for header in others):
        return Wrapper(body, shared_model=True)
    for header in ours:
        body = body.replace(f"{header}\n", "", 1)
    return Wrapper(body, shared_model=False, own_runtime=True)


_FUNCTION = re.compile(r'^extern "C" .*?^\}\n?', re.MULTILINE | re.DOTALL)
_PARALLEL = re.compile(r"^( *#pragma omp parallel)(?: num_threads\((\d+)\))? *$", re.MULTILINE)
_SHARED_LOOP = re.compile(r"^( *)#pragma omp (?:for|single)\b(?:.*\bcollapse\((\d+)\))?.*$")
_CATCH = "} catch (...) { if (!torchport_caught.test_and_set()) torchport_error = std::current_exception(); }"


def guard_kernels(text: str, threads: int) -> str:
    """Kernels whose parallel regions let no exception out and start no more threads than the code has room for.

    An exception (an index out of bounds) that leaves a parallel region ends the process; here it is caught where it is
    thrown and thrown again after the region. Scratch memory is sized for ``threads`` threads when the code is made,
    so no more may run; fewer do when torch uses fewer.
    """
    limit = rf"\1 num_threads(std::min<int>({threads}, omp_get_max_threads()))"
    text = _PARALLEL.sub(limit, text)
    guarded = _FUNCTION.sub(lambda match: _guard_function(match.group()), text)
    return "#include <algorithm>\n#include <atomic>\n#include <exception>\n#include <omp.h>\n" + guarded


def _guard_function(text: str) -> str:
    if "#pragma omp" not in text:
        return text
    lines = text.rstrip("\n").split("\n")
    try:
        opening = lines.index("{")
        insertions = {opening: "std::exception_ptr torchport_error; std::atomic_flag torchport_caught;"}
        last = len(lines) - 1
        closings = {last: "if (torchport_error) std::rethrow_exception(torchport_error);"}
        for number, line in enumerate(lines):
            match = _SHARED_LOOP.match(line)
            if match:
                first, end = _block(lines, number, int(match.group(2) or 1), "omp for" in line)
                insertions[first] = "try {"
                closings[end] = _CATCH
    except ValueError:
        # A shape of loop that is not known here: without threads an exception leaves the function as it should.
        return "\n".join(line for line in lines if "#pragma omp" not in line) + "\n"
    result: list[str] = []
    for number, line in enumerate(lines):
        if number in closings:
            result.append(closings[number])
        result.append(line)
        if number in insertions:
            result.append(insertions[number])
    return "\n".join(result) + "\n"


def _block(lines: list[str], pragma: int, depth: int, is_loop: bool) -> tuple[int, int]:
    """Line numbers of the braces around the body after a pragma: of the ``depth``-th nested loop if it is one."""
    number = pragma + 1
    for _ in range(depth if is_loop else 0):
        while lines[number].lstrip().startswith("#pragma GCC"):
            number += 1
        if not lines[number].lstrip().startswith("for("):
            raise ValueError(lines[number])
        opening = number + 1
        if lines[opening].strip() != "{":
            raise ValueError(lines[opening])
        number = opening + 1
    opening = number - 1 if is_loop else number
    if lines[opening].strip() != "{":
        raise ValueError(lines[opening])
    return opening, lines.index(lines[opening].replace("{", "}"), opening)


def split_kernels(text: str, parts: int) -> list[str]:
    """The kernels in up to ``parts`` files of about the same length, to be compiled at the same time."""
    functions = list(_FUNCTION.finditer(text))
    rest = _FUNCTION.sub("", text)
    if parts < 2 or len(functions) < 2 or any(line and line[0] not in "#/" for line in rest.split("\n")):
        return [text]
    head = "\n".join(dict.fromkeys(rest.split("\n"))) + "\n"
    files = [head for _ in range(min(parts, len(functions)))]
    for match in sorted(functions, key=lambda found: len(found.group()), reverse=True):
        shortest = min(range(len(files)), key=lambda number: len(files[number]))
        files[shortest] += match.group()
    return files
