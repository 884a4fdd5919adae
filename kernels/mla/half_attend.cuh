// SPDX-License-Identifier: Apache-2.0
// The math of half a block of rows: 32 rows of queries against tiles of 64 packed rows.
//
//   S = Q K^T;  P = 2^(c (S - r)), c = scale log2 e, r a reference for each row;  O = O 2^(c (r - r')) + P V
//
// Two groups of four warps have half of the channels each, of S^T as of O^T (half_products.cuh). Sums of S^T go to the
// twin of the other group, so that each group has all of half of the rows, and computes their weights for both.
//
//   warp:   S_1  to the twin, max_1 >  O += P_0 V_0  > max_1 of four warps, P_1 >  S_2 ..
//
// What other warps need of it, maxima and weights, they need a product later, so that they hardly wait.
#pragma once

#include "mla/half_products.cuh"
#include "mla/rows.cuh"
#include "mla/source.cuh"

namespace attune::mla {

class HalfAttend {
 public:
  HalfOut o;

  __device__ __forceinline__ HalfAttend(const PrefillParams& p, const HalfPlaces& places)
      : p_(p), places_(places), products_(places), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // All tiles of a task. All math warps, when they have met after the task before.
  __device__ __forceinline__ void run(const Task& task, int head_tile) {
    products_.load_queries(p_, task, head_tile);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) highest_[i] = reference_[i] = -ptx::infinity(), sum_[i] = 0;
#pragma unroll
    for (int i = 0; i < HalfOut::kBlocks; ++i) {
#pragma unroll
      for (float& x : o.blocks[i]) x = 0;
    }
    const int tiles = few_tile_end(task) - task.tile_begin;
    share();
    if (tiles > 0) {
      products_.begin();
      units_ = HalfUnits::kNone;
      int i = 0;
#pragma unroll 1
      do {
        ptx::wait_phase(places_.full(turn_.stage), turn_.parity);
        products_.load_keys(turn_.stage, keys_);
        go_on<false>(i + 1 < tiles);
        share();
#pragma unroll 1
        while (++i < tiles && in_range_) go_on<true>(i + 1 < tiles);
        if (in_range_) {
          finish<ptx::Type::kF16>();
        } else {
          finish<ptx::Type::kBf16>();
        }
      } while (i < tiles);
      change_units(HalfUnits::kNone);  // none from here on
    }
    if constexpr (Config::kDense) take_tokens(task, head_tile);
  }

  // A row's maximum, a score in base 2, and sum against it; and what o is to be multiplied with to be against it, too.
  struct Row {
    float highest, sum, lowered;
  };
  // Tells all warps of the group's rows; they have heard when they meet.
  __device__ __forceinline__ void tell_rows() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float x = sum_[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
      if (lane_ < 4) {
        ptx::store_shared_u32(places_.sums(own_row(i)) + 4 * half_warp(), __float_as_uint(x));
        if (half_warp() == 0)
          ptx::store_shared_two(places_.state(own_row(i)), __float_as_uint(highest_[i]),
                                __float_as_uint(reference_[i]));
      }
    }
  }
  __device__ __forceinline__ Row hear_row(int row) const {
    unsigned sums[4];
    ptx::load_shared_four(places_.sums(row), sums);
    const float2 state = ptx::load_shared_pair(places_.state(row));
    const float sum =
        (__uint_as_float(sums[0]) + __uint_as_float(sums[1])) + (__uint_as_float(sums[2]) + __uint_as_float(sums[3]));
    const float lowered = state.x == state.y ? 1.0f : ptx::exp2_approx((state.y - state.x) * c());
    return {state.x != -ptx::infinity() ? state.x * c() : state.x, sum * lowered, lowered};
  }

 private:
  static constexpr int kOwn = 4;  // of the group's rows a lane has 8 j + 2 t + e, j and e being 0 or 1

  // From products to scores in base 2.
  __device__ __forceinline__ float c() const { return p_.scale * kLog2e; }
  __device__ __forceinline__ int own_row(int i) const {
    return half_group() * Half::kRowsOfWarps + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
  }

  // What all lanes have alike, in registers that they share.
  __device__ __forceinline__ void share() {
    turn_ = {__shfl_sync(0xffffffffu, turn_.stage, 0), __shfl_sync(0xffffffffu, turn_.parity, 0)};
    last_ = __shfl_sync(0xffffffffu, last_, 0), count_ = __shfl_sync(0xffffffffu, count_, 0);
  }
  // Scores and weights of the next tile, and the values of the one before, if there is one: what products need is made
  // ready while others run.
  template <bool kHasValues>
  __device__ __forceinline__ void go_on(bool has_next) {
    const int stage = turn_.stage;
    HalfSums sums, products[2];
    Weights last{};
    products_.multiply_keys(
        stage, keys_, sums, products,
        [&] {
          if constexpr (kHasValues) tell_weights();
        },
        [&] {
          if constexpr (kHasValues) last = ask_for_weights(count_ - 1);
        });
    HalfProducts::Codes codes;
    if constexpr (kHasValues) {
      products_.load_values(last_, 0, codes);
      wait_for_weights(count_ - 1, last);
      products_.multiply_values<ptx::Type::kF16, 0>(last_, codes, o);
    }
    products_.add_keys<kHasValues ? 1 : 0>(stage, sums, products, [&] {
      if constexpr (kHasValues) products_.load_values(last_, 1, codes);
    });
    give(sums);
    if constexpr (kHasValues) products_.multiply_values<ptx::Type::kF16, 1>(last_, codes, o);
    score(stage, sums);
    bool has_maxima = false;
    if constexpr (kHasValues) {
      products_.multiply_values<ptx::Type::kF16, 2>(last_, codes, o);
      has_maxima = ptx::phase_has_ended(places_.maxima_full(half_group(), count_ % 2), count_ / 2 % 2);
      products_.multiply_values<ptx::Type::kF16, 3>(last_, codes, o);
    }
    weigh<kHasValues>(stage, has_maxima, has_next);
    last_ = stage;
    ++count_;
  }

  // The values of the last tile. kType: of its weights.
  template <ptx::Type kType>
  __device__ __forceinline__ void finish() {
    tell_weights();
    HalfProducts::Codes codes;
    products_.load_values(last_, 0, codes);
    wait_for_weights(count_ - 1, ask_for_weights(count_ - 1));
    products_.multiply_values<kType, 0>(last_, codes, o);
    products_.load_values(last_, 1, codes);
    products_.multiply_values<kType, 1>(last_, codes, o);
    products_.multiply_values<kType, 2>(last_, codes, o);
    products_.multiply_values<kType, 3>(last_, codes, o);
    release_values(last_);
  }
  // Outputs of both of the group's scale groups, as they are against other units.
  __device__ __forceinline__ void change_units(unsigned units) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = HalfUnits::quotient(units, units_, i);
#pragma unroll
      for (int j = 0; j < 2 * Half::kRows / 2; ++j) o.blocks[2 * i + j / 16][j % 16] *= factor;
    }
    units_ = units;
  }

  // Products with a tile's keys, and the group's rows' maxima, for its warps.
  __device__ __forceinline__ void score(int stage, const HalfSums& sums) {
    const unsigned absent = ptx::load_shared_u16(places_.note(stage) + 2 * half_warp()) >> lane_ / 4;
    hear(sums);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((absent >> (i / 2 % 2 * 8) & 1) != 0) s_[i] = -ptx::infinity();
    }
    // A lane has two keys of four rows; then half of the rows, from a lane that has the other half, and so on.
    float top[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) top[i] = fmaxf(s_[i / 2 * 4 + i % 2], s_[i / 2 * 4 + 2 + i % 2]);
    const bool second = (lane_ & 16) != 0, odd = (lane_ & 8) != 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float got = __shfl_xor_sync(0xffffffffu, second ? top[e] : top[2 + e], 16);
      top[e] = fmaxf(second ? top[2 + e] : top[e], got);
    }
    const float got = __shfl_xor_sync(0xffffffffu, odd ? top[0] : top[1], 8);
    float highest = fmaxf(odd ? top[1] : top[0], got);
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 4));
    if ((lane_ & 4) == 0)
      ptx::store_shared_u32(maximum_at_ + count_ % 2 * HalfPlaces::kNextMaxima, __float_as_uint(highest));
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.maxima_full(half_group(), count_ % 2));
  }

  // What has been summed up of the other group's rows, to the twin. It is written over when all warps have said that
  // weights may be, which they do behind what they hear.
  __device__ __forceinline__ void give(const HalfSums& sums) const {
    const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned given[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) given[j] = __float_as_uint(sums[8 + 4 * i + j]);
      ptx::store_shared_four(places_.exchanged(half_group(), thread) + i * HalfPlaces::kNextExchanged, given);
    }
  }
  // s_: all channels' sums of the group's rows.
  __device__ __forceinline__ void hear(const HalfSums& sums) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    ptx::sync_some(2 + half_warp(), 64);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned got[4];
      ptx::load_shared_four(places_.exchanged(1 - half_group(), thread) + i * HalfPlaces::kNextExchanged, got);
#pragma unroll
      for (int j = 0; j < 4; ++j) s_[4 * i + j] = sums[4 * i + j] + __uint_as_float(got[j]);
    }
  }

  // Weights of the warp's keys and the group's rows, for all warps.
  template <bool kHasValues>
  __device__ __forceinline__ void weigh(int stage, bool has_maxima, bool has_next) {
    turn_.next<Half::kStages>();
    bool is_full = ptx::phase_has_ended(places_.full(turn_.stage), turn_.parity);
    if (!has_maxima) ptx::wait_phase(places_.maxima_full(half_group(), count_ % 2), count_ / 2 % 2);
    unsigned maxima[kOwn][4];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      ptx::load_shared_four(maxima_at_ + count_ % 2 * HalfPlaces::kNextMaxima + (i / 2 * 8 + i % 2) * 16, maxima[i]);
    const HalfUnits units(places_.units(stage));
    const unsigned flags = __shfl_sync(0xffffffffu, units.flags(), 0);  // in a register that all share
    const float scale = c();
    float lowered[kOwn];
    bool changes = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const unsigned(&x)[4] = maxima[i];
      lowered[i] = follow(i, fmaxf(fmaxf(__uint_as_float(x[0]), __uint_as_float(x[1])),
                                   fmaxf(__uint_as_float(x[2]), __uint_as_float(x[3]))));
      changes = changes || lowered[i] != 1.0f;
      const float from = reference_of(reference_[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x_of_key = s_[i / 2 * 4 + 2 * h + i % 2];
        x_of_key = ptx::exp2_approx((x_of_key - from) * scale);  // at most 2^8, however large scores are
      }
      sum_[i] = fmaf(sum_[i], lowered[i], s_[i / 2 * 4 + i % 2] + s_[i / 2 * 4 + 2 + i % 2]);
    }
    ptx::pin(s_);  // while the product runs
    if constexpr (kHasValues) release_values(last_);
    if (lane_ == 0) ptx::arrive(places_.weights_empty());
    HalfProducts::Weights weights;
    products_.scale_weights<ptx::Type::kF16>(stage, units, s_, weights);
    if (flags != 0) [[unlikely]]
      meet_units(stage, units, weights);
    in_range_ = (flags & HalfUnits::kRange) == 0;
    ptx::wait_phase(places_.weights_empty(), count_ % 2);
    products_.store_weights(weights);
    changes = __any_sync(0xffffffffu, changes);
    if (half_warp() == 0) {
      if (lane_ == 0) ptx::store_shared_u32(places_.changes(half_group()), changes ? 1 : 0);
      if (changes) tell_lowered(lowered);
    }
    if (has_next) {
      if (!is_full) ptx::wait_phase(places_.full(turn_.stage), turn_.parity);
      products_.load_keys(turn_.stage, keys_);
    }
    ptx::fence_async_proxy();
  }
  // That all of them are there; some time behind the fence, which takes a while.
  __device__ __forceinline__ void tell_weights() const {
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.weights_full());
  }
  // What math warps have to do where units have flags.
  __device__ __forceinline__ void meet_units(int stage, HalfUnits units, HalfProducts::Weights& weights) {
    const bool in_range = (units.flags() & HalfUnits::kRange) == 0;
    units.drop_flags();
    if (in_range) {
      products_.scale_weights<ptx::Type::kF16>(stage, units, s_, weights);
    } else {
      products_.scale_weights<ptx::Type::kBf16>(stage, units, s_, weights);
    }
    change_units(units.of_group(half_group()));
  }
  __device__ __forceinline__ void tell_lowered(const float (&lowered)[kOwn]) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane_ < 4) ptx::store_shared_u32(places_.lowered(own_row(i)), __float_as_uint(lowered[i]));
    }
  }

  // Weights of all keys, and what o is to be multiplied with before. Whether they are there is asked some time before
  // they are needed, as an answer takes a while.
  struct Weights {
    bool full;
    float2 changes;
  };
  __device__ __forceinline__ Weights ask_for_weights(unsigned count) const {
    const bool full = ptx::phase_has_ended(places_.weights_full(), count % 2);
    return {full, ptx::load_shared_pair(places_.changes(0))};
  }
  __device__ __forceinline__ void wait_for_weights(unsigned count, Weights answer) {
    if (!answer.full) {
      ptx::wait_phase(places_.weights_full(), count % 2);
      answer.changes = ptx::load_shared_pair(places_.changes(0));
    }
    const bool first = __float_as_uint(answer.changes.x) != 0, second = __float_as_uint(answer.changes.y) != 0;
    if (first || second) [[unlikely]]
      lower(first, second);
  }
  __device__ __forceinline__ void release_values(int stage) {
    products_.finish_values(o);
    __syncwarp();
    if (lane_ == 0) ptx::arrive(places_.empty(stage));
  }
  __device__ __forceinline__ void lower(bool first, bool second) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!(j < 2 ? first : second)) continue;
      const float2 factors = ptx::load_shared_pair(places_.lowered(8 * j + lane_ % 4 * 2));
#pragma unroll
      for (int i = 0; i < 4 * HalfOut::kBlocks; ++i)
        o.blocks[i / 4][4 * j + i % 4] *= i % 2 != 0 ? factors.y : factors.x;
    }
  }

  // ---- new tokens, one by one: there is hardly more than one

  __device__ __forceinline__ void take_tokens(const Task& task, int head_tile) {
    const Line line(task.num_cached, task.first_key, task.end_key);
    meet_few();  // nobody reads what was exchanged, nor the rows of the task before, any more
#pragma unroll 1
    for (int i = max(task.tile_begin, line.num_cached_tiles); i < task.tile_end; ++i) {
      const Tile tile = tile_at(task, line, i);
      const Source source(p_, task, head_tile * p_.heads_of_tile / p_.group, tile);
#pragma unroll 1
      for (int key = tile.low; key < tile.high; ++key) take_token(task, head_tile, source.find(key, source.ask(key)));
    }
  }
  // row: of its key and value.
  __device__ __forceinline__ void take_token(const Task& task, int head_tile, const char* row) {
    // A warp has the products of four rows of queries.
#pragma unroll 1
    for (int own = 4 * few_warp(); own < 4 * few_warp() + 4; ++own) {
      const char* const query = few_query(p_, task, head_tile, own);
      float s = 0;
#pragma unroll 1
      for (int d = lane_; query != nullptr && d < Config::kHeadDimQk; d += 32)
        s = fmaf(tile::load_element(Config::kType, query, d), tile::load_element(Config::kType, row, d), s);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
      if (lane_ == 0) ptx::store_shared_u32(places_.token(own), __float_as_uint(s));
    }
    meet_few();
    float lowered[kOwn], weights[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float s = ptx::load_shared(places_.token(own_row(i)));
      lowered[i] = follow(i, s);
      weights[i] = ptx::exp2_approx(fmaf(s, c(), -reference_of(reference_[i]) * c()));
      sum_[i] = fmaf(sum_[i], lowered[i], half_warp() == 0 && lane_ < 4 ? weights[i] : 0.0f);
    }
    meet_few();  // all have read the products
    if (half_warp() == 0) {
      tell_lowered(lowered);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (lane_ < 4) ptx::store_shared_u32(places_.token(own_row(i)), __float_as_uint(weights[i]));
      }
    }
    meet_few();
    lower(true, true);
#pragma unroll
    for (int b = 0; b < HalfOut::kBlocks; ++b) {
      const int channel = HalfOut::channel(b);
      const float values[2] = {tile::load_element(Config::kType, row, channel),
                               tile::load_element(Config::kType, row, channel + 1)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = ptx::load_shared_pair(places_.token(8 * j + lane_ % 4 * 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = o.blocks[b][4 * j + i];
          x = fmaf(i % 2 != 0 ? two.y : two.x, values[i / 2], x);
        }
      }
    }
    meet_few();
  }

  __device__ __forceinline__ float follow(int i, float top) {
    return follow_maximum(top, c(), highest_[i], reference_[i]);
  }

  const PrefillParams& p_;
  const HalfPlaces& places_;
  HalfProducts products_;
  const int lane_;
  // Where the maxima of the lane's first row lie, and that which it tells, of a row of its own.
  const unsigned maxima_at_ = ptx::kept(places_.maxima(0, own_row(0)));
  const unsigned maximum_at_ = ptx::kept(places_.maxima(0, own_row(lane_ / 16 * 2 + lane_ / 8 % 2)) + 4 * half_warp());
  // Of the group's rows: the same in all its warps, and, against the reference, the sum of the lane's keys.
  float highest_[kOwn], reference_[kOwn], sum_[kOwn];
  float s_[8];            // scores, then weights: [4 j + 2 h + e] of key g + 8 h of the warp's, row 8 j + 2 t + e
  Turn turn_;             // of the next tile
  HalfProducts::Keys keys_;  // of that
  bool in_range_ = true;  // of the last one: weights are fp16, as no scale is far below its unit
  unsigned units_ = 0;    // HalfUnits of the group's channels, against which o is
  int last_ = 0;          // stage of the one before
  unsigned count_ = 0;    // tiles, of all tasks
};

}  // namespace attune::mla
