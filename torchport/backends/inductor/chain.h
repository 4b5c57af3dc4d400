// Compiled libraries that are called in order, as one call: the layers of a model, which were compiled once. What goes
// from one to the next is never seen by Python. Part of caller.cpp.
#pragma once
#include "../../native/slots.h"
#include "queue.h"

#include <ATen/ops/index_select.h>

namespace {

// A tensor that is part of an earlier value: of the packs that numbers are given in.
struct Part {
  size_t source;
  std::vector<int64_t> places;

  at::Tensor of(const at::Tensor& pack) const {
    const auto count = static_cast<int64_t>(places.size());
    if (count > 0 && places.back() - places.front() == count - 1) {
      return pack.narrow(0, places.front(), count); // places are in order, and each once
    }
    return at::index_select(pack, 0, at::tensor(places, at::kLong));
  }
};

struct ChainCall {
  std::shared_ptr<Code> code;
  std::vector<size_t> inputs, outputs;
  std::vector<bool> last; // per input: whether the value is used here for the last time
  std::vector<bool> borrowed; // which outputs must be copied
  std::vector<size_t> unused; // outputs
};

struct Chain {
  size_t inputs, values;
  std::vector<Part> parts; // the values after the inputs
  std::vector<ChainCall> calls;
  std::vector<size_t> results;

  // Find out where each value is used for the last time. Call it once.
  void close() {
    std::vector<std::pair<size_t, size_t>> last(values, {SIZE_MAX, 0}); // per value: the call, and which input
    for (size_t at = 0; at < calls.size(); ++at) {
      for (size_t one = 0; one < calls[at].inputs.size(); ++one) {
        last[calls[at].inputs[one]] = {at, one};
      }
    }
    std::vector<bool> kept(values, false);
    for (const size_t value : results) {
      kept[value] = true;
    }
    for (size_t at = 0; at < calls.size(); ++at) {
      ChainCall& call = calls[at];
      for (size_t one = 0; one < call.inputs.size(); ++one) {
        const size_t value = call.inputs[one];
        call.last.push_back(!kept[value] && last[value] == std::make_pair(at, one));
      }
      for (const size_t value : call.outputs) {
        if (!kept[value] && last[value].first == SIZE_MAX) {
          call.unused.push_back(value);
        }
      }
    }
  }

  // Whether all ran. The values are the inputs before, and those of the results after it.
  bool run(std::vector<at::Tensor>& held, std::string& said) const {
    held.resize(values);
    size_t next = inputs;
    for (const Part& part : parts) {
      held[next++] = part.of(held[part.source]);
    }
    std::vector<at::Tensor> given, made;
    for (const ChainCall& call : calls) {
      Layout layout = call.code->first();
      given.clear();
      made.clear();
      for (size_t one = 0; one < call.inputs.size(); ++one, layout = layout.next()) {
        at::Tensor& tensor = held[call.inputs[one]];
        if (!has_values_of(tensor, layout)) {
          said = "an input of one of its parts is not as it should be";
          return false;
        }
        if (!has_strides_of(tensor, layout)) {
          given.push_back(copy_with(tensor, layout));
        } else if (call.last[one]) {
          given.push_back(std::move(tensor));
        } else {
          given.push_back(tensor);
        }
      }
      if (!call.code->call(given, made, said)) {
        return false;
      }
      for (size_t one = 0; one < made.size(); ++one, layout = layout.next()) {
        const bool as_it_is = !call.borrowed[one] && has_strides_of(made[one], layout);
        held[call.outputs[one]] = as_it_is ? std::move(made[one]) : copy_with(made[one], layout);
      }
      for (const size_t value : call.unused) {
        held[value].reset();
      }
    }
    return true;
  }
};

// -- Python's side ----------------------------------------------------------------------------------------------
PyTypeObject* type_of_data; // ``TensorData``
torchport::Slot tensor_of_data; // its ``tensor``

// Whether a value's tensor is in the slot; a class of its own may have a property there (``SlotData``).
bool is_plain(PyObject* data) {
  return Py_TYPE(data) == type_of_data && tensor_of_data.of(data) != nullptr;
}

// The tensor of a ``TensorData``, as a new reference; None where there is none.
THPObjectPtr tensor_in(PyObject* data) {
  if (is_plain(data)) {
    return THPObjectPtr(Py_NewRef(tensor_of_data.of(data)));
  }
  THPObjectPtr tensor(PyObject_TypeCheck(data, type_of_data) ? PyObject_GetAttrString(data, "tensor") : Py_NewRef(Py_None));
  if (!tensor) {
    throw python_error();
  }
  return tensor;
}

// Have a ``TensorData`` let go of its tensor.
void take_tensor(PyObject* data) {
  if (is_plain(data)) {
    Py_SETREF(tensor_of_data.of(data), Py_NewRef(Py_None));
  } else if (PyObject_SetAttrString(data, "tensor", Py_None) != 0) {
    throw python_error();
  }
}

struct ChainObject {
  PyObject_HEAD
  std::shared_ptr<const Chain> chain;
};

PyTypeObject chain_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torchport.inductor.Chain", sizeof(ChainObject)};

// The whole numbers of a tuple.
std::vector<int64_t> numbers(PyObject* tuple, int64_t limit) {
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "a tuple is needed");
  std::vector<int64_t> found;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tuple); ++at) {
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, at)));
    TORCH_CHECK_INDEX(found.back() >= 0 && found.back() < limit, "there is no such position");
  }
  return found;
}

std::vector<size_t> places(PyObject* tuple, size_t limit) {
  const std::vector<int64_t> found = numbers(tuple, static_cast<int64_t>(limit));
  return {found.begin(), found.end()};
}

} // namespace

// Libraries that are called in order. ``parts``: a tuple of (value, places); ``calls``: a tuple of (library, numbers of
// the values that are its inputs, of its outputs, positions of the outputs to copy); ``results``: numbers of values.
extern "C" PyObject* torchport_chain(
    long long inputs, long long values, PyObject* parts, PyObject* calls, PyObject* results) {
  HANDLE_TH_ERRORS
  auto chain = std::make_shared<Chain>();
  chain->inputs = static_cast<size_t>(inputs);
  chain->values = static_cast<size_t>(values);
  TORCH_CHECK_TYPE(PyTuple_Check(parts) && PyTuple_Check(calls), "tuples are needed");
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(parts); ++at) {
    PyObject* part = PyTuple_GET_ITEM(parts, at);
    chain->parts.push_back({PyLong_AsSize_t(PyTuple_GetItem(part, 0)), numbers(PyTuple_GetItem(part, 1), INT64_MAX)});
    TORCH_CHECK_INDEX(chain->parts.back().source < chain->inputs, "a part is of an input");
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(calls); ++at) {
    PyObject* given = PyTuple_GET_ITEM(calls, at);
    ChainCall call;
    call.code = *static_cast<std::shared_ptr<Code>*>(PyLong_AsVoidPtr(PyTuple_GetItem(given, 0)));
    call.inputs = places(PyTuple_GetItem(given, 1), chain->values);
    call.outputs = places(PyTuple_GetItem(given, 2), chain->values);
    call.borrowed.resize(call.code->outputs, false);
    for (const size_t copied : places(PyTuple_GetItem(given, 3), call.code->outputs)) {
      call.borrowed[copied] = true;
    }
    TORCH_CHECK_VALUE(
        call.inputs.size() == call.code->inputs && call.outputs.size() == call.code->outputs,
        "a library has other inputs or outputs");
    chain->calls.push_back(std::move(call));
  }
  chain->results = places(results, chain->values);
  chain->close();
  ChainObject* made = make<ChainObject>(chain_type);
  made->chain = std::move(chain);
  return reinterpret_cast<PyObject*>(made);
  END_HANDLE_TH_ERRORS
}

// A list of results, or a string: why the run failed. ``inputs``: a sequence of ``TensorData``. Those at the positions
// ``given`` lose their tensors, so that each is freed after its last use if nobody else holds it.
extern "C" PyObject* torchport_run_chain(PyObject* self, PyObject* inputs, PyObject* given) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<const Chain> chain = reinterpret_cast<ChainObject*>(self)->chain;
  const THPObjectPtr items(PySequence_Fast(inputs, "a sequence is needed"));
  if (!items) {
    return nullptr;
  }
  PyObject** const each = PySequence_Fast_ITEMS(items.get());
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.get());
  if (static_cast<size_t>(count) != chain->inputs) {
    return PyUnicode_FromFormat("it takes %zu arguments, but got %zd", chain->inputs, count);
  }
  std::vector<at::Tensor> held;
  held.reserve(chain->values);
  Uses used;
  for (Py_ssize_t i = 0; i < count; ++i) {
    THPObjectPtr tensor = tensor_in(each[i]);
    if (!THPVariable_Check(tensor.get())) {
      return PyUnicode_FromString("an argument is not a TensorData with a value");
    }
    held.push_back(THPVariable_Unpack(tensor.get()));
  }
  used.add(held);
  for (const int64_t position : numbers(given, count)) {
    take_tensor(each[position]);
  }
  std::string said;
  bool ran = false;
  Py_BEGIN_ALLOW_THREADS
  try {
    c10::NoGradGuard no_gradients;
    ran = chain->run(held, said);
  } catch (const std::exception& error) {
    said = error.what();
  }
  Py_END_ALLOW_THREADS
  if (!ran) {
    return PyUnicode_DecodeUTF8(said.data(), static_cast<Py_ssize_t>(said.size()), "replace");
  }
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(chain->results.size())));
  for (size_t i = 0; list && i < chain->results.size(); ++i) {
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(held[chain->results[i]]));
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}
