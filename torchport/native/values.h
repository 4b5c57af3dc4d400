// What is asked of Python where values are CPU tensors: runtimes, the thread's state, specs. Part of follow.cpp.
#pragma once
#include "calls.h"

#include <memory>
#include <optional>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
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
PyObject* any_trace_(PyObject* of_thread) {
  PyObject* traces = of_thread != nullptr ? entry(of_thread, n_by_index) : nullptr;
  if (traces == nullptr || !PyDict_CheckExact(traces)) {
    return nullptr;
  }
  ThisThread& known = this_thread;
  if (of_thread == known.names && traces == known.traces) {
    return known.trace;
  }
  PyObject* trace = entry(traces, zero);
  if (trace != nullptr && of_thread == known.names) {
    known.traces = traces;
    known.trace = trace;
  }
  return trace;
}

THPObjectPtr any_trace(PyObject* of_thread) {
  return THPObjectPtr(Py_XNewRef(any_trace_(of_thread)));
}

// Whether a trace's operators are interpreted at once. Their number is 0 where not, for which Python has one object.
bool is_at_once(PyObject* trace) {
  return direct_of.of(trace) != zero;
}

// A thread's trace of index 0 if its operators are interpreted at once, else null.
PyObject* direct_trace_(PyObject* of_thread) {
  PyObject* trace = any_trace_(of_thread);
  return trace != nullptr && is_at_once(trace) ? trace : nullptr;
}

THPObjectPtr direct_trace(PyObject* of_thread) {
  return THPObjectPtr(Py_XNewRef(direct_trace_(of_thread)));
}

// The calling thread's trace of index 0, borrowed. Its operators are recorded, or interpreted at once, and never both.
struct Now {
  PyObject *recording = nullptr, *at_once = nullptr; // one of them, or none

  explicit Now(PyObject* of_thread) {
    bool& was_at_once = this_thread.was_at_once;
    if (was_at_once) { // most often it is as it was
      at_once = direct_trace_(of_thread);
    }
    if (at_once == nullptr) {
      recording = recording_trace_(of_thread);
    }
    if (at_once == nullptr && recording == nullptr && !was_at_once) {
      at_once = direct_trace_(of_thread);
    }
    was_at_once = at_once != nullptr;
  }
};

// What is asked of a runtime for each operator. The same objects for as long as the runtime lives.
struct Bound {
  THPObjectPtr runtime, manners, device;
  uint64_t decisions = 1; // another number for each runtime, and once it forgets how operators are interpreted
};

uint64_t newest_decisions = 1;

// Drop what Python holds, from any thread.
void free_bound(Bound* of_runtime) {
  if (Py_IsInitialized()) {
    const Gil gil;
    delete of_runtime;
  }
}

using Owner = std::shared_ptr<Bound>;

// The runtime that was asked for last. There is one of index 0 at a time.
Owner& last_bound() {
  static auto& known = *new Owner(new Bound(), free_bound);
  return known;
}

// Null, without a Python error, where it has not what is asked for.
const Owner& bound(PyObject* runtime) {
  Owner& known = last_bound();
  static const auto& none = *new Owner();
  if (known->runtime.get() != runtime) {
    THPObjectPtr manners(PyObject_GetAttr(runtime, n_manners)), device(PyObject_GetAttr(runtime, n_device));
    if (!manners || !device) {
      PyErr_Clear();
      return none;
    }
    const Owner before = std::exchange(
        known,
        Owner(
            new Bound{THPObjectPtr(Py_NewRef(runtime)), std::move(manners), std::move(device), ++newest_decisions},
            free_bound));
  }
  return known;
}

// Whether CPU operators may run in the thread's state, once ``DefaultState`` has seen to inference mode: no dispatch
// mode, CPU autocast or functorch is on. Each has a dispatch key: PyTorch includes those of modes and transforms where one
// is on, and excludes that of autocast where it is off.
// Twin of ``core.default_state.is_default``.
bool is_default() {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet modes(
      {DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Python});
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return !keys.included_.has_any(modes) && keys.excluded_.has(DispatchKey::AutocastCPU);
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
