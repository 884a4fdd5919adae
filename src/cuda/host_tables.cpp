// SPDX-License-Identifier: Apache-2.0
#include "cuda/host_tables.h"

#include "core/status.h"
#include "core/tensor_fields.h"
#include "cuda/device.h"

namespace attune::cuda {
namespace {

// Whether the device reads unregistered host memory, as on Grace Hopper.
bool reaches_all_memory(int32_t ordinal) {
  const Driver& d = require_driver();
  Ordinal device = 0;
  int32_t value = 0;
  check(d.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check(d.cuDeviceGetAttribute(&value, DeviceAttribute::kPageableMemoryAccess, device), "cuDeviceGetAttribute");
  return value != 0;
}

}  // namespace

void check_reachable(const char* name, const void* data, int32_t device) {
  if (data == nullptr) return;
  const ScopedContext context(device);
  int32_t type = 0;
  const Result result = require_driver().cuPointerGetAttribute(&type, PointerAttribute::kMemoryType,
                                                               reinterpret_cast<DevicePointer>(data));
  if (result == kSuccess && type != 0) return;
  if (reaches_all_memory(device)) return;
  fail(ATTUNE_INVALID_ARGUMENT, name, " is not memory that CUDA device ", device,
       " can reach; it must be device, managed or pinned memory");
}

void check_reachable(const attune_attention& a, int32_t device) {
  for (const TensorField& field : TensorFields<attune_attention>::kAll) {
    const attune_tensor& t = tensor_at(a, field);
    if (present(t)) check_reachable(cat(field.name, ".data").c_str(), t.data, device);
  }
}

// Copies views into host memory of their own and points them there.
class HostTables::Copier {
 public:
  Copier(HostTables& to, const Copy& copy) : to_(to), copy_(copy) {}

  void table(IntView& v) {
    if (!v || v.cols == 0) return;
    v.data = rows(v.data, v.rows, v.rows > 1 ? v.row_stride : 0, (v.cols - 1) * v.col_stride + 1, v.row_stride);
  }
  void list(SparseList& s, int64_t num_rows, int64_t num_heads) {
    if (s.indices != nullptr && s.topk > 0 && num_rows > 0) {
      const int64_t heads = s.head_stride != 0 ? num_heads : 1;
      const int64_t extent = (heads - 1) * s.head_stride + (s.topk - 1) * s.entry_stride + 1;
      if (s.rows_per_batch == 0) {
        s.indices = rows(s.indices, num_rows, s.row_stride, extent, s.row_stride);
      } else {
        // Copies the rows of each sequence with their strides, and what lies between sequences.
        const int64_t of_sequence = (s.rows_per_batch - 1) * s.row_stride + extent;
        s.indices = rows(s.indices, num_rows / s.rows_per_batch, s.batch_stride, of_sequence, s.batch_stride);
      }
    }
    table(s.length);
  }
  void flags(const uint8_t*& data, int64_t& stride, int64_t count) {
    if (data == nullptr || count == 0) return;
    to_.flags_.resize(static_cast<size_t>((count - 1) * stride + 1));
    copy_(to_.flags_.data(), data, to_.flags_.size());
    data = to_.flags_.data();
  }

 private:
  // num_rows rows of `extent` elements, `stride` apart. Dense on the host, or, where rows overlap, as they were.
  const int32_t* rows(const int32_t* from, int64_t num_rows, int64_t stride, int64_t extent, int64_t& new_stride) {
    const bool apart = num_rows > 1 && stride > extent;
    const int64_t count = apart ? num_rows * extent : (num_rows - 1) * stride + extent;
    std::vector<int32_t>& host = to_.tables_.emplace_back(static_cast<size_t>(count));
    if (!apart) {
      copy_(host.data(), from, host.size() * sizeof(int32_t));
      return host.data();
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      copy_(host.data() + i * extent, from + i * stride, static_cast<size_t>(extent) * sizeof(int32_t));
    }
    new_stride = extent;
    return host.data();
  }

  HostTables& to_;
  const Copy& copy_;
};

HostTables::HostTables(const Problem& p, int32_t device, void* stream)
    : HostTables(p, [device, stream](void* to, const void* from, size_t bytes) {
        const Driver& driver = require_driver();
        const ScopedContext context(device);
        auto* const of = static_cast<StreamHandle>(stream);
        check(driver.cuMemcpyDtoHAsync(to, reinterpret_cast<DevicePointer>(from), bytes, of), "copying a table");
        check(driver.cuStreamSynchronize(of), "copying a table");
      }) {}

HostTables::HostTables(const Problem& p, const Copy& copy) : problem_(p) {
  Problem& h = problem_;
  Copier copier(*this, copy);
  for (IntView* v : {&h.cu_q, &h.cu_kv, &h.seqused, &h.cache.page_table, &h.cache.v_page_table, &h.cache.batch_index,
                     &h.cache_indirection, &h.beam_prompt_length, &h.prologue.ia3_task, &h.prologue.rope_table_index,
                     &h.prologue.positions}) {
    copier.table(*v);
  }
  copier.list(h.list, h.total_q, h.heads_kv);
  copier.list(h.extra_list, h.total_q, h.heads_kv);
  copier.flags(h.finished, h.finished_stride, h.batch);
}

}  // namespace attune::cuda
