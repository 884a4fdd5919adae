// SPDX-License-Identifier: Apache-2.0
// Prefill by mma.sync, from its own source on the CPU (tests/emulator): as on GPUs before Hopper, against the oracle,
// with poisoned memory.
#pragma once

#include <algorithm>
#include <functional>

#include "cuda/architecture.h"
#include "cuda/attention/prologue.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/mma.h"
#include "emulated.h"
#include "emulated_prefill_launch.h"
#include "emulated_rows.h"
#include "support.h"

namespace attune::cuda {

class EmulatedPrefillMma : public tests::Emulated {
 protected:
  using Edit = std::function<void(const attune_attention&)>;

  static constexpr int kMultiprocessors = 3;  // for the launches before

  // few_blocks: a block of the grid for each head takes all row blocks of all sequences. edit: changes the problem's
  // memory on the host. moves: q, k and v of the new tokens lie at odd addresses. rows: kFp32 is what
  // cuda_prefill_fp32_mma makes of 16-bit queries.
  static std::string run(const cases::Case& spec, const char* like = "sm_80", bool few_blocks = false,
                         const Edit& edit = {}, bool moves = false, attention::Rows rows = attention::Rows::kOwnType) {
    const Architecture& architecture = *find_architecture(like);
    const emulator::Capability as(architecture.capability);
    cases::Problem problem(spec);
    if (edit) edit(problem.host());
    problem.arena().upload();
    const attune_attention a = problem.device();
    Problem given = make_problem(a, Data::kRequired);
    if (given.q.dtype == ATTUNE_FLOAT8_E4M3) rows = attention::Rows::kBf16;
    const bool fp32 = given.q.dtype == ATTUNE_FLOAT32 || rows == attention::Rows::kFp32;
    const Kernel& row = fp32                             ? prefill_fp32_mma_kernel()
                        : rows == attention::Rows::kBf16 ? prefill_fp8_mma_kernel()
                                                         : prefill_mma_kernel();
    const auto covers = [&] { return row.refusal(given).empty(); };
    if (!row.coverage.difference(traits_of(given, a)).empty() || !covers()) return tests::kNotCovered;
    const cases::Expected expected = cases::evaluate(problem);
    std::vector<uint16_t> rows_moved[3];
    if (moves) move_rows(given, rows_moved);
    if (moves && (!attention::copies_rows(given) || !covers())) return tests::kNotCovered;
    const bool prepares = attention::prepares_rows(given, rows);
    cases::Workspace workspace(cases::host_memory(), attention::prologue_bytes(given, rows));
    void* const prepared = workspace.buffer.device();
    const Problem p = prepares ? attention::after_prologue(given, prepared, rows) : given;
    const prefill_mma::Config c =
        prefill_mma::choose_config(p, architecture.shared_per_sm, architecture.shared_a_block);
    if (static_cast<int64_t>(c.shared_bytes()) > architecture.shared_a_block)
      return cat(c.shared_bytes(), " bytes of shared memory");
    prefill_mma::check_run(p, c);
    const kernels::WorkTileParams params = prefill_mma::to_params(p, c);
    const auto threads = static_cast<unsigned>(c.threads());
    void* const kernel = emulator::find_kernel(c.kernel());
    const kernels::Fp32Rows vec4 = prefill::fp32_rows(p);
    const auto attend = [&] {
      if (fp32) return reinterpret_cast<void (*)(kernels::WorkTileParams, kernels::Fp32Rows)>(kernel)(params, vec4);
      reinterpret_cast<void (*)(kernels::WorkTileParams)>(kernel)(params);
    };
    auto grid = c.grid(p);
    if (few_blocks) grid[1] = grid[2] = 1;
    try {
      if (prepares)
        for (const PrepareProblem& op : attention::launches_before(given, prepared, rows))
          launch_prepare(op, kMultiprocessors);
      if (p.batch > 0 && p.total_q > 0) emulator::run(emulator::Index{grid[0], grid[1], grid[2]}, threads, attend);
    } catch (const std::exception& e) {
      return e.what();
    }
    if (const std::string guards = workspace.buffer.check_guards(); !guards.empty()) return guards;
    return cases::compare(problem, expected, ATTUNE_DEVICE_CUDA).failure;
  }
  static void check(const cases::Row& common, std::initializer_list<const char*> rest, bool few_blocks = false,
                    const Edit& edit = {}) {
    for (const char* more : rest) {
      const cases::Row row = common.with(more);
      for (const char* like : {"sm_80", "sm_86"})
        EXPECT_EQ(run(tests::make_case(row), like, few_blocks, edit), "") << row.text() << " " << like;
    }
  }
  static void check(std::string_view common, std::initializer_list<const char*> rest, bool few_blocks = false,
                    const Edit& edit = {}) {
    check(cases::Row(common), rest, few_blocks, edit);
  }
};

}  // namespace attune::cuda
