// SPDX-License-Identifier: Apache-2.0
// A schedule that was made for another call gives NaN, no numbers: the CUDA kernels on the CPU (tests/emulator), as
// attune_run_scheduled launches them, with something that a schedule follows from changed after attune_schedule.
#include <algorithm>
#include <cmath>
#include <functional>

#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "emulated_decode_launch.h"
#include "emulated_mla_launch.h"
#include "emulated_prefill.h"
#include "support.h"

namespace attune::cuda {
namespace {

using Change = std::function<void(attune_attention&)>;

enum class When { kRun, kRunScheduled };
enum class Schedule { kAsMade, kOtherStamp };

struct Outcome {
  int64_t numbers = 0, nans = 0;  // in out and lse
};

class EmulatedStamp : public EmulatedPrefill {
 protected:
  // Schedules, changes the call, attends.
  template <class Config, class ToParams, class MakeSchedule, class Attend>
  static Outcome run(cases::Problem& problem, const Config& c, size_t workspace_bytes, When when, Schedule schedule,
                     const Change& change, const ToParams& to_params, const MakeSchedule& make_schedule,
                     const Attend& attend) {
    problem.arena().upload();
    attune_attention a = problem.device();
    cases::Workspace workspace(cases::host_memory(), workspace_bytes);
    const auto before = to_params(make_problem(a, Data::kRequired), c, workspace.buffer.device());
    make_schedule(c, before);
    if (schedule == Schedule::kOtherStamp) change_stamp(before);
    change(a);
    for (const attune_tensor& t : {a.out, a.lse})
      cases::for_each_element(
          t, [&](const int64_t*, void* at) { cases::encode(static_cast<attune_dtype>(t.dtype), 0, at); });
    Problem p = make_problem(a, Data::kRequired);
    p.scheduled_before = when == When::kRunScheduled;
    const emulator::Pinned pinned;  // by a schedule of other lengths two blocks may have the same rows
    attend(p, c, to_params(p, c, workspace.buffer.device()));
    Outcome outcome;
    for (const attune_tensor& t : {a.out, a.lse}) {
      for (const double x : tests::gather_values(t)) ++(std::isnan(x) ? outcome.nans : outcome.numbers);
    }
    EXPECT_EQ(workspace.buffer.check_guards(), "");
    EXPECT_EQ(problem.arena().check_guards(), "");
    return outcome;
  }
  static void change_stamp(const kernels::AttentionParams& k) {
    for (int i = 0; i < k.blocks; ++i) ++k.stream_k[i].stamp;
  }
  static void change_stamp(const kernels::WorkTileParams& k) { ++k.list->stamp; }

  static Outcome decode(const char* row, When when, Schedule schedule, const Change& change) {
    cases::Problem problem(tests::make_case(row));
    const Problem p = make_problem(problem.device(), Data::kOptional);
    decode::DeviceShape device;
    device.num_sms = 3;
    const decode::Config c = decode::choose_config(p, device, "none are asked for");
    return run(problem, c, c.workspace_bytes(), when, schedule, change, decode::to_params, emulate_decode_schedule,
               [](const Problem&, const decode::Config& config, const kernels::AttentionParams& k) {
                 emulate_decode(config, k);
               });
  }
  static Outcome prefill(const char* row, When when, Schedule schedule, const Change& change) {
    cases::Problem problem(tests::make_case(row));
    const Problem p = make_problem(problem.device(), Data::kOptional);
    const prefill::Config c = prefill::choose_config(p, kBlocks);
    return run(problem, c, c.workspace_bytes(), when, schedule, change, prefill::to_params,
               emulate_schedule<prefill::Config>, emulate_attention);
  }
  static Outcome mla(const char* row, When when, Schedule schedule, const Change& change) {
    cases::Problem problem(tests::make_case(row));
    const Problem p = make_problem(problem.device(), Data::kOptional);
    const mla::Config c = mla::choose_config(p, kBlocks);
    return run(problem, c, c.workspace_bytes(), when, schedule, change, mla::to_params, emulate_schedule<mla::Config>,
               emulate_mla);
  }

  using Run = Outcome (*)(const char*, When, Schedule, const Change&);
  struct Row {
    Run run;
    const char* row;
  };
  struct Case {
    const char* name;
    Run run;
    const char* row;
    Change change;
    bool all = true;  // rows are written whether or not what changed is seen
  };
  static void check(const std::vector<Case>& changes) {
    for (const Case& x : changes) {
      SCOPED_TRACE(x.name);
      const Outcome other = x.run(x.row, When::kRunScheduled, Schedule::kAsMade, x.change);
      EXPECT_GT(other.nans, 0);
      if (x.all) {
        EXPECT_EQ(other.numbers, 0);
      }
    }
  }
};

template <class T = int32_t>
Change one_less(attune_tensor attune_attention::*tensor, int64_t i) {
  return [=](attune_attention& a) { --static_cast<T*>((a.*tensor).data)[i]; };
}
// All sequences have one key: a walk finds fewer tiles than its range has.
Change shortened(int64_t batch) {
  return [=](attune_attention& a) { std::fill_n(static_cast<int32_t*>(a.seqused_kv.data), batch, 1); };
}
Change no_change() {
  return [](attune_attention&) {};
}

const char* const kDecode = R"({"name": "x", "kv": "paged", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16",
    "seqlens_q": [1, 1, 2], "seqlens_kv": [150, 40, 300], "finished": [0, 0, 0], "poison": false})";
const char* const kFixed = R"({"name": "x", "kv": "paged", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16",
    "queries": "fixed", "seqlens_q": [2, 2], "seqlens_kv": [150, 40], "poison": false})";
// The last range has several sequences.
const char* const kShortLast = R"({"name": "x", "kv": "paged", "heads": [4, 1], "head_dim": [64, 64], "dtype": "bf16",
    "queries": "fixed", "seqlens_q": 1, "seqlens_kv": [3000, 300, 300, 300, 300, 300], "poison": false})";
// More sequences than threads load at a time, eight each.
const char* const kManySequences = R"({"name": "x", "kv": "paged", "heads": [2, 1], "head_dim": [16, 16],
    "dtype": "bf16", "queries": "fixed", "batch": 600, "seqlens_q": 1, "seqlens_kv": 5, "poison": false})";
const char* const kHidden = R"({"name": "x", "kv": "paged", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16",
    "seqlens_q": [1, 2], "seqlens_kv": [150, 300], "causal": true, "window": [99, 0],
    "ranges": [[20, 149, 3, 9], [7, 12, 20, 28]], "poison": false})";
const char* const kPrompt = R"({"name": "x", "kv": "dense", "heads": [2, 2], "head_dim": [64, 64], "dtype": "bf16",
    "seqlens_q": [150, 3], "seqlens_kv": [150, 300], "causal": true, "poison": false})";
// Lengths that the host knows.
const char* const kFixedPrompt = R"({"name": "x", "kv": "dense", "heads": [2, 2], "head_dim": [64, 64], "dtype": "bf16",
    "queries": "fixed", "seqlens_q": 150, "seqlens_kv": [300, 300], "cu_seqlens_kv": false, "causal": true,
    "poison": false})";
const char* const kHiddenPrompt = R"({"name": "x", "kv": "dense", "heads": [2, 2], "head_dim": [64, 64],
    "dtype": "bf16", "seqlens_q": [150, 3], "seqlens_kv": [150, 300], "causal": true, "window": [40, 0],
    "ranges": [[20, 140, 3, 9], [7, 12, 20, 28]], "poison": false})";
const char* const kLists = R"({"name": "x", "kv": "slots", "heads": [64, 1], "head_dim": [576, 512], "dtype": "bf16",
    "shared_kv": true, "seqlens_q": [2, 1], "sparse": {"topk": 100, "topk_length": "token", "slots": 256},
    "poison": false})";
// Of 16 heads: mla/swap_ab.cu.
const char* const kTwoLists = R"({"name": "x", "kv": "slots", "heads": [16, 1], "head_dim": [576, 512],
    "dtype": "bf16", "cache": {"format": "mla_656"}, "seqlens_q": [2, 1],
    "sparse": {"topk": 100, "topk_length": "batch"}, "extra": {"topk": 40, "topk_length": "token"}, "poison": false})";
const char* const kFixedQueries = R"({"name": "x", "kv": "slots", "heads": [16, 1], "head_dim": [576, 512],
    "dtype": "bf16", "shared_kv": true, "queries": "fixed", "seqlens_q": [2, 2],
    "sparse": {"topk": 100, "topk_length": "token", "slots": 256}, "poison": false})";

// More rows than threads that look at their lengths.
const char* const kManyRows = R"({"name": "x", "kv": "slots", "heads": [16, 1], "head_dim": [576, 512],
    "dtype": "bf16", "shared_kv": true, "seqlens_q": [300, 1],
    "sparse": {"topk": 4, "topk_length": "token", "slots": 64}, "poison": false})";

TEST_F(EmulatedStamp, OtherLengthsGiveNan) {
  check({{"decode, lengths", decode, kDecode, one_less(&attune_attention::seqused_kv, 2)},
         {"decode, first of many lengths", decode, kManySequences, one_less(&attune_attention::seqused_kv, 0)},
         {"decode, later length", decode, kManySequences, one_less(&attune_attention::seqused_kv, 500)},
         {"decode, last length", decode, kManySequences, one_less(&attune_attention::seqused_kv, 599)},
         {"decode, fewer tiles than were cut", decode, kDecode, shortened(3)},
         {"decode, fewer tiles behind the last sequence", decode, kShortLast, shortened(6)},
         {"decode, offsets", decode, kDecode, one_less(&attune_attention::cu_seqlens_q, 1), false},
         {"decode, finished", decode, kDecode, one_less<uint8_t>(&attune_attention::finished, 0), false},
         {"prompts, offsets", prefill, kPrompt, one_less(&attune_attention::cu_seqlens_q, 1)},
         {"prompts, begin of keys", prefill, kPrompt, one_less(&attune_attention::cu_seqlens_kv, 1)},
         {"prompts, end of keys", prefill, kPrompt, one_less(&attune_attention::cu_seqlens_kv, 2)}});
}

TEST_F(EmulatedStamp, OtherListsGiveNan) {
  check({{"of rows", mla, kLists, one_less(&attune_attention::topk_length, 2)},
         {"of sequences", mla, kTwoLists, one_less(&attune_attention::topk_length, 1)},
         {"extra ones", mla, kTwoLists, one_less(&attune_attention::extra_topk_length, 0)},
         {"of many rows", mla, kManyRows, one_less(&attune_attention::topk_length, 0)},
         {"of rows without cu_seqlens_q", mla, kFixedQueries, one_less(&attune_attention::topk_length, 3)},
         {"shorter ones", mla, kLists, [](attune_attention& a) { --a.indices.shape[1]; }}});
}

TEST_F(EmulatedStamp, OtherWindowsAndRangesGiveNan) {
  for (const auto& [run, row] : {Row{decode, kHidden}, Row{prefill, kHiddenPrompt}}) {
    check({{"left", run, row, [](attune_attention& a) { ++a.window_left; }},
           {"right", run, row, [](attune_attention& a) { ++a.window_right; }},
           {"first", run, row, one_less(&attune_attention::bidirectional_ranges, 2)},
           {"last", run, row, one_less(&attune_attention::bidirectional_ranges, 5)},
           {"fewer", run, row, [](attune_attention& a) { --a.bidirectional_ranges.shape[1]; }}});
  }
}

TEST_F(EmulatedStamp, OtherShapesGiveNan) {
  check({{"dense keys", prefill, kPrompt, [](attune_attention& a) { --a.k.shape[0], --a.v.shape[0]; }},
         {"fixed dense keys", prefill, kFixedPrompt, [](attune_attention& a) { --a.k.shape[1], --a.v.shape[1]; }},
         {"what tables hold", decode, kDecode, [](attune_attention& a) { a.cache.page_table.shape[1] = 18; }},
         {"finished rows", decode, kDecode, [](attune_attention& a) { a.zero_finished = 1; }}});
}

// Tables of other widths hold the same lengths.
TEST_F(EmulatedStamp, TheSameCallGivesNumbers) {
  const Change narrower = [](attune_attention& a) { --a.cache.page_table.shape[1]; };
  for (const auto& [run, row] :
       {Row{decode, kDecode}, Row{decode, kFixed}, Row{decode, kHidden}, Row{decode, kManySequences},
        Row{prefill, kPrompt}, Row{prefill, kFixedPrompt}, Row{prefill, kHiddenPrompt}, Row{mla, kLists},
        Row{mla, kTwoLists}, Row{mla, kFixedQueries}, Row{mla, kManyRows}}) {
    SCOPED_TRACE(row);
    EXPECT_EQ(run(row, When::kRunScheduled, Schedule::kAsMade, no_change()).nans, 0);
    EXPECT_EQ(run(row, When::kRunScheduled, Schedule::kOtherStamp, no_change()).numbers, 0);
    // attune_run has just scheduled: it asks nothing.
    EXPECT_EQ(run(row, When::kRun, Schedule::kOtherStamp, no_change()).nans, 0);
  }
  EXPECT_EQ(decode(kDecode, When::kRunScheduled, Schedule::kAsMade, narrower).nans, 0);
}

}  // namespace
}  // namespace attune::cuda
