// SPDX-License-Identifier: Apache-2.0
#include "cuda/mixed/mixed.h"

#include <algorithm>
#include <cstddef>

#include "cuda/attention/params.h"
#include "cuda/attention/plan.h"
#include "cuda/decode/config.h"
#include "cuda/decode/decode.h"
#include "cuda/ops/ops.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/prefill.h"

namespace attune::cuda {
namespace {

// The problem that both kernels see: after the prologue, which runs once before them.
Problem without_prologue(const Problem& p) {
  return attention::has_prologue(p) ? attention::after_prologue(p, nullptr) : p;
}

// Launches both schedules, then both kernels, on one stream. A kernel without sequences exits at once. The prologue
// runs once, before them.
class MixedPlan final : public KernelPlan {
 public:
  MixedPlan(const Problem& p, int32_t device) : device_(device) {
    const decode::DeviceShape shape = decode::device_shape(require_device(device));
    warm(mixed::kernels_of(p, shape), device);
    configs_ = mixed::choose_configs(p, shape);
    const Problem attended = without_prologue(p);
    prompts_ = prefill::make_plan(attended, device, configs_.steps.beside.max_decode_q);
    decode_ = make_decode_plan_beside(attended, device, configs_.steps.beside);
    decode_begin_ = prompts_->workspace_size();
    rows_begin_ = decode_begin_ + decode_->workspace_size();
    workspace_size_ = rows_begin_ + attention::prologue_bytes(p);
  }

  size_t workspace_size() const override { return workspace_size_; }

  std::string describe() const override {
    const int most = configs_.steps.beside.max_decode_q;
    return cat("kernel cuda_mixed: ", workspace_size_ > rows_begin_ ? "prologue in a launch before; " : "",
               "workspace ", workspace_size_, " bytes\nsequences of ",
               most == 1 ? std::string("1 query") : cat("1 to ", most, " queries"), ": ", decode_->describe(),
               "\nall others: ", prompts_->describe());
  }

  void schedule(const Problem& p, void* workspace, void* stream) const override {
    prompts_->schedule(p, workspace, stream);
    decode_->schedule(p, of_decode(workspace), stream);
  }

  void run(const Problem& p, void* workspace, void* stream) const override {
    if (attention::is_empty(p)) return;
    std::byte* const rows = static_cast<std::byte*>(workspace) + rows_begin_;
    const Problem attended = attention::has_prologue(p) ? attention::after_prologue(p, rows) : p;
    mixed::check_run(p, attended, configs_);  // before anything is launched
    if (attention::has_prologue(p)) run_qkv_prepare(attention::to_prepare(p, rows), device_, stream);
    decode_->run(attended, of_decode(workspace), stream);
    prompts_->run(attended, workspace, stream);
  }

 private:
  void* of_decode(void* workspace) const { return static_cast<std::byte*>(workspace) + decode_begin_; }

  int32_t device_;
  mixed::Configs configs_;
  size_t decode_begin_ = 0, rows_begin_ = 0, workspace_size_ = 0;
  std::unique_ptr<KernelPlan> prompts_, decode_;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device) {
  return std::make_unique<MixedPlan>(p, device);
}

// What decode and a prefill kernel both cover. For fp32 queries that is another prefill kernel.
Coverage coverage() {
  const Coverage &bits16 = prefill_kernel().coverage, &fp32 = prefill_fp32_kernel().coverage,
                 &decode = decode_kernel().coverage;
  Coverage c;
  for (int i = 0; i < kNumAxes; ++i) c.axes[i] = (bits16.axes[i] | fp32.axes[i]) & decode.axes[i];
  c.head_dim_qk_max = std::min(bits16.head_dim_qk_max, decode.head_dim_qk_max);
  c.head_dim_v_max = std::min(bits16.head_dim_v_max, decode.head_dim_v_max);
  c.group_max = std::min(bits16.group_max, decode.group_max);
  return c;
}

std::string refusal(const Problem& p) {
  // A copy of rows would come between the two launches.
  if (const char* const name = attention::row_to_copy(p); name != nullptr)
    return cat("rows of ", name, " that do not lie at multiples of 16 bytes");
  std::string why = prefill::refusal(p);
  return why.empty() ? decode::refusal(p) : why;
}

bool leaves(const Problem& p, unsigned) { return !mixed::may_be_mixed(p); }

}  // namespace

namespace mixed {

// A decode block has 16 rows. Sequences with more would read their keys once for each block.
int max_decode_queries(const Problem& p) {
  return static_cast<int>(std::max<int64_t>(1, 16 / std::max<int64_t>(1, p.group)));
}

// The longest sequence must have many rows, and far more than the mean: else two more launches cost more than they
// save. With a group of 32 heads or more a single query fills enough of prefill's row block.
bool may_be_mixed(const Problem& p) {
  constexpr int64_t kFewRows = 32, kMostMean = 256, kSpread = 4;
  if (p.batch_invariant) return false;  // the kernel of a sequence would depend on the other sequences
  if (p.batch <= 1 || !p.cu_q || p.group >= kFewRows || p.total_q <= p.batch) return false;
  return p.max_seqlen_q * p.group >= kFewRows && p.total_q <= kMostMean * p.batch &&
         p.total_q * kSpread <= p.max_seqlen_q * p.batch;
}

Configs choose_configs(const Problem& p, const decode::DeviceShape& device) {
  const Problem attended = without_prologue(p);
  const int max_decode_q = max_decode_queries(p);
  Configs c;
  c.prompts = prefill::choose_config(attended, device.num_sms, max_decode_q);
  // The workspace of prefill lies before that of decode, and begins with its list of work tiles: hence minus.
  c.steps = decode::choose_config_beside(attended, device,
                                         {max_decode_q, -static_cast<int64_t>(c.prompts.workspace_bytes()),
                                          static_cast<float>(c.prompts.rows * c.prompts.keys) / (128 * 128)});
  return c;
}

void check_run(const Problem& p, const Problem& attended, const Configs& c) {
  attention::require_still_taken("cuda_mixed", attention::prologue_refusal(p));
  prefill::check_run(attended, c.prompts);
  decode::check_run(attended, c.steps);
}

std::vector<KernelSpec> kernels_of(const Problem& p, const decode::DeviceShape& device) {
  const auto [prompts, steps] = choose_configs(p, device);
  std::vector<KernelSpec> specs = {prompts.schedule_kernel(), steps.schedule_kernel(), steps.main_kernel(),
                                   prompts.main_kernel()};
  if (attention::has_prologue(p)) specs.push_back(kernel_of(attention::to_prepare(p, nullptr)));
  return specs;
}

}  // namespace mixed

const Kernel& mixed_kernel() {
  static const Kernel kernel{"cuda_mixed", "attention", ATTUNE_DEVICE_CUDA, kWarpgroups, coverage(), make_plan,
                             refusal,      leaves};
  return kernel;
}

}  // namespace attune::cuda
