// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cpu/attention_item.h"
#include "cpu/kernels_prefetch.h"

namespace attune::cpu {
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
  } else if (compute.decode_rows == TileType::kF16) {
    kt.qk_rows_f16(m, n, d, q_f32, ld_q, reinterpret_cast<const f16_t* const*>(k), s, kMaxTileN);
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
  } else if (compute.decode_rows == TileType::kF16) {
    kt.pv_rows_f16(m, n, dv, p_f32, kMaxTileN, reinterpret_cast<const f16_t* const*>(v), scratch.o, ld_o);
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

// Computes one KV head on the loaded tile, which begins at key `first`. Prefetches the rows of the next step, near, and
// of the one after, far.
void decode_tile(const ScoreRows& rows, const Compute& compute, int64_t first, const Ahead& near, const Ahead& far,
                 bool recompute, Scratch& scratch) {
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
  const bool skip_masked = recompute && v_nonfinite(p, compute, compute.decode_rows, tile);
  if (skip_masked) record_visible(scratch.s, m, n, visible);
  const SoftmaxTile t = softmax_tile(p, compute, tile, 0, m, n, scale2, scratch);
  kt.softmax(t);
  if (skip_masked) {
    pv_of_visible(p, compute.decode_rows, tile, m, visible, t.p, compute.tile, t.o, scratch.ld_o);
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

// Slices of scores are shorter where there are several heads: hardware prefetchers bring in the next head's rows, which
// must still be in L1 when it is computed. Sums keep their slices, as their bits depend on these.
constexpr int kHeadsScoreSlice = 8;

// Computes all KV heads of the item on the loaded tile: first all scores, then all sums. It walks memory in order, a
// slice of tokens at a time, and all heads of a slice before the next. Only for rows that lie in the cache as they are,
// those of a token's heads side by side. Prefetches `next`, the rows of the next tile: every row is requested twice, as
// above, once during the other phase and once a slice early.
void decode_heads(const ScoreRows& item_rows, const Compute& compute, int64_t first, const AheadRows& next,
                  Scratch& scratch) {
  const Problem& p = item_rows.p;
  const KernelTable& kt = *compute.kernels;
  const KvTile& tile = *scratch.tile;
  const int m = item_rows.item.num_rows, n = tile.n, heads = item_rows.item.num_heads;
  const int64_t k_step = p.cache.k.head_stride * p.cache.k.element_size;
  const int64_t v_step = p.v_aliases_k ? k_step : p.cache.v.head_stride * p.cache.v.element_size;
  const void* const* v = p.v_aliases_k ? tile.k : tile.v;
  // Calls work(own, h, j, count, rows of head h) for each slice of tokens and each head of it. Before each call a share
  // of the next slice and of the later rows is prefetched.
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

void decode_pass(const ScoreRows& item_rows, const TileSource& source, const Compute& compute, bool recompute,
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
      if (h == 0 && item.num_heads > 1 && tile.in_place && !codes && !tile.scaled && !recompute) {
        decode_heads(item_rows, compute, first, *scratch.ahead[1], scratch);
        break;
      }
      if (h == 0 && codes) touch_pages(rows.p, *scratch.ahead[2]);
      decode_tile(rows, compute, first, ahead(h + 1), ahead(h + 2), recompute, own);
    }
    std::rotate(scratch.ahead, scratch.ahead + 1, scratch.ahead + 3);
  }
}

}  // namespace

void run_decode_item(const ScoreRows& rows, const TileSource& source, const Compute& compute, Scratch& scratch) {
  decode_pass(rows, source, compute, false, scratch);
  if (needs_recompute(rows.p, compute, int64_t{rows.item.num_heads} * rows.item.num_rows, scratch))
    decode_pass(rows, source, compute, true, scratch);
}

}  // namespace attune::cpu
