// SPDX-License-Identifier: Apache-2.0
// Rows of a cache to dense rows: dequantise, gather.
//
// Maths. x = code * scale in fp32, rounded once to the dense type; a token that the cache does not hold is zeros.
//
// Tiles and order as in store.cu, without anything that threads of a row must tell each other: one thread a token finds
// its slots, then every thread loads its runs of ATTUNE_ROWS rows, and only then decodes and stores them.
#include "ptx/grid.cuh"
#include "rows/plane.cuh"
#include "rows/tokens.cuh"
#include "tile/kv_codec.cuh"

namespace attune::rows {

using kernels::FetchParams;
using tile::RawRun;
using tile::Unit;

struct TokenPlace {
  Slot k, v;  // page -1: nowhere
  int written;
};

__device__ __forceinline__ TokenPlace place_of(const FetchParams& p, long long row, const Owner& owner) {
  TokenPlace place{};
  place.k.page = place.v.page = -1;
  if (p.tokens.by_slots) {
    place.written = 1;
    const long long slot = p.tokens.slots != nullptr ? p.tokens.slots[row * p.tokens.slot_stride] : row;
    place.k = place.v = slot_of_number(p.cache, slot);
    return place;
  }
  if (owner.sequence < 0) return place;
  const long long used = at(p.tokens.seqused, owner.sequence), ring = p.cache.ring_capacity;
  if (owner.index >= used || (ring == 0 && owner.index >= p.cache.capacity)) return place;
  place.written = 1;
  if (ring > 0 && owner.index < used - ring) return place;
  const SlotPair slots = slots_of_position(p.cache, owner.sequence, owner.index);
  place.k = slots.k;
  place.v = p.v.data != nullptr ? slots.v : slots.k;
  return place;
}

struct Row {
  int token, of_v, head;  // token -1: none
  float scale[kUnits][2];
  RawRun<kWidth> raw[kUnits][2];
};

__device__ __forceinline__ Unit unit_of(const FetchParams& p, bool of_v, int lane, int u, bool& exists) {
  const int dim = of_v ? p.head_dim_v : p.head_dim_qk, index = u * kLanes + lane;
  exists = index < tile::num_units<kWidth>(0, dim);
  const int first = index * 2 * kWidth, second = first + kWidth;
  return {first, second < dim ? second : -1, -1};
}

__device__ __forceinline__ bool is_rope(int channel) {
  if constexpr (kFormat == 0) return false;
  return channel >= tile::MlaRow < kFormat == 584 ? 584 : 656 > ::kNope;
}

__device__ __forceinline__ void start_run(const FetchParams& p, const Row& r, const Slot& slot, const char* row,
                                          const char* scales, int channel, RawRun<kWidth>& raw, float& scale) {
  if constexpr (kFormat == 0) {
    const RowPlane& plane = r.of_v ? p.cache.v : p.cache.k;
    raw = load(plane, type_of(kCacheType, plane.dtype), row, channel);
  } else {
    using Mla = tile::MlaRow<kFormat == 584 ? 584 : 656>;
    if (channel < Mla::kNope) {
      raw = tile::load_run<kWidth>(tile::kE4m3, row + channel, 1, kVector);
      scale = Mla::load_scale(scales, channel / Mla::kGroup);
    } else {
      raw = tile::load_halves<kWidth>(row + Mla::kRope + 2 * (channel - Mla::kNope), kVector);
    }
  }
}

__device__ __forceinline__ void start_row(const FetchParams& p, const TokenPlace* places, int index, int rows, int lane,
                                          Row& r) {
  r.token = -1;
  if (index >= rows) return;
  const int rows_of_token = p.heads * (p.v.data != nullptr ? 2 : 1);
  const int token = static_cast<unsigned>(index) / static_cast<unsigned>(rows_of_token);
  int head = index - token * rows_of_token;
  r.of_v = head >= p.heads;
  if (r.of_v) head -= p.heads;
  r.head = head;
  const TokenPlace& place = places[token];
  if (!place.written) return;
  r.token = token;
  const Slot& slot = r.of_v ? place.v : place.k;
  if (slot.page < 0) return;
  const RowPlane& plane = r.of_v ? p.cache.v : p.cache.k;
  const RowScale& row_scale = r.of_v ? p.cache.v_scale : p.cache.k_scale;
  const char* row = row_at(plane, slot.page, slot.offset, head);
  const char* scales = nullptr;
  if constexpr (kFormat != 0) {
    scales = tile::MlaRow < kFormat == 584
                 ? 584
                 : 656 > ::scales(row, row_at(plane, slot.page, 0, 0), p.cache.page_size, slot.offset);
  }
  const bool scaled = kFormat == 0 && scale_mode(row_scale) != 0;
  const float of_row = scaled ? *scale_at(row_scale, slot.page, slot.offset, head) : 1.0f;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    r.scale[u][0] = r.scale[u][1] = of_row;
    bool exists;
    const Unit unit = unit_of(p, r.of_v != 0, lane, u, exists);
    if (!exists) continue;
    start_run(p, r, slot, row, scales, unit.first, r.raw[u][0], r.scale[u][0]);
    if (unit.second >= 0) start_run(p, r, slot, row, scales, unit.second, r.raw[u][1], r.scale[u][1]);
  }
}

__device__ __forceinline__ void finish_run(const FetchParams& p, const Row& r, bool somewhere, char* row, int channel,
                                           const RawRun<kWidth>& raw, float scale) {
  const RowTensor& dense = r.of_v ? p.v : p.k;
  const RowPlane& plane = r.of_v ? p.cache.v : p.cache.k;
  const RowScale& row_scale = r.of_v ? p.cache.v_scale : p.cache.k_scale;
  float x[kWidth];
  if (somewhere) {
    if (kFormat == 0) {
      tile::decode_run<kWidth>(type_of(kCacheType, plane.dtype), raw, x);
    } else if (is_rope(channel)) {
      tile::decode_run<kWidth>(tile::kBFloat16, raw, x);
    } else {
      tile::decode_run<kWidth>(tile::kE4m3, raw, x);
    }
    if (kFormat == 0 ? scale_mode(row_scale) != 0 : !is_rope(channel)) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[k] *= scale;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] = 0;
  }
  store(dense, type_of(kRowType, dense.dtype), row, channel, x);
}

__device__ __forceinline__ void finish_row(const FetchParams& p, const TokenPlace* places, long long first,
                                           const Row& r, int lane) {
  if (r.token < 0) return;
  const TokenPlace& place = places[r.token];
  const bool somewhere = (r.of_v ? place.v : place.k).page >= 0;
  char* row = row_at(r.of_v ? p.v : p.k, 0, first + r.token, r.head);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    bool exists;
    const Unit unit = unit_of(p, r.of_v != 0, lane, u, exists);
    if (!exists) continue;
    finish_run(p, r, somewhere, row, unit.first, r.raw[u][0], r.scale[u][0]);
    if (unit.second >= 0) finish_run(p, r, somewhere, row, unit.second, r.raw[u][1], r.scale[u][1]);
  }
}

__device__ __forceinline__ void fetch_rows(const FetchParams& p) {
  __shared__ TokenPlace places[kMaxTileTokens];
  __shared__ Owner owners[kMaxTileTokens];
  const long long first = static_cast<long long>(blockIdx.x) * p.tokens.tile;
  const int count = static_cast<int>(p.tokens.total - first < p.tokens.tile ? p.tokens.total - first : p.tokens.tile);
  const bool by_table = p.tokens.cu_seqlens.data != nullptr;
  if (by_table) find_owners(p.tokens, first, count, owners);
  for (int i = threadIdx.x; i < count; i += kRowsThreads) {
    const Owner owner = p.tokens.by_slots ? Owner{-1, 0, 0} : by_table ? owners[i] : fixed_owner(p.tokens, first + i);
    places[i] = place_of(p, first + i, owner);
  }
  __syncthreads();
  constexpr int kAtOnce = kRowsThreads / kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int rows = count * p.heads * (p.v.data != nullptr ? 2 : 1);
  for (int base = 0; base < rows; base += kAtOnce * kRows) {
    Row r[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) start_row(p, places, base + i * kAtOnce + group, rows, lane, r[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) finish_row(p, places, first, r[i], lane);
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads, ATTUNE_BLOCKS_PER_SM)
    attune_fetch_rows(const __grid_constant__ attune::kernels::FetchParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  attune::rows::fetch_rows(p);
}
