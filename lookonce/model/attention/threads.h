// Loops over threads from which exceptions come back to the caller.

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace paged {

// Keeps the first exception of a parallel region: one that left the region would end the process.
// What has not begun when something was thrown is passed over.
class FirstException {
  public:
    template <typename F>
    void guard(F part) noexcept {
        if (thrown.load(std::memory_order_relaxed)) return;
        try {
            part();
        } catch (...) {
            if (!thrown.exchange(true)) first = std::current_exception();
        }
    }

    // To be called after the region, in which all threads have met.
    void rethrow() const {
        if (first) std::rethrow_exception(first);
    }

  private:
    std::atomic<bool> thrown{false};
    std::exception_ptr first;
};

// part(i) for i in [0, count); DYNAMIC: parts differ in work, and are dealt out one by one.
template <bool DYNAMIC, typename F>
void for_each(int64_t count, int num_threads, F part) {
#ifdef _OPENMP
    if (num_threads > 1) {
        FirstException caught;
        if constexpr (DYNAMIC) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
            for (int64_t i = 0; i < count; ++i) caught.guard([&] { part(i); });
        } else {
#pragma omp parallel for schedule(static) num_threads(num_threads)
            for (int64_t i = 0; i < count; ++i) caught.guard([&] { part(i); });
        }
        caught.rethrow();
        return;
    }
#endif
    for (int64_t i = 0; i < count; ++i) part(i);
}

}  // namespace paged
