// The pool: threads that sleep, wake for a job, claim its tasks in turn, and look for the next job
// a little while before they sleep again. Compiled once, for every processor of the architecture.
#include "deepinfer/threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static void breathe() { _mm_pause(); }
#else
static void breathe() { std::this_thread::yield(); }
#endif

namespace {

constexpr uint32_t kClosed = 1u << 31;
constexpr int kSlots = 9;
constexpr auto kAwake = std::chrono::microseconds(60);  // longer than the host's pause between ops

struct Scratch {
  void* piece[kSlots] = {};
  size_t bytes[kSlots] = {};
  ~Scratch() {
    for (void* p : piece) free(p);
  }
};
thread_local Scratch mine;
thread_local bool inside = false;  // a task: what it calls runs on this thread alone

struct Pool {
  std::mutex changing;  // one job, or one change of size, at a time
  std::mutex sleeping;
  std::condition_variable wake;
  // The caller's included. One that wakes late may look while it is changed.
  std::atomic<int> threads{1};
  int started = 1;

  void (*f)(void*, int64_t) = nullptr;
  void* context = nullptr;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
  std::atomic<uint32_t> gate{kClosed};  // threads in the job, and whether more may come
  std::atomic<uint64_t> job{0};

  void work() {
    inside = true;
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(context, t);
    inside = false;
  }

  // Take part in the job that is open, if one is. Nobody waits for a thread that still sleeps.
  void join() {
    uint32_t held = gate.load(std::memory_order_relaxed);
    do {
      if (held & kClosed) return;
    } while (!gate.compare_exchange_weak(held, held + 1, std::memory_order_acquire));
    work();
    gate.fetch_sub(1, std::memory_order_release);
  }

  // seen: the last job before this thread.
  void serve(int number, uint64_t seen) {
    for (;;) {
      auto until = std::chrono::steady_clock::now() + kAwake;
      while (job.load(std::memory_order_acquire) == seen) {
        breathe();
        if (std::chrono::steady_clock::now() < until) continue;
        std::unique_lock<std::mutex> lock(sleeping);
        wake.wait(lock, [&] { return job.load(std::memory_order_acquire) != seen; });
      }
      seen = job.load(std::memory_order_acquire);
      if (number < threads) join();
    }
  }

  void run(int64_t count, void (*body)(void*, int64_t), void* with) {
    std::unique_lock<std::mutex> lock(changing, std::defer_lock);
    if (inside || threads == 1 || count <= 1 || !lock.try_lock()) {
      for (int64_t t = 0; t < count; t++) body(with, t);
      return;
    }
    while (started < threads) {
      int number = started;
      uint64_t seen = job.load(std::memory_order_relaxed);
      try {
        std::thread([this, number, seen] { serve(number, seen); }).detach();
        started++;
      } catch (const std::system_error&) {
        threads = started;  // the system gives no more
      }
    }
    f = body, context = with, tasks = count;
    next.store(0, std::memory_order_relaxed);
    gate.store(0, std::memory_order_release);
    {
      std::lock_guard<std::mutex> awake(sleeping);
      job.fetch_add(1, std::memory_order_release);
    }
    wake.notify_all();
    work();
    gate.fetch_or(kClosed, std::memory_order_relaxed);
    while (gate.load(std::memory_order_acquire) != kClosed) breathe();
  }
};
Pool* pool = new Pool;  // never destroyed: its threads may outlive main

// A forked child has none of the threads: it would wait for them for ever.
void begin_anew() {
  int threads = pool->threads;
  pool = new Pool;
  pool->threads = threads;
}
[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, begin_anew);

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int di_set_threads(int threads) {
  std::lock_guard<std::mutex> lock(pool->changing);
  pool->threads = threads < 1 ? 1 : threads;
  return 0;
}

// The highest level of this processor: see simd.h.
__attribute__((visibility("default"))) int di_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 1;
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) return 3;
  return 2;
#else
  return 0;
#endif
}

void di_parallel(int64_t tasks, void (*f)(void*, int64_t), void* context) {
  pool->run(tasks, f, context);
}

__attribute__((visibility("default"))) int di_launch(const CapturedCall* calls, int64_t count,
                                                   int64_t* done) {
  for (int64_t i = 0; i < count; i++)
    if (int status = calls[i].op(calls[i].words)) return *done = i, status;
  return *done = count, 0;
}

void* di_scratch(int slot, size_t bytes) {
  if (mine.bytes[slot] < bytes) {
    free(mine.piece[slot]);
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    mine.piece[slot] = aligned_alloc(64, rounded);
    mine.bytes[slot] = mine.piece[slot] ? rounded : 0;
  }
  return mine.piece[slot];
}
}
