// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/mla.h"

#include <limits>

#include "cuda/attention/prologue.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/mla/config.h"
#include "cuda/ops/ops.h"

namespace attune::cuda {
namespace {

using mla::Config;

class MlaPlan final : public KernelPlan {
 public:
  MlaPlan(const Problem& p, int32_t device, const DeviceInfo& info)
      : device_(device), config_(mla::choose_config(p, info.num_sms)), num_sms_(info.num_sms) {
    std::vector<KernelSpec> specs = {config_.main_kernel(), config_.schedule_kernel()};
    if (config_.splits) specs.push_back(config_.combine_kernel());
    if (attention::has_prologue(p)) specs.push_back(kernel_of(attention::to_prepare(p, nullptr)));
    warm(specs, device);
    main_ = &get_kernel(specs[0], device);
    schedule_ = &get_kernel(specs[1], device);
    if (config_.splits) combine_ = &get_kernel(specs[2], device);
    prologue_begin_ = mla::workspace_layout(config_).total;
    workspace_size_ = prologue_begin_ + attention::prologue_bytes(p);
  }

  size_t workspace_size() const override { return workspace_size_; }

  std::string describe() const override {
    static constexpr const char* kHow[] = {"TMA boxes", "rows gathered by cp.async", "rows of 656 bytes dequantized",
                                           "rows of 584 bytes dequantized", "cached rows by bulk copies"};
    return cat("kernel cuda_mla: ", config_.tokens_of_tile, " tokens of ", config_.heads_of_tile, " heads x ",
               kernels::kMlaBlockN, " keys, ", kHow[config_.m16 || config_.swap_ab ? 4 : config_.producer],
               config_.sparse ? " by lists, " : ", ", main_->num_regs, " registers, ", config_.shared_bytes(),
               " bytes of shared memory; ", config_.blocks, config_.cluster > 1 ? " blocks in pairs; " : " blocks; ",
               workspace_size_ > prologue_begin_ ? "prologue in a launch before; " : "", "workspace ", workspace_size_,
               " bytes");
  }

  void schedule(const Problem& p, void* workspace, void* stream) const override {
    if (is_empty(p)) return;
    LaunchConfig launch;
    launch.block[0] = 1024;
    launch.programmatic = true;
    launch.stream = stream;
    launch_kernel(*schedule_, launch, mla::to_params(p, config_, workspace));
  }

  void run(const Problem& p, void* workspace, void* stream) const override {
    if (is_empty(p)) return;
    if (!attention::has_prologue(p)) {
      mla::check_run(p, config_);
      return attend(p, workspace, stream);
    }
    const std::string why = attention::prologue_refusal(p);
    require(why.empty(), "attention differs from its plan: kernel cuda_mla does not take ", why);
    std::byte* const rows = static_cast<std::byte*>(workspace) + prologue_begin_;
    const Problem after = attention::after_prologue(p, rows);
    mla::check_run(after, config_);  // before anything is appended
    run_qkv_prepare(attention::to_prepare(p, rows), device_, stream);
    attend(after, workspace, stream);
  }

 private:
  void attend(const Problem& p, void* workspace, void* stream) const {
    const kernels::WorkTileParams params = mla::to_params(p, config_, workspace);
    const mla::Maps maps = mla::describe_maps(p, config_);
    const auto encode = [&](const TensorMapDesc& m) { return make_tensor_map(m, device_); };
    LaunchConfig launch;
    launch.grid[0] = static_cast<uint32_t>(config_.blocks);
    launch.block[0] = config_.threads();
    launch.cluster[0] = static_cast<uint32_t>(config_.cluster);
    launch.shared_bytes = static_cast<uint32_t>(config_.shared_bytes());
    launch.programmatic = true;
    launch.stream = stream;
    launch_kernel(*main_, launch, params, encode(maps.q), encode(maps.k), encode(maps.dense_k));
    if (combine_ == nullptr) return;
    LaunchConfig merge;
    merge.grid[0] = config_.combine_blocks(num_sms_);
    merge.block[0] = kernels::kMlaCombineThreads;
    merge.programmatic = true;
    merge.stream = stream;
    launch_kernel(*combine_, merge, params);
  }

  static bool is_empty(const Problem& p) { return p.batch == 0 || p.total_q == 0 || p.heads_q == 0; }

  int32_t device_;
  Config config_;
  int num_sms_;
  size_t prologue_begin_ = 0, workspace_size_ = 0;
  const CompiledKernel* schedule_ = nullptr;
  const CompiledKernel* main_ = nullptr;
  const CompiledKernel* combine_ = nullptr;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device) {
  if (const std::string why = mla::refusal(p); !why.empty())
    fail(ATTUNE_UNSUPPORTED, "kernel cuda_mla does not take ", why);
  return std::make_unique<MlaPlan>(p, device, require_device(device));
}

Coverage coverage() {
  Coverage c;
  auto axis = [&](Axis a) -> uint32_t& { return c.axes[static_cast<int>(a)]; };
  axis(Axis::kQueries) = use::kRagged | use::kFixed;
  axis(Axis::kQueryDtype) = use::kQF16 | use::kQBf16;
  axis(Axis::kKvSource) = use::kDense | use::kPaged | use::kContiguous | use::kNewTokens | use::kSparseSlots |
                          use::kSparseDense | use::kSecondCache;
  axis(Axis::kKvFormat) = use::kF16 | use::kBf16 | use::kMla656 | use::kMla584 | use::kValiasesK;
  axis(Axis::kKvScales) = use::kNoScale;
  axis(Axis::kKvLayout) = use::kNhd | use::kHnd | use::kBytes;
  axis(Axis::kMask) = use::kNoMask | use::kCausal | use::kWindow | use::kFinished | use::kSkipDecode;
  axis(Axis::kScore) = use::kPlain | use::kSinks;
  axis(Axis::kPrologue) = use::kNoPrologue | use::kQkvBias | use::kIa3 | use::kRope | use::kMrope | use::kLogn |
                          use::kAppend | use::kPowerOfTwoScales;
  axis(Axis::kOutput) = use::kOutF32 | use::kOutF16 | use::kOutBf16 | use::kOutE4m3 | use::kLse | use::kMaxLogits;
  axis(Axis::kDeterminism) = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = 576;
  c.head_dim_v_max = kernels::kMlaHeadDimV;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& mla_kernel() {
  static const Kernel kernel{"cuda_mla", "attention", ATTUNE_DEVICE_CUDA, coverage(), make_plan, mla::refusal};
  return kernel;
}

}  // namespace attune::cuda
