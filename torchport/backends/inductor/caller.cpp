// Calls a compiled library with a Python list of tensors: checks them, hands them over, releases Python's global lock
// while the code runs, and wraps the results. Per tensor this costs a tenth of what ctypes and capsules cost.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <vector>

using Run = int32_t (*)(void*, void**, size_t, void**, size_t, void*, void*);

namespace {

// expected: dtype, number of dimensions, sizes, strides. Advances past this tensor's part.
bool fits(const at::Tensor& tensor, const int64_t*& expected) {
  const int64_t dtype = *expected++;
  const int64_t dims = *expected++;
  const int64_t* sizes = expected;
  const int64_t* strides = expected + dims;
  expected += 2 * dims;
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_conj() ||
      tensor.is_neg() || tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
      static_cast<int64_t>(tensor.scalar_type()) != dtype || tensor.dim() != dims) {
    return false;
  }
  for (int64_t d = 0; d < dims; ++d) {
    if (tensor.size(d) != sizes[d] || (sizes[d] != 1 && tensor.stride(d) != strides[d])) {
      return false;
    }
  }
  return true;
}

} // namespace

// A list of results; an int, the position of an input that is not as expected; or None, when the run failed.
// let_go: the list is emptied before the run, so that the code frees what nobody else holds after its last use.
extern "C" PyObject* torchport_call(
    void* run, void* container, PyObject* inputs, const int64_t* expected, int64_t outputs, int let_go) {
  const Py_ssize_t count = PyList_GET_SIZE(inputs);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(inputs, i);
    if (!THPVariable_Check(item) || !fits(THPVariable_Unpack(item), expected)) {
      return PyLong_FromSsize_t(i);
    }
  }
  std::vector<void*> given(count);
  std::vector<void*> results(outputs, nullptr);
  for (Py_ssize_t i = 0; i < count; ++i) {
    given[i] = new at::Tensor(THPVariable_Unpack(PyList_GET_ITEM(inputs, i)));
  }
  if (let_go && PyList_SetSlice(inputs, 0, count, nullptr) != 0) {
    PyErr_Clear();
  }
  int32_t failed = 0;
  Py_BEGIN_ALLOW_THREADS
  failed = reinterpret_cast<Run>(run)(container, given.data(), count, results.data(), outputs, nullptr, nullptr);
  Py_END_ALLOW_THREADS
  if (failed) {
    Py_RETURN_NONE;
  }
  // The code gives one handle for outputs that are the same buffer.
  PyObject* list = PyList_New(outputs);
  for (int64_t i = 0; list != nullptr && i < outputs; ++i) {
    PyList_SET_ITEM(list, i, THPVariable_Wrap(*static_cast<at::Tensor*>(results[i])));
  }
  std::sort(results.begin(), results.end());
  results.erase(std::unique(results.begin(), results.end()), results.end());
  for (void* result : results) {
    delete static_cast<at::Tensor*>(result);
  }
  return list;
}
