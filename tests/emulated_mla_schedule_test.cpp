// SPDX-License-Identifier: Apache-2.0
// MLA's schedule (kernels/scheduler/persistent.cu in the emulator) for the grid of an H200: it lists every tile of
// every sequence once, in chains of work tiles of equal length whatever the batch; and attention by it.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/integers.h"
#include "emulated_mla.h"

namespace attune::cuda {
namespace {

constexpr int kCapacity = 1 << 18, kSms = 132, kMostMargin = 10;  // of tiles, beyond a block's ideal number

class EmulatedMlaSchedule : public EmulatedMla {
 protected:
  struct Listed {
    std::string wrong;      // "" if nothing is
    bool balanced = false;  // else free blocks take work tiles from the counter
    int splits = 0;
    int64_t longest = 0, ideal = 0;  // tiles of a chain of work tiles
  };

  // One token a sequence, over these numbers of keys. most_work_tiles: fewer than the workspace has room for; 0: all.
  static Listed list(int64_t heads, const std::vector<int>& keys, const char* rest = "", int most_work_tiles = 0) {
    // The case's own lengths are short, as nothing is read but lengths.
    const cases::Row row(R"("dtype": "bf16", "kv": "paged", "shared_kv": true, "head_dim": [576, 512],
        "cache": {"page_size": 64}, "seqlens_kv": 1)");
    cases::Problem problem(
        tests::make_case(row.set("heads", {heads, 1}).set("batch", static_cast<int64_t>(keys.size())).with(rest)));
    problem.arena().upload();
    Problem p = make_problem(problem.device(), Data::kRequired);
    p.max_seqlen_kv = std::min(std::ranges::max(keys), kCapacity);
    const mla::Config c = mla::choose_config(p, kSms);
    cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
    kernels::WorkTileParams params = mla::to_params(p, c, workspace.buffer.device());
    params.seqused_kv = {keys.data(), 0, 1};
    params.capacity = p.max_seqlen_kv;
    if (most_work_tiles > 0) params.max_work_tiles = most_work_tiles;
    emulate_schedule(c, params);
    Listed x = walk(params, keys);
    if (x.wrong.empty()) x.wrong = workspace.buffer.check_guards();
    return x;
  }

 private:
  static Listed walk(const kernels::WorkTileParams& p, const std::vector<int>& keys) {
    Listed x;
    const int groups = p.num_blocks / p.num_head_tiles;
    std::set<int> seen;
    std::map<int, std::map<int, kernels::WorkTile>> splits;  // of a sequence, by split_idx
    for (int i = 0; i < p.list->num_work_tiles; ++i) {
      int64_t tiles = 0;
      for (int at = i;; at = p.work_tiles[at].next_work) {
        const kernels::WorkTile& t = p.work_tiles[at];
        if (at >= p.max_work_tiles || !seen.insert(at).second || !splits[t.batch].emplace(t.split_idx, t).second)
          x.wrong = cat("work tile ", at, " is listed twice");
        if (t.next_work != 0) x.balanced = true;
        if (!x.wrong.empty()) return x;
        tiles += t.tile_end - t.tile_begin;
        if (t.next_work == 0) break;
        if (t.next_work < p.list->num_work_tiles) x.wrong = cat("work tile ", at, " is followed by a first one");
      }
      x.longest = std::max(x.longest, tiles), x.ideal += tiles;
    }
    x.ideal = ceil_div(x.ideal, groups);
    if (x.balanced && p.list->num_work_tiles > groups) x.wrong = cat(p.list->num_work_tiles, " balanced of ", groups);
    if (splits.size() != keys.size()) x.wrong = cat(splits.size(), " sequences");
    std::set<int> places;  // of partial outputs
    for (const auto& [b, own] : splits) {
      int end = 0;
      const kernels::WorkTile& first = own.begin()->second;
      for (const auto& [part, t] : own) {
        if (t.tile_begin != end || t.num_splits != std::ssize(own) || t.first_split != first.first_split)
          x.wrong = cat("sequence ", b, ", split ", part, " begins at ", t.tile_begin, " behind ", end);
        end = t.tile_end;
        if (x.balanced && t.num_splits > 1 && end - t.tile_begin < p.fewest_tiles)
          x.wrong = cat("sequence ", b, ", split ", part, " has ", end - t.tile_begin, " tiles");
        if (t.num_splits > 1 && !places.insert(t.first_split + part).second) x.wrong = "splits at one place";
      }
      if (end != std::max<int64_t>(ceil_div(std::clamp<int64_t>(keys[static_cast<size_t>(b)], 0, p.capacity), 64), 1))
        x.wrong = cat("sequence ", b, " has ", end, " tiles");
      if (own.size() > 1) ++x.splits;
    }
    std::set<int> split;
    for (int i = 0; i < p.list->num_split_tiles; ++i) {
      const kernels::WorkTile& t = p.split_tiles[i];
      split.insert(t.batch);
      if (const auto& own = splits[t.batch];
          own.empty() || t.num_splits != std::ssize(own) || t.first_split != own.begin()->second.first_split)
        x.wrong = cat("sequence ", t.batch, " is merged otherwise");
    }
    if (std::ssize(split) != x.splits || p.list->num_split_tiles != x.splits)
      x.wrong = cat(p.list->num_split_tiles, " sequences to merge of ", x.splits);
    if (!places.empty() && *places.rbegin() >= 2 * groups) x.wrong = cat("no room for part ", *places.rbegin());
    if (p.list->next_tile != 0) x.wrong = "the counter of work tiles is not 0";
    return x;
  }
};

std::vector<int> even(int batch, int from, int to) {
  std::vector<int> keys;
  for (int i = 0; i < batch; ++i)
    keys.push_back(from + static_cast<int>(int64_t{i} * (to - from) / std::max(1, batch - 1)));
  return keys;
}

// Batches between rounds, and of unequal lengths: chains of equal length, one for each block or cluster.
TEST_F(EmulatedMlaSchedule, IsBalancedWhateverTheBatch) {
  std::vector<int> one_long(70, 1000), random;
  one_long[33] = 131072;
  for (unsigned i = 0, x = 1; i < 200; ++i) random.push_back(static_cast<int>((x = x * 1664525 + 1013904223) >> 20));
  struct Batch {
    int64_t heads;
    std::vector<int> keys;
    int most_splits;  // other M blocks stay whole
  };
  for (const Batch& b : {Batch{128, even(70, 8192, 8192), 4},
                         {128, even(96, 8192, 8192), 30},
                         {128, even(40, 8192, 8192), 40},
                         {128, even(128, 512, 8192), 0},
                         {128, even(128, 8192, 512), 0},
                         {64, even(144, 8192, 8192), 12},
                         {64, even(128, 512, 8192), 128},
                         {16, even(90, 512, 8192), 90},
                         {16, even(140, 1, 3000), 100},
                         {128, one_long, 4},
                         {256, even(50, 4096, 4096), 17},
                         {96, even(100, 100, 9000), 50},
                         {128, even(600, 1024, 1024), 6},
                         {128, random, 20}}) {
    const Listed x = list(b.heads, b.keys);
    EXPECT_EQ(x.wrong, "") << b.heads << ", " << b.keys.size();
    EXPECT_TRUE(x.balanced) << b.heads << ", " << b.keys.size();
    EXPECT_LE(x.splits, b.most_splits) << b.heads << ", " << b.keys.size();
    EXPECT_LE(x.longest, x.ideal + x.ideal / 16 + kMostMargin) << b.heads << ", " << b.keys.size();
  }
}

// What fills whole rounds, or is split for one, is not balanced; batch-invariant calls are not split at all.
TEST_F(EmulatedMlaSchedule, LeavesWholeRoundsAlone) {
  for (const auto& [heads, keys, splits] : {std::tuple{128, even(128, 8192, 8192), 0},
                                            {128, even(132, 4096, 4096), 0},
                                            {64, even(130, 8192, 8192), 0},
                                            {16, even(128, 8192, 8192), 0},
                                            {128, even(4, 2048, 2048), 4},
                                            {64, even(16, 8192, 8192), 16},
                                            {64, even(96, 2048, 2048), 0},
                                            {128, even(1030, 500, 500), 0}}) {
    const Listed x = list(heads, keys);
    EXPECT_EQ(x.wrong, "") << heads << ", " << keys.size();
    EXPECT_FALSE(x.balanced) << heads << ", " << keys.size();
    EXPECT_EQ(x.splits, splits) << heads << ", " << keys.size();
  }
  // Tables may ask for more M blocks than a batch has: there is no room, and nothing is balanced.
  for (const Listed& x :
       {list(128, even(70, 8192, 8192), R"("batch_invariant": true)"), list(128, even(70, 8192, 8192), "", 100)}) {
    EXPECT_EQ(x.wrong, "");
    EXPECT_FALSE(x.balanced);
    EXPECT_EQ(x.splits, 0);
  }
}

// Any lengths: random batches of all sizes.
TEST_F(EmulatedMlaSchedule, EveryTileIsListedOnce) {
  unsigned state = 7;
  const auto random = [&](unsigned below) {
    return static_cast<int>(((state = state * 1664525 + 1013904223) >> 8) % below);
  };
  int shared = 0;
  for (int i = 0; i < 16; ++i) {
    std::vector<int> keys(static_cast<size_t>(1 + random(i % 6 == 0 ? 1024 : 200)));
    const auto most = static_cast<unsigned>(64 << random(9));
    for (int& n : keys) n = random(most);
    if (i % 2 == 0) keys.front() = -7, keys.back() = i % 4 == 0 ? 2147480000 : keys.back();  // as no keys, as all
    const int64_t heads[] = {16, 32, 48, 64, 128, 256};
    const Listed x = list(heads[random(6)], keys);
    EXPECT_EQ(x.wrong, "") << i;
    shared += x.balanced ? 1 : 0;
    if (x.balanced) {
      EXPECT_LE(x.longest, x.ideal + x.ideal / 8 + 3 * kMostMargin) << i;
    }
  }
  EXPECT_GT(shared, 5);
}

// Of every kernel and producer: work tiles that follow each other, and splits of one sequence in several chains.
TEST_F(EmulatedMlaSchedule, AttendsByABalancedSchedule) {
  int splits = 0;
  const auto check_balanced = [&](std::string_view common, std::initializer_list<const char*> rest,
                                  int blocks = kBlocks) {
    for (const char* more : rest) {
      const cases::Row row = cases::Row(R"("dtype": "bf16", "max_logits": true)").with(common).with(more);
      EXPECT_EQ(run(tests::make_case(row), 1, blocks, blocks), "") << row.text();
      EXPECT_TRUE(balanced_) << row.text();
      splits += splits_;
    }
  };
  check_balanced(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 64})",
                 {R"("heads": [128, 1], "seqlens_kv": [300, 900, 1300, 20])",
                  R"("heads": [64, 1], "seqlens_kv": [600, 1000, 900, 900, 1000, 30])",
                  R"("heads": [16, 1], "seqlens_kv": [600, 1000, 900, 900, 1000, 0], "sinks": "mixed")",
                  R"("heads": [32, 1], "seqlens_q": [2, 1, 3, 2, 1], "seqlens_kv": [900, 900, 950, 800, 900],
                   "causal": true)",
                  R"("heads": [128, 1], "seqlens_kv": [500, 900, 1300], "cache": {"page_size": 3})"});
  check_balanced(R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
                 {R"("heads": [128, 1], "seqlens_kv": [300, 900, 1300, 20])",
                  R"("heads": [64, 1], "seqlens_kv": [600, 1000, 900, 900, 1000, 30])",
                  R"("heads": [32, 1], "seqlens_kv": [600, 1000, 900, 900, 1000, 30])",
                  R"("heads": [16, 1], "seqlens_kv": [600, 1000, 900, 900, 1000, 30])"});
  check_balanced(R"("kv": "slots", "head_dim": [576, 512], "heads": [64, 1], "seqlens_q": [2, 1, 3],
                  "sparse": {"topk": 900, "invalid": 0.1})",
                 {R"("shared_kv": true)", R"("cache": {"format": "mla_656"}, "extra": {"topk": 90, "page_size": 16})"});
  // Several blocks, or clusters, for each chain: one for each head tile. Some are not needed.
  check_balanced(R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 64},
                  "seqlens_kv": [300, 900, 1300], "out_dtype": "f32")",
                 {R"("heads": [256, 1])", R"("heads": [192, 1])"}, 8);
  EXPECT_GT(splits, 5);
}

}  // namespace
}  // namespace attune::cuda
