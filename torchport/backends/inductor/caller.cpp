// Calls compiled libraries with tensors: at once, without Python's global lock while the code runs, or in order on a
// thread that needs no Python. Per tensor this costs a tenth of what ctypes and capsules cost.
//
// The thread must never wait for Python's lock, which a program that traces gives up every few milliseconds. PyTorch
// takes it when the last but one holder of a tensor lets go that Python has looked at. So what the thread holds are
// tensors that Python has never seen: results of its own, and shallow copies.
#include <Python.h>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using Run = int32_t (*)(void*, void**, size_t, void**, size_t, void*, void*);
using Destroy = int32_t (*)(void*);
using LastError = int32_t (*)(const char**); // of the library
using OperatorError = const char* (*)(); // of PyTorch
using Clock = std::chrono::steady_clock;

// A tensor's dtype, number of dimensions, sizes and strides, one after the other.
struct Layout {
  const int64_t* at;
  int64_t dtype() const { return at[0]; }
  int64_t dims() const { return at[1]; }
  at::IntArrayRef sizes() const { return {at + 2, static_cast<size_t>(dims())}; }
  at::IntArrayRef strides() const { return {at + 2 + dims(), static_cast<size_t>(dims())}; }
  Layout next() const { return {at + 2 + 2 * dims()}; }
};

bool has_values_of(const at::Tensor& tensor, Layout expected) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_conj() &&
      !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
      static_cast<int64_t>(tensor.scalar_type()) == expected.dtype() && tensor.sizes() == expected.sizes();
}

bool has_strides_of(const at::Tensor& tensor, Layout expected) {
  for (int64_t d = 0; d < expected.dims(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected.strides()[d]) {
      return false;
    }
  }
  return true;
}

at::Tensor copy_with(const at::Tensor& tensor, Layout expected) {
  return at::empty_strided(expected.sizes(), expected.strides(), tensor.options()).copy_(tensor);
}

// The same memory as another tensor, which Python does not know.
at::Tensor shallow_copy(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

// A compiled library.
struct Code {
  Run run;
  Destroy destroy;
  LastError last_error;
  OperatorError operator_error;
  void* container; // null once closed
  std::vector<int64_t> layouts; // of inputs and outputs
  size_t inputs, outputs;
  std::mutex running;

  Layout first() const { return {layouts.data()}; }

  // What went wrong in the last call of this thread.
  std::string error() const {
    const char* said = nullptr;
    last_error(&said);
    std::string message = said == nullptr ? "no message" : said;
    if (operator_error != nullptr && message.find("API call failed at") != std::string::npos) {
      const char* own = operator_error();
      message = own == nullptr || *own == 0 ? message : own;
    }
    return message;
  }

  // Whether it ran. Takes the inputs; the code frees each after its last use, if nobody else holds it.
  bool call(std::vector<at::Tensor>& given, std::vector<at::Tensor>& results, std::string& said) {
    std::lock_guard<std::mutex> alone(running);
    if (container == nullptr) {
      said = "it was destroyed";
      return false;
    }
    std::vector<void*> handles, outcomes(outputs, nullptr);
    for (at::Tensor& tensor : given) {
      handles.push_back(new at::Tensor(std::move(tensor)));
    }
    given.clear();
    if (run(container, handles.data(), handles.size(), outcomes.data(), outputs, nullptr, nullptr) != 0) {
      said = error();
      return false;
    }
    for (void* outcome : outcomes) {
      results.push_back(*static_cast<at::Tensor*>(outcome));
    }
    // The code gives one handle for outputs that are the same buffer.
    std::sort(outcomes.begin(), outcomes.end());
    outcomes.erase(std::unique(outcomes.begin(), outcomes.end()), outcomes.end());
    for (void* outcome : outcomes) {
      delete static_cast<at::Tensor*>(outcome);
    }
    return true;
  }
};

// -- the thread -------------------------------------------------------------------------------------------------
// Where a tensor is, or will be once the run has ended whose result it is.
struct Box {
  at::Tensor tensor;
};

enum class Outcome { none, well, failed, not_run };

struct Task;

// A place, and the run that fills it; without one the tensor is there.
struct Place {
  std::shared_ptr<Box> box;
  std::shared_ptr<Task> from;
};

bool has_tensor(const Place& place);

struct Input : Place {
  bool donated;
};

// One run. Its inputs and outputs are the thread's until it has an outcome.
struct Task {
  std::shared_ptr<Code> code;
  std::vector<Input> inputs;
  std::vector<std::shared_ptr<Box>> outputs;
  std::vector<bool> overwritten, borrowed; // which inputs the code writes to; which outputs must be copied
  int threads;
  std::string error;
  double seconds = 0;
  std::atomic<Outcome> outcome{Outcome::none};

  Outcome perform() {
    if (at::get_num_threads() != threads) {
      at::set_num_threads(threads);
    }
    Layout layout = code->first();
    for (size_t at = 0; at < inputs.size(); ++at, layout = layout.next()) {
      if (!has_tensor(inputs[at])) {
        error = "an argument has no value, because its own computation failed";
        return Outcome::not_run;
      }
      if (!has_values_of(inputs[at].box->tensor, layout)) {
        error = "input " + std::to_string(at) + " is not as it should be";
        return Outcome::not_run;
      }
    }
    const auto start = Clock::now();
    std::vector<at::Tensor> given, results;
    layout = code->first();
    for (size_t at = 0; at < inputs.size(); ++at, layout = layout.next()) {
      const at::Tensor& tensor = inputs[at].box->tensor;
      if (!has_strides_of(tensor, layout) || (overwritten[at] && !inputs[at].donated)) {
        given.push_back(copy_with(tensor, layout));
      } else {
        given.push_back(inputs[at].donated ? std::move(inputs[at].box->tensor) : tensor);
      }
    }
    const bool ran = code->call(given, results, error);
    for (size_t at = 0; ran && at < results.size(); ++at, layout = layout.next()) {
      const bool as_it_is = !borrowed[at] && has_strides_of(results[at], layout);
      outputs[at]->tensor = as_it_is ? std::move(results[at]) : copy_with(results[at], layout);
    }
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return ran ? Outcome::well : Outcome::failed;
  }
};

bool has_tensor(const Place& place) {
  return place.box && (!place.from || place.from->outcome.load() == Outcome::well) && place.box->tensor.defined();
}

// What is to run, in order, and the thread. Never destroyed: the thread may wait in it when the process ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed, ended;
  std::deque<std::shared_ptr<Task>> tasks;
  bool runs = false, has_thread = false;
  std::unique_ptr<at::ThreadLocalState> plain; // of a thread that has done nothing but this

  void add(std::shared_ptr<Task> task) {
    {
      std::lock_guard<std::mutex> hold(mutex);
      tasks.push_back(std::move(task));
      if (!has_thread) {
        std::thread([this] { work(); }).detach();
        has_thread = true;
      }
    }
    changed.notify_one();
  }

  // Run the next task, which must be there, while nothing runs.
  void run_next(std::unique_lock<std::mutex>& hold) {
    std::shared_ptr<Task> task = std::move(tasks.front());
    tasks.pop_front();
    runs = true;
    hold.unlock();
    Outcome outcome = Outcome::failed;
    try {
      outcome = task->perform();
    } catch (const std::exception& raised) {
      task->error = raised.what();
    }
    if (outcome != Outcome::not_run) { // else what was donated is given back
      task->inputs.clear();
    }
    task->outputs.clear();
    hold.lock();
    runs = false;
    task->outcome.store(outcome);
    ended.notify_all();
    if (!tasks.empty()) {
      changed.notify_one();
    }
  }

  void work() {
    pthread_setname_np(pthread_self(), "torchport");
    at::NoGradGuard no_gradients;
    std::unique_lock<std::mutex> hold(mutex);
    plain = std::make_unique<at::ThreadLocalState>();
    for (;;) {
      changed.wait(hold, [this] { return !runs && !tasks.empty(); });
      run_next(hold);
    }
  }

  // Whether a task has ended, after a while. What the thread has not begun is done here: waking it takes longer.
  bool wait(const Task& task) {
    const auto has_ended = [&task] { return task.outcome.load() != Outcome::none; };
    std::unique_lock<std::mutex> hold(mutex);
    while (!has_ended() && !runs && !tasks.empty() && plain) {
      at::ThreadLocalStateGuard guard(*plain);
      run_next(hold);
    }
    return ended.wait_for(hold, std::chrono::milliseconds(100), has_ended);
  }
};

Queue* queue = new Queue;

// A fork waits until nothing runs; the child has no thread.
const int at_fork = pthread_atfork(nullptr, nullptr, [] { queue = new Queue; });

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
    Py_BEGIN_ALLOW_THREADS
    ended = queue->wait(task);
    Py_END_ALLOW_THREADS
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

// Once, before anything else.
extern "C" PyObject* torchport_caller_start() {
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

// Frees the container once what runs has ended; what would run later fails.
extern "C" PyObject* torchport_close(void* opened) {
  std::shared_ptr<Code>* code = static_cast<std::shared_ptr<Code>*>(opened);
  Py_BEGIN_ALLOW_THREADS
  {
    std::lock_guard<std::mutex> alone((*code)->running);
    (*code)->destroy((*code)->container);
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
  TORCH_CHECK_VALUE(static_cast<size_t>(PyList_GET_SIZE(inputs)) == code->inputs, "other inputs are needed");
  for (size_t i = 0; i < code->inputs; ++i) {
    PyObject* item = PyList_GET_ITEM(inputs, static_cast<Py_ssize_t>(i));
    if (Py_TYPE(item) == &slot_type) {
      task->inputs.push_back({place_of(item), given_up[i]});
    } else {
      TORCH_CHECK_TYPE(THPVariable_Check(item), "a tensor or a slot is needed");
      auto box = std::make_shared<Box>(Box{shallow_copy(THPVariable_Unpack(item))});
      task->inputs.push_back({{std::move(box), nullptr}, given_up[i]});
    }
  }
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
