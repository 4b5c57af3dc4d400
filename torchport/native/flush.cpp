// Loops over all handles of a trace that is flushed, over all gradients when an optimizer begins its step, and over the
// random numbers of an operator that is interpreted.
#include "objects.h"
#include "random.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/variable.h>

namespace {

using namespace torchport;

PyObject* python_release; // pool.release
Slot job_of_future; // ``Future.job``

// Whether a handle has references besides ``counted`` ones from Python and the one of its node's pool.
bool is_held(PyObject* handle, Py_ssize_t counted) {
  Py_ssize_t holders = Py_REFCNT(handle) - counted;
  if (holders == 1) {
    THPObjectPtr home(attribute(handle, py_.n_home));
    holders -= home.get() != Py_None;
  }
  return holders > 0 || THPVariable_Unpack(handle).use_count() > 1;
}

// Whether a handle of a pool has references besides the pool's.
bool is_held_besides_pool(PyObject* handle) {
  return Py_REFCNT(handle) > 1 || THPVariable_Unpack(handle).use_count() > 1;
}

// A new handle of a node's result, in no pool.
// Twin of ``trace.pool.new_handle``.
PyObject* new_handle(PyObject* node, Py_ssize_t offset) {
  PyObject* templates = py_.templates.of(node);
  TORCH_CHECK(PyTuple_CheckExact(templates) && offset < PyTuple_GET_SIZE(templates), "the node has no such result");
  const at::Tensor& like = THPVariable_Unpack(PyTuple_GET_ITEM(templates, offset));
  THPObjectPtr made(handle_like(like));
  THPObjectPtr value_id(PyLong_FromLongLong(integer(py_.first_id.of(node)) + offset));
  if (!made || !value_id || PyObject_SetAttr(made.get(), py_.n_value_id, value_id.get()) != 0) {
    throw python_error();
  }
  return made.release();
}

// Take a handle out of its node's pool, which gets a new handle in its place.
// Twin of ``trace.pool.release``.
void release(PyObject* handle) {
  THPObjectPtr home(attribute(handle, py_.n_home));
  if (!home || home.get() == Py_None) {
    return;
  }
  PyObject* node = PyTuple_GET_ITEM(home.get(), 0);
  const Py_ssize_t offset = integer(PyTuple_GET_ITEM(home.get(), 1));
  THPObjectPtr made(new_handle(node, offset));
  if (PyObject_SetAttr(made.get(), py_.n_home, home.get()) != 0 ||
      PyObject_SetAttr(handle, py_.n_home, Py_None) != 0) {
    throw python_error();
  }
  PyObject*& ready = py_.ready.of(node);
  if (ready == handle) {
    Py_DECREF(std::exchange(ready, made.release()));
    return;
  }
  // Several results are in a list or tuple. It is changed in place unless Python code holds it, too.
  if (Py_REFCNT(ready) != 1) {
    THPObjectPtr list(PySequence_List(ready));
    PyObject* copy = list ? PyObject_CallOneArg(reinterpret_cast<PyObject*>(Py_TYPE(ready)), list.get()) : nullptr;
    if (copy == nullptr) {
      throw python_error();
    }
    Py_DECREF(std::exchange(ready, copy));
  }
  PyObject** items = PySequence_Fast_ITEMS(ready);
  Py_DECREF(std::exchange(items[offset], made.release()));
}

// Whether a tensor or storage has one owner. Once Python has seen it, a Python object lives as long and holds a
// reference. That reference does not count, unless Python code holds the Python object.
template <class Held, class Wrap>
bool is_alone(const Held& held, Wrap wrap) {
  if (held.use_count() != 2) {
    return held.use_count() == 1;
  }
  THPObjectPtr seen(wrap());
  return seen && Py_REFCNT(seen.get()) == 2 && held.use_count() == 2; // references: the C++ object's, and ``seen``
}

} // namespace

extern "C" PyObject* torchport_flush_start(
    PyObject* handle, PyObject* trace, PyObject* node, PyObject* data, PyObject* future, PyObject* of_release) {
  HANDLE_TH_ERRORS
  if (!look(handle, trace, node, data) || !find_slot(future, "job", job_of_future)) {
    return nullptr;
  }
  Py_INCREF(of_release);
  python_release = of_release;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The handles of a list that have references besides those of the list and of their nodes' pools.
// Twin of ``trace.pool.alive``.
extern "C" PyObject* torchport_alive(PyObject* handles) {
  HANDLE_TH_ERRORS
  THPObjectPtr alive(PyList_New(0));
  for (Py_ssize_t at = 0; alive && at < PyList_GET_SIZE(handles); ++at) {
    PyObject* handle = PyList_GET_ITEM(handles, at);
    if (is_held(handle, 1) && PyList_Append(alive.get(), handle) != 0) {
      return nullptr;
    }
  }
  return alive.release();
  END_HANDLE_TH_ERRORS
}

namespace {

// Add the handles of a node's pool that have references besides the pool's to a list. False with a Python error.
bool add_held(PyObject* made, PyObject* node) {
  PyObject* ready = py_.ready.of(node);
  if (Py_TYPE(ready) == py_.handle) {
    return !is_held_besides_pool(ready) || PyList_Append(made, ready) == 0;
  }
  if (ready == Py_None) {
    return true;
  }
  const bool as_one = Py_REFCNT(ready) > 1; // Python code holds the list or tuple of the results
  Py_INCREF(ready);
  THPObjectPtr results(ready);
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(ready); ++at) {
    PyObject* handle = PySequence_Fast_GET_ITEM(ready, at);
    if (handle == Py_None || !(as_one || is_held_besides_pool(handle))) {
      continue;
    }
    if (PyList_Append(made, handle) != 0 ||
        (as_one && !THPObjectPtr(PyObject_CallOneArg(python_release, handle)))) {
      return false;
    }
  }
  return true;
}

} // namespace

// Reduce ``made`` to the handles that have references besides those of the list and of their nodes' pools. Add such
// handles from the pools of the nodes from ``node`` up to ``swept``, which is left out.
// Twin of ``trace.pool.sweep``.
extern "C" PyObject* torchport_sweep(PyObject* made, PyObject* node, PyObject* swept) {
  HANDLE_TH_ERRORS
  THPObjectPtr before(PyList_GetSlice(made, 0, PyList_GET_SIZE(made)));
  if (!before || PyList_SetSlice(made, 0, PyList_GET_SIZE(made), nullptr) != 0) {
    return nullptr;
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(before.get()); ++at) {
    PyObject* handle = PyList_GET_ITEM(before.get(), at);
    if (is_held(handle, 1) && PyList_Append(made, handle) != 0) {
      return nullptr;
    }
  }
  // Some at a time: a handle and its tensor are no longer in the processor's cache, and it can wait for many at once.
  std::array<PyObject*, 64> nodes;
  while (node != swept && node != Py_None) {
    size_t count = 0;
    for (; count < nodes.size() && node != swept && node != Py_None; node = py_.parent.of(node)) {
      nodes[count++] = node;
      __builtin_prefetch(py_.ready.of(node));
    }
    for (size_t at = 0; at < count; ++at) {
      PyObject* ready = py_.ready.of(nodes[at]);
      if (Py_TYPE(ready) == py_.handle) {
        __builtin_prefetch(THPVariable_Unpack(ready).unsafeGetTensorImpl());
      }
    }
    for (size_t at = 0; at < count; ++at) {
      if (!add_held(made, nodes[at])) {
        return nullptr;
      }
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The handles of a list that have neither value nor failure, oldest first. Each leaves its node's pool.
// Twin of ``trace.pool.pending``.
extern "C" PyObject* torchport_pending(PyObject* handles) {
  HANDLE_TH_ERRORS
  std::vector<std::pair<long long, PyObject*>> found;
  found.reserve(PyList_GET_SIZE(handles));
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(handles); ++at) {
    PyObject* handle = PyList_GET_ITEM(handles, at);
    THPObjectPtr value(attribute(handle, py_.n_value)), failure(attribute(handle, py_.n_failure));
    if (value.get() == Py_None && failure.get() == Py_None) {
      release(handle);
      found.emplace_back(value_id_of(handle), handle);
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(found.size())));
  for (size_t at = 0; list && at < found.size(); ++at) {
    Py_INCREF(found[at].second);
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(at), found[at].second);
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

// Give handles the value id -1, so that they belong to no trace. Each leaves its node's pool.
// Twin of ``trace.pool.forget``.
extern "C" PyObject* torchport_forget(PyObject* handles) {
  HANDLE_TH_ERRORS
  THPObjectPtr none(PyLong_FromLong(-1));
  for (Py_ssize_t at = 0; none && at < PyList_GET_SIZE(handles); ++at) {
    PyObject* handle = PyList_GET_ITEM(handles, at);
    release(handle);
    if (PyObject_SetAttr(handle, py_.n_value_id, none.get()) != 0) {
      return nullptr;
    }
  }
  if (!none) {
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The values of the leaves at some positions, and whether one of them is a ``future``.
// Twin of ``run.jobs.leaf_values``.
extern "C" PyObject* torchport_leaf_values(PyObject* leaves, PyObject* positions, PyObject* future) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_Check(leaves) && PyTuple_Check(positions), "a list and a tuple are needed");
  bool waits = false;
  const Py_ssize_t count = PyTuple_GET_SIZE(positions);
  THPObjectPtr values(PyList_New(count));
  for (Py_ssize_t at = 0; values && at < count; ++at) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, at));
    TORCH_CHECK_INDEX(position >= 0 && position < PyList_GET_SIZE(leaves), "there is no such leaf");
    PyObject* value = PyObject_GenericGetAttr(PyList_GET_ITEM(leaves, position), py_.n_value);
    if (value == nullptr) {
      return nullptr;
    }
    waits = waits || Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(future);
    PyList_SET_ITEM(values.get(), at, value);
  }
  return values ? PyTuple_Pack(2, values.get(), waits ? Py_True : Py_False) : nullptr;
  END_HANDLE_TH_ERRORS
}

// The positions of the arguments that only their job references, which may be donated.
// Twin of ``run.donation.unshared``.
extern "C" PyObject* torchport_unshared(PyObject* given, PyObject* args) {
  HANDLE_TH_ERRORS
  THPObjectPtr found(PyList_New(0));
  const Py_ssize_t leaves = PyList_GET_SIZE(given);
  for (Py_ssize_t at = 0; found && at < PyList_GET_SIZE(args); ++at) {
    PyObject* data = PyList_GET_ITEM(args, at);
    if (at < leaves) {
      PyObject* mine = PyList_GET_ITEM(given, at); // the leaf's value, or its future, which the future's job holds, too
      const auto holders = [mine] { return job_of_future.of(mine) == Py_None ? 1 : 2; };
      if (Py_REFCNT(data) != 2 || py_.exported.of(data) != Py_False || (mine != data && Py_REFCNT(mine) != holders())) {
        continue;
      }
    } else if (Py_REFCNT(data) != 1) {
      continue;
    }
    THPObjectPtr position(PyLong_FromSsize_t(at));
    if (!position || PyList_Append(found.get(), position.get()) != 0) {
      return nullptr;
    }
  }
  return found ? PyFrozenSet_New(found.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

namespace {

// A Python sequence's items, for as long as this is there. Raises ``ValueError`` if it has another length.
class Items {
 public:
  Items(PyObject* sequence, Py_ssize_t expected) : held_(PySequence_Fast(sequence, "a sequence is needed")) {
    if (!held_) {
      throw python_error();
    }
    TORCH_CHECK_VALUE(expected < 0 || size() == expected, "the sequences are not equally long");
  }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(held_.get()); }
  PyObject* operator[](Py_ssize_t at) const { return PySequence_Fast_GET_ITEM(held_.get(), at); }

 private:
  THPObjectPtr held_;
};

// The slots of a class that a dict names, and the dict's values, which it holds.
std::vector<std::pair<Slot, PyObject*>> slots_of(PyObject* type, PyObject* named) {
  std::vector<std::pair<Slot, PyObject*>> found;
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(named, &at, &name, &value);) {
    Slot slot;
    const char* text = PyUnicode_AsUTF8(name);
    if (text == nullptr || !find_slot(type, text, slot)) {
      throw python_error();
    }
    found.emplace_back(slot, value);
  }
  return found;
}

} // namespace

// Objects of a class without calling it: one dict has the slots that are the same in all, the other the others.
// Twin of ``native.twins.make_each``.
extern "C" PyObject* torchport_make_each(PyObject* of, PyObject* shared, PyObject* each) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyType_Check(of) && PyDict_CheckExact(shared) && PyDict_CheckExact(each), "a class and two dicts");
  const std::vector<std::pair<Slot, PyObject*>> same = slots_of(of, shared);
  std::vector<std::pair<Slot, Items>> other;
  for (const auto& [slot, sequence] : slots_of(of, each)) {
    other.emplace_back(slot, Items(sequence, other.empty() ? -1 : other.front().second.size()));
  }
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(of);
  const Py_ssize_t count = other.empty() ? 0 : other.front().second.size();
  THPObjectPtr made(PyList_New(count));
  for (Py_ssize_t at = 0; made && at < count; ++at) {
    PyObject* one = type->tp_alloc(type, 0);
    if (one == nullptr) {
      return nullptr;
    }
    for (const auto& [slot, value] : same) {
      slot.of(one) = Py_NewRef(value);
    }
    for (const auto& [slot, values] : other) {
      slot.of(one) = Py_NewRef(values[at]);
    }
    PyList_SET_ITEM(made.get(), at, one);
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}

// Give the handles of each group a value and its spec.
// Twin of ``trace.pool.give``.
extern "C" PyObject* torchport_give(PyObject* owners, PyObject* values, PyObject* specs) {
  HANDLE_TH_ERRORS
  const Items groups(owners, -1), each(values, groups.size()), told(specs, groups.size());
  for (Py_ssize_t at = 0; at < groups.size(); ++at) {
    const Items handles(groups[at], -1);
    for (Py_ssize_t one = 0; one < handles.size(); ++one) {
      if (PyObject_SetAttr(handles[one], py_.n_value, each[at]) != 0 ||
          PyObject_SetAttr(handles[one], py_.n_spec, told[at]) != 0) {
        return nullptr;
      }
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether the program has asked for a storage's address (``frontend.device.memory``), which must not change then.
static bool has_address(const c10::Storage& storage) {
  if (storage.use_count() == 1) {
    return false; // Python has not seen the storage
  }
  THPObjectPtr seen(THPStorage_Wrap(storage));
  return seen && PyObject_HasAttrString(seen.get(), "_address") == 1;
}

// Give gradients that are views new wrappers, which are no views, where the program cannot tell the difference.
// Twin of ``frontend.device.shims.own_gradients``.
extern "C" PyObject* torchport_own_gradients(PyObject* parameters) {
  HANDLE_TH_ERRORS
  namespace functional = at::functionalization::impl;
  THPObjectPtr items(PySequence_Fast(parameters, "parameters are needed"));
  for (Py_ssize_t at = 0; items && at < PySequence_Fast_GET_SIZE(items.get()); ++at) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.get(), at);
    if (!THPVariable_Check(item)) {
      continue;
    }
    const at::Tensor& parameter = THPVariable_Unpack(item);
    const at::Tensor& grad = parameter.grad();
    if (!grad.defined() || grad.requires_grad() || !functional::isFunctionalTensor(grad) ||
        !is_alone(grad, [&] { return THPVariable_Wrap(grad); }) ||
        !is_alone(grad.storage(), [&] { return THPStorage_Wrap(grad.storage()); }) || has_address(grad.storage())) {
      continue;
    }
    at::FunctionalTensorWrapper* wrapper = functional::unsafeGetFunctionalWrapper(grad);
    wrapper->sync_();
    if (is_unseen(wrapper->value())) {
      parameter.mutable_grad() = in_wrapper(wrapper->value());
      continue;
    }
    THPObjectPtr handle(THPVariable_Wrap(wrapper->value()));
    if (!handle) {
      return nullptr;
    }
    if (PyType_IsSubtype(Py_TYPE(handle.get()), py_.handle)) {
      parameter.mutable_grad() = in_wrapper(THPVariable_Unpack(handle.get()));
    }
  }
  if (!items) {
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
