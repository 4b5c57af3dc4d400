// Functional operators as functionalization meets them: on what the program holds of handles. Part of follow.cpp.
//
// PyTorch has one kernel for all of them, which unwraps the arguments on the stack, goes through the dispatcher again,
// and wraps the results. Here the call is made on the spot, if it follows a known path or is interpreted at once.
#pragma once
#include "direct.h"
#include "openings.h"
#include "outs.h"
#include "writes.h"

#include <algorithm>
#include <unordered_map>

#include <ATen/FunctionalTensorWrapper.h>

namespace {

// Whether nothing lies between functionalization and the handles' kernels, such as a dispatch mode.
bool goes_to_handles(c10::DispatchKeySet keys) {
  return keys.remove(c10::DispatchKey::Functionalize).highestPriorityTypeId() == c10::DispatchKey::PrivateUse1;
}

// The kernel of a functional operator at Functionalize. Any other call goes to PyTorch's ``original``, and from there to
// ``Functional``.
struct Wrapped final : c10::OperatorKernel {
  explicit Wrapped(c10::SafeKernelFunction original) : original(std::move(original)) {}

  const Kernel* kernel = nullptr; // another one where the device is installed once more
  size_t device = std::string::npos; // the place of an argument that names a device

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = kernel->letters.size();
    if (const Values given(stack->data() + stack->size() - count, count);
        goes_to_handles(keys) && !names_device(given)) {
      bring_up_to_date(given);
    } else {
      original.callBoxed(op, keys, stack);
      return;
    }
    const Served served = serve(*stack);
    if (served == Served::wrapped) {
      return;
    }
    if (served == Served::not_ours) {
      original.callBoxed(op, keys, stack);
      return;
    }
    if (served == Served::unwrapped) {
      const at::AutoDispatchSkipFunctionalize below;
      op.callBoxed(stack);
    }
    for (size_t at = stack->size() - op.schema().returns().size(); at < stack->size(); ++at) {
      wrap((*stack)[at]);
    }
  }

 private:
  enum class Served { wrapped, handles, unwrapped, not_ours };

  // Call the operator, if it is interpreted at once, or follows a known path: then results are on the stack, as handles or
  // in wrappers. Else nothing is done, but that the arguments on the stack are unwrapped, if they are this device's.
  Served serve(torch::jit::Stack& stack) const {
    const size_t count = kernel->letters.size();
    const Gil gil;
    THPObjectPtr of_thread = of_this_thread();
    const Now now(of_thread.get());
    if (now.at_once != nullptr && kernel->is_direct(now.at_once) &&
        run_direct(now.at_once, *kernel->direct, stack, kernel->one_list, nullptr, true)) {
      return Served::handles;
    }
    const Values given(stack.data() + stack.size() - count, count);
    if (!is_ours(given)) {
      return Served::not_ours;
    }
    for (size_t at = stack.size() - count; at < stack.size(); ++at) {
      stack[at] = unwrap(stack[at]);
    }
    PyObject* child = now.recording != nullptr ? kernel->follow(now.recording, given, false) : nullptr;
    if (child != nullptr && Py_TYPE(py_.ready.of(child)) == py_.handle && !kernel->one_list) { // most often
      at::Tensor made = in_wrapper(THPVariable_Unpack(py_.ready.of(child)));
      torch::jit::drop(stack, count);
      stack.emplace_back(std::move(made));
      return Served::wrapped;
    }
    if (child != nullptr) {
      replace_arguments(stack, count, results_of(child), kernel->one_list);
      return Served::handles;
    }
    size_t opening = 0;
    THPObjectPtr trace = kernel->trace_at_once(of_thread.get(), given, opening);
    const bool done = trace && run_direct(trace.get(), *kernel->direct, stack, kernel->one_list);
    return done ? Served::handles : Served::unwrapped;
  }

  // Perform the writes through other views that wrappers have not seen, which may run operators.
  static void bring_up_to_date(Values given) {
    for (const c10::IValue& value : given) {
      if (value.isTensorList()) {
        bring_up_to_date(value.toListRef());
      } else if (at::FunctionalTensorWrapper* wrapper = value.isTensor() ? wrapper_of(value.toTensor()) : nullptr) {
        wrapper->sync_();
      }
    }
  }

  // Whether the tensors are wrappers of handles, at least one of them, or numbers.
  static bool is_ours(Values given) {
    bool any = false;
    const auto fine = [&any](const at::Tensor& tensor) {
      if (!tensor.defined() || (tensor.dim() == 0 && tensor.is_cpu())) {
        return true;
      }
      const bool ours = ::is_ours(tensor);
      any = any || ours;
      return ours;
    };
    const auto fit = [&fine](const c10::IValue& value) {
      if (value.isTensor()) {
        return fine(value.toTensor());
      }
      if (value.isTensorList()) {
        const Values items = value.toListRef();
        return std::all_of(items.begin(), items.end(), [&](const auto& item) { return fine(item.toTensor()); });
      }
      return !value.isOptionalTensorList();
    };
    return std::all_of(given.begin(), given.end(), fit) && any;
  }

  // Whether the result may be wanted on another device.
  bool names_device(Values given) const {
    return device != std::string::npos && !given[device].isNone();
  }

  static void wrap(c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = in_wrapper(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> wrapped;
      for (const c10::IValue& item : value.toListRef()) {
        wrapped.push_back(item.toTensor().defined() ? in_wrapper(item.toTensor()) : at::Tensor());
      }
      value = std::move(wrapped);
    }
  }

  const c10::SafeKernelFunction original;
};

// Whether PyTorch's functionalization has nothing of its own for an operator. Where a device may be named, the kernel
// there is that of ``frontend/device/placement.py``.
bool has_fallback_only(const c10::OperatorHandle& op, const Kernel& kernel) {
  const bool is_placed = kernel.letters.find('d') != std::string::npos && op.schema().name() != "aten::_to_copy";
  return (is_placed || !op.hasKernelForDispatchKey(c10::DispatchKey::Functionalize)) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !op.schema().hasAnyAliasInfo();
}

// Register the kernel of a functional operator at Functionalize, where PyTorch has its fallback.
void put_wrapped(const c10::OperatorHandle& op, const Kernel& kernel) {
  static auto& known = *new std::unordered_map<const void*, Wrapped*>(); // never freed
  const auto functionalize = c10::DispatchKey::Functionalize;
  Wrapped*& wrapped = known[&op.schema()];
  if (wrapped == nullptr && has_fallback_only(op, kernel)) {
    auto made = std::make_unique<Wrapped>(op.getComputedKernelForDispatchKey(functionalize));
    wrapped = made.get();
    wrapped->kernel = &kernel;
    wrapped->device = kernel.letters.find('d');
    put(functionalize, op.operator_name(), std::move(made));
  } else if (wrapped != nullptr) {
    wrapped->kernel = &kernel;
  }
}

} // namespace
