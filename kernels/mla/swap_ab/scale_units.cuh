// SPDX-License-Identifier: Apache-2.0
// Units of the weights of half a block of rows, for each scale group of channels: a power of two u that follows the
// largest scale s of the keys that a work tile has seen. Weights are P s / u * 2^7 as fp16: P is at most 2^8, as
// references lag by 8 powers of two, so that weights are at most 2^15. They have 11 bits down to P s = u * 2^-21, and
// below u * 2^-32 they are 0. Outputs are against the units, too, until a work tile's tiles are done.
//
// A tile that has a key whose scale is far below the unit, but not zero, is multiplied as bf16, which has the range of
// fp32. So is one with a scale that no unit reaches.
//
// A warp that has nothing else to do looks at each tile's scales, as soon as they are there, and lays down beside them
// (HalfSmem::units) what math warps multiply weights with, 2^7 / u: for each group the upper half of it as fp32, and
// two flags.
#pragma once

#include "mla/swap_ab/config.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// Of all groups, as they lie beside a tile: two groups a word.
struct ScaleUnits {
  // In the first word's lowest bits. Changed: others than for the work tile's tile before.
  static constexpr unsigned kRange = 1, kChanged = 2, kFlags = kRange | kChanged;

  static constexpr unsigned kNone = 0x3f803f80;  // a word: 1, twice

  unsigned words[2];

  // at: HalfSmem::units().
  __device__ __forceinline__ explicit ScaleUnits(unsigned at) {
    const float2 two = ptx::load_shared_pair(at);
    words[0] = __float_as_uint(two.x), words[1] = __float_as_uint(two.y);
  }
  __device__ __forceinline__ void drop_flags() { words[0] &= ~kFlags; }
  // What outputs are to be multiplied with that were against `from` and shall be against `to`: of the first or second.
  __device__ __forceinline__ static float quotient(unsigned to, unsigned from, int i) {
    const unsigned exponent = 127 + (to >> (16 * i + 7) & 0xff) - (from >> (16 * i + 7) & 0xff);
    return __uint_as_float(exponent << 23);
  }

  __device__ __forceinline__ unsigned flags() const { return words[0] & kFlags; }
  // What weights are multiplied with; exact where there are no flags.
  __device__ __forceinline__ float factor(int group) const {
    return __uint_as_float(group % 2 == 0 ? words[group / 2] << 16 : words[group / 2] & 0xffff0000);
  }
};

// The warp that follows scales.
class ScaleUnitWarp {
 public:
  __device__ __forceinline__ explicit ScaleUnitWarp(const SwapAbSmem& smem) : smem_(smem) {}

  __device__ __forceinline__ void run() {
    for (unsigned count = 0;; ++count) {
      const int slot = slot_of_work(count);
      ptx::wait_phase(smem_.work_full(slot), count / kernels::kWorkSlots % 2);
      if (smem_.head_tile(slot) == prefill::kNoMoreWork) return;
      const WorkTile& work = smem_.work(slot);
      follow_scales(cached_tile_end(work) - work.tile_begin);
      __syncwarp();
      if (lane() == 0) ptx::arrive(smem_.work_empty(slot));
    }
  }

 private:
  static constexpr unsigned kBelow = 8;     // a scale may be so many powers of two below its unit
  static constexpr unsigned kHeadroom = 7;  // weights are multiplied with so many
  // Biased exponents of units. Outputs, times 2^7 / u, are never smaller than they will be: nothing of small values is
  // lost where a large scale stands beside them. They may be 2^71 times as large.
  static constexpr unsigned kLeast = 127 - 64, kMost = 127 + kHeadroom;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // All tiles of a work tile. A lane looks at the scales of one group of every eighth key.
  __device__ __forceinline__ void follow_scales(int tiles) {
    unsigned unit = kLeast;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      ptx::wait_phase(smem_.full(pipe_.stage), pipe_.phase);
      const unsigned from = smem_.row(pipe_.stage, lane() / 4) + Packed::kNope + lane() % 4 * 4;
      unsigned scales[SwapAbConfig::kBlockN / 8], largest = 0, smallest = ~0u;  // smallest: less 1, so that no zero is
#pragma unroll
      for (int j = 0; j < SwapAbConfig::kBlockN / 8; ++j)
        scales[j] = ptx::load_shared_u32(from + 8 * j * SwapAbConfig::kPitch) & 0x7fffffff;
#pragma unroll
      for (int j = 0; j < SwapAbConfig::kBlockN / 8; ++j)
        largest = max(largest, scales[j]), smallest = min(smallest, scales[j] - 1);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      const unsigned before = unit;
      unit = max(unit, min((largest + 0x7fffff) >> 23, kMost));
      const bool out_of_range = largest > unit << 23 || smallest < (unit - kBelow << 23) - 1;
      unsigned flags = __any_sync(0xffffffffu, out_of_range) ? ScaleUnits::kRange : 0;
      if (i == 0 || __any_sync(0xffffffffu, unit != before)) flags |= ScaleUnits::kChanged;
      const unsigned half = 254 + kHeadroom - unit << 7, next = __shfl_xor_sync(0xffffffffu, half, 1);
      // racecheck reports this beside the loads of HalfUnits(): it does not follow a lane's arrival for its warp.
      if (lane() < 4 && lane() % 2 == 0)
        ptx::store_shared_u32(smem_.units(pipe_.stage) + 2 * lane(), half | next << 16 | (lane() == 0 ? flags : 0));
      __syncwarp();
      if (lane() == 0) {
        // That of the maxima of the tile before in the same place.
        const unsigned barrier = smem_.row_max_full(pipe_.stage);
        ptx::wait_phase(barrier, pipe_.phase ^ 1);
        ptx::arrive(barrier);
      }
      __syncwarp();
      pipe_.next<SwapAbConfig::kStages>();
    }
  }

  const SwapAbSmem& smem_;
  PipelineState pipe_;
};

}  // namespace attune::mla
