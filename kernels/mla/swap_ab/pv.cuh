// SPDX-License-Identifier: Apache-2.0
// Half a block of rows: the four warps that have values, and outputs. Weights come from those that have scores
// (mla/swap_ab/softmax.cuh), of each tile against its rows' references.
#pragma once

#include "mla/swap_ab/softmax.cuh"

namespace attune::mla {

class HalfAttend {
 public:
  HalfOut o;

  __device__ __forceinline__ HalfAttend(const PrefillParams& p, const HalfSmem& smem)
      : p_(p), smem_(smem), values_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // All tiles of a work tile.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile) {
#pragma unroll
    for (int i = 0; i < HalfOut::kBlocks; ++i) {
#pragma unroll
      for (float& x : o.blocks[i]) x = 0;
    }
    const int tiles = __shfl_sync(0xffffffffu, few_tile_end(work) - work.tile_begin, 0);
    pipe_ = {__shfl_sync(0xffffffffu, pipe_.stage, 0), __shfl_sync(0xffffffffu, pipe_.phase, 0)};
    count_ = __shfl_sync(0xffffffffu, count_, 0);
    units_[0] = units_[1] = HalfUnits::kNone;
    int i = 0;
#pragma unroll 1
    while (i < tiles) {
      bool in_range = true;
#pragma unroll 1
      for (; i < tiles; ++i) {
        in_range = await();
        if (!in_range) break;
        take<ptx::Type::kF16>();
      }
      if (!in_range) take<ptx::Type::kBf16>(), ++i;
    }
    if (tiles > 0) change_units({HalfUnits::kNone, HalfUnits::kNone});  // none from here on
    if constexpr (Config::kDense)
      for_each_token(p_, smem_, work, head_tile, [&](const char* row) { take_token(row); });
  }

  // A row's maximum, a score in base 2, and sum against it; and what o is to be multiplied with to be against it, too.
  struct Row {
    float highest, sum, lowered;
  };
  __device__ __forceinline__ Row hear_row(int row) const {
    unsigned sums[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_shared_four(smem_.sums(row) + 16 * i, sums[i]);
    const float2 state = ptx::load_shared_pair(smem_.state(row));
    const auto of_group = [](const unsigned(&x)[4]) {
      return (__uint_as_float(x[0]) + __uint_as_float(x[1])) + (__uint_as_float(x[2]) + __uint_as_float(x[3]));
    };
    const float sum = of_group(sums[0]) + of_group(sums[1]);
    const float c = p_.scale * kLog2e;
    const float lowered = state.x == state.y ? 1.0f : ptx::exp2_approx((state.y - state.x) * c);
    return {state.x != -ptx::infinity() ? state.x * c : state.x, sum * lowered, lowered};
  }

 private:
  // The next tile's weights. Whether they are fp16.
  __device__ __forceinline__ bool await() {
    ptx::wait_phase(smem_.full(pipe_.stage), pipe_.phase);
    values_.load(pipe_.stage, 0, codes_[0]);
    values_.load(pipe_.stage, 1, codes_[1]);
    ptx::wait_phase(smem_.weights_full(), count_ % 2);
    const HalfUnits units(smem_.units(pipe_.stage));
    const unsigned flags = __shfl_sync(0xffffffffu, units.flags(), 0),
                   changes = __shfl_sync(0xffffffffu, ptx::load_shared_u32(smem_.changes()), 0);
    if ((flags | changes) != 0) [[unlikely]] {
      if (changes != 0) lower();
      if (flags != 0) {
        HalfUnits exact = units;
        exact.drop_flags();
        change_units({exact.words[0], exact.words[1]});
      }
    }
    return (flags & HalfUnits::kRange) == 0;
  }
  // The product of its values. kType: of the weights.
  template <ptx::Type kType>
  __device__ __forceinline__ void take() {
    const int stage = pipe_.stage;
    values_.begin();
    HalfValues::pin(o);
    values_.multiply<kType, 0>(stage, codes_[0], o);
    values_.multiply<kType, 1>(stage, codes_[1], o);
    values_.multiply<kType, 2>(stage, codes_[0], o);
    values_.multiply<kType, 3>(stage, codes_[1], o);
    values_.multiply<kType, 4>(stage, codes_[0], o);
    values_.multiply<kType, 5>(stage, codes_[1], o);
    values_.multiply<kType, 6>(stage, codes_[0], o);
    values_.multiply<kType, 7>(stage, codes_[1], o);
    ptx::wait_products<0>();
    HalfValues::pin(o);
    __syncwarp();
    if (lane_ == 0) {
      ptx::arrive(smem_.weights_empty());
      ptx::arrive(smem_.empty(stage));
    }
    pipe_.next<Half::kStages>();
    ++count_;
  }
  // Outputs, as they are against other units.
  struct Units {
    unsigned words[2];
  };
  __device__ __forceinline__ void change_units(Units units) {
#pragma unroll
    for (int i = 0; i < Packed::kGroups; ++i) {
      const float factor = HalfUnits::quotient(units.words[i / 2], units_[i / 2], i % 2);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (float& x : o.blocks[2 * i + j]) x *= factor;
      }
    }
    units_[0] = units.words[0], units_[1] = units.words[1];
  }
  // As they are against other references.
  __device__ __forceinline__ void lower() {
#pragma unroll
    for (int j = 0; j < Half::kRows / 8; ++j) {
      const float2 factors = ptx::load_shared_pair(smem_.lowered(8 * j + lane_ % 4 * 2));
#pragma unroll
      for (int i = 0; i < 4 * HalfOut::kBlocks; ++i)
        o.blocks[i / 4][4 * j + i % 4] *= i % 2 != 0 ? factors.y : factors.x;
    }
  }

  // A new token; row: of its value.
  __device__ __forceinline__ void take_token(const char* row) {
    meet_half();  // there are weights
    lower();
#pragma unroll
    for (int b = 0; b < HalfOut::kBlocks; ++b) {
      const int channel = HalfOut::channel(b);
      const float values[2] = {tile::load_element(Config::kType, row, channel),
                               tile::load_element(Config::kType, row, channel + 1)};
#pragma unroll
      for (int j = 0; j < Half::kRows / 8; ++j) {
        const float2 two = ptx::load_shared_pair(smem_.token(8 * j + lane_ % 4 * 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = o.blocks[b][4 * j + i];
          x = fmaf(i % 2 != 0 ? two.y : two.x, values[i / 2], x);
        }
      }
    }
    meet_half();
  }

  const PrefillParams& p_;
  const HalfSmem& smem_;
  HalfValues values_;
  const int lane_;
  HalfValues::Codes codes_[2];  // of the next two steps
  PipelineState pipe_;                   // of the next tile
  unsigned units_[2];           // HalfUnits, against which o is
  unsigned count_ = 0;          // tiles, of all work tiles
};

}  // namespace attune::mla
