// SPDX-License-Identifier: Apache-2.0
// Scores of the indexer for a block of rows of one sequence, a tile of keys at a time.
#pragma once

#include "core/indexer.h"
#include "core/workspace.h"
#include "cpu/kernels.h"

namespace attune::cpu {

inline constexpr int kIndexTile = 128;  // keys a tile

class IndexScorer {
 public:
  // Takes its memory from the workspace. rows: the most rows of a block.
  IndexScorer(const IndexerProblem& op, const KernelTable& kernels, int64_t rows, Workspace& workspace);

  // Takes rows [first, first + count) of q.
  void load_queries(int64_t first, int64_t count);
  // Takes keys [begin, begin + n) of sequence b.
  void load_keys(int64_t b, int64_t begin, int n);
  // Scores of the loaded rows [first, first + count) against the loaded keys: scores(row)[i].
  void compute(int64_t first, int64_t count);

  // The number of rows that is best for one compute().
  int64_t rows_at_once() const;
  const float* scores(int64_t row) const { return scores_ + row * kIndexTile; }
  // [n]: keys on pages out of range; null: there is none.
  const bool* masked() const { return any_masked_ ? masked_ : nullptr; }

 private:
  void load_key(const std::byte* row, int i);
  void multiply(int64_t first, int64_t m, float* to);

  const IndexerProblem& op_;
  const KernelTable& kernels_;
  bool bf16_;          // tiles are bfloat16
  int64_t ld_;         // elements of a row of q and of staged keys
  int n_ = 0;          // keys loaded
  void* q_;            // [rows][num_heads][ld]
  float* weights_;     // [rows][num_heads], times q_scale
  float* row_;         // [ld]
  std::byte* staged_;  // [kIndexTile][ld]
  void* packed_;       // [head_dim][kIndexTile]
  float* dots_;        // [kHeads][kIndexTile]
  float* scores_;      // [rows][kIndexTile]
  float* factor_;      // [kIndexTile] scales of the keys
  bool* masked_;       // [kIndexTile]
  const void** rows_;  // [kIndexTile], null where masked
  bool any_masked_ = false;
};

// masked[i]: whether token begin + i of sequence b lies on a page out of range. Returns whether any does.
bool find_masked(const IndexerProblem& op, int64_t b, int64_t begin, int n, bool* masked);

}  // namespace attune::cpu
