// SPDX-License-Identifier: Apache-2.0
// The epilogue in a cluster, whose blocks have the splits of one output tile. Each block merges its warps as in
// epilogue.cuh and sends each row through DSMEM to the block that combines it: row r to rank r % size.
//
//   row stats of the warps | barrier | rescaled O of the warps | barrier | sums over the warps -> DSMEM of the rank |
//   that rank: mbarrier, all bytes received | combine_row
//
// st.async counts its bytes at the receiver's mbarrier, so no fence is needed. No block reads another's memory, so each
// may exit once it has sent its rows. All buffers overlay the stages, which no block needs once all have read their
// last key: the cluster barrier orders those reads before the sends.
#pragma once

#include "decode/combine.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"

namespace attune::decode {

class ClusterEpilogue {
 public:
  __device__ __forceinline__ ClusterEpilogue(SharedStorage& shared, int rank, int size)
      : exchange_(overlay(shared).exchange),
        partials_(overlay(shared).partials),
        received_(ptx::shared_address(&shared.received)),
        rank_(rank),
        size_(size),
        shift_(__ffs(size) - 1) {
    static_assert(sizeof(Overlay) <= sizeof(SharedStorage::stages), "the buffers fit over the stages");
  }

  // Called by thread 0 at the start of the kernel.
  __device__ __forceinline__ void start() const {
    ptx::init_barrier(received_, 1);
    ptx::publish_barriers();
  }
  // Cluster arrive: this thread has read the stages for the last time.
  __device__ __forceinline__ void arrive(int num_rows) const {
    if (threadIdx.x == 0) ptx::arrive_expecting(received_, my_rows(num_rows) * size_ * kRowBytes);
    __syncwarp();
    ptx::arrive_at_cluster();
  }

  // Merges the block's warps and sends the partial rows to the blocks that combine them.
  __device__ __forceinline__ void send(const AttentionParams& p, const Split& split, const AttentionState& state,
                                       SharedStorage& shared) const {
    const WarpStats stats(shared);
    store_warp_stats(state, stats);
    __syncthreads();
    float o_rescale[Config::kRowTiles][2];
    warp_rescale(p, split, stats, o_rescale);
#pragma unroll
    for (int block = 0; block < Config::kBlocksV; block += kPassBlocks) {
      if (block != 0) __syncthreads();
      store_warp_o(state, o_rescale, block);
      __syncthreads();
      if (block == 0) ptx::wait_for_cluster();
      send_o(split, stats, block * 16);
    }
  }

  // Receives and combines the rows of this rank.
  __device__ __forceinline__ void combine(const AttentionParams& p, const Split& split) const {
    if (my_rows(split.num_rows) == 0) return;
    ptx::wait_phase(received_, 0);
    for (int i = threadIdx.x / 32; i < my_rows(split.num_rows); i += Config::kWarps)
      combine_row(p, split, 0, ClusterPartials{partials_, size_, i}, rank_ + (i << shift_));
  }

 private:
  // Channels that are exchanged at a time: all if the stages have room, otherwise as many as in epilogue.cuh.
  static constexpr int kAllBlocks = Config::kBlocksV, kExchangeBlocks = Config::kMergeChannels / 16;
  static constexpr int kPartialRow = Config::kHeadDimV + 4;  // channels, row_max, row_sum; aligned to 16 bytes
  static constexpr int kPartialFloats = Config::kRows * kPartialRow, kRowBytes = (Config::kHeadDimV + 2) * 4;
  static constexpr bool kAtOnce = 4 * (Config::kWarps * Config::kRows * (16 * kAllBlocks + 4) + kPartialFloats) <=
                                  static_cast<int>(sizeof(SharedStorage::stages));
  static constexpr int kPassBlocks = kAtOnce || kExchangeBlocks > kAllBlocks ? kAllBlocks : kExchangeBlocks;
  static constexpr int kPitch = 16 * kPassBlocks + 4, kExchangeFloats = Config::kWarps * Config::kRows * kPitch;

  // The buffers that overlay the stages.
  struct Overlay {
    float exchange[kExchangeFloats];
    float partials[kPartialFloats];
  };
  __device__ __forceinline__ static Overlay& overlay(SharedStorage& shared) {
    return *reinterpret_cast<Overlay*>(shared.stages);
  }

  // [slot of this block's rows][rank] of kPartialRow floats.
  struct ClusterPartials {
    static constexpr bool kMany = false;
    const float* partials;
    int count, slot;
    __device__ __forceinline__ const float* row(int i) const { return partials + (slot * count + i) * kPartialRow; }
    __device__ __forceinline__ float2 stats(int i, int) const {
      return *reinterpret_cast<const float2*>(row(i) + Config::kHeadDimV);
    }
    __device__ __forceinline__ float4 out(int i, int, int channel) const {
      return *reinterpret_cast<const float4*>(row(i) + channel);
    }
  };

  __device__ __forceinline__ int my_rows(int num_rows) const { return (num_rows - rank_ + size_ - 1) >> shift_; }

  // The rescale factor of this warp's O for each row.
  __device__ __forceinline__ static void warp_rescale(const AttentionParams& p, const Split& split,
                                                      const WarpStats& stats,
                                                      float (&o_rescale)[Config::kRowTiles][2]) {
    const float factor = epilogue_v_scale(p, split.head);
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + threadIdx.x % 4 * 2 + e, mine = threadIdx.x / 32 * Config::kRows + row;
        o_rescale[n][e] = factor * stats.rescale_of_warp(mine, finite_row_max(stats.block_max(row)));
      }
    }
  }

  __device__ __forceinline__ void store_warp_o(const AttentionState& state,
                                               const float (&o_rescale)[Config::kRowTiles][2], int first_block) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < Config::kBlocksV; ++i) {
      const int local = i - first_block;
      if (local < 0 || local >= kPassBlocks) continue;
#pragma unroll
      for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          exchange_[(warp * Config::kRows + 8 * n + 2 * t + j % 2) * kPitch +
                    common::channel_of_row<Config::kKvType>(local, g, j / 2)] = state.o[i][n][j] * o_rescale[n][j % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void send_o(const Split& split, const WarpStats& stats, int first_channel) const {
    constexpr int kGroups = 4 * kPassBlocks;  // groups of four channels in a row
#pragma unroll 1
    for (int i = threadIdx.x; i < Config::kRows * kGroups; i += Config::kThreads) {
      const int row = i / kGroups, local = i % kGroups * 4, channel = first_channel + local;
      if (row >= split.num_rows || channel >= Config::kHeadDimV) continue;
      const float4 sum = sum_over_warps(exchange_, kPitch, row, local);
      const int owner = row & (size_ - 1), slot = row >> shift_;
      const unsigned barrier = ptx::shared_in_block(received_, owner);
      const unsigned to =
          ptx::shared_in_block(ptx::shared_address(partials_ + ((slot << shift_) + rank_) * kPartialRow), owner);
      ptx::store_async_four(to + channel * 4, sum, barrier);
      if (channel == 0) send_stats(stats, row, to + Config::kHeadDimV * 4, barrier);
    }
  }
  __device__ __forceinline__ static void send_stats(const WarpStats& stats, int row, unsigned to, unsigned barrier) {
    const float row_max = stats.block_max(row), row_sum = stats.block_sum(row, finite_row_max(row_max));
    ptx::store_async(to, __float_as_uint(row_max), barrier);
    ptx::store_async(to + 4, __float_as_uint(row_sum), barrier);
  }

  float* const exchange_;  // [kWarps][kRows] of kPitch
  float* const partials_;
  const unsigned received_;  // the shared address of the mbarrier that counts the bytes of partials_
  const int rank_, size_, shift_;
};

}  // namespace attune::decode
