// SPDX-License-Identifier: Apache-2.0
// MLA attention of at most 16 query heads, one token at a time, over cached rows of 16-bit elements; dense or sparse.
// More heads are several blocks of rows. As mla/mla.cu, but rows of queries are not padded to 64 nor in shared memory,
// which three tiles fill, so that memory is not waited for. Over packed rows: mla/half.cu.
//
// A work tile is a token and the tiles of keys that it may see, 64 each. Two warps have them copied (mla/producers/bulk_copy.cuh),
// eight do the math (mla/m16/mainloop.cuh): each tile's scores are computed by all of them, eight keys each, and its values
// multiplied by all, 64 channels each.
//
// Barriers: "full" and "empty" of each tile's place; "full" of the maxima and the weights of a tile, that all warps
// need of each, in two buffers each: who writes to one has heard from all since they read it.
#include "mla/m16/mainloop.cuh"
#include "mla/producers/bulk_copy.cuh"
#include "mla/m64/epilogue.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

__device__ __forceinline__ void init_barriers(const FewSmem& smem) {
  if (threadIdx.x == 32) {
    smem.check() = {};
    for (int stage = 0; stage < Few::kStages; ++stage) {
      ptx::init_barrier(smem.full(stage), Few::kLoaderWarps);
      ptx::init_barrier(smem.empty(stage), Few::kMathWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::init_barrier(smem.maxima_full(i), Few::kMathWarps);
      ptx::init_barrier(smem.weights_full(i), Few::kMathWarps);
    }
    for (int i = 0; i < kernels::kWorkSlots; ++i) {
      ptx::init_barrier(smem.work_full(i), prefill::TileScheduler<FewSmem>::kWorkVectors);
      ptx::init_barrier(smem.work_empty(i), Few::kWorkReaders);
    }
    ptx::publish_barriers();
  }
  __syncthreads();
}

// The channels of the lane: its first.
__device__ __forceinline__ int few_channel() {
  return few_warp() * Few::kChannelsOfWarp + FewOperands::channel();
}

// A part, against the reference: of rows g and g + 8 a lane has pieces of two channels each (mla/partial_out.cuh).
__device__ __forceinline__ void store_few_part(const PrefillParams& p, const WorkTile& t, int head_tile, FewAttend& a) {
  const int lane = threadIdx.x % 32, row = lane / 4, unit = part_unit(p, t, head_tile);
  float factors[2] = {1, 1};
  if constexpr (kHalfParts) {
    const unsigned bounds = bounds_of_four(a.bounds());
    float* const stats = part_stats(p.partial_stats, unit, row, few_warp() / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned exponent = bounds >> (7 + 16 * h) & 0xff;
      char* const inverses = reinterpret_cast<char*>(stats + 8 * kPartStats * h + 3);
      factors[h] = factor_of(exponent);
      if (lane % 4 == 0) inverses[few_warp() % 4] = static_cast<char>(exponent - kToInverse);
    }
  }
#pragma unroll
  for (int b = 0; b < FewOut::kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = a.o.blocks[b][i][j] * factors[j / 2];
      char* const to = part_channel(p.partial_out, unit, row, few_channel() + 16 * b + 2 * i);
      if constexpr (kHalfParts) {
        *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack_f16(x[0], x[1]), ptx::pack_f16(x[2], x[3]));
      } else {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}
// What lies beside it.
__device__ __forceinline__ void store_few_stats(const PrefillParams& p, const WorkTile& t, int head_tile,
                                                FewAttend& a) {
  const int lane = threadIdx.x % 32;
  float* const stats = part_stats(p.partial_stats, part_unit(p, t, head_tile), lane / 4, few_warp() / 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float lowered = a.finish(h);
    if (few_warp() % 4 != 0 || lane % 4 != 0) continue;
    float* const to = stats + 8 * kPartStats * h;
    *reinterpret_cast<float2*>(to) = make_float2(a.highest[h], a.sum[h]);
    to[2] = lowered;
  }
}

// The lane's two rows.
__device__ __forceinline__ void store_few(const PrefillParams& p, const WorkTile& t, int head_tile, FewAttend& a) {
  constexpr bool kHalves = Config::kOutType == tile::kBFloat16 || Config::kOutType == tile::kFloat16;
  const int lane = threadIdx.x % 32, channel = few_channel();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h, head = head_tile * p.heads_of_tile + row;
    float factor = a.finish(h);
    if (row >= p.heads_of_tile) continue;
    const auto out = [&](int b, int e) { return a.o.blocks[b][e / 2][2 * h + e % 2] * factor; };
    factor *= tile::finish_row(p, t.batch, t.q_begin, t.token_begin, head, a.highest[h], a.sum[h],
                               few_warp() == 0 && lane % 4 == 0);
    const long long at = out_at(p, t, t.token_begin, head);
#pragma unroll
    for (int b = 0; b < FewOut::kBlocks; ++b) {
      if (kHalves && p.store_vectors) {
        const auto two = [&](int e) {
          return Config::kOutType == tile::kBFloat16 ? ptx::pack_bf16(out(b, e), out(b, e + 1))
                                                     : ptx::pack_f16(out(b, e), out(b, e + 1));
        };
        *reinterpret_cast<uint2*>(p.out + (at + channel + 16 * b) * 2) = make_uint2(two(0), two(2));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          tile::store_element(Config::kOutType, p.out, at + (channel + 16 * b + e) * p.out_dim_stride, out(b, e));
        }
      }
    }
  }
}

__device__ __forceinline__ void run_few(const PrefillParams& p, const FewSmem& smem) {
  schedule::check_stamp<Config::kSparse>(p, static_cast<int>(threadIdx.x) - Few::kLoaderThreads,
                                         32 * Few::kMathWarps, smem.check(), [] { meet_few(); });
  FewAttend a(p, smem);
  for (unsigned count = 0;; ++count) {
    const int slot = slot_of_work(count);
    ptx::wait_phase(smem.work_full(slot), count / kernels::kWorkSlots % 2);
    if (smem.head_tile(slot) == prefill::kNoMoreWork) return;
    const WorkTile& work = smem.work(slot);
    a.run(work, smem.head_tile(slot));
    if (work.num_splits > 1) store_few_part(p, work, smem.head_tile(slot), a);  // before sums, which take a while
    a.add_up();
    if (work.num_splits > 1) {
      store_few_stats(p, work, smem.head_tile(slot), a);
    } else {
      store_few(p, work, smem.head_tile(slot), a);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(smem.work_empty(slot));
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::mla::Few::kThreads, 1)
    attune_mla_few(const __grid_constant__ attune::kernels::PrefillParams p,
                   const __grid_constant__ attune::ptx::TensorMap, const __grid_constant__ attune::ptx::TensorMap,
                   const __grid_constant__ attune::ptx::TensorMap) {
  using namespace attune;
  using namespace attune::mla;
  const FewSmem smem(ptx::dynamic_shared());
  const FewLoader::Scheduler::First asked = FewLoader::Scheduler::ask_first(p);  // while the barriers are prepared
  init_barriers(smem);
  if (threadIdx.x < Few::kLoaderThreads) {
    ptx::give_up_registers<Few::kLoaderRegisters>();
    FewLoader(p, smem).run(asked);
  } else {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0 && threadIdx.x == Few::kLoaderThreads) prefill::pass_list_on(p);
    ptx::take_registers<Few::kMathRegisters>();
    run_few(p, smem);
  }
}
