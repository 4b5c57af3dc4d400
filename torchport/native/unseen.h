// Handles that have a CPU tensor as their value: how they are made, and what others hold. Part of follow.cpp.
//
// Python has three objects of a value. Most results of operators that are interpreted at once are arguments of the next
// such operator and nothing else, so the objects are made when Python asks for them.
#pragma once
#include "put_off.h"
#include "values.h"

#include <array>
#include <memory>
#include <typeinfo>

#include <ATen/core/dispatch/Dispatcher.h>

namespace {

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
    const at::TensorImpl* const like = value.unsafeGetTensorImpl();
    copy_generic_tensor_metadata(like, this); // takes less than to find out again whether it is contiguous
    device_opt_ = storage_.device();
    storage_offset_ = 0;
    is_wrapped_number_ = false;
    set_allow_tensor_metadata_change(false);
  }

  ~Unseen() override {
    if (PutOff::waits && value.defined() && value.use_count() == 2 && Py_IsInitialized()) [[unlikely]] {
      const Gil gil; // PyTorch gives it up where it frees a tensor
      PutOff::forget(value); // the other reference is that of the list
    }
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
  constexpr c10::DispatchKeySet bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  if (!value.defined() || !value.key_set().has_any(bits)) {
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

// ``may_wait``: its value may be one that is still to be computed.
Held held_by(const at::Tensor& tensor, PyObject* runtime, bool may_wait = false) {
  if (PutOff::waits && !may_wait) [[unlikely]] {
    PutOff::settle();
  }
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
  if (unseen(tensor) == nullptr) {
    return;
  }
  PutOff::settle(); // gives up the GIL
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
at::Tensor unseen_handle(at::Tensor value, Owner owner, Sharing sharing) {
  at::Tensor made = at::detail::make_tensor<Unseen>(settled(std::move(value)), std::move(owner), sharing);
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
