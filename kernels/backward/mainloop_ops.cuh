// SPDX-License-Identifier: Apache-2.0
// Helpers of the mainloop of the gradient kernel: the rows of a thread, the release of stages, and how dq is passed to
// the dq writers.
#pragma once

#include "backward/gemms.cuh"
#include "backward/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/matrix.cuh"

namespace attune::backward {

// Registers only for what the launch computes.
struct Accumulators {
  float dqk[Config::kChannelsQk / 2];  // dk or dq, without the scale
  float dv[Config::kChannelsV / 2];
};

// The consumer warpgroup of this thread, 0 or 1.
__device__ __forceinline__ int consumer_warpgroup() {
  return __shfl_sync(0xffffffffu, (static_cast<int>(threadIdx.x) - 128) / 128, 0);
}
// The row, within its warpgroup, that this thread has in registers 0 and 1 of an accumulator; the row of registers 2
// and 3 is 8 further.
__device__ __forceinline__ int row_of_thread() {
  return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Whether descriptors of operands are recomputed in each step, because no registers are left to keep them.
constexpr bool kRematerialize = kAlibi || kTables || kKeyMasks || kSoftcap || (kSinkShares && Config::kTile == 32) ||
                                Config::kGradients == kernels::kGradientDk;
// A warpgroup's resident rows of qk or vdo.
class ResidentOperand {
 public:
  __device__ __forceinline__ explicit ResidentOperand(unsigned rows) : rows_(rows), descriptor_(of(rows)) {}
  __device__ __forceinline__ ptx::Descriptor descriptor() const { return kRematerialize ? of(rows_) : descriptor_; }

 private:
  __device__ __forceinline__ static ptx::Descriptor of(unsigned rows) {
    unsigned at[1] = {rows};
    if constexpr (kRematerialize) ptx::fence_operand(at);
    return ptx::uniform(ptx::descriptor_k_major(at[0]));
  }

  const unsigned rows_;
  const ptx::Descriptor descriptor_;
};
constexpr bool kOneVdo = Config::kVdoStages == 1;

// Stores packed scores, [64 keys of four warps][4 kCount queries], transposed, to rows of 128 bytes, one for each
// query.
template <int kCount>
__device__ __forceinline__ void store_scores_transposed(unsigned to, const unsigned (&x)[kCount]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;  // of eight keys
  const unsigned at = to + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16;
#pragma unroll
  for (int m = 0; m < kCount / 4; ++m) {
    const unsigned r[4] = {x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3]};
    ptx::store_matrix_x4_transposed(at + m * (16 * 128), r);
  }
}

// Stores dq of a tile to shared memory.
__device__ __forceinline__ void store_dq_tile(unsigned to, int group, const float (&x)[Config::kDqRegisters]) {
  using Tile = Config::DqTile;
  // Addresses differ from one base address, which has byte_of()'s swizzle of the row, by an XOR and a sum of constants.
  // That takes fewer registers than separate addresses, except with a softcap alone.
  constexpr bool kByXor = !kSoftcap || kSinkShares || kAlibi;
  const int row = row_of_thread();
  to += (kByXor ? Tile::byte_of(group, row, 0) : 0) + static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int j = 0; j < Config::kDqRegisters; j += 2) {
    const int n8 = j / 4, next_row = j / 2 % 2 * 8;
    const unsigned at = kByXor ? (to ^ n8 % 4 * 32) + n8 / 4 * 128 + next_row * (Tile::kChannels * 4)
                               : to + Tile::byte_of(group, row + next_row, n8);
    ptx::store_shared_two(at, __float_as_uint(x[j]), __float_as_uint(x[j + 1]));
  }
}

// The same for a transposed tile, as multiply_transposed() computes it.
__device__ __forceinline__ void store_transposed_dq(unsigned to, int group, const float (&x)[Config::kDqRegisters]) {
  using Tile = Config::DqTile;
  constexpr int kLines = Config::kLinesQk / 2, kN8Tiles = Tile::kQueries / 8, kLine = 64 * Tile::kQueries * 4;
  to += Tile::byte_of(row_of_thread(), 0) + static_cast<int>(threadIdx.x) % 4 * 8;
  // In a whole line of channels of the warpgroup; and in the odd line, of which it has half of the queries.
  const unsigned whole = to + group * kLine, odd = (to ^ group * (kN8Tiles / 2 * 32)) + 2 * kLines * kLine;
#pragma unroll
  for (int j = 0; j < Config::kDqRegisters; j += 2) {
    const int n8 = j / 4 % kN8Tiles, next_row = j / 2 % 2 * (8 * Tile::kQueries * 4);
    const unsigned at = (j / 4 < kLines * kN8Tiles ? whole : odd) ^ n8 * 32;  // as above
    ptx::store_shared_two(at + next_row, __float_as_uint(x[j]), __float_as_uint(x[j + 1]));
  }
}

// Passes dq of step i to the dq writers.
__device__ __forceinline__ void publish_dq(const Smem& smem, int group, int i, const float (&x)[Config::kDqRegisters]) {
  const int buffer = i % Config::kDqBuffers;
  if (i >= Config::kDqBuffers) ptx::named_barrier_sync(dq_empty_barrier(buffer, group), kDqEmptyThreads);
  if constexpr (Config::DqTile::kTransposed) {
    store_transposed_dq(smem.dq(buffer), group, x);
  } else {
    store_dq_tile(smem.dq(buffer), group, x);
  }
  ptx::fence_async_proxy();
  ptx::named_barrier_arrive(kDqFullBarrier + i % Config::kWriters, kDqFullThreads);
}

__device__ __forceinline__ void sync_consumers() {
  ptx::named_barrier_sync(kConsumerBarrier, 32 * Config::kConsumerWarps);
}

// Zeroes rows from `first` on, in a tile of lines of kRows rows. After a sequence's last row TMA copies rows of other
// sequences: 0 times a NaN of theirs would be NaN, and the bits of a sequence would depend on its neighbours.
template <int kLines, int kRows>
__device__ __forceinline__ void clear_rows(unsigned tile, int first) {
  const int chunks = (kRows - first) * 8;
  for (int i = static_cast<int>(threadIdx.x) - 128; i < kLines * chunks; i += 32 * Config::kConsumerWarps)
    ptx::store_shared_zero(tile + (i / chunks * kRows + first) * 128 + i % chunks * 16);
}
// For the block's keys, all of which enter dq. Called when they have arrived.
__device__ __forceinline__ void zero_keys_past_end(const Smem& smem, const WorkTile& work) {
  const int count = work.s.num_keys - work.begin;
  if (count >= kBackwardRows) return;
  clear_rows<Config::kLinesQk, kBackwardRows>(smem.resident_qk(), count);
  ptx::fence_async_proxy();
  sync_consumers();
}
// Whether the sequence ends in the tile that begins at `row`.
__device__ __forceinline__ bool ends_in_tile(const WorkTile& work, int row) {
  return (Config::kOfQueries ? work.s.num_keys : work.s.num_q) - row < Config::kTile;
}
// For those operands of such a tile that enter a gradient. Called when they have arrived.
__device__ __forceinline__ void zero_tile_past_end(const Smem& smem, const WorkTile& work, int row, int qk_stage,
                                                   int vdo_stage) {
  const int count = (Config::kOfQueries ? work.s.num_keys : work.s.num_q) - row;
  if constexpr (Config::kWithDqk) clear_rows<Config::kLinesQk, Config::kTile>(smem.qk(qk_stage), count);
  if constexpr (Config::kWithDv) clear_rows<Config::kLinesV, Config::kTile>(smem.vdo(vdo_stage), count);
  ptx::fence_async_proxy();
  sync_consumers();
}

// Called by all consumer warps, after they have read a stage.
__device__ __forceinline__ void release(unsigned empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::arrive(empty);
}

}  // namespace attune::backward
