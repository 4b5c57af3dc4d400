// Arithmetic element by element: the CPU's kernels, and loops that give the same numbers. Part of follow.cpp.
//
// A kernel takes about a microsecond before it computes. A loop takes nothing, so that several of them can go through a
// few hundred numbers at a time, which the processor's first cache holds. A loop is only taken where it gives, bit by bit,
// what the kernel gives.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/addcdiv_cpu_dispatch.h>
#include <ATen/ops/addcmul_cpu_dispatch.h>
#include <ATen/ops/div_cpu_dispatch.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/lerp_cpu_dispatch.h>
#include <ATen/ops/mul_cpu_dispatch.h>
#include <ATen/ops/neg_cpu_dispatch.h>
#include <ATen/ops/reciprocal_cpu_dispatch.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>
#include <ATen/ops/sub_cpu_dispatch.h>

namespace {

// -- the CPU's kernels -----------------------------------------------------------------------------------------------
// What an operator on lists does with the tensors at one position. ``given``: of each list; ``number``: its last argument,
// where that is one; ``wrapped``: the same as a tensor. The result may be the first of the tensors.
using Given = c10::ArrayRef<const at::Tensor*>;
using CpuKernel = void (*)(Given given, const at::Scalar& number, const at::Tensor& wrapped, at::Tensor& result);

// What a loop computes from its arguments ``a``, ``b``, ``c`` and a number. ``Fused``: a product is not rounded before it
// is added; whether PyTorch's kernels do so is up to its compiler and to the processor.
enum class Loop : uint8_t {
  kNone,
  kAdd,
  kAddFused,
  kMul,
  kDiv,
  kAddNumber,
  kMulNumber,
  kDivNumber,
  kAddcmul,
  kAddcmulFused,
  kAddcdiv,
  kLerp,
  kLerpFused,
  kSqrt,
  kNeg,
  kReciprocal,
};

struct Elementwise {
  CpuKernel kernel;
  std::array<Loop, 2> loops; // that may give the kernel's numbers
  bool subtracts = false; // the loops take the number's negative
};

// The operators on lists that may be put off, by name and overload, without the ``_`` of those in place. PyTorch computes
// them on the CPU by these calls, one for each position.
const Elementwise* elementwise(const c10::OperatorHandle& op) {
  using Number = const at::Scalar&;
  using Wrapped = const at::Tensor&;
  using Result = at::Tensor&;
  namespace cpu = at::cpu;
  static const auto& all = *new std::unordered_map<std::string, Elementwise>({
      {"add.List",
       {[](Given of, Number alpha, Wrapped, Result to) { cpu::add_outf(*of[0], *of[1], alpha, to); },
        {Loop::kAddFused, Loop::kAdd}}},
      {"sub.List",
       {[](Given of, Number alpha, Wrapped, Result to) { cpu::sub_outf(*of[0], *of[1], alpha, to); },
        {Loop::kAddFused, Loop::kAdd},
        true}},
      {"mul.List", {[](Given of, Number, Wrapped, Result to) { cpu::mul_outf(*of[0], *of[1], to); }, {Loop::kMul}}},
      {"div.List", {[](Given of, Number, Wrapped, Result to) { cpu::div_outf(*of[0], *of[1], to); }, {Loop::kDiv}}},
      {"add.Scalar",
       {[](Given of, Number, Wrapped other, Result to) { cpu::add_outf(*of[0], other, 1, to); }, {Loop::kAddNumber}}},
      {"sub.Scalar",
       {[](Given of, Number, Wrapped other, Result to) { cpu::sub_outf(*of[0], other, 1, to); }, {Loop::kAddNumber}, true}},
      {"mul.Scalar",
       {[](Given of, Number, Wrapped other, Result to) { cpu::mul_outf(*of[0], other, to); }, {Loop::kMulNumber}}},
      {"div.Scalar",
       {[](Given of, Number, Wrapped other, Result to) { cpu::div_outf(*of[0], other, to); }, {Loop::kDivNumber}}},
      {"addcmul.Scalar",
       {[](Given of, Number value, Wrapped, Result to) { cpu::addcmul_outf(*of[0], *of[1], *of[2], value, to); },
        {Loop::kAddcmulFused, Loop::kAddcmul}}},
      {"addcdiv.Scalar",
       {[](Given of, Number value, Wrapped, Result to) { cpu::addcdiv_outf(*of[0], *of[1], *of[2], value, to); },
        {Loop::kAddcdiv}}},
      {"lerp.Scalar",
       {[](Given of, Number weight, Wrapped, Result to) { cpu::lerp_outf(*of[0], *of[1], weight, to); },
        {Loop::kLerpFused, Loop::kLerp}}},
      {"sqrt.", {[](Given of, Number, Wrapped, Result to) { cpu::sqrt_outf(*of[0], to); }, {Loop::kSqrt}}},
      {"neg.", {[](Given of, Number, Wrapped, Result to) { cpu::neg_outf(*of[0], to); }, {Loop::kNeg}}},
      {"reciprocal.",
       {[](Given of, Number, Wrapped, Result to) { cpu::reciprocal_outf(*of[0], to); }, {Loop::kReciprocal}}},
  });
  const std::string prefix = "aten::_foreach_";
  std::string name = op.schema().name(), overload = op.schema().overload_name();
  if (name.compare(0, prefix.size(), prefix) != 0) {
    return nullptr;
  }
  name.erase(0, prefix.size());
  if (name.back() == '_') {
    name.pop_back();
  }
  const auto found = all.find(name + "." + (overload == "ScalarList" ? "Scalar" : overload));
  return found == all.end() ? nullptr : &found->second;
}

// -- loops -----------------------------------------------------------------------------------------------------------
// One loop: which of the arrays it reads and writes.
template <typename T>
struct LoopStep {
  Loop loop;
  std::array<size_t, 3> given;
  size_t result;
  T number;
};

// As many elements as loops take at a time; and as many as PyTorch's kernels, whatever the processor's vectors, take at a
// time without any left over. What is left over may be rounded otherwise.
template <typename T>
constexpr int64_t kBlock = 4096 / sizeof(T);
constexpr int64_t kVectors = 64;

template <typename T, typename Of>
[[gnu::always_inline]] inline void each(T* to, int64_t size, Of of) {
#pragma GCC ivdep // an argument is the result, or shares no memory with it
  for (int64_t at = 0; at < size; ++at) {
    to[at] = of(at);
  }
}

template <typename T>
[[gnu::always_inline]] inline void run_loop(Loop loop, const T* a, const T* b, const T* c, T number, T* to, int64_t size) {
  constexpr T one = 1;
  const bool near = std::abs(number) < T(0.5);
  switch (loop) {
    case Loop::kNone:
      return;
    case Loop::kAdd:
      return each(to, size, [=](int64_t at) { return a[at] + number * b[at]; });
    case Loop::kAddFused:
      return each(to, size, [=](int64_t at) { return std::fma(number, b[at], a[at]); });
    case Loop::kMul:
      return each(to, size, [=](int64_t at) { return a[at] * b[at]; });
    case Loop::kDiv:
      return each(to, size, [=](int64_t at) { return a[at] / b[at]; });
    case Loop::kAddNumber:
      return each(to, size, [=](int64_t at) { return a[at] + number; });
    case Loop::kMulNumber:
      return each(to, size, [=](int64_t at) { return a[at] * number; });
    case Loop::kDivNumber:
      return each(to, size, [=](int64_t at) { return a[at] / number; });
    case Loop::kAddcmul:
      return each(to, size, [=](int64_t at) { return a[at] + number * b[at] * c[at]; });
    case Loop::kAddcmulFused:
      return each(to, size, [=](int64_t at) { return std::fma(number * b[at], c[at], a[at]); });
    case Loop::kAddcdiv:
      return each(to, size, [=](int64_t at) { return a[at] + number * b[at] / c[at]; });
    case Loop::kLerp:
      return near ? each(to, size, [=](int64_t at) { return a[at] + number * (b[at] - a[at]); })
                  : each(to, size, [=](int64_t at) { return b[at] + (number - one) * (b[at] - a[at]); });
    case Loop::kLerpFused:
      return near ? each(to, size, [=](int64_t at) { return std::fma(number, b[at] - a[at], a[at]); })
                  : each(to, size, [=](int64_t at) { return std::fma(number - one, b[at] - a[at], b[at]); });
    case Loop::kSqrt:
      return each(to, size, [=](int64_t at) { return std::sqrt(a[at]); });
    case Loop::kNeg:
      return each(to, size, [=](int64_t at) { return -a[at]; });
    case Loop::kReciprocal:
      return each(to, size, [=](int64_t at) { return one / a[at]; });
  }
}

template <typename T>
using LoopSteps = c10::ArrayRef<LoopStep<T>>;

// Run all steps on the first elements of arrays, then on the next.
template <typename T>
[[gnu::always_inline]] inline void run_loops(LoopSteps<T> steps, c10::ArrayRef<T*> arrays, int64_t size) {
  for (int64_t from = 0; from < size; from += kBlock<T>) {
    const auto array = [&](size_t number) { return arrays[number] + from; };
    const int64_t elements = std::min(kBlock<T>, size - from);
    for (const LoopStep<T>& step : steps) {
      const auto& given = step.given;
      run_loop<T>(
          step.loop, array(given[0]), array(given[1]), array(given[2]), step.number, array(step.result), elements);
    }
  }
}

#if defined(__x86_64__)
// Whether the processor computes several numbers at a time, and rounds a product and a sum once. Without, loops are slow.
bool has_loops() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}
#define TORCHPORT_LOOPS [[gnu::target("avx2,fma")]]
#else
bool has_loops() {
  return true;
}
#define TORCHPORT_LOOPS
#endif

TORCHPORT_LOOPS void compute_loops(LoopSteps<float> steps, c10::ArrayRef<float*> arrays, int64_t size) {
  run_loops(steps, arrays, size);
}

TORCHPORT_LOOPS void compute_loops(LoopSteps<double> steps, c10::ArrayRef<double*> arrays, int64_t size) {
  run_loops(steps, arrays, size);
}

// -- which loop ------------------------------------------------------------------------------------------------------
// A loop's number, from an operator's.
template <typename T>
T number_of(const Elementwise& op, const at::Scalar& number) {
  return op.subtracts ? -number.to<T>() : number.to<T>();
}

// Numbers of all sizes, and some that are none.
template <typename T>
at::Tensor some_numbers(uint64_t seed) {
  constexpr int64_t count = 64 * kVectors;
  using Limits = std::numeric_limits<T>;
  constexpr std::array<T, 8> special = {
      0, -T(0), 1, -1, Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), Limits::denorm_min()};
  at::Tensor made = at::cpu::empty({count}, at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
  T* const numbers = made.mutable_data_ptr<T>();
  for (int64_t at = 0; at < count; ++at) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const T of_one = static_cast<T>(seed >> 11) / static_cast<T>(uint64_t(1) << 53);
    const int size = static_cast<int>(seed >> 5 & 15) - 8;
    numbers[at] = (seed & 31) == 0 ? special[seed >> 8 & 7] : std::ldexp(of_one - T(0.3), size);
  }
  return made;
}

template <typename T>
bool are_same(const at::Tensor& one, const at::Tensor& other) {
  const T *first = one.const_data_ptr<T>(), *second = other.const_data_ptr<T>();
  for (int64_t at = 0; at < one.numel(); ++at) {
    const bool are_none = std::isnan(first[at]) && std::isnan(second[at]);
    if (!are_none && std::memcmp(first + at, second + at, sizeof(T)) != 0) {
      return false;
    }
  }
  return true;
}

// The loop that gives, bit by bit, what an operator's kernel gives for some thousand numbers; ``kNone`` if none does.
template <typename T>
Loop found_loop(const Elementwise& op) {
  const std::array<at::Tensor, 3> given = {some_numbers<T>(1), some_numbers<T>(2), some_numbers<T>(3)};
  at::Tensor wanted = some_numbers<T>(4), found = some_numbers<T>(4);
  const auto array = [](const at::Tensor& tensor) { return tensor.mutable_data_ptr<T>(); };
  const std::vector<T*> arrays = {array(given[0]), array(given[1]), array(given[2]), array(found)};
  for (const Loop loop : op.loops) {
    bool same = loop != Loop::kNone;
    for (const double number : {0.1, 0.7, 1.0, -0.0123, -3.1}) {
      op.kernel({&given[0], &given[1], &given[2]}, number, at::native::wrapped_scalar_tensor(number), wanted);
      const LoopStep<T> step{loop, {0, 1, 2}, 3, number_of<T>(op, number)};
      compute_loops(LoopSteps<T>(step), arrays, found.numel());
      same = same && are_same<T>(found, wanted);
    }
    if (same) {
      return loop;
    }
  }
  return Loop::kNone;
}

// The same, found once. The GIL has to be held.
template <typename T>
Loop loop_of(const Elementwise& op) {
  static auto& known = *new std::unordered_map<const Elementwise*, Loop>();
  const auto found = known.find(&op);
  if (found != known.end()) {
    return found->second;
  }
  return known[&op] = has_loops() ? found_loop<T>(op) : Loop::kNone;
}

} // namespace
