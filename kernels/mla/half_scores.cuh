// SPDX-License-Identifier: Apache-2.0
// Half a block of rows: the four warps that have scores, and make weights of them for those that have values
// (half_attend.cuh).
//
//   S = Q K^T;  P = 2^(c (S - r)), c = scale log2 e, r a reference for each row;  O = O 2^(c (r - r')) + P V
//
//   warp:  S_1, its maxima >  S_2 begins >  maxima of four warps, P_1 >  S_2 ends, its maxima ..
//
// A warp has 16 keys of a tile and all rows. What it knows of rows a lane knows of one, in all warps alike.
#pragma once

#include "mla/half_products.cuh"
#include "mla/rows.cuh"
#include "mla/source.cuh"

namespace attune::mla {

// Products of a new token, a row, and all rows of queries: all math warps, as many rows each.
__device__ __forceinline__ void multiply_token(const PrefillParams& p, const HalfPlaces& places, const Task& task,
                                               int head_tile, const char* row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int own = few_warp(); own < Half::kRows; own += Half::kMathWarps) {
    const char* const query = few_query(p, task, head_tile, own);
    float s = 0;
#pragma unroll 1
    for (int d = lane; query != nullptr && d < Config::kHeadDimQk; d += 32)
      s = fmaf(tile::load_element(Config::kType, query, d), tile::load_element(Config::kType, row, d), s);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
    if (lane == 0) ptx::store_shared_u32(places.token(own), __float_as_uint(s));
  }
  meet_few();
}
// New tokens, one by one: there is hardly more than one. take(row): by all math warps.
template <class Take>
__device__ __forceinline__ void for_each_token(const PrefillParams& p, const HalfPlaces& places, const Task& task,
                                               int head_tile, const Take& take) {
  const Line line(task.num_cached, task.first_key, task.end_key);
#pragma unroll 1
  for (int i = max(task.tile_begin, line.num_cached_tiles); i < task.tile_end; ++i) {
    const Tile tile = tile_at(task, line, i);
    const Source source(p, task, head_tile * p.heads_of_tile / p.group, tile);
#pragma unroll 1
    for (int key = tile.low; key < tile.high; ++key) {
      const char* const row = source.find(key, source.ask(key));
      multiply_token(p, places, task, head_tile, row);
      take(row);
    }
  }
}

class HalfScores {
 public:
  __device__ __forceinline__ HalfScores(const PrefillParams& p, const HalfPlaces& places)
      : p_(p), places_(places), keys_(places), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // All tiles of a task.
  __device__ __forceinline__ void run(const Task& task, int head_tile) {
    keys_.load_queries(p_, task, head_tile);
    highest_ = reference_ = -ptx::infinity();
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) sum_[i] = 0;
    const int tiles = __shfl_sync(0xffffffffu, few_tile_end(task) - task.tile_begin, 0);
    // What all lanes have alike, in registers that they share.
    turn_ = {__shfl_sync(0xffffffffu, turn_.stage, 0), __shfl_sync(0xffffffffu, turn_.parity, 0)};
    count_ = __shfl_sync(0xffffffffu, count_, 0);
    if (tiles > 0) {
      begin();
#pragma unroll 1
      for (int i = 1; i < tiles; ++i) go_on();
      end();
    }
    if constexpr (Config::kDense)
      for_each_token(p_, places_, task, head_tile, [&](const char*) { take_token(); });
  }

  // Tells the warps that have values of the rows; they have heard when all meet.
  __device__ __forceinline__ void tell_rows() {
    const float sum = of_own_row(sum_, [](float x, float y) { return x + y; });
    ptx::store_shared_u32(places_.sums(own_row()) + 4 * half_warp(), __float_as_uint(sum));
    if (half_warp() == 0)
      ptx::store_shared_two(places_.state(own_row()), __float_as_uint(highest_), __float_as_uint(reference_));
  }

 private:
  static constexpr int kRowsOfLane = Half::kRows / 4;  // 8 j + 2 t + e, of which it has two keys' scores

  // From products to scores in base 2.
  __device__ __forceinline__ float c() const { return p_.scale * kLog2e; }
  // The one of them that the lane knows about, 2 j + e being the upper bits of its g.
  __device__ __forceinline__ int own_row() const {
    const int i = lane_ / (32 / kRowsOfLane);
    return i / 2 * 8 + lane_ % 4 * 2 + i % 2;
  }
  // What the lane knows that has row i of this lane's, of 2 j + e.
  __device__ __forceinline__ float of_row(float x, int i) const {
    return __shfl_sync(0xffffffffu, x, lane_ % 4 + i * (32 / kRowsOfLane));
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
      const bool upper = (lane_ & step) != 0;
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

  // Scores of a task's first tile.
  __device__ __forceinline__ void begin() {
    const int stage = turn_.stage;
    ptx::wait_phase(places_.full(stage), turn_.parity);
    HalfKeys::Sums sums;
    HalfKeys::Codes codes[2];
    keys_.begin();
    multiply_first(stage, codes, sums);
    multiply_second(stage, codes, sums);
    score(stage, sums);
  }
  // Weights of a tile, and scores of the next one.
  __device__ __forceinline__ void go_on() {
    const int stage = turn_.stage;
    turn_.next<Half::kStages>();
    const int next = turn_.stage;
    ptx::wait_phase(places_.full(next), turn_.parity);
    HalfKeys::Sums sums;
    HalfKeys::Codes codes[2];
    keys_.begin();
    multiply_first(next, codes, sums);
    weigh(stage);
    multiply_second(next, codes, sums);
    tell_weights();
    score(next, sums);
  }
  // Weights of the last one.
  __device__ __forceinline__ void end() {
    const int stage = turn_.stage;
    turn_.next<Half::kStages>();
    weigh(stage);
    tell_weights();
  }
  __device__ __forceinline__ void multiply_first(int stage, HalfKeys::Codes (&codes)[2], HalfKeys::Sums& sums) const {
    keys_.load(stage, 0, codes[0]);
    keys_.multiply_rope(stage, sums);
    keys_.multiply<0>(stage, codes[0], codes[1], sums);
    keys_.multiply<1>(stage, codes[1], codes[0], sums);
    keys_.multiply<2>(stage, codes[0], codes[1], sums);
    keys_.multiply<3>(stage, codes[1], codes[0], sums);
  }
  __device__ __forceinline__ void multiply_second(int stage, HalfKeys::Codes (&codes)[2], HalfKeys::Sums& sums) const {
    keys_.multiply<4>(stage, codes[0], codes[1], sums);
    keys_.multiply<5>(stage, codes[1], codes[0], sums);
    keys_.multiply<6>(stage, codes[0], codes[1], sums);
    keys_.multiply<7>(stage, codes[1], codes[0], sums);
  }

  // A tile's scores, and the rows' maxima, for all four warps.
  __device__ __forceinline__ void score(int stage, HalfKeys::Sums& sums) {
    const unsigned absent = ptx::load_shared_u16(places_.note(stage) + 2 * half_warp()) >> lane_ / 4;
    keys_.add(stage, sums, s_);
    float top[kRowsOfLane];
#pragma unroll
    for (int i = 0; i < 2 * kRowsOfLane; ++i) {
      if ((absent >> (i / 2 % 2 * 8) & 1) != 0) s_[i] = -ptx::infinity();
    }
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) top[i] = fmaxf(s_[i / 2 * 4 + i % 2], s_[i / 2 * 4 + 2 + i % 2]);
    const float highest = of_own_row(top, [](float x, float y) { return fmaxf(x, y); });
    ptx::store_shared_u32(maxima_at_ + count_ % 2 * HalfPlaces::kNextMaxima + 4 * half_warp(),
                          __float_as_uint(highest));
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.maxima_full(count_ % 2));
  }

  // Weights of the warp's keys, and what outputs are to be multiplied with before.
  __device__ __forceinline__ void weigh(int stage) {
    ptx::wait_phase(places_.maxima_full(count_ % 2), count_ / 2 % 2);
    unsigned maxima[4];
    ptx::load_shared_four(maxima_at_ + count_ % 2 * HalfPlaces::kNextMaxima, maxima);
    const HalfUnits units(places_.units(stage));
    const unsigned flags = __shfl_sync(0xffffffffu, units.flags(), 0);  // in a register that all share
    const float lowered = follow(fmaxf(fmaxf(__uint_as_float(maxima[0]), __uint_as_float(maxima[1])),
                                       fmaxf(__uint_as_float(maxima[2]), __uint_as_float(maxima[3]))));
    const bool changes = __any_sync(0xffffffffu, lowered != 1.0f);
    if (changes) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) sum_[i] *= of_row(lowered, i);
    }
    const float scale = c(), own_from = reference_of(reference_);
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const float from = of_row(own_from, i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s_[i / 2 * 4 + 2 * h + i % 2];
        x = ptx::exp2_approx((x - from) * scale);  // at most 2^8, however large scores are
      }
      sum_[i] += s_[i / 2 * 4 + i % 2] + s_[i / 2 * 4 + 2 + i % 2];
    }
    HalfKeys::Weights weights;
    keys_.scale_weights<ptx::Type::kF16>(stage, units, s_, weights);
    if (flags != 0) [[unlikely]]
      weigh_anew(stage, units, weights);
    ptx::wait_phase(places_.weights_empty(), count_ % 2 ^ 1);
    keys_.store_weights(weights);
    if (half_warp() == 0) {
      if (lane_ == 0) ptx::store_shared_u32(places_.changes(), changes ? 1 : 0);
      if (changes) ptx::store_shared_u32(places_.lowered(own_row()), __float_as_uint(lowered));
    }
    ptx::fence_async_proxy();
    ++count_;
  }
  // That all of them are there; some time behind the fence, which takes a while.
  __device__ __forceinline__ void tell_weights() const {
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.weights_full());
  }
  // Where units have flags.
  __device__ __forceinline__ void weigh_anew(int stage, HalfUnits units, HalfKeys::Weights& weights) const {
    const bool in_range = (units.flags() & HalfUnits::kRange) == 0;
    units.drop_flags();
    if (in_range) {
      keys_.scale_weights<ptx::Type::kF16>(stage, units, s_, weights);
    } else {
      keys_.scale_weights<ptx::Type::kBf16>(stage, units, s_, weights);
    }
  }

  // A new token, of which there are products: their weights, in the same place.
  __device__ __forceinline__ void take_token() {
    const float s = ptx::load_shared(places_.token(own_row())), lowered = follow(s);
    const float weight = ptx::exp2_approx(fmaf(s, c(), -reference_of(reference_) * c()));
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const float added = of_row(weight, i), factor = of_row(lowered, i);
      sum_[i] = fmaf(sum_[i], factor, half_warp() == 0 && lane_ < 4 ? added : 0.0f);
    }
    meet_scorers();  // all have read the products
    if (half_warp() == 0) {
      ptx::store_shared_u32(places_.lowered(own_row()), __float_as_uint(lowered));
      ptx::store_shared_u32(places_.token(own_row()), __float_as_uint(weight));
    }
    meet_few();
    meet_few();  // outputs have been added to
  }

  __device__ __forceinline__ float follow(float top) { return follow_maximum(top, c(), highest_, reference_); }

  const PrefillParams& p_;
  const HalfPlaces& places_;
  HalfKeys keys_;
  const int lane_;
  const unsigned maxima_at_ = ptx::kept(places_.maxima(0, own_row()));
  float highest_, reference_;  // of the own row
  float sum_[kRowsOfLane];     // of the lane's keys, against the reference
  HalfSums s_;                 // scores, then weights: [4 j + 2 h + e] of key g + 8 h of the warp's, row 8 j + 2 t + e
  Turn turn_;                  // of the next tile
  unsigned count_ = 0;         // tiles that have been weighed, of all tasks
};

}  // namespace attune::mla
