// Kernels that follow a known path of the trie without Python.
//
// A node of the trie keeps, besides the dictionary of its children, records of the calls that led to the children. A
// kernel compares its arguments with these records. If one matches, the kernel adds new leaves and scalar inputs to the
// trace as the Python kernel does, moves the cursor, and returns the handles that the child has ready. Any other call
// goes to the Python kernel, which knows all rules. If that kernel finds a known child, the call becomes a record. The
// trace's state exists once: cursor, leaves and pools are those of the Python objects.
#include "calls.h"
#include "direct.h"
#include "openings.h"
#include "outs.h"

#include <array>
#include <string>
#include <unordered_map>

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/conduit/pybind11_conduit_v1.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace {

// -- kernels -------------------------------------------------------------------------------------------------------
// The node and the arguments that a call starts from, for a record of the call once the Python kernel has run it.
struct Start {
  PyObject* node = nullptr;
  Py_ssize_t children = 0;
  std::vector<c10::IValue> given;

  void note(PyObject* trace, Values values) {
    node = py_.cursor.of(trace);
    Py_INCREF(node);
    children = PyDict_Size(py_.children.of(node));
    given.assign(values.begin(), values.end());
  }

  ~Start() {
    if (node != nullptr) {
      Gil gil;
      Py_DECREF(node);
    }
  }
};

constexpr int kMostSteps = 16; // operators that one call may record

// A functional operator. ``letters`` has one per argument: t(ensor), T(ensors), s(calar), S(calars), f(iller),
// g(enerator), d(evice), p(lain: compared by value).
struct Kernel {
  std::string letters;
  long long serial; // the operator in trace keys
  bool one_list; // it returns one list of tensors
  std::unique_ptr<Direct> direct; // how the operator is interpreted at once; null where Python does that
  mutable bool asked = false; // whether Python was asked for that

  // Whether the operator may be interpreted at once, in a trace whose operators are.
  bool is_direct(PyObject* trace) const {
    if (direct == nullptr && !asked) {
      prepare(trace, serial);
      asked = true;
    }
    return direct != nullptr;
  }

  // The trace that an operator is interpreted at once in, the calling thread's of index 0; null where it is not. A path
  // may begin again with it; ``opening`` is what to remember if Python begins one.
  THPObjectPtr trace_at_once(PyObject* of_thread, Values given, size_t& opening) const {
    THPObjectPtr trace = any_trace(of_thread);
    if (trace && is_at_once(trace.get())) {
      return is_direct(trace.get()) ? std::move(trace) : THPObjectPtr();
    }
    if (!trace || !direct) {
      return THPObjectPtr();
    }
    opening = direct->is_anchor(given) ? 0 : opening_of(trace.get(), serial, given);
    return begin_again(trace.get(), opening) ? std::move(trace) : THPObjectPtr();
  }

  // Move the cursor to the child that the arguments lead to, and return the child; null if no record matches.
  // ``written``: the call is in place, so the child's results have to fit the tensors that are written.
  // Twin of ``trace.kernels.make_kernel``.
  PyObject* follow(PyObject* trace, Values given, bool written) const {
    return follow_if(trace, given, [written](PyObject* child) {
      PyObject* ready = py_.ready.of(child);
      return ready != nullptr && ready != Py_None && (!written || py_.fits.of(child) == Py_True);
    });
  }

  // The same for children that ``usable`` accepts.
  template <class Usable>
  PyObject* follow_if(PyObject* trace, Values given, Usable usable) const {
    const Records* records = records_of(py_.cursor.of(trace));
    if (records == nullptr) {
      return nullptr;
    }
    for (const auto& record : *records->list) {
      if (record->kernel != this) {
        continue;
      }
      PyObject* child = record->child;
      if (!usable(child)) {
        continue;
      }
      Additions added;
      const Expected* expected = record->expected.data();
      const bool fit = std::all_of(given.begin(), given.end(), [&](const c10::IValue& value) {
        return fits(trace, *record, expected, value, added);
      });
      if (!fit) {
        continue;
      }
      if (!add_leaves(trace, added)) {
        return nullptr;
      }
      add_aliases(trace, added);
      add_scalar_inputs(trace, added);
      set(py_.cursor.of(trace), child);
      record->came([&] { return read_for(*records, *record); });
      ++followed;
      return child;
    }
    return nullptr;
  }

  // Where what following a record reads lies.
  static Lines read_for(const Records& records, const Record& record) {
    PyObject* ready = py_.ready.of(record.child);
    Lines lines;
    lines.add(&records);
    lines.add(records.list);
    lines.add(records.list->data());
    lines.add(&record, 2);
    lines.add(record.expected.data());
    lines.add(record.exact.data());
    lines.add(record.child, 3);
    lines.add(ready);
    if (ready != nullptr && Py_TYPE(ready) == py_.handle) {
      lines.add(THPVariable_Unpack(ready).unsafeGetTensorImpl(), sizeof(c10::TensorImpl) / 64 + 1);
    }
    return lines;
  }

  // The child of ``before`` that the path to ``node`` begins with; null where ``before`` is not near. A write through a
  // view goes on along the path: the base is written, and the view taken again.
  static PyObject* step_from(PyObject* before, PyObject* node) {
    for (int steps = 0; steps < kMostSteps && node != nullptr && node != Py_None; ++steps) {
      PyObject* parent = py_.parent.of(node);
      if (parent == before) {
        return node;
      }
      node = parent;
    }
    return nullptr;
  }

  // Record the call that led from ``start`` to the cursor, if the Python kernel found the child in the trie.
  void learn(const Start& start) const {
    learn_if(start, [](PyObject* child) { return py_.ready.of(child) != Py_None; });
  }

  // The same for children that ``usable`` accepts.
  template <class Usable>
  void learn_if(const Start& start, Usable usable) const {
    if (start.node == nullptr) {
      return;
    }
    Gil gil;
    THPObjectPtr trace = current_trace();
    if (!trace) {
      return;
    }
    PyObject* before = start.node;
    PyObject* child = step_from(before, py_.cursor.of(trace.get()));
    PyObject* key = child == nullptr ? nullptr : py_.key.of(child);
    if (key == nullptr || PyDict_Size(py_.children.of(before)) != start.children ||
        !usable(child) || !PyTuple_CheckExact(key) || integer(PyTuple_GET_ITEM(key, 0)) != serial) {
      return;
    }
    auto record = std::make_unique<Record>();
    record->kernel = this;
    record->child = child;
    Py_ssize_t part = 0;
    for (size_t at = 0; at < letters.size(); ++at) {
      const bool in_key = letters[at] != 'g' && letters[at] != 'd';
      if (in_key && ++part >= PyTuple_GET_SIZE(key)) {
        return;
      }
      if (!expect(*record, letters[at], in_key ? PyTuple_GET_ITEM(key, part) : nullptr, start.given[at])) {
        return;
      }
    }
    Records* records = records_of(before, true);
    if (records == nullptr) {
      return;
    }
    auto& list = *records->list;
    // An older record of the child may be out of date, for example about which handles are in their nodes' pools.
    std::erase_if(list, [&](const auto& other) { return other->kernel == this && other->child == child; });
    if (list.size() >= kMostRecords) {
      list.pop_back();
    }
    list.insert(list.begin(), std::move(record));
  }

 private:
  static bool expect(Record& record, char letter, PyObject* part, const c10::IValue& given) {
    switch (letter) {
      case 't':
        return expect_tensor(record, part, given);
      case 'T':
      case 'S': {
        if (!given.isList() || !PyTuple_CheckExact(part)) {
          return false;
        }
        const Values items = given.toListRef();
        if (static_cast<size_t>(PyTuple_GET_SIZE(part)) != items.size()) {
          return false;
        }
        record.expected.push_back({.kind = Kind::List, .offset = static_cast<uint32_t>(items.size())});
        for (size_t at = 0; at < items.size(); ++at) {
          if (!expect(record, letter == 'T' ? 't' : 's', PyTuple_GET_ITEM(part, at), items[at])) {
            return false;
          }
        }
        return true;
      }
      case 's':
      case 'f':
        if (const long size = token_at(part); size >= 0) {
          const Kind kind = letter == 's' ? Kind::Float : Kind::Filler;
          record.expected.push_back({.kind = kind, .offset = static_cast<uint32_t>(size)});
          return given.isDouble();
        }
        return expect_exact(record, given);
      default:
        return expect_exact(record, given);
    }
  }

  static bool expect_exact(Record& record, const c10::IValue& given) {
    record.expected.push_back({.kind = Kind::Exact, .offset = static_cast<uint32_t>(record.exact.size())});
    record.exact.push_back(given);
    return same(given, given);
  }

  static bool expect_tensor(Record& record, PyObject* part, const c10::IValue& given) {
    if (part == Py_None) {
      record.expected.push_back({.kind = Kind::None});
      return true;
    }
    if (part == PyTuple_GET_ITEM(varying, 0)) {
      record.expected.push_back({.kind = Kind::Wrapped});
      return true;
    }
    if (PyTuple_CheckExact(part)) {
      return given.isTensor() && expect_exact(record, given);
    }
    if (!given.isTensor()) {
      return false;
    }
    THPObjectPtr handle = handle_of(given.toTensor());
    if (!handle) {
      return false;
    }
    Expected expected{.kind = Kind::Leaf};
    if (!PyLong_CheckExact(part)) {
      Py_INCREF(part);
      expected.object = part;
      record.expected.push_back(expected);
      return true;
    }
    expected.kind = Kind::ValueId;
    expected.value_id = integer(part);
    THPObjectPtr home(attribute(handle.get(), py_.n_home));
    if (home && PyTuple_CheckExact(home.get()) && PyTuple_GET_SIZE(home.get()) == 2) {
      PyObject* node = PyTuple_GET_ITEM(home.get(), 0);
      const long long offset = integer(PyTuple_GET_ITEM(home.get(), 1));
      PyObject* ready = py_.ready.of(node);
      const bool many = ready != handle.get();
      if (integer(py_.first_id.of(node)) + offset == expected.value_id &&
          result_at(node, static_cast<uint32_t>(offset), many) == handle.get()) {
        expected.kind = Kind::Value;
        expected.many = many;
        expected.offset = static_cast<uint32_t>(offset);
        expected.object = node;
      }
    }
    record.expected.push_back(expected);
    return true;
  }
};

// The results that a node has ready. They hold references: dropping the arguments or writing a wrapper may run code
// that flushes, and a flush gives no value to a pool's handle that has no other reference.
using Results = c10::SmallVector<at::Tensor, 2>;

Results results_of(PyObject* node) {
  PyObject* ready = py_.ready.of(node);
  if (Py_TYPE(ready) == py_.handle) {
    return {THPVariable_Unpack(ready)};
  }
  Results results;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(ready); ++at) {
    PyObject* item = PySequence_Fast_GET_ITEM(ready, at);
    results.push_back(item == Py_None ? at::Tensor() : THPVariable_Unpack(item));
  }
  return results;
}

void replace_arguments(torch::jit::Stack& stack, size_t count, Results results, bool one_list) {
  torch::jit::drop(stack, count);
  if (one_list) {
    stack.emplace_back(c10::List<at::Tensor>(at::TensorList(results)));
    return;
  }
  for (at::Tensor& result : results) {
    stack.emplace_back(std::move(result));
  }
}

// A functional operator's kernel on handles.
struct Functional final : c10::OperatorKernel {
  Functional(const Kernel& kernel, c10::SafeKernelFunction python) : kernel(kernel), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = kernel.letters.size();
    Start start;
    size_t opening = 0;
    {
      Gil gil;
      const Values given(stack->data() + stack->size() - count, count);
      THPObjectPtr of_thread = of_this_thread();
      if (THPObjectPtr trace = recording_trace(of_thread.get())) {
        if (PyObject* child = kernel.follow(trace.get(), given, false)) {
          replace_arguments(*stack, count, results_of(child), kernel.one_list);
          return;
        }
        start.note(trace.get(), given);
      }
      THPObjectPtr trace = kernel.trace_at_once(of_thread.get(), given, opening);
      if (trace && run_direct(trace.get(), *kernel.direct, *stack, kernel.one_list)) {
        show_each(Values(stack->data() + stack->size() - op.schema().returns().size(), op.schema().returns().size()));
        return;
      }
      show_each(given); // where the dispatcher was told to leave ``Show`` out
    }
    python.callBoxed(op, keys, stack);
    kernel.learn(start);
    learn_opening(opening);
  }

  const Kernel& kernel;
  const c10::SafeKernelFunction python;
};

// ``detach`` and its kin: another handle of the same value; nothing is traced.
struct SameValue final : c10::OperatorKernel {
  explicit SameValue(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    at::Tensor made;
    {
      Gil gil;
      THPObjectPtr of_thread = of_this_thread();
      THPObjectPtr trace = recording_trace(of_thread.get());
      if (!trace) {
        trace = direct_trace(of_thread.get());
      }
      if (trace) {
        made = same_value(trace.get(), stack->back().toTensor());
      }
      show(stack->back().toTensor());
    }
    if (made.defined()) {
      stack->back() = std::move(made);
    } else {
      python.callBoxed(op, keys, stack);
    }
  }

  // Twin of ``frontend.device.copies._same_value``.
  static at::Tensor same_value(PyObject* trace, const at::Tensor& tensor) {
    THPObjectPtr handle = handle_of(tensor);
    if (!handle) {
      return {};
    }
    THPObjectPtr value(attribute(handle.get(), py_.n_value)), spec(attribute(handle.get(), py_.n_spec)),
        failure(attribute(handle.get(), py_.n_failure)), value_id(attribute(handle.get(), py_.n_value_id));
    if (!value || !spec || !value_id || failure.get() != Py_None) {
      return {};
    }
    const bool pending = value.get() == Py_None;
    if (pending && !holds(trace, integer(value_id.get()))) {
      return {}; // pending in another thread's trace, which knows its own handles only
    }
    THPObjectPtr made(handle_like(tensor));
    if (!made || PyObject_SetAttr(made.get(), py_.n_spec, spec.get()) != 0 ||
        PyObject_SetAttr(made.get(), pending ? py_.n_value_id : py_.n_value, (pending ? value_id : value).get()) != 0 ||
        (pending && PyList_Append(py_.made.of(trace), made.get()) != 0)) {
      PyErr_Clear();
      return {};
    }
    return THPVariable_Unpack(made.get());
  }

  const c10::SafeKernelFunction python;
};

} // namespace

#include "writes.h"

namespace {

// The kernel of ``copy_`` at this device's autograd key. A copy between devices goes to the Python kernel.
// Twin of ``frontend.device.install._copy_``.
struct CopyAutograd final : c10::OperatorKernel {
  CopyAutograd(c10::SafeKernelFunction python, c10::SafeKernelFunction stock)
      : python(std::move(python)), stock(std::move(stock)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Values given(stack->data() + stack->size() - 3, 3);
    const bool ours = given[0].isTensor() && given[0].toTensor().is_privateuseone() && given[1].isTensor() &&
        given[1].toTensor().is_privateuseone();
    (ours ? stock : python).callBoxed(op, keys, stack);
  }

  const c10::SafeKernelFunction python, stock;
};

// -- registering -----------------------------------------------------------------------------------------------------
void put(c10::DispatchKey key, const c10::OperatorName& name, torch::CppFunction&& made) {
  static auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>(); // never freed
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
  const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  libraries.back()->impl(full.c_str(), std::move(made));
}

template <class Made>
void put(c10::DispatchKey key, const c10::OperatorName& name, std::unique_ptr<Made> made) {
  put(key, name, torch::CppFunction::makeFromBoxedFunctor(std::move(made)));
}

// Every kernel by its serial; never freed.
std::unordered_map<long long, Kernel*>& kernels() {
  static auto& all = *new std::unordered_map<long long, Kernel*>();
  return all;
}

struct Quiet final : c10::WarningHandler { // PyTorch warns when a kernel overrides another
  void process(const c10::Warning&) override {}
};

} // namespace

#include "at_once.h"
#include "copies.h"
#include "views.h"
#include "wrapped.h"

// Look up the Python types, slots and constants that the kernels use. Must be called first.
extern "C" PyObject* torchport_follow_start(
    PyObject* handle, PyObject* trace, PyObject* node, PyObject* data, PyObject* of_threads, PyObject* floats,
    PyObject* copies, PyObject* first_leaf, PyObject* ids_of_a_trace, PyObject* checkpoint) {
  HANDLE_TH_ERRORS
  if (!look(handle, trace, node, data) || PyType_Ready(&records_type) != 0) {
    return nullptr;
  }
  PyObject* bounds = nullptr;
  if (!PyArg_ParseTuple(floats, "O!O!", &PyTuple_Type, &varying, &PyTuple_Type, &bounds)) {
    return nullptr;
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(bounds); ++at) {
    limits.push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(bounds, at)));
  }
  for (PyObject* held : {trace, of_threads, varying, copies}) {
    Py_INCREF(held);
  }
  trace_type = reinterpret_cast<PyTypeObject*>(trace);
  threads = of_threads;
  copies_under_grad = copies;
  leaf_base = integer(first_leaf);
  span = integer(ids_of_a_trace);
  checkpoint_every = integer(checkpoint);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of the Python kernel of a functional operator, and in front of the one of its in-place
// form, if ``in_place`` names a form. ``serial``: the operator in trace keys.
// Twin of ``trace.kernels.make_kernel``.
extern "C" PyObject* torchport_follow(
    const char* name, const char* overload, const char* letters, long long serial, const char* in_place) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorHandle op = dispatcher.findSchemaOrThrow(name, overload);
  const auto& returns = op.schema().returns();
  const bool one_list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  Kernel& kernel = *(kernels()[serial] = new Kernel{letters, serial, one_list, nullptr});
  if (op.schema().arguments().size() != kernel.letters.size()) {
    PyErr_Format(PyExc_ValueError, "%s.%s does not have the arguments %s", name, overload, letters);
    return nullptr;
  }
  const auto dense = c10::DispatchKey::PrivateUse1, functionalize = c10::DispatchKey::Functionalize;
  put(dense, op.operator_name(),
      std::make_unique<Functional>(kernel, op.getComputedKernelForDispatchKey(dense)));
  put_wrapped(op, kernel);
  if (*in_place != 0) {
    const c10::OperatorHandle writing = dispatcher.findSchemaOrThrow(in_place, overload);
    put(functionalize, writing.operator_name(),
        std::make_unique<InPlace>(kernel, writing.getComputedKernelForDispatchKey(functionalize)));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register C++ kernels in front of the Python kernels of ``copy_``. ``serial``: its functional form in trace keys.
// Twin of ``frontend.device.inplace._of_copy``.
extern "C" PyObject* torchport_follow_copy(const char* letters, long long serial) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  Kernel& kernel = *(kernels()[serial] = new Kernel{letters, serial, false, nullptr});
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  const auto functionalize = c10::DispatchKey::Functionalize, autograd = c10::DispatchKey::AutogradPrivateUse1;
  put(functionalize, op.operator_name(),
      std::make_unique<CopyInPlace>(kernel, op.getComputedKernelForDispatchKey(functionalize)));
  // PyTorch's own autograd kernel is at the key of every backend.
  put(autograd, op.operator_name(),
      std::make_unique<CopyAutograd>(
          op.getComputedKernelForDispatchKey(autograd),
          op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse3)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of the Python kernel of an operator that writes ``outs`` tensors by ``out=``.
// ``original``: PyTorch's own kernel, as ``torch.library.get_kernel`` gives it.
// Twin of ``frontend.device.writes._checked``.
extern "C" PyObject* torchport_follow_out(
    const char* name, const char* overload, long long outs, PyObject* original) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto* found = pybind11_conduit_v1::get_type_pointer_ephemeral<c10::SafeKernelFunction>(original);
  if (found == nullptr) {
    return nullptr;
  }
  const auto functionalize = c10::DispatchKey::Functionalize;
  put(functionalize, op.operator_name(),
      std::make_unique<Out>(
          op.schema().arguments().size(), outs, op.getComputedKernelForDispatchKey(functionalize), *found));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of the Python kernel of an operator that returns another handle of its argument's
// value.
// Twin of ``frontend.device.copies._same_value``.
extern "C" PyObject* torchport_follow_same_value(const char* name) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const auto dense = c10::DispatchKey::PrivateUse1;
  put(dense, op.operator_name(), std::make_unique<SameValue>(op.getComputedKernelForDispatchKey(dense)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The number of calls that were served without Python.
extern "C" unsigned long long torchport_followed() {
  return followed;
}
