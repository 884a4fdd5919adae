// SPDX-License-Identifier: Apache-2.0
// What attune_validate reads of a device's tables: all of them, and nothing beside them. A copy within the host stands
// for the driver's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "cuda/host_tables.h"

namespace attune::cuda {
namespace {

class CudaHostTables : public testing::Test {
 protected:
  // Memory of so many numbers, all different, and no more.
  template <class T>
  const T* device_memory(int64_t count) {
    std::vector<std::byte>& bytes = memory_.emplace_back(static_cast<size_t>(count) * sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      const auto x = static_cast<T>(++last_);
      std::memcpy(bytes.data() + i * static_cast<int64_t>(sizeof(T)), &x, sizeof(T));
    }
    return reinterpret_cast<const T*>(bytes.data());
  }
  IntView view(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
    const int64_t count = rows == 0 || cols == 0 ? 0 : (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
    return {device_memory<int32_t>(count), rows, cols, row_stride, col_stride};
  }

  HostTables copy(const Problem& p) {
    return {p, [this](void* to, const void* from, size_t bytes) {
              const auto* const begin = static_cast<const std::byte*>(from);
              EXPECT_GT(bytes, 0u);
              EXPECT_TRUE(is_device(begin) && std::ranges::any_of(memory_,
                                                                  [&](const std::vector<std::byte>& m) {
                                                                    return m.data() <= begin &&
                                                                           begin + bytes <= m.data() + m.size();
                                                                  }))
                  << bytes;
              std::memcpy(to, from, bytes);
            }};
  }
  bool is_device(const void* at) const {
    return std::ranges::any_of(
        memory_, [&](const std::vector<std::byte>& m) { return at >= m.data() && at < m.data() + m.size(); });
  }
  void expect_copied(const IntView& from, const IntView& to) const {
    ASSERT_EQ(to.rows, from.rows);
    ASSERT_EQ(to.cols, from.cols);
    EXPECT_FALSE(is_device(to.data));
    for (int64_t i = 0; i < from.rows; ++i) {
      for (int64_t j = 0; j < from.cols; ++j) EXPECT_EQ(to(i, j), from(i, j)) << i << ", " << j;
    }
  }
  void expect_copied(const SparseList& from, const SparseList& to, int64_t rows, int64_t heads) const {
    EXPECT_FALSE(is_device(to.indices));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t i = 0; i < from.topk; ++i) EXPECT_EQ(to.at(row, head, i), from.at(row, head, i)) << row;
      }
    }
  }

 private:
  std::deque<std::vector<std::byte>> memory_;
  int64_t last_ = 0;
};

constexpr IntView Problem::*kOwn[] = {&Problem::cu_q, &Problem::cu_kv, &Problem::seqused, &Problem::cache_indirection,
                                      &Problem::beam_prompt_length};
constexpr IntView KvCache::*kOfCache[] = {&KvCache::page_table, &KvCache::v_page_table, &KvCache::batch_index};
constexpr IntView Prologue::*kOfPrologue[] = {&Prologue::ia3_task, &Prologue::rope_table_index, &Prologue::positions};

TEST_F(CudaHostTables, CopiesEachTable) {
  Problem p;
  for (const auto member : kOwn) p.*member = view(3, 4, 4, 1);
  for (const auto member : kOfCache) p.cache.*member = view(3, 4, 4, 1);
  for (const auto member : kOfPrologue) p.prologue.*member = view(3, 4, 4, 1);
  const HostTables tables = copy(p);
  const Problem& h = tables.problem();
  for (const auto member : kOwn) expect_copied(p.*member, h.*member);
  for (const auto member : kOfCache) expect_copied(p.cache.*member, h.cache.*member);
  for (const auto member : kOfPrologue) expect_copied(p.prologue.*member, h.prologue.*member);
}

// Rows that lie apart, touch, overlap or are one; columns with gaps.
TEST_F(CudaHostTables, CopiesWhateverTheStrides) {
  for (const IntView& v : {view(3, 4, 10, 1), view(3, 4, 9, 2), view(3, 4, 7, 2), view(3, 4, 1, 1), view(3, 4, 0, 1),
                           view(1, 5, 0, 3), view(1, 5, 99, 1), view(4, 1, 6, 1)}) {
    Problem p;
    p.cache.page_table = v;
    expect_copied(v, copy(p).problem().cache.page_table);
  }
}

TEST_F(CudaHostTables, LeavesWhatIsNotThere) {
  Problem p;
  p.cache.page_table = view(3, 0, 4, 1);
  p.list.indices = device_memory<int32_t>(1);
  p.batch = 0;
  p.finished = device_memory<uint8_t>(1);
  const HostTables tables = copy(p);
  EXPECT_EQ(tables.problem().cu_q.data, nullptr);
  EXPECT_EQ(tables.problem().cache.page_table.data, p.cache.page_table.data);
  EXPECT_EQ(tables.problem().list.indices, p.list.indices);
  EXPECT_EQ(tables.problem().finished, p.finished);
}

TEST_F(CudaHostTables, CopiesLists) {
  constexpr int64_t kRows = 6, kHeads = 2, kTopk = 5;
  const auto list = [&](int64_t rows_per_batch, int64_t batch, int64_t row, int64_t head, int64_t entry) {
    SparseList s;
    s.topk = kTopk, s.rows_per_batch = rows_per_batch;
    s.batch_stride = batch, s.row_stride = row, s.head_stride = head, s.entry_stride = entry;
    const int64_t of_row = (kHeads - 1) * head + (kTopk - 1) * entry + 1;
    const int64_t of_batch = rows_per_batch == 0 ? (kRows - 1) * row + of_row : (rows_per_batch - 1) * row + of_row;
    s.indices = device_memory<int32_t>(of_batch + (rows_per_batch == 0 ? 0 : (kRows / rows_per_batch - 1) * batch));
    s.length = view(1, kRows, 0, 2);
    return s;
  };
  for (const SparseList& s : {list(0, 0, 10, 5, 1), list(0, 0, 23, 11, 2), list(0, 0, 5, 0, 1), list(3, 30, 10, 5, 1),
                              list(3, 77, 12, 6, 1), list(2, 12, 6, 0, 1)}) {
    Problem p;
    p.total_q = kRows, p.heads_kv = kHeads;
    p.list = p.extra_list = s;
    const HostTables tables = copy(p);
    for (const SparseList* h : {&tables.problem().list, &tables.problem().extra_list}) {
      expect_copied(s, *h, kRows, kHeads);
      expect_copied(s.length, h->length);
    }
  }
}

TEST_F(CudaHostTables, CopiesFlags) {
  Problem p;
  p.batch = 4, p.finished_stride = 3;
  p.finished = device_memory<uint8_t>(10);
  const HostTables tables = copy(p);
  EXPECT_FALSE(is_device(tables.problem().finished));
  for (int64_t b = 0; b < p.batch; ++b)
    EXPECT_EQ(tables.problem().finished[b * tables.problem().finished_stride], p.finished[b * p.finished_stride]);
}

}  // namespace
}  // namespace attune::cuda
