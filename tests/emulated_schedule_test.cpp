// SPDX-License-Identifier: Apache-2.0
// What the schedule of prompts and of MLA lists (kernels/scheduler/persistent.cu on the CPU, tests/emulator), beside
// what the results of attention show: each M block once, all of its key tiles, splits of one size, long ones first.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/integers.h"
#include "emulated_prefill.h"

namespace attune::cuda {
namespace {

class EmulatedSchedule : public EmulatedPrefill {
 protected:
  // Tiles of the block of the grid that ends last, where each takes the next work tile of the list when it has done
  // one; beside what no schedule can be below.
  struct Time {
    int64_t last = 0, ideal = 0;
  };

  // "" or what is wrong. num_sms: blocks of the grid. cut: some M block must be. fewest_tiles: of a split; 0: what
  // the host says, else there is room for splits as short.
  static std::string check(const cases::Case& spec, int num_sms, bool cut, int fewest_tiles = 0, Time* time = nullptr) {
    cases::Problem problem(spec);
    problem.arena().upload();
    const Problem p = make_problem(problem.device(), Data::kRequired);
    const prefill::Config c = prefill::choose_config(p, num_sms);
    cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
    kernels::WorkTileParams params = prefill::to_params(p, c, workspace.buffer.device());
    if (fewest_tiles > 0) params.fewest_tiles = params.whole_tiles = fewest_tiles;
    emulate_schedule(c, params);
    if (std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;

    const kernels::WorkList& list = *params.list;
    if (list.next_tile != 0) return "the counter of work tiles is not 0";
    if (time != nullptr) *time = time_of(params);
    std::map<std::pair<int, int>, std::vector<kernels::WorkTile>> blocks;  // by sequence and first token
    int64_t tiles = 0;
    int longest = 1 << 30;  // so far
    for (int i = 0; i < list.num_work_tiles; ++i) {
      const kernels::WorkTile& t = params.work_tiles[i];
      blocks[{t.batch, t.token_begin}].push_back(t);
      const int size = t.tile_end - t.tile_begin;
      if (size > longest) return cat("work tile ", i, " has ", size, " tiles, one before it ", longest);
      longest = size, tiles += size;
    }
    int splits = 0;
    for (auto& [where, parts] : blocks) {
      std::ranges::sort(parts, {}, &kernels::WorkTile::split_idx);
      const std::string name = cat("sequence ", where.first, ", token ", where.second, ": ");
      const int64_t tokens =
          std::min<int64_t>(c.tokens_of_tile, spec.seqlens_q[static_cast<size_t>(where.first)] - where.second);
      if (where.second % c.tokens_of_tile != 0 || tokens <= 0 || parts[0].num_tokens != tokens)
        return cat(name, parts[0].num_tokens, " tokens of ", tokens);
      int end = 0, least = 1 << 30, most = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const kernels::WorkTile& t = parts[i];
        if (t.split_idx != static_cast<int>(i) || t.num_splits != static_cast<int>(parts.size()))
          return cat(name, "part ", t.split_idx, " of ", t.num_splits, " is number ", i, " of ", parts.size());
        if (t.tile_begin != end) return cat(name, "part ", i, " begins at ", t.tile_begin, " behind ", end);
        end = t.tile_end;
        least = std::min(least, t.tile_end - t.tile_begin), most = std::max(most, t.tile_end - t.tile_begin);
      }
      const int64_t most_parts = std::max<int64_t>(ceil_div(end, params.fewest_tiles), 1);
      if (std::ssize(parts) > most_parts || (fewest_tiles > 0 && std::ssize(parts) < most_parts))
        return cat(name, parts.size(), " parts of ", end, " tiles");
      if (most > least + 1) return cat(name, "parts of ", least, " and of ", most, " tiles");
      const int64_t cost = ceil_div(std::max(parts[0].end_key - parts[0].first_key, 1), c.keys);
      if (end < cost || end > cost + 1) return cat(name, end, " tiles of ", cost);
      if (parts[0].first_key == 0 && end != cost) return cat(name, end, " tiles of ", cost, " from key 0");
      splits += parts.size() > 1 ? 1 : 0;
    }
    int64_t expected = 0;
    for (const int64_t n : spec.seqlens_q) expected += ceil_div(n, c.tokens_of_tile);
    if (static_cast<int64_t>(blocks.size()) != expected) return cat(blocks.size(), " blocks of ", expected);
    if (splits != list.num_split_tiles) return cat(splits, " blocks are cut, the list says ", list.num_split_tiles);
    if (params.blocks_each == 0 && list.num_key_tiles != tiles * params.num_head_tiles)
      return cat(tiles, " tiles, the list says ", list.num_key_tiles);
    if ((splits > 0) != cut) return cat(splits, " blocks are cut");
    int64_t parts = 0;
    for (int i = 0; i < list.num_work_tiles; ++i) parts += params.work_tiles[i].num_splits > 1 ? 1 : 0;
    if (parts * params.num_head_tiles > 2 * params.num_blocks) return cat("no room for results of ", parts, " parts");
    return "";
  }

 private:
  static Time time_of(const kernels::WorkTileParams& params) {
    std::vector<int64_t> until(static_cast<size_t>(params.num_blocks), 0);
    Time time;
    for (int i = 0; i < params.list->num_work_tiles; ++i) {
      for (int head = 0; head < params.num_head_tiles; ++head) {
        const int64_t tiles = params.work_tiles[i].tile_end - params.work_tiles[i].tile_begin;
        *std::ranges::min_element(until) += tiles;
        time.ideal += tiles;
      }
    }
    time.last = std::ranges::max(until), time.ideal = ceil_div(time.ideal, params.num_blocks);
    return time;
  }
};

TEST_F(EmulatedSchedule, ListsEachBlockOnce) {
  struct Batch {
    const char* rest;
    int num_sms;
    bool cut;
  };
  const cases::Row common(R"("heads": [2, 2], "head_dim": [16, 16], "dtype": "bf16", "kv": "dense", "causal": true)");
  for (const Batch& x :
       {Batch{R"("seqlens_q": [150, 0, 3], "seqlens_kv": [150, 5, 300])", 3, false},
        {R"("seqlens_q": [1, 2], "seqlens_kv": [2900, 300])", 13, true},
        {R"("seqlens_q": [1, 2, 0, 40], "seqlens_kv": [12900, 300, 7, 5000])", 132, true},
        {R"("seqlens_q": [100], "seqlens_kv": [200000])", 132, true},
        {R"("queries": "fixed", "seqlens_q": 150, "seqlens_kv": [150, 150, 150], "cu_seqlens_kv": false)", 3, false},
        // More than one sequence a thread, some of them without queries.
        {R"("batch": 2300, "seqlens_q": {"random": [0, 3], "seed": 5}, "seqlens_kv": {"random": [0, 300], "seed": 6})",
         132, false},
        {R"("batch": 1025, "seqlens_q": {"random": [0, 90], "seed": 7}, "seqlens_kv": {"random": [0, 40], "seed": 8})",
         132, false}}) {
    EXPECT_EQ(check(tests::make_case(common.with(x.rest)), x.num_sms, x.cut), "") << x.rest;
  }
}

// Fewer sequences than blocks, of unlike lengths: no block works for long when most have ended; nor is anything cut for
// nothing where they are alike.
TEST_F(EmulatedSchedule, FillsTheGridWhateverTheLengths) {
  const cases::Row common(R"("head_dim": [16, 16], "dtype": "bf16", "kv": "dense", "queries": "fixed", "seqlens_q": 1,
      "heads": [1, 1])");
  const auto of = [&](const std::vector<int64_t>& keys) { return tests::make_case(common.set("seqlens_kv", keys)); };
  std::vector<int64_t> even, exponential, quarters;
  for (int64_t i = 0; i < 128; ++i) even.push_back(512 + i * 60);
  for (int i = 0; i < 120; ++i) exponential.push_back(static_cast<int64_t>(100 - 2000 * std::log((i + 0.5) / 120)));
  for (int64_t i = 0; i < 110; ++i) quarters.push_back(i % 4 == 0 ? 16384 : 4096);
  for (const auto& [keys, most_percent] :
       {std::pair{even, 125}, {exponential, 125}, {quarters, 150}, {std::vector<int64_t>(32, 8192), 105}}) {
    Time time;
    EXPECT_EQ(check(of(keys), 132, true, 0, &time), "");
    EXPECT_LE(time.last * 100, time.ideal * most_percent) << time.last << " of " << time.ideal;
  }
  Time time;
  EXPECT_EQ(check(of(std::vector<int64_t>(100, 8192)), 132, false, 0, &time), "");
}

// Two short splits that are combined would take longer than the whole.
TEST_F(EmulatedSchedule, LeavesEightTilesWhole) {
  const auto of = [](int64_t keys, const char* dtype) {
    return tests::make_case(
        cases::Row(R"("heads": [2, 2], "head_dim": [16, 16], "kv": "dense", "causal": true, "seqlens_q": [1])")
            .set("dtype", dtype)
            .set("seqlens_kv", std::vector<int64_t>{keys}));
  };
  EXPECT_EQ(check(of(8 * 128, "bf16"), 132, false), "");
  EXPECT_EQ(check(of(8 * 128 + 1, "bf16"), 132, true), "");
  EXPECT_EQ(check(of(8 * 64, "f32"), 132, true), "");  // tiles of 64 keys, which take longer
}

TEST_F(EmulatedSchedule, CutsPartsAsShortAsItIsTold) {
  const auto lengths = [](const char* rest) {
    return tests::make_case(
        cases::Row(R"("heads": [2, 2], "head_dim": [16, 16], "dtype": "bf16", "kv": "dense", "causal": true)")
            .with(rest));
  };
  for (const int fewest : {1, 2, 3, 5})
    EXPECT_EQ(check(lengths(R"("seqlens_q": [1, 1, 1], "seqlens_kv": [1100, 300, 5])"), 132, true, fewest), "")
        << fewest;
  for (const int fewest : {1, 2, 3})
    EXPECT_EQ(check(lengths(R"("seqlens_q": [1, 1], "seqlens_kv": [300, 5])"), 132, fewest < 3, fewest), "") << fewest;
}

}  // namespace
}  // namespace attune::cuda
