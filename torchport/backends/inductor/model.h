// What the wrapper of a graph needs of Inductor's runtime, if the graph has no constants and calls operators that have a
// C function only. Inductor's own headers are for all that its packages can be (constants that change, several devices,
// models that run side by side) and take as long to read as a small graph takes to compile.
//
// Included first by exactly one file of a library: the C interface is defined here.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <torch/csrc/inductor/aoti_runtime/scalar_to_tensor.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <c10/util/generic_math.h>

// A size in bytes, as a multiple of 64.
[[maybe_unused]] inline int64_t align(int64_t bytes) {
  return (bytes + 63) & -64;
}

struct AOTIProxyExecutorOpaque;
using AOTIProxyExecutorHandle = AOTIProxyExecutorOpaque*;

extern "C" {
extern const size_t torchport_inputs;
extern const size_t torchport_outputs;
}

namespace torch::aot_inductor {

using DeviceStreamType = void*;

// One graph: the wrapper defines ``run_impl``. The CPU has no number.
class AOTInductorModel {
 public:
  void run_impl(
      AtenTensorHandle* input_handles, AtenTensorHandle* output_handles, DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor);

 private:
  const int32_t device_idx_ = -1;
};

} // namespace torch::aot_inductor

// The part of Inductor's C interface that torchport calls; the names are Inductor's, so that both kinds of library are
// called alike.
namespace torchport_runtime {

// Why the last call failed. Plain memory: a library whose thread-local variables have destructors cannot be unloaded.
inline thread_local char last_error[2048];

inline void set_last_error(const char* message) {
  std::snprintf(last_error, sizeof(last_error), "%s", message);
}

// As Inductor's guard: operators that write to a given result take none that requires a gradient.
class NoGradient {
 public:
  NoGradient() {
    aoti_torch_grad_mode_set_enabled(false);
  }
  ~NoGradient() {
    aoti_torch_grad_mode_set_enabled(before_);
  }
  NoGradient(const NoGradient&) = delete;
  NoGradient& operator=(const NoGradient&) = delete;

 private:
  const bool before_ = aoti_torch_grad_mode_is_enabled();
};

} // namespace torchport_runtime

extern "C" {

int32_t AOTInductorModelContainerCreateWithDevice(void** container, size_t, const char*, const char*) {
  *container = new torch::aot_inductor::AOTInductorModel();
  return 0;
}

int32_t AOTInductorModelContainerDelete(void* container) {
  delete static_cast<torch::aot_inductor::AOTInductorModel*>(container);
  return 0;
}

int32_t AOTInductorGetLastError(const char** message) {
  *message = torchport_runtime::last_error;
  return 0;
}

int32_t AOTInductorModelContainerRunSingleThreaded(
    void* container, AtenTensorHandle* inputs, size_t input_count, AtenTensorHandle* outputs, size_t output_count,
    void* stream, AOTIProxyExecutorHandle operators) {
  try {
    torchport_runtime::set_last_error("");
    if (input_count != torchport_inputs || output_count != torchport_outputs) {
      throw std::runtime_error("the compiled graph has another number of inputs or results");
    }
    torchport_runtime::NoGradient guard;
    static_cast<torch::aot_inductor::AOTInductorModel*>(container)->run_impl(inputs, outputs, stream, operators);
    return 0;
  } catch (const std::exception& error) {
    torchport_runtime::set_last_error(error.what());
  } catch (...) {
    torchport_runtime::set_last_error("an error without a message");
  }
  return 1;
}

} // extern "C"
