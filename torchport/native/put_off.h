// Arithmetic on lists of tensors that is put off. Part of follow.cpp.
//
// An optimizer calls one operator after the other on all of its parameters, and each of them goes through all of their
// memory. What is put off is computed when a value is asked for: for each parameter one operator after the other, a piece
// at a time that fits into the processor's cache. The numbers are those of the CPU's operators, bit by bit.
//
// It is only put off where nobody can see that: every tensor is the value of a handle that Python has not seen, in memory
// that nothing else has. The way to such a value leads through ``held_by`` and ``show`` (unseen.h), which settle first.
#pragma once
#include "arithmetic.h"
#include "threads.h"
#include "values.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_strided_cpu_dispatch.h>
#include <c10/util/strides.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

constexpr int64_t kFewElements = 1 << 16;

// Gives up the GIL for an operator on so many elements, if they are many. To give it up and take it again is eight
// operations on mutexes, more than a small operator takes.
class Unlocked {
 public:
  explicit Unlocked(int64_t elements) : state_(elements > kFewElements ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

// Numbers next to zero as they are, for as long as this lives, though the thread takes them for zero
// (``torch.set_flush_denormal``).
class NextToZero {
 public:
  static bool is_zero() {
    return (state() & kFlushed) != 0;
  }

#if defined(__SSE__)
  NextToZero() : before_(state()) {
    _mm_setcsr(before_ & ~kFlushed);
  }
  ~NextToZero() {
    _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlushed = 0x8040; // results and arguments
  static unsigned state() {
    return _mm_getcsr();
  }
  const unsigned before_;
#else
 private:
  static constexpr unsigned kFlushed = 0;
  static unsigned state() {
    return 0;
  }
#endif
};

// -- what is put off -------------------------------------------------------------------------------------------------
// Operators on lists of tensors. Those at one position of the lists are of one dtype, size and stride, and no memory is at
// two positions, so that each position can be computed by itself.
class PutOff {
 public:
  // Whether something is put off, or being computed. Guarded by the GIL, as everything here.
  static inline std::atomic<bool> waits = false;

  // How many references to a tensor what is put off has.
  static size_t references(const at::Tensor& tensor) {
    return waits && now().place_of(tensor) != nullptr ? 1 : 0;
  }

  // Put off a call: its results replace the arguments on the stack, still to be computed. False, with nothing changed, if
  // it has to be computed at once, after what is put off already. ``in_place``: the results are its first argument.
  static bool take(const Elementwise& does, bool in_place, std::vector<c10::IValue>& stack) {
    if (computing_ || forking != 0 || NextToZero::is_zero()) {
      return false;
    }
    if (waits && now().calls_.size() < kMostCalls && now().add(does, in_place, stack)) {
      return true;
    }
    settle(); // of other parameters
    waits = now().add(does, in_place, stack);
    return waits;
  }

  // How many threads are about to fork: nothing is put off meanwhile, since a child has none of the others.
  static inline int forking = 0;

  // The last handle of a value is about to end. What nobody can ask for any more is not computed, and not kept.
  static void forget(const at::Tensor& value) {
    if (now().place_of(value) != nullptr && --now().held_ == 0) {
      const PutOff all = std::exchange(now(), PutOff());
      waits = false;
    }
  }

  // How many calls are put off.
  static size_t count() {
    return now().calls_.size();
  }

  // Compute what is put off. The GIL has to be held. Raises what operators raise: no more memory.
  static void settle() {
    static auto& at_work = *new std::mutex(); // never freed
    while (waits) {
      if (computing_) { // in another thread
        const Unlocked it_goes_on(kFewElements + 1);
        const std::lock_guard wait(at_work);
        continue;
      }
      const std::lock_guard begin(at_work);
      struct End {
        ~End() {
          computing_ = false;
          waits = !now().calls_.empty();
        }
      } const end;
      computing_ = true;
      const DefaultState of_values;
      const c10::impl::ForceDispatchKeyGuard nothing_is_on(c10::default_included_set, c10::default_excluded_set);
      const FewerThreads while_compiling;
      const NextToZero as_it_was;
      const Plan plan = now().plan(); // raises, where there is none, before anything is computed
      const PutOff all = std::exchange(now(), PutOff());
      const Unlocked others_go_on(all.elements_);
      all.compute(plan);
    }
  }

 private:
  static constexpr size_t kMostCalls = 64; // what is put off keeps memory
  static constexpr int64_t kFewest = 1 << 15; // elements of a list that is worth it
  static constexpr int64_t kPiece = 2 * at::internal::GRAIN_SIZE; // elements: five lists' pieces fit into a cache of a megabyte or two
  static constexpr int64_t kPieceOfLoops = 1 << 14; // where few calls take a microsecond before they compute

  using List = std::vector<at::Tensor>;

  struct Call {
    const Elementwise* does;
    c10::SmallVector<size_t, 3> given; // numbers of lists
    size_t result;
    std::vector<at::Scalar> numbers; // one, one for each position, or none
    std::vector<at::Tensor> wrapped;
  };

  static inline bool computing_ = false;

  std::deque<List> lists_;
  std::vector<bool> are_new_; // of each list: it is made by a call
  std::vector<Call> calls_;
  ska::flat_hash_map<const c10::TensorImpl*, std::pair<size_t, size_t>> places_; // of each tensor: its list, position
  int64_t elements_ = 0; // of a list
  size_t held_ = 0; // tensors that handles hold

  static PutOff& now() {
    static auto& one = *new PutOff(); // never freed
    return one;
  }

  const std::pair<size_t, size_t>* place_of(const at::Tensor& tensor) const {
    const auto found = places_.find(tensor.unsafeGetTensorImpl());
    return found == places_.end() ? nullptr : &found->second;
  }

  bool add(const Elementwise& does, bool in_place, std::vector<c10::IValue>& stack) {
    const size_t before = lists_.size();
    Call call{&does, {}, 0, {}, {}};
    try {
      if (add_lists(call, stack) && add_numbers(call, stack) && (in_place || has_usual_strides())) {
        call.result = in_place ? call.given[0] : append(blank(), true);
        stack.clear();
        stack.emplace_back(c10::List<at::Tensor>(at::TensorList(lists_[call.result])));
        calls_.push_back(std::move(call));
        return true;
      }
    } catch (const std::exception&) { // no memory: the call itself will say so
    }
    while (lists_.size() > before) {
      for (const at::Tensor& tensor : lists_.back()) {
        places_.erase(tensor.unsafeGetTensorImpl());
        --held_;
      }
      lists_.pop_back();
      are_new_.pop_back();
    }
    return false;
  }

  bool add_lists(Call& call, const std::vector<c10::IValue>& stack) {
    std::vector<List> given;
    for (size_t at = 0; at < stack.size() && stack[at].isTensorList(); ++at) {
      given.push_back(stack[at].toTensorVector());
    }
    if (given.empty() || given[0].empty()) {
      return false;
    }
    const List& like = lists_.empty() ? given[0] : lists_[0];
    elements_ = 0;
    for (const at::Tensor& tensor : like) {
      elements_ += tensor.numel();
    }
    for (const List& list : given) {
      if (elements_ < kFewest || list.size() != like.size()) {
        return false;
      }
      const auto* const known = place_of(list[0]);
      const size_t number = known == nullptr ? lists_.size() : known->first;
      if (known == nullptr ? !is_new(list, like, given) : !is_list(list, number)) {
        return false;
      }
      call.given.push_back(known == nullptr ? append(list, false) : number);
    }
    return true;
  }

  bool is_list(const List& list, size_t number) const {
    return std::equal(list.begin(), list.end(), lists_[number].begin(), lists_[number].end(),
                      [](const at::Tensor& one, const at::Tensor& other) { return one.is_same(other); });
  }

  // Whether a list's tensors go with the others, and are nowhere else. ``given``: the lists on the stack.
  bool is_new(const List& list, const List& like, const std::vector<List>& given) const {
    std::set<const c10::TensorImpl*> different;
    for (size_t at = 0; at < list.size(); ++at) {
      const at::Tensor& tensor = list[at];
      size_t references = 1; // the handle's
      for (const List& other : given) {
        references += at < other.size() && other[at].is_same(tensor) ? 2 : 0; // the stack's, and this list's
      }
      if (!goes_with(tensor, like[at]) || tensor.use_count() != references || !has_own_memory(tensor) ||
          place_of(tensor) != nullptr || !different.insert(tensor.unsafeGetTensorImpl()).second) {
        return false;
      }
    }
    return true;
  }

  static bool goes_with(const at::Tensor& tensor, const at::Tensor& like) {
    return (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble) &&
        tensor.scalar_type() == like.scalar_type() && tensor.is_non_overlapping_and_dense() &&
        tensor.sizes() == like.sizes() && tensor.strides() == like.strides();
  }

  // Whether a tensor's memory is no other tensor's, and PyTorch's own; and no key asks for more than the CPU's kernel.
  static bool has_own_memory(const at::Tensor& tensor) {
    constexpr c10::DispatchKeySet plain =
        c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView}) |
        c10::autocast_dispatch_keyset;
    return tensor.is_cpu() && tensor.has_storage() && tensor.storage().use_count() == 1 &&
        tensor.storage().unsafeGetStorageImpl()->resizable() && !tensor.is_inference() && !tensor.requires_grad() &&
        (tensor.key_set().raw_repr() & ~plain.raw_repr()) == 0;
  }

  // The numbers come after the lists.
  bool add_numbers(Call& call, const std::vector<c10::IValue>& stack) const {
    if (stack.size() == call.given.size()) {
      return true;
    }
    const c10::IValue& last = stack.back();
    if (stack.size() != call.given.size() + 1 || last.isTensor()) {
      return false;
    }
    if (last.isScalar()) {
      call.numbers.push_back(last.toScalar());
    } else if (last.isList() && last.toListRef().size() == lists_[0].size()) {
      for (const c10::IValue& number : last.toListRef()) {
        call.numbers.push_back(number.toScalar());
      }
    } else {
      return false;
    }
    for (const at::Scalar& number : call.numbers) {
      if (!is_accepted(number)) {
        return false;
      }
      call.wrapped.push_back(at::native::wrapped_scalar_tensor(number));
    }
    return true;
  }

  // Whether the CPU takes a number with such tensors: it refuses some that are no numbers of theirs.
  bool is_accepted(const at::Scalar& number) const {
    const double most = is_single() ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
    return (number.isFloatingPoint() || number.isIntegral(false)) &&
        (!std::isfinite(number.toDouble()) || std::abs(number.toDouble()) <= most);
  }

  // Whether a result of the CPU's would have the strides of the arguments. It has others where dimensions of size 1 have
  // strides of their own.
  bool has_usual_strides() const {
    return std::all_of(lists_[0].begin(), lists_[0].end(), [](const at::Tensor& tensor) {
      const bool has_one = std::find(tensor.sizes().begin(), tensor.sizes().end(), 1) != tensor.sizes().end();
      return !has_one || tensor.strides() == c10::IntArrayRef(c10::contiguous_strides(tensor.sizes()));
    });
  }

  List blank() const {
    List made;
    for (const at::Tensor& tensor : lists_[0]) {
      made.push_back(at::cpu::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
    }
    return made;
  }

  size_t append(List list, bool is_made) {
    for (size_t at = 0; at < list.size(); ++at) {
      places_.emplace(list[at].unsafeGetTensorImpl(), std::pair(lists_.size(), at));
    }
    held_ += list.size();
    lists_.push_back(std::move(list));
    are_new_.push_back(is_made);
    return lists_.size() - 1;
  }

  // -- computing -----------------------------------------------------------------------------------------------------
  // How all of it is computed. Of lists that calls make, what nobody has a handle of has memory for a piece, which is
  // never written to any other.
  struct Plan {
    std::vector<Loop> loops; // of each call
    int64_t piece = 0; // elements
    std::vector<std::vector<bool>> is_unseen; // by list and position
    std::vector<List> of_threads; // memory, by thread and list
  };

  bool is_single() const {
    return lists_[0][0].scalar_type() == at::kFloat;
  }

  Plan plan() const {
    Plan made{{}, kPiece, std::vector<std::vector<bool>>(lists_.size()), std::vector<List>(at::get_num_threads())};
    for (const Call& call : calls_) {
      made.loops.push_back(is_single() ? loop_of<float>(*call.does) : loop_of<double>(*call.does));
      made.piece = made.loops.back() == Loop::kNone ? made.piece : kPieceOfLoops;
    }
    int64_t most = 0;
    for (const at::Tensor& tensor : lists_[0]) {
      most = std::max(most, std::min(tensor.numel(), made.piece));
    }
    for (size_t list = 0; list < lists_.size(); ++list) {
      bool any = false;
      for (const at::Tensor& tensor : lists_[list]) {
        made.is_unseen[list].push_back(are_new_[list] && tensor.use_count() == 1);
        any = any || made.is_unseen[list].back();
      }
      for (List& of_thread : made.of_threads) {
        of_thread.push_back(any ? at::cpu::empty({most}, lists_[list][0].options()) : at::Tensor());
      }
    }
    return made;
  }

  void compute(const Plan& plan) const {
    for (size_t position = 0; position < lists_[0].size(); ++position) {
      is_single() ? compute_position<float>(position, plan) : compute_position<double>(position, plan);
    }
  }

  template <typename T>
  void compute_position(size_t position, const Plan& plan) const {
    const std::vector<LoopStep<T>> steps = steps_at<T>(position, plan);
    std::vector<T*> arrays;
    for (const List& list : lists_) {
      arrays.push_back(list[position].mutable_data_ptr<T>());
    }
    // The pieces are parts of those that PyTorch's threads take, cut where it cuts vectors of numbers: the last numbers
    // of a piece, fewer than a vector, may be rounded otherwise.
    const int64_t elements = lists_[0][position].numel();
    at::parallel_for(0, elements, at::internal::GRAIN_SIZE, [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView values_need_no_gradients;
      const NextToZero as_it_was;
      const List& own = plan.of_threads.at(static_cast<size_t>(at::get_thread_num()));
      for (int64_t from = begin; from < end;) {
        const int64_t size = std::min(plan.piece, end - from);
        const int64_t whole = size < kVectors ? size : size / kVectors * kVectors;
        compute_piece<T>(position, from, whole, steps, arrays, plan, own);
        from += whole;
      }
    });
  }

  template <typename T>
  std::vector<LoopStep<T>> steps_at(size_t position, const Plan& plan) const {
    std::vector<LoopStep<T>> made;
    for (size_t at = 0; at < calls_.size(); ++at) {
      const Call& call = calls_[at];
      LoopStep<T> step{plan.loops[at], {call.given[0], call.given[0], call.given[0]}, call.result, 1};
      std::copy(call.given.begin(), call.given.end(), step.given.begin());
      if (!call.numbers.empty()) {
        step.number = number_of<T>(*call.does, call.numbers[call.numbers.size() > 1 ? position : 0]);
      }
      made.push_back(step);
    }
    return made;
  }

  // One call after the other, those that follow each other and have loops by these.
  template <typename T>
  void compute_piece(
      size_t position,
      int64_t from,
      int64_t size,
      LoopSteps<T> steps,
      c10::ArrayRef<T*> arrays,
      const Plan& plan,
      const List& own) const {
    c10::SmallVector<T*, 8> here;
    for (size_t list = 0; list < lists_.size(); ++list) {
      here.push_back(plan.is_unseen[list][position] ? own[list].mutable_data_ptr<T>() : arrays[list] + from);
    }
    for (size_t at = 0; at < steps.size();) {
      size_t next = at;
      while (size % kVectors == 0 && next < steps.size() && steps[next].loop != Loop::kNone) {
        ++next;
      }
      if (next > at) {
        compute_loops(steps.slice(at, next - at), here, size);
        at = next;
      } else {
        compute_call(calls_[at++], position, from, size, plan, own);
      }
    }
  }

  // A call by the CPU's kernel.
  void compute_call(
      const Call& call, size_t position, int64_t from, int64_t size, const Plan& plan, const List& own) const {
    const auto piece = [&](size_t list) {
      const at::Tensor& whole = lists_[list][position];
      return plan.is_unseen[list][position] ? at::cpu::as_strided(own[list], {size}, {1}, 0)
                                            : at::cpu::as_strided(whole, {size}, {1}, whole.storage_offset() + from);
    };
    c10::SmallVector<at::Tensor, 3> pieces;
    c10::SmallVector<const at::Tensor*, 3> given;
    for (const size_t list : call.given) {
      pieces.push_back(piece(list));
    }
    for (const at::Tensor& tensor : pieces) {
      given.push_back(&tensor);
    }
    static const at::Scalar one = 1;
    static const auto& none = *new at::Tensor();
    at::Tensor result = call.result == call.given[0] ? pieces[0] : piece(call.result);
    const size_t number = call.numbers.size() > 1 ? position : 0;
    const bool has_number = !call.numbers.empty();
    call.does->kernel(given, has_number ? call.numbers[number] : one, has_number ? call.wrapped[number] : none, result);
  }
};

} // namespace

// Compute what is put off. Returns how many calls that were. ``forking``: 1 where the process is about to fork: nothing
// is put off then; -1 when it has forked; 0 otherwise.
extern "C" PyObject* torchport_settle(PyObject* forking) {
  HANDLE_TH_ERRORS
  const size_t count = PutOff::count();
  PutOff::settle();
  PutOff::forking += static_cast<int>(integer(forking));
  return PyLong_FromSize_t(count);
  END_HANDLE_TH_ERRORS
}
