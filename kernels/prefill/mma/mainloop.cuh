// SPDX-License-Identifier: Apache-2.0
// The steps of the mainloop for one key tile: S = Q K^T, softmax, O += P V. A warp has kRowTiles x 16 rows and all keys
// of the tile. The loop over tiles is in prefill_mma.cu.
#pragma once

#include "prefill/mma/shared_storage.cuh"
#include "prefill/mma/softmax.cuh"
#include "ptx/matrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill_mma {

using common::down_then_on, common::on_then_down;

// Fragments of Q that stay in registers over the mainloop.
using HeldQueries = unsigned[Config::kHoldsQ ? Config::kBlocksQk : 1][4];
__device__ __forceinline__ void hold_queries(unsigned q, HeldQueries& held) {
  using Layout = Config::LayoutK;
  const unsigned lane_q = down_then_on<Layout>(q + threadIdx.x / 32 * (16 * kM * Layout::kPitch));
#pragma unroll
  for (int block = 0; block < Config::kBlocksQk; ++block)
    ptx::load_matrix_x4(held[block], Layout::chunks_on(lane_q, 2 * block));
}

// GEMMs call overlap(i) between mma instructions, i below kQkPlaces or kPvPlaces. By default it does nothing.
constexpr int kQkPlaces = Config::kBlocksQk * (kKeyTiles8 / 2), kPvPlaces = Config::kKeys / 16 * Config::kBlocksV;
struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

template <class Beside = Nothing>
__device__ __forceinline__ void multiply_qk(unsigned q, const HeldQueries& held, unsigned k, Scores& s,
                                            const Beside& beside = {}) {
  using Layout = Config::LayoutK;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = 0;
    }
  }
  // Opaque: otherwise the address of each block of channels stays in a register over the whole mainloop.
  const unsigned warp_q = q + threadIdx.x / 32 * (16 * kM * Layout::kPitch);
  const unsigned lane_q = down_then_on<Layout>(warp_q), lane_k = on_then_down<Layout>(k);
#pragma unroll
  for (int block = 0; block < Config::kBlocksQk; ++block) {
    unsigned a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (Config::kHoldsQ) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[m][j] = held[block][j];
      } else {
        ptx::load_matrix_x4(a[m], Layout::chunks_on(Layout::rows_down(lane_q, 16 * m), 2 * block));
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles8; n += 2) {
      unsigned b[4];
      ptx::load_matrix_x4(b, Layout::chunks_on(Layout::rows_down(lane_k, 8 * n), 2 * block));
      const unsigned b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        common::mma<Config::kType>(s[m][n], a[m], b0);
        common::mma<Config::kType>(s[m][n + 1], a[m], b1);
      }
      beside(block * (kKeyTiles8 / 2) + n / 2);
    }
  }
}

// The scales of the columns of S that a thread has, two for each eight keys.
__device__ __forceinline__ void load_columns(const float* scales, float2 (&columns)[kKeyTiles8]) {
#pragma unroll
  for (int n = 0; n < kKeyTiles8; ++n)
    columns[n] = *reinterpret_cast<const float2*>(scales + 8 * n + threadIdx.x % 4 * 2);
}
__device__ __forceinline__ void scale_columns(const float* scales, Scores& s) {
  float2 columns[kKeyTiles8];
  load_columns(scales, columns);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) s[m][n][2 * h] *= columns[n].x, s[m][n][2 * h + 1] *= columns[n].y;
    }
  }
}

// Replaces scores by P, rounded, as the A operands of P V: [part][row tile][16 keys]. scale: turns s into scores in
// base 2; it is positive. threshold: how far a max may be above row_max_ref before O and row_sum are rescaled, which is
// rare after the first tiles. v_scales: token scales of the tile's values, if there are any. codes: V has type
// kCodeTypeV.
using Weights = unsigned[Config::kPParts][kM][Config::kKeys / 16][4];
__device__ __forceinline__ void softmax(float scale, float threshold, Scores& s, Weights& weights, State& state,
                                        const float* v_scales = nullptr, bool codes = false) {
  float2 columns[kKeyTiles8];
  if constexpr (Config::kTokenScales) load_columns(v_scales, columns);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float row_max[2];
    bool raises = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max[h] = scale * max_of_row(s[m], h);
      raises |= row_max[h] - state.row_max_ref[m][h] > threshold;
    }
    if (__any_sync(0xffffffffu, raises)) raise_row_max_ref(m, row_max, threshold, state);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float ref = finite_row_max(state.row_max_ref[m][h]) - Config::kMaxOffset;
#pragma unroll
      for (int n = 0; n < kKeyTiles8; ++n) {
        float x = ptx::exp2_approx(fmaf(s[m][n][2 * h], scale, -ref)),
              y = ptx::exp2_approx(fmaf(s[m][n][2 * h + 1], scale, -ref));
        state.row_sum[m][h] += x + y;
        if constexpr (Config::kTokenScales) x *= columns[n].x, y *= columns[n].y;
        unsigned& p = weights[0][m][n / 2][n % 2 * 2 + h];
        if (Config::kPParts == 1 || !codes) {
          p = common::pack<Config::kType>(x, y);
        } else {
          unsigned parts[2];
          common::split_pair(x, y, parts);
          p = parts[0], weights[Config::kPParts - 1][m][n / 2][n % 2 * 2 + h] = parts[1];
        }
      }
    }
  }
}

// O += P V. kType: of V and P; kParts: parts of P.
template <int kType, int kParts, class Beside = Nothing>
__device__ __forceinline__ void multiply_pv(unsigned v, const Weights& weights, State& state,
                                            const Beside& beside = {}) {
  using Layout = Config::LayoutV;
  const unsigned lane_v = down_then_on<Layout>(v);
#pragma unroll
  for (int keys = 0; keys < Config::kKeys / 16; ++keys) {
#pragma unroll
    for (int block = 0; block < Config::kBlocksV; ++block) {
      unsigned b[4];
      ptx::load_matrix_x4_transposed(b, Layout::chunks_on(Layout::rows_down(lane_v, 16 * keys), 2 * block));
      const unsigned b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          common::mma<kType>(state.o[m][2 * block], weights[part][m][keys], b0);
          common::mma<kType>(state.o[m][2 * block + 1], weights[part][m][keys], b1);
        }
      }
      beside(keys * Config::kBlocksV + block);
    }
  }
}

// Returns true if one of two 16-bit numbers is not finite.
template <int kType>
constexpr unsigned kExponent = kType == common::kFloat16 ? 0x7c00u : 0x7f80u;
template <int kType>
__device__ __forceinline__ bool is_special(unsigned pair) {
  return (pair & kExponent<kType>) == kExponent<kType> || (pair >> 16 & kExponent<kType>) == kExponent<kType>;
}
template <int kType>
__device__ __forceinline__ unsigned without_special(unsigned pair) {
  if ((pair & kExponent<kType>) == kExponent<kType>) pair &= 0xffff0000u;
  if ((pair >> 16 & kExponent<kType>) == kExponent<kType>) pair &= 0xffffu;
  return pair;
}

// If some rows do not see some keys, a NaN or infinity in these keys' values would be multiplied by P = 0. Adds such
// numbers to the rows that see them, and replaces them by 0 in V. Called by all threads of the block. kType: of V.
// v_scales: token scales of the tile's values, if there are any.
template <int kType>
__device__ __forceinline__ void take_special_values(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                                    const Rows& rows, const Found& found, unsigned v,
                                                    SharedStorage& shared, State& state,
                                                    const float* v_scales = nullptr) {
  using Layout = Config::LayoutV;
  constexpr int kChunks = kernels::mma_chunks(Config::kHeadDimV), kParts = Config::kThreads / Config::kKeys,
                kChunksOfPart = (kChunks + kParts - 1) / kParts;
  // Opaque: recomputed here, because this is rarely needed.
  const int thread = static_cast<int>(ptx::kept(threadIdx.x)), row = thread % Config::kKeys,
            part = thread / Config::kKeys;
  const int end = kChunks % kParts == 0 ? (part + 1) * kChunksOfPart : min((part + 1) * kChunksOfPart, kChunks);
  bool any = false;
  for (int chunk = part * kChunksOfPart; chunk < end; ++chunk) {
    unsigned x[4];
    ptx::load_shared_four(v + Layout::offset(row, chunk), x);
    any =
        any || is_special<kType>(x[0]) || is_special<kType>(x[1]) || is_special<kType>(x[2]) || is_special<kType>(x[3]);
  }
  const unsigned word = __ballot_sync(0xffffffffu, any);
  if (thread % 32 == 0) shared.special[part][row / 32] = word;
  if (__syncthreads_or(any ? 1 : 0) == 0) return;
  const int pair = static_cast<int>(threadIdx.x % 4) * 4;  // the byte offset of this thread's channels within eight
#pragma unroll 1
  for (int i = 0; i < Config::kKeys; ++i) {
    const int key = tile.start + i;
    const unsigned there = i < 32 ? found[0] : found[1];  // not an array, which would be in local memory
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < kParts; ++j) bits |= shared.special[j][i / 32];
    bits &= there;
    if ((bits >> i % 32 & 1) == 0) continue;
#pragma unroll
    for (int c = 0; c < 2 * Config::kBlocksV; ++c) {
      const unsigned x = ptx::load_shared_u32(v + Layout::offset(i, c) + pair);
      if (!is_special<kType>(x)) continue;
      const unsigned finite = without_special<kType>(x);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!rows.sees(p, t, t.token_begin + Rows::row(m, h), key)) continue;
          const float by = Config::kTokenScales ? v_scales[i] : 1.0f;
          if ((x ^ finite) & 0xffffu) state.o[m][c][2 * h] += by * common::low_half<kType>(x);
          if ((x ^ finite) >> 16) state.o[m][c][2 * h + 1] += by * common::high_half<kType>(x);
        }
      }
    }
  }
  __syncthreads();
  for (int chunk = part * kChunksOfPart; chunk < end; ++chunk) {
    unsigned x[4];
    const unsigned at = v + Layout::offset(row, chunk);
    ptx::load_shared_four(at, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = without_special<kType>(x[i]);
    ptx::store_shared_four(at, x);
  }
  __syncthreads();
}

}  // namespace attune::prefill_mma
