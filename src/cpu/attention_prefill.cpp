// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "core/integers.h"
#include "cpu/attention_item.h"
#include "cpu/kernels_prefetch.h"

namespace attune::cpu {
namespace {

// Rows of a tile are masked and multiplied in blocks: a block above the diagonal skips the columns below it.
constexpr int kRowBlock = 32;

void pack_tile(const Problem& p, const Compute& compute, const KvTile& tile, Scratch& scratch) {
  const int d = static_cast<int>(p.head_dim_qk), dv = static_cast<int>(p.head_dim_v);
  const int ld_k = packed_columns(tile.n), ld_v = packed_columns(dv);
  const KernelTable& kt = *compute.kernels;
  if (compute.tile == TileType::kBF16) {
    kt.pack_k_bf16(reinterpret_cast<const bf16_t* const*>(tile.k), tile.n, d, static_cast<bf16_t*>(scratch.k_pack),
                   ld_k);
    kt.pack_v_bf16(reinterpret_cast<const bf16_t* const*>(tile.v), tile.n, dv, static_cast<bf16_t*>(scratch.v_pack),
                   ld_v);
    return;
  }
  kt.pack_k_f32(reinterpret_cast<const float* const*>(tile.k), tile.n, d, static_cast<float*>(scratch.k_pack), ld_k);
  float* to = static_cast<float*>(scratch.v_pack);
  for (int j = 0; j < tile.n; ++j) {
    std::memcpy(to + static_cast<int64_t>(j) * ld_v, tile.v[j], static_cast<size_t>(dv) * sizeof(float));
    std::memset(to + static_cast<int64_t>(j) * ld_v + dv, 0, static_cast<size_t>(ld_v - dv) * sizeof(float));
  }
}

// Prefetches the columns [first, first + n) of an item with one KV head.
void prefetch_columns(const ScoreRows& rows, const TileSource& source, int64_t first, int n, Scratch& scratch) {
  AheadRows& ahead = *scratch.ahead[0];
  for (int j = 0; j < n; j += kDecodeN) {
    const int64_t left = std::min<int64_t>(n - j, rows.item.kv_end - first - j);
    if (left <= 0) return;
    source.look_ahead(rows.sequence, rows.item.sequence, 0, rows.kv_head, first + j,
                      static_cast<int>(std::min<int64_t>(left, kDecodeN)), ahead);
    prefetch_tile(ahead.k, ahead.k_bytes, rows.p.v_aliases_k ? nullptr : ahead.v, ahead.v_bytes, 0, ahead.n);
  }
}

void prefill_pass(const ScoreRows& rows, const TileSource& source, const Compute& compute, bool recompute,
                  Scratch& scratch) {
  const Problem& p = rows.p;
  const Item& item = rows.item;
  const KernelTable& kt = *compute.kernels;
  const int d = static_cast<int>(p.head_dim_qk), dv = static_cast<int>(p.head_dim_v);
  const int ld_q = static_cast<int>(scratch.ld_q), ld_o = static_cast<int>(scratch.ld_o);
  const bool bf16 = compute.tile == TileType::kBF16;
  load_queries(rows, compute, scratch);
  start_rows(item.num_rows, scratch);
  const KvTile& tile = *scratch.tile;
  for (int64_t first = item.kv_begin / kPrefillN * kPrefillN; first < item.kv_end; first += kPrefillN) {
    const int n = static_cast<int>(std::min<int64_t>(kPrefillN, item.kv_end - first));
    source.load(rows.sequence, item.sequence, 0, rows.kv_head, first, item.kv_begin, n, scratch);
    pack_tile(p, compute, tile, scratch);
    const int ld_k = packed_columns(n), ld_v = packed_columns(dv);
    // Prefetches a share of the next tile's rows before each product: packing would wait for each row. Requests the
    // share before once more, because the core drops some requests.
    const int share = static_cast<int>(ceil_div(kPrefillN, 2 * ceil_div(item.num_rows, kRowBlock)));
    const auto request = [&](int product) {
      const int begin = std::max(0, product - 1) * share, end = std::min(kPrefillN, (product + 1) * share);
      prefetch_columns(rows, source, first + kPrefillN + begin, end - begin, scratch);
    };
    for (int row = 0; row < item.num_rows; row += kRowBlock) {
      const int m = std::min(kRowBlock, item.num_rows - row);
      request(2 * (row / kRowBlock));
      int columns = n;
      if (!p.sparse && p.num_ranges == 0) {
        columns = static_cast<int>(std::clamp<int64_t>(p.last_visible(rows.position(row + m - 1)) - first + 1, 0, n));
        if (columns == 0 || p.first_visible(rows.position(row)) >= first + n) continue;
      }
      float* s = scratch.s + static_cast<int64_t>(row) * kMaxTileN;
      if (bf16) {
        kt.gemm_bf16(m, columns, d, static_cast<const bf16_t*>(scratch.q) + static_cast<int64_t>(row) * ld_q, ld_q,
                     static_cast<const bf16_t*>(scratch.k_pack), ld_k, s, kMaxTileN, false);
      } else {
        kt.gemm_f32(m, columns, d, static_cast<const float*>(scratch.q) + static_cast<int64_t>(row) * ld_q, ld_q,
                    static_cast<const float*>(scratch.k_pack), ld_k, s, kMaxTileN, false);
      }
      scratch.tile->n = columns;
      const float scale2 = apply_score_terms(rows, row, m, first, tile, s, scratch, kt);
      if (!fully_visible(rows, row, m, first, tile) && apply_mask(rows, row, m, first, tile, s) == 0) {
        scratch.tile->n = n;
        continue;
      }
      bool visible[kRowBlock * kMaxTileN];
      // bf16 products take columns in pairs: an odd one multiplies the next value by 0, so that is checked too.
      scratch.tile->n = bf16 ? std::min(n, columns + columns % 2) : columns;
      const bool skip_masked = recompute && v_nonfinite(p, compute, compute.tile, tile);
      scratch.tile->n = columns;
      if (skip_masked) record_visible(s, m, columns, visible);
      const SoftmaxTile t = softmax_tile(p, compute, tile, row, m, columns, scale2, scratch);
      kt.softmax(t);
      request(2 * (row / kRowBlock) + 1);
      if (skip_masked) {
        pv_of_visible(p, compute.tile, tile, m, visible, t.p, compute.tile, t.o, ld_o);
      } else if (bf16) {
        kt.gemm_bf16(m, dv, columns, static_cast<const bf16_t*>(t.p), kMaxTileN,
                     static_cast<const bf16_t*>(scratch.v_pack), ld_v, t.o, ld_o, true);
      } else {
        kt.gemm_f32(m, dv, columns, static_cast<const float*>(t.p), kMaxTileN,
                    static_cast<const float*>(scratch.v_pack), ld_v, t.o, ld_o, true);
      }
      scratch.tile->n = n;
    }
  }
}

}  // namespace

void run_prefill_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch) {
  prefill_pass(rows, source, compute, false, scratch);
  if (needs_recompute(rows.p, compute, rows.item.num_rows, scratch)) prefill_pass(rows, source, compute, true, scratch);
}

}  // namespace attune::cpu
