// SPDX-License-Identifier: Apache-2.0
// attune_cache_op of a case.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "number.h"
#include "op_problem.h"

namespace attune::cases {
namespace {

constexpr double kBad = 0.1;  // share of bad entries where contents may be anything

attune_dtype dtype_of(const attune_tensor& t) { return static_cast<attune_dtype>(t.dtype); }

}  // namespace

CacheOpProblem::CacheOpProblem(const Case& spec, Memory& memory)
    : case_(spec), arena_(memory), random_(spec.name, static_cast<uint64_t>(spec.head_dim_qk)) {
  const Case& c = case_;
  op_.struct_size = sizeof(op_);
  op_.kind = c.op.cache_op;
  op_.power_of_two_scales = c.prologue.power_of_two_scales ? 1 : 0;
  packed_ = c.cache.format != ATTUNE_KV_PLAIN;
  by_slots_ = c.kv == KvSource::kSlots;
  stores_ = op_.kind == ATTUNE_CACHE_APPEND || op_.kind == ATTUNE_CACHE_QUANTIZE;
  place();
  add_cache();
  op_.k = add_dense("k", c.head_dim_qk);
  if (op_.cache.v.dtype != ATTUNE_DTYPE_NONE) op_.v = add_dense("v", c.head_dim_v);
  if (!by_slots_) {
    add_tables();
    add_sequences();
  } else if (op_.kind == ATTUNE_CACHE_APPEND || op_.kind == ATTUNE_CACHE_GATHER) {
    add_slots();
  }
  if (c.op.any_contents) {
    fill_cache();
  } else if (!stores_) {
    fill_needed();
  }
  arena_.upload();
}

// How many pages there are, and how many of them a sequence has.
void CacheOpProblem::place() {
  const Case& c = case_;
  const int64_t slack = c.cache.slack;
  page_size_ = c.cache.page_size;
  tokens_ = c.total_q();
  if (by_slots_) {
    pages_ = c.op.pages > 0 ? c.op.pages : ceil_div(tokens_, page_size_) + slack;
    return;
  }
  for (int64_t b = 0; b < c.batch(); ++b) {
    const int64_t added = op_.kind == ATTUNE_CACHE_APPEND ? c.seqlens_q[static_cast<size_t>(b)] : 0;
    capacity_.push_back(c.cache.ring_capacity > 0 ? c.cache.ring_capacity : c.stored(b) + added);
  }
  const int64_t most = std::max<int64_t>(1, *std::max_element(capacity_.begin(), capacity_.end()));
  if (c.kv == KvSource::kContiguous) {
    if (c.op.pages == 0) page_size_ = most;
    pages_ = std::max(c.op.pages, c.batch() + (c.cache.batch_index ? slack : 0));
  } else {
    columns_ = c.op.columns > 0 ? c.op.columns : ceil_div(most, page_size_);
    if (c.op.columns > 0) std::fill(capacity_.begin(), capacity_.end(), columns_ * page_size_);
    pages_ = slack;
    for (const int64_t tokens : capacity_) pages_ += ceil_div(tokens, page_size_);
    if (c.op.pages > 0) pages_ = c.op.pages;
  }
  // Rows that no sequence owns.
  if (c.queries == QueryShape::kRagged && c.strides == StrideMode::kOdd && !c.op.any_contents) tokens_ += 2;
}

Layout CacheOpProblem::layout(std::vector<int64_t> padding) const {
  return {{}, case_.strides == StrideMode::kDense ? std::vector<int64_t>() : std::move(padding), 0};
}

double CacheOpProblem::dense_value() {
  if (random_.chance(0.02)) return std::copysign(0.0, random_.normal());
  const double x = random_.normal() * (random_.chance(0.02) ? 1e4 : 1.0);
  if (case_.op.infinities && random_.chance(0.0005)) return std::copysign(std::numeric_limits<double>::infinity(), x);
  return x;
}

double CacheOpProblem::odd_page() {
  return static_cast<double>(random_.pick<int64_t>({-1, pages_, 0x7fffff00, -1000000}));
}

attune_tensor CacheOpProblem::add_integers(const char* name, attune_dtype dtype, const std::vector<int64_t>& values) {
  const attune_tensor t = arena_.add(name, dtype, {static_cast<int64_t>(values.size())});
  for_each_element(t, [&](const int64_t* index, void* element) {
    encode(dtype, static_cast<double>(values[static_cast<size_t>(index[0])]), element);
  });
  return t;
}

attune_tensor CacheOpProblem::add_dense(const char* name, int64_t dim) {
  const attune_tensor t = arena_.add(name, case_.dtype, {tokens_, case_.num_heads_kv, dim}, layout({0, 1, 3}));
  const int64_t owned = case_.total_q();
  if (stores_) {
    for_each_element(t, [&](const int64_t* index, void* element) {
      if (index[0] < owned) encode(case_.dtype, dense_value(), element);
    });
  }
  return t;
}

void CacheOpProblem::add_cache() {
  const Case& c = case_;
  attune_kv_cache& cache = op_.cache;
  cache.format = c.cache.format;
  cache.layout = packed_ ? ATTUNE_KV_BYTES : c.cache.layout;
  cache.ring_capacity = by_slots_ ? 0 : c.cache.ring_capacity;
  if (c.cache.format == ATTUNE_KV_MLA_656) {
    cache.k = arena_.add("cache.k", ATTUNE_UINT8, {pages_, page_size_, 656}, layout({0, 0, random_.integer(0, 3)}));
  } else if (packed_) {
    cache.k = arena_.add("cache.k", ATTUNE_UINT8, {pages_, ceil_div(page_size_ * 584, 576) * 576},
                         layout({0, random_.integer(0, 3)}));
    cache.page_size = page_size_;
  } else {
    const auto shape = [&](bool is_v, int64_t dim) {
      return plane_shape(cache.layout, is_v, pages_, page_size_, c.num_heads_kv, dim,
                         16 / element_size(c.cache_dtype()));
    };
    const bool padded = cache.layout != ATTUNE_KV_XPACKED;
    cache.k =
        arena_.add("cache.k", c.cache_dtype(), shape(false, c.head_dim_qk), padded ? layout({0, 0, 0, 1}) : Layout());
    if (!c.shared_kv)
      cache.v =
          arena_.add("cache.v", c.cache_dtype(), shape(true, c.head_dim_v), padded ? layout({0, 1, 0, 0}) : Layout());
  }
  if (!packed_ && c.cache.scales != ScaleMode::kNone) add_scales();
}

// Scales per token and head are written by stores.
void CacheOpProblem::add_scales() {
  const Case& c = case_;
  for (const bool is_v : {false, true}) {
    if (is_v && op_.cache.v.dtype == ATTUNE_DTYPE_NONE) continue;
    attune_tensor& t = is_v ? op_.cache.v_scale : op_.cache.k_scale;
    t = arena_.add(is_v ? "cache.v_scale" : "cache.k_scale", ATTUNE_FLOAT32,
                   scale_shape(c.cache.scales, op_.cache.layout, pages_, page_size_, c.num_heads_kv,
                               is_v ? c.head_dim_v : c.head_dim_qk));
    if (scales_by_token(c.cache.scales) && stores_ && !c.op.any_contents) continue;
    for_each_element(t, [&](const int64_t*, void* element) {
      // Also far from 1, where quotients leave fp32's range.
      const double scale = random_.chance(0.1) ? std::ldexp(1.0, static_cast<int>(random_.integer(-140, 120))) : 0.01;
      encode(ATTUNE_FLOAT32, scale * random_.uniform(1, 2), element);
    });
  }
}

// needed: entries of each row that say something. No page stands there twice, so that no slot is written twice.
attune_tensor CacheOpProblem::add_table(const char* name, const std::vector<int64_t>& needed) {
  const int64_t total = std::accumulate(needed.begin(), needed.end(), int64_t{0});
  std::vector<double> pages;
  for (int64_t i = 0; i < std::max(total, pages_); ++i) {
    const bool bad = i >= pages_ || (case_.op.any_contents && random_.chance(kBad));
    pages.push_back(bad ? odd_page() : static_cast<double>(i));
  }
  random_.shuffle(pages);
  const attune_tensor table = arena_.add(name, ATTUNE_INT32, {case_.batch(), columns_});
  size_t next = 0;
  for_each_element(table, [&](const int64_t* index, void* element) {
    const bool says = index[1] < needed[static_cast<size_t>(index[0])];
    encode(ATTUNE_INT32, says ? pages[next++] : odd_page(), element);
  });
  return table;
}

void CacheOpProblem::add_tables() {
  if (case_.kv == KvSource::kContiguous) {
    if (!case_.cache.batch_index) return;
    op_.cache.batch_index = add_table("cache.batch_index", std::vector<int64_t>(capacity_.size(), 1));
    op_.cache.batch_index.rank = 1;
    return;
  }
  std::vector<int64_t> needed;
  for (const int64_t tokens : capacity_) needed.push_back(ceil_div(tokens, page_size_));
  op_.cache.page_table = add_table("cache.page_table", needed);
  if (case_.cache.separate_v_table && op_.cache.v.dtype != ATTUNE_DTYPE_NONE)
    op_.cache.v_page_table = add_table("cache.v_page_table", needed);
}

void CacheOpProblem::add_slots() {
  const int64_t slots = pages_ * page_size_;
  std::vector<int64_t> values;
  if (op_.kind == ATTUNE_CACHE_GATHER) {
    for (int64_t i = 0; i < tokens_; ++i)
      values.push_back(random_.chance(kBad) ? random_.pick<int64_t>({-1, -1000000, slots, 0x7fffff00})
                                            : random_.integer(0, slots - 1));
  } else {
    // No slot twice; some tokens are left out.
    for (int64_t i = 0; i < std::max(tokens_, slots); ++i)
      values.push_back(i < slots && !random_.chance(kBad) ? i : -1 - i);
    random_.shuffle(values);
    values.resize(static_cast<size_t>(tokens_));
  }
  op_.slots = add_integers("slots", ATTUNE_INT64, values);
}

void CacheOpProblem::add_sequences() {
  const Case& c = case_;
  const bool any = c.op.any_contents;
  const auto perhaps_odd = [&](int64_t value, int64_t high) {
    return any && random_.chance(kBad) ? random_.pick<int64_t>({-1, -1000000, high + 1, 0x7fffff00}) : value;
  };
  std::vector<int64_t> used, offsets = {0};
  for (int64_t b = 0; b < c.batch(); ++b) {
    used.push_back(perhaps_odd(c.stored(b), columns_ * page_size_ + 3));
    offsets.push_back(offsets.back() + c.seqlens_q[static_cast<size_t>(b)]);
  }
  op_.seqused_kv = add_integers("seqused_kv", ATTUNE_INT32, used);
  if (c.queries == QueryShape::kRagged) {
    if (any) {
      for (int64_t& offset : offsets) offset = perhaps_odd(random_.integer(0, tokens_), tokens_);
      if (random_.chance(0.7)) std::sort(offsets.begin(), offsets.end());  // else they decrease here and there
    }
    op_.cu_seqlens = add_integers("cu_seqlens", ATTUNE_INT32, offsets);
  }
  if (!c.finished.empty() && op_.kind == ATTUNE_CACHE_APPEND)
    op_.finished = add_integers("finished", ATTUNE_UINT8, c.finished);
}

// All of it: what a table says may be read.
void CacheOpProblem::fill_cache() {
  for (const attune_tensor* t : {&op_.cache.k, &op_.cache.v}) {
    for_each_element(*t, [&](const int64_t*, void* element) {
      // Any bytes are a packed cache, but for scales of NaN.
      if (packed_) {
        *static_cast<uint8_t*>(element) = static_cast<uint8_t>(random_.integer(0, 126));
      } else {
        encode(dtype_of(*t), 3 * dense_value(), element);
      }
    });
  }
}

void CacheOpProblem::fill_slot(int64_t slot, bool is_v) {
  const attune_kv_cache& cache = op_.cache;
  const int64_t page = slot / page_size_, offset = slot % page_size_;
  const auto fill_bytes = [&](std::byte* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(random_.integer(0, 126));
  };
  if (packed_) {
    const PackedRow row = packed_row(cache, page, offset);
    fill_bytes(row.codes, row.bytes);
    fill_bytes(row.scales, row.scale_bytes);
    return;
  }
  for (int64_t h = 0; h < case_.num_heads_kv; ++h) {
    for (int64_t d = 0; d < (is_v ? case_.head_dim_v : case_.head_dim_qk); ++d)
      encode(case_.cache_dtype(), 3 * dense_value(), pool_element(cache, is_v, page, offset, h, d));
  }
}

// The slots that a fetch reads; the others stay poison.
void CacheOpProblem::fill_needed() {
  const auto fill = [&](int64_t k_slot, int64_t v_slot) {
    fill_slot(k_slot, false);
    if (op_.cache.v.dtype != ATTUNE_DTYPE_NONE) fill_slot(v_slot, true);
  };
  if (by_slots_) {
    for (int64_t i = 0; i < tokens_; ++i) {
      const int64_t slot = op_.slots.dtype == ATTUNE_DTYPE_NONE
                               ? i
                               : static_cast<int64_t>(decode(ATTUNE_INT64, element_at(op_.slots, {i})));
      if (slot >= 0 && slot < pages_ * page_size_) fill(slot, slot);
    }
    return;
  }
  const int64_t ring = op_.cache.ring_capacity;
  for (int64_t b = 0; b < case_.batch(); ++b) {
    const int64_t used = case_.stored(b), rows = std::min(used, case_.seqlens_q[static_cast<size_t>(b)]);
    for (int64_t t = ring > 0 ? std::max<int64_t>(0, used - ring) : 0; t < rows; ++t)
      fill(reference::cache_slot(op_.cache, b, t, false), reference::cache_slot(op_.cache, b, t, true));
  }
}

std::string CacheOpProblem::run(void* stream) const {
  const attune_cache_op op = device();
  const attune_status status = attune_cache_op_run(&op, arena_.memory().device(), stream);
  return status == ATTUNE_OK ? "" : std::string("attune_cache_op_run: ") + attune_last_error();
}

Report CacheOpProblem::check() {
  if (!exact_) exact_ = reference::cache_op(op_);
  Checker checker;
  Snapshot snapshot(arena_);
  check_writes(op_.cache, exact_->writes, op_.power_of_two_scales != 0, snapshot, checker);
  if (!stores_) check_fetched(op_, *exact_, snapshot, checker);
  snapshot.check(checker);
  return checker.report();
}

void check_fetched(const attune_cache_op& host, const reference::CacheMoves& moves, Snapshot& snapshot,
                   Checker& checker) {
  for (const bool is_v : {false, true}) {
    const attune_tensor dense = snapshot.after(is_v ? host.v : host.k);
    if (dense.dtype == ATTUNE_DTYPE_NONE) continue;
    const std::vector<double>& exact = is_v ? moves.v : moves.k;
    size_t i = 0;
    for_each_element(dense, [&](const int64_t* index, void* element) {
      const double expected = exact[i++];
      if (!moves.written[static_cast<size_t>(index[0])]) return;
      snapshot.allow(element, element_size(dtype_of(dense)));
      checker.element(is_v ? "v" : "k", index[0], index[1], index[2], dtype_of(dense), expected,
                      std::fabs(expected) * 0x1p-23 + 0x1p-150, decode(dtype_of(dense), element));
    });
  }
}

std::string CacheOpProblem::describe() const {
  const Case& c = case_;
  const char* format = !packed_ ? "" : c.cache.format == ATTUNE_KV_MLA_656 ? ", 656" : ", 584";
  return "kind " + std::to_string(op_.kind) + format + ", cache " + short_name(c.cache_dtype()) + ", dense " +
         short_name(c.dtype) + ", dim " + std::to_string(c.head_dim_qk) + ", layout " +
         std::to_string(op_.cache.layout) + (c.strides == StrideMode::kDense ? ", aligned" : "") +
         (by_slots_ ? ", by slots" : "") + (op_.power_of_two_scales != 0 ? ", powers of two" : "");
}

}  // namespace attune::cases
