// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks as everywhere
//
// A warp has 16 rows and eight channels at a time, a thread four channels of a row. Where there are few rows, several
// warps of a block share them: each has every n-th part, and the first merges what they have. All that a warp waits for
// is requested together, up to eight parts at a time; a part's weight is computed once for a row, and shuffled.
//
// Its code runs once or twice, so what it takes is the fetching of its instructions. The first time around, while the
// attention is still waited for, it has no parts, loads and stores nothing, and has been fetched.
#include "mla/parts.cuh"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kAtATime = 8, kWarps = kernels::kMlaMergeThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

// Of a row: its maximum, and its sum against that.
struct Stats {
  float max = -ptx::infinity(), sum = 0;
};

// Some parts of a row: four channels.
struct Merged {
  Stats row;
  float4 o = {0, 0, 0, 0};
  __device__ __forceinline__ void lower(float x) { o.x *= x, o.y *= x, o.z *= x, o.w *= x; }
  __device__ __forceinline__ void add(float weight, const float4& part) {
    o.x += weight * part.x, o.y += weight * part.y, o.z += weight * part.z, o.w += weight * part.w;
  }
};

// Against the maximum `top`.
__device__ __forceinline__ float weight_of(float max, float top) {
  return ptx::exp2_approx(max - (top == -ptx::infinity() ? 0.0f : top));
}
// Brings the maximum up to `top`; returns what the sum has been, and O is to be, multiplied with.
__device__ __forceinline__ float raise(Stats& row, float top) {
  const float lowered = weight_of(row.max, top);
  row.max = top, row.sum *= lowered;
  return lowered;
}

// Most warps of 16 rows that a block has.
__device__ __forceinline__ int num_bands(const kernels::PrefillParams& p) {
  const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
  return (tokens * p.heads_of_tile + kRowsOfBand - 1) / kRowsOfBand;
}

// A warp's 16 rows and eight channels: the i-th.
struct Unit {
  int block, head_tile, band, eight;  // block: of those that are cut
  __device__ __forceinline__ Unit(const kernels::PrefillParams& p, int i)
      : block(i / kEights / num_bands(p) / p.num_head_tiles),
        head_tile(i / kEights / num_bands(p) % p.num_head_tiles),
        band(i / kEights % num_bands(p)),
        eight(i % kEights) {}
};
// The list is that of the schedule, which has ended: the attention began after it, and this kernel after that.
__device__ __forceinline__ int num_units(const kernels::PrefillParams& p) {
  return p.list->num_splits * p.num_head_tiles * num_bands(p) * kEights;
}

// Every step-th of a block's parts, from begin on.
__device__ __forceinline__ Merged merge(const kernels::PrefillParams& p, const Unit& unit, int first_part,
                                        int num_parts, int begin, int step) {
  const int lane = threadIdx.x % 32;
  const Parts parts(p, first_part, unit.head_tile, unit.band);
  // Numbers rather than addresses: registers are scarce.
  const int stats_at = static_cast<int>(parts.stats - reinterpret_cast<float2*>(p.partial_stats)) + lane % 16;
  const int out_at = static_cast<int>(parts.out_of(lane / 2, 8 * unit.eight + lane % 2 * 4) - p.partial_out);
  const float2* const all_stats = reinterpret_cast<const float2*>(p.partial_stats);
  const int rows = p.num_head_tiles * kernels::kMlaRowsOfBlock;  // of a part
  Stats row;  // lane % 16
  Merged merged;
  int done = begin;
#pragma unroll 1
  do {
    float2 given[kAtATime / 2];  // of every other part, from lane / 16 on
    float4 x[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime / 2; ++i) {
      const int ahead = done + (2 * i + lane / 16) * step;
      given[i] = make_float2(-ptx::infinity(), 0);
      if (ahead < num_parts) given[i] = ptx::load_from_l2(all_stats + stats_at + ahead * rows);
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int ahead = done + i * step;
      x[i] = make_float4(0, 0, 0, 0);
      if (ahead < num_parts)
        x[i] = ptx::load_from_l2(
            reinterpret_cast<const float4*>(p.partial_out + out_at + ahead * rows * kernels::kMlaHeadDimV));
    }
    float top = row.max, sum = 0;
#pragma unroll
    for (int i = 0; i < kAtATime / 2; ++i) top = fmaxf(top, given[i].x);
    top = fmaxf(top, __shfl_xor_sync(kAll, top, 16));
    const float lowered = raise(row, top);
#pragma unroll
    for (int i = 0; i < kAtATime / 2; ++i) {
      given[i].x = weight_of(given[i].x, top);
      sum += given[i].x * given[i].y;
    }
    row.sum += sum + __shfl_xor_sync(kAll, sum, 16);
    merged.lower(__shfl_sync(kAll, lowered, lane / 2));
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) merged.add(__shfl_sync(kAll, given[i / 2].x, i % 2 * 16 + lane / 2), x[i]);
    done += step * kAtATime;
  } while (done < num_parts);
  merged.row = {__shfl_sync(kAll, row.max, lane / 2), __shfl_sync(kAll, row.sum, lane / 2)};
  return merged;
}

// dry: everything but the stores.
__device__ __forceinline__ void store(const kernels::PrefillParams& p, const kernels::Task& t, const Unit& unit,
                                      const Merged& merged, bool dry) {
  const int lane = static_cast<int>(ptx::kept(threadIdx.x) % 32);
  const int row = unit.band * kRowsOfBand + lane / 2, local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const int token = t.token_begin + local, head = unit.head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
  const float factor = tile::finish_row(p, t.batch, t.q_begin, token, head, merged.row.max, merged.row.sum,
                                        !dry && unit.eight == 0 && lane % 2 == 0);
  const long long to = tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride,
                                        p.out_head_stride) +
                       (8 * unit.eight + lane % 2 * 4) * p.out_dim_stride;
  const float x[4] = {merged.o.x * factor, merged.o.y * factor, merged.o.z * factor, merged.o.w * factor};
  if (ATTUNE_OUT_TYPE == tile::kBFloat16 || ATTUNE_OUT_TYPE == tile::kFloat16) {
    if (p.store_vectors) {
      constexpr auto pack = ATTUNE_OUT_TYPE == tile::kBFloat16 ? ptx::pack_bf16 : ptx::pack_f16;
      const uint2 four = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
      if (!dry) *reinterpret_cast<uint2*>(p.out + 2 * to) = four;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!dry) tile::store_element(ATTUNE_OUT_TYPE, p.out, to + i * p.out_dim_stride, x[i]);
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaMergeThreads, 2)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  using namespace attune::mla;
  __shared__ Merged shared[kWarps][32];
  __shared__ int units[kernels::kMlaMergeThreads];
  const auto warps = [] { return static_cast<int>(ptx::kept(gridDim.x)) * kWarps; };
  const auto warp = [] { return static_cast<int>(ptx::kept(threadIdx.x)) / 32; };  // of the block
  int shift = 0;  // log2 of the warps that share a unit; where they are more than one, each has one unit at most
  while (1 << shift < kWarps && num_units(p) << (shift + 1) <= warps()) ++shift;
  volatile int& now = units[threadIdx.x];
  bool dry = true;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kWarps + warp() >> shift; i < num_units(p);) {
    const int sharing = 1 << shift, share = warp() & (sharing - 1);
    Merged merged;
    now = i;  // registers are scarce while parts come
    {
      const Unit unit(p, i);
      const kernels::Task& task = p.split_tasks[unit.block];
      const int first = task.first_part, num_parts = !dry && has_rows(p, task, unit.band) ? task.num_parts : 0;
      if (!dry) ptx::wait_for_previous_kernels();
      merged = merge(p, unit, first, num_parts, share, sharing);
    }
    if (shift > 0) {
      shared[warp()][threadIdx.x % 32] = merged;
      ptx::sync_some(1 + (warp() >> shift), 32 << shift);
#pragma unroll 1
      for (int other = warp() + 1; other < (warp() | sharing - 1) + 1; ++other) {
        const Merged more = shared[other][threadIdx.x % 32];
        merged.lower(raise(merged.row, fmaxf(merged.row.max, more.row.max)));
        const float weight = weight_of(more.row.max, merged.row.max);
        merged.row.sum += weight * more.row.sum;
        merged.add(weight, more.o);
      }
      ptx::sync_some(1 + (warp() >> shift), 32 << shift);
    }
    i = now;
    const Unit unit(p, i);
    if ((warp() & (sharing - 1)) == 0) store(p, p.split_tasks[unit.block], unit, merged, dry);
    if (!dry) i += warps();
    dry = false;
  }
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
