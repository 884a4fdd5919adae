// SPDX-License-Identifier: Apache-2.0
// Compares each element of a run's out, lse and max_logits with the oracle's, within the bounds of check/bounds.h, one
// thread for each. Elements that the operation must not write must still hold the filler.
#include "check/compare_params.h"
#include "check/elements.cuh"

namespace attune::oracle {

// Rounds to the nearest number of a format, to even; beyond its range to infinity or to the largest number.
__device__ inline double round_to(int dtype, double x, bool saturate) {
  if (is_nan(x)) return x;
  const int exponent_bits = dtype == kFloat16 || dtype == kE5m2 ? 5 : dtype == kE4m3 ? 4 : 8;
  const int mantissa_bits =
      dtype == kFloat32 ? 23 : dtype == kFloat16 ? 10 : dtype == kBfloat16 ? 7 : dtype == kE4m3 ? 3 : 2;
  const int largest_exponent = (1 << (exponent_bits - 1)) - 1 + (dtype == kE4m3 ? 1 : 0);
  const int least_exponent = 2 - (1 << (exponent_bits - 1));  // of normal numbers
  // e4m3's code of all ones is NaN.
  const double last = dtype == kE4m3 ? 448.0 : (2 - power_of_two(-mantissa_bits)) * power_of_two(largest_exponent);
  const double beyond = saturate || dtype == kE4m3 ? last : infinity(), magnitude = fabs(x);
  double rounded = magnitude;
  if (magnitude >= 2 * power_of_two(largest_exponent)) {
    rounded = beyond;
  } else {
    int exponent = least_exponent;
    while (exponent < largest_exponent && magnitude >= power_of_two(exponent + 1)) ++exponent;
    const double step = power_of_two(exponent - mantissa_bits);
    rounded = rint(magnitude / step) * step;
    if (rounded > last) rounded = beyond;
  }
  return x < 0 ? -rounded : rounded;
}

__device__ inline bool is_within(int dtype, double expected, double bound, double actual, bool saturate) {
  if (is_nan(expected)) return is_nan(actual);
  if (!is_finite(expected)) return actual == round_to(dtype, expected, saturate);
  return round_to(dtype, expected - bound, saturate) <= actual && actual <= round_to(dtype, expected + bound, saturate);
}

__device__ inline bool is_untouched(const CompareParams& p, int dtype, const char* at) {
  for (int i = 0; i < element_bytes(dtype); ++i) {
    if (load<unsigned char>(at + i) != p.filler) return false;
  }
  return true;
}

__device__ inline const char* element_of(const OracleParams& o, const Tensor& t, long long row, long long head,
                                         long long d) {
  return o.q.rank == 4 ? element_at(t, row / o.q.shape[1], row % o.q.shape[1], head, d) : element_at(t, row, head, d);
}

struct Expected {
  double value, bound;
};

// Element i of all outputs. what: 0 out, 1 lse, 2 max_logits.
__device__ inline Expected expected_of(const CompareParams& p, int what, long long output_row, long long at) {
  const OracleParams& o = *p.oracle;
  const RowBounds b = bounds_of_row(p.terms, o.z_abs[output_row], o.max_logit[output_row], o.lse[output_row],
                                    o.num_visible[output_row]);
  if (what == 1) return {o.lse[output_row], b.lse};
  if (what == 2) return {o.max_logit[output_row], b.score};
  return {o.out[at] * p.out_scale,
          bound_of_out(b, o.out[at], o.pv_abs[at], o.v_abs[at], o.largest_p[output_row]) * p.out_scale};
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
    good = is_untouched(p, t.dtype, element);
  } else {
    expected = expected_of(p, what, output_row, at);
    good = is_within(t.dtype, expected.value, expected.bound, actual, what == 0 && p.saturate != 0);
  }
  ++verdict.num_elements;
  if (good) return;
  if (verdict.num_bad++ == 0)
    verdict = {verdict.num_elements, 1, index, expected.value, actual, expected.bound};
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
