// Operators that are interpreted at once (``run/direct.py``): the CPU's operator is called on the CPU tensors that the
// arguments' handles hold, and the results become handles with values. Part of follow.cpp.
//
// Only the plain case of ``direct.run`` is done here. Every other call goes to the Python kernel.
#pragma once
#include "calls.h"
#include "threads.h"

#include <algorithm>
#include <unordered_map>

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

namespace {

// -- Python's side ----------------------------------------------------------------------------------------------
PyTypeObject* host_data; // interface.TensorData
PyTypeObject* spec_type; // specs.TensorSpec
Slot direct_of, observing_of; // of a trace
Slot data_device, data_spec, data_tensor; // of a TensorData
Slot spec_shape, spec_dtype, spec_strides; // of a TensorSpec
PyObject *n_by_index, *n_device, *n_manners; // names
PyTypeObject* manner_type; // interpret.How
PyObject* make_template; // a function: dtype → a handle of that dtype
PyObject* observed; // ``append`` of infer.observed, the results that shape inference may learn from
PyObject* zero; // the index of the default device
PyObject* views; // interface.VIEWS

// A thread's trace of index 0 if its operators are interpreted at once, else null.
THPObjectPtr direct_trace(PyObject* of_thread) {
  THPObjectPtr traces = of_thread ? entry(of_thread, n_by_index) : THPObjectPtr();
  if (!traces || !PyDict_CheckExact(traces.get())) {
    return THPObjectPtr();
  }
  THPObjectPtr trace = entry(traces.get(), zero);
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

// Whether CPU operators may run in the thread's state: no dispatch mode, inference mode, CPU autocast or functorch.
// Twin of ``core.default_state.is_default``.
bool is_default() {
  using c10::DispatchKey;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() && !c10::InferenceMode::is_enabled() &&
      !at::autocast::is_autocast_enabled(at::kCPU) && !included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !included.has(DispatchKey::FuncTorchDynamicLayerBackMode) && !included.has(DispatchKey::Python);
}

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

constexpr int64_t kFewElements = 1 << 16; // of the arguments of an operator that is computed without giving up the GIL

constexpr size_t kMostSpecs = 4096; // at most kept: a loop whose sizes grow makes new ones in each iteration

// A spec, and a handle that others are made from by ``variable_data``. Handles of different specs have different memory
// as far as PyTorch can see, which refuses writes where a tensor and an argument overlap in part.
struct Known {
  THPObjectPtr spec;
  at::Tensor handle;
};

// What is known of a tensor's spec; null with a Python error. Equal specs are mostly one object, since each spec is
// three objects for the garbage collector to visit. The next call may invalidate the result.
// Twin of ``core.specs.TensorSpec.of``.
const Known* spec_of(const at::Tensor& tensor) {
  static auto& known = *new std::unordered_map<SpecKey, Known, SpecHash>();
  SpecKey key{tensor.scalar_type(), {}};
  key.sizes_and_strides.append(tensor.sizes().begin(), tensor.sizes().end());
  key.sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
  if (const auto found = known.find(key); found != known.end()) {
    return &found->second;
  }
  THPObjectPtr made(spec_type->tp_alloc(spec_type, 0));
  if (!made) {
    return nullptr;
  }
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
  Py_INCREF(dtype);
  spec_dtype.of(made.get()) = dtype;
  spec_shape.of(made.get()) = whole_numbers(tensor.sizes(), false);
  spec_strides.of(made.get()) = whole_numbers(tensor.strides(), false);
  if (!spec_shape.of(made.get()) || !spec_strides.of(made.get())) {
    return nullptr;
  }
  THPObjectPtr handle(PyObject_CallOneArg(make_template, dtype));
  if (!handle) {
    return nullptr;
  }
  at::Tensor model = THPVariable_Unpack(handle.get()).variable_data();
  model.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (known.size() >= kMostSpecs) {
    known.clear();
  }
  return &known.emplace(std::move(key), Known{std::move(made), std::move(model)}).first->second;
}

// An argument that is no tensor, as the object that the Python kernel would get; null for types not handled here.
// ``kind``: d(type), m(emory format); with any other letter the value's own type decides.
PyObject* plain(const c10::IValue& value, char kind) {
  if (value.isNone()) {
    Py_RETURN_NONE;
  }
  if (kind == 'd' || kind == 'm') {
    if (!value.isInt()) {
      return nullptr;
    }
    const auto code = static_cast<int8_t>(value.toInt());
    return Py_NewRef(
        kind == 'd' ? reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<c10::ScalarType>(code)))
                    : torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(code)));
  }
  if (value.isBool()) {
    return PyBool_FromLong(value.toBool());
  }
  if (value.isInt()) {
    return PyLong_FromLongLong(value.toInt());
  }
  if (value.isDouble()) {
    return PyFloat_FromDouble(value.toDouble());
  }
  if (value.isIntList()) {
    return whole_numbers(value.toIntVector(), true);
  }
  if (value.isBoolList()) {
    THPObjectPtr made(PyList_New(0));
    for (const bool item : value.toBoolList()) {
      if (!made || PyList_Append(made.get(), item ? Py_True : Py_False) != 0) {
        return nullptr;
      }
    }
    return made.release();
  }
  return nullptr;
}

// Whether a device is this one of index 0, or none is named.
bool is_here(const c10::IValue& device) {
  return device.isNone() || (device.toDevice().is_privateuseone() && device.toDevice().index() <= 0);
}

// -- one operator --------------------------------------------------------------------------------------------------
struct Direct {
  c10::OperatorHandle callee; // the operator that is called on CPU tensors
  bool shares; // results may share memory with arguments
  bool is_factory;
  // A float is a scalar input in a graph: calls with one go to Python, which calls the lowering, unless every tensor is
  // of float32 or float64 and it makes no difference there.
  bool varying, but_wide;
  PyObject* rule; // the function that shape inference runs for calls of this operator
  PyObject* serial; // the kernel's, the key of ``runtime.manners``
  std::vector<std::string> keywords; // per argument: its name if it is keyword-only, else empty
  std::string kinds; // per argument: the letter for ``plain``; empty where calls are not noted for shape inference
  std::vector<std::vector<int64_t>> anchors; // shapes of the arguments of calls that a region may begin with

  // Whether a region may begin with a call. Twin of ``run.regions.shapes_of``.
  bool is_anchor(c10::ArrayRef<c10::IValue> given) const {
    if (anchors.empty()) {
      return false;
    }
    std::vector<int64_t> shapes;
    const auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) { // a Python number there
        shapes.push_back(tensor.dim());
        shapes.insert(shapes.end(), tensor.sizes().begin(), tensor.sizes().end());
      }
    };
    for (const c10::IValue& value : given) {
      if (value.isTensor()) {
        add(value.toTensor());
      } else if (value.isTensorList()) {
        for (const c10::IValue& item : value.toListRef()) {
          add(item.toTensor());
        }
      }
    }
    return std::find(anchors.begin(), anchors.end(), shapes) != anchors.end();
  }
};

struct DirectCall {
  const Direct& direct;
  PyObject* trace;
  PyObject* runtime;
  std::vector<c10::IValue> stack;
  c10::SmallVector<THPObjectPtr, 4> used; // the values of the arguments' handles
  THPObjectPtr args, kwargs; // what is noted for shape inference: specs in the places of tensors
  bool noted; // whether to note the call for shape inference; false once an argument has no such form
  int64_t elements = 0; // of the arguments
  bool has_number = false; // a number that a graph may have as a scalar input

  // The CPU tensor of an argument; undefined where the call has to go to Python.
  at::Tensor real(const at::Tensor& tensor, PyObject*& spec) {
    if (!tensor.is_privateuseone()) {
      if (tensor.dim() != 0 || !tensor.is_cpu()) {
        return {};
      }
      if (!noted) {
        return tensor;
      }
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.scalar_type() == at::kDouble) {
        spec = PyFloat_FromDouble(*tensor.const_data_ptr<double>());
      } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.scalar_type() == at::kLong) {
        spec = PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>());
      } else {
        noted = false;
      }
      return tensor;
    }
    THPObjectPtr handle = handle_of(tensor);
    if (!handle) {
      return {};
    }
    THPObjectPtr value(attribute(handle.get(), py_.n_value));
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
    elements += tensor.numel();
    spec = data_spec.of(value.get());
    Py_XINCREF(spec);
    used.push_back(std::move(value));
    return THPVariable_Unpack(held);
  }

  bool add(const c10::IValue& given, size_t at, char letter) {
    const std::string& keyword = direct.keywords[at];
    THPObjectPtr described;
    switch (letter) {
      case 'g':
        if (!given.isNone()) {
          return false;
        }
        stack.push_back(given);
        break;
      case 'd':
        if (!is_here(given) || (noted && (direct.is_factory || !given.isNone()))) {
          return false;
        }
        stack.push_back(direct.is_factory || !given.isNone() ? c10::IValue(c10::Device(c10::kCPU)) : given);
        break;
      case 't': {
        if (given.isNone()) {
          stack.push_back(given);
          break;
        }
        PyObject* spec = nullptr;
        const at::Tensor& tensor = given.toTensor();
        at::Tensor found = tensor.defined() ? real(tensor, spec) : at::Tensor();
        described = spec;
        if (!found.defined()) {
          return false;
        }
        stack.push_back(std::move(found));
        break;
      }
      case 'T': {
        if (!given.isTensorList()) {
          return false;
        }
        const Values items = given.toListRef();
        c10::List<at::Tensor> list;
        list.reserve(items.size());
        if (noted) {
          described = PyList_New(0);
          if (!described) {
            return false;
          }
        }
        for (const c10::IValue& item : items) {
          PyObject* spec = nullptr;
          at::Tensor found = item.toTensor().defined() ? real(item.toTensor(), spec) : at::Tensor();
          THPObjectPtr of_item(spec);
          if (!found.defined()) {
            return false;
          }
          if (described && spec != nullptr && PyList_Append(described.get(), spec) != 0) {
            return false;
          }
          list.push_back(std::move(found));
        }
        stack.emplace_back(std::move(list));
        break;
      }
      case 's':
      case 'S':
        has_number = has_number || (!given.isInt() && !given.isBool() && !given.isNone());
        [[fallthrough]];
      default:
        stack.push_back(keyword == "pin_memory" ? c10::IValue() : given);
    }
    if (!noted) {
      return true;
    }
    if (!described) {
      described = plain(given, direct.kinds[at]);
      if (!described) {
        PyErr_Clear();
        noted = false;
        return true;
      }
    }
    if (keyword.empty()) {
      return PyList_Append(args.get(), described.get()) == 0;
    }
    return described.get() == Py_None || PyDict_SetItemString(kwargs.get(), keyword.c_str(), described.get()) == 0;
  }

  // Whether the operator that is called gives what a graph gives, whose numbers are inputs.
  bool is_exact() const {
    return !(direct.varying && has_number) || (direct.but_wide && is_wide());
  }

  // Whether every tensor is of float32 or float64, of the shape of the first, or of the first list's tensor at its place,
  // and has memory for each element: else the CPU computes with some as with numbers, and rounds otherwise.
  bool is_wide() const {
    c10::SmallVector<at::Tensor, 4> first;
    bool first_is_list = false;
    for (const c10::IValue& given : stack) {
      const bool is_list = given.isTensorList();
      if (!is_list && !given.isTensor()) {
        continue;
      }
      c10::SmallVector<at::Tensor, 4> tensors;
      if (is_list) {
        const std::vector<at::Tensor> items = given.toTensorVector();
        tensors.assign(items.begin(), items.end());
      } else {
        tensors.push_back(given.toTensor());
      }
      const bool begins = first.empty();
      if (begins) {
        first = tensors;
        first_is_list = is_list;
      }
      if (is_list != first_is_list || tensors.size() != first.size()) {
        return false;
      }
      for (size_t at = 0; at < tensors.size(); ++at) {
        if (tensors[at].sizes() != first[at].sizes() || !is_dense(tensors[at]) || (!is_list && tensors[at].dim() == 0)) {
          return false;
        }
      }
    }
    return true;
  }

  static bool is_dense(const at::Tensor& tensor) {
    if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble) {
      return false;
    }
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.stride(dim) == 0 && tensor.size(dim) != 1) {
        return false;
      }
    }
    return true;
  }

  // Call the CPU's operator: results replace the arguments. False if it raises. ``in_place``: another form of it, which
  // writes to the first argument.
  bool compute(const c10::OperatorHandle* in_place) {
    // To give up the GIL and take it again is eight operations on mutexes, more than a small operator takes.
    PyThreadState* const state = elements > kFewElements ? PyEval_SaveThread() : nullptr;
    bool done = true;
    const c10::IValue written = in_place != nullptr ? stack[0] : c10::IValue();
    try {
      const FewerThreads while_compiling;
      (in_place != nullptr ? *in_place : direct.callee).callBoxed(&stack);
    } catch (const std::exception&) {
      done = false;
    }
    if (state != nullptr) {
      PyEval_RestoreThread(state);
    }
    if (done && in_place != nullptr) {
      stack = {written}; // operators on lists return nothing
    }
    return done;
  }

  // A handle that has a result as its value, and the spec in ``spec``; undefined with a Python error.
  at::Tensor handle(at::Tensor value, PyObject* device, PyObject* exported, THPObjectPtr& spec) const {
    if (value.is_conj()) {
      value = value.resolve_conj();
    }
    if (value.is_neg()) {
      value = value.resolve_neg();
    }
    const Known* const known = spec_of(value);
    if (known == nullptr) {
      return {};
    }
    at::Tensor result = known->handle.variable_data();
    spec = Py_NewRef(known->spec.get());
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
};

// Run the call on a stack: results replace the arguments. False, with nothing changed, where Python has to run it.
// ``in_place``: the form of the operator that writes to its first argument, if that may be written to.
// Twin of ``run.direct.run``.
bool run_direct(
    PyObject* trace, const Direct& direct, const std::string& letters, torch::jit::Stack& stack,
    bool one_list, const c10::OperatorHandle* in_place = nullptr) {
  if (!trace || !is_default()) {
    return false;
  }
  PyObject* runtime = py_.runtime.of(trace);
  Py_INCREF(runtime); // the GIL is released below, and the trace may get another runtime meanwhile
  const THPObjectPtr held(runtime);
  Bound* const of_runtime = bound(runtime);
  if (of_runtime == nullptr) {
    PyErr_Clear();
    return false;
  }
  THPObjectPtr device(Py_NewRef(of_runtime->device.get()));
  PyObject* manner = PyDict_GetItemWithError(of_runtime->manners.get(), direct.serial);
  if (manner == nullptr || Py_TYPE(manner) != manner_type) { // not decided yet, or the backend or the host runs it
    PyErr_Clear();
    return false;
  }
  PyObject* observing = observing_of.of(trace);
  if (observing != Py_True && observing != Py_False) { // a log, which Python writes
    return false;
  }
  const bool noted = observing == Py_True;
  if (noted && direct.kinds.empty()) { // Python notes kinds of arguments that are not known here
    return false;
  }
  DirectCall call{direct, trace, runtime, {}, {}, THPObjectPtr(), THPObjectPtr(), noted};
  if (noted) {
    call.args = PyList_New(0);
    call.kwargs = PyDict_New();
    if (!call.args || !call.kwargs) {
      PyErr_Clear();
      return false;
    }
  }
  const size_t count = letters.size();
  const size_t first = stack.size() - count;
  if (direct.is_anchor(c10::ArrayRef<c10::IValue>(stack.data() + first, count))) {
    return false;
  }
  call.stack.reserve(count);
  for (size_t at = 0; at < count; ++at) {
    if (!call.add(stack[first + at], at, letters[at])) {
      PyErr_Clear();
      return false;
    }
  }
  if (!call.is_exact() || !call.compute(in_place)) {
    return false; // nothing has changed: Python repeats the call, and its error names the user's line
  }
  PyObject* count_of_ops = PyLong_FromLongLong(integer(direct_of.of(trace)) + 1);
  Py_XSETREF(direct_of.of(trace), count_of_ops);
  c10::SmallVector<at::Tensor, 3> values;
  for (const c10::IValue& value : call.stack) {
    if (value.isTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        values.push_back(item.toTensor());
      }
    } else {
      values.push_back(value.toTensor());
    }
  }
  PyObject* exported = direct.shares ? views : Py_False; // of the results
  if (direct.shares) {
    for (THPObjectPtr& data : call.used) {
      if (py_.exported.of(data.get()) == Py_False) {
        Py_XSETREF(py_.exported.of(data.get()), Py_NewRef(views));
      } else if (py_.exported.of(data.get()) != views) {
        exported = Py_True;
      }
    }
  }
  const bool several = one_list || values.size() != 1;
  THPObjectPtr specs;
  if (call.noted) {
    specs = one_list ? PyList_New(values.size()) : PyTuple_New(values.size());
    if (!specs) {
      throw python_error();
    }
  }
  c10::SmallVector<at::Tensor, 3> results;
  for (size_t at = 0; at < values.size(); ++at) {
    THPObjectPtr spec;
    results.push_back(values[at].defined() ? call.handle(std::move(values[at]), device.get(), exported, spec) : at::Tensor());
    if (PyErr_Occurred()) {
      throw python_error();
    }
    if (!specs) {
      continue;
    }
    PyObject* described = spec ? spec.release() : Py_NewRef(Py_None);
    one_list ? PyList_SET_ITEM(specs.get(), at, described) : PyTuple_SET_ITEM(specs.get(), at, described);
  }
  if (call.noted) {
    PyObject* result = several ? specs.get() : PyTuple_GET_ITEM(specs.get(), 0);
    PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::get_default_dtype_as_scalartype()));
    THPObjectPtr note(PyTuple_Pack(5, direct.rule, call.args.get(), call.kwargs.get(), result, dtype));
    THPObjectPtr done(note ? PyObject_CallOneArg(observed, note.get()) : nullptr);
    PyErr_Clear();
  }
  torch::jit::drop(stack, count);
  if (one_list) {
    stack.emplace_back(c10::List<at::Tensor>(at::TensorList(results)));
  } else {
    for (at::Tensor& result : results) {
      stack.emplace_back(std::move(result));
    }
  }
  return true;
}

} // namespace
