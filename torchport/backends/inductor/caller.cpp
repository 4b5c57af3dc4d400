// Calls compiled libraries with tensors: at once, without Python's global lock while the code runs, or in order on a
// thread that needs no Python. Per tensor this costs a tenth of what ctypes and capsules cost.
#include "queue.h"

namespace {

// -- Python's side ----------------------------------------------------------------------------------------------
// The place of a tensor that Python need not look at.
struct Slot {
  PyObject_HEAD
  Place place;
};

// One run.
struct Started {
  PyObject_HEAD
  std::shared_ptr<Task> task;
};

template <class Object>
void dealloc(PyObject* self) {
  reinterpret_cast<Object*>(self)->~Object();
  PyObject_Free(self);
}

PyTypeObject slot_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torchport.inductor.Slot", sizeof(Slot)};
PyTypeObject started_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torchport.inductor.Started", sizeof(Started)};

template <class Object>
Object* make(PyTypeObject& type) {
  Object* made = PyObject_New(Object, &type);
  if (made == nullptr) {
    throw python_error();
  }
  PyObject* self = reinterpret_cast<PyObject*>(made);
  const PyObject head = *self;
  new (made) Object{};
  *self = head;
  return made;
}

const Place& place_of(PyObject* slot) {
  return reinterpret_cast<Slot*>(slot)->place;
}

// A tensor of Python's with a place's memory, or None.
PyObject* tensor_at(const Place& place) {
  if (!has_tensor(place)) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(shallow_copy(place.box->tensor));
}

PyObject* slot_has_tensor(PyObject* self, PyObject*) {
  return PyBool_FromLong(has_tensor(place_of(self)));
}

PyObject* slot_tensor(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return tensor_at(place_of(self));
  END_HANDLE_TH_ERRORS
}

Task& task_of(PyObject* self) {
  return *reinterpret_cast<Started*>(self)->task;
}

PyObject* started_done(PyObject* self, PyObject*) {
  return PyBool_FromLong(task_of(self).outcome.load() != Outcome::none);
}

// Returns once the run has ended: its seconds, or what went wrong. An interrupt of the program's comes through.
PyObject* started_wait(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  Task& task = task_of(self);
  bool ended = task.outcome.load() != Outcome::none;
  while (!ended) {
    // Made and undone with Python's lock, which the state may need: it has the program's Python hooks.
    const at::ThreadLocalState* plain = queue->plain.load();
    std::optional<at::ThreadLocalStateGuard> guard;
    if (plain != nullptr) {
      guard.emplace(*plain);
    }
    Py_BEGIN_ALLOW_THREADS
    ended = queue->wait(task, plain != nullptr);
    Py_END_ALLOW_THREADS
    guard.reset();
    if (!ended && PyErr_CheckSignals() != 0) {
      return nullptr;
    }
  }
  if (task.outcome.load() == Outcome::well) {
    return PyFloat_FromDouble(task.seconds);
  }
  return PyUnicode_DecodeUTF8(task.error.data(), static_cast<Py_ssize_t>(task.error.size()), "replace");
  END_HANDLE_TH_ERRORS
}

// An input of a run that has failed, if the code was not given it; else None.
PyObject* started_not_given(PyObject* self, PyObject* position) {
  HANDLE_TH_ERRORS
  const std::vector<Input>& inputs = task_of(self).inputs;
  const size_t at = PyLong_AsSize_t(position);
  if (task_of(self).outcome.load() != Outcome::not_run || at >= inputs.size()) {
    Py_RETURN_NONE;
  }
  return tensor_at(inputs[at]);
  END_HANDLE_TH_ERRORS
}

PyMethodDef slot_methods[] = {
    {"has_tensor", slot_has_tensor, METH_NOARGS, "Whether the tensor is there."},
    {"tensor", slot_tensor, METH_NOARGS, "The tensor, if it is there."},
    {nullptr},
};
PyMethodDef started_methods[] = {
    {"done", started_done, METH_NOARGS, "Whether the run has ended."},
    {"wait", started_wait, METH_NOARGS, "Wait for its end: seconds, or what went wrong."},
    {"not_given", started_not_given, METH_O, "An input that the code was not given."},
    {nullptr},
};

bool make_types() {
  for (PyTypeObject* type : {&slot_type, &started_type}) {
    type->tp_flags = Py_TPFLAGS_DEFAULT;
  }
  slot_type.tp_methods = slot_methods;
  slot_type.tp_dealloc = dealloc<Slot>;
  started_type.tp_methods = started_methods;
  started_type.tp_dealloc = dealloc<Started>;
  return PyType_Ready(&slot_type) == 0 && PyType_Ready(&started_type) == 0;
}

std::vector<bool> flags(PyObject* positions, size_t count) {
  std::vector<bool> found(count, false);
  THPObjectPtr items(PySequence_Fast(positions, "positions are needed"));
  for (Py_ssize_t at = 0; items && at < PySequence_Fast_GET_SIZE(items.get()); ++at) {
    const size_t position = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(items.get(), at));
    TORCH_CHECK_INDEX(position < count, "there is no such position");
    found[position] = true;
  }
  if (!items) {
    throw python_error();
  }
  return found;
}

} // namespace

#include "chain.h"

// Once, before anything else. ``data``: the class ``TensorData``. ``ended``: called on the main thread when a run has
// ended. ``openmp``, ``mkl``: what sets the calling thread's number of threads, or null.
extern "C" PyObject* torchport_caller_start(PyObject* data, PyObject* ended, void* openmp, void* mkl) {
  if (!torchport::find_slot(data, "tensor", tensor_of_data)) {
    return nullptr;
  }
  type_of_data = reinterpret_cast<PyTypeObject*>(Py_NewRef(data));
  when_ended = Py_NewRef(ended);
  set_of_openmp = reinterpret_cast<void (*)(int)>(openmp);
  set_of_mkl = reinterpret_cast<int (*)(int)>(mkl);
  chain_type.tp_flags = Py_TPFLAGS_DEFAULT;
  chain_type.tp_dealloc = dealloc<ChainObject>;
  if (PyType_Ready(&chain_type) != 0) {
    return nullptr;
  }
  return make_types() ? Py_NewRef(Py_True) : nullptr;
}

// A compiled library; ``layouts`` are those of its inputs and then outputs.
extern "C" void* torchport_open(
    void* run, void* destroy, void* last_error, void* operator_error, void* container, const int64_t* layouts,
    int64_t length, int64_t inputs, int64_t outputs) {
  return new std::shared_ptr<Code>(new Code{
      reinterpret_cast<Run>(run), reinterpret_cast<Destroy>(destroy), reinterpret_cast<LastError>(last_error),
      reinterpret_cast<OperatorError>(operator_error), container, std::vector<int64_t>(layouts, layouts + length),
      static_cast<size_t>(inputs), static_cast<size_t>(outputs)});
}

// The same library for inputs and outputs of other sizes. Whoever has it keeps the first one open.
extern "C" void* torchport_resize(void* opened, const int64_t* layouts, int64_t length) {
  const std::shared_ptr<Code>& of = *static_cast<std::shared_ptr<Code>*>(opened);
  return new std::shared_ptr<Code>(new Code{
      of->run, of->destroy, of->last_error, of->operator_error, nullptr, std::vector<int64_t>(layouts, layouts + length),
      of->inputs, of->outputs, of});
}

// Frees the container once what runs has ended; what would run later fails.
extern "C" PyObject* torchport_close(void* opened) {
  std::shared_ptr<Code>* code = static_cast<std::shared_ptr<Code>*>(opened);
  Py_BEGIN_ALLOW_THREADS
  {
    std::lock_guard<std::mutex> alone((*code)->turn());
    if ((*code)->container != nullptr) {
      (*code)->destroy((*code)->container);
    }
    (*code)->container = nullptr;
  }
  Py_END_ALLOW_THREADS
  delete code;
  Py_RETURN_NONE;
}

// A list of results; an int, the position of an input that is not as expected; or a string: why the run failed.
// let_go: the list is emptied before the run, so that the code frees what nobody else holds after its last use.
extern "C" PyObject* torchport_call(void* opened, PyObject* inputs, int let_go) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<Code> code = *static_cast<std::shared_ptr<Code>*>(opened);
  std::vector<at::Tensor> given, results;
  Uses used;
  Layout layout = code->first();
  const Py_ssize_t count = PyList_GET_SIZE(inputs);
  for (Py_ssize_t i = 0; i < count; ++i, layout = layout.next()) {
    PyObject* item = PyList_GET_ITEM(inputs, i);
    if (!THPVariable_Check(item) || !has_values_of(THPVariable_Unpack(item), layout) ||
        !has_strides_of(THPVariable_Unpack(item), layout)) {
      return PyLong_FromSsize_t(i);
    }
    given.push_back(THPVariable_Unpack(item));
  }
  used.add(given);
  if (let_go && PyList_SetSlice(inputs, 0, count, nullptr) != 0) {
    PyErr_Clear();
  }
  std::string said;
  bool ran = false;
  Py_BEGIN_ALLOW_THREADS
  ran = code->call(given, results, said);
  Py_END_ALLOW_THREADS
  if (!ran) {
    return PyUnicode_DecodeUTF8(said.data(), static_cast<Py_ssize_t>(said.size()), "replace");
  }
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(results.size())));
  for (size_t i = 0; list && i < results.size(); ++i) {
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(results[i]));
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

// A tensor of the host's with the value at a slot or of a tensor: copied when somebody writes to it, or at once.
extern "C" PyObject* torchport_host_copy(PyObject* value) {
  HANDLE_TH_ERRORS
  const bool in_slot = Py_TYPE(value) == &slot_type;
  TORCH_CHECK_TYPE(in_slot || THPVariable_Check(value), "a tensor or a slot is needed");
  if (in_slot && !has_tensor(place_of(value))) {
    Py_RETURN_NONE;
  }
  const at::Tensor& tensor = in_slot ? place_of(value).box->tensor : THPVariable_Unpack(value);
  c10::NoGradGuard no_gradients;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  std::unique_lock<std::mutex> hold(uses_mutex);
  const bool used = (in_slot && place_of(value).box->uses.load() != 0) || Uses::by_any(storage);
  if (!used && tensor.numel() >= kLazyFrom &&
      (is_copied_on_write(tensor) || c10::impl::cow::has_simple_data_ptr(*storage))) {
    return THPVariable_Wrap(at::_lazy_clone(tensor));
  }
  hold.unlock();
  return THPVariable_Wrap(tensor.clone());
  END_HANDLE_TH_ERRORS
}

// Has the thread run a library: what says how it went, and the slots of the results. ``inputs``: tensors and slots;
// ``donated``, ``overwritten``, ``borrowed``: positions.
extern "C" PyObject* torchport_start(
    void* opened, PyObject* inputs, PyObject* donated, PyObject* overwritten, PyObject* borrowed, int threads) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<Code>& code = *static_cast<std::shared_ptr<Code>*>(opened);
  auto task = std::make_shared<Task>();
  task->code = code;
  task->threads = threads;
  task->overwritten = flags(overwritten, code->inputs);
  task->borrowed = flags(borrowed, code->outputs);
  const std::vector<bool> given_up = flags(donated, code->inputs);
  std::vector<at::Tensor> used;
  TORCH_CHECK_VALUE(static_cast<size_t>(PyList_GET_SIZE(inputs)) == code->inputs, "other inputs are needed");
  for (size_t i = 0; i < code->inputs; ++i) {
    PyObject* item = PyList_GET_ITEM(inputs, static_cast<Py_ssize_t>(i));
    if (Py_TYPE(item) == &slot_type) {
      const Place& place = place_of(item);
      if (has_tensor(place)) {
        used.push_back(place.box->tensor);
      }
      task->inputs.push_back({place, given_up[i]});
    } else {
      TORCH_CHECK_TYPE(THPVariable_Check(item), "a tensor or a slot is needed");
      auto box = std::make_shared<Box>();
      box->tensor = shallow_copy(THPVariable_Unpack(item));
      used.push_back(box->tensor);
      task->inputs.push_back({{std::move(box), nullptr}, given_up[i]});
    }
    ++task->inputs.back().box->uses;
  }
  task->uses->add(used);
  used.clear();
  THPObjectPtr slots(PyList_New(static_cast<Py_ssize_t>(code->outputs)));
  for (size_t i = 0; slots && i < code->outputs; ++i) {
    task->outputs.push_back(std::make_shared<Box>());
    Slot* slot = make<Slot>(slot_type);
    slot->place = {task->outputs.back(), task};
    PyList_SET_ITEM(slots.get(), static_cast<Py_ssize_t>(i), reinterpret_cast<PyObject*>(slot));
  }
  THPObjectPtr started(reinterpret_cast<PyObject*>(make<Started>(started_type)));
  reinterpret_cast<Started*>(started.get())->task = task;
  THPObjectPtr found(slots ? PyTuple_Pack(2, started.get(), slots.get()) : nullptr);
  if (found) {
    queue->add(std::move(task));
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}
