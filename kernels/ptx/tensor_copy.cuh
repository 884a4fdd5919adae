// SPDX-License-Identifier: Apache-2.0
// TMA loads of boxes of a tensor. PTX ISA, "cp.async.bulk.tensor". One thread issues a copy, whose bytes complete at an
// mbarrier. Elements outside the tensor become zero, and their bytes count too. Also bulk copies of contiguous bytes.
#pragma once

namespace attune::ptx {

// As cuTensorMapEncodeTiled makes it. Kernels take it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// True in one lane of a converged warp, always the same lane. PTX ISA, "elect.sync". Unlike `lane == 0` it tells the
// compiler that a single thread issues the copies; otherwise it puts a loop around each.
__device__ __forceinline__ bool elect() {
  unsigned x;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(x));
  return x != 0;
}

// Coordinates are innermost first. The first one must be a multiple of 16 bytes.
__device__ __forceinline__ void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                                         int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Multicast to the blocks of the cluster whose bits are set. The box goes to the same offset in each block, and its
// bytes complete at that block's mbarrier. PTX ISA, ".multicast::cluster".
__device__ __forceinline__ void tma_load_multicast(unsigned blocks, unsigned shared, const TensorMap& map,
                                                   unsigned barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// Copies contiguous bytes. Count and addresses are multiples of 16. PTX ISA, "cp.async.bulk".
__device__ __forceinline__ void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// From shared to global memory: copies bytes, or adds fp32 numbers element by element. Counts and addresses are
// multiples of 16 bytes. PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk".
__device__ __forceinline__ void store_bytes(void* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_floats(float* global, unsigned shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
// This thread's bulk stores: commit them to a group; wait until all groups have read shared memory; wait until all have
// completed.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace attune::ptx
