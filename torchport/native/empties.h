// Tensors without elements that come from the host, such as ``torch.tensor([])``, with which libraries begin a cache.
// There is one value per dtype, and each tensor is another handle of it. Part of follow.cpp.
#pragma once
#include "direct.h"
#include "writes.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>

namespace {

PyObject *n_empties, *n_is_lost; // names

// The kernel of ``_to_copy`` at this device's key, for host tensors.
// Twin of ``frontend.device.copies._empty``.
struct FromHost final : c10::OperatorKernel {
  explicit FromHost(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    at::Tensor made = of_empty(Values(stack->data() + stack->size() - ToCopy::count, ToCopy::count));
    if (!made.defined()) {
      python.callBoxed(op, keys, stack);
      return;
    }
    torch::jit::drop(*stack, ToCopy::count);
    stack->emplace_back(at::functionalization::impl::to_functional_tensor(made));
  }

 private:
  // The copy as a handle, if the tensor is an empty one whose value is there; else undefined.
  static at::Tensor of_empty(Values given) {
    const at::Tensor& tensor = given[0].toTensor();
    if (!tensor.defined() || !tensor.is_cpu() || tensor.dim() != 1 || tensor.numel() != 0 || tensor.stride(0) != 1 ||
        tensor.layout() != at::kStrided || tensor.key_set().has(c10::DispatchKey::Python) ||
        at::functionalization::impl::isFunctionalTensor(tensor) || !is_here(given[3]) || !given[6].isNone()) {
      return {};
    }
    const auto dtype = given[1].isNone() ? tensor.scalar_type() : given[1].toScalarType();
    Gil gil;
    THPObjectPtr of_thread = of_this_thread();
    THPObjectPtr trace = recording_trace(of_thread.get());
    if (!trace) {
      trace = direct_trace(of_thread.get());
    }
    PyObject* runtime = trace ? py_.runtime.of(trace.get()) : nullptr;
    THPObjectPtr known(runtime == nullptr ? nullptr : PyObject_GetAttr(runtime, n_empties)),
        lost(known ? PyObject_GetAttr(runtime, n_is_lost) : nullptr);
    if (!lost || lost.get() != Py_False || !PyDict_CheckExact(known.get())) {
      PyErr_Clear();
      return {};
    }
    THPObjectPtr handle = entry(known.get(), reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
    return handle ? SameValue::same_value(trace.get(), THPVariable_Unpack(handle.get())) : at::Tensor();
  }

  const c10::SafeKernelFunction python;
};

// The kernel of ``lift_fresh`` at Functionalize: only under dispatch modes is there anything to do for this device.
// Twin of ``frontend.device.fake.install_lift``.
struct Lift final : c10::OperatorKernel {
  Lift(c10::SafeKernelFunction python, c10::SafeKernelFunction stock)
      : python(std::move(python)), stock(std::move(stock)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    (c10::impl::TorchDispatchModeTLS::stack_len() > 0 ? python : stock).callBoxed(op, keys, stack);
  }

  const c10::SafeKernelFunction python, stock;
};

} // namespace

// Register C++ kernels in front of the Python kernels of ``_to_copy`` from the host and of ``lift_fresh``. ``stock``:
// PyTorch's own kernel of the latter, as ``torch.library.get_kernel`` gives it.
// Twin of ``frontend.device.copies._empty``.
extern "C" PyObject* torchport_from_host(PyObject* stock) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  n_empties = PyUnicode_InternFromString("empties");
  n_is_lost = PyUnicode_InternFromString("is_lost");
  auto& dispatcher = c10::Dispatcher::singleton();
  const c10::OperatorHandle copy = dispatcher.findSchemaOrThrow("aten::_to_copy", ""),
                            lift = dispatcher.findSchemaOrThrow("aten::lift_fresh", "");
  const auto dense = c10::DispatchKey::PrivateUse1, functionalize = c10::DispatchKey::Functionalize;
  put(dense, copy.operator_name(), std::make_unique<FromHost>(copy.getComputedKernelForDispatchKey(dense)));
  const auto* found = pybind11_conduit_v1::get_type_pointer_ephemeral<c10::SafeKernelFunction>(stock);
  if (found == nullptr) {
    return nullptr;
  }
  put(functionalize, lift.operator_name(),
      std::make_unique<Lift>(lift.getComputedKernelForDispatchKey(functionalize), *found));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
