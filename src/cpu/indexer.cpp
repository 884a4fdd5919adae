// SPDX-License-Identifier: Apache-2.0
// Items are blocks of rows of one sequence. Where there are too few for the threads, the keys of a block are cut into
// splits: each leaves its k best, and the rows merge them. Which keys are the k best does not depend on how they were
// cut, since no two candidates are equal.
#include "cpu/indexer.h"

#include <algorithm>
#include <limits>

#include "core/integers.h"
#include "core/status.h"
#include "cpu/index_scores.h"
#include "cpu/kernels.h"
#include "cpu/rows.h"
#include "cpu/threads.h"
#include "cpu/topk_list.h"

namespace attune::cpu {
namespace {

constexpr int64_t kMostRows = 16;             // of a block; its rows share the conversion of a tile of keys
constexpr int64_t kMostQueries = 1024;        // rows times heads of a block
constexpr int64_t kMostCandidates = 1 << 17;  // of all rows of a block
constexpr int64_t kSplitKeys = 1024;          // of a split, at least; fewer cost more than they gain
constexpr int64_t kItemsPerThread = 4;

static_assert(TopkList::kMostAtOnce >= kIndexTile);

// The rows of one sequence, and the number of blocks and lists before its own.
struct Span {
  int64_t first_row, num_rows, num_keys;
  int64_t first_block, lists_before;
};

// IndexerProblem::entry() for positions that mostly ascend: it reads tables and divides once a page.
class Entries {
 public:
  Entries(const IndexerProblem& op, int64_t b) : op_(op), b_(b) {}
  int64_t operator()(int64_t t) {
    if (t < begin_ || t >= end_) {
      begin_ = t;
      end_ = std::numeric_limits<int64_t>::max();
      if (op_.cache) end_ = (t / op_.cache.page_size + 1) * op_.cache.page_size;
      if (op_.slot_table) end_ = std::min(end_, (t / op_.slot_page_size + 1) * op_.slot_page_size);
      first_ = op_.entry(b_, t);
    }
    return first_ < 0 ? -1 : first_ + (t - begin_);
  }

 private:
  const IndexerProblem& op_;
  int64_t b_, begin_ = 0, end_ = 0, first_ = -1;
};

// Sizes that follow from the shapes and the number of threads.
struct Sizes {
  int threads;
  int64_t rows;      // of a block, at most
  int64_t k;         // entries that a row can fill
  int64_t capacity;  // of a list
  int64_t max_splits, max_lists;

  explicit Sizes(const IndexerProblem& op) : threads(num_threads()) {
    k = std::min(op.topk, std::max<int64_t>(op.max_seqlen_kv, 1));
    capacity = op.selects() ? TopkList::capacity(k, op.max_seqlen_kv) : 0;
    const int64_t most = op.cu ? op.total_q : op.fixed_q;
    rows = std::min({kMostRows, most, kMostQueries / std::max<int64_t>(op.num_heads, 1)});
    if (op.selects()) rows = std::min(rows, kMostCandidates / k);
    rows = std::max<int64_t>(rows, 1);
    const int64_t by_keys = ceil_div(op.max_seqlen_kv, kSplitKeys);
    max_splits = threads == 1 ? 1 : std::clamp<int64_t>(by_keys, 1, kItemsPerThread * threads);
    // A run of n blocks cuts each into at most kItemsPerThread * threads / n + 1 splits; none if n >= 2 * threads.
    max_lists = max_splits == 1 || !op.selects()
                    ? 0
                    : std::min(op.total_q * max_splits, rows * (kItemsPerThread + 2) * threads);
  }
};

// Memory of one thread.
struct ThreadMemory {
  IndexScorer* scorer = nullptr;  // null for SELECT
  uint64_t* lists;                // [rows][capacity]
  uint64_t* spare;                // [capacity]
  float* scores;                  // [kIndexTile], SELECT
  bool* masked;                   // [kIndexTile], SELECT
};

struct Memory {
  Span* spans;         // [batch]
  uint64_t* kept;      // [max_lists][k]: the best of each split
  int64_t* num_kept;   // [max_lists]
  std::byte* threads;  // [threads], thread_bytes each
  size_t thread_bytes;
};

ThreadMemory carve_thread(const IndexerProblem& op, const Sizes& z, std::byte* base, size_t* used) {
  Workspace c(base, kCacheLine);
  ThreadMemory m{};
  m.lists = c.take<uint64_t>(z.rows * z.capacity);
  m.spare = c.take<uint64_t>(z.capacity);
  if (op.reads_keys()) {
    auto* at = c.take<IndexScorer>(1);
    const auto make = [&](void* where) { return new (where) IndexScorer(op, kernels(), z.rows, c); };
    alignas(IndexScorer) std::byte counted[sizeof(IndexScorer)];
    m.scorer = make(base == nullptr ? static_cast<void*>(counted) : static_cast<void*>(at));
  } else {
    m.scores = c.take<float>(kIndexTile);
    m.masked = c.take<bool>(kIndexTile);
  }
  if (used != nullptr) *used = c.size();
  return m;
}

Memory carve(const IndexerProblem& op, const Sizes& z, std::byte* base, size_t* used) {
  Workspace c(base, kCacheLine);
  Memory m{};
  m.spans = c.take<Span>(op.batch);
  m.kept = c.take<uint64_t>(z.max_lists * z.k);
  m.num_kept = c.take<int64_t>(z.max_lists);
  carve_thread(op, z, nullptr, &m.thread_bytes);
  m.threads = c.take<std::byte>(static_cast<int64_t>(m.thread_bytes) * z.threads);
  if (used != nullptr) *used = c.size();
  return m;
}

class Run {
 public:
  Run(const IndexerProblem& op, const Sizes& sizes, const Memory& memory) : op_(op), z_(sizes), m_(memory) {}

  void operator()() {
    find_spans();
    if (num_blocks_ == 0) return;
    if (z_.max_splits > 1 && num_blocks_ < 2 * z_.threads) {
      splits_ = std::min(z_.max_splits, ceil_div(kItemsPerThread * z_.threads, num_blocks_));
    }
    parallel_for(num_blocks_ * splits_, z_.threads,
                 [&](int64_t item, int thread) { run_item(item / splits_, item % splits_, thread); });
    if (!op_.selects() || splits_ == 1) return;
    parallel_for(num_blocks_, z_.threads, [&](int64_t block, int thread) { merge_block(block, thread); });
  }

 private:
  // Rows [first, first + count) of sequence b.
  struct Block {
    int64_t b, first, count;
    const Span* span;
    KeyRange range[kMostRows];
    KeyRange all;  // the keys that at least one row sees
    bool whole;    // no row sees more keys than topk, so each takes all
  };

  void find_spans() {
    RowSplitter split(op_.cu, op_.fixed_q, op_.total_q);
    int64_t lists = 0;
    for (int64_t b = 0; b < op_.batch; ++b) {
      const RowRange r = split(b);
      m_.spans[b] = {r.first, r.count, op_.num_keys(b), num_blocks_, lists};
      num_blocks_ += ceil_div(r.count, z_.rows);
      lists += r.count;
    }
  }

  Block block_at(int64_t index) const {
    const Span* span = std::upper_bound(m_.spans, m_.spans + op_.batch, index,
                                        [](int64_t i, const Span& s) { return i < s.first_block; }) -
                       1;
    Block block{};
    block.b = span - m_.spans;
    block.span = span;
    block.first = (index - span->first_block) * z_.rows;
    block.count = std::min(z_.rows, span->num_rows - block.first);
    block.all = {std::numeric_limits<int64_t>::max(), 0};
    block.whole = op_.selects();
    for (int64_t r = 0; r < block.count; ++r) {
      const int64_t i = block.first + r;
      block.range[r] = op_.visible(span->first_row + i, i, span->num_rows, span->num_keys);
      block.whole = block.whole && block.range[r].count() <= op_.topk;
      if (block.range[r].count() == 0) continue;
      block.all = {std::min(block.all.begin, block.range[r].begin), std::max(block.all.end, block.range[r].end)};
    }
    if (block.all.end == 0) block.all.begin = 0;
    return block;
  }

  ThreadMemory thread_memory(int thread) const {
    return carve_thread(op_, z_, m_.threads + m_.thread_bytes * static_cast<size_t>(thread), nullptr);
  }

  void run_item(int64_t index, int64_t split_idx, int thread) {
    const Block block = block_at(index);
    if (op_.clear_scores && split_idx == 0) clear(block);
    if (block.whole) {
      if (splits_ == 1) write_whole(block);
      return;  // merge_block() writes it
    }
    const int64_t tiles = ceil_div(block.all.count(), kIndexTile);
    const int64_t begin = block.all.begin + tiles * split_idx / splits_ * kIndexTile;
    const int64_t end = std::min(block.all.end, block.all.begin + tiles * (split_idx + 1) / splits_ * kIndexTile);
    ThreadMemory memory = thread_memory(thread);
    TopkList lists[kMostRows];
    for (int64_t r = 0; r < block.count; ++r) lists[r] = list_of(memory, r);
    if (op_.reads_keys() && begin < end) {
      memory.scorer->load_queries(block.span->first_row + block.first, block.count);
    }
    for (int64_t t = begin; t < end; t += kIndexTile) {
      const int n = static_cast<int>(std::min<int64_t>(kIndexTile, end - t));
      if (op_.reads_keys()) {
        score_tile(block, t, n, *memory.scorer, lists);
      } else {
        read_tile(block, t, n, memory, lists);
      }
    }
    if (!op_.selects()) return;
    for (int64_t r = 0; r < block.count; ++r) {
      lists[r].finish();
      if (splits_ == 1) {
        write_row(block, r, lists[r].keys(), lists[r].count());
        continue;
      }
      const int64_t at = kept_at(block, r, split_idx);
      m_.num_kept[at] = lists[r].count();
      std::copy(lists[r].keys(), lists[r].keys() + lists[r].count(), m_.kept + at * z_.k);
    }
  }

  // The part of a tile that row r of a block sees, counted from the first key of the tile.
  static KeyRange part_of(const Block& block, int64_t r, int64_t tile, int n) {
    return {std::max<int64_t>(block.range[r].begin - tile, 0), std::min<int64_t>(block.range[r].end - tile, n)};
  }

  void score_tile(const Block& block, int64_t tile, int n, IndexScorer& scorer, TopkList* lists) {
    scorer.load_keys(block.b, tile, n);
    const int64_t step = scorer.rows_at_once();
    for (int64_t first = 0; first < block.count; first += step) {
      const int64_t end = std::min(first + step, block.count);
      bool needed = false;
      for (int64_t r = first; r < end; ++r) needed = needed || part_of(block, r, tile, n).count() > 0;
      if (!needed) continue;
      scorer.compute(first, end - first);
      for (int64_t r = first; r < end; ++r) {
        const KeyRange part = part_of(block, r, tile, n);
        if (part.count() <= 0) continue;
        const bool* masked = scorer.masked() != nullptr ? scorer.masked() + part.begin : nullptr;
        const float* scores = scorer.scores(r) + part.begin;
        if (op_.selects()) {
          lists[r].add(scores, masked, tile + part.begin, static_cast<int>(part.count()));
        } else {
          store_scores(block, r, tile + part.begin, part.count(), scores, masked);
        }
      }
    }
  }

  void read_tile(const Block& block, int64_t tile, int n, const ThreadMemory& memory, TopkList* lists) {
    const bool any_masked = find_masked(op_, block.b, tile, n, memory.masked);
    for (int64_t r = 0; r < block.count; ++r) {
      const KeyRange part = part_of(block, r, tile, n);
      if (part.count() <= 0) continue;
      const RowView& from = op_.scores;
      read_elements(from.dtype, from.at(row_of(block, r), tile + part.begin), from.head_stride, part.count(),
                    memory.scores);
      lists[r].add(memory.scores, any_masked ? memory.masked + part.begin : nullptr, tile + part.begin,
                   static_cast<int>(part.count()));
    }
  }

  void store_scores(const Block& block, int64_t r, int64_t first, int64_t n, const float* scores, const bool* masked) {
    const RowView& to = op_.scores;
    const int64_t row = row_of(block, r);
    write_elements(to.dtype, to.at(row, first), to.head_stride, n, scores);
    for (int64_t i = 0; masked != nullptr && i < n; ++i) {
      if (masked[i]) *reinterpret_cast<float*>(to.at(row, first + i)) = -std::numeric_limits<float>::infinity();
    }
  }

  void clear(const Block& block) {
    for (int64_t r = 0; r < block.count; ++r) {
      const KeyRange& seen = block.range[r];
      auto* const to = reinterpret_cast<float*>(op_.scores.at(row_of(block, r), 0));
      for (int64_t j = 0; j < op_.num_columns; ++j) {
        if (j == seen.begin) j = seen.end;
        if (j >= op_.num_columns) break;
        to[j * op_.scores.head_stride] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  void merge_block(int64_t index, int thread) {
    const Block block = block_at(index);
    if (block.whole) return write_whole(block);
    const ThreadMemory memory = thread_memory(thread);
    for (int64_t r = 0; r < block.count; ++r) {
      TopkList list = list_of(memory, r);
      for (int64_t split_idx = 0; split_idx < splits_; ++split_idx) {
        const int64_t at = kept_at(block, r, split_idx);
        list.add(m_.kept + at * z_.k, m_.num_kept[at]);
      }
      list.finish();
      write_row(block, r, list.keys(), list.count());
    }
  }

  // Writes every key that a row sees.
  void write_whole(const Block& block) {
    for (int64_t r = 0; r < block.count; ++r) {
      Entries entries(op_, block.b);
      int32_t* const to = entries_of(block, r);
      int64_t count = 0;
      for (int64_t t = block.range[r].begin; t < block.range[r].end; ++t) {
        const int64_t entry = entries(t);
        if (entry >= 0) to[count++ * op_.indices.head_stride] = static_cast<int32_t>(entry);
      }
      end_row(block, r, to, count);
    }
  }

  void write_row(const Block& block, int64_t r, const uint64_t* keys, int64_t count) {
    Entries entries(op_, block.b);
    int32_t* const to = entries_of(block, r);
    for (int64_t i = 0; i < count; ++i) {
      to[i * op_.indices.head_stride] = static_cast<int32_t>(entries(position_of(keys[i])));
    }
    end_row(block, r, to, count);
  }

  int32_t* entries_of(const Block& block, int64_t r) const {
    return reinterpret_cast<int32_t*>(op_.indices.at(row_of(block, r), 0));
  }

  void end_row(const Block& block, int64_t r, int32_t* to, int64_t count) {
    for (int64_t i = count; i < op_.topk; ++i) to[i * op_.indices.head_stride] = -1;
    if (op_.topk_length == nullptr) return;
    op_.topk_length[row_of(block, r) * op_.topk_length_stride] = static_cast<int32_t>(count);
  }

  int64_t row_of(const Block& block, int64_t r) const { return block.span->first_row + block.first + r; }
  int64_t kept_at(const Block& block, int64_t r, int64_t split_idx) const {
    return (block.span->lists_before + block.first + r) * splits_ + split_idx;
  }
  TopkList list_of(const ThreadMemory& memory, int64_t r) const {
    return {memory.lists + r * z_.capacity, memory.spare, z_.k, z_.capacity};
  }

  const IndexerProblem& op_;
  const Sizes& z_;
  const Memory& m_;
  int64_t num_blocks_ = 0, splits_ = 1;
};

}  // namespace

size_t indexer_workspace_size(const IndexerProblem& op) {
  const Sizes sizes(op);
  size_t bytes = 0;
  carve(op, sizes, nullptr, &bytes);
  return bytes;
}

void run_indexer(const IndexerProblem& op, void* workspace, size_t bytes) {
  const Sizes sizes(op);  // once: the number of threads may change at any time
  size_t need = 0;
  carve(op, sizes, nullptr, &need);
  check_workspace("the indexer", need, workspace, bytes);
  if (op.total_q == 0 || op.batch == 0) return;
  const Memory memory = carve(op, sizes, static_cast<std::byte*>(workspace), nullptr);
  Run(op, sizes, memory)();
}

}  // namespace attune::cpu
