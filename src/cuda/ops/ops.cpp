// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/ops.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/integers.h"
#include "cuda/device.h"
#include "cuda/host_tables.h"
#include "cuda/launch.h"
#include "cuda/ops/config.h"
#include "cuda/ops/params.h"

namespace attune::cuda {
namespace {

using ops::Config;
using ops::Entry;

bool stores(const CacheProblem& op) { return op.kind == ATTUNE_CACHE_APPEND || op.kind == ATTUNE_CACHE_QUANTIZE; }

// These operations have no plan that could keep its kernel, and building a KernelSpec costs more than a launch.
const CompiledKernel& find(const Config& c, int32_t device) {
  static std::shared_mutex mutex;
  static std::unordered_map<uint64_t, const CompiledKernel*> found[16];
  const uint64_t key = c.key();
  auto& map = found[static_cast<uint32_t>(device) % 16];
  {
    const std::shared_lock lock(mutex);
    if (const auto at = map.find(key); at != map.end() && at->second->device == device) return *at->second;
  }
  const CompiledKernel& kernel = get_kernel(c.spec(), device);
  const std::unique_lock lock(mutex);
  map[key] = &kernel;
  return kernel;
}

template <class Params>
void launch_rows(const Config& c, Params params, int32_t device, void* stream) {
  const CompiledKernel& kernel = find(c, device);
  params.tokens.tile = c.tile_tokens(params.tokens.total, require_device(device).num_sms);
  params.tokens.groups_shift = c.groups_shift(params.tokens.tile);
  launch_kernel(kernel, programmatic(ceil_div(params.tokens.total, params.tokens.tile), kernels::kRowsThreads, stream),
                params);
}

void check_reachable_rows(const char* name, const RowView& v, int32_t device) {
  if (v && v.rows > 0) check_reachable(name, v.data, device);
}

}  // namespace

void run_qkv_prepare(const PrepareProblem& op, int32_t device, void* stream) {
  if (op.total == 0 || (!op.q_out && !op.k_out && !op.v_out && !op.prologue.append)) return;
  check_reachable_rows("q.data", op.q, device);
  check_reachable_rows("k.data", op.k, device);
  check_reachable_rows("v.data", op.v, device);
  if (op.prologue.append) check_reachable("cache.k.data", op.cache.k.data, device);
  launch_rows(ops::choose_store(op), ops::store_params(op), device, stream);
}

void run_cache_op(const CacheProblem& op, int32_t device, void* stream) {
  if (op.tokens == 0) return;
  check_reachable_rows("k.data", op.k, device);
  check_reachable("cache.k.data", op.cache.k.data, device);
  if (stores(op)) {
    launch_rows(ops::choose_store(op), ops::store_params(op), device, stream);
  } else {
    launch_rows(ops::choose_fetch(op), ops::fetch_params(op), device, stream);
  }
}

void run_merge(const MergeProblem& op, int32_t device, void* stream) {
  if (op.rows * op.heads == 0 || (op.head_dim_v == 0 && !op.lse)) return;
  check_reachable_rows("partial_out.data", op.partial_out, device);
  check_reachable_rows("out.data", op.out, device);
  const Config c = ops::choose_merge(op);
  const CompiledKernel& kernel = find(c, device);
  const int64_t lines = kernels::kRowsThreads / c.lanes;  // of a block
  launch_kernel(kernel, programmatic(ceil_div(op.rows * op.heads, lines), kernels::kRowsThreads, stream),
                ops::merge_params(op));
}

KernelSpec kernel_of(const PrepareProblem& op) { return ops::choose_store(op).spec(); }
KernelSpec kernel_of(const CacheProblem& op) {
  return (stores(op) ? ops::choose_store(op) : ops::choose_fetch(op)).spec();
}
KernelSpec kernel_of(const MergeProblem& op) { return ops::choose_merge(op).spec(); }

}  // namespace attune::cuda
