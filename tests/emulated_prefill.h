// SPDX-License-Identifier: Apache-2.0
// The prefill kernels' own source on the CPU (tests/emulator), without a GPU and with poisoned memory: compares their
// output with the oracle's.
#pragma once

#include "cuda/attention/prologue.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/prefill.h"
#include "emulated.h"
#include "emulated_prefill_launch.h"
#include "emulated_rows.h"
#include "support.h"

namespace attune::cuda {

class EmulatedPrefill : public tests::Emulated {
 protected:
  static constexpr int kBlocks = 3;  // of the grid, so that each takes several work tiles

  // kRecomputeFails: rows that are recomputed (recompute.cuh) read other keys, so they differ. kMovedRows: q, k and v
  // of the new tokens lie at odd addresses. kTwoHeadTiles, kOneHeadTile: as if the keys of at most so many head tiles
  // fit the L2. kOneBlock: one block of the grid takes all work tiles, so splits and the work tiles after them are its
  // own.
  enum class Twist { kNone, kRecomputeFails, kMovedRows, kTwoHeadTiles, kOneHeadTile, kOneBlock };

  // edit: changes the problem's memory on the host. rows: kFp32 is what cuda_prefill_fp32 makes of 16-bit queries.
  static std::string run(const cases::Case& spec, int layers = 1,
                         const std::function<void(const attune_attention&)>& edit = {}, Twist twist = Twist::kNone,
                         attention::Rows rows_are = attention::Rows::kOwnType) {
    cases::Problem problem(spec);
    if (edit) edit(problem.host());
    return run(problem, layers, twist, rows_are);
  }
  static std::string run(cases::Problem& problem, int layers = 1, Twist twist = Twist::kNone,
                         attention::Rows rows_are = attention::Rows::kOwnType) {
    problem.arena().upload();
    const attune_attention a = problem.device();
    Problem given = make_problem(a, Data::kRequired);
    const bool widens = rows_are == attention::Rows::kFp32;
    const Kernel& kernel = widens ? prefill_fp32_kernel() : prefill::kernel_for(given);
    if (!kernel.coverage.difference(traits_of(given, a)).empty() || !kernel.refusal(given).empty())
      return tests::kNotCovered;
    const cases::Expected expected = cases::evaluate(problem);
    std::vector<uint16_t> rows_moved[3];
    if (twist == Twist::kMovedRows) {
      move_rows(given, rows_moved);
      if (!attention::copies_rows(given) || !prefill::refusal(given).empty()) return tests::kNotCovered;
    }
    const bool prepares = attention::prepares_rows(given, rows_are);
    prefill::Config c =
        prefill::choose_config(prepares ? attention::after_prologue(given, nullptr, rows_are) : given, blocks_);
    if (row_pairs_) prefill::pair_rows(c, blocks_);
    const size_t own_bytes = c.workspace_bytes();
    cases::Workspace workspace(cases::host_memory(), own_bytes + attention::prologue_bytes(given, rows_are));
    std::byte* const rows = static_cast<std::byte*>(workspace.buffer.device()) + own_bytes;
    const Problem p = prepares ? attention::after_prologue(given, rows, rows_are) : given;
    prefill::check_run(p, c);
    kernels::WorkTileParams params = prefill::to_params(p, c, workspace.buffer.device());
    if (twist == Twist::kTwoHeadTiles || twist == Twist::kOneHeadTile) {
      int64_t keys = 0;
      for (int64_t b = 0; b < problem.spec().batch(); ++b) keys += problem.spec().keys(b);
      params.bytes_of_key = static_cast<int>(((twist == Twist::kOneHeadTile ? 30 : 14) << 20) / keys);
    }
    std::vector<char> other;
    if (twist == Twist::kRecomputeFails) {
      const auto bytes_of = [&](const KvPlane& v) { return p.cache.num_pages * v.page_stride * v.element_size; };
      const auto bytes_of_rows = [](const RowView& v) {
        const int64_t batches = v.rows_per_batch > 0 ? v.rows / v.rows_per_batch : 0;
        return (batches * v.batch_stride + v.rows * v.row_stride) * v.element_size;
      };
      other.assign(static_cast<size_t>(
                       std::max({bytes_of(p.cache.k), bytes_of(p.cache.v), bytes_of_rows(p.k), bytes_of_rows(p.v)})),
                   0x7f);
      params.new_k.data = params.new_v.data = params.k.data = params.v.data = other.data();
    }
    try {
      emulate_schedule(c, params);
      splits_ = params.list->num_split_tiles;
      most_splits_ = 0;
      for (int i = 0; i < params.list->num_work_tiles; ++i)
        most_splits_ = std::max(most_splits_, params.work_tiles[i].num_splits);
      cluster_ = c.cluster;
      rows_ = c.rows;
      if (twist == Twist::kOneBlock) c.blocks = c.cluster;
      for (int i = 0; i < layers; ++i) {
        if (prepares)
          for (const PrepareProblem& op : attention::launches_before(given, rows, rows_are))
            launch_prepare(op, kBlocks);
        emulate_attention(p, c, params);
        // The next layer begins with it.
        if (params.list->next_tile != 0) return "the counter of work tiles is not 0";
      }
    } catch (const std::exception& e) {
      return e.what();
    }
    if (const std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;
    return cases::compare(problem, expected, ATTUNE_DEVICE_CUDA).failure;
  }
  void TearDown() override { blocks_ = kBlocks, row_pairs_ = false; }

  static inline int blocks_ = kBlocks;    // of the grid
  static inline bool row_pairs_ = false;  // makes pairs of neighbouring tokens
  static inline int splits_ = 0;          // split row blocks of the last case
  static inline int most_splits_ = 0;     // of a row block of the last case
  static inline int cluster_ = 0;         // blocks of a cluster of the last case
  static inline int rows_ = 0;            // rows of a block of the last case
};

}  // namespace attune::cuda
