// SPDX-License-Identifier: Apache-2.0
// Evaluates a problem with the oracle, runs it with the library, and compares: every element against its own error
// bound, every other byte against what it was.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "check/bounds.h"
#include "problem.h"
#include "reference/reference.h"

namespace attune::cases {

// What the oracle says about a problem. Must be made before the run.
struct Expected {
  bool all_rows = true;
  std::vector<reference::RowHead> rows;
  std::vector<reference::RowResult> results;
  std::vector<reference::CacheWrite> writes;
};
Expected evaluate(const Problem& problem);
// A sample: at least the first and the last row and head, and up to `count` in all.
Expected evaluate_sample(const Problem& problem, int64_t count);

// One element that is out of its bound, or the one closest to it.
struct Element {
  std::string where;  // "out[row 3, head 1, dim 7]"
  double expected = 0, actual = 0, bound = 0;
  double ratio = 0;  // |actual - expected| / bound
};

struct Report {
  std::string failure;  // "" when all is well
  Element worst;        // of the elements of out
  int64_t num_elements = 0;
  bool passed() const { return failure.empty(); }
};

// Collects the first failure and the worst element.
class Checker {
 public:
  // Passes when actual lies between the stored forms of expected - bound and expected + bound; NaN and infinities match
  // exactly.
  void element(const char* what, int64_t row, int64_t head, int64_t dim, attune_dtype dtype, double expected,
               double bound, double actual, bool saturate = false);
  void fail(std::string failure);
  bool failed() const { return !report_.failure.empty(); }
  Report& report() { return report_; }

 private:
  Report report_;
};

// The bytes of all buffers after a run, and which of them had the right to change.
class Snapshot {
 public:
  explicit Snapshot(const Arena& arena);
  // The same view over the bytes after the run.
  attune_tensor after(attune_tensor host) const;
  // This element may have changed. Takes a pointer into the bytes after the run.
  void allow(const void* element, int64_t bytes);
  void allow_all(const attune_tensor& host);
  // Fails for the first byte that changed without a right to, and for broken guards.
  void check(Checker& checker) const;

 private:
  struct Copy {
    const Buffer* buffer;
    std::vector<std::byte> bytes;
    std::vector<uint8_t> allowed;
  };
  const Arena& arena_;
  mutable std::vector<Copy> copies_;
};

// What the bounds of all rows have in common. weights: what the kernel rounds probabilities to; NONE: the type that
// products of such inputs are taken in.
oracle::BoundTerms bound_terms(const Problem& problem, attune_dtype weights = ATTUNE_DTYPE_NONE);

// Error bounds of one row, from what the oracle knows about it.
struct Bounds : oracle::RowBounds {
  Bounds(const Problem& problem, const reference::RowResult& row, attune_dtype weights = ATTUNE_DTYPE_NONE);
  double out(const reference::RowResult& row, size_t dim) const;
};

// What the device's kernel rounds probabilities to, as Bounds takes it.
attune_dtype rounded_weights(const Problem& problem, int32_t device_type);
Report compare(const Problem& problem, const Expected& expected);
// As on a device of that type.
Report compare(const Problem& problem, const Expected& expected, int32_t device_type);
// Checks the slots that appends wrote and allows their bytes.
void check_writes(const attune_kv_cache& host, const std::vector<reference::CacheWrite>& writes,
                  bool power_of_two_scales, Snapshot& snapshot, Checker& checker);

// --- Running

struct Workspace {
  // Guarded memory of exactly the plan's size, full of NaN.
  Workspace(Memory& memory, size_t bytes) : buffer(memory, "workspace", bytes) { buffer.upload(); }
  Buffer buffer;
};

// Makes a plan and runs it in a guarded workspace of its size. "" or what failed, by the calls' names.
struct PlannedCall {
  const char* make_name;
  std::function<attune_status(attune_plan** plan)> make;
  const char* run_name;
  std::function<attune_status(const attune_plan* plan, void* workspace, size_t bytes)> run;
};
std::string run_planned(Memory& memory, const PlannedCall& call, attune_status* status);

// Plans and runs on the problem's device. "" or the failing call with attune_last_error().
std::string run(Problem& problem, attune_status* status = nullptr);

// Build, evaluate, run and compare in one. sample > 0: only so many rows.
Report run_case(const Case& spec, Memory& memory = host_memory(), int64_t sample = 0);

}  // namespace attune::cases
