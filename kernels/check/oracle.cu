// SPDX-License-Identifier: Apache-2.0
// The oracle on the GPU: attention in float64 by docs/semantics.md, for comparing whole outputs at serving sizes. It is
// not fast.
//
// A block takes one (row, head) at a time. First each thread computes the scores of some keys; then each thread
// computes some channels of the output over all keys. The probabilities in between are in the block's scratch.
#include "check/keys.cuh"
#include "check/scores.h"

namespace attune::oracle {

constexpr double kNoP = -1.0;  // marks a key that does not exist, is masked, or has score -inf

// The larger of two numbers. NaN if either is NaN, unless the other is +inf.
__device__ inline double larger(double x, double y) {
  if (x == infinity() || y == infinity()) return infinity();
  return is_nan(x) || x > y ? x : y;
}

// Statistics of the scores of a row; at first of one thread's keys.
struct RowStats {
  double largest, z_abs, z_lost, num_visible;
};

struct OutputRow {
  const OracleParams& p;
  Sequence s;
  Keys keys;
  Query query;
  long long kv_head;
  double* probs;    // [max_keys]: first scores, then probabilities
  double* sums;     // [threads][kNumSums]
  Row* values;      // [max_keys], for keys that exist
};

__device__ inline Key key_of_row(const OutputRow& l, long long j) {
  const Key key = key_at(l.p, l.s, l.keys, l.query.row, l.kv_head, j);
  if (!key.exists || (!is_sparse(l.p) && !is_visible(l.p, l.query, key.position))) return no_key();
  return key;
}

// Channel d of k_lost or v_lost.
__device__ inline double lost_of(const Tensor& lost, const Key& key, long long kv_head, int d) {
  return present(lost) && key.cache == nullptr ? channel(dense_row(lost, key.row, kv_head), d) : 0.0;
}

// A query's channels: in q, the last ones perhaps in q_rope.
struct QueryChannels {
  Row first, last;
  int dim;  // of first
  __device__ explicit QueryChannels(const OutputRow& l)
      : first(dense_row(l.p.q, l.query.row, l.query.head)), last(first), dim(l.p.head_dim_qk) {
    if (!present(l.p.q_rope)) return;
    last = dense_row(l.p.q_rope, l.query.row, l.query.head);
    dim = static_cast<int>(l.p.q.shape[l.p.q.rank - 1]);
  }
  __device__ double operator()(int d) const { return d < dim ? channel(first, d) : channel(last, d - dim); }
};

__device__ inline void make_scores(const OutputRow& l) {
  RowStats stats = {-infinity(), 0, 0, 0};
  const QueryChannels q(l);
  for (long long j = threadIdx.x; j < l.keys.count; j += blockDim.x) {
    l.probs[j] = -infinity();
    const Key key = key_of_row(l, j);
    if (!key.exists) continue;
    l.values[j] = value_row(l.p, key, l.kv_head);
    const Row k = key_row(l.p, key, l.kv_head);
    double product = 0, magnitude = 0, lost = 0;
    for (int d = 0; d < l.p.head_dim_qk; ++d) {
      const double x = q(d) * channel(k, d);
      product += x;
      magnitude += fabs(x);
      if (!present(l.p.q_lost)) continue;
      lost += fabs(q(d)) * lost_of(l.p.k_lost, key, l.kv_head, d) +
              fabs(channel(k, d)) * channel(dense_row(l.p.q_lost, l.query.row, l.query.head), d);
    }
    const double z = score(l.p, l.p.softmax_scale, l.query, key.position, product);
    const double z_abs = fabs(l.p.softmax_scale) * magnitude, z_lost = fabs(l.p.softmax_scale) * lost;
    l.probs[j] = z;
    if (z != -infinity() && z_abs > stats.z_abs) stats.z_abs = z_abs;
    if (z != -infinity() && z_lost > stats.z_lost) stats.z_lost = z_lost;
    stats.largest = larger(stats.largest, z);
    stats.num_visible += 1;
  }
  double* mine = l.sums + threadIdx.x * kNumSums;
  mine[0] = stats.largest;
  mine[1] = stats.z_abs;
  mine[2] = stats.num_visible;
  mine[4] = stats.z_lost;
}

// Merges the statistics of all threads.
__device__ inline RowStats gather(const OutputRow& l) {
  RowStats all = {-infinity(), 0, 0, 0};
  for (unsigned t = 0; t < blockDim.x; ++t) {
    const double* of = l.sums + t * kNumSums;
    all.largest = larger(all.largest, of[0]);
    if (of[1] > all.z_abs) all.z_abs = of[1];
    if (of[4] > all.z_lost) all.z_lost = of[4];
    all.num_visible += of[2];
  }
  return all;
}

// The sum of exp(z - largest).
__device__ inline double row_sum(const OutputRow& l, double largest) {
  double sum = 0;
  for (long long j = threadIdx.x; j < l.keys.count; j += blockDim.x) {
    if (l.probs[j] != -infinity()) sum += exp(l.probs[j] - largest);
  }
  l.sums[threadIdx.x * kNumSums + 3] = sum;
  __syncthreads();
  double all = 0;
  for (unsigned t = 0; t < blockDim.x; ++t) all += l.sums[t * kNumSums + 3];
  return all;
}

// Replaces scores by probabilities; returns the largest. attention: the sum of P over the keys, without the sink.
__device__ inline double make_probs(const OutputRow& l, double largest, double sum, double attention) {
  double largest_p = 0;
  for (long long j = threadIdx.x; j < l.keys.count; j += blockDim.x) {
    const double z = l.probs[j];
    const double p = z == -infinity() ? kNoP : exp(z - largest) / sum * attention;
    if (p > largest_p) largest_p = p;
    l.probs[j] = p;
  }
  __syncthreads();  // all threads have read the sums
  l.sums[threadIdx.x * kNumSums] = largest_p;
  __syncthreads();
  for (unsigned t = 0; t < blockDim.x; ++t) largest_p = larger(largest_p, l.sums[t * kNumSums]);
  return largest_p;
}

__device__ inline void make_channel(const OutputRow& l, int d) {
  const Tensor& lost = present(l.p.v) ? l.p.v_lost : l.p.k_lost;
  double out = 0, pv_abs = 0, pv_lost = 0, v_abs = 0;
  for (long long j = 0; j < l.keys.count; ++j) {
    const double p = l.probs[j];
    if (p == kNoP) continue;
    const double v = channel(l.values[j], d);
    out += p * v;
    pv_abs += p * fabs(v);
    v_abs += fabs(v);
    if (present(lost)) pv_lost += p * lost_of(lost, key_of_row(l, j), l.kv_head, d);
  }
  const long long at = (l.query.row * l.p.heads_q + l.query.head) * l.p.head_dim_v + d;
  l.p.out[at] = out;
  l.p.pv_abs[at] = pv_abs;
  l.p.pv_lost[at] = pv_lost;
  l.p.v_abs[at] = v_abs;
}

__device__ inline void make_row(const OutputRow& l) {
  make_scores(l);
  __syncthreads();
  const RowStats stats = gather(l);
  const double sum = row_sum(l, stats.largest);
  const bool empty = stats.largest == -infinity();
  const double lse = empty ? stats.largest : stats.largest + log(sum);
  const double sink = present(l.p.sinks) ? number_at(l.p.sinks, l.query.head) : -infinity();
  const double attention = empty ? 0.0 : 1.0 / (1.0 + exp(sink - lse));
  const double largest_p = make_probs(l, stats.largest, sum, attention);
  for (int d = static_cast<int>(threadIdx.x); d < l.p.head_dim_v; d += static_cast<int>(blockDim.x)) make_channel(l, d);
  if (threadIdx.x == 0) {
    const long long at = l.query.row * l.p.heads_q + l.query.head;
    l.p.lse[at] = lse;
    l.p.max_logit[at] = stats.largest;
    l.p.z_abs[at] = stats.z_abs;
    l.p.z_lost[at] = stats.z_lost;
    l.p.largest_p[at] = largest_p;
    l.p.num_visible[at] = static_cast<long long>(stats.num_visible);
    l.p.written[at] = 1;
  }
}

}  // namespace attune::oracle

extern "C" __global__ void __launch_bounds__(1024) attune_oracle(const attune::oracle::OracleParams* params) {
  using namespace attune::oracle;
  const OracleParams& p = *params;
  double* scratch = p.scratch + blockIdx.x * (p.max_keys + static_cast<long long>(blockDim.x) * kNumSums);
  for (long long output_row = blockIdx.x; output_row < p.rows * p.heads_q; output_row += gridDim.x) {
    const long long row = output_row / p.heads_q, head = output_row % p.heads_q, b = sequence_of(p, row);
    __syncthreads();  // the scratch of the previous row is free
    if (threadIdx.x == 0) p.written[output_row] = 0;
    if (b < 0) continue;
    const Sequence s = sequence_at(p, b);
    const bool skipped = (present(p.finished) && integer_at(p.finished, b) != 0) ||
                         (p.skip_decode != 0 && s.queries.count == 1);
    if (skipped && p.zero_finished == 0) continue;
    const long long index = row - s.queries.first;
    Keys keys = keys_of(p, s, row);
    if (skipped) keys.count = 0;  // a row that sees nothing
    if (keys.count > p.max_keys) continue;
    make_row({p,
              s,
              keys,
              {b, row, index, s.num_keys() - s.queries.count + index, head},
              head / (p.heads_q / p.heads_kv),
              scratch,
              scratch + p.max_keys,
              p.values + blockIdx.x * p.max_keys});
  }
}
