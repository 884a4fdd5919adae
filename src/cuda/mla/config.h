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
  int rows = kernels::kMlaBlockM;      // of queries in an M block, at most
  bool m16 = false;                    // the m16 kernel
  bool swap_ab = false;                // the swap-AB kernel

  int cluster = 1;            // blocks that share the keys that they copy or dequantize
  int64_t max_row_pairs = 0;  // rows that are combined, in pairs

  bool has_maps() const { return !m16 && !swap_ab; }  // the kernel copies by the TMA's tensor maps
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

// Throws INVALID_ARGUMENT if a run, after its prologue, has pointers, strides, pages or a scale that its plan's kernel
// does not take.
void check_run(const Problem& p, const Config& c);

kernels::WorkTileParams to_params(const Problem& p, const Config& c, void* workspace);

// The tensor maps of the M = 64 kernel, in the order of its parameters. Rank 0: it copies nothing by this one.
struct Maps {
  TensorMapDesc q, k, dense_k;
};
Maps describe_maps(const Problem& p, const Config& c);

}  // namespace attune::cuda::mla
