// SPDX-License-Identifier: Apache-2.0
// The specialisations of the backward's kernels for a problem, and the parameters of a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backward/backward_params.h"
#include "core/backward.h"
#include "cuda/kernel.h"
#include "cuda/tensor_map.h"

namespace attune::cuda::backward {

// Which gradient kernel a problem runs on: gradients.cu, or gradients_mma.cu.
enum class Way { kWgmma, kMma };

// What limits the blocks of gradients_mma.cu.
struct DeviceLimits {
  int64_t shared_bytes_per_sm = 233472, shared_bytes_per_block = 232448;  // Hopper's
};

struct Config {
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t dtype = 0;
  int64_t heads_q = 0, heads_kv = 0;
  int64_t max_q_tiles = 0, max_kv_tiles = 0;  // blocks of rows, at most
  int64_t stats_stride = 0;                   // rows of the stats of a head
  int gradients = 0;                          // that are wanted: kernels::kGradientDq, ..
  int64_t dq_tiles = 0;                       // sums of dq of a head, where all gradients have one pass
  int score = 0, mask = 0;                    // ATTUNE_SCORE, ATTUNE_MASK
  kernels::T5Table t5{};
  bool with_sinks = false, with_dsinks = false, with_dlse = false;
  bool with_dbias = false;
  int64_t t5_entries = 0;  // of dt5_bias, a head; 0: it is not wanted
  int64_t sum_tiles = 0;   // sums of blocks of queries, of an entry of dsinks or dt5_bias
  Way way = Way::kWgmma;
  DeviceLimits limits = {};

  static constexpr int kThreads = 384, kScheduleThreads = 1024, kRowThreads = 256;
  const char* name() const;
  int element_size() const { return dtype == ATTUNE_FLOAT32 ? 4 : 2; }
  bool has_one_pass() const { return way == Way::kWgmma && kernels::has_one_pass(head_dim_qk, head_dim_v); }
  // The stats say what sinks leave to the keys: dlse is of an lse that is without them.
  bool sink_shares() const { return with_sinks && with_dlse; }
  size_t row_stats_bytes() const { return sink_shares() ? sizeof(kernels::SinkRowStats) : sizeof(kernels::RowStats); }
  int tile() const { return kernels::backward_tile(head_dim_qk, head_dim_v); }
  // Of the gradient kernel that computes `of`: how many tiles of x and y are in shared memory, and its bytes.
  struct Stages {
    int x, y;
  };
  Stages stages(int of) const;
  int shared_bytes(int of, const Stages& s) const;
  // Of gradients_mma.cu, dbias.cu and dt5_bias.cu: warps, of 16 own rows each, and rows of a tile, that fit shared
  // memory; and how many blocks.
  struct MmaShape {
    int warps, tile, blocks_per_sm;
    int rows() const { return 16 * warps; }
  };
  MmaShape mma_shape(int of) const;
  KernelSpec schedule_kernel() const;
  KernelSpec row_stats_kernel() const;
  KernelSpec gradients_kernel(int of) const;
  KernelSpec mma_kernel(int of) const;  // or of dbias, or dt5_bias
  KernelSpec store_dq_kernel() const;
  KernelSpec recompute_kernel(bool of_keys) const;
  KernelSpec sum_blocks_kernel() const;
  int64_t dbias_blocks(const TableView& dbias) const;
  // Blocks of a grid that has a block of rows for each head.
  int64_t blocks(bool of_keys) const { return of_keys ? max_kv_tiles * heads_kv : max_q_tiles * heads_q; }
  size_t workspace_bytes() const;
};

Config choose_config(const BackwardProblem& p);
Config choose_mma_config(const BackwardProblem& p, const DeviceLimits& limits);
// "" if the kernels take the problem, else what they do not take. Only what the coverage row cannot say.
std::string refusal(const BackwardProblem& p);
std::string mma_refusal(const BackwardProblem& p);
// Throws INVALID_ARGUMENT where arrays of a run do not lie as the TMA needs, or there are more than in the plan.
void check_run(const BackwardProblem& p, const Config& c);

kernels::BackwardParams to_params(const BackwardProblem& p, const Config& c, void* workspace);
// of: dsinks, or dt5_bias.
kernels::BlockSumParams block_sum_params(const BackwardProblem& p, const kernels::BackwardParams& k, int of);

// The tensor maps of the gradient kernel that computes `of`, in the order of its parameters.
struct Maps {
  TensorMapDesc own_x, own_y, x, y;
};
Maps describe_maps(const BackwardProblem& p, const Config& c, int of);

// What a kernel's parameters are: BackwardParams alone, or with tensor maps, or BlockSumParams.
enum class Arguments { kParams, kMaps, kBlockSum };
// A launch of a run.
struct Launch {
  KernelSpec kernel;
  int64_t blocks;
  int threads;
  Arguments arguments = Arguments::kParams;
  int of = 0;  // the gradients that it computes, where that is asked
  // It stores all of a table, which has elements where there are no queries and no keys.
  bool of_whole_table() const { return arguments == Arguments::kBlockSum || of == kernels::kGradientDbias; }
};
// In their order.
std::vector<Launch> launches(const Config& c);
// The grid of a launch in a run; 0: it has nothing to do. A run's bias may be larger than its plan's.
int64_t blocks_of_run(const Launch& launch, const Config& c, const BackwardProblem& p);

}  // namespace attune::cuda::backward
