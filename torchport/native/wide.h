// When the CPU's operator rounds as a graph does, in which numbers are inputs.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

namespace torchport {

inline bool is_dense(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kFloat && tensor.scalar_type() != at::kDouble) {
    return false;
  }
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) != 1) {
      return false;
    }
  }
  return true;
}

// Whether every tensor of a call is of float32 or float64, of the shape of the first, or of the first list's tensor at
// its place, and has memory for each element: else the CPU computes with some as with numbers, and rounds otherwise.
// Twin of ``backend.interpret._is_wide``.
inline bool is_wide(c10::ArrayRef<c10::IValue> stack) {
  c10::SmallVector<at::Tensor, 4> first;
  bool first_is_list = false;
  for (const c10::IValue& given : stack) {
    const bool is_list = given.isTensorList();
    if (!is_list && !given.isTensor()) {
      continue;
    }
    c10::SmallVector<at::Tensor, 4> tensors;
    if (is_list) {
      const std::vector<at::Tensor> items = given.toTensorVector();
      tensors.assign(items.begin(), items.end());
    } else {
      tensors.push_back(given.toTensor());
    }
    const bool begins = first.empty();
    if (begins) {
      first = tensors;
      first_is_list = is_list;
    }
    if (is_list != first_is_list || tensors.size() != first.size()) {
      return false;
    }
    for (size_t at = 0; at < tensors.size(); ++at) {
      if (tensors[at].sizes() != first[at].sizes() || !is_dense(tensors[at]) || (!is_list && tensors[at].dim() == 0)) {
        return false;
      }
    }
  }
  return true;
}

} // namespace torchport
