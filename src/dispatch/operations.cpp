// SPDX-License-Identifier: Apache-2.0
#include "dispatch/operations.h"

#include "core/status.h"
#include "cpu/cache_op.h"
#include "cpu/indexer.h"
#include "cpu/merge.h"
#include "cpu/qkv_prepare.h"
#include "cuda/indexer/indexer.h"
#include "cuda/ops/ops.h"
#include "dispatch/device.h"

namespace attune {
namespace {

// The CPU has one device and no streams.
template <class Problem, void (*kRun)(const Problem&)>
void on_cpu(const Problem& op, int32_t, void*) {
  kRun(op);
}

size_t cpu_indexer_workspace_size(const IndexerProblem& op, int32_t) { return cpu::indexer_workspace_size(op); }
void cpu_indexer(const IndexerProblem& op, int32_t, void* workspace, size_t bytes, void*) {
  cpu::run_indexer(op, workspace, bytes);
}

constexpr Operations kCpu = {.merge = on_cpu<MergeProblem, cpu::run_merge>,
                             .qkv_prepare = on_cpu<PrepareProblem, cpu::run_qkv_prepare>,
                             .cache_op = on_cpu<CacheProblem, cpu::run_cache_op>,
                             .indexer_workspace_size = cpu_indexer_workspace_size,
                             .indexer = cpu_indexer};
constexpr Operations kCuda = {.merge = cuda::run_merge,
                              .qkv_prepare = cuda::run_qkv_prepare,
                              .cache_op = cuda::run_cache_op,
                              .indexer_workspace_size = cuda::indexer_workspace_size,
                              .indexer = cuda::run_indexer};

// The device's function for an operation.
template <class Function>
Function find(const char* name, Function Operations::*operation, attune_device device) {
  check_device(device);
  const Function kernel = (device.type == ATTUNE_DEVICE_CUDA ? kCuda : kCpu).*operation;
  if (kernel == nullptr) {
    fail(ATTUNE_UNSUPPORTED, "device ", device_name(device), " has no kernel for ", name, " yet");
  }
  return kernel;
}

template <class Problem>
void run(const char* name, void (*Operations::*operation)(const Problem&, int32_t, void*), const Problem& op,
         attune_device device, void* stream) {
  find(name, operation, device)(op, device.index, stream);
}

constexpr const char* kIndexer = "the indexer";

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

size_t indexer_workspace_size(const IndexerProblem& op, attune_device device) {
  return find(kIndexer, &Operations::indexer_workspace_size, device)(op, device.index);
}
void run_indexer(const IndexerProblem& op, attune_device device, void* workspace, size_t bytes, void* stream) {
  find(kIndexer, &Operations::indexer, device)(op, device.index, workspace, bytes, stream);
}

}  // namespace attune
