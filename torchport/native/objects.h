// The Python objects as the C++ libraries see them: slots of traces, nodes and values, attributes of handles.
#pragma once
#include "slots.h"

#include <tuple>
#include <vector>

#include <ATen/FunctionalTensorWrapper.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace torchport {

static struct {
  PyTypeObject* handle;
  Slot cursor, scalar_inputs, leaves, leaf_ids, made, base, runtime, fresh, copies; // of a trace
  Slot ready, parent, children, key, first_id, fits, records, templates; // of a node
  Slot info, exported; // of a value
  PyObject *n_trace, *n_value_id, *n_value, *n_spec, *n_failure, *n_fresh, *n_home, *n_dict;
} py_;

// Look up the slots and intern the attribute names. False, with a Python error set, if a type lacks one of the slots.
inline bool look(PyObject* handle, PyObject* trace, PyObject* node, PyObject* data) {
  const std::vector<std::tuple<PyObject*, const char*, Slot*>> slots = {
      {trace, "cursor", &py_.cursor}, {trace, "scalar_inputs", &py_.scalar_inputs}, {trace, "leaves", &py_.leaves},
      {trace, "leaf_ids", &py_.leaf_ids}, {trace, "made", &py_.made}, {trace, "base", &py_.base},
      {trace, "runtime", &py_.runtime}, {trace, "fresh", &py_.fresh}, {trace, "copies", &py_.copies},
      {node, "ready", &py_.ready}, {node, "parent", &py_.parent},
      {node, "children", &py_.children}, {node, "key", &py_.key}, {node, "first_id", &py_.first_id},
      {node, "fits", &py_.fits}, {node, "records", &py_.records}, {node, "templates", &py_.templates},
      {data, "info", &py_.info}, {data, "exported", &py_.exported},
  };
  for (const auto& [type, name, slot] : slots) {
    if (!find_slot(type, name, *slot)) {
      return false;
    }
  }
  Py_INCREF(handle);
  py_.handle = reinterpret_cast<PyTypeObject*>(handle);
  py_.n_trace = PyUnicode_InternFromString("trace");
  py_.n_value_id = PyUnicode_InternFromString("value_id");
  py_.n_value = PyUnicode_InternFromString("value");
  py_.n_spec = PyUnicode_InternFromString("spec");
  py_.n_failure = PyUnicode_InternFromString("failure");
  py_.n_fresh = PyUnicode_InternFromString("fresh");
  py_.n_home = PyUnicode_InternFromString("home");
  py_.n_dict = PyUnicode_InternFromString("__dict__");
  return true;
}

// A handle's attribute, as a new reference; null without a Python error if there is none.
inline PyObject* attribute(PyObject* handle, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(handle, name);
  if (found == nullptr) {
    PyErr_Clear();
  }
  return found;
}

inline long long integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return -2;
  }
  return value;
}

// A handle with the tensor's dtype, sizes and strides but without a value, as a new reference. The dispatch key Python
// is excluded: under a dispatch mode ``variable_data`` calls the mode's ``detach``, whose result is no handle.
inline PyObject* handle_like(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);
  return THPVariable_Wrap(tensor.variable_data(), py_.handle);
}

// The dispatch key of a handle that Python has not seen (unseen.h). PyTorch reserves it for libraries outside of it, and
// has no kernel there. It comes before any other kernel of a handle, and before dispatch modes.
constexpr auto kUnseen = c10::DispatchKey::DeferredInit;

inline bool is_unseen(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  return keys.has(kUnseen) && !keys.has(c10::DispatchKey::Functionalize) && tensor.is_privateuseone();
}

// A wrapper without the key. Its constructor takes over the keys of its handle, and PyTorch has no function to remove
// one; a derived class may name the member.
inline at::Tensor without_key(at::Tensor wrapper) {
  struct Keys : c10::TensorImpl {
    static constexpr auto of() {
      return &Keys::key_set_;
    }
  };
  c10::TensorImpl& impl = *wrapper.unsafeGetTensorImpl();
  impl.*Keys::of() = (impl.*Keys::of()).remove(kUnseen);
  return wrapper;
}

// What a program holds of a handle.
inline at::Tensor in_wrapper(const at::Tensor& handle) {
  return without_key(at::detail::make_tensor<at::FunctionalTensorWrapper>(handle));
}

inline long long value_id_of(PyObject* handle) {
  THPObjectPtr value_id(attribute(handle, py_.n_value_id));
  return value_id ? integer(value_id.get()) : -2;
}

} // namespace torchport
