// SPDX-License-Identifier: Apache-2.0
#include "stress_parts.h"

#include <algorithm>
#include <cstring>

namespace attune::cases {

void require(attune_status status, const char* call) {
  if (status == ATTUNE_OK) return;
  throw Refused(std::string(call) + ": " + attune_status_name(status) + ": " + attune_last_error());
}

std::string kernel_name(const attune_plan* plan) {
  char text[512];
  size_t needed = 0;
  require(attune_plan_describe(plan, text, sizeof(text), &needed), "attune_plan_describe");
  // "kernel NAME: what it does", or without the word.
  constexpr std::string_view kWord = "kernel ";
  const char* const name = text + (std::string_view(text).starts_with(kWord) ? kWord.size() : 0);
  return std::string(name, std::strcspn(name, ": \n"));
}

std::string bits_of_rows_differ(const char* name, int64_t b, const attune_tensor& host, int64_t first, int64_t count,
                                const Snapshot& before, const Snapshot& after) {
  attune_tensor rows = host;
  const int64_t size = element_size(static_cast<attune_dtype>(rows.dtype));
  rows.shape[0] = count;
  rows.data = static_cast<std::byte*>(rows.data) + first * rows.stride[0] * size;
  if (num_elements(rows) == 0) return "";
  const attune_tensor was = before.after(rows), is = after.after(rows);
  const auto apart = static_cast<const std::byte*>(is.data) - static_cast<const std::byte*>(was.data);
  bool same = true;
  for_each_element(was,
                   [&](const int64_t*, const std::byte* at) { same = same && std::equal(at, at + size, at + apart); });
  return same ? ""
              : std::string(name) + " of sequence " + std::to_string(b) +
                    " has other bits, though batch_invariant, where others have fewer keys";
}

}  // namespace attune::cases
