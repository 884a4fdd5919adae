// SPDX-License-Identifier: Apache-2.0
// The end of a pair in a cluster. Every block merges its warps, as merge.cuh does, and sends each row to the block that
// combines it: row r to rank r % size, which is how many parts it waits for.
//
//   (m, l) of the warps | barrier | o, weighed, of the warps | barrier | sums over the warps -> owner | the owner's
//   mbarrier: all bytes are there | rows: combine_row
//
// Stores that count themselves at the owner's barrier need no fence, whose release over a cluster would wait for all
// that the threads have ever written, and nobody reads another block's memory, so blocks may end when they have sent.
// All of it lies over the stages: every block of the cluster is past its last key then.
#pragma once

#include "decode/combine.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"

namespace attune::decode {

class ClusterMerge {
 public:
  __device__ __forceinline__ ClusterMerge(SharedStorage& shared, int rank, int size)
      : exchange_(overlay(shared).exchange),
        parts_(overlay(shared).parts),
        received_(ptx::shared_address(&shared.received)),
        rank_(rank),
        size_(size),
        shift_(__ffs(size) - 1) {
    static_assert(sizeof(Overlay) <= sizeof(SharedStorage::stages), "all of it fits over the stages");
  }

  // By thread 0, at the beginning.
  __device__ __forceinline__ void start() const {
    ptx::init_barrier(received_, 1);
    ptx::publish_barriers();
  }
  // This thread is done with its keys, and with what else lies in the stages.
  __device__ __forceinline__ void arrive(int num_rows) const {
    if (threadIdx.x == 0) ptx::arrive_expecting(received_, my_rows(num_rows) * size_ * kRowBytes);
    __syncwarp();
    ptx::arrive_at_cluster();
  }

  // Merges the block's warps and sends the rows.
  __device__ __forceinline__ void send(const DecodeParams& p, const Piece& piece, const State& state,
                                       SharedStorage& shared) const {
    const MergeStats stats(shared);
    share_stats(state, stats);
    __syncthreads();
    float weight[Config::kRowTiles][2];
    weigh(p, piece, stats, weight);
#pragma unroll
    for (int block = 0; block < Config::kBlocksV; block += kPassBlocks) {
      if (block != 0) __syncthreads();
      share_channels(state, weight, block);
      __syncthreads();
      if (block == 0) ptx::wait_for_cluster();
      send_channels(piece, stats, block * 16);
    }
  }

  // Rows of this block, from all parts.
  __device__ __forceinline__ void combine(const DecodeParams& p, const Piece& piece) const {
    if (my_rows(piece.num_rows) == 0) return;
    ptx::wait_phase(received_, 0);
    for (int i = threadIdx.x / 32; i < my_rows(piece.num_rows); i += Config::kWarps)
      combine_row(p, piece, 0, Parts{parts_, size_, i}, rank_ + (i << shift_));
  }

 private:
  // Channels that are exchanged at a time: all, or as many as elsewhere where stages are small.
  static constexpr int kAllBlocks = Config::kBlocksV, kFewBlocks = Config::kMergeChannels / 16;
  static constexpr int kPartRow = Config::kHeadDimV + 4;  // channels, max, sum; aligned to 16 bytes
  static constexpr int kPartFloats = Config::kRows * kPartRow, kRowBytes = (Config::kHeadDimV + 2) * 4;
  static constexpr bool kAtOnce =
      4 * (Config::kWarps * Config::kRows * (16 * kAllBlocks + 4) + kPartFloats) <=
      static_cast<int>(sizeof(SharedStorage::stages));
  static constexpr int kPassBlocks = kAtOnce || kFewBlocks > kAllBlocks ? kAllBlocks : kFewBlocks;
  static constexpr int kPitch = 16 * kPassBlocks + 4, kExchangeFloats = Config::kWarps * Config::kRows * kPitch;

  // What lies over the stages.
  struct Overlay {
    float exchange[kExchangeFloats];
    float parts[kPartFloats];
  };
  __device__ __forceinline__ static Overlay& overlay(SharedStorage& shared) {
    return *reinterpret_cast<Overlay*>(shared.stages);
  }

  // [slot of this block's rows][rank] of kPartRow.
  struct Parts {
    static constexpr bool kMany = false;
    const float* parts;
    int count, slot;
    __device__ __forceinline__ const float* row(int i) const { return parts + (slot * count + i) * kPartRow; }
    __device__ __forceinline__ float2 stats(int i, int) const {
      return *reinterpret_cast<const float2*>(row(i) + Config::kHeadDimV);
    }
    __device__ __forceinline__ float4 out(int i, int, int channel) const {
      return *reinterpret_cast<const float4*>(row(i) + channel);
    }
  };

  __device__ __forceinline__ int my_rows(int num_rows) const { return (num_rows - rank_ + size_ - 1) >> shift_; }

  // What this warp's o is multiplied with, by row.
  __device__ __forceinline__ static void weigh(const DecodeParams& p, const Piece& piece, const MergeStats& stats,
                                               float (&weight)[Config::kRowTiles][2]) {
    const float factor = value_scale(p, piece.head);
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + threadIdx.x % 4 * 2 + e, mine = threadIdx.x / 32 * Config::kRows + row;
        weight[n][e] = factor * stats.weight_of(mine, reference_of(stats.max_of_row(row)));
      }
    }
  }

  __device__ __forceinline__ void share_channels(const State& state, const float (&weight)[Config::kRowTiles][2],
                                                 int first_block) const {
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
                    tile::channel_of_row<Config::kKvType>(local, g, j / 2)] = state.o[i][n][j] * weight[n][j % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void send_channels(const Piece& piece, const MergeStats& stats, int first_channel) const {
    constexpr int kGroups = 4 * kPassBlocks;  // of four channels, a row
#pragma unroll 1
    for (int i = threadIdx.x; i < Config::kRows * kGroups; i += Config::kThreads) {
      const int row = i / kGroups, local = i % kGroups * 4, channel = first_channel + local;
      if (row >= piece.num_rows || channel >= Config::kHeadDimV) continue;
      const float4 sum = sum_over_warps(exchange_, kPitch, row, local);
      const int owner = row & (size_ - 1), slot = row >> shift_;
      const unsigned barrier = ptx::shared_in_block(received_, owner);
      const unsigned to =
          ptx::shared_in_block(ptx::shared_address(parts_ + ((slot << shift_) + rank_) * kPartRow), owner);
      ptx::store_async_four(to + channel * 4, sum, barrier);
      if (channel == 0) send_stats(stats, row, to + Config::kHeadDimV * 4, barrier);
    }
  }
  __device__ __forceinline__ static void send_stats(const MergeStats& stats, int row, unsigned to, unsigned barrier) {
    const float max = stats.max_of_row(row), sum = stats.sum_of_row(row, reference_of(max));
    ptx::store_async(to, __float_as_uint(max), barrier);
    ptx::store_async(to + 4, __float_as_uint(sum), barrier);
  }

  float* const exchange_;  // [kWarps][kRows] of kPitch
  float* const parts_;
  const unsigned received_;  // shared address: counts the bytes of parts_
  const int rank_, size_, shift_;
};

}  // namespace attune::decode
