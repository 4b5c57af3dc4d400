// Kernels of copies between host and device and of reads, where values are CPU tensors: copies to the device, to the
// host and to another dtype, and numbers that Python is given. Part of follow.cpp.
//
// Each stands in front of a Python kernel, which gets every other call. Tensors without elements that come from the
// host, such as ``torch.tensor([])``, with which libraries begin a cache, have one value per dtype: each is another
// handle of it.
#pragma once
#include "direct.h"
#include "openings.h"
#include "writes.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/DynamicTypes.h>

namespace {

PyObject *n_empties, *n_is_lost, *n_interprets, *n_end_direct; // names
PyObject *note_read, *note_copied; // run.values.note_read and note_copied

constexpr int64_t kSmall = 1 << 14; // elements of a tensor that is copied here: Python's part of a larger one is little

// How a runtime's values go together with CPU tensors (``DeviceRuntime.keeps_tensors``).
enum Keeps : long { kNone = 0, kShared = 1, kOwn = 2 };

long keeps_tensors(PyObject* runtime) {
  THPObjectPtr keeps(PyObject_GetAttr(runtime, n_keeps_tensors));
  if (!keeps) {
    PyErr_Clear();
    return kNone;
  }
  return static_cast<long>(integer(keeps.get()));
}

// The calling thread's trace of index 0 in whatever mode, if what its runtime's handles hold may be read here.
THPObjectPtr trace_of_tensors(PyObject* of_thread) {
  THPObjectPtr trace = any_trace(of_thread);
  const bool may = trace && is_default() && keeps_tensors(py_.runtime.of(trace.get())) != kNone;
  return may ? std::move(trace) : THPObjectPtr();
}

// Call a function that takes nothing; raises what it raises.
void call(PyObject* function) {
  THPObjectPtr done(PyObject_CallNoArgs(function));
  if (!done) {
    throw python_error();
  }
}

// The kernel of ``_to_copy`` at Functionalize: a copy to another dtype or memory format on the same device, or to the
// host.
// Twin of ``frontend.device.copies._to_copy``.
struct ToCopy final : c10::OperatorKernel {
  static constexpr size_t count = 7; // self, dtype, layout, device, pin_memory, non_blocking, memory_format
  ToCopy(const Kernel& kernel, c10::SafeKernelFunction python) : kernel(kernel), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Values given(stack->data() + stack->size() - count, count);
    at::Tensor made;
    if (given[0].isTensor() && is_ours(given[0].toTensor())) {
      made = given[3].isDevice() && given[3].toDevice().is_cpu() ? on_host(given) : at_once(given);
    }
    if (!made.defined()) {
      python.callBoxed(op, keys, stack);
      return;
    }
    torch::jit::drop(*stack, count);
    stack->emplace_back(made.is_cpu() ? std::move(made) : in_wrapper(made));
  }

  // The copy as a handle; undefined where Python has to make it.
  at::Tensor at_once(Values given) const {
    if (!is_here(given[3])) {
      return {};
    }
    Gil gil;
    THPObjectPtr trace = direct_trace(of_this_thread().get());
    if (!trace || !kernel.is_direct(trace.get())) {
      return {};
    }
    torch::jit::Stack values{unwrap(given[0].toTensor()), given[1], c10::IValue(), c10::IValue(),
                             c10::IValue(), false, given[6]};
    if (!run_direct(trace.get(), *kernel.direct, values, false)) {
      return {};
    }
    return values.back().toTensor();
  }

  // A copy of a small value that is there, as a CPU tensor; undefined where Python has to make it.
  static at::Tensor on_host(Values given) {
    if (!given[6].isNone()) {
      return {};
    }
    Gil gil;
    THPObjectPtr trace = trace_of_tensors(of_this_thread().get());
    const at::Tensor held =
        trace ? held_by(unwrap(given[0].toTensor()), py_.runtime.of(trace.get())).tensor : at::Tensor();
    if (!held.defined() || held.numel() > kSmall || !held.is_non_overlapping_and_dense()) {
      return {};
    }
    at::Tensor made = given[1].isNone() || given[1].toScalarType() == held.scalar_type()
        ? held.clone()
        : held.to(given[1].toScalarType());
    call(note_read);
    return made;
  }

  const Kernel& kernel;
  const c10::SafeKernelFunction python;
};

// The kernel of ``_to_copy`` at this device's key, for host tensors.
// Twin of ``frontend.device.copies._empty``.
struct FromHost final : c10::OperatorKernel {
  explicit FromHost(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Values given(stack->data() + stack->size() - ToCopy::count, ToCopy::count);
    at::Tensor made;
    if (is_plain(given[0].toTensor()) && is_here(given[3]) && given[6].isNone()) {
      Gil gil;
      PutOff::settle(); // new memory may be as much again
      THPObjectPtr of_thread = of_this_thread();
      made = of_empty(of_thread.get(), given);
      if (!made.defined()) {
        made = of_small(of_thread.get(), given);
      }
    }
    if (!made.defined()) {
      python.callBoxed(op, keys, stack);
      return;
    }
    torch::jit::drop(*stack, ToCopy::count);
    stack->emplace_back(in_wrapper(made));
  }

 private:
  static bool is_plain(const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
        !tensor.key_set().has(c10::DispatchKey::Python) && !tensor._is_zerotensor() &&
        !at::functionalization::impl::isFunctionalTensor(tensor);
  }

  // The dtype that is asked for.
  static at::ScalarType dtype_of(Values given) {
    return given[1].isNone() ? given[0].toTensor().scalar_type() : given[1].toScalarType();
  }

  // The copy as a handle, if the tensor is an empty one whose value is there; else undefined.
  static at::Tensor of_empty(PyObject* of_thread, Values given) {
    const at::Tensor& tensor = given[0].toTensor();
    if (tensor.dim() != 1 || tensor.numel() != 0 || tensor.stride(0) != 1) {
      return {};
    }
    THPObjectPtr trace = recording_trace(of_thread);
    if (!trace) {
      trace = direct_trace(of_thread);
    }
    PyObject* runtime = trace ? py_.runtime.of(trace.get()) : nullptr;
    THPObjectPtr known(runtime == nullptr ? nullptr : PyObject_GetAttr(runtime, n_empties)),
        lost(known ? PyObject_GetAttr(runtime, n_is_lost) : nullptr);
    if (!lost || lost.get() != Py_False || !PyDict_CheckExact(known.get())) {
      PyErr_Clear();
      return {};
    }
    PyObject* const dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype_of(given)));
    THPObjectPtr handle(Py_XNewRef(entry(known.get(), dtype)));
    return handle ? SameValue::same_value(trace.get(), THPVariable_Unpack(handle.get())) : at::Tensor();
  }

  // The copy as a handle, of a small tensor while nothing is pending; else undefined.
  // Twin of ``frontend.device.copies._host_to_device``.
  static at::Tensor of_small(PyObject* of_thread, Values given) {
    const at::Tensor& tensor = given[0].toTensor();
    if (tensor.numel() == 0 || tensor.numel() > kSmall) {
      return {};
    }
    THPObjectPtr trace = trace_of_tensors(of_thread);
    if (!trace) {
      return {};
    }
    const bool at_once = is_at_once(trace.get());
    PyObject* runtime = py_.runtime.of(trace.get());
    Py_INCREF(runtime); // the trace may get another one below
    const THPObjectPtr held(runtime);
    if (!is_empty(trace.get())) {
      return {}; // a batch may end what is pending
    }
    const bool takes = at_once || keeps_tensors(runtime) == kOwn || !has_children(trace.get());
    if (!takes || !(at_once || interprets(runtime))) {
      return {}; // a computation is going to want values in the engine's own form
    }
    const Owner of_runtime = bound(runtime);
    if (of_runtime == nullptr) {
      return {};
    }
    if (at_once && tensor.numel() > 1) { // with a batch a path ends
      THPObjectPtr ended(PyObject_CallMethodNoArgs(trace.get(), n_end_direct));
      if (!ended) {
        throw python_error();
      }
    }
    const DefaultState state;
    const at::Tensor plain = tensor.detach();
    const at::ScalarType dtype = dtype_of(given);
    at::Tensor copy = dtype == plain.scalar_type() ? plain.clone() : plain.to(dtype);
    at::Tensor made = handle_with(std::move(copy), of_runtime, Sharing::nobody);
    THPObjectPtr handle(THPVariable_Wrap(made));
    if (!handle || (tensor.numel() > 1 && PyObject_SetAttr(handle.get(), py_.n_fresh, Py_True) != 0)) {
      throw python_error();
    }
    call(note_copied);
    return made;
  }

  static bool interprets(PyObject* runtime) {
    THPObjectPtr does(PyObject_GetAttr(runtime, n_interprets));
    if (!does) {
      throw python_error();
    }
    return does.get() == Py_True;
  }

  static bool has_children(PyObject* trace) {
    return PyDict_Size(py_.children.of(root_of.of(trace))) != 0;
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

// The kernel of ``_local_scalar_dense``, which reads a number, of a value that is there.
// Twin of ``frontend.device.copies._local_scalar_dense``.
struct ReadNumber final : c10::OperatorKernel {
  explicit ReadNumber(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    {
      Gil gil;
      THPObjectPtr trace = trace_of_tensors(of_this_thread().get());
      const at::Tensor held =
          trace ? held_by(stack->back().toTensor(), py_.runtime.of(trace.get())).tensor : at::Tensor();
      if (held.defined() && held.numel() == 1) {
        const at::Scalar read = held.item();
        call(note_read);
        stack->back() = read;
        return;
      }
      show(stack->back().toTensor());
    }
    python.callBoxed(op, keys, stack);
  }

  const c10::SafeKernelFunction python;
};

} // namespace

// Register C++ kernels in front of the Python kernels of ``_to_copy`` from the host and of ``lift_fresh``. ``stock``:
// PyTorch's own kernel of the latter, as ``torch.library.get_kernel`` gives it. ``copied``: a function to call when a
// tensor was copied.
// Twin of ``frontend.device.copies._empty``.
extern "C" PyObject* torchport_from_host(PyObject* stock, PyObject* copied) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  n_empties = PyUnicode_InternFromString("empties");
  n_is_lost = PyUnicode_InternFromString("is_lost");
  n_interprets = PyUnicode_InternFromString("interprets");
  n_end_direct = PyUnicode_InternFromString("end_direct");
  note_copied = Py_NewRef(copied);
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

// Register a C++ kernel in front of the Python kernel of ``_to_copy`` from this device. ``serial``, ``letters``: as for
// ``torchport_follow``.
// Twin of ``frontend.device.copies._to_copy``.
extern "C" PyObject* torchport_direct_to_copy(const char* letters, long long serial) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  Kernel& kernel = *(kernels()[serial] = new Kernel{letters, serial, false, nullptr});
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_to_copy", "");
  TORCH_CHECK(op.schema().arguments().size() == ToCopy::count, "_to_copy has other arguments than those known here");
  const auto functionalize = c10::DispatchKey::Functionalize;
  put(functionalize, op.operator_name(),
      std::make_unique<ToCopy>(kernel, op.getComputedKernelForDispatchKey(functionalize)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of the Python kernel of ``_local_scalar_dense``. ``note``: a function to call when a
// number was read.
// Twin of ``frontend.device.copies._local_scalar_dense``.
extern "C" PyObject* torchport_read_number(PyObject* note) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_local_scalar_dense", "");
  note_read = Py_NewRef(note);
  const auto dense = c10::DispatchKey::PrivateUse1;
  put(dense, op.operator_name(), std::make_unique<ReadNumber>(op.getComputedKernelForDispatchKey(dense)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
