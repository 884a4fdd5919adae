// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch.h"

#include "core/device.h"
#include "core/status.h"
#include "cpu/cache_op.h"
#include "cpu/merge.h"
#include "cpu/qkv_prepare.h"
#include "cuda/ops/ops.h"

namespace attune {
namespace {

// The CPU has one device and no streams.
template <class Problem, void (*kRun)(const Problem&)>
void on_cpu(const Problem& op, int32_t, void*) {
  kRun(op);
}

constexpr Operations kCpu = {on_cpu<MergeProblem, cpu::run_merge>, on_cpu<PrepareProblem, cpu::run_qkv_prepare>,
                             on_cpu<CacheProblem, cpu::run_cache_op>};
constexpr Operations kCuda = {cuda::run_merge, cuda::run_qkv_prepare, cuda::run_cache_op};

template <class Problem>
void run(const char* name, void (*Operations::*operation)(const Problem&, int32_t, void*), const Problem& op,
         attune_device device, void* stream) {
  check_device(device);
  auto* const kernel = (device.type == ATTUNE_DEVICE_CUDA ? kCuda : kCpu).*operation;
  if (kernel == nullptr) fail(ATTUNE_UNSUPPORTED, "device ", device_name(device), " has no kernel for ", name, " yet");
  kernel(op, device.index, stream);
}

}  // namespace

void run_merge(const MergeProblem& op, attune_device device, void* stream) {
  run("merge", &Operations::merge, op, device, stream);
}
void run_qkv_prepare(const PrepareProblem& op, attune_device device, void* stream) {
  run("qkv_prepare", &Operations::qkv_prepare, op, device, stream);
}
void run_cache_op(const CacheProblem& op, attune_device device, void* stream) {
  run("cache operations", &Operations::cache_op, op, device, stream);
}

}  // namespace attune
