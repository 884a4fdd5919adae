// SPDX-License-Identifier: Apache-2.0
// The operations beside attention made real, from cases: data, what must come out, and whether it did.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compare.h"
#include "problem.h"
#include "reference/reference.h"

namespace attune::cases {

class OpProblem {
 public:
  virtual ~OpProblem() = default;
  virtual Arena& arena() = 0;
  // Enqueues it on the memory's device. "" or the failing call.
  virtual std::string run(void* stream) const = 0;
  // After a run over freshly uploaded buffers: every element against the oracle, every other byte against what it was.
  virtual Report check() = 0;

  // Uploads, runs and checks. "" or what is wrong.
  std::string run_and_check(const std::function<std::string()>& run);
  std::string run_and_check() {
    return run_and_check([this] { return run(nullptr); });
  }
};

// Throws std::logic_error for a case of attention.
std::unique_ptr<OpProblem> make_op_problem(const Case& spec, Memory& memory);

// The new tokens and the prologue of an attention case; outputs are of its out_dtype, or in the inputs' place.
class PrepareProblem final : public OpProblem {
 public:
  PrepareProblem(const Case& spec, Memory& memory);
  Arena& arena() override { return problem_.arena(); }
  const attune_qkv_prepare& host() const { return op_; }
  attune_qkv_prepare device() const { return problem_.arena().on_device(op_); }
  std::string run(void* stream) const override;
  Report check() override;

 private:
  Problem problem_;
  attune_qkv_prepare op_{};
  std::optional<reference::Prepared> exact_;
  std::vector<reference::CacheWrite> writes_;
};

// Parts of num_heads_q heads of head_dim_v; rows are the queries. strides kOdd: padded.
class MergeProblem final : public OpProblem {
 public:
  MergeProblem(const Case& spec, Memory& memory);
  Arena& arena() override { return arena_; }
  const attune_merge& host() const { return op_; }
  attune_merge device() const { return arena_.on_device(op_); }
  std::string run(void* stream) const override;
  Report check() override;

 private:
  void fill_parts();

  Arena arena_;
  Random random_;
  attune_merge op_{};
  std::optional<reference::Merged> exact_;
};

// strides kDense: rows lie so that vectors can move them; kOdd: with padding that no vector divides. What is to be
// written, and with valid contents what nobody may read, is poison.
class CacheOpProblem : public OpProblem {
 public:
  CacheOpProblem(const Case& spec, Memory& memory);
  Arena& arena() override { return arena_; }
  const attune_cache_op& host() const { return op_; }
  attune_cache_op device() const { return arena_.on_device(op_); }
  std::string run(void* stream) const override;
  Report check() override;
  std::string describe() const;

 private:
  Layout layout(std::vector<int64_t> padding) const;
  double dense_value();
  double odd_page();
  attune_tensor add_integers(const char* name, attune_dtype dtype, const std::vector<int64_t>& values);
  attune_tensor add_dense(const char* name, int64_t dim);
  void place();
  void add_cache();
  void add_scales();
  void add_tables();
  attune_tensor add_table(const char* name, const std::vector<int64_t>& needed);
  void add_slots();
  void add_sequences();
  void fill_cache();
  void fill_slot(int64_t slot, bool is_v);
  void fill_needed();

  Case case_;
  Arena arena_;
  Random random_;
  attune_cache_op op_{};
  bool packed_, by_slots_, stores_;
  int64_t tokens_ = 0, pages_ = 0, page_size_ = 1, columns_ = 1;
  std::vector<int64_t> capacity_;  // tokens that each sequence's pages hold
  std::optional<reference::CacheMoves> exact_;
};

// Dense rows that an operation has fetched: those of moves, decoded exactly but for one rounding of fp32.
void check_fetched(const attune_cache_op& host, const reference::CacheMoves& moves, Snapshot& snapshot,
                   Checker& checker);

}  // namespace attune::cases
