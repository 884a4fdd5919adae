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
  CudaBackwardPlan(const BackwardProblem& p, int32_t device) : device_(device), c_(backward::choose_config(p)) {
    require_device(device);
    launches_ = backward::launches(c_);
    std::vector<KernelSpec> specs;
    for (const Launch& launch : launches_) specs.push_back(launch.kernel);
    warm(specs, device);
    for (const KernelSpec& spec : specs) kernels_.push_back(&get_kernel(spec, device));
  }

  size_t workspace_size() const override { return c_.workspace_bytes(); }
  std::string describe() const override {
    const char* const one_pass = " queries; dq is added in the order of the keys";
    const char* const passes = " rows; a pass for each gradient";
    return cat("cuda_backward: blocks of ", kernels::kBackwardRows, c_.has_one_pass() ? " keys" : " rows",
               ", tiles of ", c_.tile(), c_.has_one_pass() ? one_pass : passes);
  }

  void run(const BackwardProblem& p, void* workspace, void* stream) const override {
    // Then dsinks alone has elements.
    const bool nothing = attention::is_empty(p.forward) && (p.forward.k.rows == 0 || p.forward.batch == 0);
    if (!nothing) backward::check_run(p, c_);
    const kernels::BackwardParams params = backward::to_params(p, c_, workspace);
    for (size_t i = 0; i < launches_.size(); ++i) {
      const Arguments arguments = launches_[i].arguments;
      if (launches_[i].blocks == 0 || (nothing && arguments != Arguments::kSinkSum)) continue;
      LaunchConfig launch;
      launch.grid[0] = static_cast<uint32_t>(launches_[i].blocks);
      launch.block[0] = static_cast<uint32_t>(launches_[i].threads);
      launch.shared_bytes = static_cast<uint32_t>(launches_[i].kernel.shared_bytes);
      launch.stream = stream;
      if (arguments == Arguments::kMaps) {
        const Maps m = backward::describe_maps(p, c_, launches_[i].of);
        launch_kernel(*kernels_[i], launch, params, make_tensor_map(m.own_x, device_),
                      make_tensor_map(m.own_y, device_), make_tensor_map(m.x, device_), make_tensor_map(m.y, device_));
      } else if (arguments == Arguments::kSinkSum) {
        launch_kernel(*kernels_[i], launch, backward::sink_sum_params(p, params));
      } else {
        launch_kernel(*kernels_[i], launch, params);
      }
    }
  }

 private:
  int32_t device_;
  Config c_;
  std::vector<Launch> launches_;
  std::vector<const CompiledKernel*> kernels_;  // of each
};

std::unique_ptr<BackwardPlan> make_plan(const BackwardProblem& p, int32_t device) {
  return std::make_unique<CudaBackwardPlan>(p, device);
}

Coverage coverage() {
  Coverage c;
  const auto axis = [&](Axis x) -> uint32_t& { return c.axes[static_cast<int>(x)]; };
  axis(Axis::kQueries) = use::kRagged | use::kFixed;
  axis(Axis::kQueryDtype) = use::kQF16 | use::kQBf16;
  axis(Axis::kKvSource) = use::kDense;
  axis(Axis::kKvFormat) = use::kF16 | use::kBf16 | use::kVBesideK;
  axis(Axis::kKvScales) = use::kNoScale;
  axis(Axis::kKvLayout) = use::kNhd;
  axis(Axis::kMask) = use::kNoMask | use::kCausal | use::kWindow | use::kBits | use::kRanges;
  axis(Axis::kScore) = use::kPlain | use::kSoftcap | use::kAlibi | use::kAlibiSqrt | use::kBias | use::kNewTokenBias |
                       use::kT5 | use::kSinks;
  axis(Axis::kPrologue) = use::kNoPrologue;
  axis(Axis::kOutput) = use::kOutF32 | use::kOutF16 | use::kOutBf16;
  axis(Axis::kDeterminism) = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = c.head_dim_v_max = 256;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& backward_kernel() {
  static const Kernel kernel{
      "cuda_backward", kAttentionBackward, ATTUNE_DEVICE_CUDA, kWarpgroups, coverage(), nullptr, nullptr,
      nullptr,         make_plan,          backward::refusal};
  return kernel;
}

}  // namespace attune::cuda
