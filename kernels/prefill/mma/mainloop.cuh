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
using QFragments = unsigned[Config::kQInRegisters ? Config::kBlocksQk : 1][4];
__device__ __forceinline__ void load_q_fragments(unsigned q, QFragments& q_regs) {
  using Layout = Config::LayoutK;
  const unsigned lane_q = down_then_on<Layout>(q + threadIdx.x / 32 * (16 * kM * Layout::kPitch));
#pragma unroll
  for (int block = 0; block < Config::kBlocksQk; ++block)
    ptx::load_matrix_x4(q_regs[block], Layout::chunks_on(lane_q, 2 * block));
}

// GEMMs call overlap(i) between mma instructions, i below kQkOverlapSteps or kPvOverlapSteps. By default it does
// nothing.
constexpr int kQkOverlapSteps = Config::kBlocksQk * (kKeyTiles8 / 2),
              kPvOverlapSteps = Config::kKeys / 16 * Config::kBlocksV;
struct NoOp {
  __device__ __forceinline__ void operator()(int) const {}
};

template <class Overlap = NoOp>
__device__ __forceinline__ void qk_gemm(unsigned q, const QFragments& q_regs, unsigned k, Scores& s,
                                        const Overlap& overlap = {}) {
  using Layout = Config::LayoutK;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = 0;
    }
  }
  // Only this address stays in a register over the mainloop; those of blocks of channels are steps from it.
  const unsigned warp_q = q + threadIdx.x / 32 * (16 * kM * Layout::kPitch);
  const unsigned lane_q = down_then_on<Layout>(warp_q), lane_k = on_then_down<Layout>(k);
#pragma unroll
  for (int block = 0; block < Config::kBlocksQk; ++block) {
    unsigned a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[m][j] = q_regs[block][j];
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
      overlap(block * (kKeyTiles8 / 2) + n / 2);
    }
  }
}

// The scales of the columns of S that a thread has, two for each eight keys.
// scales: a shared address.
__device__ __forceinline__ void load_columns(unsigned scales, float2 (&columns)[kKeyTiles8]) {
#pragma unroll
  for (int n = 0; n < kKeyTiles8; ++n) columns[n] = ptx::load_shared_pair(scales + 32 * n + threadIdx.x % 4 * 8);
}
__device__ __forceinline__ void scale_columns(unsigned scales, Scores& s) {
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
// rare after the first tiles. v_scales: the shared address of the token scales of the tile's values, if there are any.
// codes: V has type kCodeTypeV.
using PFragments = unsigned[Config::kPParts][kM][Config::kKeys / 16][4];
__device__ __forceinline__ void softmax(float scale, float threshold, Scores& s, PFragments& p_regs, State& state,
                                        unsigned v_scales = 0, bool codes = false) {
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
        unsigned& p = p_regs[0][m][n / 2][n % 2 * 2 + h];
        if (Config::kPParts == 1 || !codes) {
          p = common::pack<Config::kType>(x, y);
        } else {
          unsigned parts[2];
          common::split_pair(x, y, parts);
          p = parts[0], p_regs[Config::kPParts - 1][m][n / 2][n % 2 * 2 + h] = parts[1];
        }
      }
    }
  }
}

// O += P V. kType: of V and P; kParts: parts of P; kByChannels: V has a row for each channel (xpacked.cuh).
template <int kType, int kParts, bool kByChannels, class Overlap = NoOp>
__device__ __forceinline__ void pv_gemm(unsigned v, const PFragments& p_regs, State& state,
                                        const Overlap& overlap = {}) {
  using Layout = Config::LayoutV;
  using LayoutVt = Config::LayoutVt;
  const unsigned lane_v = kByChannels ? on_then_down<LayoutVt>(v) : down_then_on<Layout>(v);
#pragma unroll
  for (int keys = 0; keys < Config::kKeys / 16; ++keys) {
#pragma unroll
    for (int block = 0; block < Config::kBlocksV; ++block) {
      unsigned b[4];
      if constexpr (kByChannels) {
        ptx::load_matrix_x4(b, LayoutVt::chunks_on(LayoutVt::rows_down(lane_v, 16 * block), 2 * keys));
      } else {
        ptx::load_matrix_x4_transposed(b, Layout::chunks_on(Layout::rows_down(lane_v, 16 * keys), 2 * block));
      }
      const unsigned b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          common::mma<kType>(state.o[m][2 * block], p_regs[part][m][keys], b0);
          common::mma<kType>(state.o[m][2 * block + 1], p_regs[part][m][keys], b1);
        }
      }
      overlap(keys * Config::kBlocksV + block);
    }
  }
}

// Returns true if one of two 16-bit numbers is not finite.
template <int kType>
constexpr unsigned kExponent = kType == common::kFloat16 ? 0x7c00u : 0x7f80u;
template <int kType>
__device__ __forceinline__ bool is_nonfinite(unsigned pair) {
  return (pair & kExponent<kType>) == kExponent<kType> || (pair >> 16 & kExponent<kType>) == kExponent<kType>;
}
template <int kType>
__device__ __forceinline__ unsigned without_nonfinite(unsigned pair) {
  if ((pair & kExponent<kType>) == kExponent<kType>) pair &= 0xffff0000u;
  if ((pair >> 16 & kExponent<kType>) == kExponent<kType>) pair &= 0xffffu;
  return pair;
}

// Where a key's value is if V has a row for each channel (xpacked.cuh).
__device__ __forceinline__ unsigned address_by_channels(unsigned v, int key, int channel) {
  return v + Config::LayoutVt::offset(channel, key / 8) + key % 8 * 2;
}
// The values of a key in channels 2c and 2c + 1.
template <bool kByChannels>
__device__ __forceinline__ unsigned load_pair(unsigned v, int key, int c) {
  if constexpr (kByChannels) {
    const unsigned second = ptx::load_shared_u16(address_by_channels(v, key, 2 * c + 1));
    return ptx::load_shared_u16(address_by_channels(v, key, 2 * c)) | second << 16;
  } else {
    return ptx::load_shared_u32(v + Config::LayoutV::offset(key, c / 4) + c % 4 * 4);
  }
}
// Those of eight channels.
template <bool kByChannels>
__device__ __forceinline__ void load_value(unsigned v, int key, int chunk, unsigned (&x)[4]) {
  if constexpr (kByChannels) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load_pair<kByChannels>(v, key, 4 * chunk + i);
  } else {
    ptx::load_shared_four(v + Config::LayoutV::offset(key, chunk), x);
  }
}
template <bool kByChannels>
__device__ __forceinline__ void store_value(unsigned v, int key, int chunk, const unsigned (&x)[4]) {
  if constexpr (kByChannels) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::store_shared_u16(address_by_channels(v, key, 8 * chunk + i),
                            static_cast<unsigned short>(x[i / 2] >> i % 2 * 16));
  } else {
    ptx::store_shared_four(v + Config::LayoutV::offset(key, chunk), x);
  }
}

// If some rows do not see some keys, a NaN or infinity in these keys' values would be multiplied by P = 0. Adds such
// numbers to the rows that see them, and replaces them by 0 in V. Called by all threads of the block. kType: of V.
// v_scales: the shared address of the token scales of the tile's values, if there are any.
template <int kType, bool kByChannels>
__device__ __forceinline__ void extract_nonfinite_v(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                                    const Rows& rows, const ValidKeys& valid_keys, unsigned v,
                                                    SharedStorage& shared, State& state, unsigned v_scales = 0) {
  constexpr int kChunks = kernels::mma_chunks(Config::kHeadDimV), kParts = Config::kThreads / Config::kKeys,
                kChunksOfPart = (kChunks + kParts - 1) / kParts;
  // Opaque: recomputed here, because this is rarely needed.
  const int thread = static_cast<int>(ptx::opaque(threadIdx.x)), row = thread % Config::kKeys,
            part = thread / Config::kKeys;
  const int end = kChunks % kParts == 0 ? (part + 1) * kChunksOfPart : min((part + 1) * kChunksOfPart, kChunks);
  bool any = false;
  for (int chunk = part * kChunksOfPart; chunk < end; ++chunk) {
    unsigned x[4];
    load_value<kByChannels>(v, row, chunk, x);
    any =
        any || is_nonfinite<kType>(x[0]) || is_nonfinite<kType>(x[1]) || is_nonfinite<kType>(x[2]) ||
        is_nonfinite<kType>(x[3]);
  }
  const unsigned word = __ballot_sync(0xffffffffu, any);
  if (thread % 32 == 0) shared.nonfinite[part][row / 32] = word;
  if (__syncthreads_or(any ? 1 : 0) == 0) return;
  const int pair = static_cast<int>(threadIdx.x % 4);  // of this thread's channels within eight
#pragma unroll 1
  for (int i = 0; i < Config::kKeys; ++i) {
    const int key = tile.start + i;
    const unsigned there = i < 32 ? valid_keys[0] : valid_keys[1];  // not an array, which would be in local memory
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < kParts; ++j) bits |= shared.nonfinite[j][i / 32];
    bits &= there;
    if ((bits >> i % 32 & 1) == 0) continue;
#pragma unroll
    for (int c = 0; c < 2 * Config::kBlocksV; ++c) {
      const unsigned x = load_pair<kByChannels>(v, i, 4 * c + pair);
      if (!is_nonfinite<kType>(x)) continue;
      const unsigned finite = without_nonfinite<kType>(x);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!rows.sees(p, t, t.token_begin + Rows::row(m, h), key)) continue;
          const float by = Config::kTokenScales ? ptx::load_shared(v_scales + 4 * i) : 1.0f;
          if ((x ^ finite) & 0xffffu) state.o[m][c][2 * h] += by * common::low_half<kType>(x);
          if ((x ^ finite) >> 16) state.o[m][c][2 * h + 1] += by * common::high_half<kType>(x);
        }
      }
    }
  }
  __syncthreads();
  for (int chunk = part * kChunksOfPart; chunk < end; ++chunk) {
    unsigned x[4];
    load_value<kByChannels>(v, row, chunk, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = without_nonfinite<kType>(x[i]);
    store_value<kByChannels>(v, row, chunk, x);
  }
  __syncthreads();
}

}  // namespace attune::prefill_mma
