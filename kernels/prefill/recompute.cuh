// SPDX-License-Identifier: Apache-2.0
// Recomputes rows with non-finite outputs. P is 0 if a row of the block may not see a key, but 0 times a NaN or
// infinite V is NaN. Such rows are recomputed key by key, from visible keys alone. This is slow, and needed only if V
// has such values, if scores rise by more than fp32 holds from one key tile to the next, or if they are beyond 2^24.
#pragma once

#include "prefill/epilogue_store.cuh"
#include "prefill/strided.cuh"

namespace attune::prefill {

class NonfiniteRows {
 public:
  // Whether row_sum is tested too. With a deferred max finite P may have an infinite sum; P in e4m3 is always finite.
  static constexpr bool kLooksAtSum = Config::kFp8 || Config::kDeferredMax || Config::kDeferredMaxSoftcap;

  // Finds the thread's rows with a non-finite output, with a non-finite row_sum if O may be finite beside it, or with
  // large scores. Called after the mainloop.
  __device__ __forceinline__ explicit NonfiniteRows(const Rows& rows, const Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float probe[4] = {};
#pragma unroll
      for (int i = 0; i < Config::kChannels / 4; ++i)  // NaN if one is not finite
        probe[i % 4] = fmaf(a.o[i / 2 * 4 + 2 * h + i % 2], 0.0f, probe[i % 4]);
      if constexpr (kLooksAtSum) probe[0] = fmaf(a.row_sum[h], 0.0f, probe[0]);
      probe[1] += common::nan_if_large(a.row_max[h]);
      nonfinite_[h] = rows.token[h] >= 0 && (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f;
    }
  }

  // Called by all lanes of the warp after the work tile, or its split, was stored. Overwrites the recomputed rows.
  __device__ __forceinline__ void recompute(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                            const Rows& rows) const {
    if (!__any_sync(0xffffffffu, nonfinite_[0] || nonfinite_[1])) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      for (int row = 0; row < 8; ++row) {
        bool any = false;
        for (int lane = 0; lane < 4; ++lane)
          any |= __shfl_sync(0xffffffffu, nonfinite_[h] ? 1 : 0, 4 * row + lane) != 0;
        if (any) recompute_row(p, t, head_tile, rows, h, row);
      }
    }
  }

 private:
  static constexpr int kVectors = (Config::kChannels + 31) / 32;

  // A row of K or V; data null: its page does not exist.
  struct KeyRow {
    const char* data;
    int dtype;
    common::RowScale scale;
    __device__ __forceinline__ float at(int channel) const {
      return common::load_element(dtype, data, channel) * scale.at(channel);
    }
  };
  __device__ __forceinline__ static KeyRow row_at(const WorkTileParams& p, const WorkTile& t, int key, int head,
                                                  bool values) {
    if (!Config::kCached || key >= t.num_cached) {
      const kernels::NewRows& rows = values ? p.new_v : p.new_k;
      return {rows.data + (t.batch * rows.batch_stride + (t.kv_row + key - t.num_cached) * rows.row_stride +
                           head * rows.head_stride) *
                              common::element_size(Config::kType),
              Config::kType, {code_scale(p, values)}};
    }
    const kernels::KvPlane& plane = values ? p.v : p.k;
    const Slot s = find_slot(p, t.batch, key, values);
    if (!page_exists(p, s.page)) return {nullptr, Config::kCacheType, {0.0f}};
    return {plane.data + s.page * plane.page_stride + s.slot * plane.slot_stride + head * plane.head_stride,
            Config::kCacheType, Config::kCacheTypeDiffers ? scale_of(p, t, head, key, values) : common::RowScale{1.0f}};
  }

  __device__ __forceinline__ static float element(const WorkTileParams& p, const WorkTile& t, int key, bool values,
                                                  const KeyRow& row, int channel) {
    if constexpr (Config::kFp32 || Config::kXpacked) {
      const bool cached = Config::kCached && key < t.num_cached;
      const Strided strides = cached ? Strided::of(values ? p.v : p.k) : Strided::of(values ? p.new_v : p.new_k);
      return common::load_element(row.dtype, row.data, strides.offset(channel)) * row.scale.at(channel);
    } else {
      return row.at(channel);
    }
  }

  __device__ __forceinline__ static bool sees(const WorkTileParams& p, const Rows& rows, const Rows::Terms& terms,
                                              int position, int first, int end, int key) {
    bool visible = first <= key && key < end;
    for (int i = 0; common::kMayHaveRanges && i < p.num_ranges; ++i) {
      const common::Range range = common::range_at(p, rows.batch, i);
      visible |= common::holds(range, position) && range.first <= key && key <= range.last;
    }
    if constexpr (Rows::KeyMask::kAny) visible = visible && rows.key_mask.sees(p, terms.query, terms.head, key);
    return visible;
  }

  __device__ __forceinline__ static void recompute_row(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                                       const Rows& rows, int h, int row) {
    const int lane = threadIdx.x % 32, kv_head = head_tile * p.heads_of_tile / p.group;
    const auto of_row = [&](auto x) { return __shfl_sync(0xffffffffu, x, 4 * row); };
    Rows::Terms terms = rows.terms(h);
    terms = {of_row(terms.head), of_row(terms.query), rows.before, of_row(terms.slope)};
    const int token = terms.query, head = terms.head, position = terms.before + token, first = of_row(rows.first[h]),
              end = of_row(rows.end[h]);
    const char* q = p.q + common::row_offset(p, t.batch, t.q_begin, token, head, p.q_batch_stride, p.q_row_stride,
                                             p.q_head_stride) *
                              common::element_size(Config::kType);
    const Tiles tiles(t.num_cached, t.first_key, t.end_key);
    float o[kVectors] = {}, row_max = -ptx::infinity(), row_sum = 0;
    for (int i = t.tile_begin; i < t.tile_end; ++i) {
      const Tile tile = tile_at(t, tiles, i);
      for (int begin = tile.low; begin < tile.high; begin += 32) {
        const int key = begin + lane;
        const bool visible = key < tile.high && sees(p, rows, terms, position, first, end, key);
        KeyRow k{nullptr, Config::kType, {0.0f}};
        if (visible) k = row_at(p, t, key, kv_head, false);
        if (Config::kCached && visible && key < t.num_cached && !has_value(p, t.batch, key)) k.data = nullptr;
        float s = -ptx::infinity();
        if (k.data != nullptr) {
          s = 0;
          for (int d = 0; d < Config::kHeadDimQk; ++d)
            s = fmaf(common::load_element(Config::kType, q, Config::kFp32 ? d * p.q_dim_stride : d),
                     element(p, t, key, false, k, d), s);
          s = Rows::score_of(p, s, terms, key, static_cast<float>(position - key));
          if (s == -ptx::infinity()) k.data = nullptr;  // P is 0, so V must not count either
        }
        const float new_max = common::max_of_lanes(fmaxf(row_max, s));
        const float row_max_ref = finite_row_max(new_max), rescale = ptx::exp2_approx(row_max - row_max_ref);
        const float own_p = ptx::exp2_approx(s - row_max_ref);
        row_max = new_max;
        row_sum *= rescale;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) o[v] *= rescale;
        for (int j = 0; j < min(32, tile.high - begin); ++j) {
          const float key_p = __shfl_sync(0xffffffffu, own_p, j);
          if (__shfl_sync(0xffffffffu, k.data != nullptr ? 1 : 0, j) == 0) continue;
          const KeyRow value = row_at(p, t, begin + j, kv_head, true);
          row_sum += key_p;
          if (value.data == nullptr) continue;
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const int channel = 32 * v + lane;
            if (channel < Config::kHeadDimV) o[v] = fmaf(key_p, element(p, t, begin + j, true, value, channel), o[v]);
          }
        }
      }
    }
    if (t.num_splits > 1) {
      const long long at = split_row(p, t, head_tile, t.split_idx) + row_of_thread() - lane / 4 + row + 8 * h;
      if (lane == 0) *reinterpret_cast<float2*>(p.partial_stats + 2 * at) = make_float2(row_max, row_sum);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) p.partial_out[at * Config::kChannels + 32 * v + lane] = o[v];
      return;
    }
    float factor = 0;
    if (lane == 0) factor = common::finish_row(p, t.batch, t.q_begin, token, head, row_max, row_sum);
    factor = __shfl_sync(0xffffffffu, factor, 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (32 * v + lane < Config::kHeadDimV)
        common::store_element(Config::kOutType, p.out, out_at(p, t, token, head) + (32 * v + lane) * p.out_dim_stride,
                              o[v] * factor);
    }
  }

  bool nonfinite_[2];
};

}  // namespace attune::prefill
