// SPDX-License-Identifier: Apache-2.0
// Recomputes rows that are not finite. P is 0 for a key that one row of an M block sees and another does not; if its
// value is NaN or infinite, 0 * value makes the other row NaN. Such rows are recomputed key by key, from the keys that
// they see: slow, but only needed for such values. Sparse attention does not need it, because all rows of an M block
// see the same keys.
#pragma once

#include "mla/m64/epilogue.cuh"
#include "mla/producers/kv_source.cuh"
#include "mla/query_row.cuh"

namespace attune::mla {

class RecomputeNonfinite {
 public:
  // Finds the thread's rows that are not finite. nonfinite: of a partial output, from its bounds.
  __device__ __forceinline__ RecomputeNonfinite(const Rows& rows, const Accumulators& a, bool is_split,
                                                const bool (&nonfinite)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) nonfinite_[h] = false;
    if (Config::kSparse) return;
    if (kFp16Partials && is_split) {
#pragma unroll
      for (int h = 0; h < 2; ++h) nonfinite_[h] = rows.token(h) >= 0 && nonfinite[h];
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float probe[4] = {};
#pragma unroll
      for (int i = 0; i < Config::kChannels / 4; ++i)  // NaN if one is not finite
        probe[i % 4] = fmaf(a.o[i / 2 * 4 + 2 * h + i % 2], 0.0f, probe[i % 4]);
      nonfinite_[h] = rows.token(h) >= 0 && (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f;
    }
  }

  // Called by all lanes of the warp, after the work tile's rows are stored. Overwrites the rows that are not finite.
  __device__ __forceinline__ void operator()(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                             const Rows& rows) const {
    if constexpr (!Config::kSparse) {
      if (!__any_sync(0xffffffffu, nonfinite_[0] || nonfinite_[1])) return;
#pragma unroll 1
      for (int row = 0; row < 16; ++row) {
        bool any = false;
#pragma unroll 1
        for (int lane = 0; lane < 4; ++lane)
          any |= __shfl_sync(0xffffffffu, (row < 8 ? nonfinite_[0] : nonfinite_[1]) ? 1 : 0, row % 8 * 4 + lane) != 0;
        if (any) recompute_row(p, t, head_tile, static_cast<int>(threadIdx.x) / 32 % 4 * 16 + row);
      }
    }
  }

 private:
  // A lane's channels of the warpgroup's half: every 32nd.
  static constexpr int kChannelsOfLane = Config::kChannels / 32;

  // row: in the M block.
  __device__ __forceinline__ static void recompute_row(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                                       int row) {
    const int lane = threadIdx.x % 32, kv_head = head_tile * p.heads_of_tile / p.group, local = row / p.heads_of_tile;
    const int token = t.token_begin + local, head = head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
    const int position = t.num_keys - t.num_q + token, first = scheduler::first_visible(p, position),
              end = scheduler::end_visible(p, t.num_keys, position);
    const KeyTiles key_tiles(t.num_cached, t.first_key, t.end_key);
    KeyMask key_mask;
    if constexpr (KeyMask::kAny) key_mask.start(p, t.batch, t.q_begin);
    float o[kChannelsOfLane] = {}, row_max = -ptx::infinity(), row_sum = 0;
#pragma unroll 1
    for (int i = t.tile_begin; i < t.tile_end; ++i) {
      const Tile tile = tile_at(t, key_tiles, i);
      const KvSource source(p, t, kv_head, tile);
      const bool quantized = Config::kDequant && tile.cached;
#pragma unroll 1
      for (int key = max(tile.low, first); key < min(tile.high, end); ++key) {
        if constexpr (KeyMask::kAny) {
          if (!key_mask.sees(p, token, head, key)) continue;
        }
        const int index = source.load_index(key);
        const char* const at = source.locate(key, index);
        if (at == nullptr) continue;
        float s = 0;
#pragma unroll 1
        for (int d = lane; d < Config::kHeadDimQk; d += 32)
          s = fmaf(query_channel(p, t, token, head, d), load_channel(source, key, index, at, quantized, d), s);
        s = common::sum_of_lanes(s) * (p.scale * kLog2e);
        if (s == -ptx::infinity()) continue;  // P is 0, so the value does not count
        const float new_row_max = fmaxf(row_max, s), row_max_ref = finite_row_max(new_row_max);
        const float rescale = ptx::exp2_approx(row_max - row_max_ref), p_key = ptx::exp2_approx(s - row_max_ref);
        row_max = new_row_max;
        row_sum = row_sum * rescale + p_key;
#pragma unroll 1
        for (int j = 0; j < kChannelsOfLane; ++j) {
          const float v =
              load_channel(source, key, index, at, quantized, consumer_warpgroup() * Config::kChannels + 32 * j + lane);
#pragma unroll
          for (int k = 0; k < kChannelsOfLane; ++k) o[k] = k == j ? o[k] * rescale + p_key * v : o[k];
        }
      }
    }
    if (t.num_splits > 1) {
      const int unit = partial_idx(p, t, head_tile), group = consumer_warpgroup();
      float factor[kScalesOfHalf];
      unsigned inverses = 0;
      if constexpr (kFp16Partials) {
#pragma unroll
        for (int k = 0; k < kScalesOfHalf; ++k) {  // a lane has two elements of each scale
          const float largest = common::max_of_lanes(fmaxf(magnitude(o[2 * k]), magnitude(o[2 * k + 1])));
          const unsigned exponent = max(__float_as_uint(fmaxf(largest, 0.0f)) >> 23, kLeastExponent);
          factor[k] = factor_of(exponent);
          inverses |= exponent - kToInverse << 8 * k;
        }
      }
      if (lane == 0) {
        *reinterpret_cast<float4*>(partial_stats_at(p.partial_stats, unit, row, group)) =
            make_float4(row_max, row_sum, 1, __uint_as_float(inverses));
      }
      char* const to =
          partial_out_at(p.partial_out, unit, row, group * Config::kChannels + (lane & ~1)) + lane % 2 * kPartialBytes;
#pragma unroll
      for (int j = 0; j < kChannelsOfLane; ++j) {  // 32 channels further
        if constexpr (kFp16Partials) {
          *reinterpret_cast<unsigned short*>(to + 1024 * j) =
              static_cast<unsigned short>(ptx::pack_f16(o[j] * factor[j / 2], 0));
        } else {
          *reinterpret_cast<float*>(to + 2048 * j) = o[j];
        }
      }
      return;
    }
    float factor = 0;
    if (lane == 0)
      factor = common::finish_row(p, t.batch, t.q_begin, token, head, row_max, row_sum, consumer_warpgroup() == 0);
    factor = __shfl_sync(0xffffffffu, factor, 0);
#pragma unroll
    for (int j = 0; j < kChannelsOfLane; ++j) {
      common::store_element(
          Config::kOutType, p.out,
          out_at(p, t, token, head) + (consumer_warpgroup() * Config::kChannels + 32 * j + lane) * p.out_dim_stride,
          o[j] * factor);
    }
  }

  bool nonfinite_[2];
};

}  // namespace attune::mla
