// SPDX-License-Identifier: Apache-2.0
// The units of P in the swap-AB kernel, one for each scale group of channels. A unit u is a power of two, at least the
// largest scale s of the keys so far in the work tile. P is stored as P s / u * 2^7 in fp16. P is at most 2^8 (deferred
// rescale), so this is at most 2^15. It has 11 bits down to P s = u * 2^-21, and is 0 below u * 2^-32. O is relative to
// the units too, until the last tile is done.
//
// If a tile has a key whose scale is far below the unit, but not zero, its P is bf16, which has the range of fp32. The
// same holds if a scale is beyond the largest unit.
//
// A warp with no other task reads each tile's scales as soon as they arrive. Beside the tile's mask (SwapAbSmem::units)
// it stores the factors 2^7 / u, for each group the upper half of a float, and two flags.
#pragma once

#include "mla/swap_ab/config.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attune::mla {

// The units of all scale groups, two in a word.
struct ScaleUnits {
  // Flags in the lowest bits of the first word. Range: P is bf16. Changed: the units differ from those of the tile
  // before.
  static constexpr unsigned kRange = 1, kChanged = 2, kFlags = kRange | kChanged;

  static constexpr unsigned kNone = 0x3f803f80;  // 1, twice

  unsigned words[2];

  // at: SwapAbSmem::units().
  __device__ __forceinline__ explicit ScaleUnits(unsigned at) {
    const float2 two = ptx::load_shared_pair(at);
    words[0] = __float_as_uint(two.x), words[1] = __float_as_uint(two.y);
  }
  __device__ __forceinline__ void drop_flags() { words[0] &= ~kFlags; }
  // The rescale factor of O from units `from` to units `to`, for the word's first or second group.
  __device__ __forceinline__ static float quotient(unsigned to, unsigned from, int i) {
    const unsigned exponent = 127 + (to >> (16 * i + 7) & 0xff) - (from >> (16 * i + 7) & 0xff);
    return __uint_as_float(exponent << 23);
  }

  __device__ __forceinline__ unsigned flags() const { return words[0] & kFlags; }
  // The scale factor of P for a group, 2^7 / u. Flags are in the low bits of group 0's: call drop_flags() first.
  __device__ __forceinline__ float factor(int group) const {
    return __uint_as_float(group % 2 == 0 ? words[group / 2] << 16 : words[group / 2] & 0xffff0000);
  }
};

// The scale unit warp.
class ScaleUnitWarp {
 public:
  __device__ __forceinline__ explicit ScaleUnitWarp(const SwapAbSmem& smem) : smem_(smem) {}

  __device__ __forceinline__ void run() {
    for (unsigned count = 0;; ++count) {
      const int slot = slot_of_work(count);
      ptx::wait_phase(smem_.work_full(slot), count / kernels::kWorkSlots % 2);
      if (smem_.head_tile(slot) == scheduler::kNoMoreWork) return;
      const WorkTile& work = smem_.work(slot);
      run_work_tile(cached_tile_end(work) - work.tile_begin);
      __syncwarp();
      if (lane() == 0) ptx::arrive(smem_.work_empty(slot));
    }
  }

 private:
  static constexpr unsigned kBelow = 8;     // how many powers of two a scale may be below its unit
  static constexpr unsigned kHeadroom = 7;  // the power of two by which P is multiplied
  // The biased exponents of units. O times 2^7 / u is never smaller than O, so small values keep their bits beside a
  // large scale. It may be 2^71 times as large.
  static constexpr unsigned kLeast = 127 - 64, kMost = 127 + kHeadroom;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Runs all tiles of a work tile. A lane reads one group's scale of every eighth key.
  __device__ __forceinline__ void run_work_tile(int tiles) {
    unsigned unit = kLeast;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      ptx::wait_phase(smem_.full(pipe_.stage), pipe_.phase);
      const unsigned from = smem_.row(pipe_.stage, lane() / 4) + Packed::kNope + lane() % 4 * 4;
      unsigned scales[SwapAbConfig::kBlockN / 8], largest = 0,
                                                  smallest = ~0u;  // smallest: less 1, so that zeros are ignored
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
      // racecheck reports this with ScaleUnits()'s loads: it does not model a lane that arrives for its warp.
      if (lane() < 4 && lane() % 2 == 0)
        ptx::store_shared_u32(smem_.units(pipe_.stage) + 2 * lane(), half | next << 16 | (lane() == 0 ? flags : 0));
      __syncwarp();
      if (lane() == 0) {
        // The phase of the previous tile in the same stage.
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
