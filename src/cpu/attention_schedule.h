// SPDX-License-Identifier: Apache-2.0
// From lengths to a list of work items, longest first, in the workspace.
#pragma once

#include "cpu/score.h"
#include "cpu/tile.h"

namespace attune::cpu {

// The most that any run of a plan needs.
struct ScheduleLimits {
  int64_t max_items = 0;
  int64_t max_merges = 0;
  int64_t max_partials = 0;  // slots
  int64_t partial_rows = 0;  // rows of a slot
  int threads = 1;
};
ScheduleLimits schedule_limits(const Problem& p, int threads);

struct Schedule {
  Sequence* sequences;
  Item* items;
  MergeTask* merges;
  int64_t num_items, num_merges;
};
// Fills the arrays of out (which have the sizes of limits).
void make_schedule(const Problem& p, const ScheduleLimits& limits, Schedule& out);

// A hash of everything that a schedule depends on: shapes, lengths, offsets and masks.
uint64_t schedule_stamp(const Problem& p);

// True if the sequence runs by GEMM tiles.
inline bool is_prefill(const Problem& p, const Sequence& s) { return !p.sparse && s.num_q > kDecodeQueries; }
// True if attention skips the sequence; its outputs are left alone, or zeroed.
inline bool is_skipped(const Problem& p, const Sequence& s, int64_t b) {
  return p.is_finished(b) || (p.skip_decode && s.num_q == 1);
}

}  // namespace attune::cpu
