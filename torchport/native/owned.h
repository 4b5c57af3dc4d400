// Values whose memory nobody sees but the tensor that is written to, so that an operator in place may write there
// (``writes.h``). Part of follow.cpp.
#pragma once
#include "direct.h"
#include "outs.h"

#include <algorithm>
#include <cstring>

#include <ATen/FunctionalStorageImpl.h>
#include <ATen/FunctionalTensorWrapper.h>

namespace {

// Whether an operator computes each element from the elements at the same place, with the same result in place, and
// raises no error in the middle of its work.
bool is_elementwise(const c10::OperatorHandle& op) {
  const bool of_lists = std::strncmp(op.schema().name().c_str(), "aten::_foreach_", 15) == 0;
  return (of_lists || op.hasTag(at::Tag::pointwise)) && !op.hasTag(at::Tag::nondeterministic_seeded);
}

// Whether a CPU tensor's memory has no other holder, but for what is put off.
bool is_alone(const at::Tensor& memory) {
  // Memory that is not PyTorch's, such as NumPy's or an engine's, may have other holders than tensors.
  return memory.use_count() == 1 + PutOff::references(memory) && memory.has_storage() && memory.storage().use_count() == 1 &&
      memory.storage().unsafeGetStorageImpl()->resizable() &&
      memory.is_non_overlapping_and_dense() && !memory.is_inference() && !memory.requires_grad();
}

// Whether a tensor's value is memory that nobody else can see or will ask for: no other handle, computation, view or
// tensor of the host's. ``counted``: the caller's own references to the handle.
bool owns_memory(const at::Tensor& tensor, size_t counted) {
  at::FunctionalTensorWrapper* wrapper = wrapper_of(tensor);
  const at::Tensor& inner = wrapper->value();
  auto* storage = static_cast<at::functionalization::FunctionalStorageImpl*>(tensor.storage().unsafeGetStorageImpl());
  if (storage->base().unsafeGetTensorImpl() != inner.unsafeGetTensorImpl() || tensor.strides() != inner.strides()) {
    return false; // a view
  }
  if (const Unseen* own = unseen(inner)) {
    // The handle's references: the wrapper's, the base's.
    return inner.use_count() == 2 + counted && own->sharing != Sharing::others && is_alone(own->value);
  }
  // The handle's references: its Python object's, the wrapper's, the base's.
  THPObjectPtr handle = handle_of(inner);
  if (!handle || inner.use_count() != 3 + counted || Py_REFCNT(handle.get()) != 2) {
    return false;
  }
  THPObjectPtr value(attribute(handle.get(), py_.n_value));
  if (!value || Py_TYPE(value.get()) != host_data || Py_REFCNT(value.get()) != 2 ||
      sharing_of(py_.exported.of(value.get())) == Sharing::others) {
    return false;
  }
  PyObject* held = data_tensor.of(value.get());
  return held != nullptr && THPVariable_Check(held) && Py_REFCNT(held) == 1 && is_alone(THPVariable_Unpack(held));
}

// Whether an argument goes with each of the written tensors: of their dtypes and sizes, or a number.
bool goes_with(const c10::IValue& value, const Values& written) {
  const auto alike = [](const at::Tensor& one, const at::Tensor& other) {
    return one.defined() && one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
        one.is_privateuseone();
  };
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return !tensor.is_complex();
    }
    return std::all_of(written.begin(), written.end(), [&](const c10::IValue& target) {
      return alike(tensor, target.toTensor());
    });
  }
  if (!value.isTensorList()) {
    return value.isNone() || value.isDouble() || value.isInt() || value.isDoubleList() || value.isBool() ||
        (value.isList() && value.toListRef().size() == written.size());
  }
  const Values items = value.toListRef();
  return std::equal(
      items.begin(), items.end(), written.begin(), written.end(),
      [&](const c10::IValue& item, const c10::IValue& target) { return alike(item.toTensor(), target.toTensor()); });
}

// Whether an operator in place may write to the memory that its first argument has. ``values``: its arguments, unwrapped;
// ``written``: the first one's tensors, as the program holds them.
bool may_write(
    const c10::OperatorHandle& op, const c10::SmallVector<at::Tensor, 1>& written, const torch::jit::Stack& values) {
  if (!is_elementwise(op)) {
    return false;
  }
  const bool list = values[0].isTensorList();
  const Values targets = list ? values[0].toListRef() : Values(values.data(), 1);
  for (const at::Tensor& tensor : written) {
    if (!at::isFloatingType(tensor.scalar_type()) || !owns_memory(tensor, 1)) {
      return false;
    }
  }
  return std::all_of(values.begin() + 1, values.end(), [&](const c10::IValue& value) {
    return goes_with(value, targets);
  });
}

} // namespace
