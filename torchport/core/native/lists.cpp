// What is done to every value of a trace when it ends, and to every parameter by an optimizer's list operators.
#include <Python.h>

#include <algorithm>
#include <vector>

#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {

// The functionalization wrapper that a Python object is, or null.
at::FunctionalTensorWrapper* wrapper_of(PyObject* item) {
  if (!THPVariable_Check(item)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(item);
  if (!tensor.defined() || !at::functionalization::impl::isFunctionalTensor(tensor)) {
    return nullptr;
  }
  return at::functionalization::impl::unsafeGetFunctionalWrapper(tensor);
}

PyObject* values_of(PyObject* wrappers, PyTypeObject* type) {
  if (!PyList_Check(wrappers)) {
    Py_RETURN_NONE;
  }
  const Py_ssize_t count = PyList_GET_SIZE(wrappers);
  THPObjectPtr made(PyList_New(count));
  if (!made) {
    return nullptr;
  }
  std::vector<const void*> storages;
  storages.reserve(type == nullptr ? 0 : count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(wrappers, i);
    at::FunctionalTensorWrapper* wrapper = wrapper_of(item);
    if (wrapper == nullptr) {
      Py_RETURN_NONE;
    }
    wrapper->sync_();
    PyObject* value = THPVariable_Wrap(wrapper->value());
    if (value == nullptr) {
      return nullptr;
    }
    PyList_SET_ITEM(made.get(), i, value);
    if (type != nullptr) {
      if (Py_TYPE(value) != type) {
        Py_RETURN_NONE;
      }
      storages.push_back(THPVariable_Unpack(item).storage().unsafeGetStorageImpl());
    }
  }
  std::sort(storages.begin(), storages.end());
  if (std::adjacent_find(storages.begin(), storages.end()) != storages.end()) {
    Py_RETURN_NONE;
  }
  return made.release();
}

} // namespace

// Of a list of handles those that somebody holds besides the list and, where a handle has a home, its node's pool.
extern "C" PyObject* torchport_alive(PyObject* handles) {
  HANDLE_TH_ERRORS
  static PyObject* const home = PyUnicode_InternFromString("home");
  THPObjectPtr alive(PyList_New(0));
  if (!alive) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    PyObject* item = PyList_GET_ITEM(handles, i);
    Py_ssize_t holders = Py_REFCNT(item) - 1;
    if (holders == 1) {
      THPObjectPtr place(PyObject_GetAttr(item, home));
      if (!place) {
        return nullptr;
      }
      holders -= place.get() != Py_None;
    }
    if ((holders > 0 || THPVariable_Unpack(item).use_count() > 1) && PyList_Append(alive.get(), item) != 0) {
      return nullptr;
    }
  }
  return alive.release();
  END_HANDLE_TH_ERRORS
}

// The values of a list of wrappers, brought up to date; None if it is no list, or something in it is no wrapper.
extern "C" PyObject* torchport_inner(PyObject* wrappers) {
  HANDLE_TH_ERRORS
  return values_of(wrappers, nullptr);
  END_HANDLE_TH_ERRORS
}

// The same for wrappers that are about to be written; None as well if a value is of another type than given, or if two
// of the wrappers have the same storage.
extern "C" PyObject* torchport_written(PyObject* wrappers, PyObject* type) {
  HANDLE_TH_ERRORS
  return values_of(wrappers, reinterpret_cast<PyTypeObject*>(type));
  END_HANDLE_TH_ERRORS
}

// Replaces the values of wrappers, for their views as well, as functionalization does after an in-place operator; and
// tells autograd. Both are lists, of the same length.
extern "C" PyObject* torchport_write(PyObject* wrappers, PyObject* values) {
  HANDLE_TH_ERRORS
  const Py_ssize_t count = PyList_GET_SIZE(wrappers);
  TORCH_CHECK(count == PyList_GET_SIZE(values), "as many values as wrappers are needed");
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(wrappers, i);
    at::FunctionalTensorWrapper* wrapper = wrapper_of(item);
    TORCH_CHECK(wrapper != nullptr && THPVariable_Check(PyList_GET_ITEM(values, i)), "a wrapper and a tensor are needed");
    wrapper->replace_(THPVariable_Unpack(PyList_GET_ITEM(values, i)));
    wrapper->commit_update();
    wrapper->sync_();
    torch::autograd::impl::bump_version(THPVariable_Unpack(item));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
