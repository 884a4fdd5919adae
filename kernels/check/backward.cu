// SPDX-License-Identifier: Apache-2.0
// The oracle on the GPU: gradients of attention in float64 by docs/semantics.md, for comparing whole outputs at serving
// sizes. It is not fast.
//
// A block computes one row at a time: dq of a head, dk and dv of a KV head, or entries of a table. First each thread
// writes P and dX of some pairs to the block's scratch; then each thread sums some channels over all pairs.
#include "check/pairs.cuh"

namespace attune::oracle {

// A pair in the scratch: dX, for dq and dk, and P, for dv. P = -1: the pair is masked.
struct Stored {
  Coefficient dx, p;
};
constexpr double kNoPair = -1;
static_assert(sizeof(Stored) == 6 * sizeof(double), "the host counts doubles");

struct Block {
  const BackwardOracleParams& p;
  Stored* pairs;
  Sums* sums;  // [threads], in the same memory
};

__device__ inline Query query_of(const Sequence& s, long long row, long long head) {
  const long long index = row - s.queries.first;
  return {s.b, row, index, s.num_keys() - s.queries.count + index, head};
}

__device__ inline void put(Stored& to, const Pair& pair) {
  to.dx = pair.dx;
  to.p = pair.p;
  if (!pair.counts) to.p.value = kNoPair;
}

// The keys of the sequence's extent, in use or not.
__device__ inline Extent keys_there(const OracleParams& f, long long b) {
  return extent_of(f.k, f.cu_seqlens_kv, false, b);
}

__device__ inline long long sequence_of_key(const BackwardOracleParams& p, long long row) {
  for (long long b = 0; b < p.forward.batch; ++b) {
    const Extent keys = keys_there(p.forward, b);
    if (keys.first <= row && row < keys.first + keys.count) return b;
  }
  return -1;
}

// Row `row` of dq for one head.
__device__ inline void make_dq(const Block& block, long long row, long long head) {
  const BackwardOracleParams& p = block.p;
  const OracleParams& f = p.forward;
  const long long b = sequence_of(f, row);
  if (threadIdx.x == 0 && head == 0) p.q_written[row] = b >= 0 ? 1 : 0;
  const Gradient& dq = p.gradients[0];
  if (b < 0 || dq.value == nullptr) return;
  const Sequence s = sequence_at(f, b);
  const QueryTerms terms = query_terms(p, row, head);
  const Query query = query_of(s, row, head);
  for (long long j = threadIdx.x; j < s.dense.count; j += blockDim.x)
    put(block.pairs[j], pair_of(p, terms, query, s.dense.first + j, j));
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < f.head_dim_qk; d += static_cast<int>(blockDim.x)) {
    Sums sums = {0, 0, 0, 0, 0};
    for (long long j = 0; j < s.dense.count; ++j) {
      if (block.pairs[j].p.value == kNoPair) continue;
      add(sums, block.pairs[j].dx, channel(dense_row(f.k, s.dense.first + j, head / (f.heads_q / f.heads_kv)), d));
    }
    store(dq, (row * f.heads_q + head) * f.head_dim_qk + d, sums);
  }
}

// Row `row` of dk and dv for one KV head. Pairs are numbered one head after the other.
__device__ inline void make_dk_dv(const Block& block, long long row, long long kv_head) {
  const BackwardOracleParams& p = block.p;
  const OracleParams& f = p.forward;
  const long long b = sequence_of_key(p, row), group = f.heads_q / f.heads_kv;
  if (threadIdx.x == 0 && kv_head == 0) p.kv_written[row] = b >= 0 ? 1 : 0;
  const Gradient &dk = p.gradients[1], &dv = p.gradients[2];
  if (b < 0 || (dk.value == nullptr && dv.value == nullptr)) return;
  const Sequence s = sequence_at(f, b);
  const long long key = row - s.dense.first, count = key < s.dense.count ? s.queries.count * group : 0;
  for (long long i = threadIdx.x; i < count; i += blockDim.x) {
    const long long q_row = s.queries.first + i % s.queries.count, head = kv_head * group + i / s.queries.count;
    put(block.pairs[i], pair_of(p, query_terms(p, q_row, head), query_of(s, q_row, head), row, key));
  }
  __syncthreads();
  const auto sum = [&](const Gradient& to, const Tensor& of, int dim, bool of_p) {
    if (to.value == nullptr) return;
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += static_cast<int>(blockDim.x)) {
      Sums sums = {0, 0, 0, 0, 0};
      for (long long i = 0; i < count; ++i) {
        const Stored& pair = block.pairs[i];
        if (pair.p.value == kNoPair) continue;
        const Row x = dense_row(of, s.queries.first + i % s.queries.count, kv_head * group + i / s.queries.count);
        add(sums, of_p ? pair.p : pair.dx, channel(x, d));
      }
      store(to, (row * f.heads_kv + kv_head) * dim + d, sums);
    }
  };
  sum(dk, f.q, f.head_dim_qk, false);
  sum(dv, p.dout, f.head_dim_v, true);
}

// Adds the sums of all threads and stores element `at`.
__device__ inline void store_block_sum(const Block& block, const Gradient& to, long long at, const Sums& mine) {
  block.sums[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Sums all = {0, 0, 0, 0, 0};
  for (unsigned t = 0; t < blockDim.x; ++t) {
    const Sums& of = block.sums[t];
    all.value += of.value, all.terms += of.terms, all.parts += of.parts, all.scores += of.scores;
  }
  store(to, at, all);
}

__device__ inline void make_dsinks(const Block& block, long long head) {
  const BackwardOracleParams& p = block.p;
  Sums sums = {0, 0, 0, 0, 0};
  for (long long row = threadIdx.x; row < p.forward.rows; row += blockDim.x) {
    if (sequence_of(p.forward, row) < 0) continue;
    const QueryTerms q = query_terms(p, row, head);
    if (!q.sees) continue;
    const double gap = number_at(p.forward.sinks, head) - q.lse, of_sink = 1 / (1 + exp(-gap));
    add(sums, {-of_sink * q.delta.sum, of_sink * q.delta.abs,
               of_sink * fabs(q.delta.sum * (is_finite(gap) ? gap : 0.0))});
  }
  store_block_sum(block, p.gradients[3], head, sums);
}

// Each thread computes one entry of the table: the sum of dZ over the sequences and the heads that share it.
__device__ inline void make_dbias(const Block& block, long long entry) {
  const BackwardOracleParams& p = block.p;
  const OracleParams& f = p.forward;
  const long long columns = f.bias.shape[2], positions = f.bias.shape[1];
  if (entry >= f.bias.shape[0] * positions * columns) return;
  const long long key = entry % columns, position = entry / columns % positions, of_head = entry / columns / positions;
  const bool shared = f.bias.shape[0] == 1;
  Sums sums = {0, 0, 0, 0, 0};
  for (long long b = 0; b < f.batch; ++b) {
    const Sequence s = sequence_at(f, b);
    const long long index = position - (s.num_keys() - s.queries.count), row = s.queries.first + index;
    if (index < 0 || index >= s.queries.count || key >= s.dense.count) continue;
    for (long long head = shared ? 0 : of_head; head < (shared ? f.heads_q : of_head + 1); ++head) {
      const Pair pair = pair_of(p, query_terms(p, row, head), query_of(s, row, head), s.dense.first + key, key);
      if (pair.counts) add(sums, pair.dz);
    }
  }
  store(p.gradients[4], entry, sums);
}

__device__ inline void make_dt5(const Block& block, long long entry) {
  const BackwardOracleParams& p = block.p;
  const OracleParams& f = p.forward;
  const long long buckets = f.t5_bias.shape[1], head = entry / buckets;
  Sums sums = {0, 0, 0, 0, 0};
  for (long long row = threadIdx.x; row < f.rows; row += blockDim.x) {
    const long long b = sequence_of(f, row);
    if (b < 0) continue;
    const Sequence s = sequence_at(f, b);
    const Query query = query_of(s, row, head);
    const QueryTerms terms = query_terms(p, row, head);
    for (long long j = 0; terms.sees && j < s.dense.count; ++j) {
      const long long distance = j - query.position;
      if (t5_bucket(distance, buckets, f.t5_max_distance, f.t5_bidirectional != 0) != entry % buckets) continue;
      const Pair pair = pair_of(p, terms, query, s.dense.first + j, j);
      if (pair.counts) add(sums, pair.dz);
    }
  }
  store_block_sum(block, p.gradients[5], entry, sums);
}

}  // namespace attune::oracle

extern "C" __global__ void __launch_bounds__(1024)
    attune_backward_oracle(const attune::oracle::BackwardOracleParams* params) {
  using namespace attune::oracle;
  const BackwardOracleParams& p = *params;
  const OracleParams& f = p.forward;
  double* const scratch = p.scratch + blockIdx.x * p.scratch_size;
  const Block block = {p, reinterpret_cast<Stored*>(scratch), reinterpret_cast<Sums*>(scratch)};
  const auto asked = [&](int gradient, long long count) { return p.gradients[gradient].value != nullptr ? count : 0; };
  const long long entries = asked(4, f.bias.shape[0] * f.bias.shape[1] * f.bias.shape[2]);
  const long long of_q = f.rows * f.heads_q, of_kv = p.rows_kv * f.heads_kv, of_sinks = asked(3, f.heads_q),
                  of_bias = (entries + blockDim.x - 1) / blockDim.x, of_t5 = asked(5, f.heads_q * f.t5_bias.shape[1]);
  for (long long output = blockIdx.x; output < of_q + of_kv + of_sinks + of_bias + of_t5; output += gridDim.x) {
    __syncthreads();  // all threads have summed the previous row
    long long i = output;
    if (i < of_q) {
      make_dq(block, i / f.heads_q, i % f.heads_q);
    } else if ((i -= of_q) < of_kv) {
      make_dk_dv(block, i / f.heads_kv, i % f.heads_kv);
    } else if ((i -= of_kv) < of_sinks) {
      make_dsinks(block, i);
    } else if ((i -= of_sinks) < of_bias) {
      make_dbias(block, i * blockDim.x + threadIdx.x);
    } else {
      make_dt5(block, i - of_bias);
    }
  }
}
