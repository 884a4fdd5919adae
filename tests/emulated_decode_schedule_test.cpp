// SPDX-License-Identifier: Apache-2.0
// The stream-K schedule of decode (kernels/scheduler/stream_k.cu on the CPU, tests/emulator): ranges of all key tiles,
// one after the other, with whole output tiles where that makes no range much longer than cuts do.
#include <algorithm>
#include <vector>

#include "core/integers.h"
#include "emulated_decode.h"

namespace attune::cuda {
namespace {

// What a schedule should be, by plain loops over the lengths.
struct ExpectedSchedule {
  std::vector<int64_t> begins{};  // the output tiles' first key tiles; last the number of all key tiles
  int64_t blocks = 0, cut = 0;    // ranges with tiles; the most tiles of one if output tiles are cut

  // of_sequence: output tiles.
  ExpectedSchedule(const std::vector<int64_t>& keys, int64_t of_sequence, int64_t tile_keys, int64_t most_blocks) {
    int64_t total = 0;
    for (const int64_t n : keys) {
      for (int64_t i = 0; i < of_sequence; ++i) {
        begins.push_back(total);
        total += std::max<int64_t>(1, ceil_div(n, tile_keys));
      }
    }
    begins.push_back(total);
    blocks = std::min(total, most_blocks), cut = ceil_div(total, blocks);
  }
  [[nodiscard]] int64_t total() const { return begins.back(); }
  // The first tile of a range.
  [[nodiscard]] int64_t first(int64_t block, bool whole) const {
    const int64_t each = total() / blocks, at = block * each + std::min(block, total() % blocks);
    return whole ? *std::ranges::lower_bound(begins, at) : at;
  }
  [[nodiscard]] int64_t longest(bool whole) const {
    int64_t most = 0;
    for (int64_t i = 0; i < blocks; ++i) most = std::max(most, first(i + 1, whole) - first(i, whole));
    return most;
  }
  [[nodiscard]] bool fits_whole() const { return longest(true) <= cut + std::min<int64_t>(cut / 8, 8); }
};

class EmulatedDecodeSchedule : public EmulatedDecode {
 protected:
  // "" or what is wrong. whole: whether it is one without cuts. threads: of the schedule; 0: as the host says.
  static std::string check(const cases::Case& spec, int num_sms, bool whole, int threads = 0) {
    cases::Problem problem(spec);
    problem.arena().upload();
    const Problem p = make_problem(problem.device(), Data::kRequired);
    decode::Config c = decode::choose_config(p, decode::device_shape(*architecture_, num_sms), "none are asked for");
    if (c.schedule_threads < c.blocks / c.head_lanes) return cat(c.schedule_threads, " threads");
    if (threads > 0) c.schedule_threads = threads;
    cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
    const kernels::AttentionParams params = decode::to_params(p, c, workspace.buffer.device());
    emulate_decode_schedule(c, params);
    if (std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;

    const int64_t row_blocks = ceil_div(spec.max_seqlen_q() * p.group, c.rows());
    const ExpectedSchedule expected(spec.seqlens_kv, p.heads_kv / c.head_lanes * row_blocks,
                                    c.warps * kernels::kKeysOfWarp, params.blocks);
    for (int i = 0; i < params.blocks * c.head_lanes; ++i) {
      if (params.arrivals[i] != 0) return cat("counter ", i, " is ", params.arrivals[i]);
    }
    for (int i = 0; i < params.blocks; ++i) {
      const kernels::StreamKRange& range = params.stream_k[i];
      if (range.blocks != params.blocks) return cat("range ", i, " is one of ", range.blocks);
      const int64_t first = i < expected.blocks ? expected.first(i, whole) : expected.total(),
                    end = i < expected.blocks ? expected.first(i + 1, whole) : expected.total();
      if ((range.live != 0) != (first < end)) return cat("range ", i, ": live ", range.live);
      if (range.live == 0) continue;
      const kernels::Split& split = range.split;
      const int64_t begin = split.output_tile_begin + split.first_tile;
      if (begin != first) return cat("range ", i, " begins at ", begin, ", not ", first);
      const int64_t count = split.end_tile - split.first_tile, next = begin + count;
      const int64_t output_tile_end = *std::ranges::upper_bound(expected.begins, begin);
      if (next != std::min(end, output_tile_end))
        return cat("range ", i, ": its first split ends at ", next, ", not ", std::min(end, output_tile_end));
      if (range.next_tile != next) return cat("range ", i, " goes on at ", range.next_tile, ", not ", next);
      if (split.is_first != (split.first_tile == 0 ? 1 : 0)) return cat("range ", i, ": is_first ", split.is_first);
      if (split.is_last != (next == output_tile_end ? 1 : 0)) return cat("range ", i, ": is_last ", split.is_last);
    }
    if (expected.fits_whole() != whole && !spec.batch_invariant && threads == 0)
      return cat("whole ranges have up to ", expected.longest(true), " tiles, cut ones ", expected.cut);
    return "";
  }
};

TEST_F(EmulatedDecodeSchedule, CutsOnlyWhereWholeOutputTilesMakeRangesLong) {
  const cases::Row common(R"("head_dim": [16, 16], "dtype": "bf16", "kv": "paged", "queries": "fixed",
      "seqlens_q": 1)");
  struct Batch {
    const char* rest;
    bool whole;
  };
  for (const Batch& x : {
           Batch{R"("heads": [4, 2], "batch": 512, "seqlens_kv": 512)", true},
           {R"("heads": [2, 1], "batch": 128, "seqlens_kv": 2048)", true},
           {R"("heads": [2, 1], "batch": 117, "seqlens_kv": 1000)", true},   // some blocks get nothing
           {R"("heads": [2, 1], "batch": 115, "seqlens_kv": 1000)", false},  // too many would
           {R"("heads": [2, 1], "batch": 150, "seqlens_kv": 1024)", false},  // one or two for each block
           {R"("heads": [2, 2], "batch": 40, "seqlens_kv": 4000)", false},   // fewer than blocks
           {R"("heads": [2, 1], "batch": 2100, "seqlens_kv": 128)", true},   // several sequences a thread
           {R"("heads": [2, 1], "batch": 500, "seqlens_kv": {"random": [1000, 1010], "seed": 3})", true},
           {R"("heads": [2, 1], "batch": 500, "seqlens_kv": {"random": [0, 1000], "seed": 3})", false},
           {R"("heads": [2, 1], "batch": 500, "seqlens_kv": {"random": [0, 1000], "seed": 3}, "batch_invariant": true)",
            true},
           {R"("heads": [2, 1], "batch": 250, "seqlens_kv": 14000)", false},  // 220 tiles for 209
           {R"("heads": [64, 1], "batch": 130, "seqlens_kv": 3000)", true},   // two row blocks
           {R"("heads": [2, 1], "batch": 3, "seqlens_kv": 0)", true},
           {R"("heads": [2, 1], "batch": 1, "seqlens_kv": 30000)", false},
       }) {
    EXPECT_EQ(check(tests::make_case(common.with(x.rest)), 132, x.whole), "") << x.rest;
  }
}

// Fewer threads than ranges: they cannot compare, and take the ranges in turns.
TEST_F(EmulatedDecodeSchedule, TakesMoreRangesThanThreads) {
  const cases::Row common(R"("head_dim": [16, 16], "dtype": "bf16", "kv": "paged", "queries": "fixed", "seqlens_q": 1,
      "heads": [2, 1], "batch": 128, "seqlens_kv": 2048)");
  EXPECT_EQ(check(tests::make_case(common), 132, true), "");
  EXPECT_EQ(check(tests::make_case(common), 132, false, 32), "");
  EXPECT_EQ(check(tests::make_case(common.set("batch_invariant", true)), 132, true, 32), "");
}

}  // namespace
}  // namespace attune::cuda
