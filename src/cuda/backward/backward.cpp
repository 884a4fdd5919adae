// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/backward.h"

#include <limits>
#include <memory>
#include <vector>

#include "core/status.h"
#include "cuda/attention/plan.h"
#include "cuda/backward/config.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace attune::cuda {
namespace {

using backward::Arguments;
using backward::Config;
using backward::Launch;
using backward::Maps;

class CudaBackwardPlan final : public BackwardPlan {
 public:
  CudaBackwardPlan(const Config& c, int32_t device) : device_(device), c_(c) {
    launches_ = backward::launches(c_);
    std::vector<KernelSpec> specs;
    for (const Launch& launch : launches_) specs.push_back(launch.kernel);
    warm(specs, device);
    for (const KernelSpec& spec : specs) kernels_.push_back(&get_kernel(spec, device));
  }

  size_t workspace_size() const override { return c_.workspace_bytes(); }
  std::string describe() const override {
    const bool with_tables = c_.with_dbias || c_.t5_entries > 0;
    return cat(describe_rows(), with_tables ? "; gradients of biases in passes of their own" : "");
  }

  void run(const BackwardProblem& p, void* workspace, void* stream) const override {
    // Then only tables have elements.
    const bool nothing = attention::is_empty(p.forward) && (p.forward.k.rows == 0 || p.forward.batch == 0);
    if (!nothing) backward::check_run(p, c_);
    const kernels::BackwardParams params = backward::to_params(p, c_, workspace);
    for (size_t i = 0; i < launches_.size(); ++i) {
      const Arguments arguments = launches_[i].arguments;
      const int64_t blocks = backward::blocks_of_run(launches_[i], c_, p);
      if (blocks == 0 || (nothing && !launches_[i].of_whole_table())) continue;
      LaunchConfig launch;
      launch.grid[0] = static_cast<uint32_t>(blocks);
      launch.block[0] = static_cast<uint32_t>(launches_[i].threads);
      launch.shared_bytes = static_cast<uint32_t>(launches_[i].kernel.shared_bytes);
      launch.stream = stream;
      if (arguments == Arguments::kMaps) {
        const Maps m = backward::describe_maps(p, c_, launches_[i].outputs);
        launch_kernel(*kernels_[i], launch, params, make_tensor_map(m.resident_qk, device_),
                      make_tensor_map(m.resident_vdo, device_), make_tensor_map(m.qk, device_),
                      make_tensor_map(m.vdo, device_));
      } else if (arguments == Arguments::kBlockSum) {
        launch_kernel(*kernels_[i], launch, backward::block_sum_params(p, params, launches_[i].outputs));
      } else {
        launch_kernel(*kernels_[i], launch, params);
      }
    }
  }

 private:
  // How dq, dk and dv are computed.
  std::string describe_rows() const {
    if (c_.mma == backward::MmaInstruction::kMmaSync) {
      const auto shape = c_.mma_shape(kernels::kGradientDq);
      return cat(c_.name(), ": blocks of ", shape.rows(), " rows, tiles of ", shape.tile,
                 "; a pass for dq, and one or two for dk and dv");
    }
    const char* const one_pass = " queries; dq is added in a fixed order";
    const char* const passes = " rows; a pass for each gradient";
    return cat("cuda_backward: blocks of ", kernels::kBackwardRows, c_.has_one_pass() ? " keys" : " rows",
               ", tiles of ", c_.tile(), c_.has_one_pass() ? one_pass : passes);
  }

  int32_t device_;
  Config c_;
  std::vector<Launch> launches_;
  std::vector<const CompiledKernel*> kernels_;  // of each
};

std::unique_ptr<BackwardPlan> make_plan(const BackwardProblem& p, int32_t device) {
  require_device(device);
  return std::make_unique<CudaBackwardPlan>(backward::choose_config(p), device);
}
std::unique_ptr<BackwardPlan> make_mma_plan(const BackwardProblem& p, int32_t device) {
  const DeviceInfo& info = require_device(device);
  return std::make_unique<CudaBackwardPlan>(
      backward::choose_mma_config(p, {info.shared_bytes_per_sm, info.shared_bytes_per_block}), device);
}

// dtypes: of q; formats: of k and v; outputs: of the gradients.
Coverage coverage(uint32_t dtypes, uint32_t formats, uint32_t outputs) {
  Coverage c;
  c[Axis::kQueries] = use::kRagged | use::kFixed;
  c[Axis::kQueryDtype] = dtypes;
  c[Axis::kKvSource] = use::kDense;
  c[Axis::kKvFormat] = formats | use::kVBesideK;
  c[Axis::kKvScales] = use::kNoScale;
  c[Axis::kKvLayout] = use::kNhd;
  c[Axis::kMask] = use::kNoMask | use::kCausal | use::kWindow | use::kKeyMasks | use::kRanges;
  c[Axis::kScore] = use::kPlain | use::kSoftcap | use::kAlibi | use::kAlibiSqrt | use::kBias | use::kNewTokenBias |
                    use::kT5 | use::kSinks;
  c[Axis::kPrologue] = use::kNoPrologue;
  c[Axis::kOutput] = outputs;
  c[Axis::kDeterminism] = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = c.head_dim_v_max = 256;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

Coverage coverage_of_16_bits() {
  return coverage(use::kQF16 | use::kQBf16, use::kF16 | use::kBf16, use::kOutF32 | use::kOutF16 | use::kOutBf16);
}

Kernel mma_kernel(const char* name, const Coverage& coverage) {
  return {name,    kAttentionBackward, ATTUNE_DEVICE_CUDA,   0, coverage, nullptr, nullptr,
          nullptr, make_mma_plan,      backward::mma_refusal};
}

}  // namespace

const Kernel& backward_kernel() {
  static const Kernel kernel{
      "cuda_backward", kAttentionBackward, ATTUNE_DEVICE_CUDA, kWarpgroups, coverage_of_16_bits(), nullptr, nullptr,
      nullptr,         make_plan,          backward::refusal};
  return kernel;
}

const Kernel& backward_fp32_kernel() {
  static const Kernel kernel = mma_kernel("cuda_backward_fp32", coverage(use::kQF32, use::kF32, use::kOutF32));
  return kernel;
}

const Kernel& backward_mma_kernel() {
  static const Kernel kernel = mma_kernel("cuda_backward_mma", coverage_of_16_bits());
  return kernel;
}

}  // namespace attune::cuda
