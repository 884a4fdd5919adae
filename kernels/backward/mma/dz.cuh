// SPDX-License-Identifier: Apache-2.0
// dZ of a block's resident queries and a tile of keys, which dbias.cu and dt5_bias.cu sum.
#pragma once

#include "backward/mma/gemms_16.cuh"
#include "backward/mma/producer.cuh"
#include "backward/mma/table_terms.cuh"

namespace attune::backward::mma {

static_assert(Config::kOfTables && Config::kStep == Config::kTile);

// The fp32 dot product of a resident row and a row of the tile, from their shared addresses.
template <int kLines>
__device__ __forceinline__ float product_of_rows(unsigned resident, int resident_row, unsigned tile, int tile_row) {
  using Rows = Layout<kLines>;
  float sum = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < 8 * kLines; ++chunk) {
    unsigned x[4], y[4];
    ptx::load_shared_four(resident + Rows::offset(resident_row, chunk), x);
    ptx::load_shared_four(tile + Rows::offset(tile_row, chunk), y);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(__uint_as_float(x[i]), __uint_as_float(y[i]), sum);
  }
  return sum;
}

// Split into two TF32 parts an infinity becomes an infinity and a NaN, so S or dP may be NaN where it should be
// infinite. Such products are recomputed in fp32: an infinite key may have scores of -inf, which add nothing.
__device__ __forceinline__ void recompute_nan_products(const Smem& smem, unsigned pairs, Scores& s, Scores& d) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4 * kN8Tiles; ++i) {
    finite &= fabsf(s[i / 4][i % 4]) < ptx::infinity() && fabsf(d[i / 4][i % 4]) < ptx::infinity();
  }
  if (finite) return;
  const int row = resident_row(smem.work()) - smem.work().begin;
#pragma unroll
  for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool fine = fabsf(s[n][j]) < ptx::infinity() && fabsf(d[n][j]) < ptx::infinity();
      if (fine || (pairs >> (4 * n + j) & 1) == 0) continue;
      const int resident = row + j / 2 * 8, key = 8 * n + first_column() + j % 2;
      s[n][j] = product_of_rows<Config::kLinesQk>(smem.resident_qk(), resident, smem.qk(), key);
      d[n][j] = product_of_rows<Config::kLinesV>(smem.resident_vdo(), resident, smem.vdo(), key);
    }
  }
}

// dZ of this thread's pairs, whose keys begin at `key`; 0 if a query and a key do not see each other. Returns false if
// the warp has no pair that counts. All threads of the block call it, because they copy the tile first. head: of q.
__device__ __forceinline__ bool make_dz(const BackwardParams& p, const Smem& smem, int head, int key, Scores& dz) {
  const WorkTile& work = smem.work();
  __syncthreads();  // all warps have read the previous tile
  copy_tile(p, smem, head, key);
  ptx::commit_copies();
  ptx::wait_copies<0>();
  __syncthreads();  // the tile has arrived
  const unsigned pairs = visible_pairs(p, work, head, key);
  if (__any_sync(0xffffffffu, pairs != 0) == 0) return false;
  const unsigned warp = threadIdx.x / 32;
  const unsigned resident_qk = smem.resident_qk() + 16 * warp * LayoutQk::kPitch,
                 resident_vdo = smem.resident_vdo() + 16 * warp * LayoutVdo::kPitch;
  Scores s, terms;
  load_terms(p, work, pairs, head, key, terms);
  if constexpr (Config::kIn16Bits) {
    multiply_16_bits<Config::kLinesQk>(resident_qk, smem.qk(), s);
    multiply_16_bits<Config::kLinesV>(resident_vdo, smem.vdo(), dz);
  } else {
    multiply<Config::kLinesQk>(resident_qk, smem.qk(), s);
    multiply<Config::kLinesV>(resident_vdo, smem.vdo(), dz);
    recompute_nan_products(smem, pairs, s, dz);
  }
  make_p_and_ds(p, work, smem.stats(0), pairs, head, key, s, dz, &terms);
  return true;
}

}  // namespace attune::backward::mma
