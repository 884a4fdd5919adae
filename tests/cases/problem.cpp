// SPDX-License-Identifier: Apache-2.0
// Queries, dense keys, scores and outputs of a problem. Masks are in mask.cpp, the cache is in problem_cache.cpp, the
// prologue in problem_prologue.cpp.
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace attune::cases {

Problem::Problem(Case spec, Memory& memory, std::byte unseen)
    : case_(std::move(spec)), arena_(memory, unseen), random_(case_.name, static_cast<uint64_t>(case_.head_dim_qk)) {
  const Case& c = case_;
  host_.struct_size = sizeof(host_);
  host_.softmax_scale = static_cast<float>(c.softmax_scale);
  host_.softcap = static_cast<float>(c.softcap);
  host_.batch_invariant = c.batch_invariant;
  int64_t row = 0;
  for (int64_t b = 0; b < c.batch(); ++b) {
    first_row_.push_back(row);
    row += c.seqlens_q[static_cast<size_t>(b)];
  }
  // Rows that no sequence owns: they must stay untouched.
  num_rows_ = row + (c.queries == QueryShape::kRagged && c.strides == StrideMode::kOdd ? 2 : 0);
  if (c.data == "equal") {
    for (int64_t d = 0; d < c.head_dim_qk; ++d) shared_key_.push_back(random_.normal());
  }
  build_mask();
  seen_ = Visibility(c, host_.mask_bits).seen_keys();
  choose_bad_key();
  build_queries();
  build_beams();
  if (c.has_cache()) {
    build_cache();
  } else {
    build_dense();
  }
  build_sparse();
  build_scores();
  build_prologue();
  arena_.fill_with(kPoison);
  build_outputs();
  arena_.upload();
}

double Problem::key_value(int64_t d) {
  return shared_key_.empty() ? random_.normal() : shared_key_[static_cast<size_t>(d)];
}
double Problem::value_value() { return case_.data == "ones_v" ? 1.0 : random_.normal(); }

void Problem::fill_normal(const attune_tensor& t, double scale) {
  for_each_element(t, [&](const int64_t*, void* element) {
    encode(static_cast<attune_dtype>(t.dtype), scale * random_.normal(), element);
  });
}

attune_tensor Problem::add_vector(const char* name, attune_dtype dtype, const std::vector<int64_t>& values) {
  const attune_tensor t = arena_.add(name, dtype, {static_cast<int64_t>(values.size())});
  for_each_element(t, [&](const int64_t* index, void* element) {
    encode(dtype, static_cast<double>(values[static_cast<size_t>(index[0])]), element);
  });
  return t;
}

attune_tensor Problem::add_rows(const char* name, attune_dtype dtype, int64_t rows, int64_t seqlen, int64_t heads,
                                int64_t dim) {
  std::vector<int64_t> shape = {rows, heads, dim};
  if (seqlen >= 0) shape = {case_.batch(), seqlen, heads, dim};
  const size_t rank = shape.size();
  Layout layout;
  if (case_.strides == StrideMode::kOdd) {
    layout.padding.assign(rank, 0);
    layout.padding[rank - 1] = 3;
    layout.padding[rank - 2] = 5;
    layout.offset = static_cast<size_t>(element_size(dtype));
  } else if (case_.strides == StrideMode::kTransposed) {
    layout.order = rank == 3 ? std::vector<int>{1, 0, 2} : std::vector<int>{2, 0, 1, 3};
  }
  return arena_.add(name, dtype, shape, layout);
}

void Problem::build_queries() {
  const Case& c = case_;
  const int64_t seqlen = c.queries == QueryShape::kFixed ? c.max_seqlen_q() : -1;
  const int64_t own_kv = c.new_tokens || c.kv == KvSource::kDense ? c.num_heads_kv : 0;
  if (c.strides == StrideMode::kPacked && own_kv > 0) {
    // One row holds q, k and v of a token.
    const attune_tensor qkv =
        arena_.add("qkv", c.dtype, {num_rows_, c.num_heads_q + (c.shared_kv ? 1 : 2) * own_kv, c.head_dim_qk});
    const auto slice = [&](int64_t first, int64_t heads) {
      attune_tensor t = qkv;
      if (num_rows_ > 0) t.data = element_at(qkv, {0, first, 0});  // no tensor without elements has another address
      t.shape[1] = heads;
      return t;
    };
    host_.q = slice(0, c.num_heads_q);
    host_.k = slice(c.num_heads_q, own_kv);
    if (!c.shared_kv) host_.v = slice(c.num_heads_q + own_kv, own_kv);
  } else {
    host_.q = add_rows("q", c.dtype, num_rows_, seqlen, c.num_heads_q, c.head_dim_qk - c.q_rope);
    if (c.q_rope > 0) host_.q_rope = add_rows("q_rope", c.dtype, num_rows_, seqlen, c.num_heads_q, c.q_rope);
    if (c.new_tokens) {
      host_.k = add_rows("k", c.dtype, num_rows_, seqlen, c.num_heads_kv, c.head_dim_qk);
      if (!c.shared_kv) host_.v = add_rows("v", c.dtype, num_rows_, seqlen, c.num_heads_kv, c.head_dim_v);
    }
  }
  if (c.queries == QueryShape::kRagged) {
    std::vector<int64_t> offsets = first_row_;
    offsets.push_back(c.total_q());
    host_.cu_seqlens_q = add_vector("cu_seqlens_q", ATTUNE_INT32, offsets);
  }
  // 8-bit inputs are codes; their scales bring them back to about 1.
  const double magnitude = c.dtype == ATTUNE_INT8 ? 32.0 : 1.0;
  const double q_magnitude =
      magnitude * (c.data == "spread" ? 30.0 : c.data == "far" ? 3000.0 : c.data == "huge" ? 1e10 : 1.0);
  for (int64_t b = 0; b < c.batch(); ++b) {
    if (is_inactive(c, b) && c.poison) continue;
    for (int64_t i = 0; i < c.seqlens_q[static_cast<size_t>(b)]; ++i) {
      const bool rank4 = host_.q.rank == 4;
      const auto row_at = [&](const attune_tensor& t, int64_t h, int64_t d) {
        return rank4 ? element_at(t, {b, i, h, d}) : element_at(t, {first_row(b) + i, h, d});
      };
      for (int64_t h = 0; h < c.num_heads_q; ++h) {
        const int64_t dim_q = c.head_dim_qk - c.q_rope;
        for (int64_t d = 0; d < c.head_dim_qk; ++d) {
          void* const to = d < dim_q ? row_at(host_.q, h, d) : row_at(host_.q_rope, h, d - dim_q);
          encode(c.dtype, q_magnitude * random_.normal(), to, true);
        }
      }
      if (!c.new_tokens) continue;
      // A new key that nobody sees may still be appended.
      if (seen_[static_cast<size_t>(b)][static_cast<size_t>(c.stored(b) + i)] == 0 && !c.prologue.append) continue;
      for (int64_t g = 0; g < c.num_heads_kv; ++g) {
        for (int64_t d = 0; d < c.head_dim_qk; ++d)
          encode(c.dtype, magnitude * key_value(d), row_at(host_.k, g, d), true);
        if (c.shared_kv) continue;
        for (int64_t d = 0; d < c.head_dim_v; ++d)
          encode(c.dtype, magnitude * value_value(), row_at(host_.v, g, d), true);
      }
      if (b == bad_batch_ && c.stored(b) + i == bad_key_) spoil_dense(b, i, first_row(b) + i);
    }
  }
}

void Problem::spoil_dense(int64_t b, int64_t row_in_sequence, int64_t row) {
  const attune_tensor& t = case_.plant == "nan_k" || case_.shared_kv ? host_.k : host_.v;
  spoil(case_.dtype, t.rank == 4 ? element_at(t, {b, row_in_sequence, 0, 1}) : element_at(t, {row, 0, 1}));
}

void Problem::build_dense() {
  const Case& c = case_;
  const bool fixed = c.queries == QueryShape::kFixed;
  const int64_t longest = c.seqlens_kv.empty() ? 0 : *std::max_element(c.seqlens_kv.begin(), c.seqlens_kv.end());
  const bool uneven = std::any_of(c.seqlens_kv.begin(), c.seqlens_kv.end(), [&](int64_t n) { return n != longest; });
  const bool seqused = c.seqused || (fixed && uneven);
  // Where each sequence's keys start, and how many rows it owns.
  std::vector<int64_t> first = {0};
  for (int64_t b = 0; b < c.batch(); ++b) first.push_back(first.back() + c.stored(b) + (c.seqused ? b % 3 + 1 : 0));
  if (c.strides != StrideMode::kPacked) {
    const int64_t seqlen = fixed ? longest + (c.seqused ? 2 : 0) : -1;
    // Without cu_seqlens_kv the keys share cu_seqlens_q, and so the rows that nobody owns.
    const int64_t total = c.cu_seqlens_kv ? first.back() : std::max(first.back(), num_rows_);
    host_.k = add_rows("k", c.dtype, total, seqlen, c.num_heads_kv, c.head_dim_qk);
    if (!c.shared_kv) host_.v = add_rows("v", c.dtype, total, seqlen, c.num_heads_kv, c.head_dim_v);
  }
  if (!fixed && c.cu_seqlens_kv && c.strides != StrideMode::kPacked) {
    host_.cu_seqlens_kv = add_vector("cu_seqlens_kv", ATTUNE_INT32, first);
  }
  if (seqused) host_.seqused_kv = add_vector("seqused_kv", ATTUNE_INT32, c.seqlens_kv);
  if (c.sparse.topk > 0) {
    // Decides which keys are seen; the first seven of eight tokens may be named.
    const int64_t slots = *std::min_element(c.seqlens_kv.begin(), c.seqlens_kv.end());
    std::vector<uint8_t> named(static_cast<size_t>(longest), 0);
    fill_indices("indices", c.sparse, slots, host_.indices, host_.topk_length, named);
    for (auto& seen : seen_) seen.assign(named.begin(), named.begin() + static_cast<int64_t>(seen.size()));
  }
  const double magnitude = c.dtype == ATTUNE_INT8 ? 32.0 : 1.0;
  for (int64_t b = 0; b < c.batch(); ++b) {
    for (int64_t j = 0; j < c.stored(b); ++j) {
      if (seen_[static_cast<size_t>(b)][static_cast<size_t>(j)] == 0) continue;
      const auto row_at = [&](const attune_tensor& t, int64_t g, int64_t d) {
        return t.rank == 4 ? element_at(t, {b, j, g, d}) : element_at(t, {first[static_cast<size_t>(b)] + j, g, d});
      };
      for (int64_t g = 0; g < c.num_heads_kv; ++g) {
        for (int64_t d = 0; d < c.head_dim_qk; ++d)
          encode(c.dtype, magnitude * key_value(d), row_at(host_.k, g, d), true);
        if (c.shared_kv) continue;
        for (int64_t d = 0; d < c.head_dim_v; ++d)
          encode(c.dtype, magnitude * value_value(), row_at(host_.v, g, d), true);
      }
      if (b == bad_batch_ && j == bad_key_) spoil_dense(b, j, first[static_cast<size_t>(b)] + j);
    }
  }
}

void Problem::build_scores() {
  const Case& c = case_;
  int64_t most_keys = 0;
  for (int64_t b = 0; b < c.batch(); ++b) most_keys = std::max(most_keys, c.keys(b));
  const attune_dtype aux = aux_dtype();
  if (c.alibi > 0) {
    const std::vector<int64_t> shape =
        c.alibi == 2 ? std::vector<int64_t>{c.batch(), c.num_heads_q} : std::vector<int64_t>{c.num_heads_q};
    host_.alibi_slopes = arena_.add("alibi_slopes", ATTUNE_FLOAT32, shape);
    for_each_element(host_.alibi_slopes, [&](const int64_t* index, void* element) {
      const int64_t h = index[c.alibi - 1];
      double slope = std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(c.num_heads_q));
      if (c.alibi == 2) slope *= 1 + 0.25 * static_cast<double>(index[0]);
      if (c.alibi_negative && h % 2 == 1) slope = -slope;
      encode(ATTUNE_FLOAT32, slope, element);
      additive_bound_ = std::max(additive_bound_, std::fabs(slope) * static_cast<double>(most_keys));
    });
    host_.alibi_sqrt = c.alibi_sqrt;
  }
  Layout layout;
  if (c.bias > 0) {
    if (c.strides == StrideMode::kOdd) layout.padding = {0, 0, 3};
    host_.bias = arena_.add("bias", aux, {c.bias == 2 ? c.num_heads_q : 1, most_keys, most_keys}, layout);
    fill_normal(host_.bias, 1.0);
    additive_bound_ += 4;
  }
  if (c.new_token_bias) {
    const int64_t most = c.max_seqlen_q();
    if (c.strides == StrideMode::kOdd) layout.padding = {0, 3};
    host_.new_token_bias = arena_.add("new_token_bias", aux, {most, most}, layout);
    // A random tree: a token sees itself and its ancestors.
    std::vector<int64_t> parent(static_cast<size_t>(most), -1);
    for (int64_t i = 1; i < most; ++i) parent[static_cast<size_t>(i)] = random_.integer(0, i - 1);
    for_each_element(host_.new_token_bias, [&](const int64_t* index, void* element) {
      int64_t ancestor = index[0];
      while (ancestor > index[1]) ancestor = parent[static_cast<size_t>(ancestor)];
      encode(
          aux,
          ancestor == index[1] ? 0.125 * static_cast<double>(index[1] % 3) : -std::numeric_limits<double>::infinity(),
          element);
    });
    additive_bound_ += 1;
  }
  if (c.t5_buckets > 0) {
    host_.t5_bias = arena_.add("t5_bias", aux, {c.num_heads_q, c.t5_buckets});
    fill_normal(host_.t5_bias, 1.0);
    host_.t5_max_distance = c.t5_max_distance;
    host_.t5_bidirectional = c.t5_bidirectional;
    additive_bound_ += 4;
  }
  if (!c.sinks.empty()) {
    host_.sinks = arena_.add("sinks", aux, {c.num_heads_q});
    const double infinity = std::numeric_limits<double>::infinity();
    const double mixed[] = {-infinity, 3, 80, -50, 0.5, infinity};
    for_each_element(host_.sinks, [&](const int64_t* index, void* element) {
      encode(aux, c.sinks == "mixed" ? mixed[index[0] % 6] : 2 * random_.normal(), element);
    });
  }
}

void Problem::build_outputs() {
  const Case& c = case_;
  const attune_dtype dtype = c.resolved_out_dtype();
  const int64_t seqlen = host_.q.rank == 4 ? host_.q.shape[1] : -1;
  const int64_t apart = c.strides == StrideMode::kSpread ? 2 : 1;
  host_.out = add_rows("out", dtype, num_rows_, seqlen, c.num_heads_q, apart * c.head_dim_v);
  host_.out.shape[host_.out.rank - 1] = c.head_dim_v, host_.out.stride[host_.out.rank - 1] = apart;
  if (c.out_scale) {
    host_.out_scale = arena_.add("out_scale", ATTUNE_FLOAT32, {1});
    encode(ATTUNE_FLOAT32, 3.7, host_.out_scale.data);
  }
  std::vector<int64_t> shape = {num_rows_, c.num_heads_q};
  if (seqlen >= 0) shape = {c.batch(), seqlen, c.num_heads_q};
  Layout layout;
  if (c.strides == StrideMode::kOdd)
    layout.padding = seqlen >= 0 ? std::vector<int64_t>{0, 0, 3} : std::vector<int64_t>{0, 3};
  if (c.strides == StrideMode::kTransposed)
    layout.order = seqlen >= 0 ? std::vector<int>{0, 2, 1} : std::vector<int>{1, 0};
  if (c.lse) host_.lse = arena_.add("lse", ATTUNE_FLOAT32, shape, layout);
  if (c.max_logits) host_.max_logits = arena_.add("max_logits", ATTUNE_FLOAT32, shape, layout);
  if (c.shared_kv) host_.head_dim_v = c.head_dim_v;
  if (c.max_seqlens) {
    host_.max_seqlen_q = c.max_seqlen_q();
    for (int64_t b = 0; b < c.batch(); ++b) host_.max_seqlen_kv = std::max(host_.max_seqlen_kv, c.keys(b));
  }
}

}  // namespace attune::cases
