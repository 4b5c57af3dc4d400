// Kernels of operators in place: the functional operator's results, then functionalization's write. Part of follow.cpp,
// whose kernels they stand on.
#pragma once
#include "calls.h"
#include "direct.h"
#include "outs.h"
#include "owned.h"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/ExpandUtils.h>

namespace {

// Twin of ``trace.wrapping.unwrap``.
at::Tensor unwrap(const at::Tensor& tensor) {
  at::FunctionalTensorWrapper* wrapper = wrapper_of(tensor);
  if (wrapper == nullptr) {
    return tensor;
  }
  wrapper->sync_();
  return wrapper->value();
}

c10::IValue unwrap(const c10::IValue& value) {
  if (value.isTensor()) {
    return unwrap(value.toTensor());
  }
  if (!value.isTensorList()) {
    return value;
  }
  const Values items = value.toListRef();
  c10::List<at::Tensor> list;
  list.reserve(items.size());
  for (const c10::IValue& item : items) {
    list.push_back(unwrap(item.toTensor()));
  }
  return list;
}

// Whether no two elements are seen to share memory: each dimension steps over all that the smaller steps reach.
// Twin of ``frontend.device.inplace._overlaps``.
bool is_spread(const at::Tensor& tensor) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [step, size] : dims) {
    if (step <= reach) {
      return false;
    }
    reach += step * (size - 1);
  }
  return true;
}

// Whether a value may be written to a wrapper as it is: it never changes strides, for views and ``reshape`` go by them. A
// view with gaps in a base without is a part of that. Functionalization copies the value there, on a way that may have to
// view it as it once viewed the part: a value can be viewed so that has the part's order of dimensions.
bool may_take(const at::Tensor& written, const at::Tensor& value) {
  if (!value.defined() || written.sizes() != value.sizes() || written.scalar_type() != value.scalar_type()) {
    return false;
  }
  const auto base_of = [](const at::Tensor& tensor) -> const at::Tensor& {
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    return static_cast<at::functionalization::FunctionalStorageImpl*>(storage)->base();
  };
  return written.strides() == value.strides() ||
      (!wrapper_of(written)->view_metas().empty() && !written.is_non_overlapping_and_dense() && is_spread(written) &&
       base_of(written).is_non_overlapping_and_dense() &&
       value.strides() == c10::IntArrayRef(at::infer_dense_strides(written.sizes(), written.strides())));
}

// The kernel of an operator that writes to its first argument: the functional operator, then functionalization's write.
struct InPlace final : c10::OperatorKernel {
  InPlace(const Kernel& kernel, c10::SafeKernelFunction python) : kernel(kernel), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const size_t count = kernel.letters.size();
    Start start;
    size_t opening = 0;
    {
      Gil gil;
      const Values given(stack->data() + stack->size() - count, count);
      c10::SmallVector<at::Tensor, 1> written;
      const bool ours = is_ours(given[0], written) && !reads_what_it_writes(given, written);
      THPObjectPtr of_thread = ours ? of_this_thread() : THPObjectPtr();
      THPObjectPtr trace = recording_trace(of_thread.get());
      Results results;
      if (trace || (ours && (kernel.direct || !kernel.asked))) {
        torch::jit::Stack values;
        values.reserve(count);
        for (const c10::IValue& value : given) {
          values.push_back(unwrap(value));
        }
        if (PyObject* child = trace ? kernel.follow(trace.get(), values, true) : nullptr) {
          results = results_of(child);
        } else if (trace) {
          start.note(trace.get(), values);
        }
        if (results.empty()) {
          THPObjectPtr at_once = kernel.trace_at_once(of_thread.get(), values, opening);
          results = at_once ? computed(op, at_once.get(), written, values) : Results();
        }
      }
      if (!results.empty()) {
        const bool list = given[0].isTensorList();
        write_each(written, results, list);
        replace_arguments(*stack, count, list ? Results() : Results{written[0]}, false);
        return;
      }
    }
    python.callBoxed(op, keys, stack);
    kernel.learn(start);
    learn_opening(opening);
  }

  // Whether every written tensor is a wrapper, shares its storage with no other one, and is no view of an expanded
  // tensor.
  static bool is_ours(const c10::IValue& first, c10::SmallVector<at::Tensor, 1>& written) {
    if (first.isTensor()) {
      written.push_back(first.toTensor());
    } else if (first.isTensorList()) {
      for (const c10::IValue& item : first.toListRef()) {
        written.push_back(item.toTensor());
      }
    }
    c10::SmallVector<const void*, 1> storages;
    for (const at::Tensor& tensor : written) {
      if (!tensor.defined() || !tensor.is_privateuseone() || wrapper_of(tensor) == nullptr || is_of_expanded(tensor)) {
        return false;
      }
      storages.push_back(tensor.storage().unsafeGetStorageImpl());
    }
    std::sort(storages.begin(), storages.end());
    return !written.empty() && std::adjacent_find(storages.begin(), storages.end()) == storages.end();
  }

  // Whether an argument is another view of the written tensor. The CPU refuses some such writes; Python checks which.
  // Twin of ``frontend.device.writes.share_memory``.
  static bool reads_what_it_writes(Values given, const c10::SmallVector<at::Tensor, 1>& written) {
    if (!given[0].isTensor()) {
      return false;
    }
    const at::Tensor& target = written[0];
    return std::any_of(given.begin() + 1, given.end(), [&](const c10::IValue& value) {
      return value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage() &&
          value.toTensor().unsafeGetTensorImpl() != target.unsafeGetTensorImpl() &&
          value.toTensor().storage().unsafeGetStorageImpl() == target.storage().unsafeGetStorageImpl();
    });
  }

  // The functional operator's results, computed at once; none where Python has to run it, which also says what is wrong
  // with results that do not fit where they are to be written.
  Results computed(
      const c10::OperatorHandle& op, PyObject* trace, const c10::SmallVector<at::Tensor, 1>& written,
      torch::jit::Stack& values) const {
    if (kernel.direct->waiting == nullptr) {
      PutOff::settle(); // gives up the GIL
    }
    const auto run = [&] {
      const c10::OperatorHandle* in_place = may_write(op, written, values) ? &op : nullptr;
      return run_direct(trace, *kernel.direct, values, kernel.one_list, in_place);
    };
    const bool others_wait = PutOff::waits;
    if (!run() && (!others_wait || PutOff::waits || !run())) { // once more if the others are computed since
      return {};
    }
    Results results;
    if (kernel.one_list) {
      for (const c10::IValue& value : values.back().toListRef()) {
        results.push_back(value.toTensor());
      }
    } else {
      results.push_back(values.back().toTensor());
    }
    const bool fit = std::equal(written.begin(), written.end(), results.begin(), results.end(), may_take);
    return fit ? results : Results();
  }

  // Twin of ``frontend.device.inplace.write_each``.
  static void write_each(const c10::SmallVector<at::Tensor, 1>& written, const Results& values, bool list) {
    TORCH_CHECK(written.size() == values.size(), "as many values as tensors are needed");
    for (size_t at = 0; at < written.size(); ++at) {
      at::FunctionalTensorWrapper* wrapper = wrapper_of(written[at]);
      wrapper->replace_(values[at]);
      wrapper->commit_update();
      wrapper->sync_();
      if (list) { // for a single tensor, PyTorch's kernel above this one does so
        torch::autograd::impl::bump_version(written[at]);
      }
    }
  }

  const Kernel& kernel;
  const c10::SafeKernelFunction python;
};

// The kernel of ``copy_`` from one handle to another of the same shape: the source's value, where there is one and it is
// of the same kind, and else the functional operator, whose kernel is not at PyTorch's dispatcher.
struct CopyInPlace final : c10::OperatorKernel {
  CopyInPlace(const Kernel& kernel, c10::SafeKernelFunction python) : kernel(kernel), python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    constexpr size_t count = 3;
    Start start;
    {
      Gil gil;
      const Values given(stack->data() + stack->size() - count, count);
      c10::SmallVector<at::Tensor, 1> written;
      const bool ours = InPlace::is_ours(given[0], written) && is_wrapper(given[1]) &&
          !InPlace::reads_what_it_writes(given, written);
      THPObjectPtr of_thread = ours ? of_this_thread() : THPObjectPtr();
      THPObjectPtr trace = recording_trace(of_thread.get());
      const bool records = trace;
      if (!trace) {
        trace = direct_trace(of_thread.get());
      }
      if (trace) {
        const at::Tensor target = unwrap(written[0]), source = unwrap(given[1].toTensor());
        at::Tensor value;
        if (are_alike(target, source)) {
          value = has_value(source) ? SameValue::same_value(trace.get(), source) : at::Tensor();
          if (!value.defined() && records) {
            const std::array<c10::IValue, count> values = {target, source, false};
            if (PyObject* child = kernel.follow(trace.get(), values, false)) {
              value = results_of(child)[0];
            } else {
              start.note(trace.get(), values);
            }
          }
        } else if (!records) {
          value = copied(trace.get(), written[0], target, source);
        }
        if (value.defined()) {
          InPlace::write_each(written, {value}, false);
          replace_arguments(*stack, count, {written[0]}, false);
          return;
        }
      }
    }
    python.callBoxed(op, keys, stack);
    kernel.learn(start);
  }

 private:
  static bool is_wrapper(const c10::IValue& value) {
    return value.isTensor() && wrapper_of(value.toTensor()) != nullptr;
  }

  // Whether both are handles, and the value of one fits where the other's was.
  static bool are_alike(const at::Tensor& target, const at::Tensor& source) {
    return handle_of(target) && handle_of(source) && target.is_contiguous() && target.sizes() == source.sizes() &&
        target.strides() == source.strides() && target.scalar_type() == source.scalar_type();
  }

  // What a part of a tensor is to be, or one of another dtype, where operators are interpreted at once: a copy of the
  // source. Undefined where Python has to run it, which also refuses to write where elements share memory.
  at::Tensor copied(
      PyObject* trace, const at::Tensor& written, const at::Tensor& target, const at::Tensor& source) const {
    if (!kernel.is_direct(trace) || target.sizes() != source.sizes()) {
      return {};
    }
    const AtOnce ready(trace, *kernel.direct);
    if (!ready || ready.notes() || !kernel.direct->anchors.empty()) {
      return {};
    }
    const Held before = held_by(target, ready.runtime), held = held_by(source, ready.runtime);
    if (!before.tensor.defined() || !held.tensor.defined()) {
      return {};
    }
    at::Tensor made;
    try {
      const at::AutoDispatchBelowADInplaceOrView values_need_no_gradients;
      made = at::empty_like(before.tensor);
      if (!may_take(written, made)) {
        return {};
      }
      const Unlocked others_go_on(made.numel());
      const FewerThreads while_compiling;
      made.copy_(held.tensor);
    } catch (const std::exception&) {
      return {}; // again in the Python kernel, whose error names the user's line
    }
    ready.count();
    return unseen_handle(std::move(made), ready.owner, Sharing::nobody);
  }

  static bool has_value(const at::Tensor& source) {
    THPObjectPtr value(attribute(handle_of(source).get(), py_.n_value));
    return value && value.get() != Py_None;
  }

  const Kernel& kernel;
  const c10::SafeKernelFunction python;
};

} // namespace
