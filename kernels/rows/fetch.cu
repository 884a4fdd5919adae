// SPDX-License-Identifier: Apache-2.0
// Reads rows of a cache into dense rows: dequantise and gather.
//
// Maths: x = code * scale in fp32, rounded once to the dense type. A token that the cache does not hold becomes zeros.
//
// Grid: one block of 256 threads for each `tile` tokens. Tiles and order are those of store.cu, but the threads of a
// row exchange nothing: one thread for each token computes its addresses; then each thread loads its runs of
// ATTUNE_ROWS rows before it converts and stores them.
#include "ptx/grid.cuh"
#include "rows/scales.cuh"

namespace attune::rows {

using kernels::FetchParams;
using common::RawRun;

constexpr bool kCopies = kFormat == 0 && kScales == 0 && kRowType != 0 && kRowType == kCacheType;

// The addresses of head 0 of a token.
struct TokenAddresses {
  const char* cache[2];   // of K and V; null: not in the cache, becomes zeros
  const char* scales[2];  // of the row; packed formats: of the token
  char* out[2];           // null: not written
};

__device__ __forceinline__ TokenAddresses addresses_of(const FetchParams& p, long long row, const Owner& owner) {
  TokenAddresses address{};
  const Source source = source_of(p.tokens, p.cache, p.v.data != nullptr, row, owner);
  if (!source.written) return address;
  address.out[0] = row_at(p.k, 0, row);
  if (p.v.data != nullptr) address.out[1] = row_at(p.v, 0, row);
  set_slot_addresses(p, source.slots.k, source.slots.v, address);
  return address;
}

// A row whose loads are in flight.
struct Row {
  int of_v;
  char* out;       // null: no such row
  bool in_cache;   // otherwise the row becomes zeros
  float scale[kUnits][2];
  RawRun<kWidth> raw[kUnits][2];
};

__device__ __forceinline__ void start_row(const FetchParams& p, const TokenAddresses& address, int j, int lane,
                                          bool live, Row& r) {
  r.of_v = j >= p.heads ? 1 : 0;
  const int head = r.of_v ? j - p.heads : j;
  // Selects between loaded values, because selecting between addresses would load from shared memory twice.
  r.out = !live ? nullptr : r.of_v ? address.out[1] : address.out[0];
  r.in_cache = false;
  if (r.out == nullptr) return;
  r.out += head * (r.of_v ? p.v : p.k).head_stride;
  const char* row = r.of_v ? address.cache[1] : address.cache[0];
  const char* scales = kFormat == 0 && r.of_v ? address.scales[1] : address.scales[0];
  r.in_cache = row != nullptr;
  if (!r.in_cache) return;
  const KvPlane& plane = r.of_v ? p.cache.v : p.cache.k;
  const KvScale& scale = r.of_v ? p.cache.v_scale : p.cache.k_scale;
  row += head * plane.head_stride;
  const StoredScale stored(scale, scales, head);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = plain_unit(r.of_v ? p.head_dim_v : p.head_dim_qk, lane, u);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int d = side == 0 ? unit.first : unit.second;
      r.scale[u][side] = stored.of(d);
      if (d < 0) continue;
      if constexpr (kFormat == 0) {
        r.raw[u][side] = load(plane, type_of(kCacheType, plane.dtype), row, d);
      } else if (d < Mla::kNope) {
        r.raw[u][side] = common::load_run<kWidth>(common::kE4m3, global(row + d), 1, kVector);
        r.scale[u][side] = Mla::load_scale(global(scales), d / Mla::kGroup);
      } else {
        r.raw[u][side] = common::load_halves<kWidth>(global(row + Mla::kRope + 2 * (d - Mla::kNope)), kVector);
      }
    }
  }
}

__device__ __forceinline__ void decode(const FetchParams& p, const Row& r, int channel, const RawRun<kWidth>& raw,
                                       float scale, float (&x)[kWidth]) {
  const KvPlane& plane = r.of_v ? p.cache.v : p.cache.k;
  bool scaled = scale_mode(r.of_v ? p.cache.v_scale : p.cache.k_scale) != ScaleMode::kNone;
  if constexpr (kFormat == 0) {
    common::decode_run<kWidth>(type_of(kCacheType, plane.dtype), raw, x);
  } else {
    scaled = channel < Mla::kNope;
    if (scaled) {
      common::decode_run<kWidth>(common::kE4m3, raw, x);
    } else {
      common::decode_run<kWidth>(common::kBFloat16, raw, x);
    }
  }
  if (!scaled) return;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) x[k] *= scale;
}

__device__ __forceinline__ void convert_and_store_row(const FetchParams& p, const Row& r, int lane) {
  if (r.out == nullptr) return;
  const RowTensor& dense = r.of_v ? p.v : p.k;
  const int dtype = type_of(kRowType, dense.dtype);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = plain_unit(r.of_v ? p.head_dim_v : p.head_dim_qk, lane, u);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int d = side == 0 ? unit.first : unit.second;
      if (d < 0) continue;
      RawRun<kWidth> out;
      if (!r.in_cache) {
        const float zeros[kWidth] = {};
        out = common::encode_run<kWidth>(dtype, zeros);
      } else if constexpr (kCopies) {
        out = r.raw[u][side];
      } else {
        float x[kWidth];
        decode(p, r, d, r.raw[u][side], r.scale[u][side], x);
        out = common::encode_run<kWidth>(dtype, x);
      }
      store(dense, dtype, r.out, d, out);
    }
  }
}

__device__ __forceinline__ void fetch_rows(const FetchParams& p) {
  __shared__ TokenAddresses addresses[kMaxTileTokens];
  const int count = for_each_token(
      p.tokens, [&](int i, long long row, const Owner& owner) { addresses[i] = addresses_of(p, row, owner); });
  const ThreadRows thread_rows(p.tokens);
  const int rows = p.heads * (p.v.data != nullptr ? 2 : 1);
  for (int t = thread_rows.token, j = thread_rows.row; t < count;) {
    Row r[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      start_row(p, addresses[t < count ? t : 0], j, thread_rows.lane, t < count && j < rows, r[i]);
      thread_rows.advance(rows, t, j);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) convert_and_store_row(p, r[i], thread_rows.lane);
  }
}

}  // namespace attune::rows

extern "C" __global__ void __launch_bounds__(attune::kernels::kRowsThreads, ATTUNE_BLOCKS_PER_SM)
    attune_fetch_rows(const __grid_constant__ attune::kernels::FetchParams p) {
  attune::ptx::wait_for_previous_kernels();
  attune::ptx::allow_next_kernel();
  attune::rows::fetch_rows(p);
}
