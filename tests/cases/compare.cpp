// SPDX-License-Identifier: Apache-2.0
#include "compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <set>

namespace attune::cases {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::string place(const char* what, int64_t row, int64_t head, int64_t dim) {
  std::string text = std::string(what) + "[row " + std::to_string(row) + ", head " + std::to_string(head);
  if (dim >= 0) text += ", dim " + std::to_string(dim);
  return text + "]";
}

attune_dtype dtype_of(const attune_tensor& t) { return static_cast<attune_dtype>(t.dtype); }

// Element of a tensor shaped like q: rows count through batch and sequence.
void* row_element(const attune_tensor& t, bool rank4, int64_t row, int64_t head, int64_t dim) {
  const bool has_dim = dim >= 0;
  if (!rank4) return has_dim ? element_at(t, {row, head, dim}) : element_at(t, {row, head});
  const int64_t seqlen = t.shape[1];
  return has_dim ? element_at(t, {row / seqlen, row % seqlen, head, dim})
                 : element_at(t, {row / seqlen, row % seqlen, head});
}

// Products are formed from operands rounded to this type, and so are probabilities. 8-bit inputs compute like bfloat16.
attune_dtype compute_dtype(const Case& c) {
  return c.dtype == ATTUNE_FLOAT32 || c.dtype == ATTUNE_FLOAT16 ? c.dtype : ATTUNE_BFLOAT16;
}

}  // namespace

Expected evaluate(const Problem& problem) {
  Expected expected;
  expected.results = reference::attention(problem.host());
  const int64_t heads = problem.spec().num_heads_q;
  for (int64_t row = 0; row < problem.num_rows(); ++row) {
    for (int64_t head = 0; head < heads; ++head) expected.rows.push_back({row, head});
  }
  if (problem.spec().prologue.append) expected.writes = reference::appended(problem.host());
  return expected;
}

Expected evaluate_sample(const Problem& problem, int64_t count) {
  const int64_t heads = problem.spec().num_heads_q, total = problem.num_rows() * heads;
  if (count >= total) return evaluate(problem);
  std::set<int64_t> picked = {0, total - 1};
  Random random(problem.spec().name, 1);
  while (static_cast<int64_t>(picked.size()) < count) picked.insert(random.integer(0, total - 1));
  Expected expected;
  expected.all_rows = false;
  for (const int64_t i : picked) expected.rows.push_back({i / heads, i % heads});
  expected.results = reference::attention(problem.host(), expected.rows);
  if (problem.spec().prologue.append) expected.writes = reference::appended(problem.host());
  return expected;
}

void Checker::fail(std::string failure) {
  if (report_.failure.empty()) report_.failure = std::move(failure);
}

void Checker::element(const char* what, int64_t row, int64_t head, int64_t dim, attune_dtype dtype, double expected,
                      double bound, double actual, bool saturate) {
  ++report_.num_elements;
  double ratio = 0;
  bool good;
  if (std::isnan(expected)) {
    good = std::isnan(actual);
  } else if (std::isinf(expected)) {
    good = actual == round_to(dtype, expected, saturate);
  } else {
    const double low = round_to(dtype, expected - bound, saturate), high = round_to(dtype, expected + bound, saturate);
    good = low <= actual && actual <= high;
    // How much of the bound is used, beside the rounding to the format.
    const double half = half_step(dtype, std::max(std::fabs(actual), std::fabs(expected)));
    ratio = std::max(0.0, std::fabs(actual - expected) - half) / std::max(bound, std::numeric_limits<double>::min());
  }
  if (!good || ratio > report_.worst.ratio) {
    if (!failed()) report_.worst = {place(what, row, head, dim), expected, actual, bound, ratio};
  }
  if (!good) {
    fail(place(what, row, head, dim) + ": expected " + number(expected) + ", got " + number(actual) +
         ", allowed error " + number(bound));
  }
}

Snapshot::Snapshot(const Arena& arena) : arena_(arena) {
  for (const auto& buffer : arena.buffers()) {
    copies_.push_back({buffer.get(), buffer->download(), std::vector<uint8_t>(buffer->size(), 0)});
  }
}

attune_tensor Snapshot::after(attune_tensor host) const {
  const Buffer* owner = host.data != nullptr ? arena_.owner(host.data) : nullptr;
  for (Copy& copy : copies_) {
    if (copy.buffer == owner) {
      host.data = copy.bytes.data() + (static_cast<std::byte*>(host.data) - copy.buffer->host());
      return host;
    }
  }
  return host;
}

void Snapshot::allow(const void* element, int64_t bytes) {
  const auto* at = static_cast<const std::byte*>(element);
  for (Copy& copy : copies_) {
    if (at < copy.bytes.data() || at >= copy.bytes.data() + copy.bytes.size()) continue;
    std::fill_n(copy.allowed.begin() + (at - copy.bytes.data()), bytes, 1);
    return;
  }
}

void Snapshot::allow_all(const attune_tensor& host) {
  const Buffer* owner = host.data != nullptr ? arena_.owner(host.data) : nullptr;
  for (Copy& copy : copies_) {
    if (copy.buffer == owner) std::fill(copy.allowed.begin(), copy.allowed.end(), 1);
  }
}

void Snapshot::check(Checker& checker) const {
  for (const Copy& copy : copies_) {
    for (size_t i = 0; i < copy.bytes.size(); ++i) {
      if (copy.allowed[i] == 0 && copy.bytes[i] != copy.buffer->host()[i]) {
        checker.fail("byte " + std::to_string(i) + " of \"" + copy.buffer->name() + "\" was changed from " +
                     std::to_string(std::to_integer<int>(copy.buffer->host()[i])) + " to " +
                     std::to_string(std::to_integer<int>(copy.bytes[i])));
        return;
      }
    }
  }
  if (std::string guards = arena_.check_guards(); !guards.empty()) checker.fail(guards);
}

oracle::BoundTerms bound_terms(const Problem& problem, attune_dtype weights) {
  const Case& c = problem.spec();
  const double compute = unit_roundoff(compute_dtype(c));
  const bool rounds = compute_dtype(c) != ATTUNE_FLOAT32;
  const PrologueSpec& p = c.prologue;
  const bool grouped = scales_channels(c.cache.format, c.cache.scales);
  const bool scaled_inputs = element_size(c.dtype) == 1;
  // Operands that are not exact in the compute type: what a prologue produced, and codes with a scale for each group of
  // columns.
  const bool rounded_qk =
      rounds && (grouped || scaled_inputs || p.q_bias || p.k_bias || p.ia3_tasks > 0 || p.rope.dim > 0 || p.logn > 0);
  const bool rounded_v =
      rounds && (grouped || scaled_inputs || p.v_bias || p.ia3_tasks > 0 || (c.shared_kv && rounded_qk));
  // The errors of the products of one score have random signs: their sum stays within 4 standard deviations, never
  // beyond all of it.
  const double spread = std::min(1.0, 4.0 / std::sqrt(static_cast<double>(c.head_dim_qk)));
  oracle::BoundTerms terms{};
  terms.of_products = rounded_qk ? 1.5 * compute * spread : 0.0;
  terms.additive = problem.additive_bound();
  const double of_weights = weights != ATTUNE_DTYPE_NONE ? unit_roundoff(weights) : compute;
  terms.of_p = rounds ? of_weights : 0.0;
  terms.of_values = rounded_v ? compute : 0.0;
  // Half a step of e4m3's subnormal numbers, where the largest weight is 2^5 at least
  // (kernels/prefill/mainloop_fp8.cuh).
  terms.least = weights == ATTUNE_FLOAT8_E4M3 ? std::ldexp(1.0, -10 - 5) : 0.0;
  // And of fp16's, in which P over 8-bit caches is, too; the largest is 1 at least (docs/semantics.md).
  const bool codes = c.has_cache() && element_size(c.cache_dtype()) == 1;
  if (weights == ATTUNE_DTYPE_NONE && rounds && (compute_dtype(c) == ATTUNE_FLOAT16 || codes || grouped))
    terms.least = std::ldexp(1.0, grouped ? -24 : -25);
  // The row sum may add up the rounded probabilities.
  terms.of_sum = rounds ? compute : 0.0;
  return terms;
}

Bounds::Bounds(const Problem& problem, const reference::RowResult& row, attune_dtype weights)
    : RowBounds(oracle::bounds_of_row(bound_terms(problem, weights), row.z_abs, row.z_lost, row.max_logit, row.lse,
                                      row.num_visible)) {}

double Bounds::out(const reference::RowResult& row, size_t dim) const {
  return oracle::bound_of_out(*this, row.out[dim], row.pv_abs[dim], row.pv_lost[dim], row.v_abs[dim], row.largest_p);
}

attune_dtype rounded_weights(const Problem& problem, int32_t device_type) {
  const attune_attention& a = problem.host();
  const bool codes =
      a.q.dtype == ATTUNE_FLOAT8_E4M3 && a.k.dtype == ATTUNE_FLOAT8_E4M3 && a.cache.k.dtype == ATTUNE_DTYPE_NONE;
  return codes && device_type == ATTUNE_DEVICE_CUDA ? ATTUNE_FLOAT8_E4M3 : ATTUNE_DTYPE_NONE;
}

Report compare(const Problem& problem, const Expected& expected) {
  return compare(problem, expected, problem.arena().memory().device().type);
}

Report compare(const Problem& problem, const Expected& expected, int32_t device_type) {
  const attune_dtype weights = rounded_weights(problem, device_type);
  Checker checker;
  Snapshot snapshot(problem.arena());
  const attune_attention& host = problem.host();
  const bool rank4 = host.q.rank == 4;
  const attune_tensor out = snapshot.after(host.out), lse = snapshot.after(host.lse),
                      max_logits = snapshot.after(host.max_logits);
  const double out_scale = host.out_scale.data == nullptr ? 1.0 : decode(ATTUNE_FLOAT32, host.out_scale.data);
  const bool saturate = out.dtype == ATTUNE_FLOAT8_E4M3;
  if (!expected.all_rows) {
    for (const attune_tensor* t : {&host.out, &host.lse, &host.max_logits}) snapshot.allow_all(*t);
  }
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    const reference::RowResult& result = expected.results[i];
    const auto [row, head] = expected.rows[i];
    if (!result.written) continue;  // its bytes must be as they were
    const Bounds bounds(problem, result, weights);
    for (size_t d = 0; d < result.out.size(); ++d) {
      const void* at = row_element(out, rank4, row, head, static_cast<int64_t>(d));
      snapshot.allow(at, element_size(dtype_of(out)));
      const double scale = saturate ? out_scale : 1.0;
      checker.element("out", row, head, static_cast<int64_t>(d), dtype_of(out), result.out[d] * scale,
                      bounds.out(result, d) * scale, decode(dtype_of(out), at), saturate);
    }
    if (lse.dtype != ATTUNE_DTYPE_NONE) {
      const void* at = row_element(lse, rank4, row, head, -1);
      snapshot.allow(at, 4);
      checker.element("lse", row, head, -1, ATTUNE_FLOAT32, result.lse, bounds.lse, decode(ATTUNE_FLOAT32, at));
    }
    if (max_logits.dtype != ATTUNE_DTYPE_NONE) {
      const void* at = row_element(max_logits, rank4, row, head, -1);
      snapshot.allow(at, 4);
      checker.element("max_logits", row, head, -1, ATTUNE_FLOAT32, result.max_logit, bounds.score,
                      decode(ATTUNE_FLOAT32, at));
    }
  }
  check_writes(host.cache, expected.writes, host.prologue.power_of_two_scales != 0, snapshot, checker);
  snapshot.check(checker);
  return checker.report();
}

}  // namespace attune::cases
