// SPDX-License-Identifier: Apache-2.0
// Merging partial results over disjoint sets of keys.
#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "reference/softmax.h"
#include "reference/tensor.h"

namespace attune::reference {

Merged merge(const attune_merge& op) {
  const attune_tensor& parts = op.partial_out;
  const int64_t num_parts = parts.shape[0], rows = parts.shape[1], heads = parts.shape[2], dim = parts.shape[3];
  Merged merged;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      // The lse of a part is the logit of all its keys together.
      std::vector<double> logits;
      for (int64_t i = 0; i < num_parts; ++i) logits.push_back(number_at(op.partial_lse, i, row, head));
      const double sink = present(op.sinks) ? number_at(op.sinks, head) : -std::numeric_limits<double>::infinity();
      const Softmax softmax(logits, sink);
      std::vector<double> out(static_cast<size_t>(dim), 0.0), abs = out;
      for (int64_t i = 0; i < num_parts; ++i) {
        const double logit = logits[static_cast<size_t>(i)];
        if (softmax.ignores(logit)) continue;
        const double weight = softmax.probability(logit);
        const std::vector<double> part = channels(oracle::strided_row(parts, element_at(parts, i, row, head)), dim);
        for (size_t d = 0; d < part.size(); ++d) {
          out[d] += weight * part[d];
          abs[d] += weight * std::fabs(part[d]);
        }
      }
      merged.out.insert(merged.out.end(), out.begin(), out.end());
      merged.abs.insert(merged.abs.end(), abs.begin(), abs.end());
      merged.lse.push_back(softmax.lse());
    }
  }
  return merged;
}

}  // namespace attune::reference
