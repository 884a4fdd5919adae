// SPDX-License-Identifier: Apache-2.0
// Case data in the memory of a GPU. Header only: who includes it links src/cuda (attune_objects or attune_cuda_host).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>

#include "cases/memory.h"
#include "cuda/device.h"
#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "cuda/memory.h"

namespace attune::cases {

// Copies wait for everything on the device, and what they and fills do is done when they return, so that runs on any
// stream may come between them. A test may use several, each from a thread of its own.
class CudaMemory final : public Memory {
 public:
  // Throws attune::Failure where there is no such device.
  explicit CudaMemory(int32_t device) : stream_(device), second_(device) {}

  attune_device device() const override { return {ATTUNE_DEVICE_CUDA, stream_.device()}; }
  void* allocate(size_t bytes) override {
    cuda::DeviceMemory memory(stream_.device(), bytes > 0 ? bytes : 1);
    void* data = memory.data();
    blocks_.emplace(data, std::move(memory));
    return data;
  }
  void release(void* data) noexcept override { blocks_.erase(data); }
  void upload(void* device, const void* host, size_t bytes) override {
    synchronize();
    cuda::copy_to_device(stream_, device, host, bytes);
  }
  void download(void* host, const void* device, size_t bytes) override {
    synchronize();
    cuda::copy_to_host(stream_, host, device, bytes);
  }
  void fill(void* device, std::byte value, size_t bytes) override {
    cuda::fill_bytes(stream_, device, std::to_integer<unsigned char>(value), bytes);
    stream_.synchronize();
  }
  std::function<void()> captured(const std::function<void(void* stream)>& work) override {
    synchronize();
    const auto graph = std::make_shared<cuda::Graph>(stream_, [&] { work(stream_.handle()); });
    return [this, graph] {
      graph->replay(stream_);
      synchronize();
    };
  }
  void side_by_side(const std::function<void(void* stream)>& one,
                    const std::function<void(void* stream)>& other) override {
    synchronize();
    one(stream_.handle());
    other(second_.handle());
    synchronize();
  }
  bool launches() const override { return true; }
  void launch(const char* source, const char* entry, int64_t blocks, int64_t threads, const void* params) override {
    cuda::LaunchConfig config;
    config.grid[0] = static_cast<uint32_t>(blocks);
    config.block[0] = static_cast<uint32_t>(threads);
    config.stream = stream_.handle();
    synchronize();
    cuda::launch_kernel(cuda::get_kernel({source, entry, {}, 0}, stream_.device()), config, params);
    synchronize();
  }
  Room room() const override {
    const cuda::ScopedContext context(stream_.device());
    Room room;
    cuda::check(cuda::require_driver().cuMemGetInfo(&room.free, &room.total), "cuMemGetInfo");
    return room;
  }
  // Waits for all streams of the device; throws what went wrong in kernels.
  void synchronize() const {
    const cuda::ScopedContext context(stream_.device());
    cuda::check(cuda::require_driver().cuCtxSynchronize(), "waiting for the device");
  }
  const cuda::Stream& stream() const { return stream_; }

 private:
  cuda::Stream stream_, second_;
  std::unordered_map<void*, cuda::DeviceMemory> blocks_;
};

}  // namespace attune::cases
