// SPDX-License-Identifier: Apache-2.0
// qkv_prepare on the memory of any device, against the oracle: a case of the table, its new tokens and its prologue,
// with outputs of every float type beside the append.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/ops.h"
#include "support.h"

namespace attune::tests {

enum class Outputs { kElsewhere, kInPlace, kOnlyQInPlace };

class Prepare {
 public:
  Prepare(const cases::Case& spec, cases::Memory& memory, attune_dtype out, Outputs where) : problem_(spec, memory) {
    const attune_attention& a = problem_.host();
    op_.struct_size = sizeof(op_);
    op_.q = a.q, op_.k = a.k, op_.v = a.v;
    op_.cu_seqlens_q = a.cu_seqlens_q;
    op_.seqused_kv = a.seqused_kv;
    op_.finished = a.finished;
    op_.cache = a.cache;
    op_.prologue = a.prologue;
    if (a.cache.k.dtype == ATTUNE_DTYPE_NONE) op_.prologue.append = op_.prologue.power_of_two_scales = 0;
    const struct {
      const char* name;
      attune_tensor in, *out;
    } outputs[] = {{"q_out", op_.q, &op_.q_out}, {"k_out", op_.k, &op_.k_out}, {"v_out", op_.v, &op_.v_out}};
    for (const auto& o : outputs) {
      if (o.in.dtype == ATTUNE_DTYPE_NONE || (where == Outputs::kOnlyQInPlace && o.out != &op_.q_out)) continue;
      if (where != Outputs::kElsewhere) {
        *o.out = o.in;
      } else {
        *o.out = problem_.arena().add(o.name, out, {o.in.shape, o.in.shape + o.in.rank});
      }
    }
  }

  // Whether the case makes a qkv_prepare at all.
  bool valid() {
    try {
      make_qkv_prepare(op_);
      return true;
    } catch (const Failure&) {
      return false;
    }
  }

  attune_qkv_prepare device() { return problem_.arena().on_device(op_); }

  // "" or what is wrong. run: takes the operation on device memory and returns "" or why it did not run.
  template <class Run>
  std::string run_and_check(Run&& run) {
    const reference::Prepared exact = reference::qkv_prepare(op_);
    const std::vector<reference::CacheWrite> writes = reference::appended(op_);
    problem_.arena().upload();
    if (const std::string why = run(device()); !why.empty()) return why;
    cases::Checker checker;
    cases::Snapshot snapshot(problem_.arena());
    check_rows("q_out", op_.q_out, exact.q, exact.written, snapshot, checker);
    check_rows("k_out", op_.k_out, exact.k, exact.written, snapshot, checker);
    check_rows("v_out", op_.v_out, exact.v, exact.written, snapshot, checker);
    cases::check_writes(op_.cache, writes, op_.prologue.power_of_two_scales != 0, snapshot, checker);
    snapshot.check(checker);
    return checker.report().failure;
  }
  std::string run_and_check() {
    return run_and_check([this](const attune_qkv_prepare& op) {
      const attune_status status = attune_qkv_prepare_run(&op, problem_.arena().memory().device(), nullptr);
      return std::string(status == ATTUNE_OK ? "" : attune_last_error());
    });
  }

 private:
  static void check_rows(const char* what, const attune_tensor& host, const std::vector<double>& exact,
                         const std::vector<bool>& written, cases::Snapshot& snapshot, cases::Checker& checker) {
    if (host.dtype == ATTUNE_DTYPE_NONE) return;
    const attune_tensor out = snapshot.after(host);
    const auto dtype = static_cast<attune_dtype>(out.dtype);
    const int64_t dim = out.shape[out.rank - 1];
    size_t i = 0;
    double largest = 0;
    cases::for_each_element(out, [&](const int64_t* index, void* element) {
      const auto d = static_cast<size_t>(index[out.rank - 1]);
      const int64_t row = out.rank == 4 ? index[0] * out.shape[1] + index[1] : index[0];
      if (d == 0) {
        largest = 0;
        for (int64_t c = 0; c < dim; ++c) largest = std::max(largest, std::fabs(exact[i + static_cast<size_t>(c)]));
      }
      if (written[static_cast<size_t>(row)]) {
        snapshot.allow(element, cases::element_size(dtype));
        // A few roundings of fp32, relative to the row: RoPE mixes pairs, a bias may cancel.
        checker.element(what, row, index[out.rank - 2], index[out.rank - 1], dtype, exact[i], largest * 0x1p-20,
                        cases::decode(dtype, element));
      }
      ++i;
    });
  }

  cases::Problem problem_;
  attune_qkv_prepare op_{};
};

// Calls f(prepare, name) for the cases with new tokens or a prologue that make a qkv_prepare.
template <typename F>
void for_each_prepare(cases::Memory& memory, F&& f) {
  int turn = 0;
  for (const cases::Case& spec : cases::all_cases()) {
    if (spec.name.find("prologue") != 0 && !spec.new_tokens) continue;
    const attune_dtype outs[] = {ATTUNE_FLOAT32, ATTUNE_BFLOAT16, ATTUNE_FLOAT16};
    const bool in_place = ++turn % 4 == 0;
    Prepare prepare(spec, memory, outs[turn % 3], in_place ? Outputs::kInPlace : Outputs::kElsewhere);
    if (prepare.valid()) f(prepare, spec.name + (in_place ? " in place" : ""));
    if (spec.name.find("mla") == std::string::npos) continue;
    Prepare as_served(spec, memory, ATTUNE_BFLOAT16, Outputs::kOnlyQInPlace);
    if (as_served.valid()) f(as_served, spec.name + " q in place");
  }
}

// Returns how many ran.
inline int check_prepare(cases::Memory& memory) {
  int ran = 0;
  for_each_prepare(memory, [&](Prepare& prepare, const std::string& name) {
    ++ran;
    EXPECT_EQ(prepare.run_and_check(), "") << name;
  });
  return ran;
}

}  // namespace attune::tests
