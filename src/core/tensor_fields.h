// SPDX-License-Identifier: Apache-2.0
// Every tensor of the structs of the C ABI: its name, where it lies and whether an operation writes it. A tensor that
// is missing here does not compile.
#pragma once

#include <cstddef>
#include <iterator>

#include "attune/attune.h"
#include "common/attention_fields.h"

namespace attune {

// Whether the last three are read or written depends on how the operation uses its cache.
enum class TensorRole { kRead, kWritten, kCacheRows, kKeyScales, kValueScales };

struct TensorField {
  const char* name;
  size_t offset;
  TensorRole role = TensorRole::kRead;
};

template <class Op>
attune_tensor& tensor_at(Op& op, const TensorField& field) {
  return *reinterpret_cast<attune_tensor*>(reinterpret_cast<std::byte*>(&op) + field.offset);
}
template <class Op>
const attune_tensor& tensor_at(const Op& op, const TensorField& field) {
  return tensor_at(const_cast<Op&>(op), field);
}

// In the order of the struct.
template <class Op>
struct TensorFields;

#define ATTUNE_READ(field) \
  { #field, offsetof(Op, field) }
#define ATTUNE_WRITTEN(field) \
  { #field, offsetof(Op, field), TensorRole::kWritten }
#define ATTUNE_CACHE(rows, key_scales, value_scales, cache)                                          \
  {#cache ".k", offsetof(Op, cache.k), rows}, {#cache ".v", offsetof(Op, cache.v), rows},            \
      {#cache ".k_scale", offsetof(Op, cache.k_scale), key_scales},                                  \
      {#cache ".v_scale", offsetof(Op, cache.v_scale), value_scales}, ATTUNE_READ(cache.page_table), \
      ATTUNE_READ(cache.v_page_table), ATTUNE_READ(cache.batch_index)
#define ATTUNE_OWN_CACHE ATTUNE_CACHE(TensorRole::kCacheRows, TensorRole::kKeyScales, TensorRole::kValueScales, cache)
#define ATTUNE_READ_CACHE(cache) ATTUNE_CACHE(TensorRole::kRead, TensorRole::kRead, TensorRole::kRead, cache)
#define ATTUNE_PROLOGUE                                                                                           \
  ATTUNE_READ(prologue.qkv_scale), ATTUNE_READ(prologue.q_bias), ATTUNE_READ(prologue.k_bias),                    \
      ATTUNE_READ(prologue.v_bias), ATTUNE_READ(prologue.ia3_k), ATTUNE_READ(prologue.ia3_v),                     \
      ATTUNE_READ(prologue.ia3_task), ATTUNE_READ(prologue.rope_cos_sin), ATTUNE_READ(prologue.rope_table_index), \
      ATTUNE_READ(prologue.positions), ATTUNE_READ(prologue.logn)

// A row of ATTUNE_ATTENTION_FIELDS: the tensors that it has.
#define ATTUNE_TENSORS(name, kind) ATTUNE_TENSORS_##kind(name)
#define ATTUNE_TENSORS_Input(name) ATTUNE_READ(name),
#define ATTUNE_TENSORS_Bits(name) ATTUNE_READ(name),
#define ATTUNE_TENSORS_Output(name) ATTUNE_WRITTEN(name),
#define ATTUNE_TENSORS_Cache(name) ATTUNE_OWN_CACHE,
#define ATTUNE_TENSORS_ReadCache(name) ATTUNE_READ_CACHE(name),
#define ATTUNE_TENSORS_Prologue(name) ATTUNE_PROLOGUE,
#define ATTUNE_TENSORS_Bool(name)
#define ATTUNE_TENSORS_Int32(name)
#define ATTUNE_TENSORS_Int64(name)
#define ATTUNE_TENSORS_Float(name)

template <>
struct TensorFields<attune_attention> {
  using Op = attune_attention;
  static constexpr TensorField kAll[] = {ATTUNE_ATTENTION_FIELDS(ATTUNE_TENSORS)};
};

#undef ATTUNE_TENSORS_Float
#undef ATTUNE_TENSORS_Int64
#undef ATTUNE_TENSORS_Int32
#undef ATTUNE_TENSORS_Bool
#undef ATTUNE_TENSORS_Prologue
#undef ATTUNE_TENSORS_ReadCache
#undef ATTUNE_TENSORS_Cache
#undef ATTUNE_TENSORS_Output
#undef ATTUNE_TENSORS_Bits
#undef ATTUNE_TENSORS_Input
#undef ATTUNE_TENSORS

template <>
struct TensorFields<attune_attention_backward> {  // beside those of the forward's descriptor
  using Op = attune_attention_backward;
  static constexpr TensorField kAll[] = {ATTUNE_READ(dout),     ATTUNE_READ(dlse),       ATTUNE_WRITTEN(dq),
                                         ATTUNE_WRITTEN(dk),    ATTUNE_WRITTEN(dv),      ATTUNE_WRITTEN(dsinks),
                                         ATTUNE_WRITTEN(dbias), ATTUNE_WRITTEN(dt5_bias)};
};

template <>
struct TensorFields<attune_qkv_prepare> {
  using Op = attune_qkv_prepare;
  static constexpr TensorField kAll[] = {
      ATTUNE_READ(q),          ATTUNE_READ(k),        ATTUNE_READ(v),       ATTUNE_READ(cu_seqlens_q),
      ATTUNE_READ(seqused_kv), ATTUNE_READ(finished), ATTUNE_OWN_CACHE,     ATTUNE_PROLOGUE,
      ATTUNE_WRITTEN(q_out),   ATTUNE_WRITTEN(k_out), ATTUNE_WRITTEN(v_out)};
};

template <>
struct TensorFields<attune_merge> {
  using Op = attune_merge;
  static constexpr TensorField kAll[] = {ATTUNE_READ(partial_out), ATTUNE_READ(partial_lse), ATTUNE_READ(sinks),
                                         ATTUNE_WRITTEN(out),      ATTUNE_READ(out_scale),   ATTUNE_WRITTEN(lse)};
};

template <>
struct TensorFields<attune_cache_op> {  // as if the cache were written and k and v read
  using Op = attune_cache_op;
  static constexpr TensorField kAll[] = {ATTUNE_OWN_CACHE,     ATTUNE_READ(k),          ATTUNE_READ(v),
                                         ATTUNE_READ(slots),   ATTUNE_READ(cu_seqlens), ATTUNE_READ(seqused_kv),
                                         ATTUNE_READ(finished)};
};

template <>
struct TensorFields<attune_indexer> {  // as if scores were read
  using Op = attune_indexer;
  static constexpr TensorField kAll[] = {
      ATTUNE_READ(q),           ATTUNE_READ(q_scale),    ATTUNE_READ(weights),        ATTUNE_READ(cu_seqlens_q),
      ATTUNE_READ_CACHE(cache), ATTUNE_READ(seqused_kv), ATTUNE_READ(key_begin),      ATTUNE_READ(key_end),
      ATTUNE_READ(scores),      ATTUNE_WRITTEN(indices), ATTUNE_WRITTEN(topk_length), ATTUNE_READ(slot_table)};
};

#undef ATTUNE_PROLOGUE
#undef ATTUNE_READ_CACHE
#undef ATTUNE_OWN_CACHE
#undef ATTUNE_CACHE
#undef ATTUNE_WRITTEN
#undef ATTUNE_READ

// Whether no tensor fits beside those of the table.
template <class Op>
constexpr bool has_all_tensors() {
  size_t end = 0;
  for (const TensorField& field : TensorFields<Op>::kAll) {
    if (field.offset < end || field.offset - end >= sizeof(attune_tensor)) return false;
    end = field.offset + sizeof(attune_tensor);
  }
  return sizeof(Op) - end < sizeof(attune_tensor);
}
static_assert(has_all_tensors<attune_attention>() && has_all_tensors<attune_attention_backward>() &&
                  has_all_tensors<attune_qkv_prepare>() && has_all_tensors<attune_merge>() &&
                  has_all_tensors<attune_cache_op>() && has_all_tensors<attune_indexer>(),
              "a tensor of attune.h is missing, or not in the struct's order");

}  // namespace attune
