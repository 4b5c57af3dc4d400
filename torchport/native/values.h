// What a handle holds where values are CPU tensors, and handles that are made of such. Part of follow.cpp.
#pragma once
#include "calls.h"

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
PyObject *n_by_index, *n_device, *n_manners, *n_keeps_tensors; // names
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

// Null with a Python error. There is one runtime of index 0 at a time, so the newest is the one that is kept.
Bound* bound(PyObject* runtime) {
  static auto& known = *new Bound();
  if (known.runtime.get() != runtime) {
    THPObjectPtr manners(PyObject_GetAttr(runtime, n_manners)), device(PyObject_GetAttr(runtime, n_device));
    if (!manners || !device) {
      return nullptr;
    }
    known = {THPObjectPtr(Py_NewRef(runtime)), std::move(manners), std::move(device)};
  }
  return &known;
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
  c10::ScalarType dtype;
  c10::SmallVector<int64_t, 10> sizes_and_strides;

  bool operator==(const SpecKey& other) const {
    return dtype == other.dtype && sizes_and_strides == other.sizes_and_strides;
  }
};

struct SpecHash {
  size_t operator()(const SpecKey& key) const {
    size_t made = static_cast<size_t>(key.dtype);
    for (const int64_t value : key.sizes_and_strides) {
      made = (made ^ static_cast<size_t>(value)) * 0x9E3779B97F4A7C15ull;
      made ^= made >> 29;
    }
    return made;
  }
};

constexpr size_t kMostSpecs = 4096; // kept at most
constexpr size_t kMostSeen = 1 << 16; // specs that are known to have come once

// A spec, and a handle that others are made from by ``variable_data``. Handles of different specs have different memory
// as far as PyTorch can see, which refuses writes where a tensor and an argument overlap in part.
struct Known {
  THPObjectPtr spec;
  at::Tensor handle;
};

// What is new of a tensor's spec; no spec, with a Python error, where that cannot be made.
Known new_spec(const at::Tensor& tensor) {
  THPObjectPtr made(spec_type->tp_alloc(spec_type, 0));
  if (!made) {
    return {};
  }
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
  spec_dtype.of(made.get()) = Py_NewRef(dtype);
  spec_shape.of(made.get()) = whole_numbers(tensor.sizes(), false);
  spec_strides.of(made.get()) = whole_numbers(tensor.strides(), false);
  THPObjectPtr handle(
      spec_shape.of(made.get()) && spec_strides.of(made.get()) ? PyObject_CallOneArg(make_template, dtype) : nullptr);
  if (!handle) {
    return {};
  }
  at::Tensor model = THPVariable_Unpack(handle.get()).variable_data();
  model.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return {std::move(made), std::move(model)};
}

// What is known of a tensor's spec; no spec, with a Python error, where it is not and cannot be made. Equal specs are
// mostly one object, since each spec is three objects for the garbage collector to visit. It is kept from the second
// time on that it comes: in a loop whose sizes grow, what is kept of each size would lie between the values of one size
// and the next, and their memory could be used for neither.
// Twin of ``core.specs.TensorSpec.of``.
Known spec_of(const at::Tensor& tensor) {
  static auto& known = *new std::unordered_map<SpecKey, Known, SpecHash>();
  static auto& seen = *new ska::flat_hash_set<size_t>(); // hashes of those that came once
  SpecKey key{tensor.scalar_type(), {}};
  key.sizes_and_strides.append(tensor.sizes().begin(), tensor.sizes().end());
  key.sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
  if (const auto found = known.find(key); found != known.end()) {
    return {THPObjectPtr(Py_NewRef(found->second.spec.get())), found->second.handle};
  }
  Known made = new_spec(tensor);
  if (!made.spec) {
    return made;
  }
  if (seen.insert(SpecHash()(key)).second) {
    if (seen.size() > kMostSeen) {
      seen.clear();
    }
    return made;
  }
  if (known.size() >= kMostSpecs) {
    std::unordered_map<SpecKey, Known, SpecHash>().swap(known);
  }
  known.emplace(std::move(key), Known{THPObjectPtr(Py_NewRef(made.spec.get())), made.handle});
  return made;
}

// The CPU tensor that a handle of a runtime has as its value, and the value; undefined where Python has to look.
at::Tensor held_by(const at::Tensor& tensor, PyObject* runtime, THPObjectPtr& value) {
  THPObjectPtr handle = handle_of(tensor);
  if (!handle) {
    return {};
  }
  value = attribute(handle.get(), py_.n_value);
  if (!value || Py_TYPE(value.get()) != host_data || py_.info.of(value.get()) != runtime) {
    return {};
  }
  PyObject* held = data_tensor.of(value.get());
  if (held == nullptr || !THPVariable_Check(held)) {
    return {};
  }
  if (THPVariable_Unpack(held).strides() != tensor.strides()) {
    return {}; // the handle is a view's; the value was stored without the base's strides
  }
  return THPVariable_Unpack(held);
}

// A handle that has a CPU tensor as its value, and the spec in ``spec``; undefined with a Python error.
at::Tensor handle_with(
    at::Tensor value, PyObject* runtime, PyObject* device, PyObject* exported, THPObjectPtr& spec) {
  if (value.is_conj()) {
    value = value.resolve_conj();
  }
  if (value.is_neg()) {
    value = value.resolve_neg();
  }
  Known known = spec_of(value);
  if (!known.spec) {
    return {};
  }
  at::Tensor result = known.handle.variable_data();
  spec = std::move(known.spec);
  THPObjectPtr made(THPVariable_Wrap(result, py_.handle)), data(host_data->tp_alloc(host_data, 0)),
      tensor(THPVariable_Wrap(value));
  if (!spec || !made || !data || !tensor) {
    return {};
  }
  const std::pair<const Slot*, PyObject*> parts[] = {
      {&data_device, device}, {&data_spec, spec.get()}, {&data_tensor, tensor.get()}, {&py_.info, runtime},
      {&py_.exported, exported}};
  for (const auto& [slot, part] : parts) {
    Py_INCREF(part);
    slot->of(data.get()) = part;
  }
  if (PyObject_SetAttr(made.get(), py_.n_value, data.get()) != 0) {
    return {};
  }
  return result;
}

} // namespace
