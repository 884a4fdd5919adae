// SPDX-License-Identifier: Apache-2.0
// Steps of the softmax on a thread's scores of a tile: max, exponentials, sums and scaling. kCount: registers in use.
#pragma once

#include "prefill/accumulators.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

constexpr bool kManyRegisters = Config::kChannels <= 128;
constexpr int kReduceChains = kManyRegisters ? 4 : 1;  // independent chains of sums and maxima

__device__ __forceinline__ int bits_of(float x) { return static_cast<int>(__float_as_uint(x)); }

constexpr int kExpGroup = Rows::kCapped ? 8 : 16;  // exponentials between two borders
// row_sum is computed this many registers after the exponentials.
constexpr int kReduceLag = Config::kDeferredMaxSoftcap ? kExpGroup / 2 : kExpGroup;
// row_sum is computed between the exponentials; with few registers that spills.
constexpr bool kInterleaveReduce = !Config::kLowRegisters;
// The first register that is reduced after the last exponential.
template <int kCount>
constexpr int kReduceTail = kInterleaveReduce ? kCount - kReduceLag : 0;
// Adds P of registers first..end - 1 to row_sum. kPairs: a shorter dependency chain, for more registers.
template <bool kPairs = false>
__device__ __forceinline__ void add_row_sum(int first, int end, const float (&s)[Config::kKeys / 2], Accumulators& a) {
#pragma unroll
  for (int j = first; j < end; j += 2) {
    float& sum = a.row_sum[j / 2 % 2];
    if constexpr (kPairs) {
      sum += s[j] + s[j + 1];
    } else {
      sum += s[j], sum += s[j + 1];
    }
  }
}

// The largest bits of P in registers first..end - 1 and of `top`. Nonnegative floats have the order of integers, and
// integers have a three-input max. NaN is the largest.
__device__ __forceinline__ void update_p_max_bits(int first, int end, const float (&s)[Config::kKeys / 2], int& top) {
#pragma unroll
  for (int j = first; j < end; j += 2) top = max(max(top, bits_of(s[j])), bits_of(s[j + 1]));
}

// s[j] = 2^exponent(j), in groups. While the special-function unit computes one group (8 clocks for each exponential),
// the exponents of the next group are computed, and reduce(first, end) takes the group before. The caller reduces the
// last group. last() runs before the last group, overlap_last() during it.
//
// Each group is a loop that exits at once, because tile numbers are not negative. The compiler moves nothing across its
// borders; without them it would compute all exponents first.
struct NoOp {
  __device__ __forceinline__ void operator()() const {}
};
template <int kCount, bool kDeferredMax = Config::kDeferredMax, class Exponent, class Reduce, class Last = NoOp,
          class OverlapLast = NoOp>
__device__ __forceinline__ void exponentiate(int tile, float (&s)[Config::kKeys / 2], const Exponent& exponent,
                                             const Reduce& reduce, const Last& last = {},
                                             const OverlapLast& overlap_last = {}) {
  static_assert(kCount % kExpGroup == 0);
#pragma unroll
  for (int j = 0; j < kExpGroup; ++j) s[j] = exponent(j);
#pragma unroll
  for (int first = 0; first < kCount; first += kExpGroup) {
    if (first == kCount - kExpGroup) last();
    do {
#pragma unroll
      for (int j = first; j < first + kExpGroup; ++j) {
        s[j] = ptx::exp2_approx(s[j]);
        if (j + kExpGroup < kCount) s[j + kExpGroup] = exponent(j + kExpGroup);
      }
      if (kInterleaveReduce && first > 0) reduce(first - kReduceLag, first);
      if (kInterleaveReduce && kReduceLag < kExpGroup) reduce(first, first + kExpGroup - kReduceLag);
      if (first == kCount - kExpGroup) overlap_last();
    } while ((!kDeferredMax || first + kExpGroup < kCount) && static_cast<int>(ptx::opaque(tile)) < 0);
  }
}

// The max of x (not with slopes) and this thread's scores of row h. Several chains hide latency, because warps are few.
template <int kCount, class T, class Bits, class Max>
__device__ __forceinline__ T thread_row_max(const float (&s)[Config::kKeys / 2], int h, T x, const Bits& bits,
                                            const Max& largest) {
  T top[kReduceChains];
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const T first = bits(s[4 * j + 2 * h]), second = bits(s[4 * j + 2 * h + 1]);
    top[j % kReduceChains] = largest(j >= kReduceChains ? top[j % kReduceChains]
                                     : Rows::kSloped    ? first
                                                        : x,
                                     first, second);
  }
#pragma unroll
  for (int j = 1; j < kReduceChains; j += 2) top[0] = largest(top[0], top[j], top[j + 1 < kReduceChains ? j + 1 : j]);
  return top[0];
}

// Whether no row_max of the warp is negative.
__device__ __forceinline__ bool all_nonnegative(const float (&max)[2]) {
  return !__any_sync(0xffffffffu, (bits_of(max[0]) | bits_of(max[1])) < 0);
}

// row_max covers a thread's keys alone until row_max_ref is updated or the work tile ends: each lane of a quad can see
// for itself whether an update is needed.
constexpr bool kThreadRowMax = Rows::kPlain;

// Updates row_max with this tile. nonnegative: all_nonnegative(a.row_max), unused in a first tile.
template <int kCount, bool kFirst>
__device__ __forceinline__ void update_row_max(const Rows& rows, int start, const float (&s)[Config::kKeys / 2],
                                               bool nonnegative, Accumulators& a) {
  float top[2];
  // If the max is not negative, it is also the max of the integer bits, which is taken three at a time. In a first tile
  // the sign is tested afterwards.
  constexpr bool kAsBits = kManyRegisters && !Rows::kSloped;
  const auto as_bits = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      top[h] = __uint_as_float(thread_row_max<kCount>(s, h, bits_of(a.row_max[h]), bits_of,
                                                      [](int x, int y, int z) { return max(max(x, y), z); }));
  };
  const auto as_numbers = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      top[h] = thread_row_max<kCount>(
          s, h, a.row_max[h], [](float x) { return x; },
          [](float x, float y, float z) { return fmaxf(x, fmaxf(y, z)); });
  };
  if constexpr (kAsBits && kFirst) {
    as_bits();
    if (!all_nonnegative(top)) as_numbers();
  } else if (kAsBits && nonnegative) {
    as_bits();
  } else {
    as_numbers();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (Rows::kSloped)
      top[h] = fmaxf(a.row_max[h], fmaf(-rows.product_slope[h], rows.distance_of(h, start), top[h]));
    a.row_max[h] = kThreadRowMax ? top[h] : quad_max(top[h]);
  }
}

// The bits of this thread's smallest score of row h, if it is negative: as unsigned integers, negative floats are the
// largest, and grow with their magnitude.
template <int kCount>
__device__ __forceinline__ unsigned least_bits(const float (&s)[Config::kKeys / 2], int h) {
  unsigned top[kReduceChains] = {};
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i)
    top[i % kReduceChains] =
        max(max(top[i % kReduceChains], __float_as_uint(s[4 * i + 2 * h])), __float_as_uint(s[4 * i + 2 * h + 1]));
#pragma unroll
  for (int j = 1; j < kReduceChains; ++j) top[0] = max(top[0], top[j]);
  return top[0];
}

// scales: of the tile's keys, in shared memory.
__device__ __forceinline__ void scale_columns(const float* scales, float (&s)[Config::kKeys / 2]) {
#pragma unroll
  for (int j = 0; j < Config::kKeys / 8; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(scales + 8 * j + threadIdx.x % 4 * 2);
    s[4 * j] *= x.x, s[4 * j + 1] *= x.y, s[4 * j + 2] *= x.x, s[4 * j + 3] *= x.y;
  }
}

__device__ __forceinline__ void scale_rows(const float (&factor)[2], float (&s)[Config::kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) s[i] *= factor[i / 2 % 2];
}

__device__ __forceinline__ void rescale_o(const float (&rescale)[2], float (&o)[Config::kChannels / 2]) {
#pragma unroll
  for (int i = 0; i < Config::kChannels / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

}  // namespace attune::prefill
