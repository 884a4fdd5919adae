// SPDX-License-Identifier: Apache-2.0
// Three warps that make tiles of 8-bit codes, which the producer's copies bring, K and V of 16 bits, in rows swizzled as
// the TMA would have written them, and lay the scales beside them for the math groups. Values that nobody may see become
// zero.
#pragma once

#include "prefill/config.cuh"
#include "prefill/feed.cuh"
#include "prefill/tiles.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

// Four codes of a word, from the low byte on.
template <int kType>
__device__ __forceinline__ void decode_four(unsigned word, float (&x)[4]) {
  if constexpr (kType == tile::kInt8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(static_cast<signed char>(word >> (8 * i)));
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto pair = static_cast<unsigned short>(word >> (16 * i));
      const unsigned halves = kType == tile::kE4m3 ? ptx::e4m3_to_f16(pair) : ptx::e5m2_to_f16(pair);
      x[2 * i] = ptx::f16_to_float(static_cast<unsigned short>(halves));
      x[2 * i + 1] = ptx::f16_to_float(static_cast<unsigned short>(halves >> 16));
    }
  }
}

class Converter {
 public:
  static constexpr int kThreads = 32 * Config::kConvertWarps;

  __device__ __forceinline__ Converter(const PrefillParams& p, const Places& places)
      : p_(p), places_(places), thread_(static_cast<int>(threadIdx.x) - 32) {}

  __device__ __forceinline__ void run() {
    for (Turn slot;; slot.next<kernels::kTaskSlots>()) {
      ptx::wait_phase(places_.task_full(slot.stage), slot.parity);
      const int head_tile = places_.head_tile(slot.stage);
      if (head_tile == kNoMoreTasks) return;
      convert(places_.task(slot.stage), head_tile * p_.heads_of_tile / p_.group);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::arrive(places_.task_empty(slot.stage));
    }
  }

 private:
  // The order of the producer.
  __device__ __forceinline__ void convert(const Task& task, int kv_head) {
    const TileLine<Config::kKeys> line(task.num_cached, task.first_key, task.end_key);
    Tile last = tile_at(task, line, task.tile_end - 1);
    int last_stage = k_turn_.stage;
    keys(task, kv_head, last);
    for (int i = task.tile_end - 2; i >= task.tile_begin; --i) {
      const Tile tile = tile_at(task, line, i);
      const int stage = k_turn_.stage;
      keys(task, kv_head, tile);
      values(last, last_stage);
      last = tile, last_stage = stage;
    }
    values(last, last_stage);
  }

  __device__ __forceinline__ void keys(const Task& task, int kv_head, const Tile& tile) {
    const Turn turn = k_turn_;
    k_turn_.next<Config::kStages>();
    if (!tile.cached) return;
    const Turn raw = raw_turn_;
    raw_turn_.next<Config::kRawStages>();
    ptx::wait_phase(places_.k_empty(turn.stage), turn.parity ^ 1);
    load_scales(task, kv_head, tile, turn.stage);
    ptx::wait_phase(places_.raw_full(raw.stage), raw.parity);
    if (thread_ < kernels::kHiddenBytes / 4) {
      ptx::store_shared_u32(places_.hidden(turn.stage) + 4 * thread_,
                            ptx::load_shared_u32(places_.raw_hidden(raw.stage) + 4 * thread_));
    }
    tile_of<Config::kHeadDimQk, false>(places_.raw(raw.stage), places_.k(turn.stage), nullptr, 0, Config::kKeys);
    hand_over(places_.raw_empty(raw.stage), places_.k_full(turn.stage));
  }

  // k_stage: where the tile's keys went, and its scales.
  __device__ __forceinline__ void values(const Tile& tile, int k_stage) {
    const Turn turn = v_turn_;
    v_turn_.next<Config::kStages>();
    if (!tile.cached) return;
    const Turn raw = raw_turn_;
    raw_turn_.next<Config::kRawStages>();
    ptx::wait_phase(places_.raw_full(raw.stage), raw.parity);
    ptx::wait_phase(places_.v_empty(turn.stage), turn.parity ^ 1);
    tile_of<Config::kHeadDimV, !Config::kScalesWeights>(places_.raw(raw.stage), places_.v(turn.stage),
                                                        places_.scales(k_stage, true), tile.low - tile.start,
                                                        tile.high - tile.start);
    hand_over(places_.raw_empty(raw.stage), places_.v_full(turn.stage));
  }

  __device__ __forceinline__ void hand_over(unsigned raw_empty, unsigned full) {
    ptx::fence_async_proxy();
    ptx::sync_some(kAllConverters, kThreads);
    if (thread_ == 0) {
      ptx::arrive(raw_empty);
      ptx::arrive(full);
    }
  }

  // Of both K and V of the tile; before the codes are waited for, because it takes two dependent loads. Those of a head
  // or tensor stay with the stage; hidden keys have them too, as nothing comes of it.
  __device__ __forceinline__ void load_scales(const Task& task, int kv_head, const Tile& tile, int stage) {
    const bool by_token = p_.k_scale.mode == kScaleByToken || p_.v_scale.mode == kScaleByToken;
    if (kv_head != head_) head_ = kv_head, filled_ = 0;
    if (!by_token && (filled_ >> stage & 1) != 0) return;
    filled_ |= by_token ? 0 : 1u << stage;
#pragma unroll 1
    for (int key = thread_; key < Config::kKeys; key += kThreads) {
      const bool there = !by_token || (tile.start + key >= tile.low && tile.start + key < tile.high);
      places_.scales(stage, false)[key] = there ? scale_of(p_, task, kv_head, tile.start + key, false) : 0.0f;
      places_.scales(stage, true)[key] = there ? scale_of(p_, task, kv_head, tile.start + key, true) : 0.0f;
    }
    ptx::sync_some(kAllConverters, kThreads);
  }

  // Rows outside of [low, high) become zero; others are multiplied with their scales, or not.
  template <int kHeadDim, bool kScaled>
  __device__ __forceinline__ void tile_of(unsigned raw, unsigned to, const float* scales, int low, int high) const {
    if (low == 0 && high == Config::kKeys) {
      rows_of<kHeadDim, kScaled, false>(raw, to, scales, low, high);
    } else {
      rows_of<kHeadDim, kScaled, true>(raw, to, scales, low, high);
    }
  }
  // A thread has one piece of 16 channels of every so many rows.
  template <int kHeadDim, bool kScaled, bool kEdge, int kBlock = 0>
  __device__ __forceinline__ void rows_of(unsigned raw, unsigned to, const float* scales, int low, int high) const {
    constexpr int kRest = (kHeadDim + 63) / 64 * 4 - 8 * kBlock, kPieces = kRest < 8 ? kRest : 8;
    constexpr int kRowsAtATime = kThreads / kPieces;
    const int piece = thread_ % kPieces, chunk = piece % 4 * 2;
    const unsigned from = raw + kBlock * Config::kKeys * kernels::kRawPitch + 16 * piece;
    const unsigned block_at = to + (2 * kBlock + piece / 4) * Config::kKeys * 128;
#pragma unroll 1
    for (int row = thread_ / kPieces; row < Config::kKeys; row += kRowsAtATime) {
      unsigned words[4], out[8];
      ptx::load_shared_four(from + row * kernels::kRawPitch, words);
      const float scale = kScaled ? scales[row] : 1.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float x[4];
        decode_four<Config::kCacheType>(words[w], x);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (kScaled) x[2 * e] *= scale, x[2 * e + 1] *= scale;
          out[2 * w + e] = Config::kType == tile::kBFloat16 ? ptx::pack_bf16(x[2 * e], x[2 * e + 1])
                                                            : ptx::pack_f16(x[2 * e], x[2 * e + 1]);
        }
      }
      if (kEdge && (row < low || row >= high)) {
#pragma unroll
        for (unsigned& pair : out) pair = 0;
      }
      const unsigned line = block_at + row * 128;
      ptx::store_shared_four(line + ((chunk ^ (row & 7)) * 16), out);
      ptx::store_shared_four(line + (((chunk + 1) ^ (row & 7)) * 16), out + 4);
    }
    if constexpr (kRest > 8) rows_of<kHeadDim, kScaled, kEdge, kBlock + 1>(raw, to, scales, low, high);
  }

  const PrefillParams& p_;
  const Places& places_;
  const int thread_;
  int head_ = -1;        // whose scales are in the stages of K
  unsigned filled_ = 0;  // that a bit for each says
  Turn k_turn_, v_turn_, raw_turn_;
};

}  // namespace attune::prefill
