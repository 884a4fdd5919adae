// SPDX-License-Identifier: Apache-2.0
#include "core/aliasing.h"

#include <cstdint>

#include "core/overlap.h"
#include "core/status.h"
#include "core/tensor.h"
#include "core/tensor_fields.h"

namespace attune {
namespace {

// The memory of the tensors of one call.
class Areas {
 public:
  void add(const char* name, const attune_tensor& t, bool written, const attune_tensor* in_place_of = nullptr) {
    const ByteRange bytes = byte_range(t);
    if (bytes.begin == bytes.end) return;
    Area& area = written ? written_[num_written_++] : read_[num_read_++];
    area = {name, &t, in_place_of, bytes};
  }

  // Compares byte ranges first, and strides only where the ranges overlap.
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

bool is_written(TensorRole role, const KvCache* written) {
  if (role == TensorRole::kRead || role == TensorRole::kWritten) return role == TensorRole::kWritten;
  if (written == nullptr || role == TensorRole::kCacheRows) return written != nullptr;
  return (role == TensorRole::kKeyScales ? written->k_scale : written->v_scale).by_token();
}

template <class Op>
void add_fields(const Op& op, const KvCache* written_cache, Areas& areas) {
  for (const TensorField& field : TensorFields<Op>::kAll) {
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
  for (const TensorField& field : TensorFields<attune_attention>::kAll) {
    const attune_tensor& t = tensor_at(a, field);
    if (present(t)) areas.add(field.name, t, false);
  }
  areas.check();
  areas.check_workspace(workspace, workspace_bytes);
}

void check_apart(const attune_qkv_prepare& op, const KvCache* appended) {
  Areas areas;
  for (const TensorField& field : TensorFields<attune_qkv_prepare>::kAll) {
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
  for (const TensorField& field : TensorFields<attune_cache_op>::kAll) {
    const attune_tensor& t = tensor_at(op, field);
    if (!present(t)) continue;
    const bool is_dense = &t == &op.k || &t == &op.v;
    areas.add(field.name, t, is_dense ? !writes_cache : is_written(field.role, written));
  }
  areas.check();
}

void check_apart(const attune_indexer& op, const void* workspace, size_t workspace_bytes) {
  Areas areas;
  for (const TensorField& field : TensorFields<attune_indexer>::kAll) {
    const attune_tensor& t = tensor_at(op, field);
    if (!present(t)) continue;
    const bool writes_scores = &t == &op.scores && op.kind == ATTUNE_INDEXER_SCORES;
    areas.add(field.name, t, writes_scores || is_written(field.role, nullptr));
  }
  areas.check();
  areas.check_workspace(workspace, workspace_bytes);
}

}  // namespace attune
