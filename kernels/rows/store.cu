// SPDX-License-Identifier: Apache-2.0
// Rows of new tokens through the prologue to outputs and to a cache: qkv_prepare, append, quantise.
//
// Maths. docs/semantics.md, "The prologue" and "Caches": x = RoPE(IA3 * (scale * code + bias)), q times log-n; outputs
// are x rounded once, the cache holds x or round(x / scale), where scale is the caller's or made of the row's largest
// magnitude.
//
// Tiles. A block takes tile tokens; ATTUNE_LANES threads take a row (token, head of q, k or v), each ATTUNE_UNITS units
// of two runs of ATTUNE_WIDTH channels. RoPE's partners are the two runs of a unit, so no thread needs another's
// channels; only the largest magnitude of a row, or of an MLA group, is exchanged, by shuffles.
//
// Order. 1. One thread a token finds its sequence, position, slots and RoPE rows, into shared memory. 2. Every thread
// loads its runs of ATTUNE_ROWS rows, then finishes and stores them row by row. A row is read whole before any of it is
// written: outputs may be the inputs themselves.
#include "ptx/grid.cuh"
#include "rows/plane.cuh"
#include "rows/tokens.cuh"
#include "tile/kv_codec.cuh"

namespace attune::rows {

using kernels::StoreParams;
using tile::PrologueToken;
using tile::RawRun;
using tile::Unit;

constexpr bool kPrologue = ATTUNE_PROLOGUE != 0;

struct TokenPlace {
  PrologueToken prologue;
  Slot k, v;  // page -1: not appended
  long long outer, inner;
  int written;  // 0: nothing of the token is
};

__device__ __forceinline__ TokenPlace place_of(const StoreParams& p, long long row, const Owner& owner) {
  TokenPlace place{};
  place.outer = p.tokens.rows_per_outer > 0 ? row / p.tokens.rows_per_outer : 0;
  place.inner = row - place.outer * p.tokens.rows_per_outer;
  place.k.page = place.v.page = -1;
  if (p.tokens.by_slots) {
    place.written = 1;
    const long long slot = p.tokens.slots != nullptr ? p.tokens.slots[row * p.tokens.slot_stride] : row;
    place.k = place.v = slot_of_number(p.cache, slot);
    return place;
  }
  if (owner.sequence < 0 || is_finished(p.tokens, owner.sequence)) return place;
  place.written = 1;
  long long used = p.tokens.seqused.data != nullptr ? at(p.tokens.seqused, owner.sequence) : 0;
  used = used < 0 ? 0 : p.tokens.clamp_used && used > p.cache.capacity ? p.cache.capacity : used;
  const long long position = used + owner.index, ring = p.cache.ring_capacity;
  if (kPrologue) place.prologue = tile::prologue_token(p.prologue, row, owner.sequence, position);
  // In a ring a later token of this call takes the slot of all but the last ones.
  if (p.append && (ring > 0 ? owner.index >= owner.count - ring : position < p.cache.capacity)) {
    const SlotPair slots = slots_of_position(p.cache, owner.sequence, position);
    place.k = slots.k;
    place.v = p.has_v ? slots.v : slots.k;
  }
  return place;
}

// A row in flight.
struct Row {
  int token, part, head;  // token -1: none
  const char* in;
  RawRun<kWidth> raw[kUnits][2];
};

__device__ __forceinline__ Unit unit_of(const StoreParams& p, int part, int lane, int u, bool& exists) {
  const int rotary = kPrologue && part != tile::kRowOfV && p.prologue.cos_sin != nullptr ? p.prologue.rotary_dim : 0;
  const int dim = part == tile::kRowOfV ? p.head_dim_v : p.head_dim_qk, index = u * kLanes + lane;
  exists = index < tile::num_units<kWidth>(rotary, dim);
  return tile::unit_at<kWidth>(p.prologue, rotary, dim, index);
}

__device__ __forceinline__ void start_row(const StoreParams& p, const TokenPlace* places, int index, int rows, int lane,
                                          Row& r) {
  r.token = -1;
  r.part = tile::kRowOfQ;
  r.head = 0;
  if (index >= rows) return;
  const int rows_of_token = p.heads_q + p.heads_kv * (1 + p.has_v);
  const int token = static_cast<unsigned>(index) / static_cast<unsigned>(rows_of_token);
  int head = index - token * rows_of_token;
  if (head >= p.heads_q) head -= p.heads_q, r.part = tile::kRowOfK;
  if (r.part == tile::kRowOfK && head >= p.heads_kv) head -= p.heads_kv, r.part = tile::kRowOfV;
  r.head = head;
  const TokenPlace& place = places[token];
  const RowTensor& in = p.in[r.part];
  if (!place.written || in.data == nullptr) return;
  if (p.out[r.part].data == nullptr && (r.part == tile::kRowOfQ || place.k.page < 0)) return;
  r.token = token;
  r.in = row_at(in, place.outer, place.inner, head);
  const int dtype = type_of(kRowType, in.dtype);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    bool exists;
    const Unit unit = unit_of(p, r.part, lane, u, exists);
    if (!exists) continue;
    r.raw[u][0] = load(in, dtype, r.in, unit.first);
    if (unit.second >= 0) r.raw[u][1] = load(in, dtype, r.in, unit.second);
  }
}

template <class Value>
__device__ __forceinline__ Value widest(Value x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

using Channels = float[kUnits][2][kWidth];

__device__ __forceinline__ void store_plain(const StoreParams& p, const Row& r, const Slot& slot, int lane, bool live,
                                            const Channels& x) {
  const bool of_v = r.part == tile::kRowOfV;
  const RowPlane& plane = of_v ? p.cache.v : p.cache.k;
  const RowScale& scale = of_v ? p.cache.v_scale : p.cache.k_scale;
  const int dtype = type_of(kCacheType, plane.dtype), mode = scale_mode(scale);
  float value = 1.0f;
  // All lanes of the warp, also of rows that are not stored, meet in the shuffles.
  if (kScales == 3 || kScales == kernels::kScalesAtRunTime) {
    float amax = 0;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        amax = tile::larger_magnitude(tile::larger_magnitude(amax, x[u][0][k]), x[u][1][k]);
    }
    value = tile::token_scale(dtype, widest(amax));
  }
  if (!live) return;
  if (mode == 3) {
    if (lane == 0) *scale_at(scale, slot.page, slot.offset, r.head) = value;
  } else if (mode != 0) {
    value = *scale_at(scale, slot.page, slot.offset, r.head);
  }
  char* row = row_at(plane, slot.page, slot.offset, r.head);
  const tile::Divider over(value);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    bool exists;
    const Unit unit = unit_of(p, r.part, lane, u, exists);
    if (!exists) continue;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (side == 1 && unit.second < 0) continue;
      float codes[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) codes[k] = mode != 0 ? over(x[u][side][k]) : x[u][side][k];
      store(plane, dtype, row, side == 0 ? unit.first : unit.second, codes);
    }
  }
}

// A row of a packed format, by a whole warp.
template <int kBytes>
__device__ __forceinline__ void store_packed(const StoreParams& p, const Row& r, const Slot& slot, int lane, bool live,
                                             const Channels& x) {
  if (!live) return;  // the same for the whole warp
  using Mla = tile::MlaRow<kBytes>;
  char* row = row_at(p.cache.k, slot.page, slot.offset, 0);
  char* scales = Mla::scales(row, row_at(p.cache.k, slot.page, 0, 0), p.cache.page_size, slot.offset);
  float scale[kUnits][2];
  int channel[kUnits][2];
  float amax[kUnits][2];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    bool exists;
    const Unit unit = unit_of(p, r.part, lane, u, exists);
    channel[u][0] = exists ? unit.first : -1;
    channel[u][1] = exists ? unit.second : -1;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      amax[u][side] = 0;
      scale[u][side] = 1;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) amax[u][side] = tile::larger_magnitude(amax[u][side], x[u][side][k]);
    }
  }
#pragma unroll
  for (int g = 0; g < Mla::kGroups; ++g) {
    float largest = 0;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (channel[u][side] >= g * Mla::kGroup && channel[u][side] < (g + 1) * Mla::kGroup)
          largest = fmaxf(largest, amax[u][side]);
      }
    }
    // Magnitudes are in the order of their bits.
    largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    const float of_group = tile::mla_scale<kBytes>(largest, p.cache.power_of_two_scales != 0);
    if (lane == g) Mla::store_scale(scales, g, of_group);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (channel[u][side] >= g * Mla::kGroup && channel[u][side] < (g + 1) * Mla::kGroup) scale[u][side] = of_group;
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int d = channel[u][side];
      if (d < 0) continue;
      if (d < Mla::kNope) {
        const tile::Divider over(scale[u][side]);
        float codes[kWidth];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) codes[k] = over(x[u][side][k]);
        tile::store_run<kWidth>(tile::kE4m3, tile::encode_run<kWidth>(tile::kE4m3, codes), row + d, 1, kVector);
      } else {
        tile::store_halves<kWidth>(tile::encode_run<kWidth>(tile::kBFloat16, x[u][side]),
                                   row + Mla::kRope + 2 * (d - Mla::kNope), kVector);
      }
    }
  }
}

// What was loaded, through the prologue, in fp32; zeros where the thread has no channels.
__device__ __forceinline__ void prepare_row(const StoreParams& p, const PrologueToken& token, const Row& r, int lane,
                                            Channels& x) {
  const int dtype = type_of(kRowType, p.in[r.part].dtype);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    bool exists;
    const Unit unit = unit_of(p, r.part, lane, u, exists);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[u][0][k] = x[u][1][k] = 0;
    if (!exists) continue;
    tile::decode_run<kWidth>(dtype, r.raw[u][0], x[u][0]);
    if (unit.second >= 0) tile::decode_run<kWidth>(dtype, r.raw[u][1], x[u][1]);
    if constexpr (kPrologue) {
      tile::prepare_unit<kWidth>(p.prologue, token, r.part, r.head, unit, tile::element_size(dtype) == 1, x[u]);
      // What a bias or a table made of channels that are not there must not count as a magnitude.
      if (unit.second < 0) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[u][1][k] = 0;
      }
    }
  }
}

__device__ __forceinline__ void finish_row(const StoreParams& p, const TokenPlace* places, const Row& r, int lane) {
  const bool here = r.token >= 0;
  const TokenPlace& place = places[here ? r.token : 0];
  Channels x = {};
  if (here) prepare_row(p, place.prologue, r, lane, x);
  if (here && p.out[r.part].data != nullptr) {
    const RowTensor& out = p.out[r.part];
    const int dtype = type_of(kOutType, out.dtype);
    char* row = row_at(out, place.outer, place.inner, r.head);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      bool exists;
      const Unit unit = unit_of(p, r.part, lane, u, exists);
      if (!exists) continue;
      store(out, dtype, row, unit.first, x[u][0]);
      if (unit.second >= 0) store(out, dtype, row, unit.second, x[u][1]);
    }
  }
  if (!p.append) return;
  const bool live = here && r.part != tile::kRowOfQ && place.k.page >= 0;
  const Slot& slot = r.part == tile::kRowOfV ? place.v : place.k;
  if constexpr (kFormat == 0) {
    store_plain(p, r, slot, lane, live, x);
  } else {
    store_packed<kFormat>(p, r, slot, lane, live, x);
  }
}

__device__ __forceinline__ void store_rows(const StoreParams& p) {
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
  constexpr int kAtOnce = kRowsThreads / kLanes;  // rows of a block
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int rows = count * (p.heads_q + p.heads_kv * (1 + p.has_v));
  for (int base = 0; base < rows; base += kAtOnce * kRows) {
    Row r[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) start_row(p, places, base + i * kAtOnce + group, rows, lane, r[i]);
    __syncwarp();  // an output may be narrower than its input and lie in the same place
#pragma unroll
    for (int i = 0; i < kRows; ++i) finish_row(p, places, r[i], lane);
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads, ATTUNE_BLOCKS_PER_SM)
    attune_store_rows(const __grid_constant__ attune::kernels::StoreParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  attune::rows::store_rows(p);
}
