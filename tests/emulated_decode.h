// SPDX-License-Identifier: Apache-2.0
// Runs decode's cases in the emulator, in the kernels' forms for Hopper or for another architecture.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "emulated.h"
#include "emulated_decode_launch.h"
#include "support.h"

namespace attune::cuda {

constexpr int kFewSms = 3;  // multiprocessors, so that each block takes several splits

// ATTUNE_ARCH=<name>: all of it as on that architecture.
class EmulatedDecode : public tests::Emulated {
 protected:
  void SetUp() override {
    const char* name = std::getenv("ATTUNE_ARCH");
    run_as(name != nullptr ? name : "sm_90a");
    Emulated::SetUp();
  }
  void TearDown() override { capability_.reset(); }

  static void run_as(const std::string& name) {
    capability_.reset();
    architecture_ = find_architecture(name);
    ASSERT_NE(architecture_, nullptr) << name;
    capability_ = std::make_unique<emulator::Capability>(architecture_->capability);
  }

  // In clusters if the kernel has any for the case, else kNotCovered; or without, `layers` times with one schedule.
  // edit: of the problem's memory on the host.
  static std::string run(const cases::Case& spec, bool clusters, int layers = 1,
                         const std::function<void(const attune_attention&)>& edit = {}) {
    cases::Problem problem(spec);
    if (edit) edit(problem.host());
    problem.arena().upload();
    const attune_attention a = problem.device();
    const Problem p = make_problem(a, Data::kRequired);
    if (!decode_kernel().coverage.difference(traits_of(p, a)).empty() || !decode::refusal(p).empty())
      return tests::kNotCovered;
    const decode::DeviceShape device = decode::device_shape(*architecture_, clusters ? 132 : kFewSms);
    const decode::Config c = decode::choose_config(p, device, clusters ? "" : "none are asked for");
    if (clusters && c.cluster == 0) return tests::kNotCovered;
    if (c.stages < 2 || static_cast<int64_t>(c.shared_bytes()) > device.shared_bytes_per_block)
      return cat(c.stages, " stages, ", c.shared_bytes(), " bytes of shared memory");
    const cases::Expected expected = cases::evaluate(problem);
    cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
    decode::check_run(p, c);
    const kernels::AttentionParams params = decode::to_params(p, c, workspace.buffer.device());
    try {
      if (c.cluster == 0) emulate_decode_schedule(c, params);
      for (int i = 0; i < layers; ++i) emulate_decode(c, params);
    } catch (const std::exception& e) {
      return e.what();
    }
    if (const std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;
    return cases::compare(problem, expected).failure;
  }
  // Cases that have `common` and, one after the other, what is in `rest`.
  static void check(std::string_view common, std::initializer_list<const char*> rest, int layers = 1) {
    check(cases::Row(common), rest, layers);
  }
  static void check(const cases::Row& common, std::initializer_list<const char*> rest, int layers = 1) {
    for (const char* more : rest) {
      const cases::Case spec = tests::make_case(common.set("queries", "fixed").with(more));
      expect_right(spec, more, layers);
    }
  }
  static void expect_right(const cases::Case& spec, const char* what, int layers = 1,
                           const std::function<void(const attune_attention&)>& edit = {}) {
    if (target_of(*architecture_).has(ptx::kClusters)) {
      EXPECT_EQ(run(spec, true, 1, edit), "") << what << ", in clusters";
    }
    EXPECT_EQ(run(spec, false, layers, edit), "") << what;
  }

  inline static const Architecture* architecture_ = nullptr;
  inline static std::unique_ptr<emulator::Capability> capability_;
};

}  // namespace attune::cuda
