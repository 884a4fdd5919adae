// SPDX-License-Identifier: Apache-2.0
#include "cpu/threads.h"

#include <pthread.h>

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace attune::cpu {
namespace {

// A thread spins about 25 us (Zen 4) before it sleeps, as calls of a step follow each other closely. Longer would take
// a core from others that have work.
constexpr int kSpins = 1000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Returns true as soon as done() does, and false when it is time to sleep.
template <class Done>
bool spin_until(Done&& done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
    pause();
  }
  return done();
}

struct Job {
  void (*work)(void*, int);
  void* context;
  int threads;
  Job* next = nullptr;          // in the pool's list; guarded by the pool's mutex
  int begun = 1;                // threads that have begun, with the caller; guarded by the pool's mutex
  std::atomic<int> running{0};  // threads of the pool that are at work; changes under the mutex
};

class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      posted_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // Waits until all threads have started: one that is just starting may hold a lock of the C library or of a sanitizer,
  // which would stay locked in the child.
  void before_fork() {
    std::unique_lock lock(mutex_);
    left_.wait(lock, [&] { return started_ == workers_.size(); });
    lock.release();
  }
  void after_fork_in_parent() { mutex_.unlock(); }

  void ready(int threads) {
    const std::lock_guard lock(mutex_);
    start_workers(threads - 1);
  }

  void run(int threads, void (*work)(void*, int), void* context) {
    Job job{work, context, threads};
    {
      const std::lock_guard lock(mutex_);
      start_workers(threads - 1);
      append(&job);
      posted_.fetch_add(1);
    }
    for (int i = 1; i < threads; ++i) wake_.notify_one();
    work(context, 0);
    {
      const std::lock_guard lock(mutex_);
      remove(&job);  // no thread begins from here on
    }
    // Takes the mutex even after the last thread left, as that thread still used the job under it.
    spin_until([&] { return job.running.load() == 0; });
    std::unique_lock lock(mutex_);
    left_.wait(lock, [&] { return job.running.load() == 0; });
  }

 private:
  void append(Job* job) {
    Job** at = &jobs_;
    while (*at != nullptr) at = &(*at)->next;
    *at = job;
  }
  // Does nothing where the job has been removed.
  void remove(const Job* job) {
    Job** at = &jobs_;
    while (*at != nullptr && *at != job) at = &(*at)->next;
    if (*at != nullptr) *at = job->next;
  }

  // Starts threads until there are `count`. Fewer are no error: those that started do the work.
  void start_workers(int count) {
    try {
      while (static_cast<int>(workers_.size()) < count) workers_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
    }
  }

  void serve() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    ++started_;
    left_.notify_all();
    while (!stopping_) {
      if (jobs_ != nullptr) {
        Job* job = jobs_;
        const int thread = job->begun++;
        if (job->begun == job->threads) jobs_ = job->next;
        job->running.fetch_add(1);
        lock.unlock();
        job->work(job->context, thread);
        lock.lock();
        if (job->running.fetch_sub(1) == 1) left_.notify_all();
        continue;
      }
      seen = posted_.load();
      lock.unlock();
      const bool more = spin_until([&] { return posted_.load() != seen; });
      lock.lock();
      if (!more) wake_.wait(lock, [&] { return posted_.load() != seen; });
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;  // for the workers
  std::condition_variable left_;  // for callers: a worker has started, or left a job
  Job* jobs_ = nullptr;  // jobs that still take threads, the oldest first; linked, so that a run allocates nothing
  std::atomic<uint64_t> posted_{0};  // number of jobs so far; changes under the mutex
  bool stopping_ = false;
  std::vector<std::thread> workers_;
  size_t started_ = 0;  // workers that have started
};

// A forked child has no threads of its parent, and the mutex may be locked in it: it gets a pool of its own.
class PoolOfProcess {
 public:
  PoolOfProcess() : pool_(new Pool) {
    pthread_atfork([] { instance().pool_->before_fork(); }, [] { instance().pool_->after_fork_in_parent(); },
                   [] { instance().pool_ = new Pool; });
  }
  ~PoolOfProcess() { delete pool_; }
  static PoolOfProcess& instance() {
    static PoolOfProcess pool;
    return pool;
  }
  Pool& pool() { return *pool_; }

 private:
  Pool* pool_;
};

// OMP_NUM_THREADS, which engines and BLAS libraries heed too, else the cores that this process may use. Of a list, for
// OpenMP's nested levels, the first number.
int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS"); text != nullptr) {
    char* end = nullptr;
    const long count = std::strtol(text, &end, 10);
    while (*end == ' ') ++end;
    if ((*end == '\0' || *end == ',') && count >= 1 && count <= kMostThreads) return static_cast<int>(count);
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int> g_num_threads{0};

}  // namespace

int num_threads() {
  static const int by_default = default_threads();
  const int set = g_num_threads.load(std::memory_order_relaxed);
  return set > 0 ? set : by_default;
}

void set_num_threads(int count) { g_num_threads.store(count, std::memory_order_relaxed); }

void ready_threads(int count) {
  if (count > 1) PoolOfProcess::instance().pool().ready(count);
}

void run_together(int threads, void (*work)(void*, int), void* context) {
  PoolOfProcess::instance().pool().run(threads, work, context);
}

}  // namespace attune::cpu
