// SPDX-License-Identifier: Apache-2.0
// The GEMMs of gradients_mma.cu by mma.m16n8k8 of TF32. An fp32 number is the sum of two TF32 numbers, high and low,
// and a product takes three: low * high, high * low, high * high. The terms that are left out, low * low and the last
// bit of low, are below 2^-22 of the product.
//
// The tensor cores round their sums towards zero after every 8 terms. So the small products have separate sums, and
// sums of large products are added up in fp32, to nearest, after 32 terms.
//
// Lane l = 4 g + t has rows g and g + 8, columns 2t and 2t + 1 of a sum [16, 8]. Terms and columns may come in any
// order that both operands share, so a lane loads 16 bytes of shared memory at a time.
#pragma once

#include "backward/mma/config.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

namespace attune::backward::mma {

constexpr int kN8Tiles = Config::kN8Tiles;
using Scores = float[kN8Tiles][4];  // resident rows times rows of a step: [N = 8][row g + 8 h, column 2t + e: 2h + e]
template <int kLines>
using Sums = float[kLines][4][4];  // resident rows times channels: [line][i][2h + e]: channel 8t + 4e + i of the line

// A fragment of kCount numbers.
template <int kCount>
struct Fragment {
  unsigned high[kCount], low[kCount];
};
template <int kCount>
__device__ __forceinline__ void split(const unsigned (&x)[kCount], Fragment<kCount>& to) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    to.high[i] = x[i] + 0x1000u & 0xffffe000u;  // to nearest; if x is NaN, low is NaN whatever high is
    to.low[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(to.high[i]));
  }
}
// 16-bit numbers need no second part, and P and dS get none in their GEMMs: rounded to TF32, they have fp16's bits and
// fp32's range.
template <bool kRounds, int kCount>
__device__ __forceinline__ void take(const unsigned (&x)[kCount], Fragment<kCount>& to) {
  if constexpr (Config::kIsFp32) {
    split(x, to);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.high[i] = kRounds ? ptx::round_to_tf32(__uint_as_float(x[i])) : x[i];
  }
}

// Four sums [16, 8], of large products and of small ones.
struct FourSums {
  float high[4][4], low[4][4];

  __device__ __forceinline__ FourSums() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) high[i][j] = low[i][j] = 0;
    }
  }
  __device__ __forceinline__ void add(int i, const Fragment<4>& a, const Fragment<2>& b) {
    if constexpr (Config::kIsFp32) {
      ptx::mma_tf32(low[i], a.low, b.high);
      ptx::mma_tf32(low[i], a.high, b.low);
    }
    ptx::mma_tf32(high[i], a.high, b.high);
  }
  __device__ __forceinline__ void add_to(int i, float (&to)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] += Config::kIsFp32 ? low[i][j] + high[i][j] : high[i][j];
  }
};

// This lane's first chunk of 16 bytes for GEMMs along the channels: row g, chunk t.
template <class Rows>
__device__ __forceinline__ unsigned along_channels(unsigned rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return rows + Rows::offset(lane / 4, lane % 4);
}
// The same for GEMMs along the rows: row 2t + e, chunk g.
template <class Rows>
__device__ __forceinline__ unsigned along_rows(unsigned rows, int e) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return rows + Rows::offset(lane % 4 * 2 + e, lane / 4);
}

// to = resident rows times rows of a step. resident: the warp's rows.
template <int kLines>
__device__ __forceinline__ void multiply(unsigned resident, unsigned tile, Scores& to) {
  using Rows = Layout<kLines>;
  const unsigned a_lane = along_channels<Rows>(resident), b_lane = along_channels<Rows>(tile);
#pragma unroll
  for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[n][j] = 0;
  }
#pragma unroll 1
  for (int line = 0; line < kLines; ++line) {
    FourSums sums;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const unsigned step = line * 128, other_half = half * 64;
      unsigned top[4], bottom[4];
      ptx::load_shared_four((a_lane ^ other_half) + step, top);
      ptx::load_shared_four((a_lane ^ other_half) + step + 8 * Rows::kPitch, bottom);
      Fragment<4> a[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const unsigned x[4] = {top[2 * k], bottom[2 * k], top[2 * k + 1], bottom[2 * k + 1]};
        take<false>(x, a[k]);
      }
#pragma unroll
      for (int n = 0; n < kN8Tiles; ++n) {
        unsigned y[4];
        ptx::load_shared_four((b_lane ^ other_half) + step + 8 * n * Rows::kPitch, y);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const unsigned x[2] = {y[2 * k], y[2 * k + 1]};
          Fragment<2> b;
          take<false>(x, b);
          sums.add(n, a[k], b);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kN8Tiles; ++n) sums.add_to(n, to[n]);
  }
}

// to += P or dS times the rows of a step. never: a number >= 0, which the compiler does not know. The do-while around
// each addition runs once and is a scheduling fence: the compiler moves nothing across it. Otherwise the sums of all
// lines would stay in registers until the last one.
template <int kLines>
__device__ __forceinline__ void accumulate(const Scores& left, unsigned tile, int never, Sums<kLines>& to) {
  using Rows = Layout<kLines>;
  const unsigned even = along_rows<Rows>(tile, 0), odd = along_rows<Rows>(tile, 1);
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
    FourSums sums;
#pragma unroll
    for (int n = 0; n < kN8Tiles; ++n) {
      // A column of sums becomes a term: columns 2t and 2t + 1 become terms t and t + 4.
      const unsigned x[4] = {__float_as_uint(left[n][0]), __float_as_uint(left[n][2]), __float_as_uint(left[n][1]),
                             __float_as_uint(left[n][3])};
      Fragment<4> a;
      take<true>(x, a);
      unsigned y[2][4];
      ptx::load_shared_four(even + line * 128 + 8 * n * Rows::kPitch, y[0]);
      ptx::load_shared_four(odd + line * 128 + 8 * n * Rows::kPitch, y[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned z[2] = {y[0][i], y[1][i]};
        Fragment<2> b;
        take<false>(z, b);
        sums.add(i, a, b);
      }
    }
    do {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.add_to(i, to[line][i]);
    } while (never == -1 - line);
  }
}

}  // namespace attune::backward::mma
