// SPDX-License-Identifier: Apache-2.0
// P and dS of the pairs that a thread has in a step: resident rows g and g + 8 of its warp, and columns of Scores. They
// are 0 if query and key do not see each other, by a select, because masked scores may be NaN.
#pragma once

#include "backward/mma/gemms.cuh"
#include "backward/scores.cuh"

namespace attune::backward::mma {

// This thread's first resident row (h = 0); its first column.
__device__ __forceinline__ int resident_row(const WorkTile& w) {
  return w.begin + static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ __forceinline__ int first_column() { return static_cast<int>(threadIdx.x) % 4 * 2; }

// Bit 4n + 2h + e: whether the pair counts. head: of q; row: the step's first streamed row.
__device__ __forceinline__ unsigned visible_pairs(const BackwardParams& p, const WorkTile& w, int head, int row) {
  const int first = row + first_column();
  unsigned pairs = 0;
  if constexpr (kKeyMasks) {
#pragma unroll 1
    for (int j = 0; j < 4 * kN8Tiles; ++j) {
      const int resident = resident_row(w) + j / 2 % 2 * 8, other = first + j / 4 * 8 + j % 2;
      const int query = WorkTile::query(resident, other), key = WorkTile::key(resident, other);
      const bool there = w.has(resident) && query < w.s.num_q && key < w.s.num_keys;
      if (there && sees(p, w.s, w.batch, query, head, key))
        pairs |= 1u << j;
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Span seen = w.visible_to(p, resident_row(w) + 8 * h);
      const int begin = seen.begin - first, end = seen.end - first;
#pragma unroll
      for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) pairs |= begin <= 8 * n + e && 8 * n + e < end ? 1u << (4 * n + 2 * h + e) : 0;
      }
    }
  }
  return pairs;
}

__device__ __forceinline__ void load_share(unsigned, kernels::RowStats&) {}
__device__ __forceinline__ void load_share(unsigned at, kernels::SinkRowStats& stats) {
  stats.share = ptx::load_shared(at + 8);
}
__device__ __forceinline__ RowStats load_stats(unsigned at) {
  const float2 x = ptx::load_shared_pair(at);
  RowStats stats = {x.x, x.y};
  load_share(at, stats);
  return stats;
}

// Turns products s = <q, k> into P and d = <dout, v> into dS. pairs: from visible_pairs(). row: the step's first
// streamed row. stats: of the step's rows if these are queries, otherwise of the resident rows. terms: from the tables,
// or null, then they are looked up.
__device__ __forceinline__ void make_p_and_ds(const BackwardParams& p, const WorkTile& w, unsigned stats,
                                              unsigned pairs, int head, int row, Scores& s, Scores& d,
                                              const Scores* terms = nullptr) {
  constexpr int kStats = sizeof(RowStats);
  const backward::Scores scores(p);
  const float slope = slope_of(p, w.batch, head);
  const int own_first = resident_row(w), column = first_column();
  RowStats of_rows[2];
  if constexpr (Config::kOfQueries) {
#pragma unroll
    for (int h = 0; h < 2; ++h) of_rows[h] = load_stats(stats + (own_first - w.begin + 8 * h) * kStats);
  }
#pragma unroll
  for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      RowStats of_column;
      if constexpr (!Config::kOfQueries) of_column = load_stats(stats + (8 * n + column + e) * kStats);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowStats& of = Config::kOfQueries ? of_rows[h] : of_column;
        const int resident = own_first + 8 * h, other = row + 8 * n + column + e;
        const int query = WorkTile::query(resident, other), key = WorkTile::key(resident, other);
        const bool counts = (pairs >> (4 * n + 2 * h + e) & 1) != 0;
        float &x = s[n][2 * h + e], &y = d[n][2 * h + e];
        Score score = scores.of(x);
        add_alibi(score, slope, static_cast<float>(w.s.num_keys - w.s.num_q + query - key));
        if constexpr (Config::kOfTables) {
          score.value = fmaf((*terms)[n][2 * h + e], common::kLog2e, score.value);
        } else {
          if (kTables && counts) add_tables(score, p, w.s, head, query, key);
        }
        const float a = weight_of(score.value, of.lse2), share = share_of(of);
        const float ds = a * score.slope * (share * y - of.delta);
        x = counts ? a * share : 0.0f;
        if constexpr (Config::kOfTables) {
          // Entries of the tables are never recomputed, so each must be right.
          const bool adds = counts && of.lse2 != ptx::infinity() && score.value != -ptx::infinity();
          y = adds ? a * (share * y - of.delta) : 0.0f;
        } else {
          y = counts ? ds : 0.0f;
        }
      }
    }
  }
}

}  // namespace attune::backward::mma
