// SPDX-License-Identifier: Apache-2.0
// A large problem on a GPU, for timing: gigabytes of cache made from a block of random pages, which the host keeps for
// the oracle. Sources that include this cannot include attune.hpp, whose names meet those of src/cuda.
#pragma once

#include <cstdint>
#include <vector>

#include "attune/attune.h"
#include "cases/case.h"
#include "cases/cuda_memory.h"
#include "cases/tensors.h"

namespace attune::cli {

class CudaProblem {
 public:
  // Takes sequences of one query each (flat) or more (ragged) over a paged cache (plain formats in all layouts, latent
  // rows of 16 bits or 656 bytes) or dense keys as many as they are; scales of tokens in NHD, masks by causality and
  // window, softcap, ALiBi, T5, sinks, new tokens beside the cache, a prologue of biases, RoPE and append. Throws
  // UserError for another key.
  // copies: pools and tables of their own, to be used in turn so that no run finds its keys in a cache of the device.
  CudaProblem(const cases::Case& spec, cases::CudaMemory& memory, int copies);
  ~CudaProblem();
  CudaProblem(const CudaProblem&) = delete;
  CudaProblem& operator=(const CudaProblem&) = delete;

  // The oracle's view, of copy 0; out has host memory too.
  const attune_attention& host() const { return host_; }
  attune_attention device(int copy) const;
  int num_copies() const { return static_cast<int>(copies_); }
  // Poisons out on the device, and fetches it.
  void upload_out();
  void download_out();
  // Keys that each row sees.
  const std::vector<int64_t>& keys_of_row() const { return keys_of_row_; }
  double kv_bytes() const { return kv_bytes_; }  // that a run must read, scales included

 private:
  attune_tensor add(const std::string& name, attune_dtype dtype, const std::vector<int64_t>& shape, double deviation);
  void make_queries();
  void count_keys();
  void make_cache();
  void make_tables();
  void make_packed();
  void make_scores();
  void make_prologue();
  void make_plane(const std::string& name, int64_t head_dim, attune_tensor& data, attune_tensor& scale,
                  void*& device_data, void*& device_scale);
  attune_tensor make_scale(const std::string& name, int64_t head_dim, double mean, void*& device_scale);
  // Device memory of the pool, filled with the block over and over.
  void* replicate(const attune_tensor& block, int64_t bytes_of_page);

  const cases::Case spec_;
  cases::CudaMemory& memory_;
  cases::Arena arena_;
  cases::Random random_;
  attune_attention host_{};
  int64_t pages_ = 0, block_pages_ = 0, copies_ = 1, max_pages_ = 0;  // pages of one copy; of the host's block
  std::vector<attune_tensor> tables_;                                 // on the device; empty for dense keys
  void *device_k_ = nullptr, *device_v_ = nullptr, *device_k_scale_ = nullptr, *device_v_scale_ = nullptr;
  std::vector<void*> pools_;
  std::vector<int64_t> keys_of_row_;
  double kv_bytes_ = 0;
};

}  // namespace attune::cli
