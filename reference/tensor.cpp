// SPDX-License-Identifier: Apache-2.0
#include "reference/tensor.h"

#include "reference/reference.h"

namespace attune::reference {

double decode_element(attune_dtype dtype, const void* element) {
  return oracle::decode(dtype, static_cast<const char*>(element));
}

std::vector<double> channels(const oracle::Row& row, int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int d = 0; d < static_cast<int>(count); ++d) values[static_cast<size_t>(d)] = oracle::channel(row, d);
  return values;
}

}  // namespace attune::reference
