// SPDX-License-Identifier: Apache-2.0
// The dequant warps: three warps convert raw 8-bit tiles, which the producer copies, to 16-bit K and V, in rows
// swizzled as the TMA writes them. They store per-token scales beside K, and zero masked rows of V.
#pragma once

#include "prefill/dequant_elements.cuh"
#include "prefill/dequant_xpacked.cuh"
#include "prefill/shared_storage.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill {

class Dequantizer {
 public:
  static constexpr int kThreads = kDequantThreads;
  static_assert(!Config::kQuantized || kThreads == 32 * Config::kDequantWarps);

  __device__ __forceinline__ Dequantizer(const WorkTileParams& p, const Smem& smem)
      : p_(p), smem_(smem), thread_(static_cast<int>(threadIdx.x) - 32) {}

  __device__ __forceinline__ void run() {
    for (PipelineState slot;; slot.next<kernels::kWorkSlots>()) {
      ptx::wait_phase(smem_.work_full(slot.stage), slot.phase);
      const int head_tile = smem_.head_tile(slot.stage);
      if (head_tile == kNoMoreWork) return;
      dequant_tiles(smem_.work(slot.stage), head_tile * p_.heads_of_tile / p_.group);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::arrive(smem_.work_empty(slot.stage));
    }
  }

 private:
  // Takes tiles in the order of the producer.
  __device__ __forceinline__ void dequant_tiles(const WorkTile& work, int kv_head) {
    const Tiles tiles(work.num_cached, work.first_key, work.end_key);
    KeyScales scales, next;
    if (Config::kTokenScales != 0) next = load_scales(work, kv_head, tile_at(work, tiles, work.tile_end - 1));
#pragma unroll 1
    for (int i = work.tile_end - 1; i >= work.tile_begin; --i) {
      if (Config::kTokenScales != 0) {
        scales = next;
        if (i > work.tile_begin) next = load_scales(work, kv_head, tile_at(work, tiles, i - 1));
      }
      const Tile tile = tile_at(work, tiles, i);
      dequant_k(tile, scales);
      dequant_v(tile);
    }
  }

  // The scales of this thread's keys of a tile.
  struct KeyScales {
    static constexpr int kNum = (Config::kKeys + kThreads - 1) / kThreads;
    float k[kNum], v[kNum];
  };
  // Called one tile ahead: the page and then the scale are two dependent loads, so they are in flight during the tile
  // before.
  __device__ __forceinline__ KeyScales load_scales(const WorkTile& work, int kv_head, const Tile& tile) const {
    KeyScales scales;
#pragma unroll
    for (int i = 0; i < KeyScales::kNum; ++i) {
      const int key = tile.start + thread_ + i * kThreads;
      const bool there = tile.cached && key >= tile.low && key < tile.high;
      const float2 both = there ? common::scales_of(p_, work, kv_head, key) : float2{};
      scales.k[i] = both.x, scales.v[i] = both.y;
    }
    return scales;
  }
  __device__ __forceinline__ void store_scales(const KeyScales& scales, int stage) {
#pragma unroll
    for (int i = 0; i < KeyScales::kNum; ++i) {
      const int key = thread_ + i * kThreads;
      if (key >= Config::kKeys) break;
      // racecheck reports these stores with the loads of scale_columns(), as it does those of the mask below.
      smem_.scales(stage, false)[key] = scales.k[i];
      smem_.scales(stage, true)[key] = scales.v[i];
    }
  }

  __device__ __forceinline__ void dequant_k(const Tile& tile, const KeyScales& scales) {
    const PipelineState pipe = k_pipe_;
    k_pipe_.next<Config::kStages>();
    if (!tile.cached) return;
    const PipelineState raw = raw_pipe_;
    raw_pipe_.next<Config::kRawStages>();
    // The producer copies raw tiles after all earlier dense tiles have stages, so k_empty never lags by two phases.
    ptx::wait_phase(smem_.raw_full(raw.stage), raw.phase);
    ptx::wait_phase(smem_.k_empty(pipe.stage), pipe.phase ^ 1);
    if (Config::kTokenScales != 0) store_scales(scales, pipe.stage);
    // racecheck reports this with Softmax::mask_edge(): it does not model a thread that arrives for its whole warp.
    if (thread_ < static_cast<int>(sizeof(TileMask) / 4)) {
      ptx::store_shared_u32(smem_.mask(pipe.stage) + 4 * thread_,
                            ptx::load_shared_u32(smem_.raw_mask(raw.stage) + 4 * thread_));
    }
    if constexpr (Config::kXpacked) {
      dequant_xpacked_k(smem_.raw(raw.stage), smem_.k(pipe.stage), thread_);
    } else {
      dequant_tile<Config::kHeadDimQk, common::kFloat16>(smem_.raw(raw.stage), smem_.k(pipe.stage), 0, Config::kKeys);
    }
    publish(smem_.raw_empty(raw.stage), smem_.k_full(pipe.stage));
  }

  __device__ __forceinline__ void dequant_v(const Tile& tile) {
    const PipelineState pipe = v_pipe_;
    v_pipe_.next<Config::kStages>();
    if (!tile.cached) return;
    const PipelineState raw = raw_pipe_;
    raw_pipe_.next<Config::kRawStages>();
    ptx::wait_phase(smem_.raw_full(raw.stage), raw.phase);
    ptx::wait_phase(smem_.v_empty(pipe.stage), pipe.phase ^ 1);
    constexpr int kTo = Config::kTokenScales != 0 ? common::kBFloat16 : common::kFloat16;
    const unsigned from = smem_.raw(raw.stage), to = smem_.v(pipe.stage);
    const int low = tile.low - tile.start, high = tile.high - tile.start;
    if constexpr (Config::kXpacked) {
      dequant_xpacked_v<kTo>(from, to, low, high, p_.box_shift, thread_);
    } else {
      dequant_tile<Config::kHeadDimV, kTo>(from, to, low, high);
    }
    publish(smem_.raw_empty(raw.stage), smem_.v_full(pipe.stage));
  }

  __device__ __forceinline__ void publish(unsigned raw_empty, unsigned full) {
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kLoadBarrier, kThreads);
    if (thread_ == 0) {
      ptx::arrive(raw_empty);
      ptx::arrive(full);
    }
  }

  // Converts a raw tile to swizzled rows of kTo. Rows outside of [low, high) become zero.
  template <int kHeadDim, int kTo>
  __device__ __forceinline__ void dequant_tile(unsigned raw, unsigned to, int low, int high) const {
    dequant_blocks<kHeadDim, kTo>(raw, to);
    if (low == 0 && high == Config::kKeys) return;
    zero_rows<kHeadDim>(to, low, high);
  }

  // A thread's units in up to 128 channels: 16 channels of every kRowsAtATime-th row. Eight lanes load from all banks
  // and store to all banks: the second half of a row's eight units comes from the next row.
  template <int kRest>
  struct ThreadUnits {
    static constexpr int kUnits = kRest <= 64 ? 4 : 8, kRowsAtATime = kThreads / kUnits,
                         kSteps = (Config::kKeys + kRowsAtATime - 1) / kRowsAtATime;
    static_assert(kRowsAtATime % 4 == 0, "advance() toggles at most one bit of the swizzle");
    unsigned row, unit;
    __device__ __forceinline__ explicit ThreadUnits(unsigned thread) {
      unit = thread % kUnits;
      row = kUnits == 4 ? thread / 4 : thread / 16 * 2 + (thread / 4 + thread / 8) % 2;
    }
    __device__ __forceinline__ unsigned from(unsigned raw) const { return raw + row * kernels::kRawPitch + 16 * unit; }
    // The address of the first half of the unit's output; the second half is at ^ 16.
    __device__ __forceinline__ unsigned to(unsigned block) const {
      return block + unit / 4 * (Config::kKeys * 128) + row * 128 + ((unit % 4 * 2) ^ (row & 7)) * 16;
    }
    __device__ __forceinline__ static unsigned advance(unsigned to, int step) {
      return (to ^ (step * kRowsAtATime % 8 * 16)) + step * kRowsAtATime * 128;
    }
    __device__ __forceinline__ bool has(int step) const {
      return (step + 1) * kRowsAtATime <= Config::kKeys || row + step * kRowsAtATime < Config::kKeys;
    }
  };

  template <int kHeadDim, int kTo, int kBlock = 0>
  __device__ __forceinline__ void dequant_blocks(unsigned raw, unsigned to) const {
    using Units = ThreadUnits<kHeadDim - 128 * kBlock>;
    const Units units(ptx::opaque(thread_));  // opaque, so that it is recomputed: registers are scarce
    const unsigned from = units.from(raw + kBlock * Config::kKeys * kernels::kRawPitch);
    const unsigned at = units.to(to + 2 * kBlock * Config::kKeys * 128);
    const auto load = [&](int step, unsigned(&words)[4]) {
      ptx::load_shared_four(from + step * Units::kRowsAtATime * kernels::kRawPitch, words);
    };
    const auto dequant = [&](int step, const unsigned(&words)[4]) {
      unsigned out[8];
      dequant_16<Config::kCacheType, kTo>(words, out);
      ptx::store_shared_four(Units::advance(at, step), out);
      ptx::store_shared_four(Units::advance(at ^ 16, step), out + 4);
    };
    dequant_steps<Units::kSteps, kLoadsAhead>([&](int step) { return units.has(step); }, load, dequant);
    if constexpr (kHeadDim > 128 * (kBlock + 1)) dequant_blocks<kHeadDim, kTo, kBlock + 1>(raw, to);
  }

  // Each thread zeroes the rows that it wrote.
  template <int kHeadDim, int kBlock = 0>
  __device__ __forceinline__ void zero_rows(unsigned to, int low, int high) const {
    using Units = ThreadUnits<kHeadDim - 128 * kBlock>;
    const Units units(ptx::opaque(thread_));
    const unsigned at = units.to(to + 2 * kBlock * Config::kKeys * 128);
#pragma unroll 1
    for (int step = 0; step < Units::kSteps; ++step) {
      const int row = units.row + step * Units::kRowsAtATime;
      if (row >= Config::kKeys || (row >= low && row < high)) continue;
      ptx::store_shared_zero(Units::advance(at, step));
      ptx::store_shared_zero(Units::advance(at ^ 16, step));
    }
    if constexpr (kHeadDim > 128 * (kBlock + 1)) zero_rows<kHeadDim, kBlock + 1>(to, low, high);
  }

  const WorkTileParams& p_;
  const Smem& smem_;
  const int thread_;
  PipelineState k_pipe_, v_pipe_, raw_pipe_;
};

}  // namespace attune::prefill
