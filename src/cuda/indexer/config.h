// SPDX-License-Identifier: Apache-2.0
// What the kernels in kernels/indexer/ are compiled for, by operation; their launches, and the layout of the workspace.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/indexer.h"
#include "cuda/architecture.h"
#include "cuda/kernel.h"

namespace attune::cuda::indexer {

// The kernel of the scores. exact: kernels/indexer/scores_exact.cu, fp32 arithmetic element by element; the other
// fields are those of kernels/indexer/scores.cu.
struct ScoresConfig {
  bool exact = false;
  bool bf16 = false;  // of the wgmma operands; else fp16
  int q_type = 0, k_type = 0;
  int heads = 1, pass_heads = 64;  // in all; N of one wgmma
  int channels = 64;
  int key_tiles = 2, key_stages = 0, q_stages = 2;
  bool q_vectors = false;

  int block_keys() const { return exact ? 128 : 128 * key_tiles; }
  int threads() const { return exact ? 128 : 384; }
  size_t shared_bytes() const;
  KernelSpec kernel() const;
  std::array<int, 12> key() const;  // of the specialisation
};

// The kernel of the selection: kernels/indexer/select_config.cuh.
struct SelectConfig {
  int threads = 1024, blocks_per_sm = 1;
  int cluster = 1;  // blocks of a row
  int vectors = 4;  // of keys that a thread reads at a time
  int bits = 12, candidates = 2048, mark_words = 4096;

  size_t shared_bytes() const;
  KernelSpec kernel() const;
  std::array<int, 12> key() const;  // of the specialisation
};

inline constexpr int kOwnersThreads = 1024;
KernelSpec owners_kernel();

// target: what the kernels are compiled for. Without wgmma, scores are exact; without clusters, a row has one block.
ScoresConfig choose_scores(const IndexerProblem& op, const Target& target = {});
// rows: of a launch.
SelectConfig choose_select(const IndexerProblem& op, int64_t rows, int num_sms, const Target& target = {});

// Rows of a launch, and bytes of the workspace.
struct Layout {
  int64_t rows = 0;                          // of one launch of scores and of selection
  int64_t columns = 0;                       // of a row of scores in the workspace
  size_t owners = 0, scores = 0, total = 0;  // offsets lie at 0
};
Layout make_layout(const IndexerProblem& op);

}  // namespace attune::cuda::indexer
