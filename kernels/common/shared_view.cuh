// SPDX-License-Identifier: Apache-2.0
// Shared memory as one struct for each kernel. The compiler lays out its fields, and the host uses its sizeof. A view
// turns fields into the 32-bit shared addresses that PTX takes.
#pragma once

#include "common/host_device.h"
#include "ptx/async_copy.cuh"
#include "ptx/shared.cuh"

// offsetof() for NVRTC, which lacks it.
#ifdef __CUDACC_RTC__
#define ATTUNE_OFFSET_OF(Storage, field) static_cast<int>(__INTADDR__(&(((Storage*)0)->field)))
#else
#define ATTUNE_OFFSET_OF(Storage, field) static_cast<int>(__builtin_offsetof(Storage, field))
#endif

// In a view: a field of its storage, by offset. A view has no pointer to its storage, because NVRTC 13.0 then finds
// fields at other offsets than offsetof() if empty ones ([[no_unique_address]]) come before them.
#define ATTUNE_SHARED_FIELD(Storage, field) \
  (this->template value_at<decltype(Storage::field)>(ATTUNE_OFFSET_OF(Storage, field), 0))
// In a view: the shared address of a field; of value i of an array field; and of value j of array i. The last uses one
// product for both indices, because with two ptxas needs more registers and spills.
#define ATTUNE_SHARED_AT(Storage, field) (base + ATTUNE_OFFSET_OF(Storage, field))
#define ATTUNE_SHARED_AT_INDEX(Storage, field, i) \
  (ATTUNE_SHARED_AT(Storage, field) + (i) * static_cast<int>(sizeof(Storage::field[0])))
#define ATTUNE_SHARED_AT_INDICES(Storage, field, i, j)                                           \
  (ATTUNE_SHARED_AT(Storage, field) +                                                            \
   ((i) * static_cast<int>(sizeof(Storage::field[0]) / sizeof(Storage::field[0][0])) + (j)) *    \
       static_cast<int>(sizeof(Storage::field[0][0])))

namespace attune::common {

// Storage has `slots`, each with a work tile, its head tile and their mbarriers; and `check`, of the schedule's stamp.
template <class Storage>
struct SharedView {
  unsigned char* memory;
  unsigned base;  // the shared address of the storage
  __device__ __forceinline__ explicit SharedView(unsigned char* shared)
      : memory(shared), base(ptx::shared_address(shared)) {}

  // Value i of the field at `offset`. By bytes, because through the array ptxas takes one more register and spills.
  template <class T>
  __device__ __forceinline__ T& value_at(int offset, int i) const {
    return *reinterpret_cast<T*>(memory + offset + i * static_cast<int>(sizeof(T)));
  }

  __device__ __forceinline__ auto& slot(int i) const {
    using Slot = typename Storage::Slot;
    return value_at<Slot>(ATTUNE_OFFSET_OF(Storage, slots), i);
  }
  __device__ __forceinline__ auto& work(int i) const { return slot(i).work; }
  __device__ __forceinline__ int& head_tile(int i) const { return slot(i).head_tile; }
  __device__ __forceinline__ unsigned work_full(int i) const {
    return ATTUNE_SHARED_AT_INDEX(Storage, barriers.work_full, i);
  }
  __device__ __forceinline__ unsigned work_empty(int i) const {
    return ATTUNE_SHARED_AT_INDEX(Storage, barriers.work_empty, i);
  }

  __device__ __forceinline__ auto& check() const { return ATTUNE_SHARED_FIELD(Storage, check); }
  // The initial value of row sums (kernels::ScheduleCheck).
  __device__ __forceinline__ float first_sum() const {
    return ptx::load_shared(ATTUNE_SHARED_AT(Storage, check.first_sum));
  }
};

}  // namespace attune::common
