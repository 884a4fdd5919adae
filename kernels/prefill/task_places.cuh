// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block that takes tasks (prefill/feed.cuh), and the slots that tasks lie in.
#pragma once

#include "prefill/prefill_params.h"
#include "ptx/async_copy.cuh"

namespace attune::prefill {

// kTasks: where the slots begin; bytes. Each has a task and, beside it, a head tile.
template <int kTasks>
struct TaskPlaces {
  unsigned char* memory;
  unsigned base;
  __device__ __forceinline__ explicit TaskPlaces(unsigned char* shared)
      : memory(shared), base(ptx::shared_address(shared)) {}
  __device__ __forceinline__ kernels::Task& task(int slot) const {
    return *reinterpret_cast<kernels::Task*>(task_memory(slot));
  }
  __device__ __forceinline__ int& head_tile(int slot) const {
    return *reinterpret_cast<int*>(task_memory(slot) + sizeof(kernels::Task));
  }

  // Of the task's first row: elements from the beginning of `out` on.
  __device__ __forceinline__ long long& out_base(int slot) const {
    return *reinterpret_cast<long long*>(task_memory(slot) + sizeof(kernels::Task) + 8);
  }

 private:
  __device__ __forceinline__ unsigned char* task_memory(int slot) const {
    return memory + kTasks + slot * (sizeof(kernels::Task) + 16);
  }
};

}  // namespace attune::prefill
