// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.h"

#include <algorithm>

#include "cuda/attention/params.h"
#include "cuda/attention/plan.h"
#include "cuda/decode/config.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace attune::cuda {
namespace {

using decode::Config, decode::Grid;

class DecodePlan final : public KernelPlan {
 public:
  DecodePlan(const Problem& p, int32_t device, const DeviceInfo& info, const decode::Beside& beside) {
    find_kernels(decode::choose_config_beside(p, decode::device_shape(info), beside), device);
  }
  DecodePlan(const Problem& p, int32_t device, const DeviceInfo& info, bool may_cluster) {
    const decode::DeviceShape shape = decode::device_shape(info);
    find_kernels(decode::choose_config(p, shape, may_cluster ? "" : "none are asked for"), device);
    // Clusters that are not all resident at once would deadlock: smaller ones run the same kernel.
    for (; config_.cluster > 2 && !clusters_fit(); config_.cluster /= 2) config_.blocks /= 2;
    if (config_.cluster > 0 && !clusters_fit()) {
      find_kernels(decode::choose_config(p, shape, "no room for all at a time"), device);
    }
  }

  size_t workspace_size() const override { return config_.workspace_bytes(); }

  std::string describe() const override {
    return cat("kernel cuda_decode: ", config_.warps, " warp", plural_s(config_.warps), " x 16 keys, ", config_.rows(),
               " packed row", plural_s(config_.rows()), ", ", config_.stages, " stage", plural_s(config_.stages), ", ",
               config_.blocks_per_sm, " block", plural_s(config_.blocks_per_sm), " a multiprocessor, ", main_->num_regs,
               " registers, ", config_.shared_bytes(), " bytes of shared memory; ", config_.blocks, " block",
               plural_s(config_.blocks),
               config_.cluster > 0 ? " in clusters" : cat(", no clusters (", config_.no_clusters, ")"), "; workspace ",
               config_.workspace_bytes(), " bytes");
  }

  void schedule(const Problem& p, void* workspace, void* stream) const override {
    if (attention::is_empty(p) || schedule_ == nullptr) return;
    launch_kernel(*schedule_, programmatic(1, config_.schedule_threads, stream),
                  decode::to_params(p, config_, workspace));
  }

  void run(const Problem& p, void* workspace, void* stream) const override {
    if (attention::is_empty(p)) return;
    decode::check_run(p, config_);
    const kernels::AttentionParams params = decode::to_params(p, config_, workspace);
    LaunchConfig launch = programmatic(1, 32 * config_.warps, stream, config_.shared_bytes());
    const Grid grid = config_.grid(params);
    std::copy(grid.begin(), grid.end(), launch.grid);
    if (config_.cluster > 0) launch.cluster[0] = static_cast<uint32_t>(config_.cluster);
    launch_kernel(*main_, launch, params);
  }

 private:
  bool clusters_fit() const {
    return main_->max_active_clusters(static_cast<uint32_t>(config_.cluster), 32 * config_.warps,
                                      config_.shared_bytes()) *
               config_.cluster >=
           config_.blocks;
  }

  void find_kernels(const Config& config, int32_t device) {
    config_ = config;
    std::vector<KernelSpec> specs = {config_.main_kernel()};
    if (config_.cluster == 0) specs.push_back(config_.schedule_kernel());
    warm(specs, device);
    main_ = &get_kernel(specs[0], device);
    schedule_ = config_.cluster == 0 ? &get_kernel(specs[1], device) : nullptr;
  }

  Config config_;
  const CompiledKernel* schedule_ = nullptr;
  const CompiledKernel* main_ = nullptr;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device) { return make_decode_plan(p, device, true); }

Coverage coverage() {
  Coverage c = attention::coverage();
  c[Axis::kQueryDtype] = use::kQF32 | use::kQF16 | use::kQBf16 | use::kQE4m3 | use::kQE5m2 | use::kQInt8;
  c[Axis::kKvSource] = use::kPaged | use::kContiguous | use::kNewTokens | use::kRing | use::kBeams;
  c[Axis::kKvFormat] =
      use::kF32 | use::kValiasesK | use::kVBesideK | use::kF16 | use::kBf16 | use::kE4m3 | use::kE5m2 | use::kInt8;
  c[Axis::kPrologue] = use::kNoPrologue | use::kDequantize | use::kQkvBias | use::kIa3 | use::kRope | use::kMrope |
                       use::kLogn | use::kAppend;
  c.group_max = 128;
  return c;
}

}  // namespace

std::unique_ptr<KernelPlan> make_decode_plan(const Problem& p, int32_t device, bool may_cluster) {
  attention::require_taken("cuda_decode", decode::refusal(p));
  return std::make_unique<DecodePlan>(p, device, require_device(device), may_cluster);
}

std::unique_ptr<KernelPlan> make_decode_plan_beside(const Problem& p, int32_t device, const decode::Beside& beside) {
  attention::require_taken("cuda_decode", decode::refusal(p));
  return std::make_unique<DecodePlan>(p, device, require_device(device), beside);
}

const Kernel& decode_kernel() {
  static const Kernel kernel{"cuda_decode", "attention", ATTUNE_DEVICE_CUDA, 0, coverage(), make_plan, decode::refusal};
  return kernel;
}

}  // namespace attune::cuda
