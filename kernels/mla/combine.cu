// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks as everywhere
//
// A group of 128 threads has half of the channels of two rows at a time, as parts hold them (parts.cuh). Where there are
// few rows, two or four groups share them: each has every second or fourth part. A lane knows the weight of one part in
// 32, so that outputs of many parts are asked for at a time, with what their weights are computed from.
#include "mla/parts.cuh"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kRows = kernels::kMlaRowsOfBlock, kAtATime = 16;
constexpr int kGroups = kernels::kMlaMergeThreads / 128;

// Two rows, eight apart, of a block of rows; of each the channels of half `half`.
struct Pair {
  int head_tile, row, half;
};

// kSharing: groups that share the pair of rows.
template <int kSharing>
class Merge {
 public:
  __device__ __forceinline__ Merge(const kernels::PrefillParams& p, const kernels::Task& t, const Pair& pair)
      : p_(p), t_(t), pair_(pair) {}

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int first = 0; first < t_.num_parts; first += 32) {
      const int count = min(t_.num_parts - first, 32);
      float4 x[kAtATime];
      float weight[2] = {-ptx::infinity(), -ptx::infinity()}, part_sum[2] = {0, 0};
      if (lane < count) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const long long at = unit(first + lane) * kRows + pair_.row + 8 * h;
          const float2 stats = ptx::load_from_l2(reinterpret_cast<const float2*>(p_.partial_stats + 2 * at));
          weight[h] = stats.x, part_sum[h] = stats.y;
        }
      }
      load(first, group(), count, x);
      weigh(weight, part_sum);
      int i = group();
#pragma unroll 1
      while (true) {
#pragma unroll
        for (int j = 0; j < kAtATime; ++j) {
          const int part = i + j * kSharing;
          const float upper = __shfl_sync(0xffffffffu, weight[0], part), lower = __shfl_sync(0xffffffffu, weight[1], part);
          if (part < count) {
            o_.x = fmaf(x[j].x, upper, o_.x), o_.y = fmaf(x[j].y, upper, o_.y);
            o_.z = fmaf(x[j].z, lower, o_.z), o_.w = fmaf(x[j].w, lower, o_.w);
          }
        }
        i += kSharing * kAtATime;
        if (i >= count) break;
        load(first, i, count, x);
      }
    }
    if (!add_groups()) return;
#pragma unroll 1
    for (int h = 0; h < 2; ++h) finish(h);
  }

 private:
  __device__ __forceinline__ static int group() { return static_cast<int>(threadIdx.x) / 128 % kSharing; }
  __device__ __forceinline__ int channel() const {
    return pair_.half * kChannelsOfHalf + static_cast<int>(threadIdx.x) % 128 * 2;
  }
  __device__ __forceinline__ long long unit(int part) const {
    return static_cast<long long>(t_.first_part + part) * p_.num_head_tiles + pair_.head_tile;
  }

  // Of parts first + i, and every kSharing-th from there, the outputs.
  __device__ __forceinline__ void load(int first, int i, int count, float4 (&x)[kAtATime]) const {
    const float* from = p_.partial_out + part_channel(unit(first + i), pair_.row, channel());
    const long long step = static_cast<long long>(kSharing) * p_.num_head_tiles * (kRows * kernels::kMlaHeadDimV);
#pragma unroll
    for (int j = 0; j < kAtATime; ++j) {
      x[j] = make_float4(0, 0, 0, 0);
      if (i + j * kSharing < count) x[j] = ptx::load_from_l2(reinterpret_cast<const float4*>(from + j * step));
    }
  }

  // weight: of the lane's part, the maximum, then what it counts. What came before counts less where that is beneath.
  __device__ __forceinline__ void weigh(float (&weight)[2], const float (&part_sum)[2]) {
    float lowered[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = weight[h];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
      top = fmaxf(top, max_[h]);
      const float reference = top == -ptx::infinity() ? 0.0f : top;
      lowered[h] = ptx::exp2_approx(max_[h] - reference);
      weight[h] = ptx::exp2_approx(weight[h] - reference);
      float sum = weight[h] * part_sum[h];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      max_[h] = top;
      sum_[h] = fmaf(sum_[h], lowered[h], sum);
    }
    o_.x *= lowered[0], o_.y *= lowered[0], o_.z *= lowered[1], o_.w *= lowered[1];
  }

  // The first group gets the others' sums, and goes on.
  __device__ __forceinline__ bool add_groups() {
    if constexpr (kSharing > 1) {
      __shared__ float4 out[kGroups][128];
      const int own = static_cast<int>(threadIdx.x) / 128, thread = static_cast<int>(threadIdx.x) % 128;
      if (group() != 0) out[own][thread] = o_;
      ptx::sync_some(1 + own / kSharing, 128 * kSharing);
      if (group() == 0) {
#pragma unroll
        for (int i = 1; i < kSharing; ++i) {
          const float4 x = out[own + i][thread];
          o_.x += x.x, o_.y += x.y, o_.z += x.z, o_.w += x.w;
        }
      }
      ptx::sync_some(1 + own / kSharing, 128 * kSharing);  // before the next pair's are written
    }
    return group() == 0;
  }

  // Row h of the pair.
  __device__ __forceinline__ void finish(int h) const {
    constexpr bool kHalves = ATTUNE_OUT_TYPE == tile::kBFloat16 || ATTUNE_OUT_TYPE == tile::kFloat16;
    const int row = pair_.row + 8 * h, local = row / p_.heads_of_tile;
    if (local >= t_.num_tokens) return;
    const int token = t_.token_begin + local;
    const int head = pair_.head_tile * p_.heads_of_tile + row - local * p_.heads_of_tile;
    const float factor = tile::finish_row(p_, t_.batch, t_.q_begin, token, head, h == 0 ? max_[0] : max_[1],
                                          h == 0 ? sum_[0] : sum_[1], channel() == 0);
    const float x = (h == 0 ? o_.x : o_.z) * factor, y = (h == 0 ? o_.y : o_.w) * factor;
    const long long to = tile::row_offset(p_, t_.batch, t_.q_begin, token, head, p_.out_batch_stride, p_.out_row_stride,
                                          p_.out_head_stride);
    if (kHalves && p_.store_vectors) {
      *reinterpret_cast<unsigned*>(p_.out + (to + channel()) * 2) =
          ATTUNE_OUT_TYPE == tile::kBFloat16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
      return;
    }
    tile::store_element(ATTUNE_OUT_TYPE, p_.out, to + channel() * p_.out_dim_stride, x);
    tile::store_element(ATTUNE_OUT_TYPE, p_.out, to + (channel() + 1) * p_.out_dim_stride, y);
  }

  const kernels::PrefillParams& p_;
  const kernels::Task& t_;
  const Pair pair_;
  float max_[2] = {-ptx::infinity(), -ptx::infinity()}, sum_[2] = {0, 0};
  float4 o_ = {0, 0, 0, 0};
};

// All pairs, of which each block of rows has so many, halves apart.
template <int kSharing>
__device__ __forceinline__ void merge_pairs(const kernels::PrefillParams& p, int pairs, int all) {
  constexpr int kPairs = kGroups / kSharing;  // at a time
  bool first = true;
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x) * kPairs + static_cast<int>(threadIdx.x) / (128 * kSharing); i < all;
       i += static_cast<int>(gridDim.x) * kPairs) {
    const int block = i / pairs, pair = (i - block * pairs) / 2;
    const kernels::Task task = p.split_tasks[block / p.num_head_tiles];
    if (first) ptx::wait_for_previous_kernels();
    first = false;
    Merge<kSharing>(p, task, {block % p.num_head_tiles, pair / 8 * 16 + pair % 8, i % 2}).run();
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaMergeThreads, 1)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  ptx::allow_next_kernel();
  // The list is that of the schedule, which has ended: the attention began after it, and this kernel after that.
  const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
  const int pairs = (tokens * p.heads_of_tile + 15) / 16 * 16;
  const int all = p.list->num_splits * p.num_head_tiles * pairs, blocks = static_cast<int>(gridDim.x);
  if (all <= blocks) {
    mla::merge_pairs<4>(p, pairs, all);
  } else if (all <= 2 * blocks) {
    mla::merge_pairs<2>(p, pairs, all);
  } else {
    mla::merge_pairs<1>(p, pairs, all);
  }
  ptx::wait_for_previous_kernels();
}
