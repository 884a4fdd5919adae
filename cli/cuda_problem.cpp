// SPDX-License-Identifier: Apache-2.0
#include "cuda_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cases/number.h"
#include "cases/work.h"
#include "page_allocator.h"
#include "synthetic.h"
#include "user_error.h"

namespace attune::cli {
namespace {

constexpr int64_t kBlockBytes = int64_t{128} << 20;  // of random pages that the host holds of K, and of V
constexpr int32_t kNoPage = 0x7fffff00;

void check_call(attune_status status) {
  if (status != ATTUNE_OK) throw std::runtime_error(attune_last_error());
}

void require_simple(const cases::Case& c) {
  const bool one = c.max_seqlen_q() == 1;
  const bool queries = one ? c.queries == cases::QueryShape::kFlat : c.queries == cases::QueryShape::kRagged;
  const bool packed = c.cache.format == ATTUNE_KV_MLA_656;
  const bool cache = c.kv == cases::KvSource::kPaged && c.cache.ring_capacity == 0 &&
                     (packed ? !c.new_tokens : c.cache.format == ATTUNE_KV_PLAIN) &&
                     (!cases::scales_by_token(c.cache.scales) || c.cache.layout == ATTUNE_KV_NHD);
  const bool dense = c.kv == cases::KvSource::kDense && c.seqlens_kv == c.seqlens_q && !c.shared_kv;
  const bool simple = queries && (cache || dense) && c.beam_width == 0 && c.sparse.topk == 0 && c.indexer.topk == 0 &&
                      static_cast<const cases::MaskSpec&>(c) == cases::MaskSpec{} && c.bias == 0 &&
                      c.finished.empty() && c.q_rope == 0;
  if (!simple)
    throw UserError(fmt::format("{} cannot be timed on CUDA: no large data are made for such a case", c.name));
}

}  // namespace

CudaProblem::CudaProblem(const cases::Case& spec, cases::CudaMemory& memory, int copies)
    : spec_(spec), memory_(memory), arena_(memory), random_(spec.name, 1), copies_(copies) {
  require_simple(spec);
  check_call(attune_attention_init(&host_, sizeof(host_)));
  host_.causal = spec.causal ? 1 : 0;
  host_.window_left = spec.window_left;
  host_.window_right = spec.window_right;
  host_.softmax_scale = static_cast<float>(spec.softmax_scale);
  host_.softcap = static_cast<float>(spec.softcap);
  host_.batch_invariant = spec.batch_invariant ? 1 : 0;
  host_.head_dim_v = spec.head_dim_v;
  make_queries();
  count_keys();
  if (spec.has_cache()) make_cache();
  make_scores();
  make_prologue();
  arena_.upload();
  const double rows = static_cast<double>(spec.total_q() * spec.num_heads_q) *
                      static_cast<double>(spec.head_dim_qk * cases::element_size(spec.dtype) +
                                          spec.head_dim_v * cases::element_size(spec.resolved_out_dtype()));
  kv_bytes_ = cases::work_of(spec).bytes - rows;
}

CudaProblem::~CudaProblem() {
  for (void* pool : pools_) memory_.release(pool);
}

attune_tensor CudaProblem::add(const std::string& name, attune_dtype dtype, const std::vector<int64_t>& shape,
                               double deviation) {
  const attune_tensor t = arena_.add(name, dtype, shape);
  if (deviation > 0) fill_normal(dtype, t.data, cases::num_elements(t), deviation, random_);
  return t;
}

void CudaProblem::make_queries() {
  const cases::Case& c = spec_;
  const int64_t rows = c.total_q();
  host_.q = add("q", c.dtype, {rows, c.num_heads_q, c.head_dim_qk}, 1);
  host_.out = add("out", c.resolved_out_dtype(), {rows, c.num_heads_q, c.head_dim_v}, 0);
  if (c.queries == cases::QueryShape::kRagged) {
    host_.max_seqlen_q = c.max_seqlen_q();  // as engines do
    host_.cu_seqlens_q = arena_.add("cu_seqlens_q", ATTUNE_INT32, {c.batch() + 1});
    auto* offsets = static_cast<int32_t*>(host_.cu_seqlens_q.data);
    *offsets = 0;
    for (const int64_t n : c.seqlens_q) {
      offsets[1] = offsets[0] + static_cast<int32_t>(n);
      ++offsets;
    }
  }
  if (!c.new_tokens && c.has_cache()) return;
  host_.k = add("k", c.dtype, {rows, c.num_heads_kv, c.head_dim_qk}, 1);
  if (!c.shared_kv) host_.v = add("v", c.dtype, {rows, c.num_heads_kv, c.head_dim_v}, 1);
}

void CudaProblem::count_keys() {
  for (int64_t b = 0; b < spec_.batch(); ++b) {
    const int64_t n = spec_.seqlens_q[static_cast<size_t>(b)];
    for (int64_t i = 1; i <= n; ++i) {
      const int64_t keys = spec_.causal ? spec_.keys(b) - n + i : spec_.keys(b);
      keys_of_row_.push_back(spec_.window_left >= 0 ? std::min(keys, spec_.window_left + 1) : keys);
    }
  }
}

void CudaProblem::make_cache() {
  make_tables();
  host_.cache.layout = spec_.cache.layout;
  if (spec_.cache.format == ATTUNE_KV_MLA_656) return make_packed();
  make_plane("cache.k", spec_.head_dim_qk, host_.cache.k, host_.cache.k_scale, device_k_, device_k_scale_);
  if (spec_.shared_kv) return;
  make_plane("cache.v", spec_.head_dim_v, host_.cache.v, host_.cache.v_scale, device_v_, device_v_scale_);
}

void CudaProblem::make_packed() {
  const int64_t page = spec_.cache.page_size;
  host_.cache.format = ATTUNE_KV_MLA_656;
  host_.cache.layout = ATTUNE_KV_BYTES;
  host_.cache.page_size = page;
  host_.cache.k = arena_.add("cache.k", ATTUNE_UINT8, {block_pages_, page, kMla656Bytes});
  fill_mla_656(host_.cache.k.data, block_pages_ * page, random_);
  device_k_ = replicate(host_.cache.k, page * kMla656Bytes);
}

void CudaProblem::make_tables() {
  const int64_t page = spec_.cache.page_size, batch = spec_.batch();
  const auto pages_of = [&](int64_t b) { return pages_for(spec_.keys(b), page); };
  for (int64_t b = 0; b < batch; ++b) {
    pages_ += pages_of(b);
    max_pages_ = std::max(max_pages_, pages_of(b));
  }
  const int64_t widest = std::max(spec_.head_dim_qk, spec_.head_dim_v);
  const int64_t bytes_of_page = page * spec_.num_heads_kv * widest * cases::element_size(spec_.cache_dtype());
  block_pages_ = std::clamp<int64_t>(kBlockBytes / bytes_of_page, 1, pages_ * copies_);

  host_.seqused_kv = arena_.add("seqused_kv", ATTUNE_INT32, {batch});
  for (int64_t b = 0; b < batch; ++b)
    static_cast<int32_t*>(host_.seqused_kv.data)[b] = static_cast<int32_t>(spec_.stored(b));
  host_.cache.page_table = arena_.add("host page_table", ATTUNE_INT32, {batch, max_pages_});
  std::vector<int32_t> order(static_cast<size_t>(pages_ * copies_));
  std::iota(order.begin(), order.end(), 0);
  random_.shuffle(order);
  auto next = order.begin();
  for (int64_t copy = 0; copy < copies_; ++copy) {
    tables_.push_back(arena_.add(fmt::format("page_table {}", copy), ATTUNE_INT32, {batch, max_pages_}));
    auto* table = static_cast<int32_t*>(tables_.back().data);
    auto* on_host = static_cast<int32_t*>(host_.cache.page_table.data);
    std::fill(table, table + batch * max_pages_, kNoPage);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < pages_of(b); ++i, ++next) {
        table[b * max_pages_ + i] = *next;
        if (copy == 0) on_host[b * max_pages_ + i] = static_cast<int32_t>(*next % block_pages_);
      }
    }
  }
}

void CudaProblem::make_plane(const std::string& name, int64_t head_dim, attune_tensor& data, attune_tensor& scale,
                             void*& device_data, void*& device_scale) {
  const attune_dtype dtype = spec_.cache_dtype();
  // 8-bit codes use most of their range.
  const double deviation = cases::element_size(dtype) > 1 ? 1 : dtype == ATTUNE_INT8 ? 30 : 16;
  const int64_t page = spec_.cache.page_size, heads = spec_.num_heads_kv;
  const auto shape = [&]() -> std::vector<int64_t> {
    if (spec_.cache.layout == ATTUNE_KV_NHD) return {block_pages_, page, heads, head_dim};
    if (spec_.cache.layout == ATTUNE_KV_HND) return {block_pages_, heads, page, head_dim};
    const int64_t x = 16 / cases::element_size(dtype);  // channels of K that lie together
    if (&data == &host_.cache.v) return {block_pages_, heads, head_dim, page};
    return {block_pages_, heads, head_dim / x, page, x};
  };
  data = add(name, dtype, shape(), deviation);
  device_data = replicate(data, page * heads * head_dim * cases::element_size(dtype));
  if (spec_.cache.scales != ScaleMode::kNone)
    scale = make_scale(name + "_scale", head_dim, 1 / deviation, device_scale);
}

attune_tensor CudaProblem::make_scale(const std::string& name, int64_t head_dim, double mean, void*& device_scale) {
  const std::vector<int64_t> shape = cases::scale_shape(spec_.cache.scales, spec_.cache.layout, block_pages_,
                                                        spec_.cache.page_size, spec_.num_heads_kv, head_dim);
  const attune_tensor t = arena_.add(name, ATTUNE_FLOAT32, shape);
  auto* values = static_cast<float*>(t.data);
  for (int64_t i = 0; i < cases::num_elements(t); ++i) values[i] = static_cast<float>(mean * random_.uniform(0.5, 1.5));
  if (cases::scales_by_token(spec_.cache.scales)) {
    device_scale = replicate(
        t, spec_.cache.page_size * spec_.num_heads_kv * cases::scale_bytes_of_row(spec_.cache.scales, head_dim));
  }
  return t;
}

void* CudaProblem::replicate(const attune_tensor& block, int64_t bytes_of_page) {
  const int64_t all = pages_ * copies_;
  auto* pool = static_cast<std::byte*>(memory_.allocate(static_cast<size_t>(all * bytes_of_page)));
  pools_.push_back(pool);
  memory_.upload(pool, block.data, static_cast<size_t>(std::min(all, block_pages_) * bytes_of_page));
  const cuda::ScopedContext context(memory_.device().index);
  const cuda::Driver& d = cuda::require_driver();
  for (int64_t page = block_pages_; page < all; page += block_pages_) {
    const int64_t count = std::min(block_pages_, all - page);
    cuda::check(d.cuMemcpyDtoDAsync(reinterpret_cast<cuda::DevicePointer>(pool + page * bytes_of_page),
                                    reinterpret_cast<cuda::DevicePointer>(pool),
                                    static_cast<size_t>(count * bytes_of_page), nullptr),
                "filling the cache");
  }
  memory_.synchronize();
  return pool;
}

void CudaProblem::make_scores() {
  if (spec_.alibi != 0) {
    host_.alibi_slopes = arena_.add("alibi_slopes", ATTUNE_FLOAT32, {spec_.num_heads_q});
    check_call(attune_alibi_slopes(spec_.num_heads_q, static_cast<float*>(host_.alibi_slopes.data)));
  }
  if (spec_.t5_buckets > 0) {
    host_.t5_bias = add("t5_bias", ATTUNE_FLOAT32, {spec_.num_heads_q, spec_.t5_buckets}, 1);
    host_.t5_max_distance = spec_.t5_max_distance;
  }
  if (!spec_.sinks.empty()) host_.sinks = add("sinks", ATTUNE_FLOAT32, {spec_.num_heads_q}, 1);
}

void CudaProblem::make_prologue() {
  const cases::PrologueSpec& s = spec_.prologue;
  attune_prologue& p = host_.prologue;
  if (s.q_bias) p.q_bias = add("prologue.q_bias", ATTUNE_FLOAT32, {spec_.num_heads_q, spec_.head_dim_qk}, 0.5);
  if (s.k_bias) p.k_bias = add("prologue.k_bias", ATTUNE_FLOAT32, {spec_.num_heads_kv, spec_.head_dim_qk}, 0.5);
  if (s.v_bias) p.v_bias = add("prologue.v_bias", ATTUNE_FLOAT32, {spec_.num_heads_kv, spec_.head_dim_v}, 0.5);
  p.append = s.append ? 1 : 0;
  if (s.rope.dim == 0) return;
  attune_rope rope;
  check_call(attune_rope_init(&rope, sizeof(rope)));
  rope.style = s.rope.style;
  rope.dim = s.rope.dim;
  rope.theta = s.rope.theta;
  const int64_t positions = *std::max_element(spec_.seqlens_kv.begin(), spec_.seqlens_kv.end()) + 1;
  p.rope_cos_sin = arena_.add("prologue.rope_cos_sin", ATTUNE_FLOAT32, {positions, s.rope.dim});
  check_call(attune_rope_table(&rope, 0, positions, static_cast<float*>(p.rope_cos_sin.data)));
  p.rope_interleaved = s.rope.interleaved ? 1 : 0;
}

attune_attention CudaProblem::device(int copy) const {
  attune_attention a = arena_.on_device(host_);
  if (tables_.empty()) return a;
  a.cache.page_table.data = arena_.device_pointer(tables_[static_cast<size_t>(copy)].data);
  a.cache.k.data = device_k_;
  a.cache.v.data = device_v_;
  a.cache.k.shape[0] = pages_ * copies_;
  if (device_v_ != nullptr) a.cache.v.shape[0] = pages_ * copies_;
  if (device_k_scale_ != nullptr) {
    a.cache.k_scale.data = device_k_scale_;
    a.cache.v_scale.data = device_v_scale_;
    a.cache.k_scale.shape[0] = pages_ * copies_;
    if (device_v_scale_ != nullptr) a.cache.v_scale.shape[0] = pages_ * copies_;
  }
  return a;
}

void CudaProblem::upload_out() {
  cases::Buffer* out = arena_.owner(host_.out.data);
  std::memset(out->host(), 0xff, out->size());
  out->upload();
}

void CudaProblem::download_out() {
  cases::Buffer* out = arena_.owner(host_.out.data);
  const std::vector<std::byte> bytes = out->download();
  std::memcpy(out->host(), bytes.data(), bytes.size());
}

}  // namespace attune::cli
