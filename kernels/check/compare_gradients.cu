// SPDX-License-Identifier: Apache-2.0
// Compares each element of a run's gradients with the oracle's, within its bound, one thread for each element. Elements
// that the operation must not write must still hold the filler.
#include "check/backward_params.h"
#include "check/within.cuh"

namespace attune::oracle {

__device__ inline long long num_elements(const Tensor& t) {
  long long count = present(t) ? 1 : 0;
  for (int axis = 0; axis < t.rank; ++axis) count *= t.shape[axis];
  return count;
}

// The address of element `at` in row-major order.
__device__ inline const char* element_number(const Tensor& t, long long at) {
  long long offset = 0;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    offset += at % t.shape[axis] * t.stride[axis];
    at /= t.shape[axis];
  }
  return t.data + offset * element_bytes(t.dtype);
}

}  // namespace attune::oracle

extern "C" __global__ void __launch_bounds__(1024)
    attune_compare_gradients(const attune::oracle::CompareGradientsParams* params) {
  using namespace attune::oracle;
  const CompareGradientsParams& p = *params;
  const long long me = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long all = static_cast<long long>(gridDim.x) * blockDim.x;
  Verdict verdict = {0, 0, -1, 0, 0, 0};
  long long before = 0;  // elements of the gradients before this one
  for (const ComparedGradient& g : p.gradients) {
    const Tensor& t = g.actual;
    const long long count = num_elements(t);
    const long long row_size = t.rank < 2 ? 1 : t.shape[t.rank - 1] * t.shape[t.rank - 2];
    for (long long i = me; i < count; i += all) {
      const char* const element = element_number(t, i);
      const bool is_written = g.written == nullptr || g.written[i / row_size] != 0;
      const double expected = is_written ? g.value[i] : not_a_number(), actual = decode(t.dtype, element);
      const bool good = is_written ? is_within(t.dtype, expected, g.bound[i], actual, false)
                                   : is_untouched(p.filler, t.dtype, element);
      count_element(good, before + i, expected, actual, is_written ? g.bound[i] : 0, verdict);
    }
    before += count;
  }
  p.verdicts[me] = verdict;
}
