// SPDX-License-Identifier: Apache-2.0
// What the decode kernel is compiled for, by problem, and its grid.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "common/attention_params.h"
#include "core/problem.h"
#include "cuda/device.h"
#include "cuda/kernel.h"
#include "decode/shared_bytes.h"

namespace attune::cuda::decode {

// How rows of the cache are addressed; numbers as in kernels/decode/config.cuh.
enum class Load : int { kTiles = 0, kRows = 1, kElements = 2 };

using Grid = std::array<uint32_t, 3>;

// A kernel that serves a call's longer sequences beside this one.
struct Beside {
  int max_decode_q = std::numeric_limits<int>::max();  // sequences with more queries go to that kernel
  int64_t list_at = 0;                                 // offset of its list of work tiles in the workspace
  float tile = 0;                                      // its tile relative to one of 128 keys x 128 rows
};

struct Config {
  // What the kernel is compiled for.
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t q_dtype = 0, kv_dtype = 0, out_dtype = 0;
  int row_tiles = 1, parts = 1;
  int warps = 4, stages = 2, blocks_per_sm = 2;
  Load load = Load::kTiles;
  int copy_bytes = 16;
  int token_scales = 0;  // KvCache::token_scales()
  int score = 0, mask = 0;
  bool new_tokens = false;  // beside the cache
  bool prologue = false;    // more than append
  bool vectors = false;     // rows of q, k, v and of the prologue's tables take vector loads

  int blocks = 1;              // of the grid; all of them run at a time
  int head_lanes = 1;          // neighbouring heads whose blocks read the same keys together (kernels::AttentionParams)
  int cluster = 0;             // blocks that split one output tile; 0: decode.cu, else decode_cluster.cu
  std::string no_clusters;     // where cluster is 0: why
  int schedule_threads = 256;  // the schedule kernel has one block
  // Appending waits until all who read the slots have done so: a counter for each KV head and group of beams.
  int64_t append_counters = 0;
  kernels::T5Table t5 = {};  // buckets; the table itself comes with a run
  Beside beside;

  int rows() const { return 8 * row_tiles; }
  size_t shared_bytes() const;
  Grid grid(const kernels::AttentionParams& params) const;
  KernelSpec main_kernel() const;
  KernelSpec schedule_kernel() const;
  size_t workspace_bytes() const;
};

// What of the device matters to the choice.
struct DeviceShape {
  int num_sms = 132;
  int64_t shared_bytes_per_sm = 233472;
  int64_t shared_bytes_per_block = 232448;
  bool clusters = true;
};
inline DeviceShape device_shape(const DeviceInfo& info) {
  return {info.num_sms, info.shared_bytes_per_sm, info.shared_bytes_per_block, info.target.has(ptx::kClusters)};
}
inline DeviceShape device_shape(const Architecture& a, int num_sms) {
  return {num_sms, a.shared_per_sm, a.shared_a_block, target_of(a).has(ptx::kClusters)};
}

// "" if the kernel takes the problem, else what it does not take, where the coverage row cannot say it.
std::string refusal(const Problem& p);
// no_clusters: why clusters are not allowed, even where they would be best; "": they are.
Config choose_config(const Problem& p, const DeviceShape& device, const std::string& no_clusters = "");
// The configuration for the short sequences, where another kernel serves the longer ones.
Config choose_config_beside(const Problem& p, const DeviceShape& device, const Beside& beside);

// Throws INVALID_ARGUMENT where addresses and strides no longer allow what the configuration was chosen for.
void check_alignment(const Problem& p, const Config& c);
// Also throws where a run has rows or pages that its plan's kernel does not take.
void check_run(const Problem& p, const Config& c);
kernels::AttentionParams to_params(const Problem& p, const Config& c, void* workspace);

}  // namespace attune::cuda::decode
