// SPDX-License-Identifier: Apache-2.0
// Recomputes rows whose O is not finite, as mla/m64/recompute.cuh does: P is 0 for a key that one row of an M block
// sees and another does not, and 0 times its NaN or infinite value is NaN. Not for index lists, because all rows of an
// M block see the same entries.
#pragma once

#include "mla/mma/epilogue.cuh"
#include "mla/producers/kv_source.cuh"
#include "ptx/convert.cuh"

namespace attune::mla {

// Flags the rows that must be recomputed. Returns whether there is any, the same in all consumer threads. Called before
// O is stored.
__device__ __forceinline__ bool mma_find_nonfinite(const WorkTileParams& p, MmaStorage& shared, const MmaMainloop& a) {
  if (ProblemConfig::kSparse) return false;
  if (threadIdx.x < 2) shared.nonfinite[threadIdx.x] = 0;
  MmaBarriers::sync_consumers();
  bool any = false;
#pragma unroll
  for (int m = 0; m < MmaMainloop::kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float probe = 0;  // NaN if one is not finite
#pragma unroll
      for (int c = 0; c < MmaMainloop::kChannelTiles; ++c)
        probe = fmaf(a.o[m][c][2 * h], 0.0f, fmaf(a.o[m][c][2 * h + 1], 0.0f, probe));
      const int row = a.row_of_out(m, h);
      if (probe == 0.0f || !MmaRow(p, shared, row).exists) continue;
      atomicOr(&shared.nonfinite[a.group()], 1u << a.lane() / 4 << (16 * m + 8 * h));
      any = true;
    }
  }
  return ptx::named_barrier_any(MmaBarriers::kConsumers, MmaConfig::kConsumerThreads, any);
}

// Recomputes one row, key by key, from the keys that it sees. A warp has its channels of O, two for each lane.
__device__ __forceinline__ void mma_recompute_row(const WorkTileParams& p, const MmaStorage& shared, int row) {
  const WorkTile& t = shared.work;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int channel = warp * kChannelsOfScale + 2 * lane;
  const MmaRow r(p, shared, row);
  const int first = scheduler::first_visible(p, r.position(t)),
            end = scheduler::end_visible(p, t.num_keys, r.position(t));
  float o[2] = {}, row_max = -ptx::infinity(), row_sum = 0;
#pragma unroll 1
  for (int i = t.tile_begin; i < t.tile_end; ++i) {
    const Tile tile = mma_tile_at(t, i);
    const KvSource source(p, t, shared.kv_head, tile);
    const bool quantized = ProblemConfig::kDequant && tile.cached;
#pragma unroll 1
    for (int key = max(tile.low, first); key < min(tile.high, end); ++key) {
      const int index = source.load_index(key);
      const char* const at = source.locate(key, index);
      if (at == nullptr) continue;
      float s = 0;
#pragma unroll 1
      for (int d = lane; d < ProblemConfig::kHeadDimQk; d += 32)
        s = fmaf(query_channel(p, t, r.token, r.head, d), load_channel(source, key, index, at, quantized, d), s);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
      s *= p.scale * kLog2e;
      if (s == -ptx::infinity()) continue;  // P is 0, so the value does not count
      const float new_row_max = fmaxf(row_max, s), row_max_ref = finite_row_max(new_row_max);
      const float rescale = ptx::exp2_approx(row_max - row_max_ref), p_key = ptx::exp2_approx(s - row_max_ref);
      row_max = new_row_max;
      row_sum = row_sum * rescale + p_key;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        o[e] = o[e] * rescale + p_key * load_channel(source, key, index, at, quantized, channel + e);
    }
  }
  if (t.num_splits > 1) {
    const int unit = partial_idx(p, t, shared.head_tile);
    if (lane == 0 && warp % kScalesOfHalf == 0) {
      float* const stats = partial_stats_at(p.partial_stats, unit, row, warp / kScalesOfHalf);
      *reinterpret_cast<float2*>(stats) = make_float2(row_max, row_sum);
      stats[2] = 1;
    }
    char* const to = partial_out_at(p.partial_out, unit, row, channel);
    if constexpr (kFp16Partials) {
      float largest = fmaxf(magnitude(o[0]), magnitude(o[1]));
#pragma unroll
      for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      const unsigned exponent = max(__float_as_uint(fmaxf(largest, 0.0f)) >> 23, kLeastExponent);
      if (lane == 0) *mma_exponent_at(p, unit, row, channel) = static_cast<char>(exponent - kToInverse);
      *reinterpret_cast<unsigned*>(to) = ptx::pack_f16(o[0] * factor_of(exponent), o[1] * factor_of(exponent));
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(o[0], o[1]);
    }
    return;
  }
  float factor = 0;
  if (lane == 0) factor = common::finish_row(p, t.batch, t.q_begin, r.token, r.head, row_max, row_sum, warp == 0);
  factor = __shfl_sync(0xffffffffu, factor, 0);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    common::store_element(ProblemConfig::kOutType, p.out,
                          out_at(p, t, r.token, r.head) + (channel + e) * p.out_dim_stride, o[e] * factor);
}

// Called by all consumer threads, after the work tile's rows are stored. Overwrites the rows that are not finite.
__device__ __forceinline__ void mma_recompute(const WorkTileParams& p, const MmaStorage& shared) {
  MmaBarriers::sync_consumers();  // the rows that are overwritten have been stored
#pragma unroll 1
  for (int row = 0; row < MmaConfig::kRows; ++row) {
    if ((shared.nonfinite[row / 32] >> row % 32 & 1) != 0) mma_recompute_row(p, shared, row);
  }
}

}  // namespace attune::mla
