// Fewer threads for operators while a compiler runs beside the program. Part of follow.cpp.
#pragma once
#include <ATen/Context.h>
#include <ATen/Parallel.h>

namespace {

// How many threads to take at most (0: as many as there are), and what sets their number; see
// ``core/threads.py``.
struct ThreadLimit {
  const int* most = nullptr;
  void (*set)(int) = nullptr;
  int (*of_mkl)(int) = nullptr;
};

ThreadLimit thread_limit;

// As ``core.threads.FewerThreads``.
class FewerThreads {
 public:
  FewerThreads() {
    const int most = thread_limit.most == nullptr ? 0 : *thread_limit.most;
    if (most == 0 || at::globalContext().deterministicAlgorithms()) {
      return;
    }
    const int before = at::get_num_threads(); // in a thread that has not computed yet this sets PyTorch's number
    if (before > most) {
      before_ = before;
      thread_limit.set(most);
      of_mkl_ = thread_limit.of_mkl == nullptr ? 0 : thread_limit.of_mkl(most);
    }
  }
  ~FewerThreads() {
    if (before_ != 0) {
      thread_limit.set(before_);
      if (thread_limit.of_mkl != nullptr) {
        thread_limit.of_mkl(of_mkl_);
      }
    }
  }
  FewerThreads(const FewerThreads&) = delete;
  FewerThreads& operator=(const FewerThreads&) = delete;

 private:
  int before_ = 0;
  int of_mkl_ = 0;
};

} // namespace

extern "C" void torchport_thread_limit(const int* most, void (*set)(int), int (*of_mkl)(int)) {
  thread_limit = {most, set, of_mkl};
}
