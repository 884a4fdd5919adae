// SPDX-License-Identifier: Apache-2.0
// What host and device share of the comparison of a run's outputs with the oracle's. Compiled by NVRTC and by the
// host's compiler; no standard headers.
#pragma once

#include "check/bounds.h"
#include "check/oracle_params.h"

namespace attune::oracle {

// What one thread has found. first: the first wrong element, counted through out, lse and max_logits, row by row; -1:
// none.
struct Verdict {
  long long num_elements, num_bad, first;
  double expected, actual, bound;  // of the first wrong element
};

struct CompareParams {
  const OracleParams* oracle;  // with its results
  BoundTerms terms;
  Tensor out, lse, max_logits;  // of the run
  double out_scale;
  int saturate;
  int filler;  // the byte pattern of memory that was not written
  Verdict* verdicts;  // [threads of the grid]
};

}  // namespace attune::oracle
