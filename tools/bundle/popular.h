// SPDX-License-Identifier: Apache-2.0
// The specialisations that the models of cli/models ask for: what kernels/manifest.json and
// kernels/manifest_portable.json must list.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernel.h"

namespace attune::bundle {

// The part of a model that decides what is compiled.
struct PopularModel {
  std::string name;
  int64_t num_heads_q = 0, num_heads_kv = 0, head_dim_qk = 0, head_dim_v = 0;
  bool alibi = false, sinks = false, cross_attention = false;
  double softcap = 0;
  int64_t window = 0;  // of one kind of layer; 0: all keys
  int64_t t5_buckets = 0, t5_max_distance = 0;
  int64_t rope_dim = 0, rope_offset = 0;
  bool rope_interleaved = false;
  bool latent = false, packed_cache = false;  // MLA; its cache in 656 bytes a token
};

// Every *.json of a directory, by name. Throws std::runtime_error that names the file.
std::vector<PopularModel> read_models(const std::string& directory);

// What a bundle holds: machine code of an H200, or PTX that every GPU from Ampere on runs.
enum class Code { kHopper, kPortable };

// What attention asks for, over the dtypes, batches and lengths that such models are served with, and what qkv_prepare
// and append (MLA: and gather) ask for; each once, in the order of their names. What no kernel covers is left out.
std::vector<cuda::KernelSpec> popular_kernels(const std::vector<PopularModel>& models, Code code = Code::kHopper);

// The manifest that lists them.
std::string popular_manifest(const std::vector<cuda::KernelSpec>& kernels, Code code = Code::kHopper);

}  // namespace attune::bundle
