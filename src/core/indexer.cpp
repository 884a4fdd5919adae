// SPDX-License-Identifier: Apache-2.0
#include "core/indexer.h"

#include <string>

#include "core/dtype.h"
#include "core/problem.h"

namespace attune {
namespace {

constexpr int64_t kMostSlots = int64_t{1} << 31;  // indices are int32
constexpr int64_t kMostRows = int64_t{1} << 31;   // sizes of the workspace stay far from overflow
constexpr int64_t kMostHeads = int64_t{1} << 16;

const char* kind_name(int32_t kind) {
  constexpr const char* kNames[] = {"ATTUNE_INDEXER_TOPK", "ATTUNE_INDEXER_SCORES", "ATTUNE_INDEXER_SELECT"};
  return kNames[kind];
}

// The tensor whose leading axes say how many rows there are.
struct Rows {
  const char* name;
  const attune_tensor* tensor;
  int trailing;  // axes behind those of the rows

  bool batched() const { return tensor->rank == trailing + 2; }
};

// Another tensor [rows.., last] with the same rows.
void check_rows(const char* name, const attune_tensor& t, const Rows& rows, std::initializer_list<int32_t> dtypes,
                Data data) {
  check_tensor(name, t, dtypes, {rows.batched() ? 3 : 2}, data);
  const Name as("as ", rows.name);
  for (int i = 0; i + 1 < t.rank; ++i) check_extent(name, t, i, rows.tensor->shape[i], as);
}

void absent(const char* name, const attune_tensor& t, int32_t kind) {
  require(!present(t), name, " is set, but kind is ", kind_name(kind), ", which does not use it");
}

void read_sequences(IndexerProblem& p, const attune_indexer& op, const Rows& rows, Data data) {
  const attune_tensor& t = *rows.tensor;
  p.total_q = rows.batched() ? t.shape[0] * t.shape[1] : t.shape[0];
  if (rows.batched()) {
    require(!present(op.cu_seqlens_q), "cu_seqlens_q is set, but ", rows.name, " has a batch axis (rank ", t.rank, ")");
    p.batch = t.shape[0];
    p.fixed_q = t.shape[1];
  } else if (present(op.cu_seqlens_q)) {
    p.cu = int_vector("cu_seqlens_q", op.cu_seqlens_q, -1, "batch + 1", data);
    p.batch = p.cu.cols - 1;
  } else {
    p.batch = p.total_q;
    p.fixed_q = 1;
  }
  require(p.total_q <= kMostRows && p.batch <= kMostRows, rows.name, " has ", p.total_q, " rows of ", p.batch,
          " sequences; at most ", kMostRows, " are allowed");
  require(present(op.seqused_kv), "seqused_kv is absent; the indexer needs the keys of each sequence");
  p.seqused = int_vector("seqused_kv", op.seqused_kv, p.batch, "batch", data);
  p.key_begin = int_vector("key_begin", op.key_begin, p.total_q, "total_q", data);
  p.key_end = int_vector("key_end", op.key_end, p.total_q, "total_q", data);
}

void read_cache(IndexerProblem& p, const attune_indexer& op, Data data) {
  const attune_kv_cache& c = op.cache;
  if (!present(c.k) && p.kind != ATTUNE_INDEXER_SELECT) {
    fail(ATTUNE_INVALID_ARGUMENT, "cache.k is absent; ", kind_name(p.kind), " reads the index keys from it");
  }
  require(!present(c.v), "cache.v is set; the indexer has no values");
  require(!present(c.k) || c.format == ATTUNE_KV_PLAIN, "cache.format is ", c.format,
          "; index keys are ATTUNE_KV_PLAIN (0)");
  require(c.ring_capacity == 0, "cache.ring_capacity is ", c.ring_capacity, "; the indexer takes no ring, so 0");
  // SELECT reads tables only, and no key: its cache may have no data.
  const Data keys = p.reads_keys() ? data : Data::kOptional;
  p.cache = make_kv_cache("cache", c, CacheUse::kSequences, p.batch, p.head_dim, 1, keys);
  if (!p.cache) return;
  require(p.cache.num_heads == 1, "cache.k has ", p.cache.num_heads, " heads; index keys have 1");
  if (data == Data::kRequired) {  // SELECT needs no keys, but it reads the tables
    if (present(c.page_table)) check_tensor("cache.page_table", c.page_table, {ATTUNE_INT32}, {1, 2}, data);
    if (present(c.batch_index)) check_tensor("cache.batch_index", c.batch_index, {ATTUNE_INT32}, {1, 2}, data);
  }
}

void read_queries(IndexerProblem& p, const attune_indexer& op, const Rows& rows, Data data) {
  p.num_heads = op.q.shape[op.q.rank - 2];
  p.q = row_view(op.q);
  require(present(op.weights), "weights is absent; ", kind_name(p.kind), " needs it");
  check_rows("weights", op.weights, rows, {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16}, data);
  check_extent("weights", op.weights, op.weights.rank - 1, p.num_heads, "num_heads, as q");
  p.weights = row_view(op.weights, false);
  if (!present(op.q_scale)) return;
  check_rows("q_scale", op.q_scale, rows, {ATTUNE_FLOAT32}, data);
  check_extent("q_scale", op.q_scale, op.q_scale.rank - 1, p.num_heads, "num_heads, as q");
  p.q_scale = row_view(op.q_scale, false);
}

void read_scores(IndexerProblem& p, const attune_indexer& op, const Rows& rows, Data data) {
  require(present(op.scores), "scores is absent; ", kind_name(p.kind), " needs it");
  check_rows("scores", op.scores, rows, {ATTUNE_FLOAT32}, data);
  if (p.kind == ATTUNE_INDEXER_SCORES) check_no_overlap("scores", op.scores);
  p.scores = row_view(op.scores, false);
  p.num_columns = op.scores.shape[op.scores.rank - 1];
  p.max_seqlen_kv = std::min(p.max_seqlen_kv, p.num_columns);
}

void read_slot_table(IndexerProblem& p, const attune_indexer& op, Data data) {
  if (!present(op.slot_table)) {
    require(op.slot_page_size == 0 && op.slot_pages == 0, "slot_page_size is ", op.slot_page_size, " and slot_pages ",
            op.slot_pages, ", but slot_table is absent");
    if (p.slots) {
      require(static_cast<bool>(p.cache), "slot_table and cache.k are absent, but form is ATTUNE_INDEX_SLOTS");
      require(p.cache.num_pages <= kMostSlots / p.cache.page_size, "cache has ", p.cache.num_pages, " pages of ",
              p.cache.page_size, " tokens; int32 indices name at most ", kMostSlots, " slots");
    }
    return;
  }
  check_tensor("slot_table", op.slot_table, {ATTUNE_INT32}, {2}, data);
  check_extent("slot_table", op.slot_table, 0, p.batch, "batch");
  require(op.slot_page_size >= 1 && op.slot_page_size <= kMostSlots, "slot_page_size is ", op.slot_page_size,
          "; with slot_table it must be 1..", kMostSlots);
  require(op.slot_pages >= 0 && op.slot_pages <= kMostSlots / op.slot_page_size, "slot_pages is ", op.slot_pages,
          "; with slot_page_size ", op.slot_page_size, " it must be 0..", kMostSlots / op.slot_page_size,
          ", so that int32 names every slot");
  p.slot_table = int_view(op.slot_table);
  p.slot_page_size = op.slot_page_size;
  p.slot_pages = op.slot_pages;
  p.max_seqlen_kv = std::min(p.max_seqlen_kv, op.slot_table.shape[1] * op.slot_page_size);
}

void read_selection(IndexerProblem& p, const attune_indexer& op, const Rows& rows, Data data) {
  require(op.form == ATTUNE_INDEX_SLOTS || op.form == ATTUNE_INDEX_POSITIONS, "form is ", op.form,
          "; it must be one of attune_index_form (0..1)");
  p.slots = op.form == ATTUNE_INDEX_SLOTS;
  require(present(op.indices), "indices is absent; ", kind_name(p.kind), " writes it");
  check_rows("indices", op.indices, rows, {ATTUNE_INT32}, data);
  p.topk = op.indices.shape[op.indices.rank - 1];
  require(p.topk >= 1, "indices.shape[", op.indices.rank - 1, "] is ", p.topk, "; topk must be at least 1");
  check_no_overlap("indices", op.indices);
  p.indices = row_view(op.indices, false);
  read_slot_table(p, op, data);
  if (!present(op.topk_length)) return;
  check_tensor("topk_length", op.topk_length, {ATTUNE_INT32}, {1}, data);
  check_extent("topk_length", op.topk_length, 0, p.total_q, "total_q");
  check_no_overlap("topk_length", op.topk_length);
  p.topk_length = static_cast<int32_t*>(op.topk_length.data);
  p.topk_length_stride = op.topk_length.shape[0] > 1 ? op.topk_length.stride[0] : 0;
}

}  // namespace

IndexerProblem make_indexer(const attune_indexer& op, Data data) {
  require(op.kind >= ATTUNE_INDEXER_TOPK && op.kind <= ATTUNE_INDEXER_SELECT, "kind is ", op.kind,
          "; it must be one of attune_indexer_kind (0..2)");
  check_flag("causal", op.causal);
  check_flag("clear_scores", op.clear_scores);
  IndexerProblem p;
  p.kind = op.kind;
  p.causal = op.causal == 1;
  p.clear_scores = op.clear_scores == 1;
  Rows rows{};
  if (p.reads_keys()) {
    check_tensor("q", op.q,
                 {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8},
                 {3, 4}, data);
    const int64_t heads = op.q.shape[op.q.rank - 2];
    p.head_dim = op.q.shape[op.q.rank - 1];
    require(heads >= 1 && heads <= kMostHeads, "q has ", heads, " heads; it must have 1..", kMostHeads);
    require(p.head_dim >= 1 && p.head_dim <= kMaxHeadDim, "q has head_dim ", p.head_dim, "; it must be 1..",
            kMaxHeadDim);
    rows = {"q", &op.q, 2};
  } else {
    absent("q", op.q, op.kind);
    absent("q_scale", op.q_scale, op.kind);
    absent("weights", op.weights, op.kind);
    require(present(op.scores), "scores is absent; ", kind_name(op.kind), " reads it");
    check_tensor("scores", op.scores, {ATTUNE_FLOAT32}, {2, 3}, data);
    rows = {"scores", &op.scores, 1};
  }
  read_sequences(p, op, rows, data);
  read_cache(p, op, data);
  require(op.max_seqlen_kv >= 0, "max_seqlen_kv is ", op.max_seqlen_kv, "; it must be >= 0");
  p.max_seqlen_kv = op.max_seqlen_kv > 0 ? op.max_seqlen_kv : kMostSlots - 1;
  p.max_seqlen_kv = std::min(p.max_seqlen_kv, kMostSlots - 1);
  if (p.cache) p.max_seqlen_kv = std::min(p.max_seqlen_kv, p.cache.capacity());
  if (p.reads_keys()) read_queries(p, op, rows, data);
  if (op.kind == ATTUNE_INDEXER_TOPK) {
    absent("scores", op.scores, op.kind);
  } else {
    read_scores(p, op, rows, data);
  }
  require(op.kind == ATTUNE_INDEXER_SCORES || !p.clear_scores, "clear_scores is 1, but kind is ", kind_name(op.kind),
          ", which writes no scores");
  if (p.selects()) {
    read_selection(p, op, rows, data);
  } else {
    absent("indices", op.indices, op.kind);
    absent("topk_length", op.topk_length, op.kind);
    absent("slot_table", op.slot_table, op.kind);
  }
  return p;
}

}  // namespace attune
