// Random numbers of operators that are interpreted. Part of flush.cpp.
#pragma once
#include "objects.h"

#include <ATen/Parallel.h>

namespace {

// SplitMix64's finaliser of ``counter * golden``.
inline uint64_t random_bits(uint64_t counter) {
  uint64_t x = counter * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

constexpr int64_t kDrawnAtOnce = 1 << 15; // numbers that are worth a thread

template <class Number, class Make>
void draw_each(const at::Tensor& numbers, uint64_t first, Make make) {
  Number* const to = numbers.mutable_data_ptr<Number>();
  at::parallel_for(0, numbers.numel(), kDrawnAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      to[at] = make(random_bits(first + static_cast<uint64_t>(at)));
    }
  });
}

} // namespace

// Fill a contiguous tensor with the numbers from ``first`` on of a key: of int64, 64 bits each; of float32 and float64,
// uniform on [0, 1) with as many bits as the significand holds.
// Twin of ``backend.random.draw``.
extern "C" PyObject* torchport_draw(PyObject* numbers, PyObject* key, PyObject* first) {
  HANDLE_TH_ERRORS
  const at::Tensor& to = THPVariable_Unpack(numbers);
  TORCH_CHECK(to.is_contiguous() && to.is_cpu(), "a contiguous CPU tensor is needed");
  const auto from = static_cast<uint64_t>(PyLong_AsLongLong(key)) + static_cast<uint64_t>(PyLong_AsLongLong(first));
  if (PyErr_Occurred()) {
    return nullptr;
  }
  switch (to.scalar_type()) {
    case at::kLong:
      draw_each<int64_t>(to, from, [](uint64_t bits) { return static_cast<int64_t>(bits); });
      break;
    case at::kFloat:
      draw_each<float>(to, from, [](uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-24f; });
      break;
    case at::kDouble:
      draw_each<double>(to, from, [](uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; });
      break;
    default:
      TORCH_CHECK_TYPE(false, "numbers of this dtype are not drawn");
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
