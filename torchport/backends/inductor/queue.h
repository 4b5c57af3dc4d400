// The thread that runs compiled libraries, what it is given, and what compiled code may be given.
//
// The thread must never wait for Python's lock, which a program that traces gives up every few milliseconds. PyTorch
// takes it when the last but one holder of a tensor lets go that Python has looked at. So what the thread holds are
// tensors that Python has never seen: results of its own, and shallow copies.
#pragma once
#include <Python.h>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>
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
#include <optional>
#include <string>
#include <thread>
#include <utility>
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

// -- copies on write --------------------------------------------------------------------------------------------
// What the host gets of a value is copied when somebody writes to it (PyTorch's copy-on-write). Compiled code asks for
// memory that it may write to, also where it only reads, and PyTorch then makes the copy; two threads that do so at once
// free the memory twice. So what runs use is never such a storage: it is made an ordinary one before, with Python's lock
// held, and while it is used the host gets copies that are made at once.
constexpr int64_t kLazyFrom = 1024; // elements; fewer are copied as fast

bool is_copied_on_write(const at::Tensor& tensor) {
  return c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr());
}

std::mutex uses_mutex;

// The storages that a run uses, from when Python's lock is still held until the run has ended. There are few runs at a
// time, and each uses many storages: to note one is to append to a list, and to ask for one is to look through all.
class Uses {
 public:
  Uses() {
    std::lock_guard<std::mutex> hold(uses_mutex);
    next_ = std::exchange(first_, this);
  }
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;
  ~Uses() {
    std::lock_guard<std::mutex> hold(uses_mutex);
    Uses** place = &first_;
    while (*place != nullptr && *place != this) {
      place = &(*place)->next_;
    }
    if (*place == this) { // else the process was forked meanwhile
      *place = next_;
    }
  }
  // In a forked child: some are on the stacks of threads that are not there, and their memory is used again.
  static void forget_all() {
    new (&uses_mutex) std::mutex; // another thread may have held it
    first_ = nullptr;
  }
  // Call it with Python's lock held. The run holds the tensors, or others with their memory.
  void add(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.has_storage() && is_copied_on_write(tensor)) {
        tensor.storage().unsafeGetStorageImpl()->mutable_data();
      }
    }
    std::lock_guard<std::mutex> hold(uses_mutex);
    used_.reserve(used_.size() + tensors.size());
    for (const at::Tensor& tensor : tensors) {
      if (tensor.has_storage()) {
        used_.push_back(tensor.storage().unsafeGetStorageImpl());
      }
    }
  }
  // Whether the storage is an ordinary one, which the run uses from now on.
  bool add_ordinary(const at::Tensor& tensor) {
    std::lock_guard<std::mutex> hold(uses_mutex);
    if (!tensor.has_storage() || is_copied_on_write(tensor)) {
      return false;
    }
    used_.push_back(tensor.storage().unsafeGetStorageImpl());
    return true;
  }
  // Whether a run uses a storage. Call it with ``uses_mutex`` held.
  static bool by_any(c10::StorageImpl* storage) {
    for (const Uses* one = first_; one != nullptr; one = one->next_) {
      if (std::find(one->used_.begin(), one->used_.end(), storage) != one->used_.end()) {
        return true;
      }
    }
    return false;
  }

 private:
  static inline Uses* first_ = nullptr; // of all there are
  Uses* next_;
  std::vector<c10::StorageImpl*> used_;
};

// A compiled library.
struct Code {
  Run run;
  Destroy destroy;
  LastError last_error; // null before PyTorch 2.13, whose libraries do not say why
  OperatorError operator_error;
  void* container; // null once closed, and where it is another's
  std::vector<int64_t> layouts; // of inputs and outputs
  size_t inputs, outputs;
  std::shared_ptr<Code> of; // the same library for other sizes, whose container this one runs
  std::mutex running;

  std::mutex& turn() { return of ? of->running : running; }
  Layout first() const { return {layouts.data()}; }

  // What went wrong in the last call of this thread.
  std::string error() const {
    if (last_error == nullptr) {
      return "PyTorch before 2.13 does not say why; it may have printed it";
    }
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
    std::lock_guard<std::mutex> alone(turn());
    void* const own = of ? of->container : container;
    if (own == nullptr) {
      said = "it was destroyed";
      return false;
    }
    std::vector<void*> handles, outcomes(outputs, nullptr);
    handles.reserve(given.size());
    for (at::Tensor& tensor : given) {
      handles.push_back(new at::Tensor(std::move(tensor)));
    }
    given.clear();
    // Nothing here is differentiated, and nobody asks what is a view of what: PyTorch need not note it.
    const at::AutoDispatchBelowADInplaceOrView values_are_no_views;
    if (run(own, handles.data(), handles.size(), outcomes.data(), outputs, nullptr, nullptr) != 0) {
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
  std::atomic<int> uses{0}; // by runs, also before the tensor is there
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
  std::unique_ptr<Uses> uses = std::make_unique<Uses>();
  int threads;
  std::string error;
  bool was_given = false; // the inputs, to the code
  double seconds = 0;
  std::atomic<Outcome> outcome{Outcome::none};

  // Called once, when nothing uses the inputs any more.
  void let_go() {
    uses.reset();
    for (const Input& input : inputs) {
      --input.box->uses;
    }
  }

  Outcome perform() {
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
      const bool as_it_is = has_strides_of(tensor, layout) &&
          (inputs[at].donated || (!overwritten[at] && uses->add_ordinary(tensor)));
      given.push_back(as_it_is ? tensor : copy_with(tensor, layout));
    }
    was_given = true;
    for (const Input& input : inputs) {
      if (input.donated) { // the code may free it after its last use
        input.box->tensor.reset();
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

// Has the program's main thread call this as soon as it can, once something has ended.
PyObject* when_ended = nullptr;
std::atomic<bool> asked{false};

int call_when_ended(void*) {
  asked.store(false);
  THPObjectPtr done(PyObject_CallNoArgs(when_ended));
  if (!done) {
    PyErr_WriteUnraisable(when_ended);
  }
  return 0;
}

// What sets the calling thread's number of threads: OpenMP's, and MKL's own. PyTorch's function would also have every
// thread that begins later take that number. Null where there is none.
void (*set_of_openmp)(int) = nullptr;
int (*set_of_mkl)(int) = nullptr;

void compute_on(int threads) {
  if (at::get_num_threads() == threads) { // asked first: in a new thread this takes the number that PyTorch is set to
    return;
  }
  if (set_of_openmp == nullptr) {
    at::set_num_threads(threads);
    return;
  }
  set_of_openmp(threads);
  if (set_of_mkl != nullptr) {
    set_of_mkl(threads);
  }
}

// What is to run, in order, and the thread. Never destroyed: the thread may wait in it when the process ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed, ended;
  std::deque<std::shared_ptr<Task>> tasks;
  bool runs = false, has_thread = false;
  std::atomic<const at::ThreadLocalState*> plain{nullptr}; // of a thread that has done nothing but this

  void add(std::shared_ptr<Task> task) {
    {
      std::lock_guard<std::mutex> hold(mutex);
      if (!has_thread) {
        std::thread([this] { work(); }).detach();
        has_thread = true;
      }
      tasks.push_back(std::move(task));
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
      outcome = task->was_given ? Outcome::failed : Outcome::not_run;
    }
    task->let_go();
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
    hold.unlock();
    if (when_ended != nullptr && !asked.exchange(true) && Py_AddPendingCall(call_when_ended, nullptr) != 0) {
      asked.store(false); // too much is to be called
    }
    task.reset(); // it may be the last to hold it, and what it holds may need Python's lock
    hold.lock();
  }

  void work() {
    pthread_setname_np(pthread_self(), "torchport");
    c10::NoGradGuard no_gradients;
    plain.store(new at::ThreadLocalState);
    std::unique_lock<std::mutex> hold(mutex);
    for (;;) {
      changed.wait(hold, [this] { return !runs && !tasks.empty(); });
      compute_on(tasks.front()->threads);
      run_next(hold);
    }
  }

  // Whether a task has ended, after a while. ``help``: what the thread has not begun is done here, since waking it takes
  // longer. Then the calling thread must be in the state of ``plain``.
  bool wait(const Task& task, bool help) {
    const auto has_ended = [&task] { return task.outcome.load() != Outcome::none; };
    std::unique_lock<std::mutex> hold(mutex);
    const int threads = at::get_num_threads();
    while (help && !has_ended() && !runs && !tasks.empty() && tasks.front()->threads == threads) {
      run_next(hold);
    }
    return ended.wait_for(hold, std::chrono::milliseconds(100), has_ended);
  }
};

Queue* queue = new Queue;

// A fork waits until nothing runs; the child has no thread.
const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  queue = new Queue;
  asked.store(false);
  Uses::forget_all();
});

} // namespace
