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

using backward::Config;
using backward::Maps;
using backward::Pass;

class CudaBackwardPlan final : public BackwardPlan {
 public:
  CudaBackwardPlan(const BackwardProblem& p, int32_t device) : device_(device), c_(backward::choose_config(p)) {
    require_device(device);
    const std::vector<KernelSpec> specs = c_.kernels(passes(p));
    warm(specs, device);
    for (const KernelSpec& spec : specs) kernels_.push_back(&get_kernel(spec, device));
  }

  size_t workspace_size() const override { return c_.workspace_bytes(); }
  std::string describe() const override {
    return cat("cuda_backward: dq by blocks of ", kernels::kBackwardRows, " queries, dk and dv by blocks of ",
               kernels::kBackwardRows, " keys; seven products, no sum crosses a block");
  }

  void run(const BackwardProblem& p, void* workspace, void* stream) const override {
    if (attention::is_empty(p.forward) && c_.max_kv_tiles == 0) return;
    backward::check_run(p);
    const kernels::BackwardParams params = backward::to_params(p, c_, workspace);
    launch_kernel(*kernels_[0], launch_of(2, Config::kScheduleThreads, 0, stream), params);
    if (c_.blocks(false) > 0)
      launch_kernel(*kernels_[1], launch_of(c_.blocks(false), Config::kRowThreads, 0, stream), params);
    size_t next = 2;
    for (const bool of_keys : {false, true}) {
      if (!wants(p, of_keys)) continue;
      const Pass pass = c_.pass(of_keys);
      const CompiledKernel &gradients = *kernels_[next], &recompute = *kernels_[next + 1];
      next += 2;
      if (c_.blocks(of_keys) == 0) continue;
      const Maps m = backward::describe_maps(p, pass);
      launch_kernel(gradients, launch_of(c_.blocks(of_keys), Config::kThreads, c_.shared_bytes(pass), stream), params,
                    make_tensor_map(m.own_x, device_), make_tensor_map(m.own_y, device_),
                    make_tensor_map(m.tile_x, device_), make_tensor_map(m.tile_y, device_));
      launch_kernel(recompute, launch_of(c_.blocks(of_keys), Config::kRowThreads, 0, stream), params);
    }
  }

 private:
  static bool wants(const BackwardProblem& p, bool of_keys) { return of_keys ? p.dk || p.dv : static_cast<bool>(p.dq); }
  static std::vector<bool> passes(const BackwardProblem& p) {
    std::vector<bool> list;
    for (const bool of_keys : {false, true})
      if (wants(p, of_keys)) list.push_back(of_keys);
    return list;
  }
  static LaunchConfig launch_of(int64_t blocks, int threads, size_t shared_bytes, void* stream) {
    LaunchConfig launch;
    launch.grid[0] = static_cast<uint32_t>(blocks);
    launch.block[0] = static_cast<uint32_t>(threads);
    launch.shared_bytes = static_cast<uint32_t>(shared_bytes);
    launch.stream = stream;
    return launch;
  }

  int32_t device_;
  Config c_;
  std::vector<const CompiledKernel*> kernels_;  // as Config::kernels
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
  axis(Axis::kMask) = use::kNoMask | use::kCausal | use::kWindow;
  axis(Axis::kScore) = use::kPlain;
  axis(Axis::kPrologue) = use::kNoPrologue;
  axis(Axis::kOutput) = use::kOutF32 | use::kOutF16 | use::kOutBf16;
  axis(Axis::kDeterminism) = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = c.head_dim_v_max = 128;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& backward_kernel() {
  static const Kernel kernel{"cuda_backward", kAttentionBackward, ATTUNE_DEVICE_CUDA, coverage(), nullptr, nullptr,
                             nullptr,         make_plan,          backward::refusal};
  return kernel;
}

}  // namespace attune::cuda
