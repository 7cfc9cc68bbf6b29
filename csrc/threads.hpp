// Loops whose rounds are shared among threads.
//
// OpenMP's threads are torch's own where torch uses the same library, as it does on Linux: they still look for work when a
// step of the target ends, and a loop begins within a microsecond or two. Threads of our own would take turns with them.

#pragma once

#include <cstdint>
#include <exception>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace paceline {

// Multiply-adds that are worth sharing: some ten microseconds of one thread.
constexpr int64_t kWorthSharing = int64_t{1} << 18;

// The threads for so many multiply-adds.
inline int64_t threads_for(int64_t work, int64_t threads) { return work >= kWorthSharing ? threads : 1; }

// Calls work(thread, i) for i = 0..count, on `threads` threads or, without OpenMP, on the caller's. Throws the last of
// what it threw, after all.
template <typename Work>
void share(int64_t threads, int64_t count, const Work& work) {
#if defined(_OPENMP)
  if (threads > 1) {
    std::exception_ptr failure;  // none may leave the loop
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(threads))
    for (int64_t i = 0; i < count; ++i) {
      try {
        work(static_cast<int64_t>(omp_get_thread_num()), i);
      } catch (...) {
#pragma omp critical(paceline_share)
        failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    return;
  }
#else
  static_cast<void>(threads);
#endif
  for (int64_t i = 0; i < count; ++i) work(int64_t{0}, i);
}

}  // namespace paceline
