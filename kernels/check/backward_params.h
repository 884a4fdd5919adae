// SPDX-License-Identifier: Apache-2.0
// What host and device share of the oracle of gradients on the GPU, and of the comparison with it. Compiled by NVRTC
// and by the host's compiler; no standard headers.
#pragma once

#include "check/compare_params.h"

namespace attune::oracle {

// One gradient: what it must be and how far off it may be, row-major as the input that it is of.
struct Gradient {
  double *value, *bound;
  GradientTerms terms;
};
constexpr int kNumGradients = 6;  // dq, dk, dv, dsinks, dbias, dt5_bias

struct BackwardOracleParams {
  OracleParams forward;  // its inputs; no results
  Tensor out, lse, dout, dlse;
  long long rows_kv;
  Gradient gradients[kNumGradients];  // value null: not asked for
  unsigned char *q_written, *kv_written;  // [rows], [rows_kv]: a sequence owns the row
  // Of each block scratch_size doubles.
  double* scratch;
  long long scratch_size;  // pairs of a query, or of a key and KV head; or sums of the threads
};

struct ComparedGradient {
  Tensor actual;  // dtype 0: absent
  const double *value, *bound;
  const unsigned char* written;  // by rows; null: all are
};

struct CompareGradientsParams {
  ComparedGradient gradients[kNumGradients];
  int filler;         // the bytes of what was not written
  Verdict* verdicts;  // [threads of the grid]; first counts through all gradients
};

}  // namespace attune::oracle
