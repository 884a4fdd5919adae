// SPDX-License-Identifier: Apache-2.0
// The keys of a row as the selection reads them: their ranks, and their entries in `indices`.
//
//   rank(score): the bits of the score as an unsigned number in the order of scores; NaN is highest, -0 counts as 0;
//                rank 0: the key is masked
#pragma once

#include "indexer/select_config.cuh"

namespace attune::indexer {

using kernels::IndexSelectParams;

__device__ __forceinline__ unsigned rank_of(float score) {
  const unsigned bits = __float_as_uint(score + 0.0f);
  const unsigned rank = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return score != score ? 0xffffffffu : rank;
}
constexpr unsigned kRankOfMinusInf = 0x007fffffu;

// The page tables of a row's sequence.
struct Tables {
  const IndexSelectParams& p;
  int sequence;

  // The entry of `indices` for position t. -1: the token is masked.
  __device__ __forceinline__ int entry(int t) const {
    long long slot = t;
    if (p.rows.has_cache) {
      const Slot at = find_slot(p.rows, sequence, t);
      if (at.page < 0) return -1;
      slot = at.page * p.rows.cache.page_size + at.offset;
    }
    if (p.slot_table.data != nullptr) {
      const Slot s = page_and_offset(t, p.slot_page_size, p.by_slot_page);
      const int page = int_at(p.slot_table, sequence, s.page);
      if (page < 0 || page >= p.slot_pages) return -1;
      slot = static_cast<long long>(page) * p.slot_page_size + s.offset;
    }
    return p.slots ? static_cast<int>(slot) : t;
  }

  // Returns true if all positions of [begin, end) have entries. Called by all threads.
  __device__ __forceinline__ bool have(int begin, int end) const {
    bool bad = false;
    if (begin < end) {
      // Looks at one token of each page.
      const auto look = [&](int page_size, kernels::Divisor by_page) {
        const int last = divide(end - 1, by_page);
        for (int page = divide(begin, by_page) + static_cast<int>(threadIdx.x); page <= last; page += Config::kThreads)
          bad |= entry(max(begin, page * page_size)) < 0;
      };
      if (p.rows.has_cache && p.rows.cache.paged) {
        look(static_cast<int>(p.rows.cache.page_size), p.rows.by_page);
      } else {
        bad = entry(begin) < 0;
      }
      if (p.slot_table.data != nullptr) look(p.slot_page_size, p.by_slot_page);
    }
    return __syncthreads_or(bad) == 0;
  }
};

// Which keys are checked for bad pages.
enum class Check { kNone, kMinusInf, kAll };

// A run of keys, numbered so that keys 4 n .. 4 n + 3 are 16 aligned bytes if columns are contiguous.
struct Keys {
  const Tables& tables;
  const char* scores;  // of key 0; null: all have rank 1
  int position;        // of key 0
  int begin, end;      // the keys that exist
  Check check;

  // At most `count` keys from `first` on, renumbered from 0. first is a multiple of 4.
  __device__ __forceinline__ Keys part(int first, int count) const {
    Keys k = *this;
    if (scores != nullptr) k.scores += first * stride();
    k.position += first;
    k.begin = max(begin - first, 0);
    k.end = clamp_int(end - first, 0, count);
    return k;
  }

  // rank[v]: the ranks of keys from `first` + v kLine on.
  __device__ __forceinline__ void load(int first, unsigned (&rank)[Config::kVectors][4]) const {
    float4 x[Config::kVectors];
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
      const int k = first + v * Config::kLine;
      x[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (whole(k)) x[v] = *reinterpret_cast<const float4*>(scores + 4ll * k);
    }
#pragma unroll
    for (int v = 0; v < Config::kVectors; ++v) {
      const int k = first + v * Config::kLine;
      rank[v][0] = rank_of(x[v].x), rank[v][1] = rank_of(x[v].y);
      rank[v][2] = rank_of(x[v].z), rank[v][3] = rank_of(x[v].w);
      if (!whole(k)) load_some(k, rank[v]);
    }
    if (check != Check::kNone) mask_bad_pages(first, rank);
  }

 private:
  __device__ __forceinline__ long long stride() const { return tables.p.scores.column_stride; }
  __device__ __forceinline__ bool whole(int k) const {
    return scores != nullptr && stride() == 4 && k >= begin && k + 4 <= end;
  }

  __device__ __forceinline__ void load_some(int first, unsigned (&rank)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int k = first + e;
      rank[e] = 0;
      if (k >= begin && k < end)
        rank[e] = scores == nullptr ? 1 : rank_of(*reinterpret_cast<const float*>(scores + k * stride()));
    }
  }

  __device__ __forceinline__ void mask_bad_pages(int first, unsigned (&rank)[Config::kVectors][4]) const {
    constexpr int kKeys = 4 * Config::kVectors;
    unsigned checked = 0, masked = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const unsigned r = rank[i / 4][i % 4];
      checked |= (check == Check::kAll ? r != 0 : r == kRankOfMinusInf) ? 1u << i : 0;
    }
#pragma unroll 1
    for (; checked != 0; checked &= checked - 1) {
      const int i = __ffs(static_cast<int>(checked)) - 1;
      if (tables.entry(position + first + i / 4 * Config::kLine + i % 4) < 0) masked |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) rank[i / 4][i % 4] = (masked >> i & 1) != 0 ? 0 : rank[i / 4][i % 4];
  }
};

}  // namespace attune::indexer
