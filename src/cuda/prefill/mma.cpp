// SPDX-License-Identifier: Apache-2.0
#include "cuda/prefill/mma.h"

#include <algorithm>
#include <utility>

#include "core/integers.h"
#include "cuda/architecture.h"
#include "cuda/attention/params.h"
#include "cuda/attention/plan.h"
#include "cuda/attention/prologue.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/prefill/cache_copies.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/prefill.h"
#include "prefill/mma/shared_bytes.h"

namespace attune::cuda {
namespace prefill_mma {
namespace {

constexpr int64_t kMostGrid = 65535;            // blocks on the second and third axis
constexpr int64_t kReservedSharedBytes = 1024;  // of each block, by the system

}  // namespace

size_t Config::shared_bytes() const {
  if (fp32()) return static_cast<size_t>(kernels::mma_fp32_shared_bytes(rows(), keys, head_dim_qk, head_dim_v));
  return static_cast<size_t>(
      kernels::mma_shared_bytes(rows(), keys, head_dim_qk, head_dim_v, quantized(), token_scales));
}

KernelSpec Config::kernel() const {
  KernelSpec spec{
      cat("prefill/prefill", fp32() ? "_fp32" : "", "_mma.cu"),
      cat("attune_prefill", fp32() ? "_fp32" : "", "_mma"),
      {define("ATTUNE_HEAD_DIM_QK", head_dim_qk), define("ATTUNE_HEAD_DIM_V", head_dim_v), define("ATTUNE_TYPE", dtype),
       define("ATTUNE_OUT_TYPE", out_dtype), define("ATTUNE_SCORE", score), define("ATTUNE_MASK", mask),
       define("ATTUNE_CACHED", cached ? 1 : 0), define("ATTUNE_DENSE", dense ? 1 : 0),
       define("ATTUNE_ROW_TILES", row_tiles), define("ATTUNE_BLOCKS_PER_SM", blocks_per_sm)},
      shared_bytes()};
  if (cache_dtype != dtype) spec.defines.push_back(define("ATTUNE_CACHE_TYPE", cache_dtype));
  if (x_packed) spec.defines.push_back(define("ATTUNE_XPACKED", 1));
  if (fp32()) {
    spec.defines.push_back(define("ATTUNE_KEYS", keys));
    spec.defines.push_back(define("ATTUNE_WARPS", warps));
  }
  if (quantized()) {
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

namespace {

// Tiles of V by channels have 64 keys, for which wide rows of 8 bits and their codes have no room.
std::string xpacked_refusal(const Problem& p) {
  constexpr int64_t kWidestCodes = 192;
  if (p.head_dim_v % 16 != 0) return "an x-packed cache with a head_dim_v that is no multiple of 16";
  if (p.cache.k.element_size == 1 && std::max(p.head_dim_qk, p.head_dim_v) > kWidestCodes)
    return cat("an x-packed cache of 8 bits with head dims above ", kWidestCodes);
  return prefill::xpacked_refusal(p.cache);
}

}  // namespace

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
  if (p.cache.x_packed) {
    if (std::string why = xpacked_refusal(p); !why.empty()) return why;
  } else if (p.cache) {
    for (const auto& [name, plane] : {std::pair{"cache.k", &p.cache.k}, {"cache.v", &p.cache.v}})
      if (!attention::strides_fit(*plane)) return cat("rows of ", name, " that do not lie at multiples of 16 bytes");
  }
  const bool copied = attention::prepares_rows(p, attention::Rows::kOwnType);  // q, k and v
  if (std::string why = attention::refusal_of(attention::find_misaligned(p, copied, false)); !why.empty()) return why;
  return attention::table_refusal(p);
}

namespace {

// A thread keeps S and O in registers: 32 and head_dim_v / 2 for each row tile. Two row tiles read K and V half as
// often. Two blocks keep the tensor cores busy while one of them waits.
void choose_tiles(int64_t shared_per_sm, Config& c) {
  const int widest = std::max(c.head_dim_qk, c.head_dim_v);
  const auto blocks_fit = [&](int blocks) {
    return blocks * (static_cast<int64_t>(c.shared_bytes()) + kReservedSharedBytes) <= shared_per_sm;
  };
  c.keys = 64, c.row_tiles = 2;
  const bool two_parts = c.token_scales && c.dtype == ATTUNE_FLOAT16;  // of P
  if (widest > 128 || (two_parts && widest > 64) || !blocks_fit(2)) c.row_tiles = 1;
  if (!blocks_fit(1)) c.keys = 32;
  c.blocks_per_sm = widest <= 64 && !c.quantized() ? 3 : 2;
}

// fp32 numbers are three of bf16, and take three times the room. Up to 128 channels Q is in registers, and two blocks
// fit.
void choose_fp32_tiles(int64_t shared_a_block, Config& c) {
  constexpr struct { int warps, keys; } kShapes[] = {{4, 32}, {4, 16}, {2, 32}, {2, 16}};
  c.token_scales = false;  // all scales are applied before numbers are split
  for (const auto& shape : kShapes) {
    c.warps = shape.warps, c.keys = shape.keys;
    if (static_cast<int64_t>(c.shared_bytes()) <= shared_a_block) break;
  }
  const int widest = std::max(c.head_dim_qk, c.head_dim_v);
  c.blocks_per_sm = widest <= 64 ? 3 : kernels::mma_fp32_q_in_registers(c.head_dim_qk, c.head_dim_v) ? 2 : 1;
}

}  // namespace

Config choose_config(const Problem& p, int64_t shared_per_sm, int64_t shared_a_block) {
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
  c.x_packed = p.cache.x_packed && !c.fp32();
  c.dense = p.dense_kv || p.new_tokens;
  c.t5 = attention::t5_buckets(p);
  if (c.fp32()) {
    choose_fp32_tiles(shared_a_block, c);
  } else {
    choose_tiles(shared_per_sm, c);
  }
  c.tokens_of_tile = c.rows();
  return c;
}

void check_run(const Problem& p, const Config& c) {
  if (!c.fp32()) {
    attention::check_aligned(attention::find_misaligned(p, false, false), c.name());
    const char* const moved = attention::row_to_copy(p);
    require(moved == nullptr, "rows of ", moved,
            " do not lie at multiples of 16 bytes, as they did when the plan was made; plan with such rows");
  }
  attention::require_still_taken(c.name(), c.fp32() ? prefill::refusal_as_fp32(p) : refusal(p));
  attention::check_ranges(p, c.mask);
}

kernels::WorkTileParams to_params(const Problem& p, const Config& c) {
  kernels::WorkTileParams k = attention::to_params(p, c.t5, c, nullptr);
  if (c.dense) k.new_k = attention::dense_rows(p.k), k.new_v = attention::dense_rows(p.v);
  return k;
}

}  // namespace prefill_mma

namespace {

using attention::Rows;
using prefill_mma::Config;

class Plan final : public attention::WorkTilePlan {
 public:
  Plan(const char* name, const Problem& p, int32_t device, Rows rows)
      : Plan(name, p, device, require_device(device), rows) {}

  std::string describe() const override {
    return cat("kernel ", name(), ": ", config_.rows(), " rows of a head x ", config_.keys, " keys, ",
               kernel(0).num_regs, " registers, ", config_.shared_bytes(), " bytes of shared memory; ",
               prepares() ? "q, k and v by a launch before; " : "", "workspace ", workspace_size(), " bytes");
  }

 private:
  Plan(const char* name, const Problem& p, int32_t device, const DeviceInfo& info, Rows rows)
      : Plan(name, p, device, rows,
             prefill_mma::choose_config(rows != Rows::kOwnType ? attention::after_prologue(p, nullptr, rows) : p,
                                        info.shared_bytes_per_sm, info.shared_bytes_per_block)) {}
  Plan(const char* name, const Problem& p, int32_t device, Rows rows, const Config& config)
      : WorkTilePlan(name, device, attention::prepares_rows(p, rows), rows), config_(config) {
    find_kernels(p, {config_.kernel()}, 0);
  }

  kernels::WorkTileParams to_params(const Problem& p, void*) const override {
    return prefill_mma::to_params(p, config_);
  }
  void check_run(const Problem& p) const override { prefill_mma::check_run(p, config_); }

  void attend(const Problem& p, void* workspace, void* stream) const override {
    LaunchConfig launch = programmatic(1, config_.threads(), stream, config_.shared_bytes());
    const auto grid = config_.grid(p);
    std::copy(grid.begin(), grid.end(), launch.grid);
    const kernels::WorkTileParams params = to_params(p, workspace);
    if (config_.fp32()) return launch_kernel(kernel(0), launch, params, prefill::fp32_rows(p));
    launch_kernel(kernel(0), launch, params);
  }

  Config config_;
};

std::unique_ptr<KernelPlan> make_plan(const Kernel& kernel, const Problem& p, int32_t device, Rows rows) {
  attention::require_taken(kernel.name, kernel.refusal(p));
  return std::make_unique<Plan>(kernel.name, p, device, rows);
}
std::unique_ptr<KernelPlan> make_plan_of_own(const Problem& p, int32_t device) {
  return make_plan(prefill_mma_kernel(), p, device, Rows::kOwnType);
}
// 16-bit queries become fp32 rows in the workspace.
std::unique_ptr<KernelPlan> make_plan_as_fp32(const Problem& p, int32_t device) {
  return make_plan(prefill_fp32_mma_kernel(), p, device, p.q.dtype == ATTUNE_FLOAT32 ? Rows::kOwnType : Rows::kFp32);
}
std::unique_ptr<KernelPlan> make_plan_of_codes(const Problem& p, int32_t device) {
  return make_plan(prefill_fp8_mma_kernel(), p, device, Rows::kBf16);
}

std::string refusal_of_codes(const Problem& p) {
  if (!attention::is_fp8_attention(p)) return "q, k and v that are not all e4m3";
  return prefill_mma::refusal(attention::after_prologue(p, nullptr, Rows::kBf16));
}

Coverage coverage() {
  Coverage c = prefill_kernel().coverage;
  c[Axis::kKvScales] = use::kNoScale | use::kPerTensor | use::kPerHead | use::kPerTokenHead;
  c[Axis::kKvLayout] = use::kNhd | use::kHnd | use::kXpacked;
  return c;
}

// Masks and scores are those of 16-bit rows.
Coverage coverage_of_codes() {
  Coverage c = prefill_fp8_kernel().coverage;
  const Coverage rows = coverage();
  c[Axis::kMask] = rows.axes[static_cast<int>(Axis::kMask)];
  c[Axis::kScore] = rows.axes[static_cast<int>(Axis::kScore)];
  c.head_dim_v_max = rows.head_dim_v_max;
  return c;
}

bool leaves(const Problem& p, unsigned features) {
  return prefill::has_few_rows(p) || (leaves_to_warpgroups(p, features) && !prefill::is_short_prompt(p));
}

bool leaves_fp32(const Problem& p, unsigned features) {
  return leaves_to_warpgroups(p, features) || prefill_fp32_kernel().leaves(p, features);
}

}  // namespace

const Kernel& prefill_mma_kernel() {
  static const Kernel kernel{"cuda_prefill_mma", "attention",      ATTUNE_DEVICE_CUDA,   0,
                             coverage(),         make_plan_of_own, prefill_mma::refusal, leaves};
  return kernel;
}

const Kernel& prefill_fp32_mma_kernel() {
  const Kernel& with_wgmma = prefill_fp32_kernel();
  static const Kernel kernel{"cuda_prefill_fp32_mma", "attention",       ATTUNE_DEVICE_CUDA, 0,
                             with_wgmma.coverage,     make_plan_as_fp32, with_wgmma.refusal, leaves_fp32};
  return kernel;
}

const Kernel& prefill_fp8_mma_kernel() {
  static const Kernel kernel{"cuda_prefill_fp8_mma", "attention",        ATTUNE_DEVICE_CUDA, 0,
                             coverage_of_codes(),    make_plan_of_codes, refusal_of_codes,   leaves_to_warpgroups};
  return kernel;
}

}  // namespace attune::cuda
