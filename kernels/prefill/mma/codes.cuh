// SPDX-License-Identifier: Apache-2.0
// Tiles of an 8-bit cache. Each thread copies pieces of 16 codes to places of its own, a tile ahead, and converts them
// to rows of 16 bits beside the products: no barrier is added, and the tensor cores do not wait. Scales are applied
// elsewhere, so the numbers are exact.
#pragma once

#include "prefill/mma/mainloop.cuh"
#include "prefill/mma/producer.cuh"

namespace attune::prefill_mma {

// Of K, or of V.
template <bool kValues>
struct CodeTile {
  static constexpr int kHeadDim = kValues ? Config::kHeadDimV : Config::kHeadDimQk;
  static constexpr int kPiecesOfRow = kHeadDim / 16, kPieces = Config::kKeys * kPiecesOfRow;
  static constexpr int kSteps = (kPieces + Config::kThreads - 1) / Config::kThreads;  // pieces of a thread
  static constexpr int kTo = kValues ? Config::kCodeTypeV : Config::kType;
  using Layout = common::RowLayout<kernels::mma_chunks(kHeadDim)>;
  // Eight lanes that store 16 bytes each take four pieces of two rows, whose chunks lie in other banks.
  static constexpr bool kPairsRows = kPiecesOfRow % 4 == 0;
  // From step to step a thread goes down by kRowsOn rows.
  static constexpr bool kSteady = kPairsRows && Config::kThreads % (2 * kPiecesOfRow) == 0 && Layout::kSwizzled;
  static constexpr int kRowsOn = Config::kThreads / kPiecesOfRow;

  struct Piece {
    int row, number;  // of the row
  };
  __device__ __forceinline__ static Piece piece(int i) {
    if constexpr (!kPairsRows) return {i / kPiecesOfRow, i % kPiecesOfRow};
    return {i / (2 * kPiecesOfRow) * 2 + i / 4 % 2, i % 4 + 4 * (i / 8 % (kPiecesOfRow / 4))};
  }
  __device__ __forceinline__ static int index(int step) {
    return static_cast<int>(threadIdx.x) + step * Config::kThreads;
  }
  __device__ __forceinline__ static bool has(int step) {
    return (step + 1) * Config::kThreads <= kPieces || index(step) < kPieces;
  }

  __device__ __forceinline__ static void copy(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                              unsigned codes) {
    const long long slot_stride = kValues ? p.v.slot_stride : p.k.slot_stride;
    if (kSteady && (p.paged == 0 || (p.page_shift >= 0 && 1 << p.page_shift >= Config::kKeys))) {
      const PageRows rows = find_page<kValues>(p, t, tile, kv_head);
      const Piece mine = piece(static_cast<int>(threadIdx.x));
      const char* from = rows.first + mine.row * slot_stride + mine.number * 16;
      const unsigned row = mine.row - (tile.low - tile.start);
#pragma unroll
      for (int step = 0; step < kSteps; ++step, from += kRowsOn * slot_stride) {
        if (!has(step)) break;
        ptx::copy_async<16>(codes + 16 * index(step), from, row + step * kRowsOn < rows.count ? 16 : 0);
      }
      return;
    }
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      if (!has(step)) break;
      const Piece mine = piece(index(step));
      const char* from;
      const bool there = find_row<kValues>(p, t, tile, kv_head, tile.start + mine.row, from);
      ptx::copy_async<16>(codes + 16 * index(step), there ? from + mine.number * 16 : from, there ? 16 : 0);
    }
  }

  // Converts the pieces that this thread copied, and has waited for.
  __device__ __forceinline__ static void convert_step(int step, unsigned codes, unsigned to) {
    if (!has(step)) return;
    unsigned words[4], numbers[8];
    ptx::load_shared_four(codes + 16 * index(step), words);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      common::quad_to_operands<Config::kCacheType, kTo>(words[i], numbers[2 * i], numbers[2 * i + 1]);
    unsigned at;
    if constexpr (kSteady) {
      const Piece mine = piece(static_cast<int>(threadIdx.x));
      at = Layout::rows_down(to + Layout::offset(mine.row, 2 * mine.number), step * kRowsOn);
    } else {
      const Piece mine = piece(index(step));
      at = to + Layout::offset(mine.row, 2 * mine.number);
    }
    ptx::store_shared_four(at, numbers);
    ptx::store_shared_four(Layout::chunks_on(at, 1), numbers + 4);
  }
  __device__ __forceinline__ static void convert(unsigned codes, unsigned to) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) convert_step(step, codes, to);
  }
  // The same, spread over places of a product.
  template <int kPlaces>
  __device__ __forceinline__ static void convert_beside(int place, unsigned codes, unsigned to) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step * kPlaces / kSteps == place) convert_step(step, codes, to);
    }
  }
};

// The scale of a key of the tile, or of its value, to its place in shared memory; 1 where there is none.
template <bool kValues>
__device__ __forceinline__ void copy_scale(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                           int key, float* to) {
  const kernels::KvScale& scale = kValues ? p.v_scale : p.k_scale;
  if (!tile.cached || scale.mode == ScaleMode::kNone) {
    *to = 1.0f;
    return;
  }
  bool there = key >= tile.low && key < tile.high;
  const float* from = scale.data;
  if (scale.mode == ScaleMode::kHead) from += kv_head * scale.head_stride;
  if (there && scale.by_token()) {
    const common::Slot s = common::find_slot(p, t.batch, key, kValues);
    there = common::is_there(p, s.page);
    if (there) from = scale.at(s.page, s.slot, kv_head);
  }
  ptx::copy_async<4>(ptx::shared_address(to), from, there ? 4 : 0);
}
// Of all keys of a tile: of K by the first kKeys threads, of V by the next. buffer: V's.
template <class Storage>
__device__ __forceinline__ void copy_scales(const WorkTileParams& p, const WorkTile& t, const Tile& tile, int kv_head,
                                            int buffer, Storage& shared) {
  const int key = static_cast<int>(threadIdx.x) % Config::kKeys;
  if (threadIdx.x < Config::kKeys) {
    copy_scale<false>(p, t, tile, kv_head, tile.start + key, shared.k_scales + key);
  } else if (threadIdx.x < 2 * Config::kKeys) {
    copy_scale<true>(p, t, tile, kv_head, tile.start + key, shared.v_scales[buffer] + key);
  }
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < ptx::infinity(); }

// P = 0 times a scale that is not finite would be NaN. 1 takes its place, and the values are multiplied instead
// (multiply_by_odd_scales): they are special then. Of tokens the thread that copied a scale does so.
__device__ __forceinline__ bool take_odd_scale(float* v_scales) {
  if (threadIdx.x < Config::kKeys || threadIdx.x >= 2 * Config::kKeys) return false;
  float& mine = v_scales[threadIdx.x - Config::kKeys];
  if (is_finite(mine)) return false;
  mine = 1.0f;
  return true;
}
// A barrier of the block, at which all learn whether a value of the tile has an odd scale.
template <class Storage>
__device__ __forceinline__ bool meet_odd_scales(Storage& shared, const Tile& tile, int buffer) {
  if constexpr (Config::kTokenScales) {
    return __syncthreads_or(take_odd_scale(shared.v_scales[buffer]) ? 1 : 0) != 0;
  } else {
    __syncthreads();
    return tile.cached && shared.v_is_odd;
  }
}
__device__ __forceinline__ void multiply_by_odd_scales(const WorkTileParams& p, const WorkTile& t, const Tile& tile,
                                                       int kv_head, unsigned v) {
  constexpr int kTo = Config::kCodeTypeV, kChunks = kernels::mma_chunks(Config::kHeadDimV);
  const int row = static_cast<int>(threadIdx.x), key = tile.start + row;
  if (row < Config::kKeys && key >= tile.low && key < tile.high) {
    const float scale = common::scale_of(p, t, kv_head, key, true);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks && !is_finite(scale); ++chunk) {
      unsigned x[4];
      const unsigned at = v + Config::LayoutV::offset(row, chunk);
      ptx::load_shared_four(at, x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = common::pack<kTo>(scale * common::low_half<kTo>(x[i]), scale * common::high_half<kTo>(x[i]));
      ptx::store_shared_four(at, x);
    }
  }
  __syncthreads();
}

// O of the cached keys is relative to the scale of V until the last of them.
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

// What the loop over tiles reads again and again: scales of all keys of a head, and the softmax's threshold.
template <class Storage>
__device__ __forceinline__ void store_constants(const WorkTileParams& p, const WorkTile& t, Storage& shared) {
  if constexpr (Config::kQuantized) shared.threshold = p.max_logits != nullptr ? 0.0f : Config::kRescaleThreshold;
  if constexpr (Config::kQuantized && !Config::kTokenScales) {
    shared.k_scale = common::scale_of(p, t, shared.kv_head, 0, false);
    const float v_scale = common::scale_of(p, t, shared.kv_head, 0, true);
    shared.v_is_odd = !is_finite(v_scale);
    shared.v_scale = is_finite(v_scale) ? v_scale : 1.0f;
  }
}
template <class Storage>
__device__ __forceinline__ const float* v_scales_of(Storage& shared, int buffer) {
  if constexpr (Config::kTokenScales) return shared.v_scales[buffer];
  return nullptr;
}
template <class Storage>
__device__ __forceinline__ unsigned place_of_queries(Storage& shared) {
  if constexpr (Config::kHoldsQ) {
    return ptx::shared_address(shared.k);
  } else {
    return ptx::shared_address(shared.q);
  }
}

}  // namespace attune::prefill_mma
