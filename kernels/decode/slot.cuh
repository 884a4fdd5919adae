// SPDX-License-Identifier: Apache-2.0
// From a token of a sequence to its slot in the cache.
#pragma once

#include "common/int_table.cuh"

namespace attune::decode {

using kernels::AttentionParams;

// A token's slot as loaded from the page table. It is checked when it is used, so that a warp does not wait for a load
// that it has just issued. page -1: there is no slot.
struct Slot {
  int k_page;
  int own_v_page;  // set only if V has its own table, because a copy of k_page would wait for its load
  int offset;

  __device__ __forceinline__ int v_page(const AttentionParams& p) const {
    return p.v.has_v_page_table ? own_v_page : k_page;
  }
  __device__ __forceinline__ static bool is_page(const AttentionParams& p, int page) {
    return static_cast<unsigned>(page) < static_cast<unsigned>(p.num_pages);  // at most 2^31
  }
  __device__ __forceinline__ bool exists(const AttentionParams& p) const {
    return is_page(p, k_page) & (!p.v.has_v_page_table | is_page(p, own_v_page));  // no branches
  }
};

// The slot of position `at` of a sequence. table, v_table: the sequence's rows of the page tables.
__device__ __forceinline__ Slot find_in_rows(const AttentionParams& p, const int* table, const int* v_table, int at) {
  const int entry = p.page_shift >= 0
                        ? at >> p.page_shift
                        : static_cast<int>(static_cast<unsigned>(at) / static_cast<unsigned>(p.page_size));
  Slot s{};
  // Unsigned, because that multiplication has half the width.
  s.k_page = table[static_cast<long long>(static_cast<unsigned>(entry)) * p.page_table.column_stride];
  if (p.v.has_v_page_table)
    s.own_v_page = v_table[static_cast<long long>(static_cast<unsigned>(entry)) * p.v_page_table.column_stride];
  s.offset = at - entry * p.page_size;
  return s;
}

// The slot of position `at` in a row of the page tables, or in a contiguous cache.
__device__ __forceinline__ Slot find_slot(const AttentionParams& p, int row, int at) {
  Slot s{};
  if (!p.paged) {
    s.k_page = p.batch_index.data != nullptr ? common::int_at(p.batch_index, row) : row;
    s.offset = at;
    return s;
  }
  return find_in_rows(p, p.page_table.data + row * p.page_table.row_stride,
                      p.v_page_table.data + row * p.v_page_table.row_stride, at);
}

// The general look-up, with rings and beams. num_cached: how many tokens of the sequence have been appended.
__device__ __forceinline__ Slot find_token(const AttentionParams& p, int batch, int num_cached, int token) {
  const int at = p.ring_capacity > 0 ? token % p.ring_capacity : token;
  int row = batch;
  if (p.beam_width > 1) {
    const bool wrapped = p.ring_capacity > 0 && num_cached > p.ring_capacity;
    int beam = 0;
    if (wrapped || token >= common::int_at(p.beam_prompt_length, batch)) {
      beam = at < p.beam_columns ? common::int_at(p.cache_indirection, batch, at) : -1;
    }
    if (beam < 0 || beam >= p.beam_width) return {-1, -1, 0};
    row = batch / p.beam_width * p.beam_width + beam;
  }
  return find_slot(p, row, at);
}

}  // namespace attune::decode
