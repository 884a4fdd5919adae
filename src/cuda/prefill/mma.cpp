// SPDX-License-Identifier: Apache-2.0
#include "cuda/prefill/mma.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/integers.h"
#include "cuda/architecture.h"
#include "cuda/attention/params.h"
#include "cuda/attention/plan.h"
#include "cuda/attention/prologue.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/prefill/prefill.h"
#include "prefill/mma/shared_bytes.h"

namespace attune::cuda {
namespace prefill_mma {
namespace {

constexpr int64_t kMostGrid = 65535;            // blocks on the second and third axis
constexpr int64_t kReservedSharedBytes = 1024;  // of each block, by the system

}  // namespace

size_t Config::shared_bytes() const {
  return static_cast<size_t>(
      kernels::mma_shared_bytes(rows(), keys, head_dim_qk, head_dim_v, quantized(), token_scales));
}

KernelSpec Config::kernel() const {
  KernelSpec spec{
      "prefill/prefill_mma.cu",
      "attune_prefill_mma",
      {define("ATTUNE_HEAD_DIM_QK", head_dim_qk), define("ATTUNE_HEAD_DIM_V", head_dim_v), define("ATTUNE_TYPE", dtype),
       define("ATTUNE_OUT_TYPE", out_dtype), define("ATTUNE_SCORE", score), define("ATTUNE_MASK", mask),
       define("ATTUNE_CACHED", cached ? 1 : 0), define("ATTUNE_DENSE", dense ? 1 : 0),
       define("ATTUNE_ROW_TILES", row_tiles), define("ATTUNE_BLOCKS_PER_SM", blocks_per_sm)},
      shared_bytes()};
  if (quantized()) {
    spec.defines.push_back(define("ATTUNE_CACHE_TYPE", cache_dtype));
    spec.defines.push_back(define("ATTUNE_TOKEN_SCALES", token_scales ? 1 : 0));
    spec.defines.push_back(define("ATTUNE_KEYS", keys));
  }
  return spec;
}

std::array<uint32_t, 3> Config::grid(const Problem& p) const {
  const int64_t row_blocks = std::max<int64_t>(1, ceil_div(p.max_seqlen_q, rows()));
  return {static_cast<uint32_t>(p.heads_q), static_cast<uint32_t>(std::min(p.batch, kMostGrid)),
          static_cast<uint32_t>(std::min(row_blocks, kMostGrid))};
}

std::string refusal(const Problem& p) {
  if (std::string why = attention::prologue_refusal(p); !why.empty()) return why;
  if (p.head_dim_qk % 8 != 0 || p.head_dim_v % 8 != 0) return "head dims that are no multiples of 8";
  if ((p.dense_kv || p.new_tokens) && (p.k.dtype != p.q.dtype || p.v.dtype != p.q.dtype))
    return "q, k and v of different dtypes";
  if (p.cache && p.cache.k.dtype != p.cache.v.dtype) return "K and V of different dtypes";
  if (p.cache && p.cache.k.dtype != p.q.dtype && p.cache.k.element_size != 1)
    return "q and a 16-bit cache of different dtypes";
  if (p.cache && p.cache.k.element_size == 1 && (p.head_dim_qk % 16 != 0 || p.head_dim_v % 16 != 0))
    return "head dims of an 8-bit cache that are no multiples of 16";
  for (const auto& [name, plane] : {std::pair{"cache.k", &p.cache.k}, {"cache.v", &p.cache.v}})
    if (p.cache && !attention::strides_fit(*plane))
      return cat("rows of ", name, " that do not lie at multiples of 16 bytes");
  const bool copied = attention::prepares_rows(p, attention::Rows::kOwnType);  // q, k and v
  if (std::string why = attention::refusal_of(attention::find_misaligned(p, copied, false)); !why.empty()) return why;
  return attention::table_refusal(p);
}

Config choose_config(const Problem& p, int64_t shared_bytes_per_sm) {
  Config c;
  c.head_dim_qk = static_cast<int>(p.head_dim_qk);
  c.head_dim_v = static_cast<int>(p.head_dim_v);
  c.dtype = c.cache_dtype = p.q.dtype;
  if (p.cache) c.cache_dtype = p.cache.k.dtype;
  c.token_scales = c.quantized() && p.cache.has_token_scales();
  c.out_dtype = p.out.dtype;
  c.score = attention::score_kinds(p);
  c.mask = attention::mask_kinds(p);
  c.cached = static_cast<bool>(p.cache);
  c.dense = p.dense_kv || p.new_tokens;
  c.t5 = attention::t5_buckets(p);
  c.keys = 64;
  // Registers of a thread hold S and O: 32 and head_dim_v / 2 numbers for each row tile. Two row tiles read K and V
  // half as often; two blocks keep the tensor cores busy while one waits.
  const int64_t widest = std::max(p.head_dim_qk, p.head_dim_v);
  const auto blocks_fit = [&](int blocks) {
    return blocks * (static_cast<int64_t>(c.shared_bytes()) + kReservedSharedBytes) <= shared_bytes_per_sm;
  };
  c.row_tiles = 2;
  const bool two_parts = c.token_scales && c.dtype == ATTUNE_FLOAT16;  // of P
  if (widest > 128 || (two_parts && widest > 64) || !blocks_fit(2)) c.row_tiles = 1;
  if (!blocks_fit(1)) c.keys = 32;
  c.blocks_per_sm = widest <= 64 && !c.quantized() ? 3 : 2;
  c.tokens_of_tile = c.rows();
  return c;
}

void check_run(const Problem& p, const Config& c) {
  attention::check_aligned(attention::find_misaligned(p, false, false), "cuda_prefill_mma");
  const char* const moved = attention::row_to_copy(p);
  require(moved == nullptr, "rows of ", moved,
          " do not lie at multiples of 16 bytes, as they did when the plan was made; plan with such rows");
  attention::require_still_taken("cuda_prefill_mma", refusal(p));
  attention::check_ranges(p, c.mask);
}

kernels::WorkTileParams to_params(const Problem& p, const Config& c) {
  kernels::WorkTileParams k = attention::to_params(p, c.t5, c, nullptr);
  if (c.dense) k.new_k = attention::dense_rows(p.k), k.new_v = attention::dense_rows(p.v);
  return k;
}

}  // namespace prefill_mma

namespace {

using prefill_mma::Config;

class Plan final : public attention::WorkTilePlan {
 public:
  Plan(const Problem& p, int32_t device)
      : WorkTilePlan("cuda_prefill_mma", device, attention::prepares_rows(p, attention::Rows::kOwnType)),
        config_(prefill_mma::choose_config(p, require_device(device).shared_bytes_per_sm)) {
    find_kernels(p, {config_.kernel()}, 0);
  }

  std::string describe() const override {
    return cat("kernel ", name(), ": ", config_.rows(), " rows of a head x ", config_.keys, " keys, ",
               kernel(0).num_regs, " registers, ", config_.shared_bytes(), " bytes of shared memory; ",
               prepares() ? "q, k and v by a launch before; " : "", "workspace ", workspace_size(), " bytes");
  }

 private:
  kernels::WorkTileParams to_params(const Problem& p, void*) const override {
    return prefill_mma::to_params(p, config_);
  }
  void check_run(const Problem& p) const override { prefill_mma::check_run(p, config_); }

  void attend(const Problem& p, void* workspace, void* stream) const override {
    LaunchConfig launch = programmatic(1, prefill_mma::kThreads, stream, config_.shared_bytes());
    const auto grid = config_.grid(p);
    std::copy(grid.begin(), grid.end(), launch.grid);
    launch_kernel(kernel(0), launch, to_params(p, workspace));
  }

  Config config_;
};

std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device) {
  attention::require_taken("cuda_prefill_mma", prefill_mma::refusal(p));
  return std::make_unique<Plan>(p, device);
}

Coverage coverage() {
  Coverage c = attention::coverage();
  c[Axis::kQueryDtype] = use::kQF16 | use::kQBf16;
  c[Axis::kKvSource] = use::kDense | use::kPaged | use::kContiguous | use::kNewTokens;
  c[Axis::kKvFormat] = use::kF16 | use::kBf16 | use::kE4m3 | use::kE5m2 | use::kInt8 | use::kValiasesK | use::kVBesideK;
  c[Axis::kKvLayout] = use::kNhd | use::kHnd;
  c[Axis::kPrologue] = use::kNoPrologue | use::kQkvBias | use::kIa3 | use::kRope | use::kMrope | use::kLogn |
                       use::kAppend | use::kPowerOfTwoScales;
  c.group_max = std::numeric_limits<int64_t>::max();
  return c;
}

}  // namespace

const Kernel& prefill_mma_kernel() {
  static const Kernel kernel{"cuda_prefill_mma", "attention",          ATTUNE_DEVICE_CUDA,    0,       coverage(),
                             make_plan,          prefill_mma::refusal, prefill::has_few_rows, nullptr, nullptr,
                             ptx::kWgmma};
  return kernel;
}

}  // namespace attune::cuda
