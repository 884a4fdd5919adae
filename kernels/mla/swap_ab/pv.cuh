// SPDX-License-Identifier: Apache-2.0
// The swap-AB PV warpgroup, which has O. P of each tile comes from the softmax warps (mla/swap_ab/softmax.cuh),
// relative to row_max_ref.
#pragma once

#include "mla/swap_ab/softmax.cuh"

namespace attune::mla {

class SwapAbPv {
 public:
  SwapAbOut o;

  __device__ __forceinline__ SwapAbPv(const WorkTileParams& p, const SwapAbSmem& smem)
      : p_(p), smem_(smem), pv_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Runs all tiles of a work tile.
  __device__ __forceinline__ void run(const WorkTile& work, int head_tile) {
#pragma unroll
    for (int i = 0; i < SwapAbOut::kBlocks; ++i) {
#pragma unroll
      for (float& x : o.blocks[i]) x = 0;
    }
    const int tiles = __shfl_sync(0xffffffffu, cached_tile_end(work) - work.tile_begin, 0);
    pipe_ = {__shfl_sync(0xffffffffu, pipe_.stage, 0), __shfl_sync(0xffffffffu, pipe_.phase, 0)};
    count_ = __shfl_sync(0xffffffffu, count_, 0);
    units_[0] = units_[1] = ScaleUnits::kNone;
    int i = 0;
#pragma unroll 1
    while (i < tiles) {
      bool in_range = true;
#pragma unroll 1
      for (; i < tiles; ++i) {
        in_range = wait_p();
        if (!in_range) break;
        pv_tile<ptx::Type::kF16>();
      }
      if (!in_range) pv_tile<ptx::Type::kBf16>(), ++i;
    }
    if (tiles > 0) rescale_to_units({ScaleUnits::kNone, ScaleUnits::kNone});  // no units from here on
    if constexpr (Config::kDense)
      for_each_new_token(p_, smem_, work, head_tile, [&](const char* row) { add_new_token(row); });
  }

  // row_max, a score in base 2; row_sum, relative to it; O's rescale factor, to be relative to it too.
  struct RowStats {
    float row_max, row_sum, rescale;
  };
  __device__ __forceinline__ RowStats read_row_stats(int row) const {
    unsigned row_sums[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_shared_four(smem_.row_sums(row) + 16 * i, row_sums[i]);
    const float2 state = ptx::load_shared_pair(smem_.row_max(row));
    const auto of_group = [](const unsigned(&x)[4]) {
      return (__uint_as_float(x[0]) + __uint_as_float(x[1])) + (__uint_as_float(x[2]) + __uint_as_float(x[3]));
    };
    const float row_sum = of_group(row_sums[0]) + of_group(row_sums[1]);
    const float c = p_.scale * kLog2e;
    const float rescale = state.x == state.y ? 1.0f : ptx::exp2_approx((state.y - state.x) * c);
    return {state.x != -ptx::infinity() ? state.x * c : state.x, row_sum * rescale, rescale};
  }

 private:
  // Waits for the next tile's P, and rescales O if the units or row_max_ref have changed. Returns whether P is fp16.
  __device__ __forceinline__ bool wait_p() {
    ptx::wait_phase(smem_.full(pipe_.stage), pipe_.phase);
    pv_.load(pipe_.stage, 0, fp8_[0]);
    pv_.load(pipe_.stage, 1, fp8_[1]);
    ptx::wait_phase(smem_.p_full(), count_ % 2);
    const ScaleUnits units(smem_.units(pipe_.stage));
    const unsigned flags = __shfl_sync(0xffffffffu, units.flags(), 0),
                   any_rescale = __shfl_sync(0xffffffffu, ptx::load_shared_u32(smem_.any_rescale()), 0);
    if ((flags | any_rescale) != 0) [[unlikely]] {
      if (any_rescale != 0) rescale_o();
      if (flags != 0) {
        ScaleUnits exact = units;
        exact.drop_flags();
        rescale_to_units({exact.words[0], exact.words[1]});
      }
    }
    return (flags & ScaleUnits::kRange) == 0;
  }
  // The PV GEMM of a tile. kType: of P.
  template <ptx::Type kType>
  __device__ __forceinline__ void pv_tile() {
    const int stage = pipe_.stage;
    pv_.begin();
    SwapAbPvGemm::pin(o);
    pv_.gemm<kType, 0>(stage, fp8_[0], o);
    pv_.gemm<kType, 1>(stage, fp8_[1], o);
    pv_.gemm<kType, 2>(stage, fp8_[0], o);
    pv_.gemm<kType, 3>(stage, fp8_[1], o);
    pv_.gemm<kType, 4>(stage, fp8_[0], o);
    pv_.gemm<kType, 5>(stage, fp8_[1], o);
    pv_.gemm<kType, 6>(stage, fp8_[0], o);
    pv_.gemm<kType, 7>(stage, fp8_[1], o);
    ptx::wgmma_wait<0>();
    SwapAbPvGemm::pin(o);
    __syncwarp();
    if (lane_ == 0) {
      ptx::arrive(smem_.p_empty());
      ptx::arrive(smem_.empty(stage));
    }
    pipe_.next<SwapAbConfig::kStages>();
    ++count_;
  }
  // Makes O relative to other units.
  struct Units {
    unsigned words[2];
  };
  __device__ __forceinline__ void rescale_to_units(Units units) {
#pragma unroll
    for (int i = 0; i < Packed::kGroups; ++i) {
      const float factor = ScaleUnits::quotient(units.words[i / 2], units_[i / 2], i % 2);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (float& x : o.blocks[2 * i + j]) x *= factor;
      }
    }
    units_[0] = units.words[0], units_[1] = units.words[1];
  }
  // Makes O relative to the new row_max_ref.
  __device__ __forceinline__ void rescale_o() {
#pragma unroll
    for (int j = 0; j < SwapAbConfig::kBlockM / 8; ++j) {
      const float2 factors = ptx::load_shared_pair(smem_.rescale(8 * j + lane_ % 4 * 2));
#pragma unroll
      for (int i = 0; i < 4 * SwapAbOut::kBlocks; ++i)
        o.blocks[i / 4][4 * j + i % 4] *= i % 2 != 0 ? factors.y : factors.x;
    }
  }

  // Adds a new token. row: of its value.
  __device__ __forceinline__ void add_new_token(const char* row) {
    sync_swap_ab_consumers();  // its P has been written
    rescale_o();
#pragma unroll
    for (int b = 0; b < SwapAbOut::kBlocks; ++b) {
      const int channel = SwapAbOut::channel(b);
      const float values[2] = {common::load_element(Config::kType, row, channel),
                               common::load_element(Config::kType, row, channel + 1)};
#pragma unroll
      for (int j = 0; j < SwapAbConfig::kBlockM / 8; ++j) {
        const float2 two = ptx::load_shared_pair(smem_.token(8 * j + lane_ % 4 * 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = o.blocks[b][4 * j + i];
          x = fmaf(i % 2 != 0 ? two.y : two.x, values[i / 2], x);
        }
      }
    }
    sync_swap_ab_consumers();
  }

  const WorkTileParams& p_;
  const SwapAbSmem& smem_;
  SwapAbPvGemm pv_;
  const int lane_;
  SwapAbPvGemm::Fp8 fp8_[2];  // of the next two steps
  PipelineState pipe_;            // of the next tile
  unsigned units_[2];             // the ScaleUnits relative to which O is stored
  unsigned count_ = 0;            // tiles so far, over all work tiles
};

}  // namespace attune::mla
