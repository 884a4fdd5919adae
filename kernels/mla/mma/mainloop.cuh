// SPDX-License-Identifier: Apache-2.0
// The steps of one key tile: S = Q K^T, the online softmax, O += P V. A warp has S of its group's rows over a slice of
// the channels, the softmax of eight rows, and O of the group's rows and some channels.
#pragma once

#include "mla/mma/config.cuh"
#include "mla/row_max.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// In the GEMMs a thread has rows g and g + 8 of a row tile, g = lane / 4, and keys or channels 2 t and 2 t + 1 of
// eight, t = lane % 4. In the softmax it has row g of the warp's eight, and the same keys.
class MmaMainloop {
 public:
  static constexpr int kM = MmaConfig::kRowTiles, kChannelTiles = MmaConfig::kChannelsOfWarp / 8;
  float o[kM][kChannelTiles][4];  // relative to row_max_ref
  // For the row of the softmax: row_max is in units of S; row_sum is of the thread's keys, relative to row_max_ref.
  float row_max, row_max_ref, row_sum;

  // warp: the warp's number, which the compiler knows to be uniform.
  __device__ __forceinline__ MmaMainloop(const WorkTileParams& p, MmaStorage& shared, int warp)
      : p_(p), shared_(shared), warp_(warp) {
    shuffle_lane();
  }
  // Makes the lane opaque before the epilogue.
  __device__ __forceinline__ void shuffle_lane() { lane_ = static_cast<int>(mma_thread() % 32); }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < kChannelTiles; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[m][c][j] = 0;
      }
    }
    load_queries();
    const WorkTile& t = shared_.work;
    row_max = row_max_ref = -ptx::infinity(), row_sum = shared_.check.first_sum;
    first_ = end_ = 0;
    if (ProblemConfig::kSparse || !has_row()) return;
    const MmaRow r(p_, shared_, row());
    if (r.exists) {
      first_ = scheduler::first_visible(p_, r.position(t));
      end_ = scheduler::end_visible(p_, t.num_keys, r.position(t));
    }
    if constexpr (kRangeInShared) {
      if (lane_ % 4 == 0) shared_.first_visible[row()] = first_, shared_.end_visible[row()] = end_;
      __syncwarp();
    }
  }

  __device__ __forceinline__ int lane() const { return lane_; }
  // The group; whether the thread has a row in the softmax, and which; the rows and the first channel of O.
  __device__ __forceinline__ int group() const { return warp_ / MmaConfig::kGroupWarps; }
  __device__ __forceinline__ bool has_row() const { return warp_of_group() < 2 * kM; }
  __device__ __forceinline__ int row() const { return first_row() + 8 * warp_of_group() + lane_ / 4; }
  __device__ __forceinline__ int row_of_out(int m, int h) const { return first_row() + 16 * m + 8 * h + lane_ / 4; }
  __device__ __forceinline__ int first_channel() const { return warp_of_group() * MmaConfig::kChannelsOfWarp; }

  // Partial sums of S over the warp's slice, for the warps that have the rows in the softmax.
  __device__ __forceinline__ void qk_gemm(unsigned tile) {
    constexpr int kPairs = MmaConfig::kKeyTiles / 2;
    using Layout = MmaConfig::Layout;
    float sums[kM][MmaConfig::kKeyTiles][4] = {};
    const unsigned keys = tile + key_part() * (8 * MmaConfig::kKeyTiles * Layout::kPitch);
    const unsigned k = (kPairs > 0 ? common::on_then_down<Layout>(keys) : keys + Layout::offset(lane_ % 8, lane_ / 8)) +
                       256 * slice(),
                   rope = k + 2 * ProblemConfig::kHeadDimV - 224 * slice();
    const unsigned q = MmaConfig::kQSharedBlocks == 0
                           ? 0
                           : common::down_then_on<typename MmaConfig::LayoutQ>(
                                 ptx::shared_address(shared_.q) + first_row() * MmaConfig::LayoutQ::kPitch) +
                                 slice() * (32 * MmaConfig::kQSharedBlocks);
    unsigned last[4];
#pragma unroll
    for (int b = 0; b < MmaConfig::kBlocks; ++b) {
      unsigned a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (b >= MmaConfig::kQSharedBlocks) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[m][j] = q_[m][b - MmaConfig::kQSharedBlocks][j];
        } else {
          using LayoutQ = MmaConfig::LayoutQ;
          ptx::load_matrix_x4(a[m], LayoutQ::chunks_on(LayoutQ::rows_down(q, 16 * m), 2 * b));
        }
      }
      const auto multiply = [&](int n, unsigned lo, unsigned hi) {
        const unsigned two[2] = {lo, hi};
#pragma unroll
        for (int m = 0; m < kM; ++m) common::mma<ProblemConfig::kType>(sums[m][n], a[m], two);
      };
      if constexpr (kPairs > 0) {
        const unsigned at = b < 8 ? Layout::chunks_on(k, 2 * b) : rope;
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          unsigned x[4];
          ptx::load_matrix_x4(x, at + n * (16 * Layout::kPitch));
          multiply(2 * n, x[0], x[1]), multiply(2 * n + 1, x[2], x[3]);
        }
      } else if (b == 8) {
        unsigned x[2];
        ptx::load_matrix_x2(x, rope);
        multiply(0, x[0], x[1]);
      } else {
        if (b % 2 == 0) ptx::load_matrix_x4(last, Layout::chunks_on(k, 2 * b));
        multiply(0, last[b % 2 * 2], last[b % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto sum = [&](int n, int e) { return sums[m][n][2 * h + e]; };
        float2* const to = &shared_.sums[group()][slice()][2 * m + h][key_part() * MmaConfig::kKeyTiles][0];
        if constexpr (kPairs > 0) {
#pragma unroll
          for (int n = 0; n < kPairs; ++n)
            reinterpret_cast<float4*>(to + 64 * n)[lane_] =
                make_float4(sum(2 * n, 0), sum(2 * n, 1), sum(2 * n + 1, 0), sum(2 * n + 1, 1));
        } else {
          to[lane_] = make_float2(sum(0, 0), sum(0, 1));
        }
      }
    }
  }

  // P of the warp's rows, and their rescale factors, for the group. Returns whether a factor is not 1. start: the
  // tile's first key.
  __device__ __forceinline__ bool softmax(int i, int start) {
    if (!has_row()) return false;
    constexpr int kKeyTiles = MmaConfig::kKeys / 8;
    float s[kKeyTiles][2] = {};
#pragma unroll
    for (int slice = 0; slice < MmaConfig::kSlices; ++slice) {
      const float2* const from = &shared_.sums[group()][slice][warp_of_group()][0][0];
      if constexpr (MmaConfig::kKeyTiles % 2 == 0) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
          const float4 x = reinterpret_cast<const float4*>(from + 32 * n)[lane_];
          s[n][0] += x.x, s[n][1] += x.y, s[n + 1][0] += x.z, s[n + 1][1] += x.w;
        }
      } else {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const float2 x = from[32 * n + lane_];
          s[n][0] += x.x, s[n][1] += x.y;
        }
      }
    }
    float tile_max = -ptx::infinity();
    const int first = kRangeInShared ? shared_.first_visible[row()] : first_,
              behind = kRangeInShared ? shared_.end_visible[row()] : end_;
    const unsigned flags = ptx::shared_address(shared_.key_exists[i % MmaConfig::kFlags]) + lane_ % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const unsigned there = ptx::load_shared_u16(flags + 8 * n);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = start + 8 * n + lane_ % 4 * 2 + e;
        bool seen = (there >> (8 * e) & 1) != 0;
        if (!ProblemConfig::kSparse) seen = seen && first <= key && key < behind;
        if (!seen) s[n][e] = -ptx::infinity();
        tile_max = fmaxf(tile_max, s[n][e]);
      }
    }
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
    const float c = p_.scale * kLog2e, rescale = update_row_max(tile_max, c, row_max, row_max_ref);
    if (lane_ % 4 == 0) shared_.factor[row()] = rescale;
    row_sum *= rescale;
    const float ref = finite_row_max(row_max_ref) * c - MmaConfig::kOffset;
    const unsigned to = ptx::shared_address(shared_.p) + lane_ % 4 * 4;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float x = ptx::exp2_approx(fmaf(s[n][0], c, -ref)), y = ptx::exp2_approx(fmaf(s[n][1], c, -ref));
      row_sum += x + y;
      ptx::store_shared_u32(to + MmaConfig::LayoutP::offset(row(), n), common::pack<ProblemConfig::kType>(x, y));
    }
    return rescale != 1.0f;
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = shared_.factor[row_of_out(m, h)];
#pragma unroll
        for (int c = 0; c < kChannelTiles; ++c) o[m][c][2 * h] *= factor, o[m][c][2 * h + 1] *= factor;
      }
    }
  }

  // overlap(step): other work of the warp, called in kSteps steps.
  static constexpr int kSteps = MmaConfig::kKeys / 16 * kChannelTiles / 2;
  template <class Overlap>
  __device__ __forceinline__ void pv_gemm(unsigned tile, Overlap overlap) {
    using Layout = MmaConfig::Layout;
    using LayoutP = MmaConfig::LayoutP;
    const unsigned v = common::down_then_on<Layout>(tile) + 2 * first_channel(),
                   p = common::down_then_on<LayoutP>(ptx::shared_address(shared_.p) + first_row() * LayoutP::kPitch);
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
        overlap((keys * kChannelTiles + c) / 2);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          common::mma<ProblemConfig::kType>(o[m][c], a[m], b0);
          common::mma<ProblemConfig::kType>(o[m][c + 1], a[m], b1);
        }
      }
    }
  }

 private:
  // Loads the warp's fragments, and the group's queries that stay in shared memory.
  __device__ __forceinline__ void load_queries() {
    const WorkTile& t = shared_.work;
    if constexpr (MmaConfig::kQSharedBlocks > 0) {
      constexpr int kLanes = MmaConfig::kConsumerThreads / MmaConfig::kRows, kChunks = 2 * MmaConfig::kQSharedBlocks;
      constexpr int kSlices = MmaConfig::kSlices;
      const int row = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
      const MmaRow r(p_, shared_, row);
      const QueryRow from = r.query(p_, t);
      const unsigned to = ptx::shared_address(shared_.q);
#pragma unroll 2
      for (int c = lane / kSlices; c < kChunks; c += kLanes / kSlices) {
        const int slice = lane % kSlices, channel = mma_channel_of(slice, c / 2) + c % 2 * 8;
        ptx::copy_async<16>(to + MmaConfig::LayoutQ::offset(row, slice * kChunks + c),
                            r.exists ? from.at(channel) : p_.q, r.exists ? 16 : 0);
      }
      ptx::commit_copies();
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const MmaRow r(p_, shared_, row_of_out(m, h));
        const QueryRow from = r.query(p_, t);
#pragma unroll
        for (int b = 0; b < MmaConfig::kQRegisterBlocks; ++b) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int channel = mma_channel_of(slice(), MmaConfig::kQSharedBlocks + b) + 8 * j;
            q_[m][b][h + 2 * j] =
                r.exists ? *reinterpret_cast<const unsigned*>(from.at(channel) + lane_ % 4 * 4) : 0;
          }
        }
      }
    }
    if constexpr (MmaConfig::kQSharedBlocks > 0) ptx::wait_copies<0>();
    if constexpr (MmaConfig::kQSharedBlocks > 0 && MmaConfig::kHasProducerWarps) MmaBarriers::sync_consumers();
  }

  __device__ __forceinline__ int warp_of_group() const { return warp_ % MmaConfig::kGroupWarps; }
  __device__ __forceinline__ int first_row() const { return group() * MmaConfig::kGroupRows; }
  __device__ __forceinline__ int slice() const { return warp_ % MmaConfig::kSlices; }
  __device__ __forceinline__ int key_part() const { return warp_of_group() / MmaConfig::kSlices; }

  static constexpr bool kRangeInShared = MmaConfig::kRows > 16 && !ProblemConfig::kSparse;

  const WorkTileParams& p_;
  MmaStorage& shared_;
  const int warp_;
  int lane_;
  int first_, end_;  // the keys that the row sees; unused with lists
  unsigned q_[kM][MmaConfig::kQRegisterBlocks][4];
};

}  // namespace attune::mla
