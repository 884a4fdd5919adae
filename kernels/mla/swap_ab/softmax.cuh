// SPDX-License-Identifier: Apache-2.0
// The swap-AB softmax warps: they compute S, and P for the PV warps (mla/swap_ab/pv.cuh).
//
//   S = Q K^T;  P = 2^(c (S - r)), c = scale log2 e, r = row_max_ref;  O = O 2^(c (r - r')) + P V
//
// The two warpgroups take every other tile each. A warp has 16 keys and all rows. A lane keeps the stats of one row:
// row_max and row_max_ref, which fold in all tiles in order and are the same in all warps.
#pragma once

#include "mla/producers/kv_source.cuh"
#include "mla/row_max.cuh"
#include "mla/swap_ab/gemms.cuh"

namespace attune::mla {

// Computes S of a new token's row and all rows of queries, spread over all consumer warps.
__device__ __forceinline__ void qk_new_token(const WorkTileParams& p, const SwapAbSmem& smem, const WorkTile& work,
                                             int head_tile, const char* row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int own = consumer_warp(); own < SwapAbConfig::kBlockM; own += SwapAbConfig::kConsumerWarps) {
    const float s = dot_new_token(query_row(p, work, head_tile, own), row, lane);
    if (lane == 0) ptx::store_shared_u32(smem.token(own), __float_as_uint(s));
  }
  sync_swap_ab_consumers();
}
// New tokens, one at a time: there is rarely more than one. take(row): called by all consumer warps.
template <class Take>
__device__ __forceinline__ void for_each_new_token(const WorkTileParams& p, const SwapAbSmem& smem,
                                                   const WorkTile& work, int head_tile, const Take& take) {
  const KeyTiles key_tiles(work.num_cached, work.first_key, work.end_key);
#pragma unroll 1
  for (int i = max(work.tile_begin, key_tiles.num_cached_tiles); i < work.tile_end; ++i) {
    const Tile tile = tile_at(work, key_tiles, i);
    const KvSource source(p, work, head_tile * p.heads_of_tile / p.group, tile);
#pragma unroll 1
    for (int key = tile.low; key < tile.high; ++key) {
      const char* const row = source.locate(key, source.load_index(key));
      qk_new_token(p, smem, work, head_tile, row);
      take(row);
    }
  }
}

class SwapAbSoftmax {
 public:
  __device__ __forceinline__ SwapAbSoftmax(const WorkTileParams& p, const SwapAbSmem& smem)
      : p_(p), smem_(smem), qk_(smem) {}

  // Runs all tiles of a work tile.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile) {
    qk_.load_q(p_, work, head_tile);
    row_max_ = row_max_ref_ = -ptx::infinity();
    row_sum_ = smem_.first_sum();
    // The shuffle tells the compiler that the values are uniform, so that it uses uniform registers.
    const unsigned end = __shfl_sync(0xffffffffu, count_ + max(cached_tile_end(work) - work.tile_begin, 0), 0);
    num_folded_ = count_ = __shfl_sync(0xffffffffu, count_, 0);
#pragma unroll 1
    for (count_ += (count_ ^ swap_ab_warpgroup()) & 1; static_cast<int>(count_ - end) < 0; count_ += 2) softmax_tile();
#pragma unroll 1
    while (num_folded_ != end) fold_next_row_max();
    count_ = end;
    if constexpr (Config::kDense) {
      // New tokens count in the row sum of the warpgroup that had the first tile, so that the order of sums does not
      // depend on previous work tiles.
      const unsigned begin = end - max(cached_tile_end(work) - work.tile_begin, 0);
      const int counting_warp = static_cast<int>(begin % 2) * (SwapAbConfig::kSoftmaxWarps / 2);
      for_each_new_token(p_, smem_, work, head_tile,
                         [&](const char*) { add_new_token(consumer_warp() == counting_warp); });
    }
  }

  // Publishes the row stats to the PV warps, which read them after the next sync of all consumer warps. racecheck
  // reports this with read_row_stats(): it does not model syncs by different instructions in different roles.
  __device__ __forceinline__ void publish_row_stats() {
    ptx::store_shared_u32(smem_.row_sums(own_row()) + 4 * consumer_warp(), __float_as_uint(row_sum_));
    if (consumer_warp() == 0)
      ptx::store_shared_two(smem_.row_max(own_row()), __float_as_uint(row_max_), __float_as_uint(row_max_ref_));
  }

 private:
  static constexpr int kRowsOfLane = SwapAbConfig::kBlockM / 4;  // rows 8 j + 2 t + e; two keys' scores for each

  __device__ __forceinline__ static int lane() { return recomputed_lane(); }
  // The factor from S to scores in base 2.
  __device__ __forceinline__ float c() const { return p_.scale * kLog2e; }
  // The row whose stats the lane owns. Its index 2 j + e is in the upper bits of the lane's number.
  __device__ __forceinline__ int own_row() const {
    const int own = lane(), i = own / (32 / kRowsOfLane);
    return i / 2 * 8 + own % 4 * 2 + i % 2;
  }
  // Shuffles the stats of row i = 2 j + e of this lane's rows from the lane that owns the row. first: first_lane(),
  // which owns row 0 of them and is recomputed rather than kept in a register.
  __device__ __forceinline__ int first_lane() const { return lane() % 4; }
  __device__ __forceinline__ static float of_row(float x, int first, int i) {
    return __shfl_sync(0xffffffffu, x, first + i * (32 / kRowsOfLane));
  }
  // Reduces each row over its lanes to the lane that owns the row. At each step two lanes exchange halves of their
  // rows: each keeps one half and merges the other lane's values of it.
  template <class Merge>
  __device__ __forceinline__ float reduce_own_row(const float (&x)[kRowsOfLane], const Merge& merge) const {
    float rows[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) rows[i] = x[i];
    int step = 16;
#pragma unroll
    for (int left = kRowsOfLane / 2; left > 0; left /= 2) {
      const bool upper = (lane() & step) != 0;
#pragma unroll
      for (int i = 0; i < left; ++i)
        rows[i] = merge(upper ? rows[left + i] : rows[i],
                        __shfl_xor_sync(0xffffffffu, upper ? rows[i] : rows[left + i], step));
      step /= 2;
    }
#pragma unroll
    for (; step > 2; step /= 2) rows[0] = merge(rows[0], __shfl_xor_sync(0xffffffffu, rows[0], step));
    return rows[0];
  }

  // Computes S of a tile, publishes its row max to all warps, and computes P of the warp's keys.
  __device__ __forceinline__ void softmax_tile() {
    const int stage = static_cast<int>(count_ % SwapAbConfig::kStages);
    ptx::wait_phase(smem_.full(stage), count_ / SwapAbConfig::kStages % 2);
    const unsigned masked = ptx::load_shared_u16(smem_.mask(stage) + 2 * swap_ab_warp()) >> lane() / 4;
    qk_.begin();
    qk_.gemm(stage, s_);
    float tile_max[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < 2 * kRowsOfLane; ++i) {
      if ((masked >> (i / 2 % 2 * 8) & 1) != 0) s_[i] = -ptx::infinity();
    }
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) tile_max[i] = fmaxf(s_[i / 2 * 4 + i % 2], s_[i / 2 * 4 + 2 + i % 2]);
    const float row_max = reduce_own_row(tile_max, [](float x, float y) { return fmaxf(x, y); });
    // racecheck reports this with fold_next_row_max(): it does not model a lane that arrives for its warp.
    ptx::store_shared_u32(smem_.tile_row_max(stage, own_row()) + 4 * swap_ab_warp(), __float_as_uint(row_max));
    __syncwarp();
    if (lane() == 0) ptx::arrive(smem_.row_max_full(stage));
    if (num_folded_ != count_) fold_next_row_max();
    softmax(stage, fold_next_row_max());
  }
  // Folds in the next tile's row max, which may come from the other warpgroup; returns the rescale factor.
  __device__ __forceinline__ float fold_next_row_max() {
    const int stage = static_cast<int>(num_folded_ % SwapAbConfig::kStages);
    ptx::wait_phase(smem_.row_max_full(stage), num_folded_ / SwapAbConfig::kStages % 2);
    unsigned row_maxes[4];
    ptx::load_shared_four(smem_.tile_row_max(stage, own_row()), row_maxes);
    const float rescale = fold_row_max(fmaxf(fmaxf(__uint_as_float(row_maxes[0]), __uint_as_float(row_maxes[1])),
                                             fmaxf(__uint_as_float(row_maxes[2]), __uint_as_float(row_maxes[3]))));
    row_sum_ *= rescale;
    ++num_folded_;
    return rescale;
  }
  // Writes P of a tile for the PV warps. rescale: O's factor before this tile is added.
  __device__ __forceinline__ void softmax(int stage, float rescale) {
    const ScaleUnits units(smem_.units(stage));
    const unsigned flags = __shfl_sync(0xffffffffu, units.flags(), 0);  // warp-uniform
    const bool any_rescale = __any_sync(0xffffffffu, rescale != 1.0f);
    const float scale = c(), own_from = finite_row_max(row_max_ref_);
    const int first = first_lane();
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const float from = of_row(own_from, first, i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s_[i / 2 * 4 + 2 * h + i % 2];
        x = ptx::exp2_approx((x - from) * scale);  // at most 2^8, however large the scores are
      }
    }
    SwapAbQkGemm::PRegs p_regs;
    qk_.scale_p<ptx::Type::kF16>(stage, units, s_, p_regs);
    if (flags != 0) [[unlikely]]
      scale_p_to_units(stage, units, p_regs);
    // Waits until the other warpgroup's P has been published and consumed.
    ptx::wait_phase(smem_.p_full(), count_ % 2 ^ 1);
    ptx::wait_phase(smem_.p_empty(), count_ % 2 ^ 1);
    qk_.store_p(p_regs);
    // racecheck reports these with SwapAbPv::wait_p() and rescale_o(), for the same reason.
    if (swap_ab_warp() == 0) {
      if (lane() == 0) ptx::store_shared_u32(smem_.any_rescale(), any_rescale ? 1 : 0);
      if (any_rescale) ptx::store_shared_u32(smem_.rescale(own_row()), __float_as_uint(rescale));
    }
    ptx::fence_async_proxy();
    arrive_p_full();
    float sums[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) sums[i] = s_[i / 2 * 4 + i % 2] + s_[i / 2 * 4 + 2 + i % 2];
    row_sum_ += reduce_own_row(sums, [](float x, float y) { return x + y; });
  }
  // Publishes P.
  __device__ __forceinline__ void arrive_p_full() const {
    __syncwarp();
    if (lane() == 0) ptx::arrive(smem_.p_full());
  }
  // P times the scales, if the units have flags.
  __device__ __forceinline__ void scale_p_to_units(int stage, ScaleUnits units, SwapAbQkGemm::PRegs& p_regs) {
    ptx::fence_operand(s_);  // recomputes products, rather than keep them in registers
    const bool in_range = (units.flags() & ScaleUnits::kRange) == 0;
    units.drop_flags();
    if (in_range) {
      qk_.scale_p<ptx::Type::kF16>(stage, units, s_, p_regs);
    } else {
      qk_.scale_p<ptx::Type::kBf16>(stage, units, s_, p_regs);
    }
  }

  // Turns a new token's S into P, in place. counts: it is added to this warp's row sum.
  __device__ __forceinline__ void add_new_token(bool counts) {
    const float s = ptx::load_shared(smem_.token(own_row())), rescale = fold_row_max(s);
    const float p_token = ptx::exp2_approx(fmaf(s, c(), -finite_row_max(row_max_ref_) * c()));
    row_sum_ = fmaf(row_sum_, rescale, counts ? p_token : 0.0f);
    sync_softmax_warps();  // all warps have read S
    // racecheck reports these with SwapAbPv::add_new_token(), which has synchronised by a different instruction.
    if (consumer_warp() == 0) {
      ptx::store_shared_u32(smem_.rescale(own_row()), __float_as_uint(rescale));
      ptx::store_shared_u32(smem_.token(own_row()), __float_as_uint(p_token));
    }
    sync_swap_ab_consumers();
    sync_swap_ab_consumers();  // O has the new token
  }

  __device__ __forceinline__ float fold_row_max(float tile_max) {
    return update_row_max(tile_max, c(), row_max_, row_max_ref_);
  }

  const WorkTileParams& p_;
  const SwapAbSmem& smem_;
  SwapAbQkGemm qk_;
  // The stats of this lane's row. row_sum_ is of the warp's keys, relative to row_max_ref_.
  float row_max_, row_max_ref_, row_sum_;
  SwapAbAccum s_;            // S, then P: [4 j + 2 h + e] of key g + 8 h of the warp's 16, row 8 j + 2 t + e
  unsigned count_ = 0;       // tiles before the current one, of all work tiles and both warpgroups
  unsigned num_folded_ = 0;  // how many tiles have been folded into row_max_
};

}  // namespace attune::mla
