// SPDX-License-Identifier: Apache-2.0
// Checks a sample of the rows of each call against the float64 oracle.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attune/attune.h"
#include "cases/number.h"
#include "reference/reference.h"

namespace attune::cli {

// How many (row, head) pairs of each call are checked.
struct VerifyOptions {
  double amount = 2;  // pairs, or a share of all of them
  bool is_share = false;
  int64_t max_keys = 32768;  // the oracle visits at most so many keys a call, but always checks one pair
};
// "4" or "0.5%"; "0" checks nothing. Throws UserError.
VerifyOptions parse_verify(const std::string& text);

// The largest error that column `dim` of a row may have: what the formats' roundings can do to a row that the oracle
// knows.
//   u      unit roundoff of the type in which the products are formed (bfloat16 for 8-bit caches)
//   scores move by at most e, and probabilities by a factor of exp(e). e: a few roundings, with random signs, of
//          |scale| sum |q_d k_d|, where RoPE or a scale of a group of columns leaves operands inexact in that type
//   out    <= (u + accumulation) * sum p |v| + (exp(2 e) - 1) / 2 * (sum p |v| + |out|), then rounds once to its type
double error_bound(const attune_attention& a, const reference::RowHead& where, const reference::RowResult& row,
                   size_t dim);

struct Mismatch {
  int64_t step = 0, row = 0, head = 0, dim = 0;
  std::string call;
  double value = 0, expected = 0, bound = 0;
  std::string text() const;
};

class Verifier {
 public:
  Verifier(const VerifyOptions& options, uint64_t seed) : options_(options), random_(seed) {}

  // Before the call: chooses the sample, evaluates it and spoils its rows of out. keys_of_row: what each row costs the
  // oracle.
  void expect(const attune_attention& a, std::span<const int64_t> keys_of_row);
  // After it.
  void compare(const attune_attention& a, int64_t step, std::string_view call);

  // Checks what the indexer chose for one row: as many keys as it may, each once and in order, and none worse than one
  // that it left. Queries of rank 3, with cu_seqlens_q, without ranges or a table of slots.
  void compare_index(const attune_indexer& op, int64_t step);

  int64_t num_rows() const { return num_rows_; }
  int64_t num_failed() const { return num_failed_; }
  double worst_ratio() const { return worst_ratio_; }  // largest |error| / bound
  double seconds() const { return seconds_; }          // spent here
  const std::optional<Mismatch>& first_mismatch() const { return first_mismatch_; }

 private:
  void choose(const attune_attention& a, std::span<const int64_t> keys_of_row);

  VerifyOptions options_;
  cases::Random random_;
  std::vector<reference::RowHead> rows_;
  std::vector<reference::RowResult> expected_;
  int64_t num_rows_ = 0, num_failed_ = 0;
  double worst_ratio_ = 0, seconds_ = 0;
  std::optional<Mismatch> first_mismatch_;
};

}  // namespace attune::cli
