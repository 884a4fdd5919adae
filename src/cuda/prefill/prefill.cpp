// SPDX-License-Identifier: Apache-2.0
#include "cuda/prefill/prefill.h"

#include <limits>

#include "cuda/attention/params.h"
#include "cuda/attention/plan.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/prefill/config.h"

namespace attune::cuda {
namespace {

using attention::Rows;
using prefill::Config;

class PrefillPlan final : public attention::WorkTilePlan {
 public:
  PrefillPlan(const Problem& p, int32_t device, const DeviceInfo& info, int max_decode_q, Rows rows)
      : PrefillPlan(
            p, device, rows,
            prefill::choose_config(attention::prepares_rows(p, rows) ? attention::after_prologue(p, nullptr, rows) : p,
                                   info.num_sms, max_decode_q)) {}

  std::string describe() const override {
    return cat("kernel ", name(), ": ", config_.rows, " packed rows of ", config_.heads_of_tile, " head",
               plural_s(config_.heads_of_tile), " x ", config_.keys, " keys, ", config_.stages, " stage",
               plural_s(config_.stages), ", ", kernel(0).num_regs, " registers, ", config_.shared_bytes(),
               " bytes of shared memory; ", config_.blocks, " block", plural_s(config_.blocks),
               config_.cluster > 1 ? " in pairs; " : "; ", prepares() ? "q, k and v by a launch before; " : "",
               "workspace ", workspace_size(), " bytes");
  }

 private:
  PrefillPlan(const Problem& p, int32_t device, Rows rows, const Config& config)
      : WorkTilePlan(config.name(), device, attention::prepares_rows(p, rows), rows), config_(config) {
    find_kernels(p, {config_.main_kernel(), config_.schedule_kernel()}, config_.workspace_bytes());
  }

  kernels::WorkTileParams to_params(const Problem& p, void* workspace) const override {
    return prefill::to_params(p, config_, workspace);
  }
  void check_run(const Problem& p) const override { prefill::check_run(p, config_); }

  void attend(const Problem& p, void* workspace, void* stream) const override {
    LaunchConfig launch = programmatic(config_.blocks, config_.threads(), stream, config_.shared_bytes());
    launch.cluster[0] = static_cast<uint32_t>(config_.cluster);
    const kernels::WorkTileParams params = to_params(p, workspace);
    if (config_.fp32()) return launch_kernel(kernel(0), launch, params, prefill::fp32_rows(p));
    const prefill::Maps maps = prefill::describe_maps(p, config_);
    const TensorMap q = make_tensor_map(maps.q, device());
    const auto encode = [&](const TensorMapDesc& m) { return make_tensor_map(m, device(), q); };
    launch_kernel(kernel(0), launch, params, q, encode(maps.k), encode(maps.v), encode(maps.dense_k),
                  encode(maps.dense_v));
  }

  Config config_;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device) { return prefill::make_plan(p, device, 0); }

Coverage coverage() {
  Coverage c = attention::coverage();
  c[Axis::kQueryDtype] = use::kQF16 | use::kQBf16;
  c[Axis::kKvSource] = use::kDense | use::kPaged | use::kContiguous | use::kNewTokens;
  c[Axis::kKvFormat] = use::kF16 | use::kBf16 | use::kE4m3 | use::kE5m2 | use::kInt8 | use::kValiasesK | use::kVBesideK;
  c[Axis::kPrologue] = use::kNoPrologue | use::kQkvBias | use::kIa3 | use::kRope | use::kMrope | use::kLogn |
                       use::kAppend | use::kPowerOfTwoScales;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

Coverage fp32_coverage() {
  Coverage c = coverage();
  c[Axis::kQueryDtype] |= use::kQF32;
  c[Axis::kKvFormat] |= use::kF32;
  return c;
}

Coverage fp8_coverage() {
  Coverage c = coverage();
  c[Axis::kQueryDtype] = use::kQE4m3;
  c[Axis::kKvSource] = use::kDense;
  c[Axis::kKvFormat] = use::kE4m3 | use::kValiasesK | use::kVBesideK;
  c[Axis::kKvScales] = use::kNoScale;
  c[Axis::kKvLayout] = use::kNhd;
  c[Axis::kMask] = use::kNoMask | use::kCausal | use::kWindow | use::kFinished | use::kSkipDecode;
  c[Axis::kScore] = use::kPlain | use::kSinks;
  c[Axis::kPrologue] = use::kNoPrologue | use::kDequantize;
  c.head_dim_v_max = 128;
  return c;
}

// A call with one query a sequence is a decode step, even without max_seqlen_q. With batch_invariant the choice must
// not depend on the other sequences.
int64_t most_rows(const Problem& p) {
  return (p.total_q == p.batch && !p.batch_invariant ? 1 : p.max_seqlen_q) * p.group;
}

// 16-bit queries come to cuda_prefill_fp32 if the TMA cannot copy their cache. With too few rows for a row block decode
// is as fast, so it leaves them. Short prompts are left to cuda_prefill_mma, a later row.
bool leaves_fp32(const Problem& p, unsigned) {
  if (p.q.dtype == ATTUNE_FLOAT32) return prefill::has_few_rows(p);
  return (p.cache && most_rows(p) < 128) || prefill::is_short_prompt(p);
}

bool leaves(const Problem& p, unsigned) { return prefill::has_few_rows(p) || prefill::is_short_prompt(p); }

std::unique_ptr<KernelPlan> make_plan_as_fp32(const Problem& p, int32_t device) {
  if (p.q.dtype == ATTUNE_FLOAT32) return make_plan(p, device);
  return std::make_unique<PrefillPlan>(p, device, require_device(device), 0, Rows::kFp32);
}

}  // namespace

const Kernel& prefill_kernel() {
  static const Kernel kernel{"cuda_prefill", "attention", ATTUNE_DEVICE_CUDA, kWarpgroups,
                             coverage(),     make_plan,   prefill::refusal,   leaves};
  return kernel;
}

const Kernel& prefill_fp8_kernel() {
  static const Kernel kernel{"cuda_prefill_fp8", "attention", ATTUNE_DEVICE_CUDA, kWarpgroups,
                             fp8_coverage(),     make_plan,   prefill::refusal};
  return kernel;
}

const Kernel& prefill_fp32_kernel() {
  static const Kernel kernel{"cuda_prefill_fp32", "attention",       ATTUNE_DEVICE_CUDA,       kWarpgroups,
                             fp32_coverage(),     make_plan_as_fp32, prefill::refusal_as_fp32, leaves_fp32};
  return kernel;
}

namespace prefill {

// Blocks of 128 rows waste work where sequences have few rows; decode has blocks of 16.
bool has_few_rows(const Problem& p) { return p.cache && most_rows(p) < 32; }

// By measurement on an H200, of scores without terms and masks: up to one row block of 128 queries a head, and two
// blocks a multiprocessor. With batch_invariant the choice must not depend on the other sequences.
bool is_short_prompt(const Problem& p) {
  constexpr int64_t kRows = 128, kBlocks = 256;
  return p.dense_kv && !p.cache && !p.batch_invariant && p.q.element_size == 2 && p.max_seqlen_q <= kRows &&
         p.k.rows <= kRows * p.batch && p.batch * p.heads_q <= kBlocks && attention::score_kinds(p) == 0 &&
         attention::mask_kinds(p) == 0;
}

const Kernel& kernel_for(const Problem& p) {
  if (p.q.dtype == ATTUNE_FLOAT32) return prefill_fp32_kernel();
  return attention::is_fp8_attention(p) ? prefill_fp8_kernel() : prefill_kernel();
}

// q's dtype chooses the kernel.
std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device, int max_decode_q) {
  attention::require_taken(kernel_for(p).name, refusal(p));
  return std::make_unique<PrefillPlan>(p, device, require_device(device), max_decode_q, Rows::kOwnType);
}

}  // namespace prefill

}  // namespace attune::cuda
