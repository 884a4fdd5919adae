// SPDX-License-Identifier: Apache-2.0
// The m16 mainloop and softmax: 16 rows of queries against tiles of 64 cached rows.
//
//   S = Q K^T;  P = 2^(c (S - r)), c = scale log2 e, r = row_max_ref;  O = O 2^(c (r - r')) + P V
//
// Warp w computes S of keys 8 w .. 8 w + 7, with all queries in registers, and has channels 64 w .. 64 w + 63 of O.
//
//   warp:   S_1  max_1 >  O += P_0 V_0  > max_1 of all, P_1 >  S_2  max_2 >  O += P_1 V_1 ..
//
// Other warps need a warp's row max and P only one GEMM after they are published, so they hardly wait.
#pragma once

#include "mla/m16/gemms.cuh"
#include "mla/partial_out.cuh"
#include "mla/producers/kv_source.cuh"
#include "mla/row_max.cuh"

namespace attune::mla {

class M16Mainloop {
 public:
  // A lane has rows g and g + 8 of the queries, g = lane / 4, and keys 2 t and 2 t + 1 of the warp's eight, t = lane %
  // 4. row_max and row_max_ref are the same in all warps; row_sum is of the lane's keys, relative to row_max_ref.
  float row_max[2], row_max_ref[2], row_sum[2];
  M16Out o;

  __device__ __forceinline__ M16Mainloop(const WorkTileParams& p, const M16Smem& smem)
      : p_(p), smem_(smem), warp_(consumer_warp()), lane_(threadIdx.x % 32) {}

  // Runs all tiles of a work tile. Called by all consumer warps, which have synchronised since the previous work tile.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile) {
    operands_.load_q(p_, work, head_tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) row_max[h] = row_max_ref[h] = -ptx::infinity(), row_sum[h] = smem_.first_sum();
#pragma unroll
    for (int i = 0; i < M16Out::kCount; ++i) o.at(i) = 0;
    const int tiles = cached_tile_end(work) - work.tile_begin;
    // The shuffle tells the compiler that the values are uniform, so that it uses uniform registers.
    pipe_ = {__shfl_sync(0xffffffffu, pipe_.stage, 0), __shfl_sync(0xffffffffu, pipe_.phase, 0)};
    last_ = __shfl_sync(0xffffffffu, last_, 0), count_ = __shfl_sync(0xffffffffu, count_, 0);
#pragma unroll 1
    for (int i = 0; i <= tiles; ++i) {
      const PipelineState tile = pipe_;
      if (i < tiles) qk_gemm(tile);
      if (i > 0) pv_gemm(last_, count_ - 1);
      if (i < tiles) {
        softmax(tile.stage);
        last_ = tile.stage;
        pipe_.next<M16Config::kStages>();
        ++count_;
      }
    }
    operands_.transpose_channels(o);
    if constexpr (Config::kDense) add_new_tokens(work, head_tile);
  }

  // Reduces row_sum over all warps. After its sync the work tile's shared memory is free.
  __device__ __forceinline__ void reduce_row_sum() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 1);
      row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 2);
      if (t() == 0) ptx::store_shared_u32(smem_.row_sums(g() + 8 * h) + 4 * warp_, __float_as_uint(row_sum[h]));
    }
    sync_m16_consumers();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
      load_eight(smem_.row_sums(g() + 8 * h), x);
      row_sum[h] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
  }

  // Bounds of O; row g is in the lower half.
  __device__ __forceinline__ unsigned bounds() {
    float bound[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) bound[h] = bound_of([&](int i) { return o.at(i / 2 * 4 + 2 * h + i % 2); });
    if (__any_sync(0xffffffffu, !are_finite(two_bounds(bound[0], bound[1])))) [[unlikely]] {
#pragma unroll
      for (int h = 0; h < 2; ++h) bound[h] = finite_bound_of([&](int i) { return o.at(i / 2 * 4 + 2 * h + i % 2); });
    }
    return two_bounds(bound[0], bound[1]);
  }

  // Makes row_max a score in base 2 and row_sum relative to it. Returns O's rescale factor.
  __device__ __forceinline__ float final_rescale(int h) {
    const float rescale = row_max[h] == row_max_ref[h] ? 1.0f : ptx::exp2_approx((row_max_ref[h] - row_max[h]) * c());
    row_sum[h] *= rescale;
    if (row_max[h] != -ptx::infinity()) row_max[h] *= c();
    return rescale;
  }

 private:
  // The factor from S to scores in base 2.
  __device__ __forceinline__ float c() const { return p_.scale * kLog2e; }
  __device__ __forceinline__ int g() const { return lane_ / 4; }
  __device__ __forceinline__ int t() const { return lane_ % 4; }
  __device__ __forceinline__ static void load_eight(unsigned at, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned four[4];
      ptx::load_shared_four(at + 16 * i, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = __uint_as_float(four[j]);
    }
  }

  // Computes S of the warp's keys of the next tile, and publishes their row max to all warps.
  __device__ __forceinline__ void qk_gemm(const PipelineState& tile) {
    ptx::wait_phase(smem_.full(tile.stage), tile.phase);
    operands_.qk_gemm(smem_, tile.stage, s_);
    const unsigned masked = ptx::load_shared_u8(smem_.mask(tile.stage) + warp_) >> (2 * t());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((masked >> (i % 2) & 1) != 0) s_[i] = -ptx::infinity();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float tile_max = fmaxf(s_[2 * h], s_[2 * h + 1]);
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
      // racecheck reports this with softmax()'s loads: it does not model a lane that arrives for its warp.
      if (t() == 0)
        ptx::store_shared_u32(smem_.tile_row_max(count_ % 2, g() + 8 * h) + 4 * warp_, __float_as_uint(tile_max));
    }
    __syncwarp();
    if (lane_ == 0) ptx::arrive(smem_.row_max_full(count_ % 2));
  }

  // Computes P of the warp's keys and publishes it to all warps.
  __device__ __forceinline__ void softmax(int stage) {
    ptx::wait_phase(smem_.row_max_full(count_ % 2), count_ / 2 % 2);
    const float scale = c();
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
      load_eight(smem_.tile_row_max(count_ % 2, g() + 8 * h), x);
      const float low = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), high = fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7]));
      rescale[h] = fold_row_max(h, fmaxf(low, high));
      const float from = finite_row_max(row_max_ref[h]) * scale;
#pragma unroll
      for (int e = 0; e < 2; ++e) s_[2 * h + e] = ptx::exp2_approx(fmaf(s_[2 * h + e], scale, -from));
      row_sum[h] = fmaf(row_sum[h], rescale[h], s_[2 * h] + s_[2 * h + 1]);
    }
    // racecheck reports this with pv_gemm()'s loads: it does not model a lane that arrives for its warp.
    operands_.publish_p(smem_, count_ % 2, s_);
    __syncwarp();
    if (lane_ == 0) ptx::arrive(smem_.p_full(count_ % 2));
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < M16Out::kCount; ++i) o.at(i) *= rescale[i / 2 % 2];
    }
  }

  // O += P of all keys * V of the warp's channels.
  __device__ __forceinline__ void pv_gemm(int stage, unsigned count) {
    ptx::wait_phase(smem_.p_full(count % 2), count / 2 % 2);
    operands_.pv_gemm(smem_, stage, count % 2, o);
    __syncwarp();
    if (lane_ == 0) ptx::arrive(smem_.empty(stage));
  }

  // ---- new tokens, one at a time: there is rarely more than one

  __device__ __forceinline__ void add_new_tokens(const WorkTile& work, int head_tile) {
    const KeyTiles key_tiles(work.num_cached, work.first_key, work.end_key);
    sync_m16_consumers();  // all warps have read the row sums of the previous work tile, if no tile came since
#pragma unroll 1
    for (int i = max(work.tile_begin, key_tiles.num_cached_tiles); i < work.tile_end; ++i) {
      const Tile tile = tile_at(work, key_tiles, i);
      const KvSource source(p_, work, head_tile * p_.heads_of_tile / p_.group, tile);
#pragma unroll 1
      for (int key = tile.low; key < tile.high; ++key)
        add_new_token(work, head_tile, source.locate(key, source.load_index(key)));
    }
  }
  // row: of the new token's key and value.
  __device__ __forceinline__ void add_new_token(const WorkTile& work, int head_tile, const char* row) {
    // Each warp computes S of two rows of queries.
#pragma unroll 1
    for (int own = 2 * warp_; own < 2 * warp_ + 2; ++own) {
      const float s = dot_new_token(query_row(p_, work, head_tile, own), row, lane_);
      if (lane_ == 0) ptx::store_shared_u32(smem_.row_sums(own), __float_as_uint(s));
    }
    sync_m16_consumers();
    const char* const values = row + 2 * (warp_ * M16Config::kChannelsOfWarp + operands_.channel());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float s = ptx::load_shared(smem_.row_sums(g() + 8 * h));
      const float rescale = fold_row_max(h, s);
      const float p_token = ptx::exp2_approx(fmaf(s, c(), -finite_row_max(row_max_ref[h]) * c()));
      row_sum[h] = fmaf(row_sum[h], rescale, warp_ == 0 && t() == 0 ? p_token : 0.0f);
#pragma unroll
      for (int i = 0; i < M16Out::kBlocks * 4; ++i) {
        float& x = o.blocks[i / 4][i / 2 % 2][2 * h + i % 2];
        x = fmaf(x, rescale, p_token * common::load_element(Config::kType, values, i / 4 * 16 + i % 4));
      }
    }
    sync_m16_consumers();
  }

  __device__ __forceinline__ float fold_row_max(int h, float tile_max) {
    return update_row_max(tile_max, c(), row_max[h], row_max_ref[h]);
  }

  const WorkTileParams& p_;
  const M16Smem& smem_;
  const int warp_, lane_;
  M16Gemms operands_;
  float s_[4];          // S, then P, of (row g, keys 2 t, 2 t + 1), then of row g + 8
  PipelineState pipe_;  // of the next tile
  int last_ = 0;        // stage of the previous tile
  unsigned count_ = 0;  // tiles so far, over all work tiles
};

}  // namespace attune::mla
