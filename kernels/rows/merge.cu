// SPDX-License-Identifier: Apache-2.0
// Partial results merged by lse.
//
// Maths. m = max lse_i; D = sum exp(lse_i - m) [+ exp(sink - m)]; out = sum exp(lse_i - m) / D * out_i in the order of
// the parts; lse = m + log(sum exp(lse_i - m)). A part with lse = -inf counts for nothing, whatever its out holds.
// Exponentials, their sum and the weights are doubles, the sum of outputs is fp32: as on the CPU.
//
// Tiles. A warp takes a (row, head); a lane one part in each of the three passes over the lses, and runs of
// ATTUNE_WIDTH columns of all parts. Sums over parts go in their order, so every lane repeats them.
#include "ptx/grid.cuh"
#include "rows/rows_params.h"
#include "tile/run.cuh"

namespace attune::rows {

using kernels::MergeParams;

constexpr int kWidth = ATTUNE_WIDTH;
constexpr bool kVector = kWidth == 8;  // all runs follow each other in memory and are aligned
constexpr int kPartType = ATTUNE_ROW_TYPE, kOutType = ATTUNE_OUT_TYPE;  // 0: at run time
constexpr unsigned kAll = 0xffffffffu;

struct Line {
  long long row;
  int head, lane;
};

__device__ __forceinline__ float part_lse(const MergeParams& p, const Line& l, long long part) {
  return *reinterpret_cast<const float*>(p.in_lse + part * p.in_lse_part_stride + l.row * p.in_lse_row_stride +
                                         l.head * p.in_lse_head_stride);
}

__device__ __forceinline__ void merge_line(const MergeParams& p, const Line& l) {
  const double infinity = __longlong_as_double(0x7ff0000000000000ll);
  // A NaN is passed over here and enters the sum.
  float largest = -static_cast<float>(infinity);
  bool seen = false;
  for (long long base = 0; base < p.parts; base += 32) {
    const float lse = base + l.lane < p.parts ? part_lse(p, l, base + l.lane) : -static_cast<float>(infinity);
    largest = fmaxf(largest, lse);
    seen = seen || !(lse == -static_cast<float>(infinity));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
  seen = __any_sync(kAll, seen);
  const double m = largest;
  double sum = 0;
  for (long long base = 0; base < p.parts; base += 32) {
    const double lse = base + l.lane < p.parts ? part_lse(p, l, base + l.lane) : -infinity;
    const double weight = lse == -infinity ? 0.0 : exp(lse - m);
    const int count = p.parts - base < 32 ? static_cast<int>(p.parts - base) : 32;
    for (int i = 0; i < count; ++i) sum += __shfl_sync(kAll, weight, i);
  }
  double denominator = sum;
  if (p.sinks != nullptr) {
    float sink[1];
    tile::decode_run<1>(p.sinks_dtype, tile::load_run<1>(p.sinks_dtype, p.sinks + l.head * p.sinks_stride, 0, false),
                        sink);
    denominator += exp(static_cast<double>(sink[0]) - m);
  }
  if (p.lse != nullptr && l.lane == 0) {
    *reinterpret_cast<float*>(p.lse + l.row * p.lse_row_stride + l.head * p.lse_head_stride) =
        static_cast<float>(seen ? m + log(sum) : -infinity);
  }
  const float scale = p.out_scale != nullptr ? *p.out_scale : 1.0f;
  const int in_type = kPartType != 0 ? kPartType : p.in.dtype, out_type = kOutType != 0 ? kOutType : p.out.dtype;
  const char* in = p.in.data + l.row * p.in.row_stride + l.head * p.in.head_stride;
  char* out = p.out.data + l.row * p.out.row_stride + l.head * p.out.head_stride;
  for (int first = 0; first < p.head_dim; first += 32 * kWidth) {
    const int d = first + l.lane * kWidth;
    float x[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] = 0;
    for (long long base = 0; base < p.parts; base += 32) {
      const double lse = base + l.lane < p.parts ? part_lse(p, l, base + l.lane) : -infinity;
      // Of a part that counts: no weight is negative.
      const float own = lse == -infinity ? -1.0f : static_cast<float>(exp(lse - m) / denominator);
      const int count = p.parts - base < 32 ? static_cast<int>(p.parts - base) : 32;
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const float weight = __shfl_sync(kAll, own, i);
        if (weight == -1.0f || d >= p.head_dim) continue;
        float part[kWidth];
        tile::decode_run<kWidth>(
            in_type,
            tile::load_run<kWidth>(in_type, in + (base + i) * p.in_part_stride + d * p.in.channel_stride,
                                   p.in.channel_stride, kVector),
            part);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[k] = fmaf(weight, part[k], x[k]);
      }
    }
    if (d >= p.head_dim) continue;
    if (p.out_scale != nullptr) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[k] *= scale;
    }
    tile::store_run<kWidth>(out_type, tile::encode_run<kWidth>(out_type, x), out + d * p.out.channel_stride,
                            p.out.channel_stride, kVector);
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads)
    attune_merge(const __grid_constant__ attune::kernels::MergeParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  const long long line = static_cast<long long>(blockIdx.x) * (attune::kernels::kRowsThreads / 32) + threadIdx.x / 32;
  if (line >= p.rows * p.heads) return;
  const long long row = line / p.heads;
  attune::rows::merge_line(p, {row, static_cast<int>(line - row * p.heads), static_cast<int>(threadIdx.x % 32)});
}
