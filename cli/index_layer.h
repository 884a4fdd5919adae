// SPDX-License-Identifier: Apache-2.0
// The indexer of a sparse layer: its own cache of e4m3 keys with a scale each, on the pages of the latent cache, and
// the calls that fill it and choose from it.
#pragma once

#include <cstdint>
#include <vector>

#include "attune/attune.hpp"
#include "batch_tables.h"
#include "device_mirror.h"
#include "layer_runner.h"
#include "synthetic.h"

namespace attune::cli {

class IndexLayer {
 public:
  IndexLayer(const RunnerConfig& config, cases::Random& random);

  // Appends keys of the new tokens.
  CacheOp append(const BatchTables& tables, cases::Random& random) const;
  // Chooses slots for every row of the step, after the append. indices: int32 [rows, topk], lengths: int32 [rows].
  // Valid until the next call.
  Indexer choose(const BatchTables& tables, int32_t* indices, int32_t* lengths, cases::Random& random);
  // Runs it and returns its seconds.
  double run(const Indexer& op, DeviceMirror& mirror);

 private:
  attune_kv_cache cache(const BatchTables& tables) const;

  const Model model_;
  RunnerLimits limits_;
  attune_device device_;
  Buffer codes_, scales_, workspace_;
  RowPool q_, weights_, keys_;
  std::vector<int32_t> seqlens_;  // with the new tokens
};

}  // namespace attune::cli
