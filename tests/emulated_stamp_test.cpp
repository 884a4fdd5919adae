// SPDX-License-Identifier: Apache-2.0
// A schedule of other lengths gives NaN, no numbers: the CUDA kernels on the CPU (tests/emulator), as
// attune_run_scheduled launches them, with lengths that changed after attune_schedule.
#include <cmath>
#include <functional>

#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "emulated_decode_launch.h"
#include "emulated_prefill.h"
#include "support.h"

namespace attune::cuda {
namespace {

using Change = std::function<void(const attune_attention&)>;

struct Outcome {
  int64_t numbers = 0, nans = 0;  // in out and lse
};

class EmulatedStamp : public EmulatedPrefill {
 protected:
  // Schedules, changes the lengths, attends. before: as attune_run_scheduled says, else as attune_run.
  template <class Config, class ToParams, class Schedule, class Attend>
  static Outcome run(cases::Problem& problem, const Config& c, size_t workspace_bytes, bool before,
                     const Change& change, const ToParams& to_params, const Schedule& schedule, const Attend& attend) {
    problem.arena().upload();
    const attune_attention a = problem.device();
    Problem p = make_problem(a, Data::kRequired);
    cases::Workspace workspace(cases::host_memory(), workspace_bytes);
    schedule(c, to_params(p, c, workspace.buffer.device()));
    change(a);
    for (const attune_tensor& t : {a.out, a.lse})
      cases::for_each_element(
          t, [&](const int64_t*, void* at) { cases::encode(static_cast<attune_dtype>(t.dtype), 0, at); });
    p.scheduled_before = before;
    attend(p, c, to_params(p, c, workspace.buffer.device()));
    Outcome outcome;
    for (const attune_tensor& t : {a.out, a.lse}) {
      for (const double x : tests::gather_values(t)) ++(std::isnan(x) ? outcome.nans : outcome.numbers);
    }
    EXPECT_EQ(workspace.buffer.check_guards(), "");
    return outcome;
  }

  static Outcome decode(const char* row, bool before, const Change& change) {
    cases::Problem problem(tests::make_case(row));
    const Problem p = make_problem(problem.device(), Data::kOptional);
    decode::DeviceShape device;
    device.num_sms = 3;
    const decode::Config c = decode::choose_config(p, device, false);
    return run(problem, c, decode::workspace_layout(c).total, before, change, decode::to_params,
               emulate_decode_schedule,
               [](const Problem&, const decode::Config& config, const kernels::DecodeParams& k) {
                 emulate_decode(config, k);
               });
  }

  static Outcome prefill(const char* row, bool before, const Change& change) {
    cases::Problem problem(tests::make_case(row));
    const Problem p = make_problem(problem.device(), Data::kOptional);
    const prefill::Config c = prefill::choose_config(p, kBlocks);
    return run(problem, c, prefill::workspace_layout(c).total, before, change, prefill::to_params,
               emulate_schedule<prefill::Config>, emulate_attention);
  }
};

void one_less(const attune_tensor& t, int64_t i) { static_cast<int32_t*>(t.data)[i] -= 1; }

const char* const kDecode = R"({"name": "x", "kv": "paged", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16",
    "seqlens_q": [1, 1, 2], "seqlens_kv": [150, 40, 300], "finished": [0, 0, 0], "poison": false})";
const char* const kPrompt = R"({"name": "x", "kv": "dense", "heads": [2, 2], "head_dim": [64, 64], "dtype": "bf16",
    "seqlens_q": [150, 3], "seqlens_kv": [150, 300], "causal": true, "poison": false})";

TEST_F(EmulatedStamp, OtherLengthsGiveNan) {
  const Change none = [](const attune_attention&) {};
  const Change lengths = [](const attune_attention& a) { one_less(a.seqused_kv, 2); };
  const Change offsets = [](const attune_attention& a) { one_less(a.cu_seqlens_q, 1); };
  const Change keys = [](const attune_attention& a) { one_less(a.cu_seqlens_kv, 1); };
  const Change finished = [](const attune_attention& a) { static_cast<uint8_t*>(a.finished.data)[0] = 1; };
  using Run = Outcome (*)(const char*, bool, const Change&);
  const struct {
    const char* name;
    Run run;
    const char* row;
    const Change& change;
    bool all;  // rows are written whether or not what changed is seen
  } changes[] = {{"decode, lengths", decode, kDecode, lengths, true},
                 {"decode, offsets", decode, kDecode, offsets, false},
                 {"decode, finished", decode, kDecode, finished, false},
                 {"prompts, offsets", prefill, kPrompt, offsets, true},
                 {"prompts, keys", prefill, kPrompt, keys, true}};
  for (const auto& x : changes) {
    SCOPED_TRACE(x.name);
    const Outcome same = x.run(x.row, true, none);
    EXPECT_EQ(same.nans, 0);
    const Outcome other = x.run(x.row, true, x.change);
    EXPECT_GT(other.nans, 0);
    if (x.all) {
      EXPECT_EQ(other.numbers, 0);
    }
    // attune_run has just scheduled: it asks nothing.
    EXPECT_EQ(x.run(x.row, false, x.change).nans, 0);
  }
}

}  // namespace
}  // namespace attune::cuda
