// SPDX-License-Identifier: Apache-2.0
// The forward and the backward of dense causal attention on the CPU: milliseconds, and GFLOP/s of visible pairs.
#include <attune/attune.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Shape {
  int64_t seqlen, heads_q, heads_kv, head_dim;
  attune_dtype dtype;
};

// [seqlen, heads, head_dim] of N(0, 1).
struct Rows {
  Rows(const Shape& s, int64_t heads, uint32_t seed)
      : bytes(static_cast<size_t>(s.seqlen * heads * s.head_dim * attune_dtype_size(s.dtype))),
        tensor(attune::dense(bytes.data(), s.dtype, {s.seqlen, heads, s.head_dim})) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> distribution;
    const size_t size = static_cast<size_t>(attune_dtype_size(s.dtype));
    for (size_t at = 0; at < bytes.size(); at += size) {
      const float x = distribution(engine);
      // The upper half of an fp32 is a bf16.
      std::memcpy(&bytes[at], reinterpret_cast<const char*>(&x) + sizeof(x) - size, size);
    }
  }
  std::vector<char> bytes;
  attune::Tensor tensor;
};

template <class Descriptor>
double seconds_of(const attune::Plan& plan, const Descriptor& descriptor, const attune::Workspace& workspace) {
  const auto start = Clock::now();
  plan.run(descriptor, workspace);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The best of the runs: a mean would also measure what else the machine does.
void backward(benchmark::State& state) {
  const Shape s{state.range(0), state.range(1), state.range(2), state.range(3),
                state.range(4) == 16 ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT32};
  Rows q(s, s.heads_q, 1), k(s, s.heads_kv, 2), v(s, s.heads_kv, 3), out(s, s.heads_q, 4), dout(s, s.heads_q, 5);
  Rows dq(s, s.heads_q, 6), dk(s, s.heads_kv, 7), dv(s, s.heads_kv, 8);
  std::vector<float> lse(static_cast<size_t>(s.seqlen * s.heads_q));
  attune::Attention a;
  a.q = q.tensor, a.k = k.tensor, a.v = v.tensor, a.out = out.tensor;
  a.lse = attune::dense(lse.data(), {s.seqlen, s.heads_q});
  a.causal = 1;
  attune::AttentionBackward b(a);
  b.dout = dout.tensor, b.dq = dq.tensor, b.dk = dk.tensor, b.dv = dv.tensor;
  const attune::Plan forward_plan(a), backward_plan(b);
  const attune::Workspace forward_workspace(forward_plan.workspace_size());
  const attune::Workspace backward_workspace(backward_plan.workspace_size());
  double forward = 1e9, best = 1e9;
  for (auto _ : state) {
    forward = std::min(forward, seconds_of(forward_plan, a, forward_workspace));
    best = std::min(best, seconds_of(backward_plan, b, backward_workspace));
  }
  const double pairs = 0.5 * static_cast<double>(s.seqlen * (s.seqlen + 1) * s.heads_q);
  state.counters["forward_ms"] = forward * 1e3;
  state.counters["backward_ms"] = best * 1e3;
  state.counters["GFLOP/s"] = 10 * pairs * static_cast<double>(s.head_dim) / best * 1e-9;
}
BENCHMARK(backward)
    ->ArgNames({"seqlen", "heads_q", "heads_kv", "head_dim", "bits"})
    ->ArgsProduct({{2048}, {32}, {8}, {128}, {32, 16}})
    ->ArgsProduct({{2048}, {16}, {16}, {64}, {32, 16}})
    ->Unit(benchmark::kMillisecond)
    ->Iterations(5);

}  // namespace
