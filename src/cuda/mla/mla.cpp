// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/mla.h"

#include <limits>
#include <utility>

#include "cuda/attention/params.h"
#include "cuda/attention/plan.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/mla/config.h"

namespace attune::cuda {
namespace {

using mla::Config;

class MlaPlan final : public attention::WorkTilePlan {
 public:
  MlaPlan(const Problem& p, int32_t device, const DeviceInfo& info, const Config& config)
      : WorkTilePlan(config.name(), device, attention::has_prologue(p)), config_(config), num_sms_(info.num_sms) {
    std::vector<KernelSpec> specs = {config_.main_kernel(), config_.schedule_kernel()};
    if (config_.splits) specs.push_back(config_.combine_kernel());
    find_kernels(p, std::move(specs), config_.workspace_bytes());
  }

  std::string describe() const override {
    static constexpr const char* kHow[] = {"TMA boxes", "rows gathered by cp.async", "rows of 656 bytes dequantized",
                                           "rows of 584 bytes dequantized", "cached rows by bulk copies"};
    return cat("kernel ", name(), ": ", config_.tokens_of_tile, " token", plural_s(config_.tokens_of_tile), " of ",
               config_.heads_of_tile, " head", plural_s(config_.heads_of_tile), " x ", config_.keys, " keys, ",
               kHow[config_.m16 || config_.swap_ab ? 4 : config_.producer], config_.sparse ? " by lists, " : ", ",
               kernel(0).num_regs, " registers, ", config_.shared_bytes(), " bytes of shared memory; ", config_.blocks,
               " block", plural_s(config_.blocks), config_.cluster > 1 ? " in pairs; " : "; ",
               prepares() ? "prologue in a launch before; " : "", "workspace ", workspace_size(), " bytes");
  }

 private:
  kernels::WorkTileParams to_params(const Problem& p, void* workspace) const override {
    return mla::to_params(p, config_, workspace);
  }
  void check_run(const Problem& p) const override { mla::check_run(p, config_); }

  void attend(const Problem& p, void* workspace, void* stream) const override {
    const kernels::WorkTileParams params = to_params(p, workspace);
    LaunchConfig launch = programmatic(config_.blocks, config_.threads(), stream, config_.shared_bytes());
    launch.cluster[0] = static_cast<uint32_t>(config_.cluster);
    if (config_.has_maps()) {
      const mla::Maps maps = mla::describe_maps(p, config_);
      const TensorMap q = make_tensor_map(maps.q, device());
      const auto encode = [&](const TensorMapDesc& m) { return make_tensor_map(m, device(), q); };
      launch_kernel(kernel(0), launch, params, q, encode(maps.q_rope), encode(maps.k), encode(maps.dense_k));
    } else {
      launch_kernel(kernel(0), launch, params);
    }
    if (!config_.splits) return;
    launch_kernel(kernel(2), programmatic(config_.combine_blocks(num_sms_), kernels::kMlaCombineThreads, stream),
                  params);
  }

  Config config_;
  int num_sms_;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device) {
  attention::require_taken("cuda_mla", mla::refusal(p));
  const DeviceInfo& info = require_device(device);
  return std::make_unique<MlaPlan>(p, device, info, mla::choose_config(p, info.num_sms));
}

std::unique_ptr<KernelPlan> make_mma_plan(const Problem& p, int32_t device) {
  attention::require_taken("cuda_mla_mma", mla::refusal(p));
  const DeviceInfo& info = require_device(device);
  return std::make_unique<MlaPlan>(p, device, info,
                                   mla::choose_mma_config(p, info.num_sms, info.shared_bytes_per_block));
}

// masks: of those that are looked up key by key.
Coverage coverage(uint32_t masks) {
  Coverage c;
  c[Axis::kQueries] = use::kRagged | use::kFixed | use::kRopeApart;
  c[Axis::kQueryDtype] = use::kQF16 | use::kQBf16;
  c[Axis::kKvSource] = use::kDense | use::kPaged | use::kContiguous | use::kNewTokens | use::kSparseSlots |
                       use::kSparseDense | use::kSecondCache;
  c[Axis::kKvFormat] = use::kF16 | use::kBf16 | use::kMla656 | use::kMla584 | use::kValiasesK;
  c[Axis::kKvScales] = use::kNoScale;
  c[Axis::kKvLayout] = use::kNhd | use::kHnd | use::kBytes;
  c[Axis::kMask] = use::kNoMask | use::kCausal | use::kWindow | use::kFinished | use::kSkipDecode | masks;
  c[Axis::kScore] = use::kPlain | use::kSinks;
  c[Axis::kPrologue] = use::kNoPrologue | use::kQkvBias | use::kIa3 | use::kRope | use::kMrope | use::kLogn |
                       use::kAppend | use::kPowerOfTwoScales;
  c[Axis::kOutput] = use::kOutF32 | use::kOutF16 | use::kOutBf16 | use::kOutE4m3 | use::kLse | use::kMaxLogits;
  c[Axis::kDeterminism] = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = 576;
  c.head_dim_v_max = kernels::kMlaHeadDimV;
  c.head_dims_qk = "512, 576";  // mla::refusal
  c.head_dims_v = "512";
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& mla_kernel() {
  static const Kernel kernel{"cuda_mla", "attention", ATTUNE_DEVICE_CUDA, kWarpgroups, coverage(use::kKeyMasks),
                             make_plan,  mla::refusal};
  return kernel;
}

const Kernel& mla_mma_kernel() {
  static const Kernel kernel{"cuda_mla_mma", "attention",   ATTUNE_DEVICE_CUDA, 0,
                             coverage(0),    make_mma_plan, mla::refusal,       leaves_to_warpgroups};
  return kernel;
}

}  // namespace attune::cuda
