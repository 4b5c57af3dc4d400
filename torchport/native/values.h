// What is asked of Python where values are CPU tensors: runtimes, the thread's state, specs. Part of follow.cpp.
#pragma once
#include "calls.h"

#include <memory>
#include <optional>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

namespace {

// -- Python's side ----------------------------------------------------------------------------------------------
PyTypeObject* host_data; // interface.TensorData
PyTypeObject* spec_type; // specs.TensorSpec
Slot direct_of; // of a trace
Slot data_device, data_spec, data_tensor; // of a TensorData
Slot spec_shape, spec_dtype, spec_strides; // of a TensorSpec
PyObject *n_by_index, *n_device, *n_manners, *n_keeps_tensors, *n_class; // names
PyObject* views; // interface.VIEWS
PyObject* make_template; // a function: dtype → a handle of that dtype
PyObject* zero; // the index of the default device

// A thread's trace of index 0, whatever its operators are; null if there is none yet.
THPObjectPtr any_trace(PyObject* of_thread) {
  THPObjectPtr traces = of_thread ? entry(of_thread, n_by_index) : THPObjectPtr();
  return traces && PyDict_CheckExact(traces.get()) ? entry(traces.get(), zero) : THPObjectPtr();
}

// The same if its operators are interpreted at once, else null.
THPObjectPtr direct_trace(PyObject* of_thread) {
  THPObjectPtr trace = any_trace(of_thread);
  return trace && integer(direct_of.of(trace.get())) > 0 ? std::move(trace) : THPObjectPtr();
}

// What is asked of a runtime for each operator. The same objects for as long as the runtime lives.
struct Bound {
  THPObjectPtr runtime, manners, device;
};

// Drop what Python holds, from any thread.
void free_bound(Bound* of_runtime) {
  if (Py_IsInitialized()) {
    const Gil gil;
    delete of_runtime;
  }
}

using Owner = std::shared_ptr<Bound>;

// Null, without a Python error, where it has not what is asked for. There is one runtime of index 0 at a time, so the
// newest is the one that is kept.
const Owner& bound(PyObject* runtime) {
  static auto& known = *new Owner(new Bound(), free_bound);
  static const auto& none = *new Owner();
  if (known->runtime.get() != runtime) {
    THPObjectPtr manners(PyObject_GetAttr(runtime, n_manners)), device(PyObject_GetAttr(runtime, n_device));
    if (!manners || !device) {
      PyErr_Clear();
      return none;
    }
    const Owner before = std::exchange(
        known,
        Owner(new Bound{THPObjectPtr(Py_NewRef(runtime)), std::move(manners), std::move(device)}, free_bound));
  }
  return known;
}

// Whether CPU operators may run in the thread's state, once ``DefaultState`` has seen to inference mode: no dispatch
// mode, CPU autocast or functorch.
// Twin of ``core.default_state.is_default``.
bool is_default() {
  using c10::DispatchKey;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !at::autocast::is_autocast_enabled(at::kCPU) && !included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !included.has(DispatchKey::FuncTorchDynamicLayerBackMode) && !included.has(DispatchKey::Python);
}

// Outside of inference mode, without gradients: a value may be used where that mode is off, and written to.
// Twin of ``core.default_state.default_state``.
class DefaultState {
 public:
  DefaultState() {
    if (c10::InferenceMode::is_enabled()) {
      guards.emplace();
    }
  }

 private:
  struct Guards {
    c10::InferenceMode mode{false};
    at::AutoDispatchBelowADInplaceOrView below;
    c10::NoGradGuard no_gradients;
  };
  std::optional<Guards> guards;
};

// A list or tuple of Python integers; null with a Python error.
PyObject* whole_numbers(c10::ArrayRef<int64_t> values, bool list) {
  THPObjectPtr made(list ? PyList_New(values.size()) : PyTuple_New(values.size()));
  for (size_t at = 0; made && at < values.size(); ++at) {
    PyObject* item = PyLong_FromLongLong(values[at]);
    if (item == nullptr) {
      return nullptr;
    }
    list ? PyList_SET_ITEM(made.get(), at, item) : PyTuple_SET_ITEM(made.get(), at, item);
  }
  return made.release();
}

struct SpecKey {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 10> sizes_and_strides;

  SpecKey() = default;
  explicit SpecKey(const at::Tensor& tensor) : dtype(tensor.scalar_type()) {
    sizes_and_strides.append(tensor.sizes().begin(), tensor.sizes().end());
    sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
  }

  bool operator==(const SpecKey& other) const {
    return dtype == other.dtype && sizes_and_strides == other.sizes_and_strides;
  }
};

struct SpecHash {
  size_t operator()(const SpecKey& key) const {
    return hash_of(key.sizes_and_strides, static_cast<size_t>(key.dtype));
  }
};

constexpr size_t kMostSpecs = 4096; // kept at most
constexpr size_t kMostSeen = 1 << 16; // specs that are known to have come once

// A new spec like a tensor's; null with a Python error.
PyObject* new_spec(const at::Tensor& tensor) {
  THPObjectPtr made(spec_type->tp_alloc(spec_type, 0));
  if (!made) {
    return nullptr;
  }
  spec_dtype.of(made.get()) = Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
  spec_shape.of(made.get()) = whole_numbers(tensor.sizes(), false);
  spec_strides.of(made.get()) = whole_numbers(tensor.strides(), false);
  return spec_shape.of(made.get()) && spec_strides.of(made.get()) ? made.release() : nullptr;
}

// A tensor's spec, as a new reference; null with a Python error. Equal specs are mostly one object, since each spec is
// three objects for the garbage collector to visit. It is kept from the second time on that it comes: in a loop whose
// sizes grow, what is kept of each size would lie between the values of one size and the next, and their memory could be
// used for neither.
// Twin of ``core.specs.TensorSpec.of``.
PyObject* spec_of(const at::Tensor& tensor) {
  static auto& known = *new std::unordered_map<SpecKey, THPObjectPtr, SpecHash>();
  static auto& seen = *new ska::flat_hash_set<size_t>(); // hashes of those that came once
  SpecKey key(tensor);
  if (const auto found = known.find(key); found != known.end()) {
    return Py_NewRef(found->second.get());
  }
  THPObjectPtr made(new_spec(tensor));
  if (!made) {
    return nullptr;
  }
  if (seen.insert(SpecHash()(key)).second) {
    if (seen.size() > kMostSeen) {
      seen.clear();
    }
    return made.release();
  }
  if (known.size() >= kMostSpecs) {
    std::unordered_map<SpecKey, THPObjectPtr, SpecHash>().swap(known);
  }
  known.emplace(std::move(key), THPObjectPtr(Py_NewRef(made.get())));
  return made.release();
}

at::FunctionalTensorWrapper* wrapper_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Functionalize)
      ? at::functionalization::impl::unsafeGetFunctionalWrapper(tensor)
      : nullptr;
}

} // namespace
