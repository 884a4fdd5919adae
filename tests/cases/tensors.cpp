// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <stdexcept>

namespace attune::cases {
namespace {

void append(std::vector<NamedTensor>& to, std::vector<NamedTensor> from) {
  to.insert(to.end(), from.begin(), from.end());
}

std::vector<NamedTensor> cache_tensors(attune_kv_cache& c, bool extra) {
  return {{extra ? "extra_cache.k" : "cache.k", &c.k},
          {extra ? "extra_cache.v" : "cache.v", &c.v},
          {extra ? "extra_cache.k_scale" : "cache.k_scale", &c.k_scale},
          {extra ? "extra_cache.v_scale" : "cache.v_scale", &c.v_scale},
          {extra ? "extra_cache.page_table" : "cache.page_table", &c.page_table},
          {extra ? "extra_cache.v_page_table" : "cache.v_page_table", &c.v_page_table},
          {extra ? "extra_cache.batch_index" : "cache.batch_index", &c.batch_index}};
}

std::vector<NamedTensor> prologue_tensors(attune_prologue& p) {
  return {{"prologue.qkv_scale", &p.qkv_scale},
          {"prologue.q_bias", &p.q_bias},
          {"prologue.k_bias", &p.k_bias},
          {"prologue.v_bias", &p.v_bias},
          {"prologue.ia3_k", &p.ia3_k},
          {"prologue.ia3_v", &p.ia3_v},
          {"prologue.ia3_task", &p.ia3_task},
          {"prologue.rope_cos_sin", &p.rope_cos_sin},
          {"prologue.rope_table_index", &p.rope_table_index},
          {"prologue.positions", &p.positions},
          {"prologue.logn", &p.logn}};
}

}  // namespace

void* element_at(const attune_tensor& t, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int axis = 0;
  for (const int64_t i : index) offset += i * t.stride[axis++];
  return static_cast<std::byte*>(t.data) + offset * element_size(static_cast<attune_dtype>(t.dtype));
}

int64_t num_elements(const attune_tensor& t) {
  if (t.dtype == ATTUNE_DTYPE_NONE) return 0;
  int64_t n = 1;
  for (int axis = 0; axis < t.rank; ++axis) n *= t.shape[axis];
  return n;
}

void* pool_element(const attune_kv_cache& cache, bool is_v, int64_t page, int64_t offset, int64_t head, int64_t d) {
  const attune_tensor& t = is_v ? cache.v : cache.k;
  switch (cache.layout) {
    case ATTUNE_KV_NHD:
      return element_at(t, {page, offset, head, d});
    case ATTUNE_KV_HND:
      return element_at(t, {page, head, offset, d});
    default:
      if (is_v) return element_at(t, {page, head, d, offset});
      return element_at(t, {page, head, d / t.shape[4], offset, d % t.shape[4]});
  }
}

std::vector<NamedTensor> tensors_of(attune_kv_cache& c) { return cache_tensors(c, false); }

std::vector<NamedTensor> tensors_of(attune_attention& a) {
  std::vector<NamedTensor> all = {{"q", &a.q},
                                  {"cu_seqlens_q", &a.cu_seqlens_q},
                                  {"k", &a.k},
                                  {"v", &a.v},
                                  {"cu_seqlens_kv", &a.cu_seqlens_kv},
                                  {"seqused_kv", &a.seqused_kv},
                                  {"indices", &a.indices},
                                  {"topk_length", &a.topk_length},
                                  {"extra_indices", &a.extra_indices},
                                  {"extra_topk_length", &a.extra_topk_length},
                                  {"cache_indirection", &a.cache_indirection},
                                  {"beam_prompt_length", &a.beam_prompt_length},
                                  {"mask_bits", &a.mask_bits},
                                  {"mask_start", &a.mask_start},
                                  {"bidirectional_ranges", &a.bidirectional_ranges},
                                  {"finished", &a.finished},
                                  {"alibi_slopes", &a.alibi_slopes},
                                  {"bias", &a.bias},
                                  {"new_token_bias", &a.new_token_bias},
                                  {"t5_bias", &a.t5_bias},
                                  {"sinks", &a.sinks},
                                  {"out", &a.out},
                                  {"out_scale", &a.out_scale},
                                  {"lse", &a.lse},
                                  {"max_logits", &a.max_logits}};
  append(all, cache_tensors(a.cache, false));
  append(all, cache_tensors(a.extra_cache, true));
  append(all, prologue_tensors(a.prologue));
  return all;
}

std::vector<NamedTensor> tensors_of(attune_qkv_prepare& p) {
  std::vector<NamedTensor> all = {{"q", &p.q},
                                  {"k", &p.k},
                                  {"v", &p.v},
                                  {"cu_seqlens_q", &p.cu_seqlens_q},
                                  {"seqused_kv", &p.seqused_kv},
                                  {"finished", &p.finished},
                                  {"q_out", &p.q_out},
                                  {"k_out", &p.k_out},
                                  {"v_out", &p.v_out}};
  append(all, cache_tensors(p.cache, false));
  append(all, prologue_tensors(p.prologue));
  return all;
}

std::vector<NamedTensor> tensors_of(attune_merge& m) {
  return {{"partial_out", &m.partial_out},
          {"partial_lse", &m.partial_lse},
          {"sinks", &m.sinks},
          {"out", &m.out},
          {"out_scale", &m.out_scale},
          {"lse", &m.lse}};
}

std::vector<NamedTensor> tensors_of(attune_cache_op& c) {
  std::vector<NamedTensor> all = {{"k", &c.k},
                                  {"v", &c.v},
                                  {"slots", &c.slots},
                                  {"cu_seqlens", &c.cu_seqlens},
                                  {"seqused_kv", &c.seqused_kv},
                                  {"finished", &c.finished}};
  append(all, cache_tensors(c.cache, false));
  return all;
}

std::vector<NamedTensor> tensors_of(attune_indexer& i) {
  std::vector<NamedTensor> all = {{"q", &i.q},
                                  {"q_scale", &i.q_scale},
                                  {"weights", &i.weights},
                                  {"cu_seqlens_q", &i.cu_seqlens_q},
                                  {"seqused_kv", &i.seqused_kv},
                                  {"key_begin", &i.key_begin},
                                  {"key_end", &i.key_end},
                                  {"scores", &i.scores},
                                  {"indices", &i.indices},
                                  {"topk_length", &i.topk_length},
                                  {"slot_table", &i.slot_table}};
  append(all, cache_tensors(i.cache, false));
  return all;
}

attune_tensor Arena::add(const std::string& name, attune_dtype dtype, const std::vector<int64_t>& shape,
                         const Layout& layout) {
  attune_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int64_t extent = 1;
  for (int position = t.rank - 1; position >= 0; --position) {
    const int axis = layout.order.empty() ? position : layout.order[static_cast<size_t>(position)];
    const int64_t padding = layout.padding.empty() ? 0 : layout.padding[static_cast<size_t>(axis)];
    t.shape[axis] = shape[static_cast<size_t>(axis)];
    t.stride[axis] = extent;
    extent *= t.shape[axis];
    extent += padding;
  }
  Buffer& buffer = add_bytes(name, static_cast<size_t>(extent * element_size(dtype)), layout.offset);
  t.data = buffer.host();
  if (dtype == ATTUNE_INT8 && filler_ == kPoison) poison(dtype, buffer.host(), extent);
  return t;
}

Buffer& Arena::add_bytes(const std::string& name, size_t bytes, size_t offset) {
  buffers_.push_back(std::make_unique<Buffer>(memory_, name, bytes, offset, filler_));
  return *buffers_.back();
}

Buffer* Arena::owner(const void* p) const {
  for (const auto& buffer : buffers_) {
    if (buffer->contains(p)) return buffer.get();
  }
  return nullptr;
}

void Arena::upload() {
  for (const auto& buffer : buffers_) buffer->upload();
}

void* Arena::device_pointer(const void* host) const {
  if (host == nullptr) return nullptr;
  Buffer* buffer = owner(host);
  if (buffer == nullptr) throw std::logic_error("a tensor points outside of its arena");
  return static_cast<std::byte*>(buffer->device()) + (static_cast<const std::byte*>(host) - buffer->host());
}

std::string Arena::check_guards() const {
  for (const auto& buffer : buffers_) {
    if (std::string wrong = buffer->check_guards(); !wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace attune::cases
