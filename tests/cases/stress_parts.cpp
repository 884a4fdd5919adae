// SPDX-License-Identifier: Apache-2.0
#include "stress_parts.h"

#include <algorithm>
#include <cstring>

namespace attune::cases {

void require(attune_status status, const char* call) {
  if (status == ATTUNE_OK) return;
  throw Refused(std::string(call) + ": " + attune_status_name(status) + ": " + attune_last_error());
}

namespace {

// By what the plan says of itself.
std::string kernel_name(const attune_plan* plan) {
  char text[512];
  size_t needed = 0;
  require(attune_plan_describe(plan, text, sizeof(text), &needed), "attune_plan_describe");
  // "kernel NAME: what it does", or without the word.
  constexpr std::string_view kWord = "kernel ";
  const char* const name = text + (std::string_view(text).starts_with(kWord) ? kWord.size() : 0);
  return std::string(name, std::strcspn(name, ": \n"));
}

}  // namespace

void PlannedRunner::take(attune_status status, const char* call, attune_plan* plan) {
  if (status == ATTUNE_UNSUPPORTED) return;
  require(status, call);
  plan_.reset(plan);
  kernel_ = kernel_name(plan);
  require(attune_plan_workspace_size(plan, &bytes_), "attune_plan_workspace_size");
  workspace_ = std::make_unique<Workspace>(memory_, bytes_);
}

std::string run_two_plans(const PlannedSide& one, const Outcome& first, const PlannedSide& other,
                          const std::function<std::string()>& check, int64_t& runs) {
  const auto side = [](const PlannedSide& planned, Workspace* workspace) {
    return Side{planned.arena, [&planned, workspace](void* stream) { planned.run(stream, workspace); }};
  };
  std::string failure = run_beside(side(one, nullptr), first, side(other, nullptr), check, runs);
  if (failure.empty()) failure = one.runner.check_guards();
  if (failure.empty()) failure = other.runner.check_guards();
  if (!failure.empty()) return failure;
  const Outcome second(other.arena);
  Workspace& shared = one.runner.larger_workspace(other.runner);
  failure = run_in_a_row({{side(one, &shared), first}, {side(other, &shared), second}}, runs);
  if (failure.empty()) failure = shared.buffer.check_guards();
  return failure.empty() ? "" : "of two plans: " + failure;
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
