// SPDX-License-Identifier: Apache-2.0
// Speed of the CPU backend's building blocks on one core, as the best of many short runs: other programs share the
// machine. ATTUNE_CPU_ISA chooses the table. "of_peak" is the share of the measured fp32 FMA peak (bf16 instructions
// may exceed it).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "ceilings.h"
#include "core/dtype.h"
#include "cpu/kernels.h"
#include "cpu/kernels_prefetch.h"

namespace {

using attune::cpu::bf16_t;
using attune::cpu::kernels;
using attune::cpu::TileType;
using Clock = std::chrono::steady_clock;

const attune::cli::Ceilings& ceilings() {
  static const attune::cli::Ceilings measured = attune::cli::measure_ceilings(1);
  return measured;
}

template <typename T>
T make(float x) {
  return static_cast<T>(static_cast<int>(x * 20.0f));
}
template <>
float make<float>(float x) {
  return x;
}
template <>
bf16_t make<bf16_t>(float x) {
  bf16_t bits;
  kernels().to_bf16(ATTUNE_FLOAT32, &x, 1, &bits);
  return bits;
}

// uint8_t elements stand for e4m3, int8_t for int8.
template <typename T>
constexpr attune_dtype code_dtype() {
  return std::is_signed_v<T> ? ATTUNE_INT8 : ATTUNE_FLOAT8_E4M3;
}

// 64-byte aligned elements, normally distributed.
template <typename T>
struct Buffer {
  std::unique_ptr<T[]> storage;
  T* data;
  explicit Buffer(size_t n) : storage(new T[n + 64 / sizeof(T)]) {
    const auto address = reinterpret_cast<uintptr_t>(storage.get());
    data = storage.get() + (64 - address % 64) % 64 / sizeof(T);
    std::mt19937 rng(7);
    std::normal_distribution<float> normal;
    T values[1024];
    for (T& value : values) value = make<T>(normal(rng));
    for (size_t i = 0; i < n; ++i) data[i] = values[i % 1021];
  }
};

// Runs body `repeats` times an iteration and returns the seconds of the fastest single body.
template <class Body>
double best_time(benchmark::State& state, int repeats, Body body) {
  double best = 1e30;
  for (auto _ : state) {
    const auto start = Clock::now();
    for (int i = 0; i < repeats; ++i) body();
    benchmark::ClobberMemory();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count() / repeats);
  }
  return best;
}

void report_flops(benchmark::State& state, double flops, double seconds) {
  state.counters["GFLOP/s"] = flops / seconds / 1e9;
  state.counters["of_peak"] = flops / seconds / 1e9 / ceilings().fma_gflops_1;
}

// A peak cycle is the time of one 16-lane FMA: a clock that no frequency change bends.
void report_cycles(benchmark::State& state, const char* unit, double count, double seconds) {
  state.counters[unit] = seconds / count * ceilings().fma_gflops_1 * 1e9 / 32.0;
}

template <typename T>
void gemm(benchmark::State& state) {
  const int m = static_cast<int>(state.range(0)), n = static_cast<int>(state.range(1)),
            k = static_cast<int>(state.range(2));
  Buffer<T> a(static_cast<size_t>(m) * k), b(static_cast<size_t>(k) * n);
  Buffer<float> c(static_cast<size_t>(m) * n);
  const double seconds = best_time(state, 10, [&] {
    if constexpr (sizeof(T) == 4) {
      kernels().gemm_f32(m, n, k, a.data, k, b.data, n, c.data, n, false);
    } else {
      kernels().gemm_bf16(m, n, k, a.data, k, b.data, n, c.data, n, false);
    }
  });
  report_flops(state, 2.0 * m * n * k, seconds);
}

#define GEMM_SHAPES           \
  ArgNames({"m", "n", "k"})   \
      ->Args({64, 64, 64})    \
      ->Args({64, 64, 128})   \
      ->Args({128, 64, 128})  \
      ->Args({256, 64, 128})  \
      ->Args({256, 128, 128}) \
      ->Args({64, 128, 64})   \
      ->Args({61, 64, 128})   \
      ->Args({256, 64, 576})  \
      ->Args({256, 512, 64})  \
      ->Args({4, 64, 128})
BENCHMARK(gemm<float>)->GEMM_SHAPES;
BENCHMARK(gemm<bf16_t>)->GEMM_SHAPES;

// Rows in scattered pages of 16, as in a paged cache.
template <typename T>
std::vector<const T*> scattered_rows(const T* data, int64_t count, int64_t d) {
  std::vector<int64_t> pages(static_cast<size_t>((count + 15) / 16));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(11));
  std::vector<const T*> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(data + (pages[static_cast<size_t>(i / 16)] * 16 + i % 16) * d);
  return rows;
}

template <typename T>
void qk_rows(benchmark::State& state) {
  const int m = static_cast<int>(state.range(0)), n = static_cast<int>(state.range(1)),
            d = static_cast<int>(state.range(2));
  using Q = std::conditional_t<sizeof(T) == 4, float, bf16_t>;
  Buffer<Q> q(static_cast<size_t>(m) * d);
  Buffer<T> k(static_cast<size_t>(n + 16) * d);
  Buffer<float> s(static_cast<size_t>(m) * n);
  const auto rows = scattered_rows<T>(k.data, n, d);
  const double seconds = best_time(state, 20, [&] {
    if constexpr (sizeof(T) == 4) kernels().qk_rows_f32(m, n, d, q.data, d, rows.data(), s.data, n);
    if constexpr (sizeof(T) == 2) kernels().qk_rows_bf16(m, n, d, q.data, d, rows.data(), s.data, n);
    if constexpr (sizeof(T) == 1)
      kernels().qk_rows_8bit(code_dtype<T>(), m, n, d, q.data, d, reinterpret_cast<const uint8_t* const*>(rows.data()),
                             s.data, n, {});
  });
  report_flops(state, 2.0 * m * n * d, seconds);
  report_cycles(state, "cycles/row", n, seconds);
}

template <typename T>
void pv_rows(benchmark::State& state) {
  const int m = static_cast<int>(state.range(0)), n = static_cast<int>(state.range(1)),
            dv = static_cast<int>(state.range(2));
  using P = std::conditional_t<sizeof(T) == 4, float, bf16_t>;
  Buffer<P> p(static_cast<size_t>(m) * n);
  Buffer<T> v(static_cast<size_t>(n + 16) * dv);
  Buffer<float> o(static_cast<size_t>(m) * dv);
  const auto rows = scattered_rows<T>(v.data, n, dv);
  const double seconds = best_time(state, 20, [&] {
    if constexpr (sizeof(T) == 4) kernels().pv_rows_f32(m, n, dv, p.data, n, rows.data(), o.data, dv);
    if constexpr (sizeof(T) == 2) kernels().pv_rows_bf16(m, n, dv, p.data, n, rows.data(), o.data, dv);
    if constexpr (sizeof(T) == 1)
      kernels().pv_rows_8bit(code_dtype<T>(), m, n, dv, p.data, n, reinterpret_cast<const uint8_t* const*>(rows.data()),
                             o.data, dv, {});
  });
  report_flops(state, 2.0 * m * n * dv, seconds);
  report_cycles(state, "cycles/row", n, seconds);
}

#define QK_SHAPES           \
  ArgNames({"m", "n", "d"}) \
      ->Args({1, 64, 128})  \
      ->Args({4, 64, 128})  \
      ->Args({4, 32, 128})  \
      ->Args({8, 64, 128})  \
      ->Args({128, 64, 576})
#define PV_SHAPES            \
  ArgNames({"m", "n", "dv"}) \
      ->Args({1, 64, 128})   \
      ->Args({4, 64, 128})   \
      ->Args({4, 32, 128})   \
      ->Args({8, 64, 128})   \
      ->Args({128, 64, 512})
BENCHMARK(qk_rows<float>)->QK_SHAPES;
BENCHMARK(qk_rows<bf16_t>)->QK_SHAPES;
BENCHMARK(qk_rows<uint8_t>)->QK_SHAPES;
BENCHMARK(qk_rows<int8_t>)->QK_SHAPES;
BENCHMARK(pv_rows<float>)->PV_SHAPES;
BENCHMARK(pv_rows<bf16_t>)->PV_SHAPES;
BENCHMARK(pv_rows<uint8_t>)->PV_SHAPES;
BENCHMARK(pv_rows<int8_t>)->PV_SHAPES;

template <typename P>
void softmax(benchmark::State& state) {
  const int m = static_cast<int>(state.range(0)), n = static_cast<int>(state.range(1)), dv = 128;
  Buffer<float> s(static_cast<size_t>(m) * n), o(static_cast<size_t>(m) * dv);
  Buffer<P> p(static_cast<size_t>(m) * n);
  std::vector<float> row_max(m, 10.0f), row_sum(m, 1.0f);
  const double seconds = best_time(state, 20, [&] {
    kernels().softmax({.m = m,
                       .n = n,
                       .s = s.data,
                       .lds = n,
                       .scale2 = 1.4f,
                       .v_scale = nullptr,
                       .row_max = row_max.data(),
                       .row_sum = row_sum.data(),
                       .o = o.data,
                       .ldo = dv,
                       .dv = dv,
                       .p = p.data,
                       .ldp = n,
                       .p_type = sizeof(P) == 4 ? TileType::kF32 : TileType::kBF16});
  });
  report_cycles(state, "cycles/16", m * n / 16.0, seconds);
}
#define SOFTMAX_SHAPES \
  ArgNames({"m", "n"})->Args({64, 64})->Args({256, 64})->Args({4, 32})->Args({4, 64})->Args({64, 256})
BENCHMARK(softmax<float>)->SOFTMAX_SHAPES;
BENCHMARK(softmax<bf16_t>)->SOFTMAX_SHAPES;

template <typename T>
void convert(benchmark::State& state) {
  const auto dtype = static_cast<attune_dtype>(state.range(0));
  constexpr int kRows = 32, kColumns = 128;
  Buffer<float> source(kRows * kColumns);
  Buffer<T> out(kRows * kColumns);
  const int64_t size = attune::dtype_size(dtype);
  const double seconds = best_time(state, 20, [&] {
    for (int i = 0; i < kRows; ++i) {
      const void* row = reinterpret_cast<const char*>(source.data) + i * kColumns * size;
      if constexpr (sizeof(T) == 4) {
        kernels().to_f32(dtype, row, kColumns, out.data + i * kColumns);
      } else {
        kernels().to_bf16(dtype, row, kColumns, out.data + i * kColumns);
      }
    }
  });
  state.SetLabel(attune::dtype_name(dtype));
  report_cycles(state, "cycles/row128", kRows, seconds);
}
BENCHMARK(convert<float>)->DenseRange(ATTUNE_FLOAT16, ATTUNE_INT8);
BENCHMARK(convert<bf16_t>)->DenseRange(ATTUNE_FLOAT32, ATTUNE_INT8);

void pack(benchmark::State& state) {
  const int kind = static_cast<int>(state.range(0));
  constexpr int kRows = 64, kColumns = 128;
  Buffer<float> wide(kRows * kColumns), wide_out(kRows * kColumns);
  Buffer<bf16_t> half(kRows * kColumns), half_out(kRows * kColumns);
  std::vector<const float*> wide_rows;
  std::vector<const bf16_t*> half_rows;
  for (int i = 0; i < kRows; ++i)
    wide_rows.push_back(wide.data + i * kColumns), half_rows.push_back(half.data + i * kColumns);
  const double seconds = best_time(state, 20, [&] {
    if (kind == 0) kernels().pack_k_f32(wide_rows.data(), kRows, kColumns, wide_out.data, kRows);
    if (kind == 1) kernels().pack_k_bf16(half_rows.data(), kRows, kColumns, half_out.data, kRows);
    if (kind == 2) kernels().pack_v_bf16(half_rows.data(), kRows, kColumns, half_out.data, kColumns);
  });
  const char* const names[] = {"pack_k_f32", "pack_k_bf16", "pack_v_bf16"};
  state.SetLabel(names[kind]);
  report_cycles(state, "cycles/row128", kRows, seconds);
}
BENCHMARK(pack)->DenseRange(0, 2);

// --- From memory: windows of a buffer much larger than the caches, the best window counts

constexpr int kWidth = 128;          // d and dv
constexpr int64_t kTokens = 262144;  // 128 MB of bf16 K and V
constexpr int64_t kWindow = 8192;    // tokens

// Runs body(first token) on one window after the other and returns the seconds of the fastest.
template <class Body>
double best_window(benchmark::State& state, Body body) {
  double best = 1e30;
  int64_t first = 0;
  for (auto _ : state) {
    const auto start = Clock::now();
    body(first);
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
    first = (first + kWindow) % kTokens;
  }
  return best;
}

void report_bandwidth(benchmark::State& state, double bytes, double seconds) {
  state.counters["GB/s"] = bytes / seconds / 1e9;
  report_cycles(state, "cycles/token", kWindow, seconds);
}

void read_stream(benchmark::State& state) {
  Buffer<bf16_t> data(2 * kTokens * kWidth);
  const double seconds = best_window(state, [&](int64_t first) {
    const auto* p = reinterpret_cast<const uint64_t*>(data.data + 2 * first * kWidth);
    uint64_t sum[8] = {};
    for (int64_t i = 0; i < kWindow * kWidth / 2; i += 8) {
      for (int j = 0; j < 8; ++j) sum[j] += p[i + j];
    }
    benchmark::DoNotOptimize(sum);
  });
  report_bandwidth(state, 4.0 * kWindow * kWidth, seconds);
}
BENCHMARK(read_stream);

// Decode of one KV head as a driver does it: scores, softmax and sums of a tile. Pages of 16 rows lie in order or
// scattered; the next tile is prefetched by software or left to the hardware.
void decode_stream(benchmark::State& state) {
  const auto dtype = static_cast<attune_dtype>(state.range(0));
  const int m = static_cast<int>(state.range(1)), tile = static_cast<int>(state.range(2));
  const bool scattered = state.range(3) != 0, prefetch = state.range(4) != 0;
  constexpr int d = kWidth;
  const int64_t size = attune::dtype_size(dtype);
  Buffer<bf16_t> k(kTokens * d * size / 2), v(kTokens * d * size / 2);
  std::vector<const void*> k_rows, v_rows;
  for (const char* row : scattered_rows(reinterpret_cast<const char*>(k.data), kTokens, d * size))
    k_rows.push_back(row);
  for (const char* row : scattered_rows(reinterpret_cast<const char*>(v.data), kTokens, d * size))
    v_rows.push_back(row);
  if (!scattered) std::sort(k_rows.begin(), k_rows.end()), std::sort(v_rows.begin(), v_rows.end());
  for (int i = 0; i < tile; ++i) k_rows.push_back(k_rows[0]), v_rows.push_back(v_rows[0]);  // what "next" is at the end
  Buffer<bf16_t> q(static_cast<size_t>(m) * d), p(static_cast<size_t>(m) * tile);
  Buffer<float> s(static_cast<size_t>(m) * tile), o(static_cast<size_t>(m) * d);
  std::vector<float> row_max(m, 100.0f), row_sum(m, 1.0f);
  const double seconds = best_window(state, [&](int64_t window) {
    for (int64_t first = window; first < window + kWindow; first += tile) {
      const void* const* const k_tile = k_rows.data() + first;
      const void* const* const v_tile = v_rows.data() + first;
      if (prefetch) attune::cpu::prefetch_tile(k_tile + tile, d * size, v_tile + tile, d * size, 0, tile / 2);
      if (size == 1) {
        kernels().qk_rows_8bit(dtype, m, tile, d, q.data, d, reinterpret_cast<const uint8_t* const*>(k_tile), s.data,
                               tile, {});
      } else {
        kernels().qk_rows_bf16(m, tile, d, q.data, d, reinterpret_cast<const bf16_t* const*>(k_tile), s.data, tile);
      }
      kernels().softmax({.m = m,
                         .n = tile,
                         .s = s.data,
                         .lds = tile,
                         .scale2 = 0.1f,
                         .v_scale = nullptr,
                         .row_max = row_max.data(),
                         .row_sum = row_sum.data(),
                         .o = o.data,
                         .ldo = d,
                         .dv = d,
                         .p = p.data,
                         .ldp = tile,
                         .p_type = TileType::kBF16});
      if (prefetch) attune::cpu::prefetch_tile(k_tile + tile, d * size, v_tile + tile, d * size, tile / 2, tile);
      if (size == 1) {
        kernels().pv_rows_8bit(dtype, m, tile, d, p.data, tile, reinterpret_cast<const uint8_t* const*>(v_tile), o.data,
                               d, {});
      } else {
        kernels().pv_rows_bf16(m, tile, d, p.data, tile, reinterpret_cast<const bf16_t* const*>(v_tile), o.data, d);
      }
    }
  });
  state.SetLabel(attune::dtype_name(dtype));
  report_bandwidth(state, 2.0 * kWindow * d * static_cast<double>(size), seconds);
}
BENCHMARK(decode_stream)
    ->ArgNames({"dtype", "m", "tile", "scattered", "prefetch"})
    ->ArgsProduct({{ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_INT8}, {4}, {16, 32, 64}, {0, 1}, {0, 1}});

}  // namespace
