// SPDX-License-Identifier: Apache-2.0
#include "dispatch/registry.h"

#include <cstdlib>
#include <cstring>

#include "core/status.h"
#include "cpu/attention.h"
#include "cpu/backward.h"
#include "cuda/backward/backward.h"
#include "cuda/decode/decode.h"
#include "cuda/device.h"
#include "cuda/mixed/mixed.h"
#include "cuda/mla/mla.h"
#include "cuda/prefill/mma.h"
#include "cuda/prefill/prefill.h"
#include "dispatch/device.h"

namespace attune {
namespace {

const Kernel* const kKernels[] = {&cpu::attention_kernel(),         &cuda::mixed_kernel(),
                                  &cuda::prefill_kernel(),          &cuda::prefill_fp8_kernel(),
                                  &cuda::prefill_fp32_kernel(),     &cuda::prefill_mma_kernel(),
                                  &cuda::prefill_fp32_mma_kernel(), &cuda::prefill_fp8_mma_kernel(),
                                  &cuda::decode_kernel(),           &cuda::mla_kernel(),
                                  &cuda::mla_mma_kernel(),          &cpu::backward_kernel(),
                                  &cuda::backward_kernel(),         &cuda::backward_fp32_kernel(),
                                  &cuda::backward_mma_kernel()};

// The kernel that ATTUNE_KERNEL names; null where it is not set, or names one of another operation.
const char* forced_kernel(const char* operation) {
  const char* forced = std::getenv("ATTUNE_KERNEL");
  if (forced == nullptr || forced[0] == '\0') return nullptr;
  for (const Kernel* k : kKernels) {
    if (std::strcmp(forced, k->name) == 0 && std::strcmp(operation, k->operation) != 0) return nullptr;
  }
  return forced;
}

}  // namespace

int kernel_count() { return static_cast<int>(sizeof(kKernels) / sizeof(kKernels[0])); }
const Kernel& kernel_at(int i) { return *kKernels[i]; }

const Kernel& choose_kernel(const Problem& p, const Traits& t, int32_t device_type, const char* operation,
                            const cuda::Target& target, const BackwardProblem* backward) {
  const char* forced = forced_kernel(operation);
  const bool any = forced == nullptr;
  const Kernel *nearest = nullptr, *left = nullptr;
  int nearest_from = 0;
  std::string nearest_refusal, nearest_feature;
  for (const Kernel* k : kKernels) {
    if (k->device_type != device_type || std::strcmp(k->operation, operation) != 0 ||
        !(any || std::strcmp(forced, k->name) == 0))
      continue;
    std::string refusal = k->refusal != nullptr ? k->refusal(p) : std::string();
    // backward_refusal may only be asked about a problem that the coverage takes: it reads fields that others lack.
    const int distance_of_axes = k->coverage.distance(t);
    if (backward != nullptr && k->backward_refusal != nullptr && distance_of_axes == 0)
      refusal = k->backward_refusal(*backward);
    const std::string feature = cuda::missing_feature(k->needs, target);
    const int distance = distance_of_axes + (refusal.empty() ? 0 : 1) + (feature.empty() ? 0 : 1);
    const bool leaves = any && k->leaves != nullptr && k->leaves(p, target.features);
    if (distance == 0) {
      if (!leaves) return *k;
      if (left == nullptr) left = k;
      continue;
    }
    // Among rows that are equally near, prefers one for queries of this dtype, then one that does not leave the problem
    // to another.
    const int queries = static_cast<int>(Axis::kQueryDtype);
    const bool other_queries = (t.axes[queries] & ~k->coverage.axes[queries]) != 0;
    const int from = 4 * distance + (other_queries ? 2 : 0) + (leaves ? 1 : 0);
    if (nearest == nullptr || from < nearest_from) {
      nearest = k;
      nearest_from = from;
      nearest_refusal = refusal;
      nearest_feature = feature;
    }
  }
  if (left != nullptr) return *left;
  if (nearest == nullptr && any) fail(ATTUNE_UNSUPPORTED, "this device has no kernel for ", operation, " yet");
  if (nearest == nullptr)
    fail(ATTUNE_UNSUPPORTED, "ATTUNE_KERNEL names ", forced, ", which is no kernel of this device");
  std::string why;
  const auto add = [&why](const char* verb, const std::string& what) {
    if (!what.empty()) why += cat(why.empty() ? "" : ", and ", verb, what);
  };
  add("lacks ", nearest->coverage.difference(t));
  add("does not take ", nearest_refusal);
  add("needs ", nearest_feature);
  fail(ATTUNE_UNSUPPORTED, "no kernel covers this; the nearest is ", nearest->name, ", which ", why);
}

const Kernel& find_kernel(const Problem& p, const Traits& t, attune_device device, const char* operation,
                          const BackwardProblem* backward) {
  check_device(device);
  const cuda::Target target =
      device.type == ATTUNE_DEVICE_CUDA ? cuda::require_device(device.index).target : cuda::Target{};
  return choose_kernel(p, t, device.type, operation, target, backward);
}

}  // namespace attune
