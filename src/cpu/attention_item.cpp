// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_item.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "core/integers.h"
#include "cpu/kernels_prefetch.h"
#include "cpu/prologue.h"

namespace attune::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Rows of a tile are masked and multiplied in blocks, so that a block above the diagonal does not pay for the columns
// below it.
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
      if (compute.tile == TileType::kBF16)
        compute.kernels->to_bf16(ATTUNE_FLOAT32, row, d, reinterpret_cast<bf16_t*>(to));
    }
    std::memset(to + d * size, 0, static_cast<size_t>((scratch.ld_q - d) * size));
  }
}

void start_rows(int num_rows, Scratch& scratch) {
  std::fill(scratch.row_max, scratch.row_max + num_rows, -kInf);
  std::fill(scratch.row_sum, scratch.row_sum + num_rows, 0.0f);
  std::fill(scratch.o, scratch.o + num_rows * scratch.ld_o, 0.0f);
}

// Element i of row j of V.
float v_element(TileType row_type, const KvTile& tile, int j, int64_t i) {
  if (tile.codes != ATTUNE_DTYPE_NONE) return load_as_float(tile.codes, static_cast<const uint8_t*>(tile.v[j]) + i);
  return row_type == TileType::kBF16 ? bf16_to_float(static_cast<const bf16_t*>(tile.v[j])[i])
                                     : static_cast<const float*>(tile.v[j])[i];
}

bool v_row_nonfinite(const Problem& p, const Compute& compute, TileType row_type, const KvTile& tile, int j) {
  if (tile.codes != ATTUNE_DTYPE_NONE) {
    bf16_t row[kMaxHeadDim];
    compute.kernels->to_bf16(tile.codes, tile.v[j], p.head_dim_v, row);
    return compute.kernels->any_nonfinite_bf16(row, p.head_dim_v);
  }
  return row_type == TileType::kBF16
             ? compute.kernels->any_nonfinite_bf16(static_cast<const bf16_t*>(tile.v[j]), p.head_dim_v)
             : compute.kernels->any_nonfinite_f32(static_cast<const float*>(tile.v[j]), p.head_dim_v);
}

// True if V or its scale is NaN or infinite somewhere in the tile. 0 * NaN must not reach a row whose score there is
// -inf, so careful_pv() multiplies the other columns one by one. Rare, hence simple.
bool v_nonfinite(const Problem& p, const Compute& compute, TileType row_type, const KvTile& tile) {
  for (int j = 0; j < tile.n; ++j) {
    if (tile.scaled && !std::isfinite(tile.v_factor[j])) return true;
    if (v_row_nonfinite(p, compute, row_type, tile, j)) return true;
  }
  return false;
}

void careful_pv(const Problem& p, TileType row_type, const KvTile& tile, int m, const bool* visible, const void* p_tile,
                TileType p_type, float* o, int64_t ld_o) {
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < tile.n; ++j) {
      const int64_t at = static_cast<int64_t>(r) * kMaxTileN + j;
      if (!visible[at]) continue;
      const float weight = p_type == TileType::kBF16 ? bf16_to_float(static_cast<const bf16_t*>(p_tile)[at])
                                                     : static_cast<const float*>(p_tile)[at];
      for (int64_t c = 0; c < p.head_dim_v; ++c) o[r * ld_o + c] += weight * v_element(row_type, tile, j, c);
    }
  }
}

// True if a row's weights are finite and its output is not: some value, visible or hidden, is NaN or infinite. The item
// is then computed again with care.
bool needs_care(const Problem& p, const Compute& compute, int64_t num_rows, const Scratch& scratch) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (std::isfinite(scratch.row_sum[r]) &&
        compute.kernels->any_nonfinite_f32(scratch.o + r * scratch.ld_o, p.head_dim_v))
      return true;
  }
  return false;
}

SoftmaxTile softmax_tile(const Problem& p, const Compute& compute, const KvTile& tile, int row, int m, int n,
                         float scale2, Scratch& scratch) {
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
  t.p = compute.tile == TileType::kBF16
            ? static_cast<void*>(static_cast<bf16_t*>(scratch.p) + static_cast<int64_t>(row) * kMaxTileN)
            : static_cast<void*>(t.s);
  t.ldp = kMaxTileN;
  return t;
}

// Notes which scores are not -inf (a mask or the score itself makes them so) before the softmax overwrites them.
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

void prefill_pass(const ScoreRows& rows, const TileSource& source, const Compute& compute, bool with_care,
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
      // bf16 products take columns in pairs: with an odd number the next value is multiplied by 0, so it is checked
      // too.
      scratch.tile->n = bf16 ? std::min(n, columns + columns % 2) : columns;
      const bool careful = with_care && v_nonfinite(p, compute, compute.tile, tile);
      scratch.tile->n = columns;
      if (careful) note_visible(s, m, columns, visible);
      const SoftmaxTile t = softmax_tile(p, compute, tile, row, m, columns, scale2, scratch);
      kt.softmax(t);
      request(2 * (row / kRowBlock) + 1);
      if (careful) {
        careful_pv(p, compute.tile, tile, m, visible, t.p, compute.tile, t.o, ld_o);
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
  if (needs_care(rows.p, compute, rows.item.num_rows, scratch)) prefill_pass(rows, source, compute, true, scratch);
}

namespace {

// Prefetches later rows while these are computed: slices of the products alternate with requests for some rows. A core
// drops requests beyond the few that it can have under way, so every row is requested twice: two steps early, during
// the sums, and one step early, during the scores. A step is one KV head's rows of a tile. The functions for codes load
// tables at each call, so slices would cost too much: they request rows themselves, once, K of the next step during the
// scores and V during the sums.
constexpr int kScoreSlice = 16, kSumSlice = 16;

// The rows of a later step.
struct Ahead {
  const AheadRows& rows;
  int head;  // counted from the item's first
};

// Prefetches the share of rows that goes with columns [j, j + n) of the tile being computed.
void prefetch_share(const Problem& p, const Ahead& a, int j, int n) {
  const AheadRows& rows = a.rows;
  prefetch_tile(rows.k, rows.k_bytes, p.v_aliases_k ? nullptr : rows.v, rows.v_bytes, std::min(j, rows.n),
                std::min(j + n, rows.n), a.head * rows.k_step, a.head * rows.v_step);
}

// Prefetches a line of each memory page in which rows start. The page walks overlap here and are over when the rows
// themselves are requested. A tile of codes is computed too fast to hide them.
void touch_pages(const Problem& p, const AheadRows& rows) {
  constexpr uintptr_t kPageBytes = 4096;
  const auto page = [](const void* row) { return reinterpret_cast<uintptr_t>(row) / kPageBytes; };
  const auto touch = [&](const void* const* at, int j) {
    if (j > 0 && page(at[j]) == page(at[j - 1])) return;
    keep_requests(at[j]);
    __builtin_prefetch(at[j], 0, 2);
  };
  for (int j = 0; j < rows.n; ++j) {
    touch(rows.k, j);
    if (!p.v_aliases_k) touch(rows.v, j);
  }
}

// Scores of a decode tile of codes.
void code_scores(const Problem& p, const Compute& compute, const KvTile& tile, int m, const Ahead& a,
                 Scratch& scratch) {
  const RowsAhead keys{a.rows.k, a.rows.n, a.rows.k_bytes, a.head * a.rows.k_step};
  compute.kernels->qk_rows_8bit(tile.codes, m, tile.n, static_cast<int>(p.head_dim_qk),
                                static_cast<const bf16_t*>(scratch.q), static_cast<int>(scratch.ld_q),
                                reinterpret_cast<const uint8_t* const*>(tile.k), scratch.s, kMaxTileN, keys);
}

// Adds a tile of codes, weighted, to o.
void code_sums(const Problem& p, const Compute& compute, const KvTile& tile, int m, const void* weights, const Ahead& a,
               Scratch& scratch) {
  const RowsAhead values{a.rows.v, p.v_aliases_k ? 0 : a.rows.n, a.rows.v_bytes, a.head * a.rows.v_step};
  compute.kernels->pv_rows_8bit(
      tile.codes, m, tile.n, static_cast<int>(p.head_dim_v), static_cast<const bf16_t*>(weights), kMaxTileN,
      reinterpret_cast<const uint8_t* const*>(tile.v), scratch.o, static_cast<int>(scratch.ld_o), values);
}

// Scores of n rows of keys, from s on, by the function for their type.
void row_scores(const Problem& p, const Compute& compute, const void* const* k, int m, int n, float* s,
                const Scratch& scratch) {
  const KernelTable& kt = *compute.kernels;
  const int d = static_cast<int>(p.head_dim_qk), ld_q = static_cast<int>(scratch.ld_q);
  const auto* q_f32 = static_cast<const float*>(scratch.q);
  const auto* k_bf16 = reinterpret_cast<const bf16_t* const*>(k);
  if (compute.tile == TileType::kBF16) {
    kt.qk_rows_bf16(m, n, d, static_cast<const bf16_t*>(scratch.q), ld_q, k_bf16, s, kMaxTileN);
  } else if (compute.decode_rows == TileType::kBF16) {
    kt.qk_rows_mixed(m, n, d, q_f32, ld_q, k_bf16, s, kMaxTileN);
  } else {
    kt.qk_rows_f32(m, n, d, q_f32, ld_q, reinterpret_cast<const float* const*>(k), s, kMaxTileN);
  }
}

// Adds n rows of values to o. weights: those of column 0 of the tile; j: the column of the first row.
void row_sums(const Problem& p, const Compute& compute, const void* const* v, int m, int j, int n, const void* weights,
              const Scratch& scratch) {
  const KernelTable& kt = *compute.kernels;
  const int dv = static_cast<int>(p.head_dim_v), ld_o = static_cast<int>(scratch.ld_o);
  const auto* p_f32 = static_cast<const float*>(weights) + j;
  const auto* v_bf16 = reinterpret_cast<const bf16_t* const*>(v);
  if (compute.tile == TileType::kBF16) {
    kt.pv_rows_bf16(m, n, dv, static_cast<const bf16_t*>(weights) + j, kMaxTileN, v_bf16, scratch.o, ld_o);
  } else if (compute.decode_rows == TileType::kBF16) {
    kt.pv_rows_mixed(m, n, dv, p_f32, kMaxTileN, v_bf16, scratch.o, ld_o);
  } else {
    kt.pv_rows_f32(m, n, dv, p_f32, kMaxTileN, reinterpret_cast<const float* const*>(v), scratch.o, ld_o);
  }
}

// The part of the scratch memory that belongs to the head-th KV head of an item.
Scratch scratch_of_head(const Scratch& scratch, const Compute& compute, int64_t head, int64_t rows) {
  Scratch s = scratch;
  const int64_t first = head * rows;
  s.q = static_cast<std::byte*>(s.q) + first * s.ld_q * (compute.tile == TileType::kBF16 ? 2 : 4);
  s.o += first * s.ld_o;
  s.s += first * kMaxTileN;
  s.p = compute.tile == TileType::kBF16 ? static_cast<void*>(static_cast<bf16_t*>(s.p) + first * kMaxTileN)
                                        : static_cast<void*>(s.s);
  s.row_max += first;
  s.row_sum += first;
  return s;
}

// One KV head against the loaded tile that begins at key first. near: the rows of the next step, far: of the one after;
// both are prefetched on the way.
void decode_tile(const ScoreRows& rows, const Compute& compute, int64_t first, const Ahead& near, const Ahead& far,
                 bool with_care, Scratch& scratch) {
  const Problem& p = rows.p;
  const KernelTable& kt = *compute.kernels;
  const KvTile& tile = *scratch.tile;
  const int m = rows.item.num_rows, n = tile.n;
  const bool codes = tile.codes != ATTUNE_DTYPE_NONE;
  if (codes) {
    code_scores(p, compute, tile, m, near, scratch);
  } else {
    for (int j = 0; j < n; j += kScoreSlice) {
      prefetch_share(p, near, j, kScoreSlice);
      row_scores(p, compute, tile.k + j, m, std::min(kScoreSlice, n - j), scratch.s + j, scratch);
    }
  }
  const float scale2 = apply_score_terms(rows, 0, m, first, tile, scratch.s, scratch, kt);
  if (!fully_visible(rows, 0, m, first, tile) && apply_mask(rows, 0, m, first, tile, scratch.s) == 0) return;
  bool visible[kDecodeRows * kMaxTileN];
  const bool careful = with_care && v_nonfinite(p, compute, compute.decode_rows, tile);
  if (careful) note_visible(scratch.s, m, n, visible);
  const SoftmaxTile t = softmax_tile(p, compute, tile, 0, m, n, scale2, scratch);
  kt.softmax(t);
  if (careful) {
    careful_pv(p, compute.decode_rows, tile, m, visible, t.p, compute.tile, t.o, scratch.ld_o);
    return;
  }
  if (codes) {
    code_sums(p, compute, tile, m, t.p, near, scratch);
    return;
  }
  for (int j = 0; j < n; j += kSumSlice) {
    prefetch_share(p, far, j, kSumSlice);
    row_sums(p, compute, tile.v + j, m, j, std::min(kSumSlice, n - j), t.p, scratch);
  }
}

// Scores of fewer tokens at a time where a slice has several heads: what hardware prefetchers bring along for the next
// head must not leave L1 before its turn. (Sums keep their slices, on which their bits depend.)
constexpr int kHeadsScoreSlice = 8;

// The loaded tile against all KV heads of the item, in the order of memory: the heads of a slice of tokens, then those
// of the next slice; all scores, then all sums. For rows that lie in the cache as they are, those of a token's heads
// one after the other. next: the rows of the next tile. Whole rows of tokens are requested twice, as above: a phase
// early, and a slice early.
void decode_heads(const ScoreRows& item_rows, const Compute& compute, int64_t first, const AheadRows& next,
                  Scratch& scratch) {
  const Problem& p = item_rows.p;
  const KernelTable& kt = *compute.kernels;
  const KvTile& tile = *scratch.tile;
  const int m = item_rows.item.num_rows, n = tile.n, heads = item_rows.item.num_heads;
  const int64_t k_step = p.cache.k.head_stride * p.cache.k.element_size;
  const int64_t v_step = p.v_aliases_k ? k_step : p.cache.v.head_stride * p.cache.v.element_size;
  const void* const* v = p.v_aliases_k ? tile.k : tile.v;
  // Calls work(own, h, j, count, rows of head h) for the heads of each slice of tokens. The share of a head in the
  // requests for the next slice and the later rows goes before it.
  const auto walk = [&](const void* const* row, int64_t step, int slice, const void* const* later, int num_later,
                        int64_t later_step, auto&& work) {
    for (int j = 0; j < n; j += slice) {
      const int count = std::min(slice, n - j);
      for (int h = 0; h < heads; ++h) {
        const int begin = j + slice * h / heads, end = j + slice * (h + 1) / heads;
        prefetch_tile(row, heads * step, nullptr, 0, std::min(begin + slice, n), std::min(end + slice, n));
        prefetch_tile(later, heads * later_step, nullptr, 0, std::min(begin, num_later), std::min(end, num_later));
        const void* rows[kDecodeN];
        for (int i = 0; i < count; ++i) rows[i] = static_cast<const std::byte*>(row[j + i]) + h * step;
        work(scratch_of_head(scratch, compute, h, m), h, j, count, rows);
      }
    }
  };
  walk(tile.k, k_step, kHeadsScoreSlice, v, p.v_aliases_k ? 0 : n, v_step,
       [&](const Scratch& own, int, int j, int count, const void* const* rows) {
         row_scores(p, compute, rows, m, count, own.s + j, own);
       });
  bool seen[kDecodeRows];
  ScoreRows rows = item_rows;
  for (int h = 0; h < heads; ++h) {
    Scratch own = scratch_of_head(scratch, compute, h, m);
    rows.kv_head = item_rows.item.kv_head + h;
    const float scale2 = apply_score_terms(rows, 0, m, first, tile, own.s, own, kt);
    seen[h] = fully_visible(rows, 0, m, first, tile) || apply_mask(rows, 0, m, first, tile, own.s) != 0;
    if (seen[h]) kt.softmax(softmax_tile(p, compute, tile, 0, m, n, scale2, own));
  }
  walk(v, v_step, kSumSlice, next.k, next.n, k_step,
       [&](const Scratch& own, int h, int j, int count, const void* const* rows) {
         if (seen[h]) row_sums(p, compute, rows, m, j, count, own.p, own);
       });
}

void decode_pass(const ScoreRows& item_rows, const TileSource& source, const Compute& compute, bool with_care,
                 Scratch& scratch) {
  const Item& item = item_rows.item;
  const int64_t q_row = item_rows.sequence.q_begin + item_rows.query(0);
  ScoreRows rows = item_rows;
  for (int h = 0; h < item.num_heads; ++h) {
    Scratch own = scratch_of_head(scratch, compute, h, item.num_rows);
    rows.kv_head = item.kv_head + h;
    load_queries(rows, compute, own);
    start_rows(item.num_rows, own);
  }
  const Sequence& sequence = rows.sequence;
  auto columns = [&](int64_t first) { return static_cast<int>(std::clamp<int64_t>(item.kv_end - first, 0, kDecodeN)); };
  auto look_ahead = [&](int64_t first, AheadRows& to) {
    source.look_ahead(sequence, item.sequence, q_row, item.kv_head, first, columns(first), to);
  };
  int64_t first = item.kv_begin / kDecodeN * kDecodeN;
  for (int i = 0; i < 2; ++i) look_ahead(first + i * kDecodeN, *scratch.ahead[i]);
  for (; first < item.kv_end; first += kDecodeN) {
    look_ahead(first + 2 * kDecodeN, *scratch.ahead[2]);
    auto ahead = [&](int step) { return Ahead{*scratch.ahead[step / item.num_heads], step % item.num_heads}; };
    for (int h = 0; h < item.num_heads; ++h) {
      Scratch own = scratch_of_head(scratch, compute, h, item.num_rows);
      rows.kv_head = item.kv_head + h;
      if (h == 0 || !source.next_head(item, h, first, own)) {
        source.load(sequence, item.sequence, q_row, rows.kv_head, first, item.kv_begin, columns(first), own);
      }
      const KvTile& tile = *scratch.tile;
      const bool codes = tile.codes != ATTUNE_DTYPE_NONE;
      if (h == 0 && item.num_heads > 1 && tile.in_place && !codes && !tile.scaled && !with_care) {
        decode_heads(item_rows, compute, first, *scratch.ahead[1], scratch);
        break;
      }
      if (h == 0 && codes) touch_pages(rows.p, *scratch.ahead[2]);
      decode_tile(rows, compute, first, ahead(h + 1), ahead(h + 2), with_care, own);
    }
    std::rotate(scratch.ahead, scratch.ahead + 1, scratch.ahead + 3);
  }
}

}  // namespace

void run_decode_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch) {
  decode_pass(rows, source, compute, false, scratch);
  if (needs_care(rows.p, compute, int64_t{rows.item.num_heads} * rows.item.num_rows, scratch))
    decode_pass(rows, source, compute, true, scratch);
}

}  // namespace attune::cpu
