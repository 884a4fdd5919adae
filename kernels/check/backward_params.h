// SPDX-License-Identifier: Apache-2.0
// What host and device share of the oracle of gradients on the GPU, and of the comparison with it. Compiled by NVRTC
// and by the host's compiler; no standard headers.
#pragma once

#include "check/compare_params.h"

namespace attune::oracle {

// One gradient: its expected values and their bounds, row-major in the shape of its input.
struct Gradient {
  double *value, *bound;
  GradientTerms terms;
};
constexpr int kNumGradients = 6;  // dq, dk, dv, dsinks, dbias, dt5_bias

struct BackwardOracleParams {
  OracleParams forward;  // the inputs of the forward; no results
  Tensor out, lse, dout, dlse;
  long long rows_kv;
  Gradient gradients[kNumGradients];  // value null: not computed
  unsigned char *q_written, *kv_written;  // [rows], [rows_kv]: whether a sequence owns the row
  // scratch_size doubles for each block.
  double* scratch;
  long long scratch_size;  // pairs of a query, or of a key and KV head; or sums of the threads
};

struct ComparedGradient {
  Tensor actual;  // dtype 0: absent
  const double *value, *bound;
  const unsigned char* written;  // for each row; null: all rows are written
};

struct CompareGradientsParams {
  ComparedGradient gradients[kNumGradients];
  int filler;         // the byte pattern of memory that was not written
  Verdict* verdicts;  // [threads of the grid]; first counts through all gradients
};

}  // namespace attune::oracle
