// SPDX-License-Identifier: Apache-2.0
// Merging partial results by lse against the oracle.
#include <cmath>
#include <limits>

#include "support.h"

namespace attune::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Shape {
  int64_t parts, rows, heads, dim;
};

class Merge {
 public:
  Merge(Shape shape, attune_dtype partial, attune_dtype out, bool sinks, bool padded)
      : arena_(cases::host_memory()), random_("merge", static_cast<uint64_t>(shape.parts * 1000 + shape.dim)) {
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
    const reference::Merged exact = reference::merge(op_);
    const attune_merge op = device();
    ASSERT_ATTUNE_OK(attune_merge_run(&op, kCpu, nullptr));
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

TEST(MergeOperation, MatchesTheOracle) {
  for (const attune_dtype partial : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16}) {
    for (const attune_dtype out : {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3}) {
      for (const Shape& shape : {Shape{1, 3, 2, 64}, Shape{2, 4, 3, 17}, Shape{7, 5, 1, 128}, Shape{33, 3, 4, 1}}) {
        Merge(shape, partial, out, shape.parts % 2 == 1, shape.dim == 17).run_and_check();
      }
    }
  }
}

TEST(MergeOperation, OfOnePartKeepsItsBits) {
  Merge merge({1, 5, 2, 40}, ATTUNE_FLOAT32, ATTUNE_FLOAT32, false, false);
  const attune_merge op = merge.device();
  ASSERT_ATTUNE_OK(attune_merge_run(&op, kCpu, nullptr));
  EXPECT_EQ(gather(op.partial_lse), gather(op.lse));
  const std::vector<double> before = gather_values(op.partial_out), after = gather_values(op.out);
  for (size_t i = 0; i < after.size(); ++i)
    EXPECT_TRUE(std::isnan(before[i]) ? after[i] == 0 : after[i] == before[i]) << i;
}

TEST(MergeOperation, OfNothingGivesZeroAndMinusInfinity) {
  Merge merge({2, 2, 2, 8}, ATTUNE_BFLOAT16, ATTUNE_FLOAT32, false, false);
  attune_merge op = merge.device();
  // No parts at all.
  op.partial_out.shape[0] = op.partial_lse.shape[0] = 0;
  ASSERT_ATTUNE_OK(attune_merge_run(&op, kCpu, nullptr));
  for (const double x : gather_values(op.out)) EXPECT_EQ(x, 0);
  for (const double x : gather_values(op.lse)) EXPECT_EQ(x, -kInfinity);
}

TEST(MergeOperation, NamesWhatIsWrong) {
  Merge merge({2, 3, 2, 8}, ATTUNE_FLOAT32, ATTUNE_FLOAT32, true, false);
  const attune_merge good = merge.device();
  const auto expect = [&](void (*spoil)(attune_merge&), const char* names) {
    attune_merge op = good;
    spoil(op);
    EXPECT_EQ(attune_merge_run(&op, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT) << names;
    EXPECT_NE(std::string(attune_last_error()).find(names), std::string::npos) << attune_last_error();
  };
  expect([](attune_merge& op) { op.struct_size = 8; }, "struct_size");
  expect([](attune_merge& op) { op.partial_out = {}; }, "partial_out");
  expect([](attune_merge& op) { op.partial_lse = {}; }, "partial_lse");
  expect([](attune_merge& op) { op.out = {}; }, "out");
  expect([](attune_merge& op) { op.partial_lse.shape[0] = 3; }, "partial_lse");
  expect([](attune_merge& op) { op.out.shape[2] = 9; }, "out");
  expect([](attune_merge& op) { op.lse.dtype = ATTUNE_FLOAT16; }, "lse");
  expect([](attune_merge& op) { op.sinks.shape[0] = 5; }, "sinks");
  expect([](attune_merge& op) { op.out.stride[0] = 1; }, "out");
  expect([](attune_merge& op) { op.partial_out.data = nullptr; }, "partial_out");
  EXPECT_EQ(attune_merge_run(nullptr, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attune::tests
