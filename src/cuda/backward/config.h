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

// The tensor core instruction of the gradient kernel: gradients.cu has wgmma, gradients_mma.cu mma.sync.
enum class MmaInstruction { kWgmma, kMmaSync };

// What limits the blocks of gradients_mma.cu.
struct DeviceLimits {
  int64_t shared_bytes_per_sm = 233472, shared_bytes_per_block = 232448;  // Hopper's
};

struct Config {
  int head_dim_qk = 0, head_dim_v = 0;
  int32_t dtype = 0;
  int64_t heads_q = 0, heads_kv = 0;
  int64_t max_q_tiles = 0, max_kv_tiles = 0;  // row blocks of queries and of keys, at most
  int64_t stats_stride = 0;                   // rows of a head in the statistics
  int gradients = 0;                          // the wanted ones: kernels::kGradientDq, ..
  int64_t dq_tiles = 0;                       // tiles of a head's fp32 dq, where one pass computes all gradients
  int score = 0, mask = 0;                    // ATTUNE_SCORE, ATTUNE_MASK
  kernels::T5Table t5{};
  bool with_sinks = false, with_dsinks = false, with_dlse = false;
  bool with_dbias = false;
  int64_t t5_entries = 0;  // buckets of dt5_bias; 0: it is not wanted
  int64_t sum_tiles = 0;   // partial sums of an entry of dsinks or dt5_bias, one a block of queries
  MmaInstruction mma = MmaInstruction::kWgmma;
  DeviceLimits limits = {};

  static constexpr int kThreads = 384, kScheduleThreads = 1024, kRowThreads = 256;
  const char* name() const;
  int element_size() const { return dtype == ATTUNE_FLOAT32 ? 4 : 2; }
  bool has_one_pass() const { return mma == MmaInstruction::kWgmma && kernels::has_one_pass(head_dim_qk, head_dim_v); }
  // Statistics hold what the sink leaves to the keys: needed with dlse, as lse is without the sink.
  bool sink_shares() const { return with_sinks && with_dlse; }
  size_t row_stats_bytes() const { return sink_shares() ? sizeof(kernels::SinkRowStats) : sizeof(kernels::RowStats); }
  int tile() const { return kernels::backward_tile(head_dim_qk, head_dim_v); }
  // Pipeline stages of the two streamed operands in gradients.cu: qk (k, or q) and vdo (v, or dout). outputs: the
  // gradients that the launch computes. And the shared memory that they need.
  struct Stages {
    int qk, vdo;
  };
  Stages stages(int outputs) const;
  int shared_bytes(int outputs, const Stages& s) const;
  // The block of gradients_mma.cu, dbias.cu and dt5_bias.cu that fits shared memory: warps of 16 rows each, rows of a
  // streamed tile, and blocks a multiprocessor.
  struct MmaShape {
    int warps, tile, blocks_per_sm;
    int rows() const { return 16 * warps; }
  };
  MmaShape mma_shape(int outputs) const;
  KernelSpec schedule_kernel() const;
  KernelSpec row_stats_kernel() const;
  KernelSpec gradients_kernel(int outputs) const;
  KernelSpec mma_kernel(int outputs) const;  // gradients_mma.cu, dbias.cu or dt5_bias.cu
  KernelSpec store_dq_kernel() const;
  KernelSpec recompute_kernel(bool of_keys) const;
  KernelSpec sum_blocks_kernel() const;
  int64_t dbias_blocks(const TableView& dbias) const;
  // The grid: a block for each row block and head.
  int64_t blocks(bool of_keys) const { return of_keys ? max_kv_tiles * heads_kv : max_q_tiles * heads_q; }
  size_t workspace_bytes() const;
};

Config choose_config(const BackwardProblem& p);
Config choose_mma_config(const BackwardProblem& p, const DeviceLimits& limits);
// "" if the kernels take the problem, else what they do not take. Only what the coverage row cannot say.
std::string refusal(const BackwardProblem& p);
std::string mma_refusal(const BackwardProblem& p);
// Throws INVALID_ARGUMENT where the TMA cannot copy arrays of a run, or the run needs kernels that its plan lacks.
void check_run(const BackwardProblem& p, const Config& c);

kernels::BackwardParams to_params(const BackwardProblem& p, const Config& c, void* workspace);
// outputs: dsinks, or dt5_bias.
kernels::BlockSumParams block_sum_params(const BackwardProblem& p, const kernels::BackwardParams& k, int outputs);

// The tensor maps of the gradient kernel that computes `outputs`, in the order of its parameters.
struct Maps {
  TensorMapDesc resident_qk, resident_vdo, qk, vdo;
};
Maps describe_maps(const BackwardProblem& p, const Config& c, int outputs);

// What a kernel's parameters are: BackwardParams alone, or with tensor maps, or BlockSumParams.
enum class Arguments { kParams, kMaps, kBlockSum };
// A launch of a run.
struct Launch {
  KernelSpec kernel;
  int64_t blocks;
  int threads;
  Arguments arguments = Arguments::kParams;
  int outputs = 0;  // the gradients that it computes; 0 where no argument depends on them
  // Whether it stores a whole table, which has elements even where there are no queries and no keys.
  bool of_whole_table() const { return arguments == Arguments::kBlockSum || outputs == kernels::kGradientDbias; }
};
// In their order.
std::vector<Launch> launches(const Config& c);
// The grid of a launch in a run; 0: nothing to do. It may exceed the plan's, as a run's bias may be larger.
int64_t blocks_of_run(const Launch& launch, const Config& c, const BackwardProblem& p);

}  // namespace attune::cuda::backward
