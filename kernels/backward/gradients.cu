// SPDX-License-Identifier: Apache-2.0
// The gradients of attention over dense keys, in two passes of one kernel: dq by blocks of queries that walk over keys,
// dk and dv by blocks of keys that walk over queries (and the query heads of their KV head). Seven products for the
// five that are needed, but no sum crosses a block: the bits are the same in every run, whatever the batch is.
//
// Warpgroup 0 is the producer (producer.cuh), warpgroups 1 and 2 have 64 own rows each (mainloop.cuh):
//
//   producer: own rows, tile 0, tile 1, ..
//   group 1:       S0 dP0 |softmax| dx0 S1 dP1 |softmax   | dx1 S2 dP2 ..
//   group 2:              S0 dP0   |softmax   | dx0 S1 dP1 |softmax    ..
//
// Barriers: the own rows and each stage have a full barrier (one arrival and the bytes of the copies), a stage also an
// empty one (one lane of each math warp arrives). A NaN or infinity that an own row does not see can reach its gradient
// as 0 * NaN: recompute.cu looks at the rows of blocks that have one.
#include "backward/mainloop.cuh"
#include "backward/producer.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::backward {

constexpr int kMathBarrier = 1;  // a named barrier

__device__ __forceinline__ void init_barriers(const Smem& smem) {
  if (threadIdx.x == 0) {
    ptx::init_barrier(smem.own_full(), 1);
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::init_barrier(smem.full(i), 1);
      ptx::init_barrier(smem.empty(i), Config::kMathWarps);
    }
    ptx::publish_barriers();
  }
  __syncthreads();
}

// Stores this thread's elements of its two own rows.
template <int kChannels, int kHalf>
__device__ __forceinline__ void store(const BackwardParams& p, const Work& w, const GradientRows& to,
                                      const float (&x)[kHalf], float factor) {
  if (to.data == nullptr) return;
  const int thread = static_cast<int>(threadIdx.x) - 128, row = w.begin + thread / 32 * 16 + thread % 32 / 4;
  const bool pairs = to.dtype != common::kFloat32 && to.dim_stride == 1 && kChannels % 2 == 0 &&
                     (to.row_stride | to.head_stride | to.batch_stride) % 2 == 0 &&
                     reinterpret_cast<unsigned long long>(to.data) % 4 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= w.end) continue;
    const long long first = Config::kOfKeys ? key_offset(w.s, w.batch, to, row + 8 * h, w.head)
                                            : query_offset(p, w.s, w.batch, to, row + 8 * h, w.head);
#pragma unroll
    for (int j = 2 * h; j < kHalf; j += 4) {
      const int channel = j / 4 * 8 + thread % 4 * 2;
      if (channel >= kChannels) continue;
      if (pairs) {
        const unsigned both = to.dtype == common::kBFloat16 ? ptx::pack_bf16(factor * x[j], factor * x[j + 1])
                                                            : ptx::pack_f16(factor * x[j], factor * x[j + 1]);
        *reinterpret_cast<unsigned*>(to.data + 2 * (first + channel)) = both;
        continue;
      }
      common::store_element(to.dtype, to.data, first + channel * to.dim_stride, factor * x[j]);
      if (channel + 1 < kChannels)
        common::store_element(to.dtype, to.data, first + (channel + 1) * to.dim_stride, factor * x[j + 1]);
    }
  }
}

// Whether an accumulator of this thread is a NaN or infinity.
template <int kCount>
__device__ __forceinline__ bool any_nonfinite(const float (&x)[kCount]) {
  float sum = 0;  // of zeros, or NaN
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], 0.0f, sum);
  return sum != 0.0f;
}

__device__ __forceinline__ void run_math(const BackwardParams& p, const Smem& smem, const Work& work) {
  Accumulators a;
#pragma unroll
  for (float& x : a.x) x = 0;
#pragma unroll
  for (float& x : a.y) x = 0;
  if (work.tiles > 0) Mainloop(p, smem, work).run(a);
  const bool nonfinite = any_nonfinite(a.x) || (Config::kOfKeys && any_nonfinite(a.y));
  const bool any = ptx::named_barrier_any(kMathBarrier, 32 * Config::kMathWarps, nonfinite);
  if (threadIdx.x == 128) p.nonfinite[blockIdx.x] = any ? 1 : 0;
  if constexpr (Config::kOfKeys) {
    store<Config::kHeadDimQk>(p, work, p.dk, a.x, p.scale);
    store<Config::kHeadDimV>(p, work, p.dv, a.y, 1.0f);
  } else {
    store<Config::kHeadDimQk>(p, work, p.dq, a.x, p.scale);
  }
}

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::Config::kThreads, 1)
    attune_backward_gradients(const __grid_constant__ attune::kernels::BackwardParams p,
                              const __grid_constant__ attune::ptx::TensorMap own_x,
                              const __grid_constant__ attune::ptx::TensorMap own_y,
                              const __grid_constant__ attune::ptx::TensorMap tile_x,
                              const __grid_constant__ attune::ptx::TensorMap tile_y) {
  using namespace attune;
  using namespace attune::backward;
  const Smem smem(ptx::dynamic_shared());
  init_barriers(smem);
  ptx::wait_for_previous_kernels();
  const GridBlock block(Config::kOfKeys ? p.num_heads_kv : p.num_heads_q);
  BackwardList* const list = Config::kOfKeys ? p.kv_list : p.q_list;
  if (block.index >= list->num_tiles) return;
  const Work work = work_of(p, tiles_of(list)[block.index], block.head);
  if (threadIdx.x < 128) {
    ptx::give_up_registers<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      const Maps maps{own_x, own_y, tile_x, tile_y};
      Producer(p, maps, smem, work).run();
    }
  } else {
    ptx::take_registers<Config::kMathRegisters>();
    run_math(p, smem, work);
  }
}
