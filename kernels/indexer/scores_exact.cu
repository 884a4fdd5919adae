// SPDX-License-Identifier: Apache-2.0
// Scores of the indexer if queries or keys are fp32, or if one is fp16 and the other bf16: fp32 arithmetic, any layout,
// element by element. Grid: persistent over the tiles of rows and keys; each thread has one key.
//
//   for 8 heads at a time: dot[8] += k[c..c + 32) * q[8][c..c + 32) over all channels; sum += w * max(dot, 0)
#include "common/element.cuh"
#include "indexer/rows.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace attune::indexer {

using kernels::IndexScoresParams;

constexpr int kThreads = 128, kKeys = kThreads, kHeadsAtOnce = 8, kChannelsAtOnce = 32;

struct SharedStorage {
  float keys[kChannelsAtOnce][kKeys + 1];
  float queries[kHeadsAtOnce][kChannelsAtOnce];
  float weights[kHeadsAtOnce];
  Slot slots[kKeys];
};

__device__ __forceinline__ float query_element(const IndexScoresParams& p, long long row, int head, int channel) {
  return common::load_element(
      p.q.dtype, row_of(p.rows, p.q, row) + head * p.q.head_stride + channel * p.q.channel_stride, 0);
}
__device__ __forceinline__ float key_element(const IndexScoresParams& p, const Slot& s, int channel) {
  const kernels::KvPlane& k = p.rows.cache.k;
  const int pack = divide(channel, p.pack);
  return common::load_element(k.dtype, k.data + s.page * k.page_stride + s.offset * k.slot_stride,
                              pack * k.outer_stride + (channel - pack * k.pack) * k.inner_stride);
}

// The score of a row and this thread's key.
__device__ __forceinline__ float score_of(const IndexScoresParams& p, long long row, SharedStorage& shared) {
  float sum = 0;
  for (int head = 0; head < p.heads; head += kHeadsAtOnce) {
    const int heads = min(kHeadsAtOnce, p.heads - head);
    float dot[kHeadsAtOnce] = {};
    for (int channel = 0; channel < p.head_dim; channel += kChannelsAtOnce) {
      const int channels = min(kChannelsAtOnce, p.head_dim - channel);
      __syncthreads();
      for (int i = threadIdx.x; i < kKeys * kChannelsAtOnce; i += kThreads) {
        const int key = i / kChannelsAtOnce, c = i % kChannelsAtOnce;
        const bool exists = c < channels && shared.slots[key].page >= 0;
        shared.keys[c][key] = exists ? key_element(p, shared.slots[key], channel + c) : 0.0f;
      }
      for (int i = threadIdx.x; i < kHeadsAtOnce * kChannelsAtOnce; i += kThreads) {
        const int h = i / kChannelsAtOnce, c = i % kChannelsAtOnce;
        shared.queries[h][c] = h < heads && c < channels ? query_element(p, row, head + h, channel + c) : 0.0f;
      }
      if (threadIdx.x < heads) {
        const int h = head + static_cast<int>(threadIdx.x);
        float w = common::load_element(p.weights.dtype, row_of(p.rows, p.weights, row) + h * p.weights.head_stride, 0);
        if (p.q_scale.data != nullptr)
          w *= *reinterpret_cast<const float*>(row_of(p.rows, p.q_scale, row) + h * p.q_scale.head_stride);
        shared.weights[threadIdx.x] = w;
      }
      __syncthreads();
      for (int c = 0; c < channels; ++c) {
        const float k = shared.keys[c][threadIdx.x];
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h) dot[h] = fmaf(shared.queries[h][c], k, dot[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (h < heads) sum = fmaf(shared.weights[h], ptx::max_or_nan(dot[h], 0.0f), sum);
    }
  }
  return sum;
}

// Scores a row of the launch against the keys from `first` on.
__device__ __forceinline__ void run_block(const IndexScoresParams& p, long long row, int first, SharedStorage& shared) {
  const Owner owner = owner_of(p.rows, row);
  if (owner.sequence < 0) return;
  const int s = num_keys(p.rows, owner.sequence), key = first + static_cast<int>(threadIdx.x);
  const KeyRange range = visible(p.rows, row, owner.i, owner.n, s);
  const bool scored =
      max(range.begin, first) < min(range.end, first + kKeys) && range.end - range.begin > p.most_kept;
  float score = 0;
  Slot slot{-2, 0};
  if (scored) {
    if (key < s) slot = find_slot(p.rows, owner.sequence, key);
    __syncthreads();  // all threads have read the previous slots
    shared.slots[threadIdx.x] = slot;
    __syncthreads();
    score = score_of(p, row, shared);
  }
  float* const to =
      reinterpret_cast<float*>(score_row(p.rows, p.scores, row) + key * p.scores.column_stride);
  if (scored && key >= range.begin && key < range.end) {
    const KvScale& scale = p.rows.cache.k_scale;
    if (slot.page >= 0 && scale.mode != ScaleMode::kNone) score *= *scale.at(slot.page, slot.offset, 0);
    *to = slot.page < 0 ? -ptx::infinity() : score;
  } else if (p.clear && key < p.num_columns && !(key >= range.begin && key < range.end)) {
    *to = -ptx::infinity();
  }
}

}  // namespace attune::indexer

extern "C" __global__ void __launch_bounds__(attune::indexer::kThreads, 6)
    attune_index_scores_exact(const __grid_constant__ attune::kernels::IndexScoresParams p) {
  using namespace attune;
  using namespace attune::indexer;
  __shared__ SharedStorage shared;
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  for (long long tile_idx = blockIdx.x; tile_idx < p.num_tiles; tile_idx += gridDim.x) {
    const long long i = divide(tile_idx, p.by_key_blocks);
    run_block(p, p.rows.first + i, static_cast<int>(tile_idx - i * p.key_blocks) * kKeys, shared);
  }
}
