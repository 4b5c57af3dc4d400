// Kernels of operators that are not of the plain kind, where operators are interpreted at once: factories,
// attention. Part of follow.cpp.
//
// Each stands in front of a Python kernel, which gets every other call.
#pragma once
#include "direct.h"
#include "outs.h"
#include "writes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/zeros.h>

namespace {

// Whether functionalization itself is at work, so that a new value is in no wrapper.
// Twin of ``trace.wrapping.is_below``.
bool is_below() {
  using c10::DispatchKey;
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return excluded.has(DispatchKey::Functionalize) && !excluded.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// A factory's kernel. Its results are in wrappers, since PyTorch's functionalization sees operators with tensors only.
struct Factory final : c10::OperatorKernel {
  Factory(const Kernel& kernel, c10::SafeKernelFunction python) : kernel(kernel), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = kernel.letters.size();
    Start start;
    size_t opening = 0;
    bool done = false;
    {
      Gil gil;
      PutOff::settle(); // new memory may be as much again
      const Values given(stack->data() + stack->size() - count, count);
      THPObjectPtr of_thread = of_this_thread();
      if (THPObjectPtr trace = recording_trace(of_thread.get())) {
        if (PyObject* child = kernel.follow_if(trace.get(), given, makes_one)) {
          at::Tensor made = made_by(trace.get(), child);
          torch::jit::drop(*stack, count);
          stack->emplace_back(std::move(made));
          done = true;
        } else {
          start.note(trace.get(), given);
        }
      }
      if (THPObjectPtr trace = done ? THPObjectPtr() : kernel.trace_at_once(of_thread.get(), given, opening)) {
        done = run_direct(trace.get(), *kernel.direct, *stack, false);
        if (done && is_below()) {
          show(stack->back().toTensor());
        }
      }
    }
    if (!done) {
      python.callBoxed(op, keys, stack);
      kernel.learn_if(start, [](PyObject* child) { return makes_one(child) && !is_checkpoint(child); });
      learn_opening(opening);
    } else if (!is_below()) {
      stack->back() = in_wrapper(stack->back().toTensor());
    }
  }

 private:
  // Whether a node gives one new tensor and nothing else is to be done.
  static bool makes_one(PyObject* node) {
    PyObject* templates = py_.templates.of(node);
    return templates != nullptr && PyTuple_CheckExact(templates) && PyTuple_GET_SIZE(templates) == 1 &&
        Py_TYPE(PyTuple_GET_ITEM(templates, 0)) == py_.handle;
  }

  // Whether the trace is looked through at a node. Twin of ``trace.record.emit``.
  static bool is_checkpoint(PyObject* node) {
    THPObjectPtr depth(PyObject_GetAttrString(node, "depth"));
    const long long at = depth ? integer(depth.get()) : 0;
    PyErr_Clear();
    return at % checkpoint_every == 0;
  }

  // Twin of ``trace.pool.new_handle``.
  static at::Tensor made_by(PyObject* trace, PyObject* node) {
    PyObject* shape = PyTuple_GET_ITEM(py_.templates.of(node), 0);
    THPObjectPtr made(handle_like(THPVariable_Unpack(shape)));
    if (!made || PyObject_SetAttr(made.get(), py_.n_value_id, py_.first_id.of(node)) != 0 ||
        PyList_Append(py_.made.of(trace), made.get()) != 0) {
      throw python_error();
    }
    return THPVariable_Unpack(made.get());
  }

  const Kernel& kernel;
  const c10::SafeKernelFunction python;
};

// -- attention -------------------------------------------------------------------------------------------------------
PyObject* attention_of; // a function: runtime → when its attention is the CPU's, see ``Attends``
PyObject* n_attention; // its answer's key in ``runtime.manners``

enum Attends : long { kNever = 0, kAtOnce = 1, kAlways = 2 };

// When a runtime's attention is the CPU's fused operator.
long attends(PyObject* runtime) {
  const Owner of_runtime = bound(runtime);
  PyObject* manners = of_runtime == nullptr ? nullptr : of_runtime->manners.get();
  PyObject* known = manners == nullptr ? nullptr : PyDict_GetItemWithError(manners, n_attention);
  if (known != nullptr) {
    return static_cast<long>(integer(known));
  }
  THPObjectPtr asked(manners == nullptr ? nullptr : PyObject_CallOneArg(attention_of, runtime));
  if (!asked || PyDict_SetItem(manners, n_attention, asked.get()) != 0) {
    PyErr_Clear();
    return kNever;
  }
  return static_cast<long>(integer(asked.get()));
}

// The kernel of ``scaled_dot_product_attention`` at this device's autograd key.
// Twin of ``backend.host.cpu_attention``.
struct Attention final : c10::OperatorKernel {
  static constexpr size_t count = 8; // query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
  explicit Attention(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!run(*stack)) {
      python.callBoxed(op, keys, stack);
    }
  }

  // Call the CPU's fused operator, if it is wanted for such a call; false with nothing done if not.
  static bool run(torch::jit::Stack& stack) {
    const Values given(stack.data() + stack.size() - count, count);
    if (!is_fused(given) || !is_wanted(given)) {
      return false;
    }
    std::optional<at::Tensor> mask;
    if (is_there(given[3])) {
      mask = given[3].toTensor();
      if (mask->scalar_type() == at::kBool) {
        const at::Tensor zeros = at::zeros(mask->sizes(), given[0].toTensor().options().requires_grad(false));
        mask = zeros.masked_fill(mask->bitwise_not(), -std::numeric_limits<double>::infinity());
      }
      if (mask->stride(-1) != 0 && mask->stride(-1) != 1) {
        mask = mask->contiguous();
      }
    }
    at::Tensor made = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        dense_at_end(given[0]), dense_at_end(given[1]), dense_at_end(given[2]), 0.0, given[5].toBool(), mask,
        given[6].toOptional<double>()));
    torch::jit::drop(stack, count);
    stack.emplace_back(std::move(made));
    return true;
  }

 private:
  static bool is_there(const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined();
  }

  // The kernel steps through memory as if the last dimension were contiguous, and does not check.
  static at::Tensor dense_at_end(const c10::IValue& given) {
    const at::Tensor& tensor = given.toTensor();
    return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  }

  static bool is_fused(Values given) {
    const auto ours = [](const c10::IValue& value) { return is_there(value) && is_ours(value.toTensor()); };
    if (!at::globalContext().userEnabledFlashSDP() || !std::all_of(given.begin(), given.begin() + 3, ours) ||
        given[4].toDouble() != 0.0 || given[7].toBool()) {
      return false;
    }
    const at::Tensor &query = given[0].toTensor(), &key = given[1].toTensor(), &value = given[2].toTensor();
    const auto dtype = query.scalar_type();
    const bool floats = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
    const bool fused = query.dim() == 4 && key.dim() == 4 && floats && key.sizes() == value.sizes() &&
        key.size(3) == query.size(3) && key.size(0) == query.size(0) && key.size(1) == query.size(1) &&
        query.numel() > 0 && key.size(2) > 0;
    if (!fused || !is_there(given[3])) {
      return fused;
    }
    const at::Tensor& mask = given[3].toTensor();
    return !given[5].toBool() && ours(given[3]) && (mask.dim() == 2 || mask.dim() == 4) && !mask.requires_grad() &&
        (mask.scalar_type() == at::kBool || mask.scalar_type() == dtype);
  }

  // Whether the backend's attention is the CPU's for such a call.
  static bool is_wanted(Values given) {
    const auto asks = [](const c10::IValue& value) { return value.toTensor().requires_grad(); };
    const bool differentiated = at::GradMode::is_enabled() && std::any_of(given.begin(), given.begin() + 3, asks);
    Gil gil;
    THPObjectPtr of_thread = of_this_thread();
    if (THPObjectPtr trace = direct_trace(of_thread.get())) {
      const long when = attends(py_.runtime.of(trace.get()));
      return when == kAlways || (when == kAtOnce && !differentiated && observing_of.of(trace.get()) == Py_False);
    }
    THPObjectPtr trace = recording_trace(of_thread.get());
    return trace && attends(py_.runtime.of(trace.get())) == kAlways;
  }

  const c10::SafeKernelFunction python;
};

} // namespace

namespace {

// The kernel of a composite operator at Functionalize, which is reached where its autograd key is skipped: in inference
// mode, and inside the kernels of other libraries. It is taken apart here, too.
// Twin of ``frontend.device.composites._apart``.
struct Composite final : c10::OperatorKernel {
  Composite(bool is_attention, c10::SafeKernelFunction python)
      : is_attention(is_attention), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const Values given(stack->data() + stack->size() - count, count);
    if (!is_first_ours(given)) {
      python.callBoxed(op, keys, stack);
    } else if (is_attention && c10::InferenceMode::is_enabled()) {
      if (!Attention::run(*stack)) {
        python.callBoxed(op, keys, stack);
      }
    } else if (routed && c10::InferenceMode::is_enabled()) { // a backend's kernel at the autograd key was skipped, too
      python.callBoxed(op, keys, stack);
    } else {
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    }
  }

  bool routed = false; // some backend has a kernel of its own

 private:
  // Whether the first wrapper among the arguments is of a handle, and not of a compiler that traces.
  static bool is_first_ours(Values given) {
    for (const c10::IValue& value : given) {
      if (value.isTensorList()) {
        if (is_first_ours(value.toListRef())) {
          return true;
        }
      } else if (value.isTensor() && wrapper_of(value.toTensor()) != nullptr) {
        return is_ours(value.toTensor());
      }
    }
    return false;
  }

  const bool is_attention;
  const c10::SafeKernelFunction python;
};

std::unordered_map<std::string, Composite*>& composites() {
  static auto& all = *new std::unordered_map<std::string, Composite*>(); // never freed
  return all;
}

} // namespace

// Register a C++ kernel in front of the Python kernel that takes a composite operator apart.
// Twin of ``frontend.device.composites._apart``.
extern "C" PyObject* torchport_composite(const char* name, const char* overload) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto functionalize = c10::DispatchKey::Functionalize;
  const std::string full = std::string(name) + "." + overload;
  auto made = std::make_unique<Composite>(
      full == "aten::scaled_dot_product_attention.", op.getComputedKernelForDispatchKey(functionalize));
  composites()[full] = made.get();
  put(functionalize, op.operator_name(), std::move(made));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// A backend has a kernel of its own for a composite operator.
extern "C" PyObject* torchport_composite_routed(const char* name, const char* overload) {
  HANDLE_TH_ERRORS
  const auto found = composites().find(std::string(name) + "." + overload);
  if (found != composites().end()) {
    found->second->routed = true;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Look up what interpreting operators at once needs. Must be called before ``torchport_direct``.
extern "C" PyObject* torchport_direct_start(
    PyObject* data, PyObject* spec, PyObject* trace, PyObject* manner, PyObject* of_dtype, PyObject* observe,
    PyObject* of_views, PyObject* reopened, PyObject* decided) {
  HANDLE_TH_ERRORS
  const std::vector<std::tuple<PyObject*, const char*, Slot*>> slots = {
      {trace, "direct", &direct_of}, {trace, "observing", &observing_of}, {trace, "root", &root_of},
      {trace, "sights", &sights_of}, {data, "device", &data_device},
      {data, "spec", &data_spec},    {data, "tensor", &data_tensor},      {spec, "shape", &spec_shape},
      {spec, "dtype", &spec_dtype},  {spec, "strides", &spec_strides}};
  for (const auto& [type, name, slot] : slots) {
    if (!find_slot(type, name, *slot)) {
      return nullptr;
    }
  }
  for (PyObject* held : {data, spec, manner, of_dtype, observe, of_views, reopened, decided}) {
    Py_INCREF(held);
  }
  host_data = reinterpret_cast<PyTypeObject*>(data);
  spec_type = reinterpret_cast<PyTypeObject*>(spec);
  manner_type = reinterpret_cast<PyTypeObject*>(manner);
  make_template = of_dtype;
  observed = observe;
  views = of_views;
  reopen = reopened;
  decide = decided;
  zero = PyLong_FromLong(0);
  n_by_index = PyUnicode_InternFromString("_by_index");
  n_device = PyUnicode_InternFromString("device");
  n_manners = PyUnicode_InternFromString("manners");
  if (!may_be_unseen) { // once in a process, however often the device is installed
    static auto& library = *new torch::Library(torch::Library::IMPL, "_", kUnseen, __FILE__, __LINE__); // never freed
    try {
      library.fallback(torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Show>()));
      may_be_unseen = true;
    } catch (const c10::Error&) { // another library has its own
    }
  }
  n_class = PyUnicode_InternFromString("__class__");
  n_keeps_tensors = PyUnicode_InternFromString("keeps_tensors");
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// A handle, in the form that Python knows; anything else as it is.
extern "C" PyObject* torchport_shown(PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (THPVariable_Check(tensor)) {
    show(THPVariable_Unpack(tensor));
  }
  return Py_NewRef(tensor);
  END_HANDLE_TH_ERRORS
}

// Have a kernel of ``torchport_follow`` interpret its operator at once, by calling operator ``name`` on CPU tensors.
// ``keywords``: per argument its name if it is keyword-only, else "". ``kinds``: a letter per argument, or "" where
// calls are not noted for shape inference. Returns False if the two operators differ in their number of arguments.
// Twin of ``run.direct.run``.
extern "C" PyObject* torchport_direct(
    PyObject* serial, PyObject* rule, const char* name, const char* overload, PyObject* keywords, int shares,
    int is_factory, int varying, int but_wide, int is_blank, const char* kinds) {
  HANDLE_TH_ERRORS
  Kernel& kernel = *kernels().at(integer(serial));
  if (kernel.direct) { // another thread may be in it
    Py_RETURN_TRUE;
  }
  const c10::OperatorHandle callee = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  if (callee.schema().arguments().size() != kernel.letters.size()) {
    Py_RETURN_FALSE;
  }
  std::vector<std::string> names;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(keywords); ++at) {
    names.emplace_back(PyUnicode_AsUTF8(PyTuple_GET_ITEM(keywords, at)));
  }
  std::string ways = kernel.letters;
  for (size_t at = 0; at < ways.size(); ++at) {
    const bool is_number = (ways[at] == 's' || ways[at] == 'S') && varying != 0;
    const bool is_read = std::strchr("tTgd", ways[at]) != nullptr;
    ways[at] = names[at] == "pin_memory" ? '-' : is_number ? 's' : is_read ? ways[at] : '=';
  }
  Py_INCREF(rule);
  Py_INCREF(serial);
  kernel.direct = std::unique_ptr<Direct>(new Direct{
      callee, shares != 0, is_factory != 0, varying != 0, but_wide != 0, is_blank != 0, rule, serial, std::move(names),
      kinds, std::move(ways), elementwise(callee)});
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// Ask Python again how operators are interpreted: a backend's kernels have changed.
extern "C" PyObject* torchport_direct_forget() {
  HANDLE_TH_ERRORS
  last_bound()->decisions = ++newest_decisions;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Leave calls of an operator with arguments of these shapes to Python: a region may begin with them. Nothing to do
// where Python runs the operator in any case.
extern "C" PyObject* torchport_direct_anchor(PyObject* serial, PyObject* shapes) {
  HANDLE_TH_ERRORS
  const auto found = kernels().find(integer(serial));
  if (found != kernels().end() && found->second->direct) {
    std::vector<int64_t>& anchor = found->second->direct->anchors.emplace_back();
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(shapes); ++at) {
      anchor.push_back(integer(PyTuple_GET_ITEM(shapes, at)));
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of the Python kernel of a factory, to interpret it at once. ``serial``, ``letters``: as
// for ``torchport_follow``.
// Twin of ``run.direct.run``.
extern "C" PyObject* torchport_direct_factory(
    const char* name, const char* overload, const char* letters, long long serial) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  Kernel& kernel = *(kernels()[serial] = new Kernel{letters, serial, false, nullptr});
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto dense = c10::DispatchKey::PrivateUse1;
  put(dense, op.operator_name(), std::make_unique<Factory>(kernel, op.getComputedKernelForDispatchKey(dense)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of the Python kernel of ``scaled_dot_product_attention``. ``answer``: a function that
// says of a runtime when its attention is the CPU's fused operator, as ``Attends`` has it.
// Twin of ``backend.host.cpu_attention``.
extern "C" PyObject* torchport_attention(PyObject* answer) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  TORCH_CHECK(
      op.schema().arguments().size() == Attention::count, "attention has other arguments than those known here");
  attention_of = Py_NewRef(answer);
  n_attention = PyUnicode_InternFromString("attention");
  const auto autograd = c10::DispatchKey::AutogradPrivateUse1;
  put(autograd, op.operator_name(), std::make_unique<Attention>(op.getComputedKernelForDispatchKey(autograd)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
