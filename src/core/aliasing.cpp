// SPDX-License-Identifier: Apache-2.0
#include "core/aliasing.h"

#include <cstdint>
#include <iterator>

#include "core/overlap.h"
#include "core/status.h"
#include "core/tensor.h"

namespace attune {
namespace {

// The last three are read or written as the operation uses its cache.
enum class Role { kRead, kWritten, kCacheRows, kKeyScales, kValueScales };

// A tensor of an operation's struct.
struct Field {
  const char* name;
  size_t offset;
  Role role = Role::kRead;
};

#define ATTUNE_READ(field) \
  { #field, offsetof(Op, field) }
#define ATTUNE_WRITTEN(field) \
  { #field, offsetof(Op, field), Role::kWritten }
#define ATTUNE_CACHE                                                                                          \
  {"cache.k", offsetof(Op, cache.k), Role::kCacheRows}, {"cache.v", offsetof(Op, cache.v), Role::kCacheRows}, \
      {"cache.k_scale", offsetof(Op, cache.k_scale), Role::kKeyScales},                                       \
      {"cache.v_scale", offsetof(Op, cache.v_scale), Role::kValueScales}, ATTUNE_READ(cache.page_table),      \
      ATTUNE_READ(cache.v_page_table), ATTUNE_READ(cache.batch_index)
#define ATTUNE_PROLOGUE                                                                                           \
  ATTUNE_READ(prologue.qkv_scale), ATTUNE_READ(prologue.q_bias), ATTUNE_READ(prologue.k_bias),                    \
      ATTUNE_READ(prologue.v_bias), ATTUNE_READ(prologue.ia3_k), ATTUNE_READ(prologue.ia3_v),                     \
      ATTUNE_READ(prologue.ia3_task), ATTUNE_READ(prologue.rope_cos_sin), ATTUNE_READ(prologue.rope_table_index), \
      ATTUNE_READ(prologue.positions), ATTUNE_READ(prologue.logn)

template <class Op>
struct Fields;

template <>
struct Fields<attune_attention> {
  using Op = attune_attention;
  static constexpr Field kAll[] = {ATTUNE_WRITTEN(out),
                                   ATTUNE_WRITTEN(lse),
                                   ATTUNE_WRITTEN(max_logits),
                                   ATTUNE_READ(q),
                                   ATTUNE_READ(cu_seqlens_q),
                                   ATTUNE_READ(k),
                                   ATTUNE_READ(v),
                                   ATTUNE_READ(cu_seqlens_kv),
                                   ATTUNE_CACHE,
                                   ATTUNE_READ(seqused_kv),
                                   ATTUNE_READ(indices),
                                   ATTUNE_READ(topk_length),
                                   ATTUNE_READ(extra_cache.k),
                                   ATTUNE_READ(extra_cache.v),
                                   ATTUNE_READ(extra_cache.k_scale),
                                   ATTUNE_READ(extra_cache.v_scale),
                                   ATTUNE_READ(extra_indices),
                                   ATTUNE_READ(extra_topk_length),
                                   ATTUNE_READ(cache_indirection),
                                   ATTUNE_READ(beam_prompt_length),
                                   ATTUNE_READ(mask_bits),
                                   ATTUNE_READ(mask_start),
                                   ATTUNE_READ(bidirectional_ranges),
                                   ATTUNE_READ(finished),
                                   ATTUNE_READ(alibi_slopes),
                                   ATTUNE_READ(bias),
                                   ATTUNE_READ(new_token_bias),
                                   ATTUNE_READ(t5_bias),
                                   ATTUNE_READ(sinks),
                                   ATTUNE_READ(out_scale),
                                   ATTUNE_PROLOGUE};
};

template <>
struct Fields<attune_attention_backward> {  // and what attention reads and has written
  using Op = attune_attention_backward;
  static constexpr Field kAll[] = {ATTUNE_WRITTEN(dq),     ATTUNE_WRITTEN(dk),    ATTUNE_WRITTEN(dv),
                                   ATTUNE_WRITTEN(dsinks), ATTUNE_WRITTEN(dbias), ATTUNE_WRITTEN(dt5_bias),
                                   ATTUNE_READ(dout),      ATTUNE_READ(dlse)};
};

template <>
struct Fields<attune_qkv_prepare> {
  using Op = attune_qkv_prepare;
  static constexpr Field kAll[] = {
      ATTUNE_WRITTEN(q_out), ATTUNE_WRITTEN(k_out),     ATTUNE_WRITTEN(v_out),   ATTUNE_READ(q),        ATTUNE_READ(k),
      ATTUNE_READ(v),        ATTUNE_READ(cu_seqlens_q), ATTUNE_READ(seqused_kv), ATTUNE_READ(finished), ATTUNE_CACHE,
      ATTUNE_PROLOGUE};
};

template <>
struct Fields<attune_merge> {
  using Op = attune_merge;
  static constexpr Field kAll[] = {ATTUNE_WRITTEN(out),      ATTUNE_WRITTEN(lse), ATTUNE_READ(partial_out),
                                   ATTUNE_READ(partial_lse), ATTUNE_READ(sinks),  ATTUNE_READ(out_scale)};
};

template <>
struct Fields<attune_cache_op> {  // as if the cache were written; see check_apart for operations that write k and v
  using Op = attune_cache_op;
  static constexpr Field kAll[] = {ATTUNE_READ(k),       ATTUNE_READ(v),          ATTUNE_CACHE,
                                   ATTUNE_READ(slots),   ATTUNE_READ(cu_seqlens), ATTUNE_READ(seqused_kv),
                                   ATTUNE_READ(finished)};
};

template <>
struct Fields<attune_indexer> {
  using Op = attune_indexer;
  static constexpr Field kAll[] = {
      ATTUNE_WRITTEN(indices), ATTUNE_WRITTEN(topk_length), ATTUNE_READ(scores),       ATTUNE_READ(q),
      ATTUNE_READ(q_scale),    ATTUNE_READ(weights),        ATTUNE_READ(cu_seqlens_q), ATTUNE_CACHE,
      ATTUNE_READ(seqused_kv), ATTUNE_READ(key_begin),      ATTUNE_READ(key_end),      ATTUNE_READ(slot_table)};
};

// The memory of the tensors of one call.
class Areas {
 public:
  void add(const char* name, const attune_tensor& t, bool written, const attune_tensor* in_place_of = nullptr) {
    const ByteRange bytes = byte_range(t);
    if (bytes.begin == bytes.end) return;
    Area& area = written ? written_[num_written_++] : read_[num_read_++];
    area = {name, &t, in_place_of, bytes};
  }

  // Compares byte ranges first, and strides only where the ranges meet.
  void check() const {
    for (int i = 0; i < num_written_; ++i) {
      for (int j = 0; j < num_read_; ++j) check_pair(written_[i], read_[j]);
      for (int j = 0; j < i; ++j) check_pair(written_[i], written_[j]);
    }
  }

  void check_workspace(const void* workspace, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(workspace);
    const ByteRange range{begin, begin + bytes};
    for (int i = 0; i < num_written_; ++i) check_workspace(range, written_[i]);
    for (int i = 0; i < num_read_; ++i) check_workspace(range, read_[i]);
  }

 private:
  struct Area {
    const char* name;
    const attune_tensor* tensor;
    const attune_tensor* in_place_of;
    ByteRange bytes;
  };

  static void check_pair(const Area& out, const Area& other) {
    if (!meet(out.bytes, other.bytes) || !may_overlap(*out.tensor, *other.tensor)) return;
    if (out.in_place_of == other.tensor && same_rows(*out.tensor, *other.tensor)) return;
    fail(ATTUNE_INVALID_ARGUMENT, out.name, " overlaps ", other.name, "; what is written must lie apart from ",
         out.in_place_of != nullptr ? "all else, or replace its own input: the same rows at the same addresses"
                                    : "inputs, caches and other outputs");
  }

  static void check_workspace(const ByteRange& workspace, const Area& area) {
    require(!meet(workspace, area.bytes), "workspace overlaps ", area.name, "; it must lie apart from every tensor");
  }

  static constexpr int kMost = 64;
  Area written_[kMost], read_[kMost];  // the first num_written_ and num_read_ are in use
  int num_written_ = 0, num_read_ = 0;
};

template <class Op>
const attune_tensor& tensor_at(const Op& op, const Field& field) {
  return *reinterpret_cast<const attune_tensor*>(reinterpret_cast<const std::byte*>(&op) + field.offset);
}

bool is_written(Role role, const KvCache* written) {
  constexpr auto kByToken = KvScale::Mode::kTokenHead;
  switch (role) {
    case Role::kRead:
      return false;
    case Role::kWritten:
      return true;
    case Role::kCacheRows:
      return written != nullptr;
    case Role::kKeyScales:
      return written != nullptr && written->k_scale.mode == kByToken;
    case Role::kValueScales:
      return written != nullptr && written->v_scale.mode == kByToken;
  }
  return false;
}

template <class Op>
void add_fields(const Op& op, const KvCache* written_cache, Areas& areas) {
  for (const Field& field : Fields<Op>::kAll) {
    const attune_tensor& t = tensor_at(op, field);
    if (present(t)) areas.add(field.name, t, is_written(field.role, written_cache));
  }
}

}  // namespace

void check_apart(const attune_attention& a, const KvCache* appended, const void* workspace, size_t workspace_bytes) {
  Areas areas;
  add_fields(a, appended, areas);
  areas.check();
  areas.check_workspace(workspace, workspace_bytes);
}

void check_apart(const attune_attention_backward& op, const attune_attention& a, const void* workspace,
                 size_t workspace_bytes) {
  Areas areas;
  add_fields(op, nullptr, areas);
  for (const Field& field : Fields<attune_attention>::kAll) {
    const attune_tensor& t = tensor_at(a, field);
    if (present(t)) areas.add(field.name, t, false);
  }
  areas.check();
  areas.check_workspace(workspace, workspace_bytes);
}

void check_apart(const attune_qkv_prepare& op, const KvCache* appended) {
  Areas areas;
  for (const Field& field : Fields<attune_qkv_prepare>::kAll) {
    const attune_tensor& t = tensor_at(op, field);
    if (!present(t)) continue;
    const attune_tensor* const input = &t == &op.q_out   ? &op.q
                                       : &t == &op.k_out ? &op.k
                                       : &t == &op.v_out ? &op.v
                                                         : nullptr;
    areas.add(field.name, t, is_written(field.role, appended), input);
  }
  areas.check();
}

void check_apart(const attune_merge& op) {
  Areas areas;
  add_fields(op, nullptr, areas);
  areas.check();
}

void check_apart(const attune_cache_op& op, const KvCache& cache) {
  const bool writes_cache = op.kind == ATTUNE_CACHE_APPEND || op.kind == ATTUNE_CACHE_QUANTIZE;
  const KvCache* const written = writes_cache ? &cache : nullptr;
  Areas areas;
  for (const Field& field : Fields<attune_cache_op>::kAll) {
    const attune_tensor& t = tensor_at(op, field);
    if (!present(t)) continue;
    const bool is_dense = &t == &op.k || &t == &op.v;
    areas.add(field.name, t, is_dense ? !writes_cache : is_written(field.role, written));
  }
  areas.check();
}

void check_apart(const attune_indexer& op, const void* workspace, size_t workspace_bytes) {
  Areas areas;
  for (const Field& field : Fields<attune_indexer>::kAll) {
    const attune_tensor& t = tensor_at(op, field);
    if (!present(t)) continue;
    const bool writes_scores = &t == &op.scores && op.kind == ATTUNE_INDEXER_SCORES;
    areas.add(field.name, t, writes_scores || is_written(field.role, nullptr));
  }
  areas.check();
  areas.check_workspace(workspace, workspace_bytes);
}

}  // namespace attune
