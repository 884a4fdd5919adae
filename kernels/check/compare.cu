// SPDX-License-Identifier: Apache-2.0
// Compares each element of a run's out, lse and max_logits with the oracle's, within the bounds of check/bounds.h, one
// thread for each element. Elements that the operation must not write must still hold the filler.
#include "check/compare_params.h"
#include "check/within.cuh"

namespace attune::oracle {

__device__ inline const char* element_of(const OracleParams& o, const Tensor& t, long long row, long long head,
                                         long long d) {
  return o.q.rank == 4 ? element_at(t, row / o.q.shape[1], row % o.q.shape[1], head, d) : element_at(t, row, head, d);
}

struct Expected {
  double value, bound;
};

// The expected element i of all outputs. what: 0 out, 1 lse, 2 max_logits.
__device__ inline Expected expected_of(const CompareParams& p, int what, long long output_row, long long at) {
  const OracleParams& o = *p.oracle;
  const RowBounds b = bounds_of_row(p.terms, o.z_abs[output_row], o.z_lost[output_row], o.max_logit[output_row],
                                    o.lse[output_row], o.num_visible[output_row]);
  if (what == 1) return {o.lse[output_row], b.lse};
  if (what == 2) return {o.max_logit[output_row], b.score};
  return {o.out[at] * p.out_scale,
          bound_of_out(b, o.out[at], o.pv_abs[at], o.pv_lost[at], o.v_abs[at], o.largest_p[output_row]) * p.out_scale};
}

__device__ inline void compare_element(const CompareParams& p, int what, long long at, long long index,
                                       Verdict& verdict) {
  const OracleParams& o = *p.oracle;
  const Tensor& t = what == 0 ? p.out : what == 1 ? p.lse : p.max_logits;
  const long long output_row = what == 0 ? at / o.head_dim_v : at;
  const char* element =
      element_of(o, t, output_row / o.heads_q, output_row % o.heads_q, what == 0 ? at % o.head_dim_v : 0);
  const double actual = decode(t.dtype, element);
  Expected expected = {not_a_number(), 0};
  bool good;
  if (o.written[output_row] == 0) {
    good = is_untouched(p.filler, t.dtype, element);
  } else {
    expected = expected_of(p, what, output_row, at);
    good = is_within(t.dtype, expected.value, expected.bound, actual, what == 0 && p.saturate != 0);
  }
  count_element(good, index, expected.value, actual, expected.bound, verdict);
}

}  // namespace attune::oracle

extern "C" __global__ void __launch_bounds__(1024) attune_compare(const attune::oracle::CompareParams* params) {
  using namespace attune::oracle;
  const CompareParams& p = *params;
  const long long output_rows = p.oracle->rows * p.oracle->heads_q, elements = output_rows * p.oracle->head_dim_v;
  const long long me = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long all = static_cast<long long>(gridDim.x) * blockDim.x;
  Verdict verdict = {0, 0, -1, 0, 0, 0};
  for (long long i = me; i < elements; i += all) compare_element(p, 0, i, i, verdict);
  for (long long i = me; i < output_rows && present(p.lse); i += all) compare_element(p, 1, i, elements + i, verdict);
  for (long long i = me; i < output_rows && present(p.max_logits); i += all)
    compare_element(p, 2, i, elements + output_rows + i, verdict);
  p.verdicts[me] = verdict;
}
