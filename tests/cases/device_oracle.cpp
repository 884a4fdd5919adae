// SPDX-License-Identifier: Apache-2.0
#include "device_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "reference/operation.h"

namespace attune::cases {
namespace {

static_assert(oracle::kMaxRank == ATTUNE_MAX_RANK);
static_assert(int{oracle::kNone} == ATTUNE_DTYPE_NONE && int{oracle::kFloat32} == ATTUNE_FLOAT32 &&
              int{oracle::kFloat16} == ATTUNE_FLOAT16 && int{oracle::kBfloat16} == ATTUNE_BFLOAT16 &&
              int{oracle::kE4m3} == ATTUNE_FLOAT8_E4M3 && int{oracle::kE5m2} == ATTUNE_FLOAT8_E5M2 &&
              int{oracle::kInt8} == ATTUNE_INT8 && int{oracle::kUint8} == ATTUNE_UINT8 &&
              int{oracle::kInt32} == ATTUNE_INT32 && int{oracle::kInt64} == ATTUNE_INT64);
static_assert(int{oracle::kNhd} == ATTUNE_KV_NHD && int{oracle::kHnd} == ATTUNE_KV_HND &&
              int{oracle::kXpacked} == ATTUNE_KV_XPACKED && int{oracle::kBytes} == ATTUNE_KV_BYTES);
static_assert(int{oracle::kPlain} == ATTUNE_KV_PLAIN && int{oracle::kMla656} == ATTUNE_KV_MLA_656 &&
              int{oracle::kMla584} == ATTUNE_KV_MLA_584);

oracle::Tensor as_tensor(const attune_tensor& t) { return device_tensor(t); }

oracle::Cache as_cache(const attune_kv_cache& c) {
  oracle::Cache made{as_tensor(c.k),
                     as_tensor(c.v),
                     as_tensor(c.k_scale),
                     as_tensor(c.v_scale),
                     as_tensor(c.page_table),
                     as_tensor(c.v_page_table),
                     as_tensor(c.batch_index),
                     c.format,
                     c.layout,
                     c.k.shape[0],
                     1,
                     c.ring_capacity};
  if (reference::present(c.k)) made.page_size = page_size_of(c);
  return made;
}

// Which table cuts the dense keys into sequences.
attune_tensor cuts_of_keys(const attune_attention& a, int64_t rows) {
  const bool own = reference::present(a.cu_seqlens_kv) && a.cu_seqlens_kv.data != a.cu_seqlens_q.data;
  const bool shared = !own && a.k.rank == 3 && a.k.shape[0] == rows && reference::present(a.cu_seqlens_q);
  return shared ? a.cu_seqlens_q : a.cu_seqlens_kv;
}

void copy(const attune_tensor& from, oracle::Tensor& to) { to = as_tensor(from); }
void copy(const attune_kv_cache& from, oracle::Cache& to) { to = as_cache(from); }
void copy(int32_t from, int& to) { to = from; }
void copy(int64_t from, long long& to) { to = from; }
void copy(float from, double& to) { to = from; }

// Every field as it is in the descriptor.
oracle::OracleParams as_params(const attune_attention& a) {
  oracle::OracleParams p{};
#define ATTUNE_COPY(name, kind) copy(a.name, p.name);
  ATTUNE_ATTENTION_INPUTS(ATTUNE_COPY)
  ATTUNE_ATTENTION_LATER_INPUTS(ATTUNE_COPY)
#undef ATTUNE_COPY
  return p;
}

// Dense float64 rows of heads, rank 3 or the rank of `like`.
oracle::Tensor doubles_like(const attune_tensor& like, void* data) {
  oracle::Tensor made = as_tensor(like);
  made.data = static_cast<const char*>(data);
  made.dtype = oracle::kFloat64;
  int64_t stride = 1;
  for (int axis = like.rank - 1; axis >= 0; --axis) {
    made.stride[axis] = stride;
    stride *= like.shape[axis];
  }
  return made;
}

}  // namespace

oracle::Tensor device_tensor(const attune_tensor& t) {
  oracle::Tensor made{static_cast<const char*>(t.data), t.dtype, t.rank, {}, {}};
  for (int axis = 0; axis < t.rank; ++axis) {
    made.shape[axis] = t.shape[axis];
    made.stride[axis] = t.stride[axis];
  }
  return made;
}

oracle::OracleParams described(const Problem& problem) {
  const attune_attention& a = problem.host();
  const reference::Operation op(a);
  oracle::OracleParams p = as_params(problem.device());
  p.rows = op.num_rows;
  p.batch = static_cast<int64_t>(op.sequences.size());
  p.heads_q = static_cast<int>(op.num_heads_q);
  p.heads_kv = static_cast<int>(op.num_heads_kv);
  p.head_dim_qk = static_cast<int>(reference::head_dim_qk(a));
  p.head_dim_v = static_cast<int>(op.head_dim_v);
  attune_attention keys = a;
  keys.cu_seqlens_kv = cuts_of_keys(a, op.num_rows);
  p.cu_seqlens_kv = as_tensor(problem.arena().on_device(keys).cu_seqlens_kv);
  p.softmax_scale = a.softmax_scale != 0 ? static_cast<double>(a.softmax_scale) : 1.0 / std::sqrt(p.head_dim_qk);
  return p;
}

template <class T>
T* DeviceOracle::add_result(const char* name, int64_t count) {
  return static_cast<T*>(add_array(name, std::max<int64_t>(count, 1) * static_cast<int64_t>(sizeof(T))));
}

void* DeviceOracle::add_array(const char* name, int64_t bytes) {
  arrays_.push_back(std::make_unique<DeviceArray>(memory_, name, static_cast<size_t>(bytes)));
  return arrays_.back()->device();
}

DeviceOracle::DeviceOracle(const Problem& problem, int64_t blocks, int64_t threads)
    : memory_(problem.arena().memory()), host_(described(problem)) {
  const attune_attention& a = problem.host();
  const reference::Operation op(a);
  // int8 inputs have their scales whatever else the case asks for.
  if (problem.spec().prologue.any() || reference::present(a.prologue.qkv_scale)) prepare(problem);

  for (const reference::Sequence& s : op.sequences) {
    const bool is_ring = a.cache.ring_capacity > 0;
    const int64_t cached = is_ring ? std::min(s.num_cached, a.cache.ring_capacity) : s.num_cached;
    host_.max_keys = std::max<long long>(host_.max_keys, cached + s.num_dense);
  }
  if (op.is_sparse()) {
    host_.max_keys = a.indices.shape[a.indices.rank - 1];
    if (reference::present(a.extra_indices)) host_.max_keys += a.extra_indices.shape[a.extra_indices.rank - 1];
  }
  const int64_t lines = host_.rows * host_.heads_q, elements = lines * host_.head_dim_v;
  blocks_ = std::clamp<int64_t>(lines, 1, blocks);
  host_.out = add_result<double>("out", elements);
  host_.pv_abs = add_result<double>("pv_abs", elements);
  host_.pv_lost = add_result<double>("pv_lost", elements);
  host_.v_abs = add_result<double>("v_abs", elements);
  host_.lse = add_result<double>("lse", lines);
  host_.max_logit = add_result<double>("max_logit", lines);
  host_.z_abs = add_result<double>("z_abs", lines);
  host_.z_lost = add_result<double>("z_lost", lines);
  host_.largest_p = add_result<double>("largest_p", lines);
  host_.num_visible = add_result<long long>("num_visible", lines);
  host_.written = add_result<unsigned char>("written", lines);
  host_.scratch = add_result<double>("scratch", blocks_ * (host_.max_keys + oracle::kNumSums * threads));
  host_.values = add_result<oracle::Row>("rows of values", blocks_ * host_.max_keys);
  params_ = std::make_unique<Buffer>(memory_, "params", sizeof(host_));
  std::memcpy(params_->host(), &host_, sizeof(host_));
  params_->upload();
}

// Rows that no sequence owns stay poison.
void DeviceOracle::prepare(const Problem& problem) {
  const attune_attention& a = problem.host();
  const reference::Operation op(a);
  const auto add = [&](const char* name, const attune_tensor& like, auto&& fill) {
    prepared_.push_back(std::make_unique<Buffer>(memory_, name, static_cast<size_t>(num_elements(like)) * 8 + 8));
    fill(reinterpret_cast<double*>(prepared_.back()->host()));
    prepared_.back()->upload();
    return doubles_like(like, prepared_.back()->device());
  };
  const auto put = [](double* rows, int64_t row, int64_t heads, int64_t head, const std::vector<double>& values) {
    std::copy(values.begin(), values.end(), rows + (row * heads + head) * static_cast<int64_t>(values.size()));
  };
  const auto add_queries = [&](const char* name, auto&& query) {
    return add(name, a.q, [&](double* rows) {
      for (int64_t row = 0; row < op.num_rows; ++row) {
        for (int64_t head = 0; head < op.num_heads_q && op.sequence_of(row) >= 0; ++head)
          put(rows, row, op.num_heads_q, head, query(op.sequence_of(row), row, head));
      }
    });
  };
  const auto add_keys = [&](const char* name, const attune_tensor& like, auto&& of_key) {
    return add(name, like, [&](double* rows) {
      for (size_t b = 0; b < op.sequences.size(); ++b) {
        const reference::Sequence& s = op.sequences[b];
        for (int64_t j = 0; j < s.num_dense; ++j) {
          const reference::Key key = {nullptr, {}, s.first_dense + j, s.num_cached + j};
          for (int64_t head = 0; head < op.num_heads_kv; ++head)
            put(rows, key.row, op.num_heads_kv, head, of_key(static_cast<int64_t>(b), key, head));
        }
      }
    });
  };
  using Key = const reference::Key&;
  const bool has_sums = reference::Prologue(a.prologue).has_sums();
  host_.q = add_queries("prepared q", [&](int64_t b, int64_t row, int64_t head) { return op.query(b, row, head); });
  if (has_sums)
    host_.q_lost = add_queries("q_lost", [&](int64_t b, int64_t row, int64_t h) { return op.query_lost(b, row, h); });
  if (reference::present(a.k)) {
    host_.k = add_keys("prepared k", a.k, [&](int64_t b, Key key, int64_t head) { return op.key(b, key, head); });
    if (has_sums)
      host_.k_lost = add_keys("k_lost", a.k, [&](int64_t b, Key key, int64_t h) { return op.key_lost(b, key, h); });
  }
  if (reference::present(a.v)) {
    host_.v = add_keys("prepared v", a.v, [&](int64_t b, Key key, int64_t head) { return op.value(b, key, head); });
    if (has_sums)
      host_.v_lost = add_keys("v_lost", a.v, [&](int64_t b, Key key, int64_t h) { return op.value_lost(b, key, h); });
  }
}

std::string DeviceOracle::check_guards() const {
  for (const auto& buffer : prepared_) {
    if (std::string guards = buffer->check_guards(); !guards.empty()) return guards;
  }
  for (const auto& array : arrays_) {
    if (std::string guards = array->check_guards(); !guards.empty()) return guards;
  }
  return params_->check_guards();
}

std::vector<reference::RowResult> DeviceOracle::results() const {
  const auto get = [&]<class T>(const T* device) {
    for (const auto& array : arrays_) {
      if (array->device() != device) continue;
      const std::vector<std::byte> bytes = array->download();
      std::vector<T> values(bytes.size() / sizeof(T));
      std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
      return values;
    }
    return std::vector<T>();
  };
  const auto out = get(host_.out), pv_abs = get(host_.pv_abs), v_abs = get(host_.v_abs), lse = get(host_.lse),
             max_logit = get(host_.max_logit), z_abs = get(host_.z_abs), largest_p = get(host_.largest_p),
             pv_lost = get(host_.pv_lost), z_lost = get(host_.z_lost);
  const auto num_visible = get(host_.num_visible);
  const auto written = get(host_.written);
  std::vector<reference::RowResult> results(static_cast<size_t>(host_.rows * host_.heads_q));
  for (size_t i = 0; i < results.size(); ++i) {
    reference::RowResult& r = results[i];
    r.written = written[i] != 0;
    if (!r.written) continue;
    const auto first = static_cast<std::ptrdiff_t>(i) * host_.head_dim_v, last = first + host_.head_dim_v;
    r.out.assign(out.begin() + first, out.begin() + last);
    r.pv_abs.assign(pv_abs.begin() + first, pv_abs.begin() + last);
    r.pv_lost.assign(pv_lost.begin() + first, pv_lost.begin() + last);
    r.v_abs.assign(v_abs.begin() + first, v_abs.begin() + last);
    r.lse = lse[i];
    r.max_logit = max_logit[i];
    r.z_abs = z_abs[i];
    r.z_lost = z_lost[i];
    r.largest_p = largest_p[i];
    r.num_visible = num_visible[i];
  }
  return results;
}

}  // namespace attune::cases
