// SPDX-License-Identifier: Apache-2.0
// Dequantizes tiles of an 8-bit cache. Each thread copies chunks of 16 codes to shared memory one tile ahead, and later
// converts the same chunks to 16-bit rows, between the mma instructions of the GEMMs. So no barrier is added, and the
// tensor cores do not wait. Scales are applied elsewhere, so the 16-bit numbers are exact.
#pragma once

#include "prefill/mma/mainloop.cuh"
#include "prefill/mma/producer.cuh"

namespace attune::prefill_mma {

// A tile of K, or of V.
template <bool kValues>
struct DequantTile {
  static constexpr int kHeadDim = kValues ? Config::kHeadDimV : Config::kHeadDimQk;
  static constexpr int kChunksOfRow = kHeadDim / 16, kWarpChunks = kWarpRows * kChunksOfRow;  // of a row; of a warp
  static constexpr int kSteps = (kWarpChunks + 31) / 32;                                      // chunks of a thread
  static constexpr int kTo = kValues ? Config::kCodeTypeV : Config::kType;
  // A row is a channel, and its one chunk has the codes of the warp's keys (xpacked.cuh).
  static constexpr bool kByChannels = kValues && Config::kXpacked;
  using Layout = common::RowLayout<kernels::mma_chunks(kByChannels ? Config::kKeys : kHeadDim)>;
  // Eight lanes that store 16 bytes each take four chunks of each of two rows, which lie in different banks.
  static constexpr bool kPairsRows = kChunksOfRow % 4 == 0;
  // From step to step a thread goes down by kRowsOn rows; 0: no such pattern.
  static constexpr int kRowsOn = kByChannels                                                        ? 32
                                 : kPairsRows && 32 % (2 * kChunksOfRow) == 0 && Layout::kSwizzled ? 32 / kChunksOfRow
                                                                                                   : 0;
  static_assert(!kByChannels || kWarpRows == 16, "a warp's keys are a chunk of each channel");

  __device__ __forceinline__ static Chunk chunk_of(int lane, int step) {
    const int i = lane + step * 32;
    if (kByChannels) return {i, 0};
    if (!kPairsRows) return {i / kChunksOfRow, i % kChunksOfRow};
    return {i / (2 * kChunksOfRow) * 2 + i / 4 % 2, i % 4 + 4 * (i / 8 % (kChunksOfRow / 4))};
  }
  __device__ __forceinline__ static bool has(const WarpRows& here, int step) {
    return (step + 1) * 32 <= kWarpChunks || here.lane + step * 32 < kWarpChunks;
  }
  // Where a chunk's codes are in shared memory.
  __device__ __forceinline__ static unsigned codes_at(const WarpRows& here, int step, unsigned codes) {
    return codes + 16 * (here.first_row * kChunksOfRow + here.lane + step * 32);
  }

  template <class FindTile>
  __device__ __forceinline__ static void copy(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                              const FindTile& tile_at, int kv_head, const SharedStorage& shared,
                                              unsigned codes) {
    const auto copy_chunk = [&](const WarpRows& here, int step, const char* from, bool there) {
      if (has(here, step)) ptx::copy_async<16>(codes_at(here, step, codes), from, there ? 16 : 0);
    };
    if constexpr (Config::kXpacked) {
      copy_xpacked_chunks<kValues, kSteps>(p, t, i, steady, tile_at, kv_head, shared, chunk_of, copy_chunk);
    } else if (kRowsOn > 0 && steady) {
      copy_steady_chunks<kValues, kSteps, kRowsOn>(p, shared, i, chunk_of, copy_chunk);
    } else {
      copy_chunks<kValues, kSteps, kRowsOn>(p, t, tile_at(i), kv_head, shared, chunk_of, copy_chunk);
    }
  }

  // Converts the chunks that this thread copied (and has waited for), 8 numbers at a time. That takes few registers, so
  // the compiler places these instructions between those of a GEMM.
  struct Conversion {
    WarpRows here;
    unsigned words[4];  // codes of the current chunk

    // load() reads the codes of half chunk i, store() writes its numbers.
    __device__ __forceinline__ void load(int i, unsigned codes) {
      if (i % 2 == 0 && has(here, i / 2)) ptx::load_shared_four(codes_at(here, i / 2, codes), words);
    }
    __device__ __forceinline__ void store(int i, unsigned to) const {
      const int step = i / 2, half = i % 2;
      if (!has(here, step)) return;
      unsigned numbers[4];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        common::quad_to_operands<Config::kCacheType, kTo>(words[2 * half + j], numbers[2 * j], numbers[2 * j + 1]);
      const Chunk mine = chunk_of(here.lane, kRowsOn > 0 ? 0 : step);
      unsigned at = to + (kByChannels ? Layout::offset(mine.row, here.first_row / 8)
                                      : Layout::offset(here.first_row + mine.row, 2 * mine.number));
      if constexpr (kRowsOn > 0) at = Layout::rows_down(at, step * kRowsOn);
      ptx::store_shared_four(Layout::chunks_on(at, half), numbers);
    }
    // Runs overlap step `step` of kOverlapSteps of a GEMM.
    template <int kOverlapSteps>
    __device__ __forceinline__ void overlap(int step, unsigned codes, unsigned to) {
      constexpr int kChunks = 2 * kSteps, kLoadLead = kOverlapSteps / kChunks * 3 / 4;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i * kOverlapSteps / kChunks == step) load(i, codes);
        if (i * kOverlapSteps / kChunks + kLoadLead == step) store(i, to);
      }
    }
  };
  __device__ __forceinline__ static void convert(unsigned codes, unsigned to) {
    Conversion conversion{warp_rows(), {}};
    conversion.template overlap<1>(0, codes, to);
  }
};

// Copies the scale of a row of this warp, or of its value, to shared memory; 1 if there is none.
template <bool kValues>
__device__ __forceinline__ void copy_scale(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                           const SharedStorage& shared, int row, float* to) {
  const KvScale& scale = kValues ? p.v_scale : p.k_scale;
  if (!tile.cached || scale.mode == ScaleMode::kNone) {
    *to = 1.0f;
    return;
  }
  bool there = tile.start + row >= tile.low && tile.start + row < tile.high;
  const float* from = scale.data;
  if (scale.mode == ScaleMode::kHead) from += kv_head * scale.head_stride;
  if (there && scale.by_token()) {
    const common::Slot s = find_row(p, t, tile, shared, row, kValues);
    there = s.page >= 0;
    if (there) from = scale.at(s.page, s.slot, kv_head);
  }
  ptx::copy_async<4>(ptx::shared_address(to), from, there ? 4 : 0);
}
// The same of a steady tile.
__device__ __forceinline__ void copy_steady_scale(const WorkTileParams& p, const SharedStorage& shared, int i,
                                                  int row, bool values, float* to) {
  const KvScale& scale = values ? p.v_scale : p.k_scale;
  if (scale.mode == ScaleMode::kNone) {
    *to = 1.0f;
    return;
  }
  const int page = steady_page(shared, row & -kWarpRows);
  const bool by_token = scale.by_token(), there = !by_token || common::page_exists(p, page);
  const long long of_head = scale.mode == ScaleMode::kTensor ? 0 : shared.kv_head * scale.head_stride;
  const int slot = steady_key(shared, i, row) & shared.steady.slot_mask;
  const float* from = scale.data + of_head;
  if (by_token && there) from += page * scale.page_stride + slot * scale.slot_stride;
  ptx::copy_async<4>(ptx::shared_address(to), from, there ? 4 : 0);
}
// Copies the scales of a warp's rows of tile i: of K by the first kWarpRows lanes, of V by the next.
template <class Storage, class FindTile>
__device__ __forceinline__ void copy_scales(const WorkTileParams& p, const WorkTile& t, int i, bool steady,
                                            const FindTile& tile_at, int kv_head, Storage& shared) {
  const WarpRows here = warp_rows();
  const int row = here.first_row + here.lane % kWarpRows;
  const bool values = here.lane >= kWarpRows;
  if (here.lane >= 2 * kWarpRows) return;
  float* const to = (values ? shared.v_scales[i % 2] : shared.k_scales) + row;
  if (steady) {
    copy_steady_scale(p, shared, i, row, values, to);
  } else if (values) {
    copy_scale<true>(p, t, tile_at(i), kv_head, shared, row, to);
  } else {
    copy_scale<false>(p, t, tile_at(i), kv_head, shared, row, to);
  }
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < ptx::infinity(); }

// P = 0 times a scale that is not finite would be NaN. Such a scale is replaced by 1, and the values are multiplied by
// it instead (apply_nonfinite_scales), so that they count as nonfinite values. Token scales are replaced by the thread
// that copied them.
__device__ __forceinline__ bool replace_nonfinite_scale(float* v_scales) {
  const WarpRows here = warp_rows();
  if (here.lane < kWarpRows || here.lane >= 2 * kWarpRows) return false;
  float& mine = v_scales[here.first_row + here.lane - kWarpRows];
  if (is_finite(mine)) return false;
  mine = 1.0f;
  return true;
}
// A block barrier that also tells all threads whether a value of the tile has a nonfinite scale.
template <class Storage>
__device__ __forceinline__ bool sync_any_nonfinite_scale(Storage& shared, bool cached, int buffer) {
  if constexpr (Config::kTokenScales) {
    return __syncthreads_or(replace_nonfinite_scale(shared.v_scales[buffer]) ? 1 : 0) != 0;
  } else {
    __syncthreads();
    return cached && shared.v_scale_is_nonfinite;
  }
}
__device__ __forceinline__ void apply_nonfinite_scales(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                                       int kv_head, unsigned v) {
  constexpr int kTo = Config::kCodeTypeV, kChunks = kernels::mma_chunks(Config::kHeadDimV);
  const int row = static_cast<int>(threadIdx.x), key = tile.start + row;
  if (row < Config::kKeys && key >= tile.low && key < tile.high) {
    const float scale = common::scale_of(p, t, kv_head, key, true).all;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks && !is_finite(scale); ++chunk) {
      unsigned x[4];
      load_value<Config::kXpacked>(v, row, chunk, x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = common::pack<kTo>(scale * common::low_half<kTo>(x[i]), scale * common::high_half<kTo>(x[i]));
      store_value<Config::kXpacked>(v, row, chunk, x);
    }
  }
  __syncthreads();
}

// O of the cached keys is relative to the scale of V until the last cached tile.
__device__ __forceinline__ void scale_o(float by, State& state) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int c = 0; c < 2 * Config::kBlocksV; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.o[m][c][j] *= by;
    }
  }
}

// Stores what the mainloop reads in each tile: the scales that all keys of a head share, and the softmax's threshold.
template <class Storage>
__device__ __forceinline__ void store_constants(const WorkTileParams& p, const WorkTile& t, Storage& shared) {
  find_steady_tiles(p, t, shared);
  if constexpr (Config::kQuantized) shared.threshold = p.max_logits != nullptr ? 0.0f : Config::kRescaleThreshold;
  if constexpr (Config::kQuantized && !Config::kTokenScales) {
    shared.k_scale = common::scale_of(p, t, shared.kv_head, 0, false).all;
    const float v_scale = common::scale_of(p, t, shared.kv_head, 0, true).all;
    shared.v_scale_is_nonfinite = !is_finite(v_scale);
    shared.v_scale = is_finite(v_scale) ? v_scale : 1.0f;
  }
}
template <class Storage>
__device__ __forceinline__ unsigned v_scales_of(Storage& shared, int buffer) {
  if constexpr (Config::kTokenScales) return ptx::shared_address(shared.v_scales[buffer]);
  return 0;
}
template <class Storage>
__device__ __forceinline__ unsigned q_address(Storage& shared) {
  if constexpr (Config::kQInRegisters) {
    return ptx::shared_address(shared.k);
  } else {
    return ptx::shared_address(shared.q);
  }
}

}  // namespace attune::prefill_mma
