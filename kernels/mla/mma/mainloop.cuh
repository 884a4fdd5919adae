// SPDX-License-Identifier: Apache-2.0
// One key tile: S = Q K^T, the online softmax, O += P V. A warp has S of a row tile and some keys, and O of all rows
// and an eighth of the channels.
#pragma once

#include "mla/mma/config.cuh"
#include "mla/row_max.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// A thread has rows g and g + 8 of a row tile, g = lane / 4, and keys or channels 2 t and 2 t + 1 of eight, t = lane
// % 4.
class MmaMainloop {
 public:
  static constexpr int kM = MmaConfig::kRowTiles, kChannelTiles = MmaConfig::kChannelsOfWarp / 8;
  float o[kM][kChannelTiles][4];  // relative to row_max_ref
  // Of the warp's row tile, if it has one. row_max in units of S; row_sum of the thread's keys, relative to
  // row_max_ref.
  float row_max[2], row_max_ref[2], row_sum[2];

  __device__ __forceinline__ MmaMainloop(const WorkTileParams& p, MmaStorage& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelTiles; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[m][c][j] = 0;
      }
    }
    const WorkTile& t = shared_.work;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max[h] = row_max_ref[h] = -ptx::infinity(), row_sum[h] = shared_.check.first_sum;
      first_[h] = end_[h] = 0;
      if (ProblemConfig::kSparse || !has_scores()) continue;
      const MmaRow r(p_, shared_, row(h));
      if (!r.exists) continue;
      first_[h] = scheduler::first_visible(p_, r.position(t));
      end_[h] = scheduler::end_visible(p_, t.num_keys, r.position(t));
    }
  }

  // Whether the warp has a part of S; the row of the M block, of S.
  __device__ __forceinline__ static bool has_scores() { return warp() < kM * MmaConfig::kKeyWarps; }
  __device__ __forceinline__ static int key_warp() { return warp() / kM; }
  __device__ __forceinline__ static int row(int h) { return warp() % kM * 16 + lane() / 4 + 8 * h; }

  // S of the tile, and its row max, for the other warps. start: the tile's first key.
  __device__ __forceinline__ void qk_gemm(unsigned tile, int stage, int start) {
    if (!has_scores()) return;
    float sums[2][MmaConfig::kKeyTiles][4] = {};
    multiply(tile, sums);
    if constexpr (MmaConfig::kPair == 2) exchange_halves(sums);
    float largest[2] = {-ptx::infinity(), -ptx::infinity()};
#pragma unroll
    for (int n = 0; n < MmaConfig::kKeyTiles; ++n) {
      const int key = first_key() + 8 * n + lane() % 4 * 2;  // of the tile
      const unsigned there = ptx::load_shared_u16(ptx::shared_address(shared_.is_there[stage]) + key);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = j % 2, h = j / 2;
        bool seen = (there >> (8 * e) & 1) != 0;
        if (!ProblemConfig::kSparse) seen = seen && first_[h] <= start + key + e && start + key + e < end_[h];
        s_[n][j] = seen ? sums[0][n][j] + sums[1][n][j] : -ptx::infinity();
        largest[h] = fmaxf(largest[h], s_[n][j]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
      if (lane() % 4 == 0) shared_.of_warps[key_warp()][row(h)] = largest[h];
    }
  }

  // P of the warp's keys, and the rescale factors of its rows, for the other warps. Whether one is not 1.
  __device__ __forceinline__ bool softmax() {
    if (!has_scores()) return false;
    const float c = p_.scale * kLog2e;
    const unsigned to = ptx::shared_address(shared_.p);
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = -ptx::infinity();
#pragma unroll
      for (int w = 0; w < MmaConfig::kKeyWarps; ++w) tile_max = fmaxf(tile_max, shared_.of_warps[w][row(h)]);
      const float rescale = update_row_max(tile_max, c, row_max[h], row_max_ref[h]);
      if (key_warp() == 0 && lane() % 4 == 0) shared_.factor[row(h)] = rescale;
      moves = moves || rescale != 1.0f;
      row_sum[h] *= rescale;
      const float ref = finite_row_max(row_max_ref[h]) * c - MmaConfig::kOffset;
#pragma unroll
      for (int n = 0; n < MmaConfig::kKeyTiles; ++n) {
        const float x = ptx::exp2_approx(fmaf(s_[n][2 * h], c, -ref)),
                    y = ptx::exp2_approx(fmaf(s_[n][2 * h + 1], c, -ref));
        row_sum[h] += x + y;
        ptx::store_shared_u32(to + MmaConfig::LayoutP::offset(row(h), first_key() / 8 + n) + lane() % 4 * 4,
                              common::pack<ProblemConfig::kType>(x, y));
      }
    }
    return moves;
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = shared_.factor[16 * m + lane() / 4 + 8 * h];
#pragma unroll
        for (int c = 0; c < kChannelTiles; ++c) o[m][c][2 * h] *= factor, o[m][c][2 * h + 1] *= factor;
      }
    }
  }

  __device__ __forceinline__ void pv_gemm(unsigned tile) {
    using Layout = MmaConfig::Layout;
    using LayoutP = MmaConfig::LayoutP;
    const unsigned v = common::down_then_on<Layout>(tile) + warp() * (2 * MmaConfig::kChannelsOfWarp),
                   p = common::down_then_on<LayoutP>(ptx::shared_address(shared_.p));
#pragma unroll
    for (int keys = 0; keys < MmaConfig::kKeys / 16; ++keys) {
      unsigned a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m)
        ptx::load_matrix_x4(a[m], LayoutP::chunks_on(LayoutP::rows_down(p, 16 * m), 2 * keys));
#pragma unroll
      for (int c = 0; c < kChannelTiles; c += 2) {
        unsigned b[4];
        ptx::load_matrix_x4_transposed(b, Layout::chunks_on(Layout::rows_down(v, 16 * keys), c));
        const unsigned b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          common::mma<ProblemConfig::kType>(o[m][c], a[m], b0);
          common::mma<ProblemConfig::kType>(o[m][c + 1], a[m], b1);
        }
      }
    }
  }

 private:
  // Q K^T as two sums: over every other block of channels, as an mma waits for the one before. In a pair of warps: of
  // both row tiles, over the warp's half of the channels.
  __device__ __forceinline__ void multiply(unsigned tile, float (&sums)[2][MmaConfig::kKeyTiles][4]) const {
    using Layout = MmaConfig::Layout;
    constexpr int kPair = MmaConfig::kPair, kBlocks = ProblemConfig::kHeadDimQk / 16 / kPair;
    const int half = warp() % kPair;
    const unsigned q = common::down_then_on<Layout>(ptx::shared_address(shared_.q) +
                                            (warp() % kM - half) * 16 * Layout::kPitch + half * kBlocks * 32),
                   k = tile + Layout::offset(lane() % 8, lane() / 8) + first_key() * Layout::kPitch +
                       half * kBlocks * 32;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      unsigned a[kPair][2][4];
#pragma unroll
      for (int m = 0; m < kPair; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
          ptx::load_matrix_x4(a[m][j], Layout::chunks_on(Layout::rows_down(q, 16 * m), 2 * (block + j)));
      }
#pragma unroll
      for (int n = 0; n < MmaConfig::kKeyTiles; ++n) {
        unsigned b[4];
        ptx::load_matrix_x4(b, Layout::chunks_on(Layout::rows_down(k, 8 * n), 2 * block));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned two[2] = {b[2 * j], b[2 * j + 1]};
#pragma unroll
          for (int m = 0; m < kPair; ++m)
            common::mma<ProblemConfig::kType>(sums[kPair == 2 ? m : j][n], a[m][j], two);
        }
      }
    }
  }
  // Gives the other warp of the pair the sum of its row tile, and takes that of the own one.
  __device__ __forceinline__ void exchange_halves(float (&sums)[2][MmaConfig::kKeyTiles][4]) const {
    const int own = warp() % 2;
    float4(&to)[MmaConfig::kKeyTiles][32] = shared_.halves[warp()];
    const float4(&from)[MmaConfig::kKeyTiles][32] = shared_.halves[warp() ^ 1];
#pragma unroll
    for (int n = 0; n < MmaConfig::kKeyTiles; ++n) {
      float given[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) given[j] = own == 0 ? sums[1][n][j] : sums[0][n][j];
      to[n][lane()] = make_float4(given[0], given[1], given[2], given[3]);
    }
    ptx::named_barrier_sync(1 + warp() / 2, 64);
#pragma unroll
    for (int n = 0; n < MmaConfig::kKeyTiles; ++n) {
      const float4 x = from[n][lane()];
      const float taken[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (own == 1) sums[0][n][j] = sums[1][n][j];
        sums[1][n][j] = taken[j];
      }
    }
  }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int first_key() { return key_warp() * (8 * MmaConfig::kKeyTiles); }

  const WorkTileParams& p_;
  MmaStorage& shared_;
  int first_[2], end_[2];  // keys that the rows see; not of lists
  float s_[MmaConfig::kKeyTiles][4];
};

}  // namespace attune::mla
