// SPDX-License-Identifier: Apache-2.0
#include "indexer_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace attune::cases {
namespace {

constexpr double kBadPages[] = {0x7fffff00, -7, 2147480000.0};  // in table entries that must not be followed
constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// Element (row, column) of a tensor of rows, with or without a batch axis.
void* row_element(const attune_tensor& t, int64_t row, int64_t column) {
  return t.rank == 3 ? element_at(t, {row / t.shape[1], row % t.shape[1], column}) : element_at(t, {row, column});
}

int64_t integer_of(const attune_tensor& t, int64_t row, int64_t column) {
  return static_cast<int64_t>(decode(ATTUNE_INT32, row_element(t, row, column)));
}

}  // namespace

IndexerProblem::IndexerProblem(const Case& spec, Memory& memory)
    : problem_(spec, memory), random_(spec.name + " indexer", static_cast<uint64_t>(spec.num_heads_q)) {
  const attune_attention& a = problem_.host();
  base_.struct_size = sizeof(base_);
  base_.causal = a.causal;
  base_.q = a.q;
  base_.cu_seqlens_q = a.cu_seqlens_q;
  base_.cache = a.cache;
  base_.cache.v = base_.cache.v_scale = {};
  base_.seqused_kv = a.seqused_kv;
  base_.max_seqlen_kv = a.max_seqlen_kv;
  base_.form = spec.indexer.positions ? ATTUNE_INDEX_POSITIONS : ATTUNE_INDEX_SLOTS;
  add_inputs();
  add_ranges();
  add_slot_table();
  add_outputs();
  arena().upload();
}

attune_tensor IndexerProblem::add_row_tensor(const char* name, attune_dtype dtype, int64_t last) {
  std::vector<int64_t> shape = {problem_.num_rows(), last};
  if (base_.q.rank == 4) shape = {spec().batch(), base_.q.shape[1], last};
  Layout layout;
  if (spec().strides == StrideMode::kOdd) {
    layout.padding.assign(shape.size(), 0);
    layout.padding.back() = 3;
    layout.offset = static_cast<size_t>(element_size(dtype));
  } else if (spec().strides == StrideMode::kTransposed) {
    layout.order = shape.size() == 2 ? std::vector<int>{1, 0} : std::vector<int>{2, 0, 1};
  }
  return arena().add(name, dtype, shape, layout);
}

// Rows that no sequence owns keep their poison.
void IndexerProblem::add_inputs() {
  const Case& c = spec();
  const auto fill = [&](const attune_tensor& t, auto&& value) {
    for (int64_t row = 0; row < c.total_q(); ++row) {
      for (int64_t h = 0; h < c.num_heads_q; ++h) {
        encode(static_cast<attune_dtype>(t.dtype), value(), row_element(t, row, h));
      }
    }
  };
  base_.weights = add_row_tensor("weights", dtype_from_name(c.indexer.weights), c.num_heads_q);
  fill(base_.weights, [&] { return random_.normal(); });
  if (!c.indexer.q_scale) return;
  base_.q_scale = add_row_tensor("q_scale", ATTUNE_FLOAT32, c.num_heads_q);
  fill(base_.q_scale, [&] { return random_.uniform(0.01, 0.5); });
}

// A window of the case becomes the range of each row.
void IndexerProblem::add_ranges() {
  const Case& c = spec();
  const auto add = [&](const char* name, int64_t window, auto&& value) {
    if (window < 0) return attune_tensor{};
    const attune_tensor t = arena().add(name, ATTUNE_INT32, {problem_.num_rows()});
    for (int64_t b = 0; b < c.batch(); ++b) {
      const int64_t n = c.seqlens_q[static_cast<size_t>(b)];
      for (int64_t i = 0; i < n; ++i) {
        encode(ATTUNE_INT32, static_cast<double>(value(c.stored(b) - n + i)),
               element_at(t, {problem_.first_row(b) + i}));
      }
    }
    return t;
  };
  base_.key_begin = add("key_begin", c.window_left, [&](int64_t p) { return p - c.window_left; });
  base_.key_end = add("key_end", c.window_right, [&](int64_t p) { return p + c.window_right + 1; });
}

// Another cache with pages of its own size. Some sequences have a bad page there.
void IndexerProblem::add_slot_table() {
  const Case& c = spec();
  const int64_t page_size = c.indexer.slot_page_size;
  if (page_size == 0) return;
  int64_t width = 1;
  for (int64_t b = 0; b < c.batch(); ++b) width = std::max(width, ceil_div(c.stored(b), page_size));
  base_.slot_page_size = page_size;
  base_.slot_pages = c.batch() * width + 3;
  base_.slot_table = arena().add("slot_table", ATTUNE_INT32, {c.batch(), width}, {{}, {0, 2}, 0});
  std::vector<int64_t> pages(static_cast<size_t>(base_.slot_pages));
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int64_t>(i);
  random_.shuffle(pages);
  for_each_element(base_.slot_table, [&](const int64_t* index, void* element) {
    const int64_t used = ceil_div(c.stored(index[0]), page_size);
    const bool bad = index[1] >= used || (c.indexer.bad_pages && random_.chance(0.2));
    encode(ATTUNE_INT32,
           bad ? kBadPages[index[1] % 3] : static_cast<double>(pages[static_cast<size_t>(index[0] * width + index[1])]),
           element);
  });
}

void IndexerProblem::add_outputs() {
  const Case& c = spec();
  int64_t columns = 1;
  for (int64_t b = 0; b < c.batch(); ++b) columns = std::max(columns, c.stored(b));
  scores_ = add_row_tensor("scores", ATTUNE_FLOAT32, columns + 2);
  for (int i = 0; i < 2; ++i) {
    indices_[i] = add_row_tensor(i == 0 ? "indices" : "indices of SELECT", ATTUNE_INT32, c.indexer.topk);
    // Where strides are odd, every other element of a vector.
    const int64_t step = c.strides == StrideMode::kOdd ? 2 : 1;
    topk_length_[i] = arena().add("topk_length", ATTUNE_INT32, {step * problem_.num_rows()});
    topk_length_[i].shape[0] = problem_.num_rows();
    topk_length_[i].stride[0] = step;
  }
}

attune_indexer IndexerProblem::host(attune_indexer_kind kind) const {
  attune_indexer op = base_;
  op.kind = kind;
  if (kind == ATTUNE_INDEXER_SELECT) {
    op.q = op.q_scale = op.weights = {};
    if (!spec().indexer.positions && op.slot_table.dtype != ATTUNE_DTYPE_NONE && !spec().indexer.bad_pages) {
      op.cache = {};  // its tables are not needed for the slots of another cache
    }
  }
  if (kind != ATTUNE_INDEXER_TOPK) op.scores = scores_;
  if (kind == ATTUNE_INDEXER_SCORES) {
    op.clear_scores = spec().indexer.clear ? 1 : 0;
    op.slot_table = {};
    op.slot_page_size = op.slot_pages = 0;
    op.form = 0;
    return op;
  }
  const int which = kind == ATTUNE_INDEXER_TOPK ? 0 : 1;
  op.indices = indices_[which];
  op.topk_length = spec().indexer.lengths ? topk_length_[which] : attune_tensor{};
  return op;
}

std::string run(const attune_indexer& device, Memory& memory) {
  const auto failed = [&](const char* call, attune_status code) {
    return std::string(call) + ", kind " + std::to_string(device.kind) + ": " + attune_status_name(code) + ": " +
           attune_last_error();
  };
  size_t bytes = 0;
  if (const attune_status code = attune_indexer_workspace_size(&device, memory.device(), &bytes); code != ATTUNE_OK) {
    return failed("attune_indexer_workspace_size", code);
  }
  Workspace workspace(memory, bytes);
  if (const attune_status code =
          attune_indexer_run(&device, memory.device(), workspace.buffer.device(), bytes, nullptr);
      code != ATTUNE_OK) {
    return failed("attune_indexer_run", code);
  }
  return workspace.buffer.check_guards();
}

namespace {

// An operation whose tensors are the bytes after a run.
attune_indexer after(const Snapshot& snapshot, attune_indexer op) {
  for (attune_tensor* t : {&op.scores, &op.indices, &op.topk_length}) *t = snapshot.after(*t);
  return op;
}

void check_scores(const attune_indexer& op, const std::vector<reference::IndexRow>& rows, Snapshot& snapshot,
                  Checker& checker) {
  const int64_t columns = op.scores.shape[op.scores.rank - 1];
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto row = static_cast<int64_t>(r);
    if (!rows[r].written) continue;
    std::vector<uint8_t> seen(static_cast<size_t>(columns), 0);
    const auto check = [&](int64_t column, double expected, double bound) {
      const void* at = row_element(op.scores, row, column);
      snapshot.allow(at, 4);
      checker.element("scores", row, 0, column, ATTUNE_FLOAT32, expected, bound, decode(ATTUNE_FLOAT32, at));
      seen[static_cast<size_t>(column)] = 1;
    };
    for (size_t i = 0; i < rows[r].positions.size(); ++i) {
      check(rows[r].positions[i], rows[r].scores[i], rows[r].scores_abs[i] * 0x1p-20 + 1e-36);
    }
    for (const int64_t t : rows[r].hidden) check(t, kMinusInf, 0);
    for (int64_t j = 0; j < columns && op.clear_scores != 0; ++j) {
      if (seen[static_cast<size_t>(j)] == 0) check(j, kMinusInf, 0);
    }
  }
}

void check_indices(const attune_indexer& op, const std::vector<reference::IndexRow>& rows, Snapshot& snapshot,
                   Checker& checker) {
  const int64_t topk = op.indices.shape[op.indices.rank - 1];
  const std::string what = op.kind == ATTUNE_INDEXER_TOPK ? "indices of TOPK" : "indices of SELECT";
  for (size_t r = 0; r < rows.size(); ++r) {
    const auto row = static_cast<int64_t>(r);
    if (!rows[r].written) continue;
    std::vector<int64_t> expected = reference::index_select(rows[r], topk);
    const auto count = static_cast<int64_t>(expected.size());
    expected.resize(static_cast<size_t>(topk), -1);
    for (int64_t i = 0; i < topk; ++i) {
      snapshot.allow(row_element(op.indices, row, i), 4);
      const int64_t entry = integer_of(op.indices, row, i);
      if (entry != expected[static_cast<size_t>(i)]) {
        checker.fail(what + "[row " + std::to_string(row) + ", " + std::to_string(i) + "] is " + std::to_string(entry) +
                     ", expected " + std::to_string(expected[static_cast<size_t>(i)]));
      }
      ++checker.report().num_elements;
    }
    if (op.topk_length.dtype == ATTUNE_DTYPE_NONE) continue;
    const void* at = element_at(op.topk_length, {row});
    snapshot.allow(at, 4);
    if (const double length = decode(ATTUNE_INT32, at); length != static_cast<double>(count)) {
      checker.fail("topk_length[" + std::to_string(row) + "] is " + std::to_string(length) + ", expected " +
                   std::to_string(count));
    }
  }
}

}  // namespace

Report run_indexer_case(const Case& spec, Memory& memory) {
  IndexerProblem problem(spec, memory);
  return run_and_check(problem);
}

Report run_and_check(IndexerProblem& problem) {
  Memory& memory = problem.arena().memory();
  return run_and_check(problem, [&](const attune_indexer& device) { return run(device, memory); });
}

Report run_and_check(IndexerProblem& problem, const IndexerRunner& runner) {
  const std::vector<reference::IndexRow> exact = reference::index_rows(problem.host(ATTUNE_INDEXER_SCORES));
  Checker checker;
  for (const attune_indexer_kind kind : {ATTUNE_INDEXER_SCORES, ATTUNE_INDEXER_SELECT, ATTUNE_INDEXER_TOPK}) {
    if (std::string failure = runner(problem.device(kind)); !failure.empty()) checker.fail(failure);
  }
  Snapshot snapshot(problem.arena());
  check_scores(after(snapshot, problem.host(ATTUNE_INDEXER_SCORES)), exact, snapshot, checker);
  // From the scores as the library has them: which are the best has one answer.
  attune_indexer select = after(snapshot, problem.host(ATTUNE_INDEXER_SELECT));
  select.cache = problem.host(ATTUNE_INDEXER_TOPK).cache;
  const std::vector<reference::IndexRow> rows = reference::index_rows(select);
  check_indices(select, rows, snapshot, checker);
  check_indices(after(snapshot, problem.host(ATTUNE_INDEXER_TOPK)), rows, snapshot, checker);
  snapshot.check(checker);
  return checker.report();
}

}  // namespace attune::cases
