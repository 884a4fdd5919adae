// SPDX-License-Identifier: Apache-2.0
#include "ceilings.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ceilings.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first so that the following are seen for every target.
#include <hwy/highway.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

HWY_BEFORE_NAMESPACE();
namespace attune::cli::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Twelve independent chains: more than latency times units of any current CPU, and they fit 16 registers. Returns the
// operations.
double fma_chains(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999f);
  const auto b = hn::Set(d, sink[0]);
  // Different values, or the compiler would find that one chain is enough.
  auto c0 = hn::Set(d, sink[0]), c1 = hn::Set(d, sink[1]), c2 = hn::Set(d, sink[2]), c3 = hn::Set(d, sink[3]);
  auto c4 = hn::Set(d, sink[4]), c5 = hn::Set(d, sink[5]), c6 = hn::Set(d, sink[6]), c7 = hn::Set(d, sink[7]);
  auto c8 = hn::Set(d, sink[8]), c9 = hn::Set(d, sink[9]), c10 = hn::Set(d, sink[10]), c11 = hn::Set(d, sink[11]);
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(a, c0, b), c1 = hn::MulAdd(a, c1, b), c2 = hn::MulAdd(a, c2, b), c3 = hn::MulAdd(a, c3, b);
    c4 = hn::MulAdd(a, c4, b), c5 = hn::MulAdd(a, c5, b), c6 = hn::MulAdd(a, c6, b), c7 = hn::MulAdd(a, c7, b);
    c8 = hn::MulAdd(a, c8, b), c9 = hn::MulAdd(a, c9, b), c10 = hn::MulAdd(a, c10, b), c11 = hn::MulAdd(a, c11, b);
  }
  const auto sum0 = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), hn::Add(c4, c5));
  const auto sum1 = hn::Add(hn::Add(hn::Add(c6, c7), hn::Add(c8, c9)), hn::Add(c10, c11));
  sink[0] = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));  // keeps the chains alive
  return 2.0 * 12.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
}

// Adds up count elements; count is a multiple of four vectors.
uint32_t read_all(const uint32_t* data, size_t count) {
  const hn::ScalableTag<uint32_t> d;
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (size_t i = 0; i < count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, data + i));
    s1 = hn::Add(s1, hn::LoadU(d, data + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, data + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

}  // namespace attune::cli::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attune::cli {
namespace {

HWY_EXPORT(fma_chains);
HWY_EXPORT(read_all);

using Clock = std::chrono::steady_clock;

// Passes stop early on a machine that is busy with other work.
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs body(thread) on all threads and returns the seconds from the moment all are ready to the last one's end.
double time_together(int threads, const std::function<void(int)>& body) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) {
    workers.emplace_back([&, t] {
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
      body(t);
    });
  }
  while (ready.load() != threads - 1) std::this_thread::yield();
  const auto start = Clock::now();
  go.store(true, std::memory_order_release);
  body(0);
  for (std::thread& worker : workers) worker.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double measure_fma(int threads) {
  constexpr int64_t kRounds = 200'000;  // below 1 ms
  double best = 0.0;
  const auto start = Clock::now();
  // Long enough that a scheduler finds a core for each thread.
  for (int pass = 0; pass < 3 || seconds_since(start) < 0.25; ++pass) {
    std::vector<double> operations(static_cast<size_t>(threads));
    const double seconds = time_together(threads, [&](int t) {
      float sink[12];
      for (int i = 0; i < 12; ++i) sink[i] = 0.001f * static_cast<float>(i + 1);
      double done = 0.0;
      for (int i = 0; i < 4; ++i) done += HWY_DYNAMIC_DISPATCH(fma_chains)(kRounds, sink);
      volatile float keep = sink[0];
      (void)keep;
      operations[static_cast<size_t>(t)] = done;
    });
    double total = 0.0;
    for (double done : operations) total += done;
    best = std::max(best, total / seconds / 1e9);
  }
  return best;
}

double measure_read(int threads) {
  size_t bytes = size_t{256} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (l3 > 0) bytes = std::clamp(4 * static_cast<size_t>(l3), bytes, size_t{1} << 30);
#endif
  const size_t share = bytes / sizeof(uint32_t) / static_cast<size_t>(threads) / 4096 * 4096;
  // Ordinary pages, as in the buffers that callers pass; asking for huge ones took longer to prepare and read no
  // faster.
  const std::unique_ptr<uint32_t[]> buffer(new uint32_t[share * static_cast<size_t>(threads)]);
  // Each thread touches its own share first, so that it lies in that thread's memory.
  time_together(threads, [&](int t) {
    uint32_t* mine = buffer.get() + share * static_cast<size_t>(t);
    for (size_t i = 0; i < share; ++i) mine[i] = static_cast<uint32_t>(i);
  });
  double best = 0.0;
  const auto start = Clock::now();
  for (int pass = 0; pass < 3 || seconds_since(start) < 0.5; ++pass) {
    std::atomic<uint32_t> sum{0};
    const double seconds = time_together(threads, [&](int t) {
      sum.fetch_add(HWY_DYNAMIC_DISPATCH(read_all)(buffer.get() + share * static_cast<size_t>(t), share));
    });
    volatile uint32_t keep = sum.load();
    (void)keep;
    best = std::max(best, static_cast<double>(share) * threads * sizeof(uint32_t) / seconds / 1e9);
  }
  return best;
}

}  // namespace

Ceilings measure_ceilings(int threads) {
  threads = std::max(threads, 1);
  Ceilings result;
  result.threads = threads;
  result.fma_gflops_1 = measure_fma(1);
  result.fma_gflops_all = threads > 1 ? std::max(measure_fma(threads), result.fma_gflops_1) : result.fma_gflops_1;
  result.read_gbps_all = measure_read(threads);
  return result;
}

}  // namespace attune::cli
#endif  // HWY_ONCE
