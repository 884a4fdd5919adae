// SPDX-License-Identifier: Apache-2.0
// dbias, the gradient of the bias table, by mma.sync. It runs beside whichever kernel computes dq, dk and dv.
//
//   dbias[h, P, j] = sum over the sequences, and over the query heads that share the table, of
//   dZ = P (dP - delta),  S = Q K^T,  dP = dO V^T
//
// Grid: a block has entries of one head of the table, 64 positions and 128 keys, or half of each. It goes through the
// sequences that use some of these entries, in the order of the batch, and through their heads. Its sums stay in
// registers and are stored once. No other block adds to them, so they have the same bits in every run, and entries that
// no sequence uses become 0. S and dP are computed again, because dS of all pairs would be as large as the table, for
// each sequence.
//
//   64 rows of Q, dO | 32 rows of K, V | S | dP | dZ | add | next K, V .. | next head, next sequence .. | store
//
// A warp has 16 positions, whose query is a different row in each sequence, or does not exist. The sums of a tile of
// keys are always added in the same registers, and the loop then rotates the registers by one tile: indexing them would
// put them in local memory.
#include "backward/mma/dz.cuh"
#include "ptx/grid.cuh"

namespace attune::backward::mma {

constexpr int kTiles = kernels::kDbiasTiles, kBlockKeys = kTiles * Config::kTile;
static_assert(Config::kGradients == kernels::kGradientDbias);

// The entries of a block: its first position and key.
struct Entries {
  int head, position, key;  // head: of the table

  __device__ __forceinline__ explicit Entries(const BackwardParams& p) {
    const int of_keys = (p.bias.columns + kBlockKeys - 1) / kBlockKeys,
              of_positions = (p.bias.rows + Config::kRows - 1) / Config::kRows;
    const int i = static_cast<int>(blockIdx.x);
    key = i % of_keys * kBlockKeys;
    position = i / of_keys % of_positions * Config::kRows;
    head = i / of_keys / of_positions;
  }
  // The query at the first position; -kRows if all positions are before the sequence's queries.
  __device__ __forceinline__ int first_query(const SequenceInfo& s) const {
    return clamp_int(static_cast<long long>(position) - s.num_keys + s.num_q, -Config::kRows, s.num_q);
  }
  __device__ __forceinline__ bool overlap(const BackwardParams& p, int b) const {
    const SequenceInfo s = read_sequence(p, b);
    const int first = first_query(s);
    return first > -Config::kRows && first < s.num_q && key < s.num_keys;
  }
};
using EntrySums = float[kTiles][kN8Tiles][4];

// Rotates the sums by a tile: those of tile 0 become the last.
__device__ __forceinline__ void rotate(EntrySums& sums) {
#pragma unroll
  for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float first = sums[0][n][j];
#pragma unroll
      for (int i = 1; i < kTiles; ++i) sums[i - 1][n][j] = sums[i][n][j];
      sums[kTiles - 1][n][j] = first;
    }
  }
}

// Adds dZ of a sequence and a head of q.
__device__ __forceinline__ void add(const BackwardParams& p, const Smem& smem, const Entries& entries, int b, int head,
                                    EntrySums& sums) {
  __syncthreads();  // all warps have finished the previous work
  if (threadIdx.x == 0) {
    WorkTile w = work_tile_of(p, {b, entries.first_query(read_sequence(p, b))}, 0, head);
    w.first = max(w.first, entries.key), w.last = min(w.last, entries.key + kBlockKeys);
    smem.work() = w;
  }
  __syncthreads();
  const WorkTile& work = smem.work();
  if (work.first >= work.last) return;
  copy_resident(p, smem);
#pragma unroll 1
  for (int key = entries.key; key < entries.key + kBlockKeys; key += Config::kTile) {
    Scores dz;
    if (key < work.last && key + Config::kTile > work.first && make_dz(p, smem, head, key, dz)) {
#pragma unroll
      for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[0][n][j] += dz[n][j];
      }
    }
    rotate(sums);
  }
}

__device__ __forceinline__ void store(const BackwardParams& p, const Entries& entries, const EntrySums& sums) {
  const int row = entries.position + static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= p.bias.rows) continue;
    float* const to = p.dbias + entries.head * p.dbias_head_stride + (row + 8 * h) * p.dbias_row_stride;
#pragma unroll
    for (int i = 0; i < kTiles * kN8Tiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = entries.key + 8 * i + first_column() + e;
        if (key < p.bias.columns) to[key * p.dbias_column_stride] = sums[i / kN8Tiles][i % kN8Tiles][2 * h + e];
      }
    }
  }
}

__device__ __forceinline__ void run(const BackwardParams& p, const Smem& smem) {
  const Entries entries(p);
  const bool shared = p.dbias_heads == 1;
  const int first_head = shared ? 0 : entries.head, heads = shared ? p.num_heads_q : 1;
  EntrySums sums;
#pragma unroll
  for (int i = 0; i < kTiles * kN8Tiles * 4; ++i) sums[i / 4 / kN8Tiles][i / 4 % kN8Tiles][i % 4] = 0;
  for (int begin = 0; begin < p.batch; begin += Config::kThreads) {
    // Each thread tests one sequence, because most sequences of a large batch have other positions.
    const int mine = begin + static_cast<int>(threadIdx.x);
    const unsigned found = __ballot_sync(0xffffffffu, mine < p.batch && entries.overlap(p, mine));
    __syncthreads();  // all threads have read the previous words
    if (threadIdx.x % 32 == 0) smem.sequences(threadIdx.x / 32) = found;
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      unsigned left = smem.sequences(warp);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int b = begin + 32 * warp + __ffs(static_cast<int>(left)) - 1;
#pragma unroll 1
        for (int head = first_head; head < first_head + heads; ++head) add(p, smem, entries, b, head, sums);
      }
    }
  }
  store(p, entries, sums);
}

}  // namespace attune::backward::mma

extern "C" __global__ void __launch_bounds__(attune::backward::mma::Config::kThreads, ATTUNE_BLOCKS_PER_SM)
    attune_backward_dbias(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  mma::run(p, mma::Smem(ptx::dynamic_shared()));
}
