// A loop spread over the threads of XLA's own pool.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

class Team {
 public:
  explicit Team(xla::ffi::ThreadPool pool) : pool_(pool), num_threads_(pool.num_threads()) {}

  int64_t num_threads() const { return num_threads_; }

  // f(i) for each i in [0, n), in any order, on this thread and as many others as there are. Returns when all
  // are done. Others may come late or never: this thread then does their share, so a full pool cannot block.
  template <typename F>
  void run(int64_t n, const F& f) {
    const int64_t num_helpers = std::min(n, num_threads_) - 1;
    if (num_helpers < 1) {
      for (int64_t i = 0; i < n; ++i) f(i);
      return;
    }
    auto loop = std::make_shared<Loop<F>>(n, &f);
    for (int64_t i = 0; i < num_helpers; ++i) pool_.Schedule([loop] { loop->work(); });
    loop->work();
    for (int spins = 0; loop->num_done.load(std::memory_order_acquire) < n; ++spins) {
      if (spins < 4096) _mm_pause();
      else std::this_thread::yield();
    }
  }

 private:
  template <typename F>
  struct Loop {
    Loop(int64_t n, const F* f) : n(n), f(f) {}

    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        (*f)(i);  // the caller waits for this one, so f is alive
        num_done.fetch_add(1, std::memory_order_release);
      }
    }

    const int64_t n;
    const F* const f;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> num_done{0};
  };

  xla::ffi::ThreadPool pool_;
  int64_t num_threads_;
};

}  // namespace jaxserve
