// SPDX-License-Identifier: Apache-2.0
// Attune for C++20: thin, header-only RAII over attune.h. Failures are exceptions; everything else is the C ABI, whose
// header says what each field means.
//
//   attune::Attention a;
//   a.q = attune::dense(q.data(), {batch, num_heads_q, head_dim});      // dtype from the pointer
//   a.cache.k = attune::dense(k, ATTUNE_BFLOAT16, {pages, page_size, num_heads_kv, head_dim});
//   ...
//   attune::Plan plan(a);
//   attune::Workspace workspace(plan.workspace_size());
//   plan.run(a, workspace);
#ifndef ATTUNE_ATTUNE_HPP_
#define ATTUNE_ATTUNE_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "attune/attune.h"

namespace attune {

// --- errors

// A failed call: what() is the message of the library, status() its kind.
class Error : public std::runtime_error {
 public:
  Error(attune_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  attune_status status() const noexcept { return status_; }

 private:
  attune_status status_;
};

// Throws Error with the message of this thread's last failure unless status is OK.
inline void check(attune_status status) {
  if (status == ATTUNE_OK) return;
  const char* message = attune_last_error();
  throw Error(status, message[0] != '\0' ? message : attune_status_name(status));
}

// --- devices

inline constexpr attune_device kCpu{ATTUNE_DEVICE_CPU, 0};
constexpr attune_device cuda(int32_t index) { return {ATTUNE_DEVICE_CUDA, index}; }

// "0.1.0": of the library, where ATTUNE_VERSION_STRING is of the header.
inline std::string_view version() { return attune_version(); }

// Usable devices; the CPU comes first.
inline std::vector<attune_device_info> devices() {
  int32_t count = 0;
  check(attune_device_count(&count));
  std::vector<attune_device_info> infos(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    infos[i].struct_size = sizeof(attune_device_info);
    check(attune_get_device_info(i, &infos[i]));
  }
  return infos;
}

// Text about the CUDA runtime, a line each: driver, GPUs, bundle, disk cache, compiler.
inline std::string describe_cuda() {
  size_t needed = 0;
  check(attune_describe_cuda(nullptr, 0, &needed));
  std::string text(needed, '\0');
  check(attune_describe_cuda(text.data(), text.size(), &needed));
  return text.c_str();  // without the final 0
}

// Every row of the kernel registry.
inline std::vector<attune_kernel_info> kernels() {
  int32_t count = 0;
  check(attune_kernel_count(&count));
  std::vector<attune_kernel_info> infos(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    infos[i].struct_size = sizeof(attune_kernel_info);
    check(attune_get_kernel_info(i, &infos[i]));
  }
  return infos;
}

// Threads of the CPU backend, for plans made later; 0 restores the default.
inline void set_num_threads(int32_t count) { check(attune_set_num_threads(count)); }
inline int32_t num_threads() {
  int32_t count = 0;
  check(attune_get_num_threads(&count));
  return count;
}

// --- tensors

using Tensor = attune_tensor;
using Shape = std::initializer_list<int64_t>;

namespace detail {

template <class T>
constexpr attune_dtype dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) return ATTUNE_FLOAT32;
  if constexpr (std::is_same_v<U, int8_t>) return ATTUNE_INT8;
  if constexpr (std::is_same_v<U, uint8_t>) return ATTUNE_UINT8;
  if constexpr (std::is_same_v<U, int32_t>) return ATTUNE_INT32;
  if constexpr (std::is_same_v<U, int64_t>) return ATTUNE_INT64;
#ifdef __STDCPP_FLOAT16_T__
  if constexpr (std::is_same_v<U, decltype(0.0f16)>) return ATTUNE_FLOAT16;
#endif
#ifdef __STDCPP_BFLOAT16_T__
  if constexpr (std::is_same_v<U, decltype(0.0bf16)>) return ATTUNE_BFLOAT16;
#endif
  return ATTUNE_DTYPE_NONE;
}

}  // namespace detail

// Element types that name their dtype. For the others (16-bit floats as uint16_t, fp8 as uint8_t) state it.
template <class T>
concept Element = detail::dtype_of<T>()
!= ATTUNE_DTYPE_NONE;

// A view of any strides (in elements). Inputs are never written, so they may be const.
inline Tensor strided(const void* data, attune_dtype dtype, std::span<const int64_t> shape,
                      std::span<const int64_t> stride) {
  if (shape.empty() || shape.size() > ATTUNE_MAX_RANK || stride.size() != shape.size()) {
    throw Error(ATTUNE_INVALID_ARGUMENT, "shape has " + std::to_string(shape.size()) + " axes and stride " +
                                             std::to_string(stride.size()) + ": both must have the same 1.." +
                                             std::to_string(ATTUNE_MAX_RANK));
  }
  Tensor tensor{};
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride[i];
  }
  return tensor;
}
inline Tensor strided(const void* data, attune_dtype dtype, Shape shape, Shape stride) {
  return strided(data, dtype, std::span(shape.begin(), shape.size()), std::span(stride.begin(), stride.size()));
}
template <Element T>
Tensor strided(T* data, Shape shape, Shape stride) {
  return strided(data, detail::dtype_of<T>(), shape, stride);
}

// A dense row-major view.
inline Tensor dense(const void* data, attune_dtype dtype, std::span<const int64_t> shape) {
  if (shape.empty() || shape.size() > ATTUNE_MAX_RANK) {
    throw Error(ATTUNE_INVALID_ARGUMENT, "shape has " + std::to_string(shape.size()) + " axes: 1.." +
                                             std::to_string(ATTUNE_MAX_RANK) + " are allowed");
  }
  return attune_dense_tensor(const_cast<void*>(data), dtype, static_cast<int32_t>(shape.size()), shape.data());
}
inline Tensor dense(const void* data, attune_dtype dtype, Shape shape) {
  return dense(data, dtype, std::span(shape.begin(), shape.size()));
}
template <Element T>
Tensor dense(T* data, Shape shape) {
  return dense(data, detail::dtype_of<T>(), shape);
}

// --- descriptors

// The descriptor of the one operation, with its defaults set.
struct Attention : attune_attention {
  Attention() { check(attune_attention_init(this, sizeof(attune_attention))); }
};

// The gradients of attention. forward is its descriptor as it ran, and must outlive this one.
struct AttentionBackward : attune_attention_backward {
  explicit AttentionBackward(const attune_attention& forward) {
    check(attune_attention_backward_init(this, sizeof(attune_attention_backward)));
    attention = &forward;
  }
};

// The prologue on its own.
struct QkvPrepare : attune_qkv_prepare {
  QkvPrepare() { check(attune_qkv_prepare_init(this, sizeof(attune_qkv_prepare))); }
  void run(attune_device device = kCpu, void* stream = nullptr) const {
    check(attune_qkv_prepare_run(this, device, stream));
  }
};

// Merges partial results by their lse.
struct Merge : attune_merge {
  Merge() { check(attune_merge_init(this, sizeof(attune_merge))); }
  void run(attune_device device = kCpu, void* stream = nullptr) const { check(attune_merge_run(this, device, stream)); }
};

// Append, quantise, dequantise or gather.
struct CacheOp : attune_cache_op {
  explicit CacheOp(attune_cache_op_kind op_kind) {
    check(attune_cache_op_init(this, sizeof(attune_cache_op)));
    kind = op_kind;
  }
  void run(attune_device device = kCpu, void* stream = nullptr) const {
    check(attune_cache_op_run(this, device, stream));
  }
};

// Parameters of rotary embeddings, and the tables they give.
struct Rope : attune_rope {
  Rope() { check(attune_rope_init(this, sizeof(attune_rope))); }
  // [num_positions, dim]: dim / 2 cosines, then dim / 2 sines, of each position.
  std::vector<float> table(int64_t num_positions, int64_t first_position = 0) const {
    if (num_positions < 0 || dim < 0)
      throw Error(ATTUNE_INVALID_ARGUMENT, "num_positions and dim must not be negative");
    std::vector<float> cos_sin(static_cast<size_t>(num_positions * dim));
    check(attune_rope_table(this, first_position, num_positions, cos_sin.data()));
    return cos_sin;
  }
  // [dim / 2], radians per position.
  std::vector<double> frequencies() const {
    if (dim < 0) throw Error(ATTUNE_INVALID_ARGUMENT, "dim must not be negative");
    std::vector<double> result(static_cast<size_t>(dim / 2));
    check(attune_rope_frequencies(this, result.data()));
    return result;
  }
};

// [num_positions]: factors of q for attune_prologue.logn.
inline std::vector<float> logn_table(int64_t max_position, int64_t num_positions) {
  if (num_positions < 0) throw Error(ATTUNE_INVALID_ARGUMENT, "num_positions must not be negative");
  std::vector<float> table(static_cast<size_t>(num_positions));
  check(attune_logn_table(max_position, num_positions, table.data()));
  return table;
}

// [num_heads]: the slopes of the ALiBi paper.
inline std::vector<float> alibi_slopes(int64_t num_heads) {
  if (num_heads < 0) throw Error(ATTUNE_INVALID_ARGUMENT, "num_heads must not be negative");
  std::vector<float> slopes(static_cast<size_t>(num_heads));
  check(attune_alibi_slopes(num_heads, slopes.data()));
  return slopes;
}

// Bytes of one page of an MLA format.
inline int64_t kv_page_bytes(attune_kv_format format, int64_t page_size) {
  int64_t bytes = 0;
  check(attune_kv_page_bytes(format, page_size, &bytes));
  return bytes;
}

// --- plan

// Whether a kernel covers a descriptor, and if not, why.
struct Support {
  attune_status status = ATTUNE_OK;
  std::string reason;  // empty when supported
  explicit operator bool() const noexcept { return status == ATTUNE_OK; }
};

inline Support supported(const attune_attention& attention, attune_device device = kCpu) {
  const attune_status status = attune_supported(&attention, device);
  return {status, status == ATTUNE_OK ? std::string() : std::string(attune_last_error())};
}

// capability: of a GPU that need not be there, 10 * major + minor.
inline Support supported_by_capability(const attune_attention& attention, int32_t capability) {
  const attune_status status = attune_supported_by_capability(&attention, capability);
  return {status, status == ATTUNE_OK ? std::string() : std::string(attune_last_error())};
}

inline Support supported(const attune_attention_backward& op, attune_device device = kCpu) {
  const attune_status status = attune_attention_backward_supported(&op, device);
  return {status, status == ATTUNE_OK ? std::string() : std::string(attune_last_error())};
}

// Reads lengths, tables and indices; throws Error with BAD_DATA for the first wrong entry. For debugging and tests.
inline void validate(const attune_attention& attention, attune_device device = kCpu, void* stream = nullptr) {
  check(attune_validate(&attention, device, stream));
}

// Compiles or loads the kernels of later plans, side by side.
inline void warm(std::span<const attune_attention* const> attentions, attune_device device) {
  check(attune_warm(attentions.data(), static_cast<int32_t>(attentions.size()), device));
}

// Workspace in host memory. For other devices pass a pointer of that device to Plan::run.
class Workspace {
 public:
  explicit Workspace(size_t bytes)
      : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment}))), size_(bytes) {}
  void* data() const noexcept { return data_.get(); }
  size_t size() const noexcept { return size_; }

 private:
  static constexpr size_t kAlignment = 256;
  struct Free {
    void operator()(std::byte* p) const noexcept { ::operator delete (p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_;
};

// Scores of the index keys, the topk best of each query, or both in one (attune_indexer_kind).
struct Indexer : attune_indexer {
  explicit Indexer(attune_indexer_kind op_kind = ATTUNE_INDEXER_TOPK) {
    check(attune_indexer_init(this, sizeof(attune_indexer)));
    kind = op_kind;
  }
  size_t workspace_size(attune_device device = kCpu) const {
    size_t bytes = 0;
    check(attune_indexer_workspace_size(this, device, &bytes));
    return bytes;
  }
  // workspace must be aligned to 256 bytes and live on the device.
  void run(attune_device device, void* workspace, size_t bytes, void* stream = nullptr) const {
    check(attune_indexer_run(this, device, workspace, bytes, stream));
  }
  void run(const Workspace& workspace) const { run(kCpu, workspace.data(), workspace.size()); }
};

// A kernel chosen for a descriptor. Several threads may run one plan, each with its own workspace and outputs.
class Plan {
 public:
  explicit Plan(const attune_attention& attention, attune_device device = kCpu) {
    attune_plan* plan = nullptr;
    check(attune_plan_create(&attention, device, &plan));
    plan_.reset(plan);
  }
  explicit Plan(const attune_attention_backward& op, attune_device device = kCpu) {
    attune_plan* plan = nullptr;
    check(attune_attention_backward_plan(&op, device, &plan));
    plan_.reset(plan);
  }

  size_t workspace_size() const {
    size_t bytes = 0;
    check(attune_plan_workspace_size(plan_.get(), &bytes));
    return bytes;
  }

  // Schedules and runs. workspace must be aligned to 256 bytes and live on the plan's device.
  void run(const attune_attention& attention, void* workspace, size_t bytes, void* stream = nullptr) const {
    check(attune_run(plan_.get(), &attention, workspace, bytes, stream));
  }
  void run(const attune_attention& attention, const Workspace& workspace) const {
    run(attention, workspace.data(), workspace.size());
  }

  // A plan of the backward.
  void run(const attune_attention_backward& op, void* workspace, size_t bytes, void* stream = nullptr) const {
    check(attune_attention_backward_run(plan_.get(), &op, workspace, bytes, stream));
  }
  void run(const attune_attention_backward& op, const Workspace& workspace) const {
    run(op, workspace.data(), workspace.size());
  }

  // The two halves of run: one schedule serves every layer of a step with the same lengths, in the same workspace.
  void schedule(const attune_attention& attention, void* workspace, size_t bytes, void* stream = nullptr) const {
    check(attune_schedule(plan_.get(), &attention, workspace, bytes, stream));
  }
  void schedule(const attune_attention& attention, const Workspace& workspace) const {
    schedule(attention, workspace.data(), workspace.size());
  }
  void run_scheduled(const attune_attention& attention, void* workspace, size_t bytes, void* stream = nullptr) const {
    check(attune_run_scheduled(plan_.get(), &attention, workspace, bytes, stream));
  }
  void run_scheduled(const attune_attention& attention, const Workspace& workspace) const {
    run_scheduled(attention, workspace.data(), workspace.size());
  }

  // Kernel, tiles, splits and workspace, for people.
  std::string describe() const {
    size_t needed = 0;
    check(attune_plan_describe(plan_.get(), nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(attune_plan_describe(plan_.get(), text.data(), text.size(), &needed));
    return text.c_str();  // without the final 0
  }

  attune_plan* get() const noexcept { return plan_.get(); }

 private:
  struct Destroy {
    void operator()(attune_plan* plan) const noexcept { attune_plan_destroy(plan); }
  };
  std::unique_ptr<attune_plan, Destroy> plan_;
};

}  // namespace attune

#endif  // ATTUNE_ATTUNE_HPP_
