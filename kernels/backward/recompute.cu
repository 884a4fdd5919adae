// SPDX-License-Identifier: Apache-2.0
// Recomputes rows of dq, dk and dv that the gradient kernel left with a NaN or infinity, because a masked pair adds 0 *
// NaN there. Here only visible pairs are read, one after the other, in fp32, so a NaN that remains is correct. In a
// block with such rows each warp takes one row at a time. Grid: blocks of rows times heads, of queries or of keys.
#include "backward/masks.cuh"
#include "backward/scores.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace attune::backward {

constexpr bool kOfKeys = ATTUNE_OF_KEYS != 0;
constexpr int kThreads = 256, kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
// Two blocks leave 128 registers for each thread, too few for rows of 256 channels.
constexpr int kBlocksPerSm = kHeadDimQk > 192 || kHeadDimV > 192 ? 1 : 2;

// A row over the lanes of a warp: channel lane + 32 i.
template <int kChannels>
struct LaneRow {
  static constexpr int kCount = (kChannels + 31) / 32;
  float x[kCount];

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (float& each : x) each = 0;
  }
  // Channels that do not exist are 0.
  __device__ __forceinline__ void load(int dtype, const char* data, long long first, long long stride) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int channel = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      x[i] = channel < kChannels ? common::load_element(dtype, data, first + channel * stride) : 0.0f;
    }
  }
  __device__ __forceinline__ void store(const GradientRows& to, long long first, float factor) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int channel = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      if (channel < kChannels) common::store_element(to.dtype, to.data, first + channel * to.dim_stride, factor * x[i]);
    }
  }
  __device__ __forceinline__ float dot(const LaneRow& y) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], y.x[i], sum);
    return sum_of_lanes(sum);
  }
  __device__ __forceinline__ void add(float factor, const LaneRow& y) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fmaf(factor, y.x[i], x[i]);
  }
  __device__ __forceinline__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) all &= fabsf(x[i]) < ptx::infinity();
    return !__any_sync(0xffffffffu, !all);
  }
};
using RowQk = LaneRow<kHeadDimQk>;
using RowVdo = LaneRow<kHeadDimV>;

struct Pair {
  int row, key, head;
};

// Rows of one sequence.
struct Rows {
  const BackwardParams& p;
  const SequenceInfo& s;
  int b;

  __device__ __forceinline__ RowQk q(int row, int head) const {
    RowQk x;
    x.load(ATTUNE_TYPE, p.q,
           q_offset(p, s, b, p.q_batch_stride, p.q_row_stride) + row * p.q_row_stride + head * p.q_head_stride,
           p.q_dim_stride);
    return x;
  }
  __device__ __forceinline__ RowVdo dout(int row, int head) const {
    RowVdo y;
    y.load(p.dout.dtype, p.dout.data, query_offset(p, s, b, p.dout, row, head), p.dout.dim_stride);
    return y;
  }
  template <class Row>
  __device__ __forceinline__ Row dense(const NewRows& of, int key, int head) const {
    Row x;
    x.load(ATTUNE_TYPE, of.data, key_offset(s, b, of, key, head), of.dim_stride);
    return x;
  }

  // P and dS of a pair. Returns false if the pair adds nothing.
  __device__ __forceinline__ bool softmax(const RowQk& q, const RowQk& k, const RowVdo& dout, const RowVdo& v,
                                          const RowStats& stats, const Pair& pair, float& probability,
                                          float& ds) const {
    Score score = Scores(p).of(q.dot(k));
    add_alibi(score, slope_of(p, b, pair.head), static_cast<float>(s.num_keys - s.num_q + pair.row - pair.key));
    add_tables(score, p, s, pair.head, pair.row, pair.key);
    if (stats.lse2 == ptx::infinity() || score.value == -ptx::infinity()) return false;
    const float a = weight_of(score.value, stats.lse2), share = share_of(stats);
    probability = a * share;
    ds = a * score.slope * (share * dout.dot(v) - stats.delta);
    return true;
  }
};

// Whether a row is finite as it was stored, or is not wanted.
template <class Row>
__device__ __forceinline__ bool is_finite(const GradientRows& to, long long first) {
  if (to.data == nullptr) return true;
  Row x;
  x.load(to.dtype, to.data, first, to.dim_stride);
  return x.finite();
}

__device__ __forceinline__ void recompute_query(const Rows& rows, int row, int head) {
  const BackwardParams& p = rows.p;
  const long long at = query_offset(p, rows.s, rows.b, p.dq, row, head);
  if (is_finite<RowQk>(p.dq, at)) return;
  const RowQk q = rows.q(row, head);
  const RowVdo dout = rows.dout(row, head);
  const RowStats stats = stats_of(p, rows.s, rows.b, head)[row];
  const Span keys = kRanges ? Span{0, rows.s.num_keys} : keys_of_query(p, rows.s, row);
  RowQk dq;
  dq.zero();
  for (int key = keys.begin; key < keys.end; ++key) {
    if (kKeyMasks && !sees(p, rows.s, rows.b, row, head, key)) continue;
    const RowQk k = rows.dense<RowQk>(p.new_k, key, head / p.group);
    float probability, ds;
    const RowVdo v = rows.dense<RowVdo>(p.new_v, key, head / p.group);
    if (rows.softmax(q, k, dout, v, stats, {row, key, head}, probability, ds)) dq.add(ds, k);
  }
  dq.store(p.dq, at, p.scale);
}

__device__ __forceinline__ void recompute_key(const Rows& rows, int key, int kv_head) {
  const BackwardParams& p = rows.p;
  const long long at_k = key_offset(rows.s, rows.b, p.dk, key, kv_head),
                  at_v = key_offset(rows.s, rows.b, p.dv, key, kv_head);
  const bool fine_k = is_finite<RowQk>(p.dk, at_k), fine_v = is_finite<RowVdo>(p.dv, at_v);
  if (fine_k && fine_v) return;
  const RowQk k = rows.dense<RowQk>(p.new_k, key, kv_head);
  const RowVdo v = rows.dense<RowVdo>(p.new_v, key, kv_head);
  const Span queries = kRanges && key < rows.s.num_keys ? Span{0, rows.s.num_q} : queries_of_key(p, rows.s, key);
  RowQk dk;
  RowVdo dv;
  dk.zero(), dv.zero();
  for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
    const RowStats* const stats = stats_of(p, rows.s, rows.b, head);
    for (int row = queries.begin; row < queries.end; ++row) {
      if (kKeyMasks && !sees(p, rows.s, rows.b, row, head, key)) continue;
      const RowQk q = rows.q(row, head);
      const RowVdo dout = rows.dout(row, head);
      float probability, ds;
      if (!rows.softmax(q, k, dout, v, stats[row], {row, key, head}, probability, ds)) continue;
      dk.add(ds, q);
      dv.add(probability, dout);
    }
  }
  if (!fine_k) dk.store(p.dk, at_k, p.scale);
  if (!fine_v) dv.store(p.dv, at_v, 1.0f);
}

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::kThreads, attune::backward::kBlocksPerSm)
    attune_backward_recompute(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const GridBlock block(kOfKeys ? p.num_heads_kv : p.num_heads_q);
  BackwardList* const list = kOfKeys ? p.kv_list : p.q_list;
  const int* const nonfinite = kOfKeys ? p.kv_nonfinite : p.q_nonfinite;
  if (block.index >= list->num_tiles || (nonfinite != nullptr && nonfinite[blockIdx.x] == 0)) return;
  const BackwardTile tile = tiles_of(list)[block.index];
  const SequenceInfo s = read_sequence(p, tile.batch);
  const Rows rows{p, s, tile.batch};
  const int end = min(tile.begin + kBackwardRows, kOfKeys ? key_extent(p, tile.batch) : s.num_q);
  for (int row = tile.begin + static_cast<int>(threadIdx.x) / 32; row < end; row += kThreads / 32) {
    if constexpr (kOfKeys) {
      recompute_key(rows, row, block.head);
    } else {
      recompute_query(rows, row, block.head);
    }
  }
}
