// Loops over threads, from which exceptions come back to the caller.
//
// A step of a model is a hundred loops of some microseconds, and to wake a thread takes longer than
// each of them. So the threads of a step stay awake from its first loop to its last: they look for
// the next loop for some microseconds before they sleep. No loop waits for a thread that has not
// come: who is awake takes what is left, the caller as well, and the caller waits only for parts that
// others have begun. So a thread that gets no core takes no time of the others.
//
// The threads are our own: those of an OpenMP runtime meet at the end of each loop.

#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

namespace paged {

// Keeps the first exception of the threads of a loop: one that left its thread would end the process.
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

    // To be called after the loop, when no thread is in it any more.
    void rethrow() const {
        if (first) std::rethrow_exception(first);
    }

  private:
    std::atomic<bool> thrown{false};
    std::exception_ptr first;
};

// Tells the core that its thread waits for memory that another one writes.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Threads that help one other, their owner, with its loops.
class ThreadPool {
  public:
    // The calling thread's own. A process that was forked has none of its parent's threads.
    static ThreadPool& of_this_thread() {
        static thread_local std::unique_ptr<ThreadPool, DeleteOwn> pool;
        if (pool && pool->process != getpid()) pool.release();
        if (!pool) pool.reset(new ThreadPool);
        return *pool;
    }

    ThreadPool() : process(getpid()) {}
    ThreadPool(const ThreadPool&) = delete;

    ~ThreadPool() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            is_ending = true;
        }
        loop_came.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

    // Loops come: until `close`, so many threads look for them. Where the system gives no more
    // threads, those that are there do.
    void open(int count) {
        while (int(threads.size()) < count && start_thread()) {}
        num_called.store(std::min(count, int(threads.size())));
        is_open.store(true);
    }

    void close() { is_open.store(false); }

    // part(context, begin, end) until [0, count) is done. Who is free takes 1 / `share` of what is
    // left, at least a single one; always a single one if `share` is 0.
    using Part = void (*)(void* context, int64_t begin, int64_t end);
    static constexpr int64_t MAX_COUNT = UINT32_MAX;
    void run(int64_t count, int64_t share, Part part, void* context) {
        loop_share.store(share), loop_part = part, loop_context = context;
        num_done.store(0);
        left.store(uint64_t(count));
        if (num_asleep.load() > int(threads.size()) - num_called.load()) {
            { const std::lock_guard<std::mutex> lock(mutex); }
            loop_came.notify_all();
        }
        while (take()) {}
        const auto is_done = [&] { return num_done.load() == count; };
        if (is_soon(is_done)) return;
        std::unique_lock<std::mutex> lock(mutex);
        owner_sleeps.store(true);
        loop_ended.wait(lock, is_done);
        owner_sleeps.store(false);
    }

  private:
    // How long a thread looks for what it waits for before it sleeps: longer than what one thread
    // does between two loops, and short beside the time of a step.
    static constexpr auto PATIENCE = std::chrono::microseconds(50);
    static constexpr size_t APART = 64;  // bytes, so that two words are in different cache lines

    // What nobody has taken of the loop: the next in the high half, the end in the low half. Who has
    // taken a part may read the other two words of the loop: its owner waits until all are done.
    alignas(APART) std::atomic<uint64_t> left{0};
    std::atomic<int64_t> loop_share{0};
    Part loop_part = nullptr;
    void* loop_context = nullptr;
    alignas(APART) std::atomic<int64_t> num_done{0};
    alignas(APART) std::atomic<int> num_asleep{0}, num_called{0};
    std::atomic<bool> is_open{false}, owner_sleeps{false};

    const pid_t process;
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable loop_came, loop_ended;
    bool is_ending = false;

    // One that a forked process has from its parent is left as it is: its threads cannot be joined.
    struct DeleteOwn {
        void operator()(ThreadPool* pool) const {
            if (pool->process == getpid()) delete pool;
        }
    };

    template <typename F>
    static bool is_soon(F is_so) {
        using Clock = std::chrono::steady_clock;
        const auto end = Clock::now() + PATIENCE;
        do {
            for (int i = 0; i < 32; ++i) {
                if (is_so()) return true;
                relax();
            }
        } while (Clock::now() < end);
        return false;
    }

    // Takes a share of the parts that are left and does them; false where none are.
    bool take() {
        uint64_t seen = left.load();
        for (;;) {
            const int64_t next = int64_t(seen >> 32), end = int64_t(seen & UINT32_MAX);
            if (next == end) return false;
            const int64_t share = loop_share.load(std::memory_order_relaxed);
            const int64_t count = share ? std::max<int64_t>(1, (end - next) / share) : 1;
            if (!left.compare_exchange_weak(seen, seen + (uint64_t(count) << 32))) continue;
            loop_part(loop_context, next, next + count);
            num_done.fetch_add(count);
            if (owner_sleeps.load()) {
                { const std::lock_guard<std::mutex> lock(mutex); }
                loop_ended.notify_one();
            }
            return true;
        }
    }

    void help(int index) {
        const auto is_called = [&] {
            const uint64_t seen = left.load();
            return seen >> 32 != (seen & UINT32_MAX) && index < num_called.load();
        };
        for (;;) {
            while (is_called() && take()) {}
            is_soon([&] { return is_called() || !is_open.load(std::memory_order_relaxed); });
            if (is_called()) continue;
            std::unique_lock<std::mutex> lock(mutex);
            num_asleep.fetch_add(1);
            loop_came.wait(lock, [&] { return is_ending || is_called(); });
            num_asleep.fetch_sub(1);
            if (is_ending) return;
        }
    }

    // Signals are left to the threads that expect them.
    bool start_thread() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool is_started = true;
        try {
            threads.emplace_back(&ThreadPool::help, this, int(threads.size()));
        } catch (const std::system_error&) {
            is_started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return is_started;
    }
};

// Runs the caller's loops with as many threads. Parts have no loops of threads in them.
class Parallel {
  public:
    const int num_threads;

    explicit Parallel(int num_threads)
        : num_threads(num_threads),
          pool(num_threads > 1 ? &ThreadPool::of_this_thread() : nullptr) {
        if (pool) pool->open(num_threads - 1);
    }
    Parallel(const Parallel&) = delete;
    ~Parallel() {
        if (pool) pool->close();
    }

    // part(i) for each i in [0, count), dealt out one by one.
    template <typename F>
    void each(int64_t count, F part) {
        share_out(count, 0, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) part(i);
        });
    }

    // part(begin, end) of ranges that make up [0, count): long ones first, then shorter ones.
    template <typename F>
    void ranges(int64_t count, F part) {
        share_out(count, 2 * num_threads, part);
    }

  private:
    ThreadPool* const pool;

    template <typename F>
    void share_out(int64_t count, int64_t share, F part) {
        if (count < 1) return;
        if (!pool || count == 1) return part(0, count);
        FirstException caught;
        const auto guarded = [&](int64_t begin, int64_t end) {
            caught.guard([&] { part(begin, end); });
        };
        using Guarded = decltype(guarded);
        if (count > ThreadPool::MAX_COUNT) throw std::length_error("a loop is too long");
        pool->run(
            count, share,
            [](void* context, int64_t begin, int64_t end) {
                (*static_cast<Guarded*>(context))(begin, end);
            },
            const_cast<void*>(static_cast<const void*>(&guarded)));
        caught.rethrow();
    }
};

}  // namespace paged
