// SPDX-License-Identifier: Apache-2.0
#include "backward_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace attune::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Not poison alone, which is a NaN: what is read by mistake shows in any case.
void spoil_row(const attune_tensor& t, void* first) { poison(static_cast<attune_dtype>(t.dtype), first, 1); }

}  // namespace

std::vector<NamedTensor> tensors_of(BackwardCall& call) {
  std::vector<NamedTensor> all = tensors_of(call.op);
  const std::vector<NamedTensor> forward = tensors_of(call.attention);
  all.insert(all.end(), forward.begin(), forward.end());
  return all;
}

BackwardProblem::BackwardProblem(const Case& spec, Memory& memory)
    : problem_(spec, memory), random_(spec.name + " backward", static_cast<uint64_t>(spec.num_heads_q)) {
  host_.attention = problem_.host();
  host_.op.struct_size = sizeof(host_.op);
  fill_forward();
  add_inputs();
  plant();
  add_outputs();
  arena().upload();
}

// As a tensor of the forward, in the case's strides.
attune_tensor BackwardProblem::add_like(const char* name, attune_dtype dtype, const attune_tensor& like) {
  const std::vector<int64_t> shape(like.shape, like.shape + like.rank);
  Layout layout;
  const bool rows = like.rank >= 3;
  if (spec().strides == StrideMode::kOdd) {
    layout.padding.assign(shape.size(), 0);
    layout.padding.back() = 5;
    layout.offset = static_cast<size_t>(element_size(dtype));
  } else if (spec().strides == StrideMode::kTransposed && rows) {
    layout.order = shape.size() == 3 ? std::vector<int>{1, 0, 2} : std::vector<int>{2, 0, 1, 3};
  }
  return arena().add(name, dtype, shape, layout);
}

// Element of a tensor of rows of q; dim -1: of one without its last axis.
void* BackwardProblem::row_element(const attune_tensor& t, int64_t row, int64_t head, int64_t dim) const {
  if (problem_.host().q.rank == 3) return dim < 0 ? element_at(t, {row, head}) : element_at(t, {row, head, dim});
  const int64_t n = t.shape[1];
  return dim < 0 ? element_at(t, {row / n, row % n, head}) : element_at(t, {row / n, row % n, head, dim});
}

// out and lse as stored. Rows that see nothing keep the poison of out, and rows that nobody owns that of both.
void BackwardProblem::fill_forward() {
  const attune_attention& a = host_.attention;
  rows_ = reference::attention(a);
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].written) continue;
    const int64_t row = static_cast<int64_t>(i) / spec().num_heads_q,
                  head = static_cast<int64_t>(i) % spec().num_heads_q;
    encode(ATTUNE_FLOAT32, rows_[i].lse, row_element(a.lse, row, head, -1));
    for (size_t d = 0; rows_[i].lse != -kInfinity && d < rows_[i].out.size(); ++d) {
      encode(static_cast<attune_dtype>(a.out.dtype), rows_[i].out[d],
             row_element(a.out, row, head, static_cast<int64_t>(d)));
    }
  }
}

// Rows that see nothing get no dout and lose their q.
void BackwardProblem::add_inputs() {
  const attune_attention& a = host_.attention;
  host_.op.dout = add_like("dout", static_cast<attune_dtype>(a.out.dtype), a.out);
  if (spec().backward.dlse) host_.op.dlse = add_like("dlse", ATTUNE_FLOAT32, a.lse);
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].written) continue;
    const int64_t row = static_cast<int64_t>(i) / spec().num_heads_q,
                  head = static_cast<int64_t>(i) % spec().num_heads_q;
    if (rows_[i].lse == -kInfinity) {
      for (int64_t d = 0; d < spec().head_dim_qk; ++d) spoil_row(a.q, row_element(a.q, row, head, d));
      continue;
    }
    for (int64_t d = 0; d < spec().head_dim_v; ++d) {
      encode(static_cast<attune_dtype>(a.out.dtype), random_.normal(), row_element(host_.op.dout, row, head, d));
    }
    if (spec().backward.dlse) encode(ATTUNE_FLOAT32, random_.normal(), row_element(host_.op.dlse, row, head, -1));
  }
}

// The bad row is in the middle of those that see something, so that others do not see what it sees.
void BackwardProblem::plant() {
  if (spec().backward.plant.empty()) return;
  std::vector<int64_t> seeing;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].written && rows_[i].lse != -kInfinity) seeing.push_back(static_cast<int64_t>(i));
  }
  const int64_t i = seeing.at(seeing.size() / 2), row = i / spec().num_heads_q, head = i % spec().num_heads_q;
  if (spec().backward.plant == "nan_q") {
    spoil_row(host_.attention.q, row_element(host_.attention.q, row, head, spec().head_dim_qk / 2));
  } else if (spec().backward.plant == "inf_dout") {
    encode(static_cast<attune_dtype>(host_.op.dout.dtype), kInfinity,
           row_element(host_.op.dout, row, head, spec().head_dim_v / 2));
  } else if (spec().backward.plant == "no_lse") {  // what the masks let it see does not count
    for (const attune_tensor* t : {&host_.attention.q, &host_.op.dout}) {
      for (int64_t d = 0; d < t->shape[t->rank - 1]; ++d) spoil_row(*t, row_element(*t, row, head, d));
    }
    encode(ATTUNE_FLOAT32, -kInfinity, row_element(host_.attention.lse, row, head, -1));
  } else {
    throw std::runtime_error(spec().name + ": unknown backward.plant \"" + spec().backward.plant + "\"");
  }
}

void BackwardProblem::add_outputs() {
  const attune_attention& a = host_.attention;
  const auto wanted = [&](const char* name) {
    const std::vector<std::string>& outputs = spec().backward.outputs;
    return outputs.empty() || std::find(outputs.begin(), outputs.end(), name) != outputs.end();
  };
  const auto add = [&](const char* name, const attune_tensor& like, attune_dtype dtype, attune_tensor& to) {
    if (like.dtype != ATTUNE_DTYPE_NONE && wanted(name)) to = add_like(name, dtype, like);
  };
  const attune_dtype dtype = spec().backward.dtype == ATTUNE_DTYPE_NONE ? spec().dtype : spec().backward.dtype;
  add("dq", a.q, dtype, host_.op.dq);
  add("dk", a.k, dtype, host_.op.dk);
  add("dv", a.v, dtype, host_.op.dv);
  add("dsinks", a.sinks, ATTUNE_FLOAT32, host_.op.dsinks);
  add("dbias", a.bias, ATTUNE_FLOAT32, host_.op.dbias);
  add("dt5_bias", a.t5_bias, ATTUNE_FLOAT32, host_.op.dt5_bias);
}

std::string run(BackwardCall device, Memory& memory, attune_status* status) {
  const PlannedCall call{
      "attune_attention_backward_plan",
      [&](attune_plan** plan) { return attune_attention_backward_plan(device.linked(), memory.device(), plan); },
      "attune_attention_backward_run",
      [&](const attune_plan* plan, void* workspace, size_t bytes) {
        return attune_attention_backward_run(plan, device.linked(), workspace, bytes, nullptr);
      }};
  return run_planned(memory, call, status);
}

namespace {

// Checks one gradient, tensor by tensor, as docs/semantics.md bounds it.
class GradientChecker {
 public:
  GradientChecker(BackwardProblem& problem, Snapshot& snapshot, Checker& checker)
      : problem_(problem), snapshot_(snapshot), checker_(checker) {}

  // num_terms: the most that an element sums. rounded: whether terms have a factor that is rounded to 16 bits. written:
  // by rows; null: all are.
  void check(const char* name, const attune_tensor& host, const reference::Gradient& expected, int64_t num_terms,
             bool rounded, const std::vector<bool>* written) {
    if (host.dtype == ATTUNE_DTYPE_NONE) return;
    const Case& c = problem_.spec();
    const attune_tensor t = snapshot_.after(host);
    const auto dtype = static_cast<attune_dtype>(t.dtype);
    const double of_products = sum_error(std::max(c.head_dim_qk, c.head_dim_v));
    const double of_terms = sum_error(num_terms) + (rounded ? bound_terms(problem_.forward()).of_p : 0.0);
    const double additive = problem_.forward().additive_bound();
    size_t i = 0;
    for_each_element(t, [&](const int64_t* index, void* element) {
      const size_t at = i++;
      const int64_t row = t.rank == 4 ? index[0] * t.shape[1] + index[1] : index[0];
      if (written != nullptr && !(*written)[static_cast<size_t>(row)]) return;
      snapshot_.allow(element, element_size(dtype));
      const double scores = expected.scores[at] + additive * expected.terms[at];
      const double bound =
          expected.parts[at] * of_products + expected.terms[at] * of_terms + scores * oracle::kOfFp32 + 1e-36;
      checker_.element(name, row, t.rank > 1 ? index[t.rank - 2] : 0, index[t.rank - 1], dtype, expected.value[at],
                       bound, decode(dtype, element));
    });
  }

 private:
  static double sum_error(int64_t n) { return (16 + 2 * std::sqrt(static_cast<double>(n))) * 0x1p-24; }

  BackwardProblem& problem_;
  Snapshot& snapshot_;
  Checker& checker_;
};

}  // namespace

Report run_and_check(BackwardProblem& problem, const BackwardRunner& runner) {
  const Case& c = problem.spec();
  const BackwardCall& host = problem.host();
  const attune_attention_backward& op = host.op;
  const reference::Backward exact = reference::attention_backward(host.attention, op.dout, op.dlse);
  Checker checker;
  if (std::string failure = runner(problem.device()); !failure.empty()) {
    checker.fail(failure);
    return checker.report();
  }
  Snapshot snapshot(problem.arena());
  GradientChecker check(problem, snapshot, checker);
  const int64_t queries = c.max_seqlen_q(), group = c.num_heads_q / c.num_heads_kv;
  int64_t keys = 0;
  for (int64_t b = 0; b < c.batch(); ++b) keys = std::max(keys, c.keys(b));
  check.check("dq", op.dq, exact.dq, keys, true, &exact.q_written);
  check.check("dk", op.dk, exact.dk, queries * group, true, &exact.kv_written);
  check.check("dv", op.dv, exact.dv, queries * group, true, &exact.kv_written);
  check.check("dsinks", op.dsinks, exact.dsinks, c.total_q(), false, nullptr);
  check.check("dbias", op.dbias, exact.dbias, c.batch() * c.num_heads_q, false, nullptr);
  check.check("dt5_bias", op.dt5_bias, exact.dt5_bias, c.total_q() * keys, false, nullptr);
  snapshot.check(checker);
  return checker.report();
}

Report run_and_check(BackwardProblem& problem) {
  return run_and_check(problem, [&](const BackwardCall& device) { return run(device, problem.arena().memory()); });
}

Report run_backward_case(const Case& spec, Memory& memory) {
  BackwardProblem problem(spec, memory);
  return run_and_check(problem);
}

Case random_backward_case(uint64_t seed) {
  Random random("backward", seed);
  Case c;
  c.area = "backward";
  c.name = "backward/random/" + std::to_string(seed);
  c.backward.on = true;
  c.dtype = random.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16});
  c.num_heads_kv = random.integer(1, 3);
  c.num_heads_q = c.num_heads_kv * random.pick<int64_t>({1, 1, 2, 3, 5});
  c.head_dim_qk = random.chance(0.5) ? random.pick<int64_t>({16, 64, 128}) : random.integer(1, 96);
  c.head_dim_v = random.chance(0.6) ? c.head_dim_qk : random.integer(1, 96);
  c.queries = random.pick<QueryShape>({QueryShape::kRagged, QueryShape::kRagged, QueryShape::kFixed});
  c.strides = random.pick<StrideMode>({StrideMode::kDense, StrideMode::kOdd, StrideMode::kTransposed});
  const int64_t batch = random.integer(1, 4), longest = random.pick<int64_t>({5, 40, 150, 300});
  const int64_t same = random.integer(0, longest);
  for (int64_t b = 0; b < batch; ++b) {
    c.seqlens_q.push_back(c.queries == QueryShape::kFixed ? same : random.integer(0, longest));
    c.seqlens_kv.push_back(random.integer(0, longest));
  }
  c.seqused = random.chance(0.2);
  c.causal = random.chance(0.5);
  if (random.chance(0.3)) c.window_left = random.integer(0, longest);
  if (random.chance(0.2)) c.window_right = random.integer(0, longest);
  if (random.chance(0.15)) c.mask_bits = static_cast<int>(random.integer(1, 2));
  if (random.chance(0.15)) {
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t first = random.integer(0, longest);
      c.ranges.push_back({first, random.integer(first, longest)});
    }
  }
  if (random.chance(0.2)) c.softcap = random.uniform(1, 20);
  if (random.chance(0.1)) c.softmax_scale = random.uniform(-0.3, 0.3);
  if (random.chance(0.2)) c.alibi = static_cast<int>(random.integer(1, 2));
  if (random.chance(0.2)) c.bias = static_cast<int>(random.integer(1, 2));
  if (random.chance(0.2)) {
    c.t5_buckets = 16;
    c.t5_bidirectional = random.chance(0.5);
  }
  if (random.chance(0.3)) c.sinks = random.pick<std::string>({"normal", "mixed"});
  c.aux_dtype = random.pick<std::string>({"f32", "bf16"});
  c.backward.dlse = random.chance(0.3);
  if (random.chance(0.3)) c.backward.dtype = ATTUNE_FLOAT32;
  if (random.chance(0.2)) c.backward.outputs = {random.pick<std::string>({"dq", "dk", "dv"})};
  return c;
}

}  // namespace attune::cases
