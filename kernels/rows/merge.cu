// SPDX-License-Identifier: Apache-2.0
// Merges partial results of attention by their lse (attune_merge).
//
// Maths: m = max lse_i; D = sum exp(lse_i - m) [+ exp(sink - m)]; out = sum exp(lse_i - m) / D * out_i, in the order of
// the partial results i; lse = m + log(sum exp(lse_i - m)). A partial result with lse = -inf is ignored, whatever its
// out holds. Exponentials and their sum are doubles and the sum of outputs is fp32, as on the CPU.
//
// Grid: one block for each 256 / ATTUNE_LANES pairs (row, head). ATTUNE_LANES threads take a (row, head). Each computes
// the scale exp(lse_i - m) of one partial result; then each takes runs of ATTUNE_WIDTH columns of all partial results.
// Sums go in the order of the partial results, so every thread repeats them.
#include "common/run.cuh"
#include "ptx/grid.cuh"
#include "rows/rows_params.h"

namespace attune::rows {

using kernels::MergeParams;

constexpr int kWidth = ATTUNE_WIDTH;
constexpr bool kVector = kWidth == 8;                                   // all runs are contiguous and aligned
constexpr int kPartType = ATTUNE_ROW_TYPE, kOutType = ATTUNE_OUT_TYPE;  // 0: at run time
constexpr int kLanes = ATTUNE_LANES;                                    // threads of a row: 16 or 32
constexpr unsigned kAll = 0xffffffffu;

// One (row, head).
struct OutputRow {
  long long row;
  int head, lane;
  bool live;  // false: no such row, but its lanes take part in shuffles
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The lse of this lane's partial result among those from `base` on; -inf after the last.
__device__ __forceinline__ float lane_lse(const MergeParams& p, const OutputRow& l, long long base) {
  const long long part = base + l.lane;
  if (part >= p.parts) return minus_infinity();
  return *reinterpret_cast<const float*>(p.in_lse + part * p.in_lse_part_stride + l.row * p.in_lse_row_stride +
                                         l.head * p.in_lse_head_stride);
}
__device__ __forceinline__ double lse_scale_of(float lse, double m) {
  return lse == minus_infinity() ? 0.0 : exp(static_cast<double>(lse) - m);
}
__device__ __forceinline__ int parts_from(const MergeParams& p, long long base) {
  return p.parts - base < kLanes ? static_cast<int>(p.parts - base) : kLanes;
}

__device__ __forceinline__ void merge_row(const MergeParams& p, const OutputRow& l) {
  // The maximum ignores NaN; the sum does not.
  float largest = minus_infinity();
  bool seen = false;
  for (long long base = 0; base < p.parts; base += kLanes) {
    const float lse = lane_lse(p, l, base);
    largest = fmaxf(largest, lse);
    seen = seen || !(lse == minus_infinity());
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    seen = __shfl_xor_sync(kAll, static_cast<int>(seen), step) != 0 || seen;
  }
  const double m = largest;
  float lse = minus_infinity();  // of the last round, which is usually the only one
  double lse_scale = 0, sum = 0;
  for (long long base = 0; base < p.parts; base += kLanes) {
    lse = lane_lse(p, l, base);
    lse_scale = lse_scale_of(lse, m);
    const int count = parts_from(p, base);
    for (int i = 0; i < count; ++i) sum += __shfl_sync(kAll, lse_scale, i, kLanes);
  }
  double denominator = sum;
  if (p.sinks != nullptr) {
    float sink[1];
    common::decode_run<1>(p.sinks_dtype,
                          common::load_run<1>(p.sinks_dtype, p.sinks + l.head * p.sinks_stride, 0, false), sink);
    denominator += exp(static_cast<double>(sink[0]) - m);
  }
  if (p.lse != nullptr && l.lane == 0 && l.live) {
    *reinterpret_cast<float*>(p.lse + l.row * p.lse_row_stride + l.head * p.lse_head_stride) =
        seen ? static_cast<float>(m + log(sum)) : minus_infinity();
  }
  const int in_type = kPartType != 0 ? kPartType : p.in.dtype, out_type = kOutType != 0 ? kOutType : p.out.dtype;
  const char* in = p.in.data + l.row * p.in.row_stride + l.head * p.in.head_stride;
  char* out = p.out.data + l.row * p.out.row_stride + l.head * p.out.head_stride;
  for (int first = 0; first < p.head_dim; first += kLanes * kWidth) {
    const int d = first + l.lane * kWidth;
    const bool mine = d < p.head_dim;
    float x[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] = 0;
    for (long long base = 0; base < p.parts; base += kLanes) {
      if (p.parts > kLanes) lse = lane_lse(p, l, base), lse_scale = lse_scale_of(lse, m);
      // -1 marks a partial result that is ignored; scales are not negative.
      const float own = lse == minus_infinity() ? -1.0f : static_cast<float>(lse_scale / denominator);
      const int count = parts_from(p, base);
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float factor = __shfl_sync(kAll, own, i, kLanes);
        if (factor == -1.0f || !mine) continue;
        float part[kWidth];
        common::decode_run<kWidth>(
            in_type,
            common::load_run<kWidth>(in_type, in + (base + i) * p.in_part_stride + d * p.in.channel_stride,
                                     p.in.channel_stride, kVector),
            part);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[k] = fmaf(factor, part[k], x[k]);
      }
    }
    if (!mine || !l.live) continue;
    if (p.out_scale != nullptr) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[k] *= *p.out_scale;
    }
    common::store_run<kWidth>(out_type, common::encode_run<kWidth>(out_type, x), out + d * p.out.channel_stride,
                              p.out.channel_stride, kVector);
  }
}

}  // namespace attune::rows

// Two blocks for each multiprocessor: without this bound the compiler spills on GPUs other than Hopper.
#if __CUDA_ARCH__ == 900
#define ATTUNE_MERGE_BOUNDS attune::kernels::kRowsThreads
#else
#define ATTUNE_MERGE_BOUNDS attune::kernels::kRowsThreads, 2
#endif
extern "C" __global__ void __launch_bounds__(ATTUNE_MERGE_BOUNDS)
    attune_merge(const __grid_constant__ attune::kernels::MergeParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  constexpr int kLanes = attune::rows::kLanes, kBlockRows = attune::kernels::kRowsThreads / kLanes;
  const long long index = static_cast<long long>(blockIdx.x) * kBlockRows + threadIdx.x / kLanes;
  const bool live = index < p.rows * p.heads;
  const long long row = live ? index / p.heads : 0;
  attune::rows::merge_row(
      p, {row, live ? static_cast<int>(index - row * p.heads) : 0, static_cast<int>(threadIdx.x % kLanes), live});
}
