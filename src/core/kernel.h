// SPDX-License-Identifier: Apache-2.0
// A kernel of the registry: the part of the operation space that it covers, as data, and how it makes a plan.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "common/kinds.h"
#include "common/kv_scale.h"
#include "core/problem.h"

namespace attune {

// The axes of the operation space. What a descriptor uses, and what a kernel covers, is a set of values on each axis.
enum class Axis : int {
  kQueries,
  kQueryDtype,
  kKvSource,
  kKvFormat,
  kKvScales,
  kKvLayout,
  kMask,
  kScore,
  kPrologue,
  kOutput,
  kDeterminism,
  kCount
};
inline constexpr int kNumAxes = static_cast<int>(Axis::kCount);
inline constexpr int kMaxAxisValues = 12;

struct AxisInfo {
  const char* name;
  const char* values[kMaxAxisValues];  // name of bit i; null past the end
};
const AxisInfo& axis_info(Axis axis);
std::string value_list(Axis axis, uint32_t bits);  // "causal, window"

// Bits of each axis, in the order of AxisInfo::values. Those of masks and scores: common/kinds.h; of KV scales:
// common/kv_scale.h.
namespace use {
enum Queries : uint32_t { kRagged = 1, kFixed = 2, kRopeApart = 4 };
enum QueryDtype : uint32_t { kQF32 = 1, kQF16 = 2, kQBf16 = 4, kQE4m3 = 8, kQE5m2 = 16, kQInt8 = 32 };
enum KvSource : uint32_t {
  kDense = 1,
  kPaged = 2,
  kContiguous = 4,
  kNewTokens = 8,
  kSparseSlots = 16,
  kSparseDense = 32,
  kSecondCache = 64,
  kRing = 128,
  kBeams = 256
};
enum KvFormats : uint32_t {
  kF32 = 1,
  kF16 = 2,
  kBf16 = 4,
  kE4m3 = 8,
  kE5m2 = 16,
  kInt8 = 32,
  kMla656 = 64,
  kMla584 = 128,
  kValiasesK = 256,
  kVBesideK = 512
};
enum KvLayouts : uint32_t { kNhd = 1, kHnd = 2, kXpacked = 4, kBytes = 8 };
enum Prologues : uint32_t {
  kNoPrologue = 1,
  kDequantize = 2,
  kQkvBias = 4,
  kIa3 = 8,
  kRope = 16,
  kMrope = 32,
  kLogn = 64,
  kAppend = 128,
  kPowerOfTwoScales = 256
};
enum Outputs : uint32_t { kOutF32 = 1, kOutF16 = 2, kOutBf16 = 4, kOutE4m3 = 8, kLse = 16, kMaxLogits = 32 };
enum Determinism : uint32_t { kRunToRun = 1, kBatchInvariant = 2 };
}  // namespace use

// What a descriptor uses.
struct Traits {
  uint32_t axes[kNumAxes] = {};
  uint32_t& operator[](Axis axis) { return axes[static_cast<int>(axis)]; }
  int64_t head_dim_qk = 0, head_dim_v = 0, group = 0;
  bool operator==(const Traits&) const = default;
};
Traits traits_of(const Problem& p, const attune_attention& a);

// What a kernel covers.
struct Coverage {
  uint32_t axes[kNumAxes] = {};
  uint32_t& operator[](Axis axis) { return axes[static_cast<int>(axis)]; }
  int64_t head_dim_qk_max = 0, head_dim_v_max = 0, group_max = 0;
  // Of a kernel whose `refusal` leaves only some head dims: those, as the text has them ("512, 576").
  std::string_view head_dims_qk, head_dims_v;
  // "" if covered, else what differs, e.g. "mask: bits".
  std::string difference(const Traits& t) const;
  int distance(const Traits& t) const;  // how many things differ
  std::string text() const;             // "axis: value, value; axis: ..."
};

// A plan of one kernel for one descriptor.
class KernelPlan {
 public:
  virtual ~KernelPlan() = default;
  virtual size_t workspace_size() const = 0;
  virtual std::string describe() const = 0;
  // The workspace is aligned and large enough; p fits the limits of the plan.
  virtual void schedule(const Problem& p, void* workspace, void* stream) const = 0;
  virtual void run(const Problem& p, void* workspace, void* stream) const = 0;
};

struct BackwardProblem;
class BackwardPlan;

struct Kernel {
  const char* name;
  const char* operation;
  int32_t device_type;
  unsigned needs;  // what a GPU must have, bits of ptx::Feature (kernels/ptx/architecture.h)
  Coverage coverage;
  std::unique_ptr<KernelPlan> (*make_plan)(const Problem& p, int32_t device_index);
  // Why the kernel refuses a problem that its axes cover ("float32 caches"); "" if it takes it. Null: it takes all.
  std::string (*refusal)(const Problem& p) = nullptr;
  // Whether another row of the registry that also takes the problem is the better choice on a GPU with these features
  // (bits as in `needs`). Null: never.
  bool (*leaves)(const Problem& p, unsigned features) = nullptr;
  // Used instead of make_plan where the operation is kAttentionBackward.
  std::unique_ptr<BackwardPlan> (*make_backward_plan)(const BackwardProblem& p, int32_t device_index) = nullptr;
  // As refusal, for what only the backward has. Null: it takes all.
  std::string (*backward_refusal)(const BackwardProblem& p) = nullptr;
};
inline constexpr char kAttention[] = "attention", kAttentionBackward[] = "attention_backward";  // Kernel::operation

}  // namespace attune
