// SPDX-License-Identifier: Apache-2.0
// The stats of every row of q: its lse in base 2, and delta = <dout, out> - dlse. With sinks the lse is made to include
// them, or the stats have a share (SinkRowStats); and each block sums its rows' terms of dsinks. Also sets the
// semaphores of dq to 0: with other values a block of keys could wait forever. Grid: blocks of queries times heads.
#include "backward/block_sums.cuh"
#include "backward/sinks.cuh"
#include "ptx/grid.cuh"

namespace attune::backward {

constexpr int kThreads = 256;
constexpr bool kWithSinks = ATTUNE_WITH_SINKS != 0;
static_assert(kWithSinks || !kSinkShares, "shares need sinks");

// Where the tensors' rows of a sequence and head begin.
struct RowsOf {
  const BackwardParams& p;
  const SequenceInfo& s;
  int b, head;

  __device__ __forceinline__ long long dout(int row) const { return query_offset(p, s, b, p.dout, row, head); }
  __device__ __forceinline__ long long out(int row) const {
    return q_offset(p, s, b, p.out_batch_stride, p.out_row_stride) + row * p.out_row_stride + head * p.out_head_stride;
  }
  __device__ __forceinline__ float lse(int row) const {
    return p.lse[q_offset(p, s, b, p.lse_batch_stride, p.lse_row_stride) + row * p.lse_row_stride +
                 head * p.lse_head_stride];
  }
  // Stores the stats of a row. product: <dout, out>. Returns the row's term of -dsinks. A row that sees no key gets
  // stats that make its P and dS 0, even if its dout is NaN.
  __device__ __forceinline__ float store(int row, float product) const {
    const float of_row = lse(row);
    const bool fully_masked = of_row == -ptx::infinity();
    RowStats stats = {of_row * common::kLog2e, product};
    float sink_gradient = 0;
    if constexpr (kWithSinks) {
      const Sink sink(common::load_element(p.sinks_dtype, p.sinks + head * p.sinks_stride, 0), of_row);
      if (!fully_masked) sink_gradient = sink.probability() * product;
      sink.add_to(stats);
    }
    if (p.dlse != nullptr) {
      stats.delta -= p.dlse[q_offset(p, s, b, p.dlse_batch_stride, p.dlse_row_stride) + row * p.dlse_row_stride +
                            head * p.dlse_head_stride];
    }
    if (fully_masked) stats = {ptx::infinity(), 0.0f};
    stats_of(p, s, b, head)[row] = stats;
    return sink_gradient;
  }
};

// <dout, out> of a row, by the lanes of a warp.
__device__ __forceinline__ float dot(const RowsOf& rows, int row) {
  const BackwardParams& p = rows.p;
  float sum = 0;
  for (int c = threadIdx.x % 32; c < ATTUNE_HEAD_DIM_V; c += 32) {
    sum += common::load_element(ATTUNE_TYPE, p.dout.data, rows.dout(row) + c * p.dout.dim_stride) *
           common::load_element(ATTUNE_TYPE, p.out, rows.out(row) + c * p.out_dim_stride);
  }
  return sum_of_lanes(sum);
}

// The same with loads of 16 bytes: eight lanes have a row, a warp four rows.
struct EightLanes {
  static constexpr int kChunks = ATTUNE_HEAD_DIM_V / 8;  // of a row; a lane has every eighth

  __device__ __forceinline__ static float product(unsigned x, unsigned y) {
    if (ATTUNE_TYPE == common::kBFloat16) {
      return __uint_as_float(x << 16) * __uint_as_float(y << 16) +
             __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
    }
    return ptx::f16_to_float(static_cast<unsigned short>(x)) * ptx::f16_to_float(static_cast<unsigned short>(y)) +
           ptx::f16_to_float(static_cast<unsigned short>(x >> 16)) *
               ptx::f16_to_float(static_cast<unsigned short>(y >> 16));
  }

  // out, dout: of the row; null: there is no row.
  __device__ __forceinline__ static float dot(const char* out, const char* dout) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < (kChunks + 7) / 8; ++i) {
      const int chunk = static_cast<int>(threadIdx.x) % 8 + 8 * i;
      if (out == nullptr || chunk >= kChunks) continue;
      const uint4 x = *reinterpret_cast<const uint4*>(out + 16 * chunk);
      const uint4 y = *reinterpret_cast<const uint4*>(dout + 16 * chunk);
      sum += product(x.x, y.x) + product(x.y, y.y) + (product(x.z, y.z) + product(x.w, y.w));
    }
    return sum_of_lanes<8>(sum);
  }
};

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::kThreads)
    attune_backward_row_stats(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const long long semaphores = static_cast<long long>(p.num_heads_q) * p.dq_tiles;
  for (long long i = blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x; i < semaphores;
       i += static_cast<long long>(gridDim.x) * kThreads)
    p.dq_semaphores[i] = 0;
  const GridBlock block(p.num_heads_q);
  if (block.index >= p.q_list->num_tiles) return;
  const BackwardTile tile = tiles_of(p.q_list)[block.index];
  const SequenceInfo s = read_sequence(p, tile.batch);
  const RowsOf rows{p, s, tile.batch, block.head};
  const int end = min(tile.begin + kBackwardRows, s.num_q);
  float sink_gradient = 0;
  if (p.stats_vectors) {
    for (int first = tile.begin; first < end; first += kThreads / 8) {
      const int row = first + static_cast<int>(threadIdx.x) / 8;
      const bool has_row = row < end;
      const float product = EightLanes::dot(has_row ? p.out + 2 * rows.out(row) : nullptr,
                                            has_row ? p.dout.data + 2 * rows.dout(row) : nullptr);
      if (has_row && threadIdx.x % 8 == 0) sink_gradient += rows.store(row, product);
    }
  } else {
    for (int row = tile.begin + static_cast<int>(threadIdx.x) / 32; row < end; row += kThreads / 32) {
      const float product = dot(rows, row);
      if (threadIdx.x % 32 == 0) sink_gradient += rows.store(row, product);
    }
  }
  if (kWithSinks && p.sink_sums != nullptr) {
    const float sum = sum_of_block<kThreads>(sink_gradient);
    if (threadIdx.x == 0) p.sink_sums[block_sum_at(p, s, tile.batch, block.head, tile.begin)] = sum;
  }
}
