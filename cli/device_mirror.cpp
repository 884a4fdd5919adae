// SPDX-License-Identifier: Apache-2.0
#include "device_mirror.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "cases/cuda_memory.h"
#include "cases/tensors.h"
#include "stopwatch.h"

namespace attune::cli {
namespace {

void check_call(attune_status status) {
  if (status != ATTUNE_OK) throw std::runtime_error(attune_last_error());
}

// Bytes of a dense tensor.
size_t bytes_of(const attune_tensor& t) {
  return static_cast<size_t>(cases::num_elements(t) * cases::element_size(static_cast<attune_dtype>(t.dtype)));
}

}  // namespace

struct DeviceMirror::Gpu {
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };

  explicit Gpu(int32_t device) : memory(device), timer(device) {}

  // Grows the block to `bytes`; what it held may be lost.
  void* room(Block& block, size_t bytes) {
    if (bytes <= block.bytes) return block.data;
    if (block.data != nullptr) memory.release(block.data);
    block = {memory.allocate(bytes), bytes};
    return block.data;
  }

  static bool changes(const std::string& name) {
    static const std::set<std::string> names = {"q",          "k",           "v",
                                                "out",        "q_out",       "cu_seqlens_q",
                                                "cu_seqlens", "seqused_kv",  "cache.page_table",
                                                "indices",    "topk_length", "weights",
                                                "q_rope"};
    return names.contains(name);
  }

  // Copies of the tensors that a call reads, in place of the host's.
  template <class Call>
  Call upload(Call a) {
    for (const auto& [name, tensor] : cases::tensors_of(a)) {
      if (tensor->dtype == ATTUNE_DTYPE_NONE) continue;
      const size_t bytes = bytes_of(*tensor);
      const void* host = tensor->data;
      if (changes(name)) {
        tensor->data = room(staged[name], bytes);
        memory.upload(tensor->data, host, bytes);
        continue;
      }
      Block& block = kept[host];
      if (block.bytes < bytes) memory.upload(room(block, bytes), host, bytes);
      tensor->data = block.data;
    }
    return a;
  }

  // Pages that new tokens went to, from the device to the host. seqused, cu_seqlens: on the host.
  void fetch_appended(const attune_kv_cache& cache, const attune_tensor& seqused, const attune_tensor& cu_seqlens) {
    const cuda::ScopedContext context(memory.device().index);
    const auto* lengths = static_cast<const int32_t*>(seqused.data);
    const auto* offsets = static_cast<const int32_t*>(cu_seqlens.data);
    const auto* table = static_cast<const int32_t*>(cache.page_table.data);
    const int64_t page_size = cache.page_size > 0 ? cache.page_size : cache.k.shape[1];  // NHD where it is not said
    const int64_t columns = cache.page_table.shape[1];
    for (int64_t b = 0; b < seqused.shape[0]; ++b) {
      const int64_t first = lengths[b], count = offsets[b + 1] - offsets[b];
      if (count == 0) continue;
      for (int64_t i = first / page_size; i <= (first + count - 1) / page_size; ++i) {
        for (const attune_tensor* t : {&cache.k, &cache.v, &cache.k_scale, &cache.v_scale}) {
          // Scales of a tensor or of heads do not change.
          if (t->dtype != ATTUNE_DTYPE_NONE && t->rank > 1) fetch_page(*t, table[b * columns + i]);
        }
      }
    }
    memory.stream().synchronize();
  }

  void fetch_page(const attune_tensor& t, int64_t page) {
    const int64_t bytes = t.stride[0] * cases::element_size(static_cast<attune_dtype>(t.dtype));
    std::byte* host = static_cast<std::byte*>(t.data) + page * bytes;
    const std::byte* device = static_cast<std::byte*>(kept.at(t.data).data) + page * bytes;
    cuda::check(cuda::require_driver().cuMemcpyDtoHAsync(host, reinterpret_cast<cuda::DevicePointer>(device),
                                                         static_cast<size_t>(bytes),
                                                         static_cast<cuda::StreamHandle>(memory.stream().handle())),
                "fetching a page");
  }

  double run(const attune_plan* plan, const attune_attention& host, size_t bytes) {
    const attune_attention a = upload(host);
    void* workspace = room(workspace_block, bytes);
    const cuda::Stream& stream = memory.stream();
    timer.start(stream);
    check_call(attune_run(plan, &a, workspace, bytes, stream.handle()));
    timer.stop(stream);
    const double seconds = timer.milliseconds() * 1e-3;
    memory.download(host.out.data, a.out.data, bytes_of(host.out));
    if (host.prologue.append != 0) fetch_appended(host.cache, host.seqused_kv, host.cu_seqlens_q);
    return seconds;
  }

  // Uploads and runs; returns what ran, on the device. An operation without a plan finds its kernels on its first call:
  // that one goes before, unseen, and the timed one starts from the host's data again.
  template <class Call, class Run>
  Call run_timed(const char* name, const Call& host, const Run& run_on, double& seconds) {
    if (warm.insert(name).second) check_call(run_on(upload(host)));
    const Call call = upload(host);
    const cuda::Stream& stream = memory.stream();
    timer.start(stream);
    check_call(run_on(call));
    timer.stop(stream);
    seconds = timer.milliseconds() * 1e-3;
    return call;
  }

  double append(const attune_cache_op& host) {
    double seconds = 0;
    run_timed(
        "append", host,
        [this](const attune_cache_op& op) {
          return attune_cache_op_run(&op, memory.device(), memory.stream().handle());
        },
        seconds);
    fetch_appended(host.cache, host.seqused_kv, host.cu_seqlens);
    return seconds;
  }

  double choose(const attune_indexer& host, size_t bytes) {
    double seconds = 0;
    void* workspace = room(workspace_block, bytes);
    const attune_indexer op = run_timed(
        "choose", host,
        [&](const attune_indexer& on_device) {
          return attune_indexer_run(&on_device, memory.device(), workspace, bytes, memory.stream().handle());
        },
        seconds);
    memory.download(host.indices.data, op.indices.data, bytes_of(host.indices));
    memory.download(host.topk_length.data, op.topk_length.data, bytes_of(host.topk_length));
    return seconds;
  }

  double prepare(const attune_qkv_prepare& host) {
    double seconds = 0;
    const bool in_place = host.q_out.data == host.q.data;
    const attune_qkv_prepare op = run_timed(
        "prepare", host,
        [&](attune_qkv_prepare on_device) {
          if (in_place) on_device.q_out.data = on_device.q.data;
          return attune_qkv_prepare_run(&on_device, memory.device(), memory.stream().handle());
        },
        seconds);
    memory.download(host.q_out.data, in_place ? op.q.data : op.q_out.data, bytes_of(host.q_out));
    if (host.prologue.append != 0) fetch_appended(host.cache, host.seqused_kv, host.cu_seqlens_q);
    return seconds;
  }

  cases::CudaMemory memory;
  cuda::Timer timer;
  std::map<std::string, Block> staged;  // by the tensor's name
  std::map<const void*, Block> kept;    // by its host data
  Block workspace_block;
  std::set<std::string> warm;  // operations that have run
};

DeviceMirror::DeviceMirror(attune_device device) {
  if (device.type == ATTUNE_DEVICE_CUDA) gpu_ = std::make_unique<Gpu>(device.index);
}

DeviceMirror::~DeviceMirror() = default;

double DeviceMirror::run(const attune_plan* plan, const attune_attention& a, void* workspace, size_t bytes) {
  if (gpu_ != nullptr) return gpu_->run(plan, a, bytes);
  const Stopwatch watch;
  check_call(attune_run(plan, &a, workspace, bytes, nullptr));
  return watch.seconds();
}

double DeviceMirror::append(const attune_cache_op& op) {
  if (gpu_ != nullptr) return gpu_->append(op);
  const Stopwatch watch;
  check_call(attune_cache_op_run(&op, {ATTUNE_DEVICE_CPU, 0}, nullptr));
  return watch.seconds();
}

double DeviceMirror::choose(const attune_indexer& op, void* workspace, size_t bytes) {
  if (gpu_ != nullptr) return gpu_->choose(op, bytes);
  const Stopwatch watch;
  check_call(attune_indexer_run(&op, {ATTUNE_DEVICE_CPU, 0}, workspace, bytes, nullptr));
  return watch.seconds();
}

double DeviceMirror::prepare(const attune_qkv_prepare& op) {
  if (gpu_ != nullptr) return gpu_->prepare(op);
  const Stopwatch watch;
  check_call(attune_qkv_prepare_run(&op, {ATTUNE_DEVICE_CPU, 0}, nullptr));
  return watch.seconds();
}

}  // namespace attune::cli
