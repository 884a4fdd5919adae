// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_item.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "cpu/prologue.h"

namespace attune::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Rows of a tile are masked and multiplied in blocks, so that a block above the diagonal does not pay for the columns below it.
constexpr int kRowBlock = 32;

void load_queries(const ScoreRows& rows, const Compute& compute, Scratch& scratch) {
  const Problem& p = rows.p;
  const int64_t d = p.head_dim_qk;
  const bool plain = !p.prologue.any && p.q.dim_stride == 1;
  const int32_t tile_dtype = compute.tile == TileType::kBF16 ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT32;
  const int64_t size = dtype_size(tile_dtype);
  for (int r = 0; r < rows.item.num_rows; ++r) {
    const int64_t query = rows.query(r), head = rows.head(r);
    const int64_t q_row = rows.sequence.q_begin + query;
    std::byte* to = static_cast<std::byte*>(scratch.q) + r * scratch.ld_q * size;
    if (plain && p.q.dtype == tile_dtype) {
      std::memcpy(to, p.q.at(q_row, head), static_cast<size_t>(d * size));
    } else {
      float* row = compute.tile == TileType::kF32 ? reinterpret_cast<float*>(to) : scratch.row_f32;
      prepare_q_row(p.prologue, p.q, d, q_row, head, rows.item.sequence, rows.sequence.position(query), row);
      if (compute.tile == TileType::kBF16) compute.kernels->to_bf16(ATTUNE_FLOAT32, row, d, reinterpret_cast<bf16_t*>(to));
    }
    std::memset(to + d * size, 0, static_cast<size_t>((scratch.ld_q - d) * size));
  }
}

void start_rows(const Problem& p, int num_rows, Scratch& scratch) {
  (void)p;
  std::fill(scratch.row_max, scratch.row_max + num_rows, -kInf);
  std::fill(scratch.row_sum, scratch.row_sum + num_rows, 0.0f);
  std::fill(scratch.o, scratch.o + num_rows * scratch.ld_o, 0.0f);
}

bool row_nonfinite(const Compute& compute, TileType type, const void* row, int64_t n) {
  return type == TileType::kBF16 ? compute.kernels->any_nonfinite_bf16(static_cast<const bf16_t*>(row), n)
                                 : compute.kernels->any_nonfinite_f32(static_cast<const float*>(row), n);
}

float element(TileType type, const void* row, int64_t i) {
  return type == TileType::kBF16 ? bf16_to_float(static_cast<const bf16_t*>(row)[i]) : static_cast<const float*>(row)[i];
}

// A tile where some row may not see some column and V holds NaN or infinity: 0 * NaN must not reach that row, so products are
// taken one by one, for visible columns only. Rare, hence plain.

bool v_nonfinite(const Problem& p, const Compute& compute, TileType row_type, const KvTile& tile) {
  for (int j = 0; j < tile.n; ++j) {
    if (row_nonfinite(compute, row_type, tile.v[j], p.head_dim_v)) return true;
  }
  return false;
}

void careful_pv(const Problem& p, TileType row_type, const KvTile& tile, int m, const bool* visible, const void* p_tile, TileType p_type,
                float* o, int64_t ld_o) {
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < tile.n; ++j) {
      if (!visible[static_cast<int64_t>(r) * kMaxTileN + j]) continue;
      const float weight = element(p_type, p_tile, static_cast<int64_t>(r) * kMaxTileN + j);
      for (int64_t c = 0; c < p.head_dim_v; ++c) o[r * ld_o + c] += weight * element(row_type, tile.v[j], c);
    }
  }
}

SoftmaxTile softmax_tile(const Problem& p, const Compute& compute, const KvTile& tile, int row, int m, int n, float scale2, Scratch& scratch) {
  SoftmaxTile t{};
  t.m = m;
  t.n = n;
  t.s = scratch.s + static_cast<int64_t>(row) * kMaxTileN;
  t.lds = kMaxTileN;
  t.scale2 = scale2;
  t.v_scale = tile.scaled ? tile.v_factor : nullptr;
  t.row_max = scratch.row_max + row;
  t.row_sum = scratch.row_sum + row;
  t.o = scratch.o + row * scratch.ld_o;
  t.ldo = static_cast<int>(scratch.ld_o);
  t.dv = static_cast<int>(p.head_dim_v);
  t.p_type = compute.tile;
  t.p = compute.tile == TileType::kBF16 ? static_cast<void*>(static_cast<bf16_t*>(scratch.p) + static_cast<int64_t>(row) * kMaxTileN)
                                        : static_cast<void*>(t.s);
  t.ldp = kMaxTileN;
  return t;
}

// Remembers who sees what before the softmax overwrites the scores.
void note_visible(const float* s, int m, int n, bool* visible) {
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < n; ++j) {
      const int64_t at = static_cast<int64_t>(r) * kMaxTileN + j;
      visible[at] = s[at] != -kInf;
    }
  }
}

void pack_tile(const Problem& p, const Compute& compute, const KvTile& tile, Scratch& scratch) {
  const int d = static_cast<int>(p.head_dim_qk), dv = static_cast<int>(p.head_dim_v);
  const int ld_k = static_cast<int>(round_up(tile.n, 16)), ld_v = static_cast<int>(scratch.ld_o);
  const KernelTable& kt = *compute.kernels;
  if (compute.tile == TileType::kBF16) {
    kt.pack_k_bf16(reinterpret_cast<const bf16_t* const*>(tile.k), tile.n, d, static_cast<bf16_t*>(scratch.k_pack), ld_k);
    kt.pack_v_bf16(reinterpret_cast<const bf16_t* const*>(tile.v), tile.n, dv, static_cast<bf16_t*>(scratch.v_pack), ld_v);
    return;
  }
  kt.pack_k_f32(reinterpret_cast<const float* const*>(tile.k), tile.n, d, static_cast<float*>(scratch.k_pack), ld_k);
  float* to = static_cast<float*>(scratch.v_pack);
  for (int j = 0; j < tile.n; ++j) {
    std::memcpy(to + static_cast<int64_t>(j) * ld_v, tile.v[j], static_cast<size_t>(dv) * sizeof(float));
    std::memset(to + static_cast<int64_t>(j) * ld_v + dv, 0, static_cast<size_t>(ld_v - dv) * sizeof(float));
  }
}

}  // namespace

void run_prefill_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch) {
  const Problem& p = rows.p;
  const Item& item = rows.item;
  const KernelTable& kt = *compute.kernels;
  const int d = static_cast<int>(p.head_dim_qk), dv = static_cast<int>(p.head_dim_v);
  const int ld_q = static_cast<int>(scratch.ld_q), ld_o = static_cast<int>(scratch.ld_o);
  const bool bf16 = compute.tile == TileType::kBF16;
  load_queries(rows, compute, scratch);
  start_rows(p, item.num_rows, scratch);
  const KvTile& tile = *scratch.tile;
  for (int64_t first = item.kv_begin / kPrefillN * kPrefillN; first < item.kv_end; first += kPrefillN) {
    const int n = static_cast<int>(std::min<int64_t>(kPrefillN, item.kv_end - first));
    source.load(rows.sequence, item.sequence, 0, item.kv_head, first, item.kv_begin, n, scratch);
    pack_tile(p, compute, tile, scratch);
    const int ld_k = static_cast<int>(round_up(n, 16));
    for (int row = 0; row < item.num_rows; row += kRowBlock) {
      const int m = std::min(kRowBlock, item.num_rows - row);
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
      bool careful = false;
      bool visible[kRowBlock * kMaxTileN];
      if (!fully_visible(rows, row, m, first, tile)) {
        const int seen = apply_mask(rows, row, m, first, tile, s);
        if (seen == 0) {
          scratch.tile->n = n;
          continue;
        }
        careful = v_nonfinite(p, compute, compute.tile, tile);
        if (careful) note_visible(s, m, columns, visible);
      }
      const SoftmaxTile t = softmax_tile(p, compute, tile, row, m, columns, scale2, scratch);
      kt.softmax(t);
      if (careful) {
        careful_pv(p, compute.tile, tile, m, visible, t.p, compute.tile, t.o, ld_o);
      } else if (bf16) {
        kt.gemm_bf16(m, dv, columns, static_cast<const bf16_t*>(t.p), kMaxTileN, static_cast<const bf16_t*>(scratch.v_pack), ld_o, t.o,
                     ld_o, true);
      } else {
        kt.gemm_f32(m, dv, columns, static_cast<const float*>(t.p), kMaxTileN, static_cast<const float*>(scratch.v_pack), ld_o, t.o, ld_o,
                    true);
      }
      scratch.tile->n = n;
    }
  }
}

void run_decode_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch) {
  const Problem& p = rows.p;
  const Item& item = rows.item;
  const KernelTable& kt = *compute.kernels;
  const int d = static_cast<int>(p.head_dim_qk), dv = static_cast<int>(p.head_dim_v);
  const int ld_q = static_cast<int>(scratch.ld_q), ld_o = static_cast<int>(scratch.ld_o);
  const int m = item.num_rows;
  const bool bf16_rows = compute.decode_rows == TileType::kBF16;
  load_queries(rows, compute, scratch);
  start_rows(p, m, scratch);
  const KvTile& tile = *scratch.tile;
  const int64_t q_row = rows.sequence.q_begin + rows.query(0);
  for (int64_t first = item.kv_begin / kDecodeN * kDecodeN; first < item.kv_end; first += kDecodeN) {
    const int n = static_cast<int>(std::min<int64_t>(kDecodeN, item.kv_end - first));
    source.load(rows.sequence, item.sequence, q_row, item.kv_head, first, item.kv_begin, n, scratch);
    const auto* k_bf16 = reinterpret_cast<const bf16_t* const*>(tile.k);
    const auto* v_bf16 = reinterpret_cast<const bf16_t* const*>(tile.v);
    const auto* k_f32 = reinterpret_cast<const float* const*>(tile.k);
    const auto* v_f32 = reinterpret_cast<const float* const*>(tile.v);
    if (compute.tile == TileType::kBF16) {
      kt.qk_rows_bf16(m, n, d, static_cast<const bf16_t*>(scratch.q), ld_q, k_bf16, scratch.s, kMaxTileN);
    } else if (bf16_rows) {
      kt.qk_rows_mixed(m, n, d, static_cast<const float*>(scratch.q), ld_q, k_bf16, scratch.s, kMaxTileN);
    } else {
      kt.qk_rows_f32(m, n, d, static_cast<const float*>(scratch.q), ld_q, k_f32, scratch.s, kMaxTileN);
    }
    const float scale2 = apply_score_terms(rows, 0, m, first, tile, scratch.s, scratch, kt);
    bool careful = false;
    bool visible[kDecodeRows * kMaxTileN];
    if (!fully_visible(rows, 0, m, first, tile)) {
      if (apply_mask(rows, 0, m, first, tile, scratch.s) == 0) continue;
      careful = v_nonfinite(p, compute, compute.decode_rows, tile);
      if (careful) note_visible(scratch.s, m, n, visible);
    }
    const SoftmaxTile t = softmax_tile(p, compute, tile, 0, m, n, scale2, scratch);
    kt.softmax(t);
    if (careful) {
      careful_pv(p, compute.decode_rows, tile, m, visible, t.p, compute.tile, t.o, ld_o);
    } else if (compute.tile == TileType::kBF16) {
      kt.pv_rows_bf16(m, n, dv, static_cast<const bf16_t*>(t.p), kMaxTileN, v_bf16, t.o, ld_o);
    } else if (bf16_rows) {
      kt.pv_rows_mixed(m, n, dv, static_cast<const float*>(t.p), kMaxTileN, v_bf16, t.o, ld_o);
    } else {
      kt.pv_rows_f32(m, n, dv, static_cast<const float*>(t.p), kMaxTileN, v_f32, t.o, ld_o);
    }
  }
}

}  // namespace attune::cpu
