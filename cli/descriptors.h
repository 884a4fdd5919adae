// SPDX-License-Identifier: Apache-2.0
// The calls that one layer of a model makes, as descriptors without data. Replay adds the data; explain plans them as
// they are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attune/attune.hpp"
#include "kv_pool.h"
#include "layer_parameters.h"
#include "model.h"

namespace attune::cli {

struct CallShape {
  int64_t batch = 0;
  int64_t rows = 0;          // of q, over all sequences
  int64_t max_pages = 0;     // of one sequence
  int64_t max_seqlen_q = 0;  // of one sequence
  int64_t max_seqlen_kv = 0;
};

// New tokens over a paged cache: they attend to each other and to what is cached, and are appended.
Attention decoder_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                       int64_t kind, const CallShape& shape);
// RoPE of q and append of k, for the sparse call that follows.
QkvPrepare prepare_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                        const CallShape& shape);
// topk slots of the cache for each row.
Attention sparse_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                      const CallShape& shape);
// Whole prompts, everything visible.
Attention encoder_call(const Model& model, KvDtype kv, const LayerParameters& layer, const CallShape& shape);
// Rows of the decoder over the encoder's keys, which a paged cache holds.
Attention cross_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                     const CallShape& shape);

// "window 128", "full", or "" where all layers are alike.
std::string layer_kind_name(const Model& model, int64_t kind);

}  // namespace attune::cli
