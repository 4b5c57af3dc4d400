// A path that is interpreted (``run/interpreted.py``): its operators one after the other on CPU tensors, without
// Python.
//
// What is settled once is made into steps: the operator, its arguments that stay the same, and the places of those that
// an earlier step brings. An operator that the interpreter does not simply call is a step of Python's.
#include "objects.h"
#include "wide.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>

namespace {

using namespace torchport;

constexpr int64_t kFewElements = 1 << 16; // of the arguments of an operator that is computed without giving up the GIL

struct Argument {
  enum class Kind { constant, value, number, wrapped, values, maybe_values } kind = Kind::constant;
  c10::IValue constant;
  std::vector<long> places; // of values, or the one of a number (wrapped: for a tensor); -1 where a list has nothing
};

struct Step {
  std::optional<c10::OperatorHandle> op; // none: Python's step
  std::vector<Argument> arguments;
  std::vector<long> needs; // of Python's step
  std::vector<long> results, ends; // places; ``ends``: of the values that are used here last
  bool in_place = false; // the first argument is the result
  bool but_wide = false; // Python's step, unless all tensors are wide
  bool is_view = false; // of a value that may have other strides than the program saw
};

struct Steps {
  PyObject_HEAD
  std::vector<Step>* list;
  size_t places;
};

void free_steps(PyObject* self) {
  delete reinterpret_cast<Steps*>(self)->list;
  PyObject_Free(self);
}

PyTypeObject steps_type = {
    .ob_base = {PyObject_HEAD_INIT(nullptr)},
    .tp_name = "torchport.Steps",
    .tp_basicsize = sizeof(Steps),
    .tp_dealloc = free_steps,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

// -- what is settled once --------------------------------------------------------------------------------------------
template <class Item>
c10::IValue list_of(const std::vector<Item>& items) {
  return c10::List<Item>(c10::ArrayRef<Item>(items));
}

// A constant as the operator takes it. False where that is not known here.
bool constant(PyObject* given, const c10::TypePtr& wanted, std::optional<int32_t> repeated, c10::IValue& made) {
  if (given == Py_None) {
    made = c10::IValue();
    return true;
  }
  if (const auto optional = wanted->cast<c10::OptionalType>()) {
    return constant(given, optional->getElementType(), repeated, made);
  }
  const auto kind = wanted->kind();
  if (kind == c10::TypeKind::ListType) {
    const auto of = wanted->expectRef<c10::ListType>().getElementType()->kind();
    const bool is_list = PyList_Check(given) || PyTuple_Check(given);
    if (!is_list && (!repeated || !PyLong_Check(given))) {
      return false;
    }
    THPObjectPtr items(is_list ? PySequence_Fast(given, "") : PyTuple_Pack(1, given));
    const Py_ssize_t size = items ? PySequence_Fast_GET_SIZE(items.get()) : 0;
    std::vector<int64_t> whole;
    std::vector<double> floats;
    c10::List<bool> truths;
    for (Py_ssize_t at = 0; at < size; ++at) {
      PyObject* item = PySequence_Fast_GET_ITEM(items.get(), at);
      if (of == c10::TypeKind::BoolType && PyBool_Check(item)) {
        truths.push_back(item == Py_True);
      } else if ((of == c10::TypeKind::IntType || of == c10::TypeKind::SymIntType) && PyLong_CheckExact(item)) {
        whole.push_back(PyLong_AsLongLong(item));
      } else if (of == c10::TypeKind::FloatType && (PyFloat_CheckExact(item) || PyLong_CheckExact(item))) {
        floats.push_back(PyFloat_AsDouble(item));
      } else {
        return false;
      }
    }
    if (!is_list) {
      whole.resize(static_cast<size_t>(*repeated), whole.empty() ? 0 : whole[0]);
    }
    if (of == c10::TypeKind::BoolType) {
      made = truths;
    } else if (of == c10::TypeKind::FloatType) {
      made = list_of(floats);
    } else if (of == c10::TypeKind::IntType || of == c10::TypeKind::SymIntType) {
      made = list_of(whole);
    } else {
      return false;
    }
    return !PyErr_Occurred();
  }
  const bool is_number = PyBool_Check(given) || PyLong_CheckExact(given) || PyFloat_CheckExact(given);
  if (is_number && (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::NumberType)) {
    const at::Scalar number = PyBool_Check(given) ? at::Scalar(given == Py_True)
        : PyLong_CheckExact(given)                ? at::Scalar(static_cast<int64_t>(PyLong_AsLongLong(given)))
                                                  : at::Scalar(PyFloat_AsDouble(given));
    made = kind == c10::TypeKind::NumberType ? c10::IValue(number) : at::native::wrapped_scalar_tensor(number);
  } else if (PyBool_Check(given) && kind == c10::TypeKind::BoolType) {
    made = given == Py_True;
  } else if (PyLong_CheckExact(given) && (kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType)) {
    made = static_cast<int64_t>(PyLong_AsLongLong(given));
  } else if (is_number && !PyBool_Check(given) && kind == c10::TypeKind::FloatType) {
    made = PyFloat_AsDouble(given);
  } else if (THPDtype_Check(given)) {
    made = static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type);
  } else if (THPMemoryFormat_Check(given)) {
    made = static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(given)->memory_format);
  } else if (THPLayout_Check(given)) {
    made = static_cast<int64_t>(reinterpret_cast<THPLayout*>(given)->layout);
  } else if (THPDevice_Check(given)) {
    made = reinterpret_cast<THPDevice*>(given)->device;
  } else if (PyUnicode_Check(given) && kind == c10::TypeKind::StringType) {
    made = std::string(PyUnicode_AsUTF8(given));
  } else {
    return false;
  }
  return !PyErr_Occurred();
}

std::vector<long> places_of(PyObject* given) {
  std::vector<long> made;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given); ++at) {
    made.push_back(PyLong_AsLong(PyTuple_GET_ITEM(given, at)));
  }
  return made;
}

// An argument from what Python says of it: None for what has its default, else a letter and a constant or places.
bool argument(PyObject* given, const c10::Argument& wanted, Argument& made) {
  if (given == Py_None) {
    const auto known = wanted.default_value();
    if (known) {
      made.constant = *known;
    }
    return known.has_value();
  }
  PyObject* what = PyTuple_GET_ITEM(given, 1);
  switch (PyUnicode_ReadChar(PyTuple_GET_ITEM(given, 0), 0)) {
    case 'c':
      return constant(what, wanted.type(), wanted.N(), made.constant);
    case 'v':
      made.kind = Argument::Kind::value;
      break;
    case 'n':
      made.kind = Argument::Kind::number;
      break;
    case 'w':
      made.kind = Argument::Kind::wrapped;
      break;
    default: {
      const auto list = wanted.type()->cast<c10::ListType>();
      if (!list) {
        return false;
      }
      const bool maybe = list->getElementType()->kind() == c10::TypeKind::OptionalType;
      made.kind = maybe ? Argument::Kind::maybe_values : Argument::Kind::values;
    }
  }
  made.places = places_of(what);
  return true;
}

// -- running ---------------------------------------------------------------------------------------------------------
// The values so far, by place.
struct Run {
  const Steps& steps;
  std::vector<at::Tensor> values;
  std::vector<double> numbers;
  PyObject* python; // a function: the position of a step, what it needs → what the operator gives
  torch::jit::Stack stack;
  c10::SmallVector<size_t, 2> wrapped; // where on the stack a number stands for a tensor
  int64_t elements = 0;

  void push(const Argument& one) {
    switch (one.kind) {
      case Argument::Kind::constant:
        stack.push_back(one.constant);
        break;
      case Argument::Kind::value: {
        const at::Tensor& value = values[one.places[0]];
        elements += value.defined() ? value.numel() : 0;
        stack.push_back(value.defined() ? c10::IValue(value) : c10::IValue());
        break;
      }
      case Argument::Kind::number:
        stack.emplace_back(numbers[one.places[0]]);
        break;
      case Argument::Kind::wrapped:
        wrapped.push_back(stack.size());
        stack.emplace_back(numbers[one.places[0]]);
        break;
      case Argument::Kind::values: {
        c10::List<at::Tensor> list;
        list.reserve(one.places.size());
        for (const long place : one.places) {
          elements += values[place].numel();
          list.push_back(values[place]);
        }
        stack.emplace_back(std::move(list));
        break;
      }
      case Argument::Kind::maybe_values: {
        c10::List<std::optional<at::Tensor>> list;
        list.reserve(one.places.size());
        for (const long place : one.places) {
          const bool there = place >= 0 && values[place].defined();
          elements += there ? values[place].numel() : 0;
          list.push_back(there ? std::optional<at::Tensor>(values[place]) : std::nullopt);
        }
        stack.emplace_back(std::move(list));
        break;
      }
    }
  }

  // Make tensors of numbers as a graph has them, which rounds as the CPU does with integers alone only.
  // Twin of ``backend.interpret._with_numbers_as_tensors``.
  void wrap() {
    bool floats = false, wide = false;
    const auto look = [&](const at::Tensor& tensor) {
      const bool counts = tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      const at::ScalarType dtype = counts ? tensor.scalar_type() : at::kLong;
      floats = floats || at::isFloatingType(dtype) || at::isComplexType(dtype);
      wide = wide || dtype == at::kDouble || dtype == at::kComplexDouble;
    };
    for (const c10::IValue& one : stack) {
      if (one.isTensor()) {
        look(one.toTensor());
      } else if (one.isTensorList()) {
        for (const c10::IValue& item : one.toListRef()) {
          look(item.toTensor());
        }
      }
    }
    for (const size_t at : wrapped) {
      const at::Scalar number = stack[at].toDouble();
      stack[at] = floats ? at::scalar_tensor(number, wide ? at::kDouble : at::kFloat)
                         : at::native::wrapped_scalar_tensor(number);
    }
    wrapped.clear();
  }

  // Call the operator on the stack, without the GIL where that takes long.
  void call(const Step& step) {
    struct Released {
      PyThreadState* const state;
      ~Released() {
        if (state != nullptr) {
          PyEval_RestoreThread(state);
        }
      }
    };
    const Released released{elements > kFewElements ? PyEval_SaveThread() : nullptr};
    if (!step.is_view) {
      step.op->callBoxed(&stack);
      return;
    }
    const torch::jit::Stack given = stack;
    try {
      step.op->callBoxed(&stack);
    } catch (const c10::Error&) { // a contiguous copy always has a view
      stack = given;
      stack[0] = given[0].toTensor().contiguous();
      step.op->callBoxed(&stack);
    }
  }

  // Keep what a step has brought.
  void keep(const Step& step, c10::ArrayRef<c10::IValue> brought) {
    size_t at = 0;
    const auto put = [&](const c10::IValue& one) {
      TORCH_INTERNAL_ASSERT(at < step.results.size(), "an operator gave more than its schema says");
      values[step.results[at++]] = one.isNone() ? at::Tensor() : one.toTensor();
    };
    for (const c10::IValue& one : brought) {
      if (one.isTensorList()) {
        for (const c10::IValue& item : one.toListRef()) {
          put(item);
        }
      } else {
        put(one);
      }
    }
    TORCH_INTERNAL_ASSERT(at == step.results.size(), "an operator gave less than was inferred");
  }

  void native(const Step& step) {
    const c10::IValue written = step.in_place ? stack[0] : c10::IValue();
    call(step);
    if (step.in_place) {
      keep(step, written);
    } else {
      keep(step, stack);
    }
    stack.clear();
  }

  void in_python(size_t position, const Step& step) {
    THPObjectPtr given(PyTuple_New(static_cast<Py_ssize_t>(step.needs.size())));
    THPObjectPtr number(PyLong_FromSize_t(position));
    for (size_t at = 0; given && at < step.needs.size(); ++at) {
      const at::Tensor& value = values[step.needs[at]];
      PyObject* item = value.defined() ? THPVariable_Wrap(value) : Py_NewRef(Py_None);
      if (item == nullptr) {
        throw python_error();
      }
      PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(at), item);
    }
    THPObjectPtr made;
    if (given && number) {
      made = PyObject_CallFunctionObjArgs(python, number.get(), given.get(), nullptr);
    }
    THPObjectPtr items(made ? PySequence_Fast(made.get(), "a step brings a list") : nullptr);
    if (!items) {
      throw python_error();
    }
    TORCH_INTERNAL_ASSERT(
        PySequence_Fast_GET_SIZE(items.get()) == static_cast<Py_ssize_t>(step.results.size()),
        "an operator gave other results than were inferred");
    for (size_t at = 0; at < step.results.size(); ++at) {
      PyObject* item = PySequence_Fast_GET_ITEM(items.get(), static_cast<Py_ssize_t>(at));
      values[step.results[at]] = THPVariable_Check(item) ? THPVariable_Unpack(item) : at::Tensor();
    }
  }

  void all() {
    for (size_t position = 0; position < steps.list->size(); ++position) {
      const Step& step = (*steps.list)[position];
      elements = 0;
      for (const Argument& one : step.arguments) {
        push(one);
      }
      if (!wrapped.empty()) {
        wrap();
      }
      if (step.op && (!step.but_wide || is_wide(stack))) {
        native(step);
      } else {
        stack.clear();
        in_python(position, step);
      }
      for (const long place : step.ends) {
        values[place].reset();
      }
      if (PyErr_CheckSignals() != 0) {
        throw python_error();
      }
    }
  }
};

} // namespace

// Must be called before the functions below.
extern "C" PyObject* torchport_steps_start() {
  HANDLE_TH_ERRORS
  if (PyType_Ready(&steps_type) != 0) {
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// What of a step can be called here: a tuple of arguments or None, as ``run.steps`` describes them, per argument of the
// operator.
static bool make_step(const char* name, const char* overload, PyObject* described, Step& step) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found || found->schema().arguments().size() != static_cast<size_t>(PyTuple_GET_SIZE(described))) {
    return false;
  }
  for (size_t at = 0; at < found->schema().arguments().size(); ++at) {
    step.arguments.emplace_back();
    const c10::Argument& wanted = found->schema().arguments()[at];
    if (!argument(PyTuple_GET_ITEM(described, static_cast<Py_ssize_t>(at)), wanted, step.arguments.back())) {
      PyErr_Clear();
      step.arguments.clear();
      return false;
    }
  }
  step.op = *found;
  return true;
}

// Steps from a list of tuples: name and overload of an operator, or None for Python's step; its arguments; what
// Python's step needs; the places of results and of values that end; whether it is in place, for wide tensors alone, a
// view.
// ``places``: how many values there are.
// Twin of ``run.interpreted.PathStep``.
extern "C" PyObject* torchport_steps(PyObject* described, PyObject* places) {
  HANDLE_TH_ERRORS
  auto list = std::make_unique<std::vector<Step>>();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(described); ++at) {
    PyObject *name, *overload, *arguments, *needs, *results, *ends;
    int in_place, but_wide, is_view;
    if (!PyArg_ParseTuple(
            PyList_GET_ITEM(described, at), "OOOO!O!O!ppp", &name, &overload, &arguments, &PyTuple_Type, &needs,
            &PyTuple_Type, &results, &PyTuple_Type, &ends, &in_place, &but_wide, &is_view)) {
      return nullptr;
    }
    Step& step = list->emplace_back();
    step.needs = places_of(needs);
    step.results = places_of(results);
    step.ends = places_of(ends);
    step.in_place = in_place != 0;
    step.but_wide = but_wide != 0;
    step.is_view = is_view != 0;
    if (name != Py_None) {
      make_step(PyUnicode_AsUTF8(name), PyUnicode_AsUTF8(overload), arguments, step);
    }
  }
  Steps* made = PyObject_New(Steps, &steps_type);
  if (made == nullptr) {
    return nullptr;
  }
  made->list = list.release();
  made->places = PyLong_AsSize_t(places);
  return reinterpret_cast<PyObject*>(made);
  END_HANDLE_TH_ERRORS
}

// Run steps. ``given``: the tensors at the first places; ``numbers``: floats; ``python``: what runs Python's steps;
// ``wanted``: the places of the results. Returns a list of tensors. Raises what the operators raise.
// Twin of ``run.interpreted._PathRun.step``.
extern "C" PyObject* torchport_run_steps(
    PyObject* steps, PyObject* given, PyObject* numbers, PyObject* python, PyObject* wanted) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(Py_TYPE(steps) == &steps_type, "steps are needed");
  Py_INCREF(steps);
  const THPObjectPtr held(steps);
  Run run{*reinterpret_cast<Steps*>(steps), {}, {}, python, {}};
  run.values.resize(run.steps.places);
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(given); ++at) {
    run.values[static_cast<size_t>(at)] = THPVariable_Unpack(PyList_GET_ITEM(given, at));
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(numbers); ++at) {
    run.numbers.push_back(PyFloat_AsDouble(PyList_GET_ITEM(numbers, at)));
  }
  run.all();
  THPObjectPtr made(PyList_New(PyTuple_GET_SIZE(wanted)));
  for (Py_ssize_t at = 0; made && at < PyTuple_GET_SIZE(wanted); ++at) {
    const at::Tensor& value = run.values[PyLong_AsLong(PyTuple_GET_ITEM(wanted, at))];
    PyObject* item = value.defined() ? THPVariable_Wrap(value) : Py_NewRef(Py_None);
    if (item == nullptr) {
      return nullptr;
    }
    PyList_SET_ITEM(made.get(), at, item);
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}
