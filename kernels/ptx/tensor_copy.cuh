// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of a tensor by the tensor memory accelerator (TMA). PTX ISA, "cp.async.bulk.tensor". One thread
// issues a copy; its bytes are counted by an mbarrier. What lies outside the tensor becomes zero, and counts too.
#pragma once

namespace attune::ptx {

// As cuTensorMapEncodeTiled makes it; a __grid_constant__ parameter of the kernel.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// One lane of a warp whose lanes are together; the same each time. PTX ISA, "elect.sync". Of what it issues the
// compiler knows that one thread does; of what lane 0 issues it does not, and puts a loop around every copy.
__device__ __forceinline__ bool elect() {
  unsigned x;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(x));
  return x != 0;
}

// Coordinates innermost first. The first must be a multiple of 16 bytes.
__device__ __forceinline__ void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void copy_box(unsigned shared, const TensorMap& map, unsigned barrier, int c0, int c1,
                                         int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same to several blocks of the cluster at once, those whose bits are set: to the same place in each, whose own
// barrier counts it. PTX ISA, ".multicast::cluster".
__device__ __forceinline__ void copy_box_to_blocks(unsigned blocks, unsigned shared, const TensorMap& map,
                                                   unsigned barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// Copies bytes, a multiple of 16, that lie one after the other at a multiple of 16. PTX ISA, "cp.async.bulk".
__device__ __forceinline__ void copy_bytes(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace attune::ptx
