// SPDX-License-Identifier: Apache-2.0
// The paged KV cache of one layer.
#pragma once

#include <cstdint>

#include "attune/attune.h"
#include "buffer.h"
#include "cases/number.h"
#include "model.h"

namespace attune::cli {

// The cache's tensors without data: what planning needs.
attune_kv_cache kv_cache_shape(const Model& model, KvDtype dtype, int64_t page_size, int64_t num_pages);

class KvPool {
 public:
  // Every slot starts as NaN, so that whatever reads one that was never written is seen.
  KvPool(const Model& model, KvDtype dtype, int64_t page_size, int64_t num_pages);
  // Every slot becomes random, with codes that use their range and scales to match: a cache that was filled long ago.
  void fill(cases::Random& random);
  // The cache without page tables.
  const attune_kv_cache& view() const { return view_; }
  size_t bytes() const { return k_.size() + v_.size() + k_scale_.size() + v_scale_.size(); }

 private:
  void fill_plane(const attune_tensor& plane, const attune_tensor& scale, cases::Random& random);

  attune_kv_cache view_;
  Buffer k_, v_, k_scale_, v_scale_;
};

}  // namespace attune::cli
