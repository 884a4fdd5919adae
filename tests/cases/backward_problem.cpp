// SPDX-License-Identifier: Apache-2.0
#include "backward_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "reference/operation.h"

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

BackwardProblem::BackwardProblem(const Case& spec, Memory& memory, Forward forward)
    : problem_(spec, memory), forward_(forward) {
  host_.attention = problem_.host();
  host_.op.struct_size = sizeof(host_.op);
  if (const Buffer* q = arena().owner(host_.attention.q.data)) q_.assign(q->host(), q->host() + q->size());
  add_inputs();
  make_inputs();
  add_outputs();
  arena().upload();
}

void BackwardProblem::make_inputs() {
  fill_forward();
  fill_inputs();
  plant();
}

bool BackwardProblem::use_fewer_keys(const std::function<int64_t(int64_t b, int64_t keys)>& fewer) {
  const Case& c = spec();
  const attune_tensor& used = host_.attention.seqused_kv;
  // What a window or a range hides now may show then, and be poison.
  const bool hides = c.window_left >= 0 || c.window_right >= 0 || !c.ranges.empty() || c.mask_bits > 0;
  if (used.data == nullptr || (c.poison && hides) || !c.backward.plant.empty()) return false;
  for (int64_t b = 0; b < c.batch(); ++b) {
    auto* n = static_cast<int32_t*>(element_at(used, {b}));
    *n = static_cast<int32_t>(fewer(b, *n));
  }
  if (Buffer* q = arena().owner(host_.attention.q.data)) std::copy(q_.begin(), q_.end(), q->host());
  for (const attune_tensor& t : {host_.attention.out, host_.attention.lse, host_.op.dout, host_.op.dlse}) {
    if (Buffer* buffer = arena().owner(t.data)) std::fill_n(buffer->host(), buffer->size(), kPoison);
  }
  make_inputs();
  arena().upload();
  return true;
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

// out and lse as stored. Rows that see nothing keep the poison of out, and rows of no sequence that of both.
void BackwardProblem::fill_forward() {
  const attune_attention& a = host_.attention;
  if (forward_ == Forward::kLibrary && run_forward()) return;
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

// As a model's step has them. False where no kernel of the device takes it.
bool BackwardProblem::run_forward() {
  const attune_attention& a = host_.attention;
  arena().upload();
  attune_status status = ATTUNE_OK;
  if (const std::string failure = cases::run(problem_, &status); !failure.empty()) {
    if (status == ATTUNE_UNSUPPORTED) return false;
    throw std::runtime_error("the forward: " + failure);
  }
  for (const attune_tensor& t : {a.out, a.lse}) {
    Buffer* const buffer = arena().owner(t.data);  // none of an empty tensor
    if (buffer == nullptr) continue;
    const std::vector<std::byte> bytes = buffer->download();
    std::copy(bytes.begin(), bytes.end(), buffer->host());
  }
  const reference::Operation op(a);
  rows_.assign(static_cast<size_t>(op.num_rows * op.num_heads_q), {});
  for (size_t i = 0; i < rows_.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / op.num_heads_q, head = static_cast<int64_t>(i) % op.num_heads_q;
    rows_[i].written = op.sequence_of(row) >= 0;
    if (!rows_[i].written) continue;
    rows_[i].lse = decode(ATTUNE_FLOAT32, row_element(a.lse, row, head, -1));
    for (int64_t d = 0; rows_[i].lse == -kInfinity && d < op.head_dim_v; ++d)
      spoil_row(a.out, row_element(a.out, row, head, d));
  }
  return true;
}

void BackwardProblem::add_inputs() {
  const attune_attention& a = host_.attention;
  host_.op.dout = add_like("dout", static_cast<attune_dtype>(a.out.dtype), a.out);
  if (spec().backward.dlse) host_.op.dlse = add_like("dlse", ATTUNE_FLOAT32, a.lse);
}

// Rows that see nothing get no dout and lose their q. What others get does not depend on that.
void BackwardProblem::fill_inputs() {
  const attune_attention& a = host_.attention;
  Random random(spec().name + " backward", static_cast<uint64_t>(spec().num_heads_q));
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].written) continue;
    const int64_t row = static_cast<int64_t>(i) / spec().num_heads_q,
                  head = static_cast<int64_t>(i) % spec().num_heads_q;
    const bool sees = rows_[i].lse != -kInfinity;
    for (int64_t d = 0; d < spec().head_dim_v; ++d) {
      const double x = random.normal();
      if (sees) encode(static_cast<attune_dtype>(a.out.dtype), x, row_element(host_.op.dout, row, head, d));
    }
    const double x = spec().backward.dlse ? random.normal() : 0;
    if (sees && spec().backward.dlse) encode(ATTUNE_FLOAT32, x, row_element(host_.op.dlse, row, head, -1));
    for (int64_t d = 0; !sees && d < spec().head_dim_qk; ++d) spoil_row(a.q, row_element(a.q, row, head, d));
  }
}

// The bad row is in the middle of those that see something, so that others do not see what it sees.
void BackwardProblem::plant() {
  if (spec().backward.plant.empty()) return;
  std::vector<int64_t> seeing;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].written && rows_[i].lse != -kInfinity) seeing.push_back(static_cast<int64_t>(i));
  }
  if (seeing.empty()) return;
  const int64_t i = seeing[seeing.size() / 2], row = i / spec().num_heads_q, head = i % spec().num_heads_q;
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

std::string why_not_covered(Case spec, attune_device device) {
  for (auto* lengths : {&spec.seqlens_q, &spec.seqlens_kv}) std::fill(lengths->begin(), lengths->end(), 2);
  BackwardProblem problem(spec);  // on the host: planning looks at no data
  BackwardCall call = problem.device();
  const attune_status status = attune_attention_backward_supported(call.linked(), device);
  return status == ATTUNE_UNSUPPORTED ? attune_last_error() : "";
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

}  // namespace attune::cases
