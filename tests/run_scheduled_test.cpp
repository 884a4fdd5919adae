// SPDX-License-Identifier: Apache-2.0
// attune_run_scheduled takes the schedule of its plan for its lengths, and no other workspace.
#include <functional>

#include "support.h"

namespace attune::tests {
namespace {

using cases::Problem;

class PlannedRun {
 public:
  explicit PlannedRun(const attune_attention& a) {
    EXPECT_ATTUNE_OK(attune_plan_create(&a, kCpu, &plan_));
    EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan_, &bytes_));
    workspace_ = std::make_unique<cases::Workspace>(cases::host_memory(), bytes_);
  }
  ~PlannedRun() { attune_plan_destroy(plan_); }
  PlannedRun(const PlannedRun&) = delete;
  PlannedRun& operator=(const PlannedRun&) = delete;

  attune_plan* plan() const { return plan_; }
  void* data() const { return workspace_->buffer.device(); }
  size_t bytes() const { return bytes_; }
  attune_status schedule(const attune_attention& a) const {
    return attune_schedule(plan_, &a, data(), bytes_, nullptr);
  }
  attune_status run(const attune_attention& a) const { return attune_run(plan_, &a, data(), bytes_, nullptr); }
  attune_status run_scheduled(const attune_attention& a) const {
    return attune_run_scheduled(plan_, &a, data(), bytes_, nullptr);
  }
  void expect_refused(const attune_attention& a, const std::string& begin) const {
    EXPECT_EQ(run_scheduled(a), ATTUNE_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(attune_last_error()).find(begin), 0u) << attune_last_error();
  }

 private:
  attune_plan* plan_ = nullptr;
  size_t bytes_ = 0;
  std::unique_ptr<cases::Workspace> workspace_;
};

constexpr const char* kNone = "workspace holds no schedule of this plan; call attune_schedule first";
constexpr const char* kChanged = "lengths, offsets, finished, topk_length, windows, ranges or shapes changed since";

const char* const kPaged = R"({"name": "x", "heads": [4, 2], "kv": "paged", "seqlens_q": [2, 1], "seqlens_kv": [20, 7],
    "causal": true, "window": [30, 0], "ranges": [[3, 9], [0, 4]], "finished": [0, 0]})";

TEST(RunScheduled, NeedsASchedule) {
  Problem problem(make_case(kPaged));
  const attune_attention a = problem.device();
  const PlannedRun run(a);
  for (const int byte : {0xff, 0, 0x61}) {
    std::memset(run.data(), byte, run.bytes());
    run.expect_refused(a, kNone);
  }
  EXPECT_ATTUNE_OK(run.schedule(a));
  EXPECT_ATTUNE_OK(run.run_scheduled(a));
  EXPECT_ATTUNE_OK(run.run_scheduled(a));
}

TEST(RunScheduled, ARunLeavesItsScheduleBehind) {
  Problem problem(make_case(kPaged));
  const attune_attention a = problem.device();
  const PlannedRun run(a);
  EXPECT_ATTUNE_OK(run.run(a));
  EXPECT_ATTUNE_OK(run.run_scheduled(a));
}

TEST(RunScheduled, TakesNoOtherPlansSchedule) {
  Problem problem(make_case(kPaged));
  const attune_attention a = problem.device();
  const PlannedRun run(a), other(a);
  EXPECT_ATTUNE_OK(run.schedule(a));
  EXPECT_EQ(attune_run_scheduled(other.plan(), &a, run.data(), run.bytes(), nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(attune_last_error()).find(kNone), 0u) << attune_last_error();
  EXPECT_EQ(attune_schedule(other.plan(), &a, run.data(), run.bytes(), nullptr), ATTUNE_OK);
  run.expect_refused(a, kNone);
}

// One int32 or byte of a tensor on the device, and the step of a run that must see it.
struct Change {
  const char* name;
  const char* row;
  std::function<void(attune_attention&)> make;
};

template <class T>
void add_one(const attune_tensor& t, int64_t i) {
  static_cast<T*>(t.data)[i] = static_cast<T>(static_cast<T*>(t.data)[i] + 1);
}

TEST(RunScheduled, SeesWhatAScheduleFollowsFrom) {
  const char* const dense = R"({"name": "x", "heads": [2, 2], "seqlens_q": [5, 2], "seqlens_kv": [9, 7]})";
  const char* const sparse = R"({"name": "x", "heads": [4, 1], "kv": "slots", "seqlens_q": [2, 1],
      "sparse": {"topk": 9, "topk_length": "batch"}, "extra": {"topk": 5, "topk_length": "token"}})";
  const char* const fixed = R"({"name": "x", "heads": [2, 2], "queries": "fixed", "seqlens_q": [5, 5],
      "seqlens_kv": [9, 9]})";
  const Change changes[] = {
      {"seqused_kv", kPaged, [](auto& a) { static_cast<int32_t*>(a.seqused_kv.data)[1] -= 1; }},
      {"cu_seqlens_q", kPaged, [](auto& a) { static_cast<int32_t*>(a.cu_seqlens_q.data)[1] -= 1; }},
      {"finished", kPaged, [](auto& a) { add_one<uint8_t>(a.finished, 1); }},
      {"window_left", kPaged, [](auto& a) { a.window_left = 3; }},
      {"window_right", kPaged, [](auto& a) { a.window_right = 1; }},
      {"first of a range", kPaged, [](auto& a) { static_cast<int32_t*>(a.bidirectional_ranges.data)[2] += 1; }},
      {"last of a range", kPaged, [](auto& a) { static_cast<int32_t*>(a.bidirectional_ranges.data)[3] -= 1; }},
      {"cu_seqlens_kv", dense, [](auto& a) { static_cast<int32_t*>(a.cu_seqlens_kv.data)[1] -= 1; }},
      {"fewer dense rows", dense, [](auto& a) { a.k.shape[0] = a.v.shape[0] = 15; }},
      {"topk_length", sparse, [](auto& a) { static_cast<int32_t*>(a.topk_length.data)[1] -= 1; }},
      {"extra_topk_length", sparse, [](auto& a) { static_cast<int32_t*>(a.extra_topk_length.data)[0] -= 1; }},
      {"topk", sparse, [](auto& a) { a.indices.shape[1] = 8; }},
      {"seqlen_q", fixed, [](auto& a) { a.q.shape[1] = a.out.shape[1] = a.lse.shape[1] = 4; }},
      {"seqlen_kv", fixed, [](auto& a) { a.k.shape[1] = a.v.shape[1] = 8; }},
      {"batch", fixed,
       [](auto& a) { a.q.shape[0] = a.out.shape[0] = a.lse.shape[0] = a.k.shape[0] = a.v.shape[0] = 1; }},
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(change.name);
    Problem problem(make_case(change.row));
    attune_attention a = problem.device();
    const PlannedRun run(a);
    EXPECT_ATTUNE_OK(run.schedule(a));
    EXPECT_ATTUNE_OK(run.run_scheduled(a));
    change.make(a);
    run.expect_refused(a, kChanged);
    EXPECT_ATTUNE_OK(run.schedule(a));
    EXPECT_ATTUNE_OK(run.run_scheduled(a));
  }
}

// Other data of the same lengths are what a schedule is for.
TEST(RunScheduled, ServesOtherDataAndPages) {
  Problem problem(make_case(kPaged)), other(make_case(kPaged));
  const attune_attention a = problem.device(), b = other.device();
  const PlannedRun run(a);
  EXPECT_ATTUNE_OK(run.schedule(a));
  EXPECT_ATTUNE_OK(run.run_scheduled(b));
}

// Layers may have tables of other widths; what a table does not hold is another length.
TEST(RunScheduled, ServesTablesOfOtherWidths) {
  Problem problem(make_case(kPaged));
  const attune_attention narrow = problem.device();
  const attune_tensor& table = narrow.cache.page_table;
  const int64_t shape[2] = {table.shape[0], table.shape[1] + 2};
  std::vector<int32_t> pages(static_cast<size_t>(shape[0] * shape[1]), -1);
  attune_attention wide = narrow;
  wide.cache.page_table = attune_dense_tensor(pages.data(), ATTUNE_INT32, 2, shape);
  copy_elements(table, wide.cache.page_table);
  const PlannedRun run(wide);
  EXPECT_ATTUNE_OK(run.schedule(wide));
  EXPECT_ATTUNE_OK(run.run_scheduled(narrow));
  const std::vector<std::byte> bits = gather(narrow.out);
  EXPECT_ATTUNE_OK(run.run(wide));
  EXPECT_EQ(gather(wide.out), bits);
  attune_attention short_table = narrow;
  short_table.cache.page_table.shape[1] = 1;
  EXPECT_ATTUNE_OK(run.schedule(wide));
  run.expect_refused(short_table, kChanged);
}

}  // namespace
}  // namespace attune::tests
