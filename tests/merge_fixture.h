// SPDX-License-Identifier: Apache-2.0
// Merging partial results by lse against the oracle, on the memory of any device.
#pragma once

#include <cmath>
#include <functional>
#include <limits>

#include "support.h"

namespace attune::tests {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct MergeShape {
  int64_t parts, rows, heads, dim;
};

class Merge {
 public:
  Merge(cases::Memory& memory, MergeShape shape, attune_dtype partial, attune_dtype out, bool sinks, bool padded)
      : arena_(memory), random_("merge", static_cast<uint64_t>(shape.parts * 1000 + shape.dim)) {
    op_.struct_size = sizeof(op_);
    const auto pad = [&](int64_t rank) {
      cases::Layout layout;
      if (padded) layout.padding.assign(static_cast<size_t>(rank), 3);
      return layout;
    };
    op_.partial_out = arena_.add("partial_out", partial, {shape.parts, shape.rows, shape.heads, shape.dim}, pad(4));
    op_.partial_lse = arena_.add("partial_lse", ATTUNE_FLOAT32, {shape.parts, shape.rows, shape.heads}, pad(3));
    op_.out = arena_.add("out", out, {shape.rows, shape.heads, shape.dim}, pad(3));
    op_.lse = arena_.add("lse", ATTUNE_FLOAT32, {shape.rows, shape.heads}, pad(2));
    if (sinks) {
      op_.sinks = arena_.add("sinks", ATTUNE_FLOAT32, {shape.heads});
      cases::for_each_element(op_.sinks, [&](const int64_t* index, void* element) {
        cases::encode(ATTUNE_FLOAT32, index[0] % 3 == 2 ? -kInfinity : 2 * random_.normal(), element);
      });
    }
    if (out == ATTUNE_FLOAT8_E4M3) {
      op_.out_scale = arena_.add("out_scale", ATTUNE_FLOAT32, {1});
      cases::encode(ATTUNE_FLOAT32, 3.5, op_.out_scale.data);
    }
    cases::for_each_element(op_.partial_lse, [&](const int64_t* index, void* element) {
      // Some parts are empty, some rows wholly, some parts lie far apart; the outputs of empty parts stay NaN.
      const bool empty = random_.chance(0.2) || index[1] == 1;
      const double lse =
          empty ? -kInfinity : 3 * random_.normal() + (index[1] == 2 ? 400.0 * static_cast<double>(index[0]) : 0.0);
      cases::encode(ATTUNE_FLOAT32, lse, element);
      if (empty) return;
      for (int64_t d = 0; d < shape.dim; ++d) {
        cases::encode(partial, random_.normal(), cases::element_at(op_.partial_out, {index[0], index[1], index[2], d}));
      }
    });
    arena_.upload();
  }

  attune_merge device() const { return arena_.on_device(op_); }

  void run_and_check() {
    run_and_check(
        [&](const attune_merge& op) { ASSERT_ATTUNE_OK(attune_merge_run(&op, arena_.memory().device(), nullptr)); });
  }
  void run_and_check(const std::function<void(const attune_merge&)>& run) {
    const reference::Merged exact = reference::merge(op_);
    run(device());
    cases::Checker checker;
    cases::Snapshot snapshot(arena_);
    const attune_tensor out = snapshot.after(op_.out), lse = snapshot.after(op_.lse);
    snapshot.allow_all(op_.out);
    snapshot.allow_all(op_.lse);
    const auto dtype = static_cast<attune_dtype>(out.dtype);
    const double scale = dtype == ATTUNE_FLOAT8_E4M3 ? 3.5 : 1.0;
    size_t i = 0;
    cases::for_each_element(out, [&](const int64_t* index, void* element) {
      checker.element("out", index[0], index[1], index[2], dtype, exact.out[i] * scale,
                      (exact.abs[i] * 0x1p-19 + 1e-36) * scale, cases::decode(dtype, element),
                      dtype == ATTUNE_FLOAT8_E4M3);
      ++i;
    });
    i = 0;
    cases::for_each_element(lse, [&](const int64_t* index, void* element) {
      const double bound = 0x1p-20 * (1 + (std::isfinite(exact.lse[i]) ? std::fabs(exact.lse[i]) : 0.0));
      checker.element("lse", index[0], index[1], -1, ATTUNE_FLOAT32, exact.lse[i], bound,
                      cases::decode(ATTUNE_FLOAT32, element));
      ++i;
    });
    snapshot.check(checker);
    EXPECT_EQ(checker.report().failure, "");
  }

 private:
  cases::Arena arena_;
  cases::Random random_;
  attune_merge op_{};
};

inline void check_merge(cases::Memory& memory) {
  for (const attune_dtype partial : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16}) {
    for (const attune_dtype out : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3}) {
      for (const MergeShape& shape : {MergeShape{1, 3, 2, 64}, MergeShape{2, 4, 3, 17}, MergeShape{7, 5, 1, 128},
                                      MergeShape{33, 3, 4, 1}, MergeShape{40, 3, 2, 576}}) {
        Merge(memory, shape, partial, out, shape.parts % 2 == 1, shape.dim == 17).run_and_check();
      }
    }
  }
}

}  // namespace attune::tests
