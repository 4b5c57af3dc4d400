// Operators with ``out=``: a call of a kind that the CPU has accepted before needs no Python. Part of follow.cpp.
//
// For a call of a new kind, the Python kernel tries the CPU's kernel (``frontend/device/writes.py``). Only the kinds
// that raised no error are remembered here. PyTorch's own functionalization performs the call either way.
#pragma once
#include "calls.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/FunctionalStorageImpl.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>

namespace {

constexpr size_t kMostKinds = 1024; // kinds of calls remembered per operator

enum class Care { none, strided, always };

// How a write through a kind of view goes. The classes of views have no declaration in PyTorch's headers, so their names
// are compared, once per class.
Care care_of(const std::type_info& made) {
  static auto& known = *new std::vector<std::pair<const std::type_info*, Care>>(); // guarded by the GIL
  for (const auto& [type, answer] : known) {
    if (type == &made) {
      return answer;
    }
  }
  const auto is_named = [&](const char* name) { return std::strstr(made.name(), name) != nullptr; };
  const Care answer = is_named("expand_ViewMeta") || is_named("unfold_ViewMeta") ? Care::always
      : is_named("as_strided_ViewMeta")                                          ? Care::strided
                                                                                 : Care::none;
  known.emplace_back(&made, answer);
  return answer;
}

// Whether a tensor may be a view that Python's function answers for: a view of an expanded tensor, whose writes it takes
// back to the base exactly, or a view by ``unfold`` or ``as_strided``, most of whose writes it refuses. It refuses none
// where ``as_strided`` was taken of a tensor itself and shows each of its elements once, as DDP's buckets are cut.
// Twin of ``frontend.device.expanded.is_of_expanded``.
bool is_of_expanded(const at::Tensor& tensor) {
  at::FunctionalTensorWrapper* wrapper = wrapper_of(tensor);
  if (wrapper == nullptr) {
    return false;
  }
  bool first = true;
  for (const auto& view : wrapper->view_metas()) {
    const auto& made = *view;
    const Care care = care_of(typeid(made));
    if (care == Care::always || (care == Care::strided && !(first && tensor.is_non_overlapping_and_dense()))) {
      return true;
    }
    first = false;
  }
  return false;
}

// Whether a tensor is a functionalization wrapper of a handle, which is what a program holds.
bool is_ours(const at::Tensor& tensor) {
  at::FunctionalTensorWrapper* wrapper = wrapper_of(tensor);
  if (wrapper == nullptr || !wrapper->value().defined()) {
    return false;
  }
  // Handles of other indices and compilers' tensors dispatch to Python.
  const at::Tensor& value = wrapper->value();
  return value.is_privateuseone() && !value.key_set().has(c10::DispatchKey::Python);
}

using KindOfCall = std::vector<int64_t>;

// Describes a call by everything that the CPU's answer depends on. ``add`` returns false for an argument that the
// description does not cover: a tensor that shares memory with a written one, a written view of an expanded tensor, a
// tensor of another device, a symbolic size, a generator.
struct Describer {
  Values written;
  KindOfCall& kind;

  bool add(const c10::IValue& value) {
    if (value.isTensor()) {
      return add_tensor(value.toTensor());
    }
    if (value.isNone()) {
      kind.push_back('0');
    } else if (value.isInt()) {
      kind.insert(kind.end(), {'i', value.toInt()});
    } else if (value.isBool()) {
      kind.insert(kind.end(), {'b', value.toBool()});
    } else if (value.isDouble()) {
      add_double(value.toDouble());
    } else if (value.isString()) {
      const std::string& text = value.toStringRef();
      kind.insert(kind.end(), {'s', static_cast<int64_t>(text.size())});
      kind.insert(kind.end(), text.begin(), text.end());
    } else if (value.isList()) {
      const Values items = value.toListRef();
      kind.insert(kind.end(), {'l', static_cast<int64_t>(items.size())});
      return std::all_of(items.begin(), items.end(), [&](const c10::IValue& item) { return add(item); });
    } else {
      return false;
    }
    return true;
  }

 private:
  void add_double(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    kind.insert(kind.end(), {'d', bits});
  }

  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      kind.push_back('0');
      return true;
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return add_number(tensor);
    }
    if (!is_ours(tensor)) {
      return false;
    }
    int64_t place = -1;
    for (size_t at = 0; at < written.size(); ++at) {
      const at::Tensor& out = written[at].toTensor();
      if (out.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) {
        if (is_of_expanded(tensor)) {
          return false;
        }
        place = static_cast<int64_t>(at);
      } else if (out.is_alias_of(tensor)) {
        return false;
      }
    }
    kind.insert(kind.end(), {'t', place, static_cast<int64_t>(tensor.scalar_type()), tensor.dim()});
    kind.insert(kind.end(), tensor.sizes().begin(), tensor.sizes().end());
    kind.insert(kind.end(), tensor.strides().begin(), tensor.strides().end());
    return true;
  }

  // A Python number that PyTorch has wrapped in a tensor.
  bool add_number(const at::Tensor& tensor) {
    if (!tensor.is_cpu()) {
      return false;
    }
    switch (tensor.scalar_type()) {
      case at::kDouble:
        add_double(*tensor.const_data_ptr<double>());
        return true;
      case at::kLong:
        kind.insert(kind.end(), {'i', *tensor.const_data_ptr<int64_t>()});
        return true;
      case at::kBool:
        kind.insert(kind.end(), {'b', *tensor.const_data_ptr<bool>()});
        return true;
      default:
        return false;
    }
  }
};

// The kernel of an operator with ``out=`` at Functionalize. For a known kind of call it goes straight to PyTorch's
// ``original``.
struct Out final : c10::OperatorKernel {
  Out(size_t arguments, size_t outs, c10::SafeKernelFunction python, c10::SafeKernelFunction original)
      : arguments(arguments), outs(outs), python(std::move(python)), original(std::move(original)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    std::optional<KindOfCall> unknown;
    bool accepted = false;
    {
      Gil gil;
      static auto& kind = *new KindOfCall(); // guarded by the GIL; a call of a known kind needs no copy of it
      if (describe(Values(stack->data() + stack->size() - arguments, arguments), kind)) {
        accepted = kind == last || known.contains(kind);
        if (!accepted) {
          unknown = kind;
        } else if (kind != last) {
          last = kind;
        }
      }
      followed += accepted;
    }
    if (accepted) {
      original.callBoxed(op, keys, stack);
    } else {
      call_python(op, keys, stack, std::move(unknown));
    }
  }

  // Have the Python kernel ask the CPU. ``kind``: of the call, if it has one; a kind that is accepted is remembered.
  void call_python(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
      std::optional<KindOfCall> kind) {
    c10::SmallVector<at::Tensor, 2> written;
    c10::SmallVector<c10::DimVector, 2> shapes;
    if (kind) {
      for (const c10::IValue& out : Values(stack->data() + stack->size() - outs, outs)) {
        written.push_back(out.toTensor());
        shapes.emplace_back(written.back().sizes());
      }
    }
    const size_t before = writes_to(written);
    python.callBoxed(op, keys, stack);
    // A call that gives a tensor another shape is not remembered: the next such tensor may be a view, which is refused.
    const auto same = [](const at::Tensor& out, const c10::DimVector& shape) { return out.sizes() == shape; };
    // Nor is a call that wrote a tensor twice: the second write restored the strides.
    const bool once = kind && writes_to(written) - before == written.size();
    if (once && std::equal(written.begin(), written.end(), shapes.begin(), same)) {
      Gil gil;
      if (known.size() >= kMostKinds) {
        known.clear();
      }
      known.insert(std::move(*kind));
    }
  }

  // The number of writes to the storages of these tensors so far.
  static size_t writes_to(const c10::SmallVector<at::Tensor, 2>& tensors) {
    size_t count = 0;
    for (const at::Tensor& tensor : tensors) {
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      count += static_cast<const at::functionalization::FunctionalStorageImpl*>(storage)->generation();
    }
    return count;
  }

  // Write the kind of a call to ``kind``; false for a call that has none.
  bool describe(Values given, KindOfCall& kind) const {
    kind.clear();
    Describer describer{given.slice(arguments - outs), kind};
    const auto is_written = [](const c10::IValue& out) { return out.isTensor() && is_ours(out.toTensor()); };
    if (!std::all_of(describer.written.begin(), describer.written.end(), is_written)) {
      return false;
    }
    kind.push_back(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
    return std::all_of(given.begin(), given.end(), [&](const c10::IValue& value) { return describer.add(value); });
  }

  const size_t arguments, outs;
  const c10::SafeKernelFunction python, original;
  std::unordered_set<KindOfCall, HashOfNumbers> known; // guarded by the GIL
  KindOfCall last; // one of them
};

} // namespace
