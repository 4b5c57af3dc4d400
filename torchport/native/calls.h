// Records of the calls that led from a node of the trie to its children, and how a call is compared with them. Part of
// follow.cpp.
#pragma once
#include "objects.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

namespace {

using namespace torchport;
using Values = c10::ArrayRef<c10::IValue>;

constexpr size_t kMostRecords = 8; // at one node
uint64_t followed = 0; // calls that were served without Python

// -- Python's side ----------------------------------------------------------------------------------------------
PyObject* threads; // the traces of the calling thread
PyTypeObject* trace_type;
PyObject* copies_under_grad; // trace.COPIES_UNDER_GRAD
long long leaf_base, span, checkpoint_every; // trie.LEAF, trie.SPAN, trace.CHECKPOINT_EVERY
PyObject* varying; // trie.FLOATS: what stands in a key for a scalar input, by its size
std::vector<double> limits; // trie.LIMITS

// The position in ``varying`` of the token for a finite float whose size matters.
// Twin of ``trace.keys.sized``.
uint32_t sized(double value) {
  const double size = std::fabs(value);
  if (size <= limits[0]) {
    return 0;
  }
  const auto at = std::lower_bound(limits.begin(), limits.end(), size) - limits.begin();
  return static_cast<uint32_t>(2 * at - (value > 0));
}

// The position of an object in ``varying``; -1 if it is no token.
long token_at(PyObject* part) {
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(varying); ++at) {
    if (PyTuple_GET_ITEM(varying, at) == part) {
      return static_cast<long>(at);
    }
  }
  return -1;
}

size_t hash_of(c10::ArrayRef<int64_t> numbers, size_t made = 0) {
  for (const int64_t number : numbers) {
    made = (made ^ static_cast<size_t>(number)) * 0x9E3779B97F4A7C15ull;
    made ^= made >> 29;
  }
  return made;
}

// For tables whose keys are lists of numbers.
struct HashOfNumbers {
  template <class Numbers>
  size_t operator()(const Numbers& numbers) const {
    return hash_of(numbers, numbers.size());
  }
};

// Holds Python's lock. PyTorch gives it up where Python calls an operator, so most often the thread has a state of
// Python's, which is taken up here without the look-ups of ``PyGILState_Ensure``.
class Gil {
 public:
  Gil() : state_(PyGILState_GetThisThreadState()) {
    if (state_ == nullptr) {
      made_ = PyGILState_Ensure();
    } else if (is_current(state_)) {
      is_held_ = true;
    } else {
      PyEval_RestoreThread(state_);
    }
  }
  ~Gil() {
    if (state_ == nullptr) {
      PyGILState_Release(made_);
    } else if (!is_held_) {
      PyEval_SaveThread();
    }
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  static bool is_current(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
    return PyThreadState_GetUnchecked() == state;
#else
    return _PyThreadState_UncheckedGet() == state;
#endif
  }

  PyThreadState* const state_;
  PyGILState_STATE made_ = PyGILState_UNLOCKED;
  bool is_held_ = false;
};

// What is known of a thread, all of it borrowed. It holds as long as the thread has Python's state, which a thread that
// Python did not start may get anew, and that state has the dictionary of ``threading.local``: where a thread ends, finalizers
// may run when the dictionary is gone.
struct ThisThread {
  PyObject* names = nullptr;
  uint64_t of_state = 0;
  const PyObject* locals = nullptr;
  PyObject *traces = nullptr, *trace = nullptr; // a dictionary of traces by index, and that of index 0: it stays there
  bool was_at_once = false; // whether the last operator was interpreted at once
};

thread_local ThisThread this_thread;

// What the calling thread has in ``threads``, by name. A dictionary, because a look-up in it that finds nothing raises no
// exception, which would take longer than the rest of the look-up.
THPObjectPtr of_this_thread() {
  ThisThread& known = this_thread;
  PyThreadState* const here = PyThreadState_Get();
  const uint64_t state = PyThreadState_GetID(here);
  if (known.names != nullptr && known.of_state == state && known.locals == here->dict) {
    return THPObjectPtr(Py_NewRef(known.names));
  }
  THPObjectPtr names(PyObject_GetAttr(threads, py_.n_dict));
  if (!names || !PyDict_CheckExact(names.get())) {
    PyErr_Clear();
    return THPObjectPtr();
  }
  known = {names.get(), state, here->dict};
  return names;
}

// An entry of a dictionary, borrowed; null without a Python error if there is none.
PyObject* entry(PyObject* names, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(names, name);
  if (found == nullptr && PyErr_Occurred()) {
    PyErr_Clear();
  }
  return found;
}

// The functions that end in an underscore give what is borrowed: a thread's traces live as long as the thread.

// A thread's trace of index 0; null if there is none yet, or while its operators are computed at once.
PyObject* recording_trace_(PyObject* of_thread) {
  PyObject* trace = of_thread != nullptr ? entry(of_thread, py_.n_trace) : nullptr;
  return trace != nullptr && Py_TYPE(trace) == trace_type ? trace : nullptr;
}

THPObjectPtr recording_trace(PyObject* of_thread) {
  return THPObjectPtr(Py_XNewRef(recording_trace_(of_thread)));
}

THPObjectPtr current_trace() {
  return recording_trace(of_this_thread().get());
}

void show(const at::Tensor& tensor); // unseen.h

// The tensor as a handle of index 0, a new reference; null for any other tensor.
THPObjectPtr handle_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return THPObjectPtr();
  }
  show(tensor);
  THPObjectPtr handle(THPVariable_Wrap(tensor));
  if (!handle) {
    PyErr_Clear();
  } else if (Py_TYPE(handle.get()) != py_.handle) {
    return THPObjectPtr();
  }
  return handle;
}

// Twin of ``trace.trace.Trace.holds``.
bool holds(PyObject* trace, long long value_id) {
  const long long base = integer(py_.base.of(trace));
  return base <= value_id && value_id < base + span;
}

PyObject* result_at(PyObject* node, uint32_t offset, bool many) {
  PyObject* ready = py_.ready.of(node);
  if (ready == nullptr || ready == Py_None || !many) {
    return ready;
  }
  if (PyList_CheckExact(ready)) {
    return offset < PyList_GET_SIZE(ready) ? PyList_GET_ITEM(ready, offset) : nullptr;
  }
  return PyTuple_CheckExact(ready) && offset < PyTuple_GET_SIZE(ready) ? PyTuple_GET_ITEM(ready, offset) : nullptr;
}

// -- records of calls --------------------------------------------------------------------------------------------
enum class Kind : uint8_t {
  Value, // the handle that an earlier node has ready
  ValueId, // a handle with this value id
  Leaf, // a value from before the trace, of this spec
  None,
  Wrapped, // a tensor that wraps a Python float, which is a scalar input
  Float, // a scalar input of the same size
  Filler, // a scalar input of the same size that is neither 0 nor 1
  Exact, // anything else: the same value
  List, // a list; its items come next
};

struct Expected {
  Kind kind;
  bool many = false; // Value: the node has several results
  // Value: the position among the node's results. List: the length. Exact: the position in ``Record::exact``. Float and
  // Filler: the position in ``varying``.
  uint32_t offset = 0;
  union {
    PyObject* object = nullptr; // Value: the node, borrowed, since later nodes keep earlier ones alive; Leaf: the spec
    long long value_id;
  };
};

bool same(const c10::IValue& one, const c10::IValue& other) {
  if (one.isNone() || other.isNone()) {
    return one.isNone() && other.isNone();
  }
  if (one.isInt()) {
    return other.isInt() && one.toInt() == other.toInt();
  }
  if (one.isBool()) {
    return other.isBool() && one.toBool() == other.toBool();
  }
  if (one.isDouble()) {
    const double a = one.toDouble(), b = other.isDouble() ? other.toDouble() : 0.0;
    return other.isDouble() && std::memcmp(&a, &b, sizeof a) == 0; // 0.0 and -0.0 differ, NaN equals itself
  }
  if (one.isDevice()) {
    return other.isDevice() && one.toDevice() == other.toDevice();
  }
  if (one.isString()) {
    return other.isString() && one.toStringRef() == other.toStringRef();
  }
  if (one.isList() && other.isList()) {
    const Values a = one.toListRef(), b = other.toListRef();
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same);
  }
  if (one.isTensor() && other.isTensor()) { // tensors that wrap Python integers
    const at::Tensor &a = one.toTensor(), &b = other.toTensor();
    if (!a.defined() || !b.defined() || a.scalar_type() != b.scalar_type() || !a.is_cpu() || !b.is_cpu() ||
        !a.unsafeGetTensorImpl()->is_wrapped_number() || !b.unsafeGetTensorImpl()->is_wrapped_number()) {
      return false;
    }
    if (a.scalar_type() == at::kLong) {
      return *a.const_data_ptr<int64_t>() == *b.const_data_ptr<int64_t>();
    }
    return a.scalar_type() == at::kBool && *a.const_data_ptr<bool>() == *b.const_data_ptr<bool>();
  }
  return false;
}

struct Kernel;

// Where the memory lies that following a record reads: lines of the processor's cache.
class Lines {
 public:
  void add(const void* from, size_t lines = 1) { // none at address 0: to look for its page takes long
    for (size_t line = 0; from != nullptr && line < lines && count_ < each_.size(); ++line) {
      each_[count_++] = static_cast<const char*>(from) + 64 * line;
    }
  }
  void fetch() const {
    for (size_t at = 0; at < count_; ++at) {
      __builtin_prefetch(each_[at]);
    }
  }

 private:
  size_t count_ = 0;
  std::array<const void*, 15> each_;
};

struct Record;
Record* latest = nullptr; // the one that was followed last

struct Record {
  const Kernel* kernel;
  PyObject* child; // borrowed: the parent holds its children as long as its records
  std::vector<Expected> expected;
  std::vector<c10::IValue> exact;
  // The record that was followed after this one, and where what following it reads lies. A program's own work between
  // two operators drives that from the processor's cache, and to wait for it was a third of the time of a call. Nothing
  // is read there, so what has been freed meanwhile does no harm.
  const Record* next = nullptr;
  Lines ahead;

  // Called when this record is followed. ``lines``: returns what was read for that.
  template <class Read>
  void came(const Read& lines) {
    if (latest != nullptr && latest->next != this) {
      latest->next = this;
      latest->ahead = lines();
    }
    latest = this;
    ahead.fetch();
  }

  ~Record() {
    if (latest == this) {
      latest = nullptr;
    }
    for (const Expected& one : expected) {
      if (one.kind == Kind::Leaf) {
        Py_XDECREF(one.object);
      }
    }
  }
};

// What is known of paths that are interpreted and begin at a node, by a hash of their first call (openings.h). Flat, since
// a loop whose sizes grow adds one in each round: what is kept of each would lie between the memory of their values.
using Openings = ska::flat_hash_map<size_t, PyObject*>;

// The records of a node, as a Python object in its slot.
struct Records {
  PyObject_HEAD
  std::vector<std::unique_ptr<Record>>* list;
  Openings* openings;
};

void free_records(PyObject* self) {
  delete reinterpret_cast<Records*>(self)->list;
  for (const auto& opening : *reinterpret_cast<Records*>(self)->openings) {
    Py_DECREF(opening.second);
  }
  delete reinterpret_cast<Records*>(self)->openings;
  PyObject_Free(self);
}

PyTypeObject records_type = {
    .ob_base = {PyObject_HEAD_INIT(nullptr)},
    .tp_name = "torchport.Records",
    .tp_basicsize = sizeof(Records),
    .tp_dealloc = free_records,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

Records* records_of(PyObject* node, bool make = false) {
  PyObject*& held = py_.records.of(node);
  if (held != nullptr && Py_TYPE(held) == &records_type) {
    return reinterpret_cast<Records*>(held);
  }
  if (!make) {
    return nullptr;
  }
  Records* made = PyObject_New(Records, &records_type);
  if (made == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  made->list = new std::vector<std::unique_ptr<Record>>();
  made->openings = new Openings();
  Py_XDECREF(std::exchange(held, reinterpret_cast<PyObject*>(made)));
  return made;
}

// -- comparing -----------------------------------------------------------------------------------------------------
struct NewLeaf {
  THPObjectPtr handle;
  THPObjectPtr value;
  bool fresh; // copied from the host, and not used by a trace yet
};

// Another handle of a leaf's value, and the leaf's value id.
struct Alias {
  THPObjectPtr handle;
  THPObjectPtr value_id;
};

// What a call adds to its trace.
struct Additions {
  c10::SmallVector<NewLeaf, 4> leaves;
  c10::SmallVector<Alias, 1> aliases;
  c10::SmallVector<double, 4> scalar_inputs;
};

bool is_new_leaf(PyObject* trace, const at::Tensor& tensor, PyObject* spec, Additions& added) {
  NewLeaf leaf{handle_of(tensor), THPObjectPtr(), false};
  if (!leaf.handle || value_id_of(leaf.handle.get()) != -1) {
    return false;
  }
  leaf.value = attribute(leaf.handle.get(), py_.n_value);
  THPObjectPtr held(attribute(leaf.handle.get(), py_.n_spec)), fresh(attribute(leaf.handle.get(), py_.n_fresh));
  leaf.fresh = fresh.get() == Py_True;
  if (!leaf.value || leaf.value.get() == Py_None || held.get() != spec ||
      py_.info.of(leaf.value.get()) != py_.runtime.of(trace)) {
    return false;
  }
  added.leaves.push_back(std::move(leaf));
  return true;
}

// Whether a tensor has this value id, or will have it once ``added`` is part of the trace.
bool has_value_id(PyObject* trace, const at::Tensor& tensor, long long expected, Additions& added) {
  THPObjectPtr handle = handle_of(tensor);
  const long long value_id = handle ? value_id_of(handle.get()) : -2;
  if (value_id != -1) {
    return value_id == expected;
  }
  PyObject* leaves = py_.leaves.of(trace);
  const long long known = PyList_GET_SIZE(leaves);
  const long long position = expected - integer(py_.base.of(trace)) - leaf_base;
  if (position < 0 || position >= known + static_cast<long long>(added.leaves.size())) {
    return false;
  }
  if (position >= known) { // a new leaf that the call passes a second time
    return added.leaves[position - known].handle.get() == handle.get();
  }
  PyObject* leaf = PyList_GET_ITEM(leaves, position);
  THPObjectPtr value(attribute(leaf, py_.n_value)), spec(attribute(leaf, py_.n_spec));
  THPObjectPtr mine(attribute(handle.get(), py_.n_value)), like(attribute(handle.get(), py_.n_spec)),
      fresh(attribute(handle.get(), py_.n_fresh));
  if (leaf == handle.get() || !value || value.get() == Py_None || mine.get() != value.get() ||
      like.get() != spec.get() || fresh.get() != Py_False) {
    return false;
  }
  added.aliases.push_back({std::move(handle), THPObjectPtr(PyLong_FromLongLong(expected))});
  return true;
}

// Whether an argument matches the next one of a record. New leaves, aliases and scalar inputs go to ``added``.
bool fits(
    PyObject* trace, const Record& record, const Expected*& expected, const c10::IValue& given, Additions& added) {
  const Expected& one = *expected++;
  switch (one.kind) {
    case Kind::Value: {
      if (!given.isTensor()) {
        return false;
      }
      PyObject* ready = result_at(one.object, one.offset, one.many);
      return ready != nullptr && ready != Py_None &&
          THPVariable_Unpack(ready).unsafeGetTensorImpl() == given.unsafeToTensorImpl();
    }
    case Kind::ValueId:
      return given.isTensor() && has_value_id(trace, given.toTensor(), one.value_id, added);
    case Kind::Leaf:
      return given.isTensor() && is_new_leaf(trace, given.toTensor(), one.object, added);
    case Kind::None:
      return given.isNone() || (given.isTensor() && !given.toTensor().defined());
    case Kind::Wrapped: {
      if (!given.isTensor()) {
        return false;
      }
      const at::Tensor& tensor = given.toTensor();
      if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->is_wrapped_number() || !tensor.is_cpu() ||
          tensor.scalar_type() != at::kDouble) {
        return false;
      }
      added.scalar_inputs.push_back(*tensor.const_data_ptr<double>());
      return std::isfinite(added.scalar_inputs.back());
    }
    case Kind::Float:
    case Kind::Filler: {
      if (!given.isDouble()) {
        return false;
      }
      const double value = given.toDouble();
      added.scalar_inputs.push_back(value);
      return std::isfinite(value) && sized(value) == one.offset && !(one.kind == Kind::Filler && (value == 0.0 || value == 1.0));
    }
    case Kind::Exact:
      return same(record.exact[one.offset], given);
    case Kind::List: {
      if (!given.isList()) {
        return false;
      }
      const Values items = given.toListRef();
      if (items.size() != one.offset) {
        return false;
      }
      for (const c10::IValue& item : items) {
        if (!fits(trace, record, expected, item, added)) {
          return false;
        }
      }
      return true;
    }
  }
  return false;
}

// -- adding to the trace -------------------------------------------------------------------------------------------
void dict_remove(PyObject* dict, PyObject* object) {
  THPObjectPtr name(PyLong_FromVoidPtr(object));
  if (!name || PyDict_DelItem(dict, name.get()) != 0) {
    PyErr_Clear();
  }
}

// Insert an object's address with a value id; false if the address was there already.
bool dict_insert(PyObject* dict, PyObject* object, PyObject* value_id) {
  THPObjectPtr name(PyLong_FromVoidPtr(object));
  return name && PyDict_GetItemWithError(dict, name.get()) == nullptr && !PyErr_Occurred() &&
      PyDict_SetItem(dict, name.get(), value_id) == 0;
}

void set(PyObject*& slot, PyObject* value) {
  Py_INCREF(value);
  Py_XDECREF(std::exchange(slot, value));
}

void note_fresh(PyObject* trace, Additions& added) {
  for (NewLeaf& leaf : added.leaves) {
    if (!leaf.fresh) {
      continue;
    }
    if (PyObject_SetAttr(leaf.handle.get(), py_.n_fresh, Py_False) != 0) {
      PyErr_Clear();
    }
    set(py_.fresh.of(trace), Py_True);
    if (!at::GradMode::is_enabled()) {
      set(py_.copies.of(trace), copies_under_grad);
    }
  }
}

// Make the call's new leaves leaves of the trace. On failure the trace is as it was before.
// Twin of ``trace.keys.leaf``.
bool add_leaves(PyObject* trace, Additions& added) {
  if (added.leaves.empty()) {
    return true;
  }
  PyObject *leaves = py_.leaves.of(trace), *known = py_.leaf_ids.of(trace);
  const Py_ssize_t before = PyList_GET_SIZE(leaves);
  const long long first = integer(py_.base.of(trace)) + leaf_base + before;
  size_t done = 0;
  for (NewLeaf& leaf : added.leaves) {
    THPObjectPtr value_id(PyLong_FromLongLong(first + static_cast<long long>(done)));
    if (!value_id || !dict_insert(known, leaf.handle.get(), value_id.get())) {
      break;
    }
    if (!dict_insert(known, leaf.value.get(), value_id.get())) {
      dict_remove(known, leaf.handle.get());
      break;
    }
    ++done;
    if (PyObject_SetAttr(leaf.handle.get(), py_.n_value_id, value_id.get()) != 0 ||
        PyList_Append(leaves, leaf.handle.get()) != 0) {
      break;
    }
  }
  if (done == added.leaves.size() && !PyErr_Occurred()) {
    note_fresh(trace, added);
    return true;
  }
  PyErr_Clear();
  THPObjectPtr none(PyLong_FromLong(-1));
  for (size_t at = 0; at < done; ++at) {
    dict_remove(known, added.leaves[at].value.get());
    dict_remove(known, added.leaves[at].handle.get());
    if (PyObject_SetAttr(added.leaves[at].handle.get(), py_.n_value_id, none.get()) != 0) {
      PyErr_Clear();
    }
  }
  PyList_SetSlice(leaves, before, PyList_GET_SIZE(leaves), nullptr);
  return false;
}

void add_aliases(PyObject* trace, Additions& added) {
  for (Alias& alias : added.aliases) {
    if (!alias.value_id || PyObject_SetAttr(alias.handle.get(), py_.n_value_id, alias.value_id.get()) != 0 ||
        PyList_Append(py_.made.of(trace), alias.handle.get()) != 0) {
      throw python_error();
    }
  }
}

// Twin of ``trace.keys.scalar``.
void add_scalar_inputs(PyObject* trace, const Additions& added) {
  for (const double value : added.scalar_inputs) {
    THPObjectPtr scalar_input(PyFloat_FromDouble(value));
    if (!scalar_input || PyList_Append(py_.scalar_inputs.of(trace), scalar_input.get()) != 0) {
      throw python_error();
    }
  }
}

} // namespace
