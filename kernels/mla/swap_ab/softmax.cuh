// SPDX-License-Identifier: Apache-2.0
// Half a block of rows: the warps that have scores, and make weights of them for those that have values
// (mla/swap_ab/pv.cuh).
//
//   S = Q K^T;  P = 2^(c (S - r)), c = scale log2 e, r a reference for each row;  O = O 2^(c (r - r')) + P V
//
// Two groups of four warps take every other tile each. A warp has 16 keys of it and all rows. What it knows of rows a
// lane knows of one: maximum and reference, which follow all tiles one after the other, in all warps alike.
#pragma once

#include "mla/swap_ab/gemms.cuh"
#include "mla/m64/mask.cuh"
#include "mla/producers/kv_source.cuh"

namespace attune::mla {

// Products of a new token, a row, and all rows of queries: all math warps, as many rows each.
__device__ __forceinline__ void multiply_token(const PrefillParams& p, const HalfSmem& smem, const WorkTile& work,
                                               int head_tile, const char* row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int own = few_warp(); own < Half::kRows; own += Half::kMathWarps) {
    const float s = multiply_new_row(few_query(p, work, head_tile, own), row, lane);
    if (lane == 0) ptx::store_shared_u32(smem.token(own), __float_as_uint(s));
  }
  meet_half();
}
// New tokens, one by one: there is hardly more than one. take(row): by all math warps.
template <class Take>
__device__ __forceinline__ void for_each_token(const PrefillParams& p, const HalfSmem& smem, const WorkTile& work,
                                               int head_tile, const Take& take) {
  const Line line(work.num_cached, work.first_key, work.end_key);
#pragma unroll 1
  for (int i = max(work.tile_begin, line.num_cached_tiles); i < work.tile_end; ++i) {
    const Tile tile = tile_at(work, line, i);
    const Source source(p, work, head_tile * p.heads_of_tile / p.group, tile);
#pragma unroll 1
    for (int key = tile.low; key < tile.high; ++key) {
      const char* const row = source.find(key, source.ask(key));
      multiply_token(p, smem, work, head_tile, row);
      take(row);
    }
  }
}

class HalfScores {
 public:
  __device__ __forceinline__ HalfScores(const PrefillParams& p, const HalfSmem& smem)
      : p_(p), smem_(smem), keys_(smem) {}

  // All tiles of a work tile.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile) {
    keys_.load_queries(p_, work, head_tile);
    highest_ = reference_ = -ptx::infinity();
    sum_ = smem_.first_sum();
    // What all lanes have alike, in registers that they share.
    const unsigned end = __shfl_sync(0xffffffffu, count_ + max(few_tile_end(work) - work.tile_begin, 0), 0);
    followed_ = count_ = __shfl_sync(0xffffffffu, count_, 0);
#pragma unroll 1
    for (count_ += (count_ ^ half_group()) & 1; static_cast<int>(count_ - end) < 0; count_ += 2) take();
#pragma unroll 1
    while (followed_ != end) follow_next();
    count_ = end;
    if constexpr (Config::kDense) {
      // New tokens count with the first tile's keys, whichever group has had those: sums do not follow from the work
      // tiles before.
      const unsigned begin = end - max(few_tile_end(work) - work.tile_begin, 0);
      const int first_warp = static_cast<int>(begin % 2) * (Half::kScoreWarps / 2);
      for_each_token(p_, smem_, work, head_tile, [&](const char*) { take_token(few_warp() == first_warp); });
    }
  }

  // Tells the warps that have values of the rows; they have heard when all meet.
  // racecheck reports this beside hear_row(): it does not follow meetings of roles, which are an instruction each.
  __device__ __forceinline__ void tell_rows() {
    ptx::store_shared_u32(smem_.sums(own_row()) + 4 * few_warp(), __float_as_uint(sum_));
    if (few_warp() == 0)
      ptx::store_shared_two(smem_.state(own_row()), __float_as_uint(highest_), __float_as_uint(reference_));
  }

 private:
  static constexpr int kRowsOfLane = Half::kRows / 4;  // 8 j + 2 t + e, of which it has two keys' scores

  __device__ __forceinline__ static int lane() { return few_lane_anew(); }
  // From products to scores in base 2.
  __device__ __forceinline__ float c() const { return p_.scale * kLog2e; }
  // The one of them that the lane knows about, 2 j + e being the upper bits of its g.
  __device__ __forceinline__ int own_row() const {
    const int own = lane(), i = own / (32 / kRowsOfLane);
    return i / 2 * 8 + own % 4 * 2 + i % 2;
  }
  // What the lane knows that has row i of this lane's, of 2 j + e. first: that of the first row, computed anew, with
  // what follows from it, rather than kept in registers.
  __device__ __forceinline__ int first_lane() const { return lane() % 4; }
  __device__ __forceinline__ static float of_row(float x, int first, int i) {
    return __shfl_sync(0xffffffffu, x, first + i * (32 / kRowsOfLane));
  }
  // Of all lanes that have the own row: each step a lane goes on with half of the rows, of which it gets the other
  // lane's.
  template <class Merge>
  __device__ __forceinline__ float of_own_row(const float (&x)[kRowsOfLane], const Merge& merge) const {
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

  // A tile's scores, the rows' maxima, for all warps, and weights of the warp's keys.
  __device__ __forceinline__ void take() {
    const int stage = static_cast<int>(count_ % Half::kStages);
    ptx::wait_phase(smem_.full(stage), count_ / Half::kStages % 2);
    const unsigned absent = ptx::load_shared_u16(smem_.note(stage) + 2 * half_warp()) >> lane() / 4;
    keys_.begin();
    keys_.multiply(stage, s_);
    float top[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < 2 * kRowsOfLane; ++i) {
      if ((absent >> (i / 2 % 2 * 8) & 1) != 0) s_[i] = -ptx::infinity();
    }
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) top[i] = fmaxf(s_[i / 2 * 4 + i % 2], s_[i / 2 * 4 + 2 + i % 2]);
    const float highest = of_own_row(top, [](float x, float y) { return fmaxf(x, y); });
    // racecheck reports this beside follow_next(): it does not follow a lane's arrival for its warp.
    ptx::store_shared_u32(smem_.maxima(stage, own_row()) + 4 * half_warp(), __float_as_uint(highest));
    __syncwarp();
    if (lane() == 0) ptx::arrive(smem_.maxima_full(stage));
    if (followed_ != count_) follow_next();
    weigh(stage, follow_next());
  }
  // The next tile's maxima, which may be the other group's. What is to be multiplied with to be against the reference.
  __device__ __forceinline__ float follow_next() {
    const int stage = static_cast<int>(followed_ % Half::kStages);
    ptx::wait_phase(smem_.maxima_full(stage), followed_ / Half::kStages % 2);
    unsigned maxima[4];
    ptx::load_shared_four(smem_.maxima(stage, own_row()), maxima);
    const float lowered = follow(fmaxf(fmaxf(__uint_as_float(maxima[0]), __uint_as_float(maxima[1])),
                                       fmaxf(__uint_as_float(maxima[2]), __uint_as_float(maxima[3]))));
    sum_ *= lowered;
    ++followed_;
    return lowered;
  }
  // lowered: what outputs are to be multiplied with before.
  __device__ __forceinline__ void weigh(int stage, float lowered) {
    const HalfUnits units(smem_.units(stage));
    const unsigned flags = __shfl_sync(0xffffffffu, units.flags(), 0);  // in a register that all share
    const bool changes = __any_sync(0xffffffffu, lowered != 1.0f);
    const float scale = c(), own_from = reference_of(reference_);
    const int first = first_lane();
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const float from = of_row(own_from, first, i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s_[i / 2 * 4 + 2 * h + i % 2];
        x = ptx::exp2_approx((x - from) * scale);  // at most 2^8, however large scores are
      }
    }
    HalfKeys::Weights weights;
    keys_.scale_weights<ptx::Type::kF16>(stage, units, s_, weights);
    if (flags != 0) [[unlikely]]
      weigh_anew(stage, units, weights);
    // The other group's have been there, and are no longer needed.
    ptx::wait_phase(smem_.weights_full(), count_ % 2 ^ 1);
    ptx::wait_phase(smem_.weights_empty(), count_ % 2 ^ 1);
    keys_.store_weights(weights);
    // racecheck reports these beside HalfAttend::await() and lower(), for the same reason.
    if (half_warp() == 0) {
      if (lane() == 0) ptx::store_shared_u32(smem_.changes(), changes ? 1 : 0);
      if (changes) ptx::store_shared_u32(smem_.lowered(own_row()), __float_as_uint(lowered));
    }
    ptx::fence_async_proxy();
    tell_weights();
    float sums[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) sums[i] = s_[i / 2 * 4 + i % 2] + s_[i / 2 * 4 + 2 + i % 2];
    sum_ += of_own_row(sums, [](float x, float y) { return x + y; });
  }
  // That all of them are there.
  __device__ __forceinline__ void tell_weights() const {
    __syncwarp();
    if (lane() == 0) ptx::arrive(smem_.weights_full());
  }
  // Where units have flags.
  __device__ __forceinline__ void weigh_anew(int stage, HalfUnits units, HalfKeys::Weights& weights) {
    ptx::pin(s_);  // products are computed anew, rather than kept in registers
    const bool in_range = (units.flags() & HalfUnits::kRange) == 0;
    units.drop_flags();
    if (in_range) {
      keys_.scale_weights<ptx::Type::kF16>(stage, units, s_, weights);
    } else {
      keys_.scale_weights<ptx::Type::kBf16>(stage, units, s_, weights);
    }
  }

  // A new token, of which there are products: their weights, in the same place. counts: in this warp's sum.
  __device__ __forceinline__ void take_token(bool counts) {
    const float s = ptx::load_shared(smem_.token(own_row())), lowered = follow(s);
    const float weight = ptx::exp2_approx(fmaf(s, c(), -reference_of(reference_) * c()));
    sum_ = fmaf(sum_, lowered, counts ? weight : 0.0f);
    meet_scorers();  // all have read the products
    // racecheck reports these beside HalfAttend::take_token(), which has met: an instruction of its own.
    if (few_warp() == 0) {
      ptx::store_shared_u32(smem_.lowered(own_row()), __float_as_uint(lowered));
      ptx::store_shared_u32(smem_.token(own_row()), __float_as_uint(weight));
    }
    meet_half();
    meet_half();  // outputs have been added to
  }

  __device__ __forceinline__ float follow(float top) { return follow_maximum(top, c(), highest_, reference_); }

  const PrefillParams& p_;
  const HalfSmem& smem_;
  HalfKeys keys_;
  // Of the own row; sum_ is of the warp's keys, against the reference.
  float highest_, reference_, sum_;
  HalfSums s_;                 // scores, then weights: [4 j + 2 h + e] of key g + 8 h of the warp's, row 8 j + 2 t + e
  unsigned count_ = 0;         // tiles before the present one, of all work tiles and both groups
  unsigned followed_ = 0;      // those that the reference follows
};

}  // namespace attune::mla
