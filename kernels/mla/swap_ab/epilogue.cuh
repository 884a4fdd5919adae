// SPDX-License-Identifier: Apache-2.0
// The swap-AB epilogue: stores O normalised, or as the partial output of a split. A lane has two neighbouring channels
// of eight rows in each block of 64 channels; lane r has the row stats of row r.
#pragma once

#include "mla/partial_out.cuh"
#include "mla/swap_ab/pv.cuh"

namespace attune::mla {

// Named barrier: the PV warps have read the row stats, which may now be overwritten.
constexpr int kRowStatsRead = 3;

class SwapAbEpilogue {
 public:
  __device__ __forceinline__ SwapAbEpilogue(const WorkTileParams& p, const SwapAbSmem& smem, const WorkTile& work,
                                            int head_tile)
      : p_(p), smem_(smem), t_(work), head_tile_(head_tile), lane_(recomputed_lane()) {}

  // Called by all PV warps, once the softmax warps have published the row stats.
  __device__ __forceinline__ void store(SwapAbPv& a) const {
    const bool is_split = t_.num_splits > 1;
    if (kFp16Partials && is_split) publish_bounds(a.o);
    sync_swap_ab_consumers();
    const SwapAbPv::RowStats row = a.read_row_stats(lane() % SwapAbConfig::kBlockM);
    if (is_split) {
      store_partial(row, a.o);
    } else {
      arrive_row_stats_read();
      store_out(row, a.o);
    }
  }

 private:
  __device__ __forceinline__ static void arrive_row_stats_read() {
    ptx::named_barrier_arrive_unaligned(kRowStatsRead, 32 * SwapAbConfig::kConsumerWarps);
  }
  __device__ __forceinline__ int lane() const { return lane_; }
  // The lane's i-th row of the M block.
  __device__ __forceinline__ int row_at(int i) const { return i / 2 * 8 + lane() % 4 * 2 + i % 2; }
  // Takes a value from the lane that has this row's stats.
  __device__ __forceinline__ static float of_row(float x, int row) { return __shfl_sync(0xffffffffu, x, row); }

  __device__ __forceinline__ void store_out(const SwapAbPv::RowStats& own, const SwapAbOut& o) const {
    const int first_head = head_tile_ * p_.heads_of_tile;
    float own_factor = 0;
    if (lane() < p_.heads_of_tile)
      own_factor = own.rescale * common::finish_row(p_, t_.batch, t_.q_begin, t_.token_begin, first_head + lane(),
                                                    own.row_max, own.row_sum, swap_ab_warp() == 0);
    __syncwarp();
    const long long first = out_at(p_, t_, t_.token_begin, first_head);
#pragma unroll
    for (int i = 0; i < SwapAbConfig::kBlockM / 4; ++i) {
      const int row = row_at(i), element = i / 2 * 4 + i % 2;
      const float factor = of_row(own_factor, row);
      if (row >= p_.heads_of_tile) continue;
      const long long at = first + row * p_.out_head_stride;
#pragma unroll
      for (int b = 0; b < SwapAbOut::kBlocks; ++b) {
        const int channel = SwapAbOut::channel(b);
        const float x = o.blocks[b][element] * factor, y = o.blocks[b][element + 2] * factor;
        if (common::is_16_bit(Config::kOutType) && p_.store_vectors) {
          *reinterpret_cast<unsigned*>(p_.out + (at + channel) * 2) = common::pack<Config::kOutType>(x, y);
        } else {
          common::store_element(Config::kOutType, p_.out, at + channel * p_.out_dim_stride, x);
          common::store_element(Config::kOutType, p_.out, at + (channel + 1) * p_.out_dim_stride, y);
        }
      }
    }
  }

  // Publishes bounds of the warp's channels of each row. Each half of a word is one scale group.
  __device__ __forceinline__ void publish_bounds(const SwapAbOut& o) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < SwapAbConfig::kBlockM / 4; ++i) {
        float largest[2] = {};
#pragma unroll
        for (int b = 0; b < 8; ++b)
          largest[b / 4] = fmaxf(largest[b / 4], magnitude(o.blocks[4 * half + b / 2][i / 2 * 4 + b % 2 * 2 + i % 2]));
        unsigned bounds = two_bounds(largest[0], largest[1]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          bounds = ptx::max_u16x2(bounds, __shfl_xor_sync(0xffffffffu, bounds, step));
        if (lane() < 4) ptx::store_shared_u32(smem_.bounds(row_at(i)) + 16 * half + 4 * swap_ab_warp(), bounds);
      }
    }
  }

  // In the layout of mla/partial_out.cuh. Two warps share 64 channels of each scale group.
  __device__ __forceinline__ void store_partial(const SwapAbPv::RowStats& own, const SwapAbOut& o) const {
    const int unit = partial_idx(p_, t_, head_tile_);
    const int own_row = lane() % SwapAbConfig::kBlockM;
    float own_factors[Packed::kGroups] = {1, 1, 1, 1};
    // The row stats have one entry for each half of the channels; a warp stores one of them.
    float* const stats = partial_stats_at(p_.partial_stats, unit, own_row, swap_ab_warp());
    if constexpr (kFp16Partials) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned bounds[4];
        ptx::load_shared_four(smem_.bounds(own_row) + 16 * half, bounds);
        const auto of_two_warps = [&](int i) {
          return ptx::max_u16x2(ptx::max_u16x2(bounds[2 * i], bounds[2 * i + 1]), kLeastExponent * 0x00800080);
        };
        const auto exponent = [](unsigned two, int i) { return two >> (7 + 16 * i) & 0xff; };
        const unsigned first = of_two_warps(0), second = of_two_warps(1), mine = swap_ab_warp() < 2 ? first : second;
#pragma unroll
        for (int i = 0; i < 2; ++i) own_factors[2 * half + i] = factor_of(exponent(mine, i));
        if (swap_ab_warp() == half) {
          const unsigned exponents =
              exponent(first, 0) | exponent(second, 0) << 8 | exponent(first, 1) << 16 | exponent(second, 1) << 24;
          stats[3] = __uint_as_float(exponents - kToInverse * 0x01010101);
        }
      }
    }
    arrive_row_stats_read();  // and the bounds, too
    if (swap_ab_warp() < 2) {
      *reinterpret_cast<float2*>(stats) = make_float2(own.row_max, own.row_sum);
      stats[2] = own.rescale;
    }
#pragma unroll
    for (int i = 0; i < SwapAbConfig::kBlockM / 8; ++i) {  // two rows, eight rows apart
      const int row = i / 2 * 16 + lane() % 4 * 2 + i % 2, element = i / 2 * 8 + i % 2;
      float factors[Packed::kGroups][2];
#pragma unroll
      for (int j = 0; j < 2 * Packed::kGroups; ++j)
        factors[j / 2][j % 2] = kFp16Partials ? of_row(own_factors[j / 2], row + j % 2 * 8) : 1.0f;
      char* const first = partial_out_at(p_.partial_out, unit, row, SwapAbOut::channel(0));
#pragma unroll
      for (int b = 0; b < SwapAbOut::kBlocks; ++b) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = o.blocks[b][element + j / 2 * 4 + j % 2 * 2] * factors[b / 2][j / 2];
        char* const to = first + (b / 4 * (16 * kChannelsOfHalf) + (b / 2 % 2 * 8 + b % 2) * 256) * kPartialBytes;
        if constexpr (kFp16Partials) {
          *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack_f16(x[0], x[1]), ptx::pack_f16(x[2], x[3]));
        } else {
          *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  const WorkTileParams& p_;
  const SwapAbSmem& smem_;
  const WorkTile& t_;
  const int head_tile_, lane_;
};

}  // namespace attune::mla
