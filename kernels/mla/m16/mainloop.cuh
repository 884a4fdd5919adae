// SPDX-License-Identifier: Apache-2.0
// The math of few rows: 16 rows of queries against tiles of 64 cached rows, which become operands in registers.
//
//   S = Q K^T;  P = 2^(c (S - r)), c = scale log2 e, r a reference for each row;  O = O 2^(c (r - r')) + P V
//
// Warp w computes scores of keys 8 w .. + 7, with all queries in registers, and has channels 64 w .. + 63 of O.
//
//   warp:   S_1  max_1 >  O += P_0 V_0  > max_1 of all, P_1 >  S_2  max_2 >  O += P_1 V_1 ..
//
// What other warps need of it, maxima and weights, they need a product later, so that they hardly wait.
#pragma once

#include "mla/m16/mma.cuh"
#include "mla/partial_out.cuh"
#include "mla/m64/mask.cuh"
#include "mla/producers/kv_source.cuh"

namespace attune::mla {

class FewAttend {
 public:
  // Lane: rows g and g + 8 of the queries, with g = lane / 4; keys 2 t and 2 t + 1 of the warp's, with t = lane % 4.
  // highest and reference are the same in all warps; sum is of the lane's keys, against reference.
  float highest[2], reference[2], sum[2];
  FewOut o;

  __device__ __forceinline__ FewAttend(const PrefillParams& p, const FewSmem& smem)
      : p_(p), smem_(smem), warp_(few_warp()), lane_(threadIdx.x % 32) {}

  // All tiles of a work tile. All math warps, when they have met after the work tile before.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile) {
    operands_.load_queries(p_, work, head_tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) highest[h] = reference[h] = -ptx::infinity(), sum[h] = smem_.first_sum();
#pragma unroll
    for (int i = 0; i < FewOut::kCount; ++i) o.at(i) = 0;
    const int tiles = few_tile_end(work) - work.tile_begin;
    // What all lanes have alike, in registers that they share.
    pipe_ = {__shfl_sync(0xffffffffu, pipe_.stage, 0), __shfl_sync(0xffffffffu, pipe_.phase, 0)};
    last_ = __shfl_sync(0xffffffffu, last_, 0), count_ = __shfl_sync(0xffffffffu, count_, 0);
#pragma unroll 1
    for (int i = 0; i <= tiles; ++i) {
      const PipelineState tile = pipe_;
      if (i < tiles) score(tile);
      if (i > 0) take_values(last_, count_ - 1);
      if (i < tiles) {
        weigh(tile.stage);
        last_ = tile.stage;
        pipe_.next<Few::kStages>();
        ++count_;
      }
    }
    operands_.arrange(o);
    if constexpr (Config::kDense) take_tokens(work, head_tile);
  }

  // The sum of all keys, of all warps. Nobody needs what the work tile has used of shared memory any more.
  __device__ __forceinline__ void add_up() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      if (t() == 0) ptx::store_shared_u32(smem_.sums(g() + 8 * h) + 4 * warp_, __float_as_uint(sum[h]));
    }
    meet_few();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
      load_eight(smem_.sums(g() + 8 * h), x);
      sum[h] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
  }

  // Of o, row g in the lower half.
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

  // What o is to be multiplied with to be against the maximum, as sum then is. The maximum becomes a score in base 2.
  __device__ __forceinline__ float finish(int h) {
    const float lowered = highest[h] == reference[h] ? 1.0f : ptx::exp2_approx((reference[h] - highest[h]) * c());
    sum[h] *= lowered;
    if (highest[h] != -ptx::infinity()) highest[h] *= c();
    return lowered;
  }

 private:
  // From products to scores in base 2.
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

  // Products with the warp's keys of the next tile, and their maxima, for all warps.
  __device__ __forceinline__ void score(const PipelineState& tile) {
    ptx::wait_phase(smem_.full(tile.stage), tile.phase);
    operands_.multiply_keys(smem_, tile.stage, s_);
    const unsigned absent = ptx::load_shared_u8(smem_.note(tile.stage) + warp_) >> (2 * t());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((absent >> (i % 2) & 1) != 0) s_[i] = -ptx::infinity();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(s_[2 * h], s_[2 * h + 1]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      // racecheck reports this beside weigh()'s loads: it does not follow a lane's arrival for its warp.
      if (t() == 0) ptx::store_shared_u32(smem_.maxima(count_ % 2, g() + 8 * h) + 4 * warp_, __float_as_uint(top));
    }
    __syncwarp();
    if (lane_ == 0) ptx::arrive(smem_.maxima_full(count_ % 2));
  }

  // Weights of the warp's keys, for all warps.
  __device__ __forceinline__ void weigh(int stage) {
    ptx::wait_phase(smem_.maxima_full(count_ % 2), count_ / 2 % 2);
    const float scale = c();
    float lowered[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[8];
      load_eight(smem_.maxima(count_ % 2, g() + 8 * h), x);
      const float low = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), high = fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7]));
      lowered[h] = follow(h, fmaxf(low, high));
      const float from = reference_of(reference[h]) * scale;
#pragma unroll
      for (int e = 0; e < 2; ++e) s_[2 * h + e] = ptx::exp2_approx(fmaf(s_[2 * h + e], scale, -from));
      sum[h] = fmaf(sum[h], lowered[h], s_[2 * h] + s_[2 * h + 1]);
    }
    // racecheck reports this beside take_values()'s loads: it does not follow a lane's arrival for its warp.
    operands_.store_weights(smem_, count_ % 2, s_);
    __syncwarp();
    if (lane_ == 0) ptx::arrive(smem_.weights_full(count_ % 2));
    if (__any_sync(0xffffffffu, lowered[0] != 1.0f || lowered[1] != 1.0f)) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < FewOut::kCount; ++i) o.at(i) *= lowered[i / 2 % 2];
    }
  }

  // The product of all keys' weights and the warp's channels.
  __device__ __forceinline__ void take_values(int stage, unsigned count) {
    ptx::wait_phase(smem_.weights_full(count % 2), count / 2 % 2);
    operands_.multiply_values(smem_, stage, count % 2, o);
    __syncwarp();
    if (lane_ == 0) ptx::arrive(smem_.empty(stage));
  }

  // ---- new tokens, one by one: there is hardly more than one

  __device__ __forceinline__ void take_tokens(const WorkTile& work, int head_tile) {
    const Line line(work.num_cached, work.first_key, work.end_key);
    meet_few();  // nobody reads the sums of the work tile before, which may have been followed by no tile
#pragma unroll 1
    for (int i = max(work.tile_begin, line.num_cached_tiles); i < work.tile_end; ++i) {
      const Tile tile = tile_at(work, line, i);
      const Source source(p_, work, head_tile * p_.heads_of_tile / p_.group, tile);
#pragma unroll 1
      for (int key = tile.low; key < tile.high; ++key) take_token(work, head_tile, source.find(key, source.ask(key)));
    }
  }
  // row: of its key and value.
  __device__ __forceinline__ void take_token(const WorkTile& work, int head_tile, const char* row) {
    // A warp has the products of two rows of queries.
#pragma unroll 1
    for (int own = 2 * warp_; own < 2 * warp_ + 2; ++own) {
      const float s = multiply_new_row(few_query(p_, work, head_tile, own), row, lane_);
      if (lane_ == 0) ptx::store_shared_u32(smem_.sums(own), __float_as_uint(s));
    }
    meet_few();
    const char* const values = row + 2 * (warp_ * Few::kChannelsOfWarp + operands_.channel());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float s = ptx::load_shared(smem_.sums(g() + 8 * h));
      const float lowered = follow(h, s);
      const float weight = ptx::exp2_approx(fmaf(s, c(), -reference_of(reference[h]) * c()));
      sum[h] = fmaf(sum[h], lowered, warp_ == 0 && t() == 0 ? weight : 0.0f);
#pragma unroll
      for (int i = 0; i < FewOut::kBlocks * 4; ++i) {
        float& x = o.blocks[i / 4][i / 2 % 2][2 * h + i % 2];
        x = fmaf(x, lowered, weight * tile::load_element(Config::kType, values, i / 4 * 16 + i % 4));
      }
    }
    meet_few();
  }

  __device__ __forceinline__ float follow(int h, float top) {
    return follow_maximum(top, c(), highest[h], reference[h]);
  }

  const PrefillParams& p_;
  const FewSmem& smem_;
  const int warp_, lane_;
  FewOperands operands_;
  float s_[4];          // products, then weights, of (row g, keys 2 t, 2 t + 1), then row g + 8
  PipelineState pipe_;           // of the next tile
  int last_ = 0;        // stage of the one before
  unsigned count_ = 0;  // tiles, of all work tiles
};

}  // namespace attune::mla
