// SPDX-License-Identifier: Apache-2.0
// The sequence of a row, the keys that it sees, and their slots: core/indexer.h on the device.
#pragma once

#include "common/int_table.cuh"
#include "indexer/indexer_params.h"

namespace attune::indexer {

using common::clamp_int;
using common::int_at;
using kernels::divide;
using kernels::Divisor;
using kernels::IndexRows;

// The offset of row r in a tensor whose rows may be nested in an outer axis.
__device__ __forceinline__ long long row_offset(const IndexRows& p, long long outer_stride, long long row_stride,
                                                long long row) {
  if (p.rows_per_outer == 0) return row * row_stride;
  const long long outer = divide(row, p.by_outer);
  return outer * outer_stride + (row - outer * p.rows_per_outer) * row_stride;
}
__device__ __forceinline__ const char* row_of(const IndexRows& p, const kernels::RowTensor& t, long long row) {
  return t.data + row_offset(p, t.outer_stride, t.row_stride, row);
}

// The address of score (row, 0).
__device__ __forceinline__ char* score_row(const IndexRows& p, const kernels::IndexScoreRows& s, long long row) {
  return s.data +
         (s.in_workspace ? (row - p.first) * s.row_stride : row_offset(p, s.outer_stride, s.row_stride, row));
}

struct Owner {
  int sequence;  // -1: none
  int i, n;      // this is row i of the n rows of the sequence
};

__device__ __forceinline__ Owner owner_of(const IndexRows& p, long long row) {
  if (p.owners == nullptr) {
    const int b = divide(row, p.by_fixed);
    return {b, static_cast<int>(row - static_cast<long long>(b) * p.fixed), p.fixed};
  }
  const int b = p.owners[row];
  if (b < 0) return {-1, 0, 0};
  const int first = p.offsets[b];
  return {b, static_cast<int>(row) - first, p.offsets[b + 1] - first};
}

__device__ __forceinline__ int num_keys(const IndexRows& p, int sequence) {
  return clamp_int(int_at(p.seqused, sequence), 0, p.max_seqlen_kv);
}

// The keys [begin, end) of a row.
struct KeyRange {
  int begin, end;
};

// The keys of sequence s that its row i of n sees; bad pages are not considered. row: the index in the tensor.
__device__ __forceinline__ KeyRange visible(const IndexRows& p, long long row, int i, int n, int s) {
  KeyRange r{0, s};
  if (p.causal) r.end = clamp_int(static_cast<long long>(s) - n + i + 1, 0, s);
  if (p.key_end.data != nullptr) r.end = clamp_int(int_at(p.key_end, row), 0, r.end);
  if (p.key_begin.data != nullptr) r.begin = clamp_int(int_at(p.key_begin, row), 0, r.end);
  return r;
}

// A token's slot in the cache. page -1: a bad page, so the token is masked.
struct Slot {
  int page;
  int offset;
};

// The column of token t in its sequence's page table, and its offset in the page.
__device__ __forceinline__ Slot page_and_offset(int t, int page_size, Divisor by_page) {
  const int column = divide(t, by_page);
  return {column, t - column * page_size};
}

// t must be below the sequence's length, because page tables are not read past it.
__device__ __forceinline__ Slot find_slot(const IndexRows& p, int sequence, int t) {
  const kernels::RowCache& c = p.cache;
  Slot s{sequence, t};
  if (c.paged) {
    s = page_and_offset(t, static_cast<int>(c.page_size), p.by_page);
    s.page = int_at(c.page_table, sequence, s.page);
  } else if (c.batch_index.data != nullptr) {
    s.page = int_at(c.batch_index, sequence);
  }
  if (s.page < 0 || s.page >= c.num_pages) s.page = -1;
  return s;
}

}  // namespace attune::indexer
