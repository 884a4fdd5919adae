// SPDX-License-Identifier: Apache-2.0
// Of the kernel of half a block of rows, or a quarter: its sizes, and where things lie in its shared memory.
#pragma once

#include "mla/few_config.cuh"

namespace attune::mla {

struct Half : Few {
  static constexpr int kRows = ATTUNE_ROWS;  // 16 or 32
  static constexpr kernels::MlaHalfShared kShared = kernels::mla_half_shared(kRows);
  static constexpr int kChunkBytes = kRows * 128;
  static constexpr int kWeightsBytes = kRows * kKeys * 2;
  static constexpr int kUnitWarp = kLoaderWarps;  // that follows scales
  // Two groups of four warps have scores, of every other tile each; one values.
  static constexpr int kThreads = kernels::kMlaHalfThreads, kMathWarps = 12, kScoreWarps = 8;
  static constexpr int kTaskReaders = kMathWarps + kLoaderWarps;
  static constexpr int kLoaderRegisters = kRows == 16 ? 56 : 48, kScoreRegisters = 136,
                       kValueRegisters = kRows == 16 ? 184 : 192;

  static_assert(Config::kLoader == kernels::kMlaCodes656 && Packed::kGroups == kernels::kMlaHalfGroups &&
                    kRowBytes == Packed::kRowBytes && Packed::kHeadDim == Config::kHeadDimQk,
                "packed rows with a scale for each 128 channels");
  static_assert(kShared.q % 1024 == 0 && kShared.weights % 1024 == 0, "atoms of 1,024 bytes");
  static_assert(kShared.total <= 232448, "more shared memory than a block can have");
};

struct HalfPlaces : prefill::TaskPlaces<Half::kShared.tasks> {
  using TaskPlaces::TaskPlaces;
  __device__ __forceinline__ unsigned row(int stage, int key) const {
    return base + Half::kShared.tiles + (stage * Half::kKeys + key) * Half::kPitch;
  }
  // A bit for each key that is not there.
  __device__ __forceinline__ unsigned note(int stage) const {
    return base + Half::kShared.notes + stage * kernels::kMlaFewNoteBytes;
  }
  // Where a row of the tile that is being copied lies.
  __device__ __forceinline__ unsigned source(int key) const { return base + Half::kShared.sources + 8 * key; }
  // Beside it, units of the weights.
  __device__ __forceinline__ unsigned units(int stage) const { return note(stage) + 8; }
  // 64 channels of all queries; the last are those of the rope part.
  __device__ __forceinline__ unsigned q(int chunk) const { return base + Half::kShared.q + chunk * Half::kChunkBytes; }
  // Of one group of channels: weights of all keys for each row.
  __device__ __forceinline__ unsigned weights(int group) const {
    return base + Half::kShared.weights + group * Half::kWeightsBytes;
  }
  // Four numbers of a row of a tile's scores, one from each warp that has them.
  __device__ __forceinline__ unsigned maxima(int stage, int row) const {
    return base + Half::kShared.maxima + stage * kNextMaxima + row * 16;
  }
  static constexpr unsigned kNextMaxima = Half::kRows * 16;
  __device__ __forceinline__ unsigned factor(int group, int row) const {
    return base + Half::kShared.factors + (group * Half::kRows + row) * 4;
  }
  // What outputs are to be multiplied with before a tile's values are added, and whether to: not 0 if some rows are.
  __device__ __forceinline__ unsigned lowered(int row) const { return base + Half::kShared.lowered + row * 4; }
  __device__ __forceinline__ unsigned changes() const { return base + Half::kShared.changes; }
  // After a task's tiles, of a row: sums of the eight warps that have scores; maximum and reference; bounds of the four
  // warps' outputs that have values, of either half of the channels.
  __device__ __forceinline__ unsigned sums(int row) const { return base + Half::kShared.ends + row * 32; }
  __device__ __forceinline__ unsigned state(int row) const {
    return base + Half::kShared.ends + Half::kRows * 32 + row * 8;
  }
  __device__ __forceinline__ unsigned bounds(int row) const {
    return base + Half::kShared.ends + Half::kRows * 40 + row * 32;
  }
  // Of a new token: a row's product, then its weight.
  __device__ __forceinline__ unsigned token(int row) const {
    return base + Half::kShared.ends + Half::kRows * 72 + row * 4;
  }

  __device__ __forceinline__ unsigned barrier(int i) const { return base + Half::kShared.barriers + 8 * i; }
  __device__ __forceinline__ unsigned full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ unsigned empty(int stage) const { return barrier(Half::kStages + stage); }
  __device__ __forceinline__ unsigned maxima_full(int stage) const { return barrier(2 * Half::kStages + stage); }
  __device__ __forceinline__ unsigned weights_full() const { return barrier(3 * Half::kStages); }
  __device__ __forceinline__ unsigned weights_empty() const { return barrier(3 * Half::kStages + 1); }
  __device__ __forceinline__ unsigned task_full(int slot) const { return barrier(3 * Half::kStages + 2 + slot); }
  __device__ __forceinline__ unsigned task_empty(int slot) const {
    return barrier(3 * Half::kStages + 2 + kernels::kTaskSlots + slot);
  }
};

}  // namespace attune::mla
