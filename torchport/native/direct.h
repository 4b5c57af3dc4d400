// Operators that are interpreted at once (``run/direct.py``): the CPU's operator is called on the CPU tensors that the
// arguments' handles hold, and the results become handles with values. Part of follow.cpp.
//
// Only the plain case of ``direct.run`` is done here. Every other call goes to the Python kernel.
#pragma once
#include "threads.h"
#include "unseen.h"
#include "wide.h"

#include <algorithm>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

namespace {

// -- Python's side ----------------------------------------------------------------------------------------------
Slot observing_of; // of a trace
PyTypeObject* manner_type; // interpret.How
PyObject* observed; // ``append`` of infer.observed, the results that shape inference may learn from
PyObject* decide; // run.direct.decide, by serial

constexpr int64_t kFewElements = 1 << 16; // of the arguments of an operator that is computed without giving up the GIL

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

// Have Python decide how a trace's runtime interprets an operator, which it does once, and tell C++.
// Raises what Python raises, such as an exception of a signal's handler.
void prepare(PyObject* trace, long long serial) {
  THPObjectPtr number(PyLong_FromLongLong(serial));
  THPObjectPtr done(number ? PyObject_CallFunctionObjArgs(decide, trace, number.get(), nullptr) : nullptr);
  if (!done) {
    throw python_error();
  }
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
  bool is_blank; // results have no contents of their own: they are zeros
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

// Whether a trace's operators are interpreted in C++, and for whom. It is the thread's default state as long as this
// lives.
class AtOnce {
 public:
  PyObject* runtime = nullptr;
  Owner owner; // what the runtime is asked for; the trace may get another runtime where the GIL is released

  AtOnce(PyObject* trace, const Direct& direct) : trace_(trace) {
    if (trace == nullptr || !is_default()) {
      return;
    }
    owner = bound(py_.runtime.of(trace));
    PyObject* manner = owner == nullptr ? nullptr : PyDict_GetItemWithError(owner->manners.get(), direct.serial);
    if (manner == nullptr && owner != nullptr && !PyErr_Occurred()) { // another runtime than that which was asked for
      prepare(trace, integer(direct.serial));
      manner = PyDict_GetItemWithError(owner->manners.get(), direct.serial);
    }
    if (manner == nullptr || Py_TYPE(manner) != manner_type) { // not decided yet, or the backend or the host runs it
      PyErr_Clear();
      return;
    }
    observing_ = observing_of.of(trace);
    if (observing_ != Py_True && observing_ != Py_False) { // a log, which Python writes
      return;
    }
    runtime = owner->runtime.get();
  }

  explicit operator bool() const {
    return runtime != nullptr;
  }

  // Whether calls are noted for shape inference.
  bool notes() const {
    return observing_ == Py_True;
  }

  void count() const {
    PyObject* count_of_ops = PyLong_FromLongLong(integer(direct_of.of(trace_)) + 1);
    Py_XSETREF(direct_of.of(trace_), count_of_ops);
  }

 private:
  PyObject* trace_;
  PyObject* observing_ = nullptr;
  const DefaultState state_;
};

// The stack of the operator that is called, whose memory serves for the next one.
class Spare {
 public:
  static std::vector<c10::IValue> take() {
    return std::move(kept());
  }
  static void give(std::vector<c10::IValue>&& stack) {
    stack.clear();
    kept() = std::move(stack);
  }

 private:
  static std::vector<c10::IValue>& kept() {
    static auto& one = *new std::vector<c10::IValue>(); // guarded by the GIL
    return one;
  }
};

struct DirectCall {
  const Direct& direct;
  PyObject* runtime;
  bool wrapped; // arguments may be handles' wrappers, which are up to date
  std::vector<c10::IValue> stack;
  Sharing sharing = Sharing::nobody; // who may see the memory of the results
  THPObjectPtr args, kwargs; // what is noted for shape inference: specs in the places of tensors
  bool noted; // whether to note the call for shape inference; false once an argument has no such form
  int64_t elements = 0; // of the arguments
  bool has_number = false; // a number that a graph may have as a scalar input

  // The CPU tensor of an argument; undefined where the call has to go to Python.
  at::Tensor real(const at::Tensor& given, PyObject*& spec) {
    at::FunctionalTensorWrapper* const wrapper = wrapped ? wrapper_of(given) : nullptr;
    const at::Tensor& tensor = wrapper == nullptr ? given : wrapper->value();
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
    Held held = held_by(tensor, runtime);
    if (!held.tensor.defined()) {
      return {};
    }
    elements += tensor.numel();
    if (direct.shares) {
      sharing = std::max(held.share(), sharing);
    }
    if (noted) {
      spec = held.spec();
    }
    return std::move(held.tensor);
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
        if (!given.toTensor().defined()) { // as autograd says None
          stack.emplace_back();
          described = Py_NewRef(Py_None);
          break;
        }
        PyObject* spec = nullptr;
        at::Tensor found = real(given.toTensor(), spec);
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
    return !(direct.varying && has_number) || (direct.but_wide && is_wide(stack));
  }

  // Whether the results are of a kind that the device holds: Python says that others are not.
  bool is_strided() const {
    const auto fine = [](const at::Tensor& made) { return !made.defined() || made.layout() == at::kStrided; };
    return std::all_of(stack.begin(), stack.end(), [&](const c10::IValue& value) {
      if (!value.isTensorList()) {
        return fine(value.toTensor());
      }
      const Values items = value.toListRef();
      return std::all_of(items.begin(), items.end(), [&](const auto& item) { return fine(item.toTensor()); });
    });
  }

  // Whether a result shows an element more than once.
  bool repeats() const {
    return std::any_of(stack.begin(), stack.end(), [](const c10::IValue& value) {
      const at::Tensor& made = value.toTensor();
      for (int64_t dim = 0; dim < made.dim(); ++dim) {
        if (made.stride(dim) == 0 && made.size(dim) > 1) {
          return true;
        }
      }
      return false;
    });
  }

  // Call the CPU's operator: results replace the arguments. False if it raises. ``in_place``: another form of it, which
  // writes to the first argument.
  bool compute(const c10::OperatorHandle* in_place) {
    // To give up the GIL and take it again is eight operations on mutexes, more than a small operator takes.
    PyThreadState* const state = elements > kFewElements ? PyEval_SaveThread() : nullptr;
    bool done = true, interrupted = false;
    const c10::IValue written = in_place != nullptr ? stack[0] : c10::IValue();
    try {
      const FewerThreads while_compiling;
      (in_place != nullptr ? *in_place : direct.callee).callBoxed(&stack);
    } catch (const python_error&) { // of a kernel of the program's
      done = false;
      interrupted = true;
    } catch (const std::exception&) {
      done = false;
    }
    if (state != nullptr) {
      PyEval_RestoreThread(state);
    }
    if (interrupted && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
      throw python_error(); // not to be run again
    }
    if (!done) {
      PyErr_Clear();
    }
    if (done && in_place != nullptr) {
      stack = {written}; // operators on lists return nothing
    }
    return done;
  }
};

// The same memory as a tensor that Python does not hold: by Python's own object of one that was written in place, nobody
// could tell later that its memory has no other holder (``owned.h``).
at::Tensor without_object(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// Run the call on a stack: results replace the arguments. False, with nothing changed, where Python has to run it.
// ``in_place``: the form of the operator that writes to its first argument, if that may be written to. ``wrapped``:
// arguments may be wrappers, up to date, and results are handles all the same.
// Twin of ``run.direct.run``.
bool run_direct(
    PyObject* trace, const Direct& direct, const std::string& letters, torch::jit::Stack& stack,
    bool one_list, const c10::OperatorHandle* in_place = nullptr, bool wrapped = false) {
  const AtOnce ready(trace, direct);
  if (!ready) {
    return false;
  }
  const bool noted = ready.notes();
  if (noted && direct.kinds.empty()) { // Python notes kinds of arguments that are not known here
    return false;
  }
  PyObject* const runtime = ready.runtime;
  DirectCall call{direct, runtime, wrapped, Spare::take(), Sharing::nobody, THPObjectPtr(), THPObjectPtr(), noted};
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
  if (!call.is_exact() || !call.compute(in_place) || !call.is_strided() || (direct.is_blank && call.repeats())) {
    return false; // nothing has changed: Python repeats the call, and its error names the user's line
  }
  ready.count();
  c10::SmallVector<at::Tensor, 3> values;
  for (const c10::IValue& value : call.stack) {
    if (value.isTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        values.push_back(settled(item.toTensor()));
      }
    } else {
      values.push_back(settled(value.toTensor()));
    }
  }
  Spare::give(std::move(call.stack));
  if (in_place != nullptr) {
    const c10::IValue& written = stack[first];
    for (size_t at = 0; at < values.size(); ++at) {
      if (unseen(one_list ? written.toListRef()[at].toTensor() : written.toTensor()) == nullptr) {
        values[at] = without_object(values[at]);
      }
    }
  }
  if (direct.is_blank) {
    for (const at::Tensor& value : values) {
      value.zero_();
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
    if (specs) {
      PyObject* described = values[at].defined() ? spec_of(values[at]) : Py_NewRef(Py_None);
      if (described == nullptr) {
        throw python_error();
      }
      one_list ? PyList_SET_ITEM(specs.get(), at, described) : PyTuple_SET_ITEM(specs.get(), at, described);
    }
    results.push_back(
        values[at].defined() ? unseen_handle(std::move(values[at]), ready.owner, call.sharing) : at::Tensor());
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
