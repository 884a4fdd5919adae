// SPDX-License-Identifier: Apache-2.0
// Runs the kernels of the backward in the emulator, with poisoned memory, and compares with the oracle.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "cases/backward_problem.h"
#include "cases/row.h"
#include "cuda/backward/backward.h"
#include "cuda/backward/config.h"
#include "emulated.h"
#include "support.h"

namespace attune::tests {

// The row with some outputs of the backward, alone and in twos, and each of these plants.
inline std::vector<cases::Row> some_gradients(const cases::Row& row, const std::vector<std::string>& plants) {
  std::vector<cases::Row> rows;
  for (const std::vector<std::string>& outputs :
       {std::vector<std::string>{"dq"}, {"dk"}, {"dv"}, {"dk", "dv"}, {"dq", "dv"}}) {
    for (const std::string& plant : plants)
      rows.push_back(row.set("backward.outputs", outputs).set("backward.plant", plant));
  }
  return rows;
}

class EmulatedBackward : public Emulated {
 protected:
  // The kernel by mma.sync, in place of that by wgmma; whose limits.
  static inline bool by_mma = false;
  static inline cuda::backward::DeviceLimits limits;

  void TearDown() override { by_mma = false, limits = {}; }
  static cuda::backward::Config configure(const attune::BackwardProblem& p) {
    return by_mma ? cuda::backward::choose_mma_config(p, limits) : cuda::backward::choose_config(p);
  }
  static const Kernel& kernel_of(const attune::BackwardProblem& p) {
    if (!by_mma) return cuda::backward_kernel();
    return p.forward.q.dtype == ATTUNE_FLOAT32 ? cuda::backward_fp32_kernel() : cuda::backward_mma_kernel();
  }

  template <class... Args>
  static void launch(const cuda::backward::Launch& what, const Args&... args) {
    const auto entry = reinterpret_cast<void (*)(Args...)>(emulator::find_kernel(what.kernel));
    emulator::run(static_cast<unsigned>(what.blocks), static_cast<unsigned>(what.threads), [&] { entry(args...); });
  }

  static void run_kernels(const attune::BackwardProblem& p, const cuda::backward::Config& c, void* workspace) {
    const kernels::BackwardParams params = cuda::backward::to_params(p, c, workspace);
    for (cuda::backward::Launch what : cuda::backward::launches(c)) {
      what.blocks = blocks_of_run(what, c, p);
      if (what.blocks == 0) continue;
      if (what.arguments == cuda::backward::Arguments::kMaps) {
        const cuda::backward::Maps m = cuda::backward::describe_maps(p, c, what.outputs);
        launch(what, params, emulator::tensor_map(m.resident_qk), emulator::tensor_map(m.resident_vdo),
               emulator::tensor_map(m.qk), emulator::tensor_map(m.vdo));
      } else if (what.arguments == cuda::backward::Arguments::kBlockSum) {
        launch(what, cuda::backward::block_sum_params(p, params, what.outputs));
      } else {
        launch(what, params);
      }
    }
  }

  // plan: whose configuration it runs with, if not its own. poison: a byte of the workspace.
  static std::string run_emulated(cases::BackwardCall call, const cuda::backward::Config* plan = nullptr,
                                  int poison = 0x45) {
    const attune::BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kRequired);
    const cuda::backward::Config c = plan != nullptr ? *plan : configure(p);
    // Numbers, not NaN: rows with a NaN are computed again, which would hide that one was read.
    cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
    std::memset(workspace.buffer.device(), poison, c.workspace_bytes());
    try {
      cuda::backward::check_run(p, c);
      run_kernels(p, c, workspace.buffer.device());
    } catch (const std::exception& e) {
      return e.what();
    }
    return workspace.buffer.check_guards();
  }

  static bool is_covered(const cases::Case& spec) {
    cases::BackwardProblem problem(spec);
    cases::BackwardCall call = problem.device();
    const attune::BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kOptional);
    const Kernel& kernel = kernel_of(p);
    return kernel.coverage.difference(traits_of(p, call.attention)).empty() && kernel.backward_refusal(p).empty();
  }

  // What is wrong with a case, or kNotCovered.
  static std::string check(const cases::Case& spec) {
    if (!is_covered(spec)) return kNotCovered;
    cases::BackwardProblem problem(spec);
    const cases::ExpectedGradients expected = evaluate(problem);
    const std::string failure = run_emulated(problem.device());
    return failure.empty() ? compare(problem, expected, ATTUNE_DEVICE_CUDA).failure : failure;  // a GPU's bounds
  }

  static std::string check(const char* json) { return check(make_case(json)); }
};

}  // namespace attune::tests
