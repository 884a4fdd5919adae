// SPDX-License-Identifier: Apache-2.0
#include "order.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "array.h"

namespace attune::python {
namespace {

constexpr int64_t kMostHeads = 256;  // that models have, with room to spare

bool present(const attune_tensor& t) { return t.dtype != ATTUNE_DTYPE_NONE; }

std::string shape_text(const attune_tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(t.shape[i]);
  return text + "]";
}

// Heads of a cache; 0 where it has none, or another number of axes than its layout.
int64_t heads_of(const attune_kv_cache& cache) {
  if (!present(cache.k)) return 0;
  if (cache.format != ATTUNE_KV_PLAIN) return 1;
  if (cache.layout == ATTUNE_KV_XPACKED) return cache.k.rank == 5 ? cache.k.shape[1] : 0;
  return cache.k.rank == 4 ? cache.k.shape[cache.layout == ATTUNE_KV_HND ? 1 : 2] : 0;
}

// heads query heads over kv_heads.
bool fit(int64_t heads, int64_t kv_heads) { return kv_heads > 0 && heads > 0 && heads % kv_heads == 0; }

// An argument that has a value for each query head.
struct OfHeads {
  const char* name;
  const attune_tensor* tensor;
  int axis;
};

// A fused projection, split and turned: in memory a step of axis 2 holds q's rows, k's and v's, one after the other. In
// the order of this package it would hold tokens of q, of k and of v.
bool parts_of_one_projection(const attune_tensor& q, const attune_tensor& k, const attune_tensor& v) {
  if (q.shape[2] < 2) return false;
  const int64_t step = q.stride[2] * attune_dtype_size(static_cast<attune_dtype>(q.dtype));
  const attune_tensor* const parts[] = {&q, &k, &v};
  const char* begin[3];
  const char* end[3];
  for (int i = 0; i < 3; ++i) {
    const attune_tensor& t = *parts[i];
    if (t.rank != 4 || t.dtype != q.dtype || t.data == nullptr || t.shape[2] != q.shape[2] ||
        t.stride[2] != q.stride[2])
      return false;
    begin[i] = static_cast<const char*>(t.data);
    end[i] = begin[i] + t.shape[1] * t.stride[1] * attune_dtype_size(static_cast<attune_dtype>(t.dtype));
  }
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < i; ++j)
      if (begin[i] < end[j] && begin[j] < end[i]) return false;
  return *std::max_element(end, end + 3) - *std::min_element(begin, begin + 3) <= step;
}

std::string number(int64_t x) { return std::to_string(x); }

// Why q and k (null: there is none of rank 4) are torch's order; empty where they need not be.
std::string why_other_order(const attune_attention& a, const attune_tensor* k) {
  const int64_t tokens = a.q.shape[1], heads = a.q.shape[2];  // torch: heads, tokens
  const int64_t cache_heads = heads_of(a.cache);
  if (k != nullptr && cache_heads > 0 && k->shape[2] != cache_heads && k->shape[1] == cache_heads &&
      fit(tokens, cache_heads))
    return number(k->shape[2]) + " heads of k are not the " + number(cache_heads) + " of the cache";
  const int64_t kv_heads = cache_heads > 0 ? cache_heads : k != nullptr ? k->shape[2] : 0;
  const int64_t kv_heads_turned = cache_heads > 0 ? cache_heads : k != nullptr ? k->shape[1] : 0;
  if (kv_heads > 0 && heads > 0 && !fit(heads, kv_heads) && fit(tokens, kv_heads_turned))
    return number(heads) + " heads of q are no multiple of " + number(kv_heads) +
           (cache_heads > 0 ? " of the cache" : " of k");

  const OfHeads all[] = {{"sinks", &a.sinks, 0},
                         {"alibi_slopes", &a.alibi_slopes, a.alibi_slopes.rank - 1},
                         {"bias", &a.bias, 0},
                         {"t5_bias", &a.t5_bias, 0},
                         {"prologue.q_bias", &a.prologue.q_bias, 0}};
  for (const OfHeads& x : all) {
    if (!present(*x.tensor) || x.axis < 0) continue;
    const int64_t said = x.tensor->shape[x.axis];
    if (said == tokens && said != heads && said > 1) return std::string(x.name) + " is for " + number(said) + " heads";
  }

  if (k == nullptr || cache_heads > 0 || present(a.indices) || !fit(tokens, k->shape[1])) return "";
  if (parts_of_one_projection(a.q, *k, a.v))
    return "one step of axis 2 is a row of q, k and v together, as in views of one projection";
  if (heads != k->shape[2]) return "";
  if (heads > kMostHeads && tokens <= kMostHeads)
    return number(heads) + " KV heads of " + number(k->shape[1]) +
           " tokens are more than models have (rows of rank 3 with " + "cu_seqlens_q may have them)";
  if (a.causal != 0 && tokens > k->shape[1] && heads > tokens && !present(a.bidirectional_ranges))
    return "the first " + number(tokens - k->shape[1]) + " of " + number(tokens) + " queries would see nothing";
  return "";
}

}  // namespace

void check_order(const attune_attention& a) {
  if (a.q.rank != 4) return;
  const attune_tensor* k = present(a.k) && a.k.rank == 4 ? &a.k : nullptr;
  if (const std::string why = why_other_order(a, k); !why.empty())
    invalid_argument(
        "q has shape " + shape_text(a.q) + (k != nullptr ? " and k " + shape_text(*k) : "") +
        ", which looks like torch's [batch, heads, seqlen, head_dim]: " + why +
        ". Here it is [batch, seqlen, heads, head_dim]: pass q.swapaxes(1, 2), k and v likewise, or call attune.sdpa");
}

}  // namespace attune::python
