// Where a path that is interpreted at once begins again. Part of follow.cpp.
//
// Such a path is in no record, for the trie has no nodes of it. Each of its rounds began in Python, which made a key of
// the first operator's call to find out how often the path came and what that has cost (``trie.Sights``): several times
// the operator's own time, and after each value that is read another round begins. A kernel remembers the calls that
// began a round, and what is known of the path. When such a call comes again, Python is asked for nothing but whether
// the path is still not worth being recorded.
#pragma once
#include "direct.h"

#include <cstring>
#include <vector>

namespace {

// -- Python's side ----------------------------------------------------------------------------------------------
Slot root_of, sights_of; // of a trace
PyObject* reopen; // run.direct.reopen

// Whether nothing is recorded in a trace since the last flush.
bool is_empty(PyObject* trace) {
  return py_.cursor.of(trace) == root_of.of(trace) && PyList_GET_SIZE(py_.leaves.of(trace)) == 0 &&
      PyList_GET_SIZE(py_.scalar_inputs.of(trace)) == 0;
}

// A call, as far as ``trace.keys`` tells calls apart that begin a path: numbers for the specs of tensors and for what
// is no tensor.
class Described {
 public:
  std::vector<int64_t> numbers;

  // False where a call begins no path as others did: a value is pending, or of a kind that is not known here.
  bool add(const c10::IValue& given, PyObject* runtime) {
    if (given.isNone()) {
      return put('n');
    }
    if (given.isTensor()) {
      return add_tensor(given.toTensor(), runtime);
    }
    if (given.isBool()) {
      return put('b', given.toBool());
    }
    if (given.isInt()) {
      return put('i', given.toInt());
    }
    if (given.isDouble()) {
      return put('f', bits(given.toDouble()));
    }
    if (given.isDevice()) {
      return put('d', static_cast<int64_t>(given.toDevice().type()), given.toDevice().index());
    }
    if (!given.isList()) {
      return false;
    }
    const Values items = given.toListRef();
    put('l', static_cast<int64_t>(items.size()));
    return std::all_of(items.begin(), items.end(), [&](const c10::IValue& item) { return add(item, runtime); });
  }

 private:
  c10::SmallVector<PyObject*, 8> seen; // values, borrowed: their handles are arguments

  template <class... Numbers>
  bool put(Numbers... more) {
    (numbers.push_back(static_cast<int64_t>(more)), ...);
    return true;
  }

  static int64_t bits(double value) {
    int64_t made = 0;
    std::memcpy(&made, &value, sizeof made);
    return made;
  }

  bool add_tensor(const at::Tensor& tensor, PyObject* runtime) {
    if (!tensor.defined()) {
      return put('n');
    }
    const auto dtype = static_cast<int64_t>(tensor.scalar_type());
    if (!tensor.is_privateuseone()) {
      if (!tensor.is_cpu() || tensor.dim() != 0 || !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return false;
      }
      if (tensor.scalar_type() == at::kDouble) {
        return put('w', dtype, bits(*tensor.const_data_ptr<double>()));
      }
      return tensor.scalar_type() == at::kLong && put('w', dtype, *tensor.const_data_ptr<int64_t>());
    }
    THPObjectPtr handle = handle_of(tensor);
    if (!handle || value_id_of(handle.get()) != -1) {
      return false;
    }
    THPObjectPtr value(attribute(handle.get(), py_.n_value));
    if (!value || value.get() == Py_None || py_.info.of(value.get()) != runtime) {
      return false;
    }
    const auto known = std::find(seen.begin(), seen.end(), value.get());
    put('t', dtype, known - seen.begin(), tensor.dim());
    seen.push_back(value.get());
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
    return true;
  }
};

constexpr size_t kMostOpenings = 4096; // at one node: a loop whose sizes grow makes one in each round

// Whether a trace is one that records, and nothing is pending or interpreted in it.
bool is_idle(PyObject* trace) {
  return trace != nullptr && Py_TYPE(trace) == trace_type && is_empty(trace) && integer(direct_of.of(trace)) == 0;
}

// A call with which a path may begin at the root of a thread's trie, as a number; 0 where it does not, or is not known
// here. ``serial``: the operator's in trace keys.
size_t opening_of(PyObject* trace, long long serial, Values given) {
  if (!is_idle(trace)) {
    return 0;
  }
  Described call;
  call.numbers.push_back(serial);
  PyObject* runtime = py_.runtime.of(trace);
  const auto add = [&](const c10::IValue& value) { return call.add(value, runtime); };
  return std::all_of(given.begin(), given.end(), add) ? hash_of(call.numbers) : 0;
}

// Begin a path that was interpreted before, if it is interpreted again; false where Python has to decide. If two calls
// were one number, the cost of one path would be counted as the other's.
// Raises an interrupt, with nothing begun.
bool begin_again(PyObject* trace, size_t opening) {
  Records* records = opening == 0 ? nullptr : records_of(root_of.of(trace));
  if (records == nullptr) {
    return false;
  }
  const auto found = records->openings->find(opening);
  if (found == records->openings->end()) {
    return false;
  }
  const THPObjectPtr keep(Py_NewRef(reinterpret_cast<PyObject*>(records))), sights(Py_NewRef(found->second));
  THPObjectPtr begun(PyObject_CallFunctionObjArgs(reopen, trace, sights.get(), nullptr));
  if (!begun) {
    throw python_error();
  }
  if (begun.get() != Py_True && records->openings->erase(opening) != 0) { // learned again where Python interprets it
    Py_DECREF(sights.get());
  }
  return begun.get() == Py_True;
}

// Remember a call, if Python has begun to interpret a path with it.
void learn_opening(size_t opening) {
  if (opening == 0) {
    return;
  }
  Gil gil;
  THPObjectPtr trace = any_trace(of_this_thread().get());
  if (!trace || Py_TYPE(trace.get()) != trace_type || !is_empty(trace.get()) ||
      integer(direct_of.of(trace.get())) != 2) { // one operator was interpreted
    return;
  }
  PyObject* sights = sights_of.of(trace.get());
  Records* records = sights == nullptr || sights == Py_None ? nullptr : records_of(root_of.of(trace.get()), true);
  if (records == nullptr) {
    return;
  }
  Openings& openings = *records->openings;
  if (openings.size() >= kMostOpenings) {
    Openings old;
    old.swap(openings);
    for (const auto& one : old) {
      Py_DECREF(one.second);
    }
  }
  PyObject*& held = openings[opening];
  Py_XSETREF(held, Py_NewRef(sights));
}

} // namespace
