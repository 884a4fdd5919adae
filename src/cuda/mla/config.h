// SPDX-License-Identifier: Apache-2.0
// Which MLA kernel a problem gets, what it is compiled for, and its parameters.
#pragma once

#include <cstdint>
#include <string>

#include "core/problem.h"
#include "cuda/attention/work_tiles.h"
#include "cuda/kernel.h"
#include "cuda/tensor_map.h"
#include "mla/mla_params.h"

namespace attune::cuda::mla {

struct Config : attention::WorkTiles {
  // What the kernel is compiled for.
  int head_dim_qk = 0;
  int32_t dtype = 0, out_dtype = 0;
  kernels::MlaProducer producer = kernels::kMlaTma;
  bool sparse = false, dense = false;  // dense: there are rows outside of a cache
  int mask = 0;                        // ATTUNE_MASK
  int rows = kernels::kMlaBlockM;      // query rows of an M block, at most
  bool m16 = false;                    // the m16 kernel
  bool swap_ab = false;                // the swap-AB kernel
  bool mma = false;                    // the kernel of GPUs without wgmma
  int stages = 0;                      // of the pipeline of that kernel

  int cluster = 1;            // blocks that share the keys that they copy or dequantize
  int64_t max_row_pairs = 0;  // pairs of rows that the combine kernel may get

  const char* name() const { return mma ? "cuda_mla_mma" : "cuda_mla"; }  // of the registry's row
  // Sets max_row_pairs, once the grid is chosen.
  void count_row_pairs(const Problem& p, int num_sms);
  bool has_maps() const { return !m16 && !swap_ab && !mma; }  // only the M = 64 kernel has tensor maps
  unsigned threads() const;
  unsigned combine_blocks(int num_sms) const;  // two a multiprocessor, or as many as there is work for
  size_t shared_bytes() const;
  KernelSpec main_kernel() const;
  KernelSpec schedule_kernel() const;
  KernelSpec combine_kernel() const;
};

// "" if the kernel takes the problem, else what it does not take beyond what the coverage row says.
std::string refusal(const Problem& p);
Config choose_config(const Problem& p, int num_sms);
// The same without wgmma (kernels/mla/mma.cu), for blocks of at most shared_bytes.
Config choose_mma_config(const Problem& p, int num_sms, int64_t shared_bytes);
// How the producer brings key rows to shared memory: by TMA boxes where these can copy them.
kernels::MlaProducer choose_producer(const Problem& p);

// p: after its prologue. Throws INVALID_ARGUMENT if a run has pointers, strides, pages or a scale that its plan's
// kernel does not take.
void check_run(const Problem& p, const Config& c);

kernels::WorkTileParams to_params(const Problem& p, const Config& c, void* workspace);

// The tensor maps of the M = 64 kernel, in the order of its parameters. Rank 0: the kernel does not use this one.
struct Maps {
  TensorMapDesc q, q_rope, k, dense_k;
};
Maps describe_maps(const Problem& p, const Config& c);

}  // namespace attune::cuda::mla
