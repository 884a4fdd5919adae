// SPDX-License-Identifier: Apache-2.0
// The sequences of the operation, their keys, and the addresses of these keys. docs/semantics.md, "Sequences" and
// "Where keys come from".
#pragma once

#include "check/rows.h"

namespace attune::oracle {

struct Extent {
  long long first, count;
};

// The rows of sequence b in q or k: by cu_seqlens, clamped to [0, rows] and made monotonic; by the first axis; one row
// each; or all rows.
__device__ inline Extent extent_of(const Tensor& tokens, const Tensor& cu_seqlens, bool one_a_row, long long b) {
  if (tokens.rank == 4) return b < tokens.shape[0] ? Extent{b * tokens.shape[1], tokens.shape[1]} : Extent{0, 0};
  const long long rows = tokens.shape[0];
  if (present(cu_seqlens)) {
    if (b + 1 >= cu_seqlens.shape[0]) return {0, 0};
    long long first = 0, end = 0;
    for (long long i = 0; i <= b; ++i) {
      first = clamp(integer_at(cu_seqlens, i), end, rows);
      end = clamp(integer_at(cu_seqlens, i + 1), first, rows);
    }
    return {first, end - first};
  }
  if (one_a_row) return b < rows ? Extent{b, 1} : Extent{0, 0};
  return b == 0 ? Extent{0, rows} : Extent{0, 0};
}

// Queries and keys of one sequence.
struct Sequence {
  long long b;
  Extent queries, dense;  // rows of q; rows of k, which are all keys or the new tokens
  long long num_cached;   // in a ring: all that were ever appended
  __device__ long long num_keys() const { return num_cached + dense.count; }
};

__device__ inline bool is_sparse(const OracleParams& p) { return present(p.indices); }
__device__ inline bool has_cache(const OracleParams& p) { return present(p.cache.k); }

__device__ inline long long cache_capacity(const Cache& c) {
  if (c.ring_capacity > 0) return c.ring_capacity;
  return present(c.page_table) ? c.page_table.shape[1] * c.page_size : c.page_size;
}

__device__ inline Sequence sequence_at(const OracleParams& p, long long b) {
  Sequence s = {b, extent_of(p.q, p.cu_seqlens_q, has_cache(p), b), {0, 0}, 0};
  const long long used = present(p.seqused_kv) ? integer_at(p.seqused_kv, b) : -1;
  if (has_cache(p)) {
    if (present(p.k)) s.dense = s.queries;
    if (!is_sparse(p) && used > 0)
      s.num_cached = p.cache.ring_capacity > 0 ? used : clamp(used, 0, cache_capacity(p.cache));
  } else {
    s.dense = extent_of(p.k, p.cu_seqlens_kv, false, b);
    if (present(p.seqused_kv)) s.dense.count = clamp(used, 0, s.dense.count);
  }
  return s;
}

// The sequence that owns a row of q; -1: none.
__device__ inline long long sequence_of(const OracleParams& p, long long row) {
  if (p.q.rank == 4) return row / p.q.shape[1];
  if (!present(p.cu_seqlens_q)) return has_cache(p) ? row : 0;
  long long first = 0, end = 0;
  for (long long b = 0; b < p.batch; ++b) {
    first = clamp(integer_at(p.cu_seqlens_q, b), end, p.rows);
    end = clamp(integer_at(p.cu_seqlens_q, b + 1), first, p.rows);
    if (first <= row && row < end) return b;
  }
  return -1;
}

// Where one key and its value are stored.
struct Key {
  bool exists;
  const Cache* cache;        // null: a dense key
  long long k_slot, v_slot;  // page * page_size + offset
  long long row;             // of a dense key
  long long position;        // in the sequence; no meaning for keys from index lists
};
__device__ inline Key no_key() { return {false, nullptr, 0, 0, 0, 0}; }

// The table row that holds cached position t; -1 for a bad beam.
__device__ inline long long table_row(const OracleParams& p, const Sequence& s, long long t) {
  if (!present(p.cache_indirection)) return s.b;
  const long long request = s.b / p.beam_width * p.beam_width, ring = p.cache.ring_capacity;
  const bool wrapped = ring > 0 && s.num_cached > ring;
  if (present(p.beam_prompt_length) && !wrapped && t < integer_at(p.beam_prompt_length, s.b)) return request;
  const long long column = ring > 0 ? t % ring : t;
  if (column >= p.cache_indirection.shape[1]) return -1;
  const long long beam = integer_at(p.cache_indirection, s.b, column);
  return beam < 0 || beam >= p.beam_width ? -1 : request + beam;
}

__device__ inline Key cached_key(const OracleParams& p, const Sequence& s, long long t) {
  const Cache& c = p.cache;
  const long long row = table_row(p, s, t), place = c.ring_capacity > 0 ? t % c.ring_capacity : t;
  if (row < 0 || place >= cache_capacity(c)) return no_key();
  const long long offset = place % c.page_size;
  long long k_page, v_page;
  if (present(c.page_table)) {
    k_page = integer_at(c.page_table, row, place / c.page_size);
    v_page = present(c.v_page_table) ? integer_at(c.v_page_table, row, place / c.page_size) : k_page;
  } else {
    k_page = v_page = present(c.batch_index) ? integer_at(c.batch_index, row) : row;
  }
  if (k_page < 0 || k_page >= c.num_pages || v_page < 0 || v_page >= c.num_pages) return no_key();
  return {true, &c, k_page * c.page_size + offset, v_page * c.page_size + offset, 0, t};
}

// The number of entries of a row of indices that are in use.
__device__ inline long long list_length(const OracleParams& p, const Tensor& indices, const Tensor& lengths,
                                        long long b, long long row) {
  if (!present(indices)) return 0;
  const long long topk = indices.shape[indices.rank - 1];
  if (!present(lengths)) return topk;
  return clamp(integer_at(lengths, lengths.shape[0] == p.batch ? b : row), 0, topk);
}

__device__ inline Key listed_key(const OracleParams& p, const Tensor& indices, const Cache* cache, const Sequence& s,
                                 long long row, long long kv_head, long long i) {
  const long long index = indices.rank == 2   ? integer_at(indices, row, i)
                          : p.q.rank == 4 ? integer_at(indices, row / p.q.shape[1], row % p.q.shape[1], i)
                                          : integer_at(indices, row, kv_head, i);
  if (index < 0) return no_key();
  if (cache != nullptr) {
    if (index >= cache->num_pages * cache->page_size) return no_key();
    return {true, cache, index, index, 0, 0};
  }
  if (index >= s.dense.count) return no_key();
  return {true, nullptr, 0, 0, s.dense.first + index, index};
}

// All keys that a row may see, numbered; some of the numbers have no key.
struct Keys {
  long long oldest;         // how many keys the ring has overwritten
  long long listed, extra;  // entries of both lists
  long long count;
};

__device__ inline Keys keys_of(const OracleParams& p, const Sequence& s, long long row) {
  if (is_sparse(p)) {
    const long long listed = list_length(p, p.indices, p.topk_length, s.b, row);
    const bool has_extra = present(p.extra_indices) && present(p.extra_cache.k);
    const long long extra = has_extra ? list_length(p, p.extra_indices, p.extra_topk_length, s.b, row) : 0;
    return {0, listed, extra, listed + extra};
  }
  const long long ring = p.cache.ring_capacity;
  const long long oldest = has_cache(p) && ring > 0 && s.num_cached > ring ? s.num_cached - ring : 0;
  return {oldest, 0, 0, s.num_keys() - oldest};
}

__device__ inline Key key_at(const OracleParams& p, const Sequence& s, const Keys& keys, long long row,
                             long long kv_head, long long i) {
  if (is_sparse(p)) {
    if (i < keys.listed)
      return listed_key(p, p.indices, has_cache(p) ? &p.cache : nullptr, s, row, kv_head, i);
    return listed_key(p, p.extra_indices, &p.extra_cache, s, row, kv_head, i - keys.listed);
  }
  const long long t = keys.oldest + i;
  if (t < s.num_cached) return cached_key(p, s, t);
  return {true, nullptr, 0, 0, s.dense.first + t - s.num_cached, t};
}

__device__ inline Row key_row(const OracleParams& p, const Key& key, long long kv_head) {
  if (key.cache == nullptr) return dense_row(p.k, key.row, kv_head);
  return cached_row(*key.cache, key.cache->page_size, key.k_slot, kv_head, false);
}
// If there is no V, the value is the first channels of the key.
__device__ inline Row value_row(const OracleParams& p, const Key& key, long long kv_head) {
  if (key.cache == nullptr) return dense_row(present(p.v) ? p.v : p.k, key.row, kv_head);
  if (!present(key.cache->v)) return key_row(p, key, kv_head);
  return cached_row(*key.cache, key.cache->page_size, key.v_slot, kv_head, true);
}

}  // namespace attune::oracle
