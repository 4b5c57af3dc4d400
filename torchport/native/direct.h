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
  // Per argument: its letter (``Kernel``), but ``-`` for one that the CPU does not get, and ``=`` for one that it gets as it
  // is, from which nothing follows.
  std::string ways;
  const Elementwise* waiting; // how it is computed if it is put off; null where it may not be
  std::vector<std::vector<int64_t>> anchors = {}; // shapes of the arguments of calls that a region may begin with
  mutable uint64_t decided = 0; // ``Bound::decisions`` of the runtime whose manner was looked up last: it interprets

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
    if (owner == nullptr || (owner->decisions != direct.decided && !is_decided(direct))) {
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
  // Whether the runtime interprets the operator; else it is not decided yet, or the backend or the host runs it.
  [[gnu::noinline]] bool is_decided(const Direct& direct) const {
    const uint64_t decisions = owner->decisions;
    PyObject* manner = PyDict_GetItemWithError(owner->manners.get(), direct.serial);
    if (manner == nullptr && !PyErr_Occurred()) { // another runtime than that which was asked for
      prepare(trace_, integer(direct.serial));
      manner = PyDict_GetItemWithError(owner->manners.get(), direct.serial);
    }
    if (manner == nullptr || Py_TYPE(manner) != manner_type) {
      PyErr_Clear();
      return false;
    }
    direct.decided = decisions; // the number from before Python was asked: it may have forgotten meanwhile
    return true;
  }

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

// A call on its way to the CPU. ``Noted``: what it gives is noted for shape inference, too.
template <bool Noted>
struct DirectCall {
  const Direct& direct;
  PyObject* runtime;
  bool wrapped; // arguments may be handles' wrappers, which are up to date
  std::vector<c10::IValue> stack;
  Sharing sharing = Sharing::nobody; // who may see the memory of the results
  int64_t elements = 0; // of the arguments
  bool has_number = false; // a number that a graph may have as a scalar input
  bool is_seen = false; // Python has seen an argument's handle, or others its memory
  bool has_keys = false; // a CPU tensor of the program's has dispatch keys that ask for more than a kernel
  // Where calls are noted: specs in the places of tensors, and whether to note the call still, which is over once an
  // argument has no such form.
  THPObjectPtr args = {}, kwargs = {};
  bool noted = Noted;

  // The CPU tensor of an argument; undefined where the call has to go to Python.
  at::Tensor real(const at::Tensor& given, PyObject*& spec) {
    at::FunctionalTensorWrapper* const wrapper = wrapped ? wrapper_of(given) : nullptr;
    const at::Tensor& tensor = wrapper == nullptr ? given : wrapper->value();
    if (!tensor.is_privateuseone()) {
      if (tensor.dim() != 0 || !tensor.is_cpu()) {
        return {};
      }
      has_keys = has_keys || (tensor.key_set().raw_repr() & ~kOfCpuTensors.raw_repr()) != 0;
      if constexpr (Noted) {
        describe_number(tensor, spec);
      }
      return tensor;
    }
    Held held = held_by(tensor, runtime, direct.waiting != nullptr);
    if (!held.tensor.defined()) {
      return {};
    }
    elements += tensor.numel();
    is_seen = is_seen || held.own == nullptr || held.own->sharing == Sharing::others;
    if (direct.shares) {
      sharing = std::max(held.share(), sharing);
    }
    if constexpr (Noted) {
      spec = noted ? held.spec() : nullptr;
    }
    return std::move(held.tensor);
  }

  // False where the call has to go to Python.
  bool add(const c10::IValue& given, size_t at) {
    PyObject* spec = nullptr;
    switch (direct.ways[at]) {
      case '=':
        stack.push_back(given);
        break;
      case 't': {
        if (given.isNone() || !given.toTensor().defined()) { // the second is how autograd says None
          stack.emplace_back();
          break;
        }
        at::Tensor found = real(given.toTensor(), spec);
        if (!found.defined()) {
          return false;
        }
        stack.emplace_back(std::move(found));
        break;
      }
      case 's':
        has_number = has_number || (!given.isInt() && !given.isBool() && !given.isNone());
        stack.push_back(given);
        break;
      case 'T':
        if (!given.isTensorList() || !add_list(given.toListRef(), spec)) {
          return false;
        }
        break;
      case 'g':
        if (!given.isNone()) {
          return false;
        }
        [[fallthrough]];
      case '-':
        stack.emplace_back();
        break;
      default: // a device
        if (!is_here(given) || (noted && (direct.is_factory || !given.isNone()))) {
          return false;
        }
        stack.push_back(direct.is_factory || !given.isNone() ? c10::IValue(c10::Device(c10::kCPU)) : given);
    }
    if constexpr (Noted) {
      return describe(given, at, spec);
    }
    return true;
  }

  // Whether the operator that is called gives what a graph gives, whose numbers are inputs.
  bool is_exact() const {
    return !(direct.varying && has_number) || (direct.but_wide && is_wide(stack));
  }

  // Put the call off. False where it has to be computed at once, after what is put off already.
  bool wait(bool in_place) {
    return !Noted && !is_seen && PutOff::take(*direct.waiting, in_place, stack);
  }

  // Call the CPU's operator: results replace the arguments. False if it raises. ``in_place``: another form of it, which
  // writes to the first argument.
  bool compute(const c10::OperatorHandle* in_place) {
    bool done = true, interrupted = false;
    const c10::IValue written = in_place != nullptr ? stack[0] : c10::IValue();
    try {
      const Unlocked others_go_on(elements);
      const FewerThreads while_compiling;
      if (in_place != nullptr) {
        in_place->callBoxed(&stack);
      } else if (has_keys) {
        direct.callee.callBoxed(&stack);
      } else { // values have no other keys, and nothing else is on
        direct.callee.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      }
    } catch (const python_error&) { // of a kernel of the program's
      done = false;
      interrupted = true;
    } catch (const std::exception&) {
      done = false;
    }
    if (!done) [[unlikely]] {
      if (interrupted && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        throw python_error(); // not to be run again
      }
      PyErr_Clear();
    } else if (in_place != nullptr) {
      stack = {written}; // operators on lists return nothing
    }
    return done;
  }

 private:
  static constexpr c10::DispatchKeySet kOfCpuTensors =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView}) |
      c10::autocast_dispatch_keyset;

  bool add_list(Values items, PyObject*& spec) {
    c10::List<at::Tensor> list;
    list.reserve(items.size());
    THPObjectPtr described(Noted ? PyList_New(0) : nullptr);
    for (const c10::IValue& item : items) {
      PyObject* of_item = nullptr;
      at::Tensor found = item.toTensor().defined() ? real(item.toTensor(), of_item) : at::Tensor();
      THPObjectPtr held(of_item);
      if (!found.defined() || (Noted && !described) ||
          (held && PyList_Append(described.get(), held.get()) != 0)) {
        return false;
      }
      list.push_back(std::move(found));
    }
    stack.emplace_back(std::move(list));
    spec = described.release();
    return true;
  }

  void describe_number(const at::Tensor& tensor, PyObject*& spec) {
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (is_number && tensor.scalar_type() == at::kDouble) {
      spec = PyFloat_FromDouble(*tensor.const_data_ptr<double>());
    } else if (is_number && tensor.scalar_type() == at::kLong) {
      spec = PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>());
    } else {
      noted = false;
    }
  }

  // Add an argument to what is noted. ``spec``: what stands for tensors. False with a Python error.
  bool describe(const c10::IValue& given, size_t at, PyObject* spec) {
    THPObjectPtr described(spec);
    if (!noted) {
      return true;
    }
    if (!described) {
      const bool is_none = given.isTensor() && !given.toTensor().defined();
      described = is_none ? Py_NewRef(Py_None) : plain(given, direct.kinds[at]);
    }
    if (!described) {
      PyErr_Clear();
      noted = false;
      return true;
    }
    const std::string& keyword = direct.keywords[at];
    if (keyword.empty()) {
      return PyList_Append(args.get(), described.get()) == 0;
    }
    return described.get() == Py_None || PyDict_SetItemString(kwargs.get(), keyword.c_str(), described.get()) == 0;
  }
};

// Whether a result is of a kind that the device holds: Python says that others are not.
bool is_strided(const at::Tensor& made) {
  return !made.defined() || made.layout() == at::kStrided;
}

// Whether a tensor shows an element more than once.
bool repeats(const at::Tensor& made) {
  for (int64_t dim = 0; dim < made.dim(); ++dim) {
    if (made.stride(dim) == 0 && made.size(dim) > 1) {
      return true;
    }
  }
  return false;
}

using Tensors = c10::SmallVector<at::Tensor, 3>;

// The tensors on a stack, those of lists one by one.
Tensors tensors_of(Values stack) {
  Tensors made;
  for (const c10::IValue& value : stack) {
    if (value.isTensorList()) {
      for (const c10::IValue& item : value.toListRef()) {
        made.push_back(item.toTensor());
      }
    } else {
      made.push_back(value.toTensor());
    }
  }
  return made;
}

// Note a call and its results for shape inference. Raises what Python raises.
void note_call(const DirectCall<true>& call, const Tensors& values, bool one_list) {
  THPObjectPtr specs(one_list ? PyList_New(values.size()) : PyTuple_New(values.size()));
  if (!specs) {
    throw python_error();
  }
  for (size_t at = 0; at < values.size(); ++at) {
    PyObject* described = values[at].defined() ? spec_of(values[at]) : Py_NewRef(Py_None);
    if (described == nullptr) {
      throw python_error();
    }
    one_list ? PyList_SET_ITEM(specs.get(), at, described) : PyTuple_SET_ITEM(specs.get(), at, described);
  }
  PyObject* result = one_list || values.size() != 1 ? specs.get() : PyTuple_GET_ITEM(specs.get(), 0);
  PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::get_default_dtype_as_scalartype()));
  THPObjectPtr note(PyTuple_Pack(5, call.direct.rule, call.args.get(), call.kwargs.get(), result, dtype));
  THPObjectPtr done(note ? PyObject_CallOneArg(observed, note.get()) : nullptr);
  PyErr_Clear();
}

// The same memory as a tensor that Python does not hold: by Python's own object of one that was written in place, nobody
// could tell later that its memory has no other holder (``owned.h``).
at::Tensor without_object(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// Run a call as ``run_direct`` does.
template <bool Noted>
bool run_as(
    AtOnce& ready, const Direct& direct, torch::jit::Stack& stack, bool one_list, const c10::OperatorHandle* in_place,
    bool wrapped) {
  DirectCall<Noted> call{direct, ready.runtime, wrapped, Spare::take()};
  if constexpr (Noted) {
    call.args = PyList_New(0);
    call.kwargs = PyDict_New();
    if (!call.args || !call.kwargs) {
      PyErr_Clear();
      return false;
    }
  }
  const size_t count = direct.ways.size();
  const size_t first = stack.size() - count;
  if (direct.is_anchor(Values(stack.data() + first, count))) {
    return false;
  }
  call.stack.reserve(count);
  for (size_t at = 0; at < count; ++at) {
    if (!call.add(stack[first + at], at)) {
      if constexpr (Noted) {
        PyErr_Clear();
      }
      return false;
    }
  }
  const bool exact = call.is_exact();
  const bool others_wait = PutOff::waits;
  const bool waits = exact && direct.waiting != nullptr && call.wait(in_place != nullptr);
  if (others_wait && !waits) {
    PutOff::settle(); // gives up the GIL, and others may hold the memory since
    if (in_place != nullptr) {
      return false;
    }
  }
  if (!exact || (!waits && !call.compute(in_place))) {
    return false; // nothing has changed: Python repeats the call, and its error names the user's line
  }
  if (!Noted && !one_list && call.stack.size() == 1 && in_place == nullptr && !direct.is_blank) { // most often
    at::Tensor made = std::move(call.stack[0]).toTensor();
    Spare::give(std::move(call.stack));
    if (!is_strided(made)) {
      return false;
    }
    ready.count();
    torch::jit::drop(stack, count);
    stack.emplace_back(made.defined() ? unseen_handle(std::move(made), std::move(ready.owner), call.sharing) : made);
    return true;
  }
  Tensors values = tensors_of(call.stack);
  if (!std::all_of(values.begin(), values.end(), is_strided) ||
      (direct.is_blank && std::any_of(values.begin(), values.end(), repeats))) {
    return false;
  }
  Spare::give(std::move(call.stack));
  ready.count();
  for (size_t at = 0; at < values.size(); ++at) {
    values[at] = settled(std::move(values[at]));
    if (in_place != nullptr) {
      const at::Tensor& written = one_list ? stack[first].toListRef()[at].toTensor() : stack[first].toTensor();
      if (unseen(written) == nullptr) {
        values[at] = without_object(values[at]);
      }
    }
    if (direct.is_blank) {
      values[at].zero_();
    }
  }
  if constexpr (Noted) {
    if (call.noted) {
      note_call(call, values, one_list);
    }
  }
  for (at::Tensor& value : values) {
    value = value.defined() ? unseen_handle(std::move(value), ready.owner, call.sharing) : at::Tensor();
  }
  torch::jit::drop(stack, count);
  if (one_list) {
    stack.emplace_back(c10::List<at::Tensor>(at::TensorList(values)));
  } else {
    for (at::Tensor& value : values) {
      stack.emplace_back(std::move(value));
    }
  }
  return true;
}

// Where calls are noted, which is seldom: not among the code of the others.
[[gnu::cold, gnu::noinline]] bool run_noted(
    AtOnce& ready, const Direct& direct, torch::jit::Stack& stack, bool one_list, const c10::OperatorHandle* in_place,
    bool wrapped) {
  // Python notes kinds of arguments that are not known here.
  return !direct.kinds.empty() && run_as<true>(ready, direct, stack, one_list, in_place, wrapped);
}

// Run the call on a stack: results replace the arguments. False, with nothing changed, where Python has to run it.
// ``in_place``: the form of the operator that writes to its first argument, if that may be written to. ``wrapped``:
// arguments may be wrappers, up to date, and results are handles all the same.
// Twin of ``run.direct.run``.
bool run_direct(
    PyObject* trace, const Direct& direct, torch::jit::Stack& stack, bool one_list,
    const c10::OperatorHandle* in_place = nullptr, bool wrapped = false) {
  AtOnce ready(trace, direct);
  if (!ready) {
    return false;
  }
  return ready.notes() ? run_noted(ready, direct, stack, one_list, in_place, wrapped)
                       : run_as<false>(ready, direct, stack, one_list, in_place, wrapped);
}

} // namespace
