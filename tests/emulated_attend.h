// SPDX-License-Identifier: Apache-2.0
// A call without a prologue on the CPU (tests/emulator), by the CUDA kernel that it would get.
#pragma once

#include <string>

#include "cuda/decode/config.h"
#include "cuda/mixed/mixed.h"
#include "cuda/prefill/config.h"
#include "dispatch/registry.h"
#include "emulated_decode_launch.h"
#include "emulated_mla_launch.h"
#include "support.h"

namespace attune::cuda {

// num_sms: multiprocessors of the device.
inline void emulate_attention(const attune_attention& a, int num_sms) {
  const Problem p = make_problem(a, Data::kRequired);
  const std::string name = choose_kernel(p, traits_of(p, a), ATTUNE_DEVICE_CUDA).name;
  const auto run = [&](const auto& c, size_t bytes, const auto& to_params, const auto& launch) {
    cases::Workspace workspace(cases::host_memory(), bytes);
    launch(c, to_params(p, c, workspace.buffer.device()));
    EXPECT_EQ(workspace.buffer.check_guards(), "");
  };
  if (name == "cuda_decode") {
    decode::DeviceShape device;
    device.num_sms = num_sms;
    const decode::Config c = decode::choose_config(p, device);
    run(c, c.workspace_bytes(), decode::to_params, [](const auto& c, const auto& params) {
      if (c.cluster == 0) emulate_decode_schedule(c, params);
      emulate_decode(c, params);
    });
  } else if (name == "cuda_mixed") {
    decode::DeviceShape device;
    device.num_sms = num_sms;
    const auto [prompts, steps] = mixed::choose_configs(p, device);
    const size_t decode_begin = prompts.workspace_bytes();
    cases::Workspace workspace(cases::host_memory(), decode_begin + steps.workspace_bytes());
    auto* const memory = static_cast<std::byte*>(workspace.buffer.device());
    const kernels::WorkTileParams of_prompts = prefill::to_params(p, prompts, memory);
    const kernels::AttentionParams of_decode = decode::to_params(p, steps, memory + decode_begin);
    emulate_schedule(prompts, of_prompts);
    emulate_decode_schedule(steps, of_decode);
    emulate_decode(steps, of_decode);
    emulate_attention(p, prompts, of_prompts);
    EXPECT_EQ(workspace.buffer.check_guards(), "");
  } else if (name.starts_with("cuda_prefill")) {
    const prefill::Config c = prefill::choose_config(p, num_sms);
    run(c, c.workspace_bytes(), prefill::to_params, [&](const auto& c, const auto& params) {
      emulate_schedule(c, params);
      emulate_attention(p, c, params);
    });
  } else {
    ASSERT_EQ(name, "cuda_mla");
    const mla::Config c = mla::choose_config(p, num_sms);
    run(c, c.workspace_bytes(), mla::to_params, [&](const auto& c, const auto& params) {
      emulate_schedule(c, params);
      emulate_mla(p, c, params);
    });
  }
}

}  // namespace attune::cuda
