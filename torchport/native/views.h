// Views. Part of follow.cpp.
//
// A program takes about as many views as it calls other operators, and PyTorch does much for each: autograd makes two
// functions that take the view again, which it needs where a view is written and differentiated; functionalization makes
// a step of its own (``ViewMeta``) for the write's way back; both go through the dispatcher with boxed arguments.
//
// Steps say nothing but the operator and its arguments, so the step of an earlier call with the same arguments serves
// again. And where gradients are off, autograd's functions are small ones that call the operator (``Way``); they are
// called where a view is written under forward gradients, or by a compiler.
#pragma once
#include "direct.h"
#include "outs.h"
#include "wrapped.h"

#include <array>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/ops/_reshape_alias_ops.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/split_with_sizes_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unbind_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

namespace {

// What functionalization keeps of each of an operator's views, and the operator's arguments but the first.
struct Steps {
  std::vector<std::shared_ptr<at::functionalization::ViewMeta>> each;
  std::vector<c10::IValue> arguments;
};

using ViewArguments = c10::SmallVector<int64_t, 8>;

constexpr size_t kMostKnown = 1024; // of one operator

// Added to a key set, its autograd key leads to PyTorch's own kernel, as in ``frontend/device/routes.py``.
constexpr auto kStockAutograd = c10::BackendComponent::PrivateUse3Bit;

// Arguments as numbers; false for sizes that are symbols.
bool number(ViewArguments& made, int64_t value) {
  made.push_back(value);
  return true;
}
bool number(ViewArguments& made, const c10::SymInt& value) {
  const auto known = value.maybe_as_int();
  made.push_back(known.value_or(0));
  return known.has_value();
}
bool number(ViewArguments& made, const std::optional<c10::SymInt>& value) {
  made.push_back(value.has_value());
  return number(made, value.value_or(c10::SymInt(0)));
}
template <class Item>
bool number(ViewArguments& made, c10::ArrayRef<Item> values) {
  made.push_back(static_cast<int64_t>(values.size()));
  return std::all_of(values.begin(), values.end(), [&](const Item& value) { return number(made, value); });
}

// How many writes to its memory a wrapper's value has. PyTorch leaves it at 0 for a view, and takes the view of what was
// written once more at its first use. There is no function that sets it; an explicit instantiation may name the member.
size_t& writes_seen(at::FunctionalTensorWrapper& wrapper);
template <auto member>
struct WritesSeen {
  friend size_t& writes_seen(at::FunctionalTensorWrapper& wrapper) {
    return wrapper.*member;
  }
};
template struct WritesSeen<&at::FunctionalTensorWrapper::generation_>;

// Whether autograd notes nothing but which tensor is a view of which: gradients are off, also forward ones.
bool notes_no_gradients(const at::Tensor& tensor) {
  return !at::GradMode::is_enabled() &&
      (tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr || !tensor._fw_grad(0).defined());
}

// How a view is taken of a base: by one operator after another. A loop that goes on taking views of views makes long
// ways, so nothing is done by recursion.
struct Way {
  std::shared_ptr<Way> before;
  const c10::OperatorHandle* op;
  std::shared_ptr<const Steps> steps;
  int64_t which; // of the operator's results

  Way(std::shared_ptr<Way> before, const c10::OperatorHandle& op, std::shared_ptr<const Steps> steps, int64_t which)
      : before(std::move(before)), op(&op), steps(std::move(steps)), which(which) {}
  Way(const Way&) = default;
  Way(Way&&) = default;
  ~Way() {
    while (before != nullptr && before.use_count() == 1) {
      before = std::exchange(before->before, nullptr);
    }
  }

  at::Tensor of(at::Tensor base) const {
    std::vector<const Way*> steps_back;
    for (const Way* step = this; step != nullptr; step = step->before.get()) {
      steps_back.push_back(step);
    }
    for (auto step = steps_back.rbegin(); step != steps_back.rend(); ++step) {
      torch::jit::Stack stack = {std::move(base)};
      stack.insert(stack.end(), (*step)->steps->arguments.begin(), (*step)->steps->arguments.end());
      (*step)->op->callBoxed(&stack);
      base = stack.back().isTensor() ? stack.back().toTensor() : stack.back().toTensorList().get((*step)->which);
    }
    return base;
  }
};

struct OfWay final : torch::autograd::ViewFunc {
  explicit OfWay(Way way) : way(std::move(way)) {}

  at::Tensor operator()(const at::Tensor& base) const override {
    return way.of(base);
  }
  std::unique_ptr<torch::autograd::ViewFunc> clone_and_set(
      std::optional<std::vector<c10::SymInt>>, std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<OfWay>(way);
  }

  const Way way;
};

// Stands for the way back from such a view, which PyTorch keeps and does not ask for itself.
at::Tensor no_way_back(const at::Tensor&) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "the device does not know the way back from a view that was taken where gradients are off; take it where they are on");
}

// One operator's kernels. Any other call goes to PyTorch's own.
template <class Op, class Schema = typename Op::schema>
struct View;

template <class Op, class Out, class... Args>
struct View<Op, Out(const at::Tensor&, Args...)> {
  using Known = std::unordered_map<ViewArguments, std::shared_ptr<Steps>, HashOfNumbers>;
  static inline const Kernel* kernel = nullptr; // of the operator that copies the view, which handles know
  static inline const c10::SafeKernelFunction* original = nullptr; // at Functionalize; never freed
  static inline const c10::SafeKernelFunction* stock = nullptr; // PyTorch's at an autograd key; never freed
  static inline Known& known = *new Known(); // guarded by the GIL; never freed

  // At Functionalize.
  static Out view(c10::DispatchKeySet keys, const at::Tensor& self, Args... args) {
    bool is_new = false;
    if (Out made; shown(keys.remove_backend(kStockAutograd), self, made, is_new, args...)) {
      return made;
    }
    Out made = boxed(*original, keys.remove_backend(kStockAutograd), self, args...);
    if (is_new) {
      learn(self, made, args...);
    }
    return made;
  }

  // At this device's autograd key.
  static Out with_autograd(c10::DispatchKeySet keys, const at::Tensor& self, Args... args) {
    const auto below = keys & c10::after_ADInplaceOrView_keyset;
    if (!below.has(c10::DispatchKey::Functionalize)) { // no wrapper of ours
      return boxed(*stock, keys, self, args...);
    }
    bool is_new = false;
    std::shared_ptr<const Steps> steps;
    if (Out made; keys.has(c10::DispatchKey::ADInplaceOrView) && notes_no_gradients(self) &&
        shown(below, self, made, is_new, args..., &steps)) {
      return noted(self, std::move(made), steps);
    }
    const auto stocks = keys.add(c10::DispatchKey::AutogradPrivateUse3).remove(c10::DispatchKey::PythonDispatcher);
    return Op::redispatch(stocks, self, args...); // ``view`` takes the other backend's bit away again
  }

 private:
  static Out boxed(
      const c10::SafeKernelFunction& kernel, c10::DispatchKeySet keys, const at::Tensor& self, const Args&... args) {
    torch::jit::Stack stack;
    torch::jit::push(stack, self, args...);
    kernel.callBoxed(kernel.opHandle(), keys, &stack);
    return stack.back().to<Out>();
  }

  // The views in wrappers, if a known path is followed or the operator is interpreted at once; else false, with nothing
  // done. ``is_new``: the steps are not known yet.
  static bool shown(
      c10::DispatchKeySet keys, const at::Tensor& self, Out& made, bool& is_new, const Args&... args,
      std::shared_ptr<const Steps>* taken = nullptr) {
    if (!goes_to_handles(keys) || !is_ours(self) || at::functionalization::impl::getFunctionalizationReapplyViewsTLS()) {
      return false;
    }
    at::FunctionalTensorWrapper* wrapper = wrapper_of(self);
    ViewArguments numbers;
    if (!wrapper->is_up_to_date() || !(number(numbers, args) && ...)) {
      return false;
    }
    Results results;
    bool are_values = false;
    const Gil gil;
    const auto found = known.find(numbers);
    is_new = found == known.end();
    const auto held = is_new ? nullptr : found->second; // Python may run below
    if (is_new || !serve(wrapper->value(), results, are_values, held->arguments, args...)) {
      return false;
    }
    auto& steps = held->each;
    while (steps.size() < results.size()) {
      steps.push_back(steps[0]->to_out_index(static_cast<int64_t>(steps.size())));
    }
    const auto wrapped = [&](size_t at) {
      at::Tensor made = without_key(at::detail::make_tensor<at::FunctionalTensorWrapper>(results[at], wrapper, steps[at]));
      if (are_values) { // paths that are recorded have the view twice, as they have without C++
        writes_seen(*wrapper_of(made)) = writes_seen(*wrapper);
      }
      return made;
    };
    if (taken != nullptr) {
      *taken = held;
    }
    if constexpr (std::is_same_v<Out, at::Tensor>) {
      made = wrapped(0);
    } else {
      for (size_t at = 0; at < results.size(); ++at) {
        made.push_back(wrapped(at));
      }
    }
    return true;
  }

  // The handles of the views of a handle. ``are_values``: they were computed.
  static bool serve(
      const at::Tensor& handle, Results& results, bool& are_values, const std::vector<c10::IValue>& boxed, const Args&... args) {
    THPObjectPtr of_thread = of_this_thread();
    const Now now(of_thread.get());
    if (now.recording != nullptr) {
      std::array<c10::IValue, 1 + sizeof...(Args)> given = {handle};
      std::copy(boxed.begin(), boxed.end(), given.begin() + 1);
      PyObject* child = kernel->follow(now.recording, given, false);
      results = child == nullptr ? Results() : results_of(child);
      return child != nullptr;
    }
    are_values = now.at_once != nullptr && kernel->is_direct(now.at_once) && at_once(now.at_once, handle, results, args...);
    return are_values;
  }

  // The views of a handle's value.
  // Twin of ``run.direct.run``.
  static bool at_once(PyObject* trace, const at::Tensor& handle, Results& results, const Args&... args) {
    const AtOnce ready(trace, *kernel->direct);
    if (!ready || ready.notes() || !kernel->direct->anchors.empty()) {
      return false;
    }
    Held held = held_by(handle, ready.runtime);
    if (!held.tensor.defined()) {
      return false;
    }
    Out views;
    try {
      const at::AutoDispatchBelowADInplaceOrView values_are_no_views; // to autograd
      views = Op::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), held.tensor, args...);
    } catch (const std::exception&) {
      return false; // again in the Python kernel, whose error names the user's line
    }
    const Sharing sharing = held.share();
    const auto add = [&](at::Tensor one) { results.push_back(unseen_handle(std::move(one), ready.owner, sharing)); };
    if constexpr (std::is_same_v<Out, at::Tensor>) {
      add(std::move(views));
    } else {
      for (at::Tensor& one : views) {
        add(std::move(one));
      }
    }
    ready.count();
    return true;
  }

  static void learn(const at::Tensor& self, const Out& made, const Args&... args) {
    const at::Tensor* first = nullptr;
    if constexpr (std::is_same_v<Out, at::Tensor>) {
      first = &made;
    } else if (!made.empty()) {
      first = &made[0];
    }
    at::FunctionalTensorWrapper* wrapper = first == nullptr ? nullptr : wrapper_of(*first);
    ViewArguments numbers;
    if (wrapper == nullptr || wrapper->view_metas().size() != wrapper_of(self)->view_metas().size() + 1 ||
        !(number(numbers, args) && ...)) {
      return;
    }
    const Gil gil;
    if (known.size() >= kMostKnown) {
      known.clear();
    }
    known.insert_or_assign(std::move(numbers), std::make_shared<Steps>(Steps{{wrapper->view_metas().back()}, {c10::IValue(args)...}}));
  }

  // What autograd notes of views where gradients are off.
  static Out noted(const at::Tensor& self, Out made, const std::shared_ptr<const Steps>& steps) {
    if constexpr (std::is_same_v<Out, at::Tensor>) {
      return noted_one(self, made, steps, 0);
    } else {
      for (size_t at = 0; at < made.size(); ++at) {
        made[at] = noted_one(self, made[at], steps, static_cast<int64_t>(at));
      }
      return made;
    }
  }

  static at::Tensor noted_one(
      const at::Tensor& self, const at::Tensor& view, const std::shared_ptr<const Steps>& steps, int64_t which) {
    using namespace torch::autograd;
    const DifferentiableViewMeta* const of_view = impl::get_view_autograd_meta(self);
    const ViewInfo* const of_self =
        of_view != nullptr && of_view->shared_view_info() && of_view->has_bw_view() ? &of_view->get_backward_view() : nullptr;
    const OfWay* before = nullptr;
    if (of_self != nullptr && of_self->has_view_fn()) {
      const ViewFunc& known = of_self->view_fn();
      before = typeid(known) == typeid(OfWay) ? static_cast<const OfWay*>(&known) : nullptr;
    }
    auto way = std::make_unique<OfWay>(
        Way(before == nullptr ? nullptr : std::make_shared<Way>(before->way), original->opHandle(), steps, which));
    if (before == nullptr) {
      return as_view(self, view, true, true, std::move(way), no_way_back, CreationMeta::NO_GRAD_MODE);
    }
    return make_variable_differentiable_view(
        view, ViewInfo(of_self->base_, std::move(way), no_way_back), std::nullopt, true,
        propagate_creation_meta(of_view->get_creation_meta(), CreationMeta::NO_GRAD_MODE));
  }
};

template <class Op>
bool put_view(const c10::OperatorHandle& op, const Kernel& kernel) {
  if (op.schema().name() != Op::name || op.schema().overload_name() != Op::overload_name) {
    return false;
  }
  const auto functionalize = c10::DispatchKey::Functionalize, autograd = c10::DispatchKey::AutogradPrivateUse1;
  View<Op>::kernel = &kernel;
  if (View<Op>::original) { // the device is installed once more
    return true;
  }
  View<Op>::original = new c10::SafeKernelFunction(op.getComputedKernelForDispatchKey(functionalize));
  View<Op>::stock = new c10::SafeKernelFunction(
      op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse3));
  put(functionalize, op.operator_name(), torch::CppFunction::makeFromUnboxedFunction(&View<Op>::view));
  if (!op.hasKernelForDispatchKey(autograd)) { // a backend's own kernel is behind a router, which calls PyTorch's
    put(autograd, op.operator_name(), torch::CppFunction::makeFromUnboxedFunction(&View<Op>::with_autograd));
  }
  return true;
}

// ``detach`` and ``alias``: one more tensor of the same handle, as PyTorch makes for ``Tensor.data``. With a step of its own
// in functionalization, as PyTorch makes, each write through such a tensor takes the view again, and its memory has a
// second holder for good. All parameters that ``Module.to`` has made are such tensors.
template <class Op>
struct Same {
  static inline const c10::SafeKernelFunction* original = nullptr; // at Functionalize; never freed

  static at::Tensor same(c10::DispatchKeySet keys, const at::Tensor& self) {
    if (goes_to_handles(keys) && is_ours(self) && !self.is_inference() &&
        !at::functionalization::impl::getFunctionalizationReapplyViewsTLS()) {
      return at::Tensor(self.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
    }
    torch::jit::Stack stack = {self};
    original->callBoxed(original->opHandle(), keys, &stack);
    return stack.back().toTensor();
  }

  static void put_first(const c10::OperatorHandle& op) {
    if (op.schema().name() == Op::name && original == nullptr) { // the device may be installed once more
      original = new c10::SafeKernelFunction(op.getComputedKernelForDispatchKey(c10::DispatchKey::Functionalize));
      put(c10::DispatchKey::Functionalize, op.operator_name(), torch::CppFunction::makeFromUnboxedFunction(&same));
    }
  }
};

template <class... Ops>
bool put_first(const c10::OperatorHandle& op, const Kernel& kernel) {
  return (put_view<Ops>(op, kernel) || ...);
}

} // namespace

// Register C++ kernels in front of PyTorch's own of a view operator. ``serial``: in trace keys, of the operator that
// copies the view. Returns whether the operator is one of those that are known here.
// Twin of ``run.direct.run``.
extern "C" PyObject* torchport_view(const char* name, const char* overload, long long serial) {
  HANDLE_TH_ERRORS
  namespace ops = at::_ops;
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const Kernel& kernel = *kernels().at(serial);
  const bool done = put_first<
      ops::view, ops::transpose_int, ops::split_Tensor, ops::split_with_sizes, ops::slice_Tensor, ops::select_int,
      ops::unsqueeze, ops::squeeze_dim, ops::permute, ops::expand, ops::t, ops::unbind_int, ops::_reshape_alias>(
      op, kernel);
  if (done) {
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// Register a C++ kernel in front of PyTorch's own of ``detach`` or ``alias``. There is no such kernel in Python: what one
// returns has a Python object, and ``Parameter`` refuses a tensor that has one.
extern "C" PyObject* torchport_same(const char* name) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Same<at::_ops::detach>::put_first(op);
  Same<at::_ops::alias>::put_first(op);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
