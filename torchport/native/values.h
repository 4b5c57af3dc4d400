// What a handle holds where values are CPU tensors, and handles that are made of such. Part of follow.cpp.
#pragma once
#include "calls.h"

#include <array>
#include <memory>
#include <optional>
#include <typeinfo>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

namespace {

// -- Python's side ----------------------------------------------------------------------------------------------
PyTypeObject* host_data; // interface.TensorData
PyTypeObject* spec_type; // specs.TensorSpec
Slot direct_of; // of a trace
Slot data_device, data_spec, data_tensor; // of a TensorData
Slot spec_shape, spec_dtype, spec_strides; // of a TensorSpec
PyObject *n_by_index, *n_device, *n_manners, *n_keeps_tensors, *n_class; // names
PyObject* views; // interface.VIEWS
PyObject* make_template; // a function: dtype → a handle of that dtype
PyObject* zero; // the index of the default device

// A thread's trace of index 0, whatever its operators are; null if there is none yet.
THPObjectPtr any_trace(PyObject* of_thread) {
  THPObjectPtr traces = of_thread ? entry(of_thread, n_by_index) : THPObjectPtr();
  return traces && PyDict_CheckExact(traces.get()) ? entry(traces.get(), zero) : THPObjectPtr();
}

// The same if its operators are interpreted at once, else null.
THPObjectPtr direct_trace(PyObject* of_thread) {
  THPObjectPtr trace = any_trace(of_thread);
  return trace && integer(direct_of.of(trace.get())) > 0 ? std::move(trace) : THPObjectPtr();
}

// What is asked of a runtime for each operator. The same objects for as long as the runtime lives.
struct Bound {
  THPObjectPtr runtime, manners, device;
};

// Drop what Python holds, from any thread.
void free_bound(Bound* of_runtime) {
  if (Py_IsInitialized()) {
    const Gil gil;
    delete of_runtime;
  }
}

using Owner = std::shared_ptr<Bound>;

// Null, without a Python error, where it has not what is asked for. There is one runtime of index 0 at a time, so the
// newest is the one that is kept.
const Owner& bound(PyObject* runtime) {
  static auto& known = *new Owner(new Bound(), free_bound);
  static const auto& none = *new Owner();
  if (known->runtime.get() != runtime) {
    THPObjectPtr manners(PyObject_GetAttr(runtime, n_manners)), device(PyObject_GetAttr(runtime, n_device));
    if (!manners || !device) {
      PyErr_Clear();
      return none;
    }
    const Owner before = std::exchange(
        known,
        Owner(new Bound{THPObjectPtr(Py_NewRef(runtime)), std::move(manners), std::move(device)}, free_bound));
  }
  return known;
}

// Whether CPU operators may run in the thread's state, once ``DefaultState`` has seen to inference mode: no dispatch
// mode, CPU autocast or functorch.
// Twin of ``core.default_state.is_default``.
bool is_default() {
  using c10::DispatchKey;
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !at::autocast::is_autocast_enabled(at::kCPU) && !included.has(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !included.has(DispatchKey::FuncTorchDynamicLayerBackMode) && !included.has(DispatchKey::Python);
}

// Outside of inference mode, without gradients: a value may be used where that mode is off, and written to.
// Twin of ``core.default_state.default_state``.
class DefaultState {
 public:
  DefaultState() {
    if (c10::InferenceMode::is_enabled()) {
      guards.emplace();
    }
  }

 private:
  struct Guards {
    c10::InferenceMode mode{false};
    at::AutoDispatchBelowADInplaceOrView below;
    c10::NoGradGuard no_gradients;
  };
  std::optional<Guards> guards;
};

// A list or tuple of Python integers; null with a Python error.
PyObject* whole_numbers(c10::ArrayRef<int64_t> values, bool list) {
  THPObjectPtr made(list ? PyList_New(values.size()) : PyTuple_New(values.size()));
  for (size_t at = 0; made && at < values.size(); ++at) {
    PyObject* item = PyLong_FromLongLong(values[at]);
    if (item == nullptr) {
      return nullptr;
    }
    list ? PyList_SET_ITEM(made.get(), at, item) : PyTuple_SET_ITEM(made.get(), at, item);
  }
  return made.release();
}

struct SpecKey {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 10> sizes_and_strides;

  SpecKey() = default;
  explicit SpecKey(const at::Tensor& tensor) : dtype(tensor.scalar_type()) {
    sizes_and_strides.append(tensor.sizes().begin(), tensor.sizes().end());
    sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
  }

  bool operator==(const SpecKey& other) const {
    return dtype == other.dtype && sizes_and_strides == other.sizes_and_strides;
  }
};

struct SpecHash {
  size_t operator()(const SpecKey& key) const {
    size_t made = static_cast<size_t>(key.dtype);
    for (const int64_t value : key.sizes_and_strides) {
      made = (made ^ static_cast<size_t>(value)) * 0x9E3779B97F4A7C15ull;
      made ^= made >> 29;
    }
    return made;
  }
};

constexpr size_t kMostSpecs = 4096; // kept at most
constexpr size_t kMostSeen = 1 << 16; // specs that are known to have come once

// A new spec like a tensor's; null with a Python error.
PyObject* new_spec(const at::Tensor& tensor) {
  THPObjectPtr made(spec_type->tp_alloc(spec_type, 0));
  if (!made) {
    return nullptr;
  }
  spec_dtype.of(made.get()) = Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
  spec_shape.of(made.get()) = whole_numbers(tensor.sizes(), false);
  spec_strides.of(made.get()) = whole_numbers(tensor.strides(), false);
  return spec_shape.of(made.get()) && spec_strides.of(made.get()) ? made.release() : nullptr;
}

// A tensor's spec, as a new reference; null with a Python error. Equal specs are mostly one object, since each spec is
// three objects for the garbage collector to visit. It is kept from the second time on that it comes: in a loop whose
// sizes grow, what is kept of each size would lie between the values of one size and the next, and their memory could be
// used for neither.
// Twin of ``core.specs.TensorSpec.of``.
PyObject* spec_of(const at::Tensor& tensor) {
  static auto& known = *new std::unordered_map<SpecKey, THPObjectPtr, SpecHash>();
  static auto& seen = *new ska::flat_hash_set<size_t>(); // hashes of those that came once
  SpecKey key(tensor);
  if (const auto found = known.find(key); found != known.end()) {
    return Py_NewRef(found->second.get());
  }
  THPObjectPtr made(new_spec(tensor));
  if (!made) {
    return nullptr;
  }
  if (seen.insert(SpecHash()(key)).second) {
    if (seen.size() > kMostSeen) {
      seen.clear();
    }
    return made.release();
  }
  if (known.size() >= kMostSpecs) {
    std::unordered_map<SpecKey, THPObjectPtr, SpecHash>().swap(known);
  }
  known.emplace(std::move(key), THPObjectPtr(Py_NewRef(made.get())));
  return made.release();
}

at::FunctionalTensorWrapper* wrapper_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Functionalize)
      ? at::functionalization::impl::unsafeGetFunctionalWrapper(tensor)
      : nullptr;
}

// -- handles that Python has not seen -----------------------------------------------------------------------------------
// Who may see a value's memory besides the value: ``BackendData.exported``.
enum class Sharing : uint8_t { nobody, views, others };

PyObject* exported_of(Sharing sharing) {
  return sharing == Sharing::nobody ? Py_False : sharing == Sharing::views ? views : Py_True;
}

Sharing sharing_of(PyObject* exported) {
  return exported == Py_False ? Sharing::nobody : exported == views ? Sharing::views : Sharing::others;
}

// The keys of every handle. Raises what Python raises, the first time.
c10::DispatchKeySet keys_of_handles() {
  static const c10::DispatchKeySet keys = [] {
    PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::kFloat));
    THPObjectPtr handle(PyObject_CallOneArg(make_template, dtype));
    if (!handle) {
      throw python_error();
    }
    return THPVariable_Unpack(handle.get()).key_set();
  }();
  return keys;
}

c10::Storage new_memory() {
  const c10::Device here(c10::DeviceType::PrivateUse1, 0);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, here), nullptr, false);
}

// The memory that a handle seems to have that Python has not seen: nobody asks for it.
const c10::Storage& no_memory() {
  static const auto& memory = *new c10::Storage(new_memory());
  return memory;
}

// The memory that a handle seems to have. PyTorch refuses writes where a tensor and an argument overlap in part, so
// handles of different specs have different memory.
c10::Storage memory_like(const at::Tensor& tensor) {
  struct Place {
    SpecKey spec;
    c10::Storage memory;
  };
  static auto& places = *new std::array<Place, 256>(); // guarded by the GIL
  SpecKey key(tensor);
  Place& place = places[SpecHash()(key) % places.size()];
  if (!place.memory || !(place.spec == key)) {
    place = {std::move(key), new_memory()};
  }
  return place.memory;
}

// A handle that holds its CPU tensor itself, as long as Python has not seen it: only a wrapper holds it. Most results
// of operators that are interpreted at once are only used by such operators, which need none of the objects that Python
// has of a handle and its value.
//
// The dispatcher calls ``Show`` before any other kernel of a handle like this.
class Unseen final : public c10::TensorImpl {
 public:
  at::Tensor value; // undefined once Python has seen the handle
  Owner owner;
  Sharing sharing;

  Unseen(at::Tensor held, Owner of_runtime, Sharing shared)
      : TensorImpl(c10::Storage(no_memory()), keys_of_handles().add(kUnseen), held.dtype()),
        value(std::move(held)),
        owner(std::move(of_runtime)),
        sharing(shared) {
    set_sizes_and_strides(value.sizes(), value.strides());
    set_allow_tensor_metadata_change(false);
  }

  // Python has seen it, and holds its value.
  void forget() {
    key_set_ = key_set_.remove(kUnseen);
    storage_ = memory_like(value);
    value.reset();
    owner.reset();
  }
};

// A tensor as such a handle; null for any other.
Unseen* unseen(const at::Tensor& tensor) {
  if (!is_unseen(tensor)) {
    return nullptr;
  }
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(Unseen) ? static_cast<Unseen*>(&impl) : nullptr;
}

// A value without a bit that says it is to be conjugated or negated.
at::Tensor settled(at::Tensor value) {
  if (!value.defined()) {
    return value;
  }
  if (value.is_conj()) {
    value = value.resolve_conj();
  }
  return value.is_neg() ? value.resolve_neg() : std::move(value);
}

// What a handle holds. ``own`` lives as long as the handle.
struct Held {
  at::Tensor tensor; // undefined where Python has to look
  Unseen* own = nullptr;
  THPObjectPtr data; // the handle's TensorData, if Python has seen it

  // The value's spec, as a new reference; null with a Python error.
  PyObject* spec() {
    return own == nullptr ? Py_NewRef(data_spec.of(data.get())) : spec_of(tensor);
  }

  // Note that a result shares the memory. Returns who sees the result's.
  Sharing share() {
    if (own != nullptr) {
      own->sharing = own->sharing == Sharing::nobody ? Sharing::views : own->sharing;
      return own->sharing;
    }
    if (py_.exported.of(data.get()) == Py_False) {
      Py_XSETREF(py_.exported.of(data.get()), Py_NewRef(views));
    }
    return sharing_of(py_.exported.of(data.get()));
  }
};

Held held_by(const at::Tensor& tensor, PyObject* runtime) {
  if (Unseen* own = unseen(tensor)) {
    return own->owner->runtime.get() == runtime ? Held{own->value, own, THPObjectPtr()} : Held();
  }
  THPObjectPtr handle = handle_of(tensor);
  if (!handle) {
    return {};
  }
  THPObjectPtr value = THPObjectPtr(attribute(handle.get(), py_.n_value));
  if (!value || Py_TYPE(value.get()) != host_data || py_.info.of(value.get()) != runtime) {
    return {};
  }
  PyObject* held = data_tensor.of(value.get());
  if (held == nullptr || !THPVariable_Check(held)) {
    return {};
  }
  if (THPVariable_Unpack(held).strides() != tensor.strides()) {
    return {}; // the handle is a view's; the value was stored without the base's strides
  }
  return {THPVariable_Unpack(held), nullptr, std::move(value)};
}

// A CPU tensor in the form in which Python has values; null with a Python error.
THPObjectPtr value_of(const at::Tensor& value, Bound& owner, Sharing sharing) {
  THPObjectPtr spec(spec_of(value)), data(spec ? host_data->tp_alloc(host_data, 0) : nullptr),
      tensor(data ? THPVariable_Wrap(value) : nullptr);
  if (!tensor) {
    return THPObjectPtr();
  }
  const std::pair<const Slot*, PyObject*> parts[] = {
      {&data_device, owner.device.get()}, {&data_spec, spec.get()}, {&data_tensor, tensor.get()},
      {&py_.info, owner.runtime.get()}, {&py_.exported, exported_of(sharing)}};
  for (const auto& [slot, part] : parts) {
    Py_INCREF(part);
    slot->of(data.get()) = part;
  }
  return data;
}

// Make a handle one that Python knows, if it is none yet. The GIL has to be held.
// Raises what Python raises, with nothing changed.
void show(const at::Tensor& tensor) {
  Unseen* const own = unseen(tensor);
  if (own == nullptr) {
    return;
  }
  // To make Python's objects may run finalizers of the program's, and these may use the handle.
  const at::Tensor held = own->value;
  const Owner owner = own->owner;
  THPObjectPtr handle(THPVariable_Wrap(tensor)), value = value_of(held, *owner, own->sharing); // a plain tensor so far
  if (!handle || !value) {
    throw python_error();
  }
  if (unseen(tensor) != own) {
    return;
  }
  py_.exported.of(value.get()) = Py_NewRef(exported_of(own->sharing)); // these objects are never freed
  if (PyObject_SetAttr(handle.get(), py_.n_value, value.get()) != 0 ||
      PyObject_SetAttr(handle.get(), n_class, reinterpret_cast<PyObject*>(py_.handle)) != 0) {
    throw python_error();
  }
  own->forget();
}

bool may_be_unseen = false; // whether ``Show`` is there

// A handle that has a CPU tensor as its value, which Python has not seen.
at::Tensor unseen_handle(at::Tensor value, const Owner& owner, Sharing sharing) {
  at::Tensor made = at::detail::make_tensor<Unseen>(settled(std::move(value)), owner, sharing);
  if (!may_be_unseen) {
    show(made);
  }
  return made;
}

// Make handles among values ones that Python knows.
void show_each(Values values) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      show(value.toTensor());
    } else if (value.isTensorList()) {
      show_each(value.toListRef());
    } else if (value.isOptionalTensorList()) {
      show_each(value.toListRef());
    }
  }
}

// The fallback at ``kUnseen``: before any other kernel of a handle that Python has not seen.
struct Show final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    {
      const Gil gil;
      show_each(Values(stack->data() + stack->size() - count, count));
    }
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kUnseen), stack);
  }
};

// A handle that Python knows, with a CPU tensor as its value.
at::Tensor handle_with(at::Tensor value, const Owner& owner, Sharing sharing) {
  at::Tensor made = unseen_handle(std::move(value), owner, sharing);
  show(made);
  return made;
}

} // namespace
