// SPDX-License-Identifier: Apache-2.0
// P and dS of a thread's scores: of two resident rows, eight apart, and of rows of a tile, which are the columns. They
// are 0 if query and key do not see each other, by a select, because masked scores may be NaN.
#pragma once

#include "backward/config.cuh"
#include "backward/scores.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attune::backward {

// The coordinates of a score, for the tables of masks and biases.
struct ScoreCoords {
  const BackwardParams& p;
  const WorkTile& work;
  int resident;  // the row of registers 0 and 1
  int head;      // of q
};

template <int kScores>
class Softmax {
 public:
  // resident: the row of registers 0 and 1.
  __device__ __forceinline__ Softmax(const BackwardParams& p, const Smem& smem, const WorkTile& work, int resident)
      : smem_(smem), scores_(p), column_(static_cast<int>(threadIdx.x) % 4 * 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible_[h] = work.visible_to(p, resident + 8 * h);
      if (Config::kOfQueries && resident + 8 * h < work.end)
        resident_stats_[h] = stats_of(p, work.s, work.batch, work.head)[resident + 8 * h];
    }
    if constexpr (kAlibi) ahead_ = work.s.num_keys - work.s.num_q + kToQuery * (column_ - resident);
  }

  // Whether no score of the warp is masked in the tile that begins at `row`. Also sets visible_pairs_.
  __device__ __forceinline__ bool unmasked(const ScoreCoords& coords, int row) {
    if constexpr (kKeyMasks) {
      visible_pairs_ = visible_pairs(coords, row);
      return !__any_sync(0xffffffffu, visible_pairs_ != static_cast<unsigned>((1ull << kScores) - 1));
    }
    const int first = row + column_;
    const bool mine = max(visible_[0].begin, visible_[1].begin) <= first &&
                      first + kScores * 2 - 7 < min(visible_[0].end, visible_[1].end);
    return !__any_sync(0xffffffffu, !mine);
  }
  // Turns scores s into the factor of dS (without sinks, dS = factor * (dP - delta)) and into packed P. The two differ
  // in two cases: the factor also has the softcap's slope, and P has the share that a sink leaves. The tile's stats are
  // in `stage`. slope: of ALiBi.
  __device__ __forceinline__ void forward(const ScoreCoords& coords, bool unmasked, int row, int stage, float slope,
                                          float (&s)[kScores], unsigned (&packed)[kScores / 2]) const {
    if constexpr (kSinkShares || kSoftcap || kAlibi || kTables) {
      make_factors_and_p(coords, unmasked, row, stage, slope, s, packed);
    } else {
      map(unmasked, row, stage, s,
          [&](int i, const RowStats& stats) { return ptx::exp2_approx(fmaf(s[i], scores_.unit, -stats.lse2)); });
      if constexpr (Config::kWithDv) pack(s, packed);
    }
  }
  // Turns d from dP into dS. s: the factor of dS.
  __device__ __forceinline__ void backward(bool unmasked, int row, int stage, const float (&s)[kScores],
                                           float (&d)[kScores]) const {
    map(unmasked, row, stage, d, [&](int i, const RowStats& stats) {
      return s[i] * ((kSinkShares ? share_of(stats) * d[i] : d[i]) - stats.delta);
    });
  }

  // Packs to 16 bits: matrices of 8 resident rows and 8 columns, one after the other for both rows of a thread.
  __device__ __forceinline__ static void pack(const float (&x)[kScores], unsigned (&to)[kScores / 2]) {
#pragma unroll
    for (int j = 0; j < kScores; j += 2) to[j / 2] = pack(x[j], x[j + 1]);
  }

 private:
  // The direction from a key to a query along the columns.
  static constexpr int kToQuery = Config::kOfQueries ? -1 : 1;

  // The column of register j in the tile; whether its pair counts.
  __device__ __forceinline__ int column_of(int j) const { return column_ + j / 4 * 8 + j % 2; }
  __device__ __forceinline__ bool sees(int j, int row) const {
    if constexpr (kKeyMasks) return (visible_pairs_ >> j & 1) != 0;
    const Span& seen = visible_[j / 2 % 2];
    return row + column_of(j) >= seen.begin && row + column_of(j) < seen.end;
  }
  // Bit j: whether the pair of register j counts.
  __device__ __forceinline__ unsigned visible_pairs(const ScoreCoords& coords, int row) const {
    const BackwardParams& p = coords.p;
    const WorkTile& work = coords.work;
    const auto is_in = [&](const Span& span, int j) {
      return row + column_of(j) >= span.begin && row + column_of(j) < span.end;
    };
    unsigned pairs = 0;
#pragma unroll
    for (int j = 0; j < kScores; ++j) pairs |= is_in(visible_[j / 2 % 2], j) ? 1u << j : 0;
    if constexpr (kRanges) {
      for_each_range(p, work.batch, [&](const common::Range& range) {
        const Span queries = queries_in(range, work.s), keys = keys_in(range, work.s);
        const Span resident = Config::kOfQueries ? queries : keys, others = Config::kOfQueries ? keys : queries;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = coords.resident + 8 * h;
          if (at < resident.begin || at >= min(resident.end, work.end)) continue;
#pragma unroll
          for (int j = 0; j < kScores; ++j) pairs |= j / 2 % 2 == h && is_in(others, j) ? 1u << j : 0;
        }
      });
    }
    if constexpr (KeyMask::kAny) {
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        const int resident = coords.resident + j / 2 % 2 * 8, other = row + column_of(j);
        const int query = WorkTile::query(resident, other), key = WorkTile::key(resident, other);
        if ((pairs >> j & 1) != 0 && !passes_key_mask(p, work.s, work.batch, query, coords.head, key))
          pairs &= ~(1u << j);
      }
    }
    return pairs;
  }
  __device__ __forceinline__ static void load_share(unsigned, kernels::RowStats&) {}
  __device__ __forceinline__ static void load_share(unsigned at, kernels::SinkRowStats& stats) {
    stats.share = ptx::load_shared(at + ATTUNE_OFFSET_OF(kernels::SinkRowStats, share));
  }
  // racecheck reports these loads with the copy of a later tile: it does not model one lane that arrives for its warp
  // at the stage's empty barrier.
  __device__ __forceinline__ RowStats column_stats(int j, int stage) const {
    if constexpr (Config::kOfQueries) return {};  // stats are of the resident rows
    const unsigned at = smem_.stats(stage) + column_of(j) * static_cast<int>(sizeof(RowStats));
    const float2 x = ptx::load_shared_pair(at);
    RowStats stats = {x.x, x.y};
    load_share(at, stats);
    return stats;
  }
  __device__ __forceinline__ const RowStats& stats_at(int j, const RowStats& of_column) const {
    if constexpr (Config::kOfQueries) return resident_stats_[j / 2 % 2];
    return of_column;
  }

  // x[i] = value(i, stats of its query), or 0.
  template <class Value>
  __device__ __forceinline__ void map(bool unmasked, int row, int stage, float (&x)[kScores],
                                      const Value& value) const {
#pragma unroll
    for (int j = 0; j < kScores; j += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const RowStats of_column = column_stats(j + e, stage);
#pragma unroll
        for (int i = j + e; i < j + 4; i += 2) x[i] = value(i, stats_at(i, of_column));
      }
    }
    if (unmasked) return;
#pragma unroll
    for (int j = 0; j < kScores; ++j) x[j] = sees(j, row) ? x[j] : 0.0f;
  }

  __device__ __forceinline__ static unsigned pack(float x, float y) {
    return Config::kMmaType == ptx::Type::kBf16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
  }

  // Computes P if it differs from the factor of dS, pair by pair, because the registers have no room for both.
  __device__ __forceinline__ void make_factors_and_p(const ScoreCoords& coords, bool unmasked, int row, int stage,
                                                     float slope, float (&s)[kScores],
                                                     unsigned (&packed)[kScores / 2]) const {
    const float ahead = kAlibi ? static_cast<float>(kToQuery * row + ahead_) : 0.0f;
#pragma unroll
    for (int j = 0; j < kScores; j += 4) {
      const RowStats of_columns[2] = {column_stats(j, stage), column_stats(j + 1, stage)};
#pragma unroll
      for (int i = j; i < j + 4; i += 2) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const RowStats& stats = stats_at(i, of_columns[e]);
          const int resident = coords.resident + i / 2 % 2 * 8, other = row + column_of(i + e);
          Score score = scores_.of(s[i + e]);
          add_alibi(score, slope, ahead + static_cast<float>(kToQuery * (i / 4 * 8 + e - i / 2 % 2 * 8)));
          add_tables(score, coords.p, coords.work.s, coords.head, WorkTile::query(resident, other),
                     WorkTile::key(resident, other));
          const float a = weight_of(score.value, stats.lse2);
          p[e] = a * share_of(stats);
          s[i + e] = a * score.slope;
        }
        if constexpr (Config::kWithDv) packed[i / 2] = pack(p[0], p[1]);
      }
    }
    if (unmasked) return;
#pragma unroll
    for (int j = 0; j < kScores; j += 2) {
      const bool sees_it = sees(j, row), sees_next = sees(j + 1, row);
      if constexpr (Config::kWithDv) packed[j / 2] &= (sees_it ? 0xffffu : 0u) | (sees_next ? 0xffff0000u : 0u);
      s[j] = sees_it ? s[j] : 0.0f;
      s[j + 1] = sees_next ? s[j + 1] : 0.0f;
    }
  }

  const Smem& smem_;
  const Scores scores_;
  const int column_;
  int ahead_ = 0;               // with ALiBi: from register 0's key to its query, in a tile that begins at row 0
  Span visible_[2];             // by causality and windows
  unsigned visible_pairs_ = 0;  // with masks: of the last tile
  RowStats resident_stats_[2] = {};  // if the resident rows are queries
};

}  // namespace attune::backward
