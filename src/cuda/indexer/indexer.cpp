// SPDX-License-Identifier: Apache-2.0
#include "cuda/indexer/indexer.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "core/status.h"
#include "cuda/device.h"
#include "cuda/host_tables.h"
#include "cuda/indexer/config.h"
#include "cuda/indexer/params.h"
#include "cuda/launch.h"

namespace attune::cuda {
namespace {

using indexer::Layout;
using indexer::ScoresConfig;
using indexer::SelectConfig;

constexpr int kExactBlocksPerSm = 8;

// There is no plan that could keep the kernels, and building a KernelSpec costs more than a launch.
template <class Make>
const CompiledKernel& find(const std::array<int, 12>& config, int32_t device, Make&& make) {
  static std::shared_mutex mutex;
  static std::map<std::pair<int32_t, std::array<int, 12>>, const CompiledKernel*> found;
  const auto key = std::make_pair(device, config);
  {
    const std::shared_lock lock(mutex);
    if (const auto at = found.find(key); at != found.end()) return *at->second;
  }
  const CompiledKernel& kernel = get_kernel(make(), device);
  const std::unique_lock lock(mutex);
  found[key] = &kernel;
  return kernel;
}

LaunchConfig launch_of(int64_t blocks, int threads, size_t shared_bytes, void* stream) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
  return programmatic(std::clamp<int64_t>(blocks, 1, kMostBlocks), threads, stream, shared_bytes);
}

// What the launches of a run share.
class Run {
 public:
  Run(const IndexerProblem& op, int32_t device, void* workspace, void* stream)
      : op_(op),
        device_(device),
        workspace_(workspace),
        stream_(stream),
        layout_(indexer::make_layout(op)),
        num_sms_(require_device(device).num_sms) {
    const Target& target = require_device(device).target;
    if (op.reads_keys()) scores_ = indexer::choose_scores(op, target);
    if (op.selects()) select_ = indexer::choose_select(op, layout_.rows, num_sms_, target);
  }

  void operator()() const {
    if (op_.cu) find_owners();
    for (int64_t first = 0; first < op_.total_q; first += layout_.rows) {
      const int64_t count = std::min(layout_.rows, op_.total_q - first);
      if (op_.reads_keys()) score(first, count);
      if (op_.selects()) select(first, count);
    }
  }

 private:
  // The first number of a key into find's table says the kernel. ScoresConfig::key has 0 and 1 there, SelectConfig::key
  // the number of threads.
  static constexpr int kOwners = 2;

  void find_owners() const {
    const CompiledKernel& kernel = find({kOwners}, device_, indexer::owners_kernel);
    launch_kernel(kernel, launch_of(1, indexer::kOwnersThreads, 0, stream_),
                  indexer::index_rows(op_, layout_, workspace_, 0, op_.total_q));
  }

  void score(int64_t first, int64_t count) const {
    const auto params = indexer::scores_params(op_, scores_, layout_, workspace_, first, count, num_sms_);
    if (params.num_tiles == 0) return;
    const CompiledKernel& kernel = find(scores_.key(), device_, [&] { return scores_.kernel(); });
    const int64_t blocks = std::min<int64_t>(params.num_tiles, num_sms_ * (scores_.exact ? kExactBlocksPerSm : 1));
    launch_kernel(kernel, launch_of(blocks, scores_.threads(), scores_.shared_bytes(), stream_), params);
  }

  void select(int64_t first, int64_t count) const {
    const CompiledKernel& kernel = find(select_.key(), device_, [&] { return select_.kernel(); });
    LaunchConfig launch = launch_of(count * select_.cluster, select_.threads, select_.shared_bytes(), stream_);
    launch.cluster[0] = static_cast<uint32_t>(select_.cluster);
    launch_kernel(kernel, launch, indexer::select_params(op_, layout_, workspace_, first, count));
  }

  const IndexerProblem& op_;
  int32_t device_;
  void* workspace_;
  void* stream_;
  Layout layout_;
  int num_sms_;
  ScoresConfig scores_;
  SelectConfig select_;
};

}  // namespace

size_t indexer_workspace_size(const IndexerProblem& op, int32_t) { return indexer::make_layout(op).total; }

void run_indexer(const IndexerProblem& op, int32_t device, void* workspace, size_t bytes, void* stream) {
  if (const size_t need = indexer::make_layout(op).total; need > 0) {
    check_workspace("the indexer", need, workspace, bytes);
    check_reachable("workspace", workspace, device);
  }
  if (op.total_q == 0 || op.batch == 0) return;
  if (op.reads_keys()) {
    check_reachable("q.data", op.q.data, device);
    check_reachable("cache.k.data", op.cache.k.data, device);
  } else {
    check_reachable("scores.data", op.scores.data, device);
  }
  Run(op, device, workspace, stream)();
}

std::vector<KernelSpec> kernels_of(const IndexerProblem& op, int num_sms, const Target& target) {
  std::vector<KernelSpec> list;
  if (op.cu) list.push_back(indexer::owners_kernel());
  if (op.reads_keys()) list.push_back(indexer::choose_scores(op, target).kernel());
  if (op.selects()) list.push_back(indexer::choose_select(op, indexer::make_layout(op).rows, num_sms, target).kernel());
  return list;
}

}  // namespace attune::cuda
