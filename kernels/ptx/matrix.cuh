// SPDX-License-Identifier: Apache-2.0
// Matrices of 8x8 16-bit elements spread over a warp: PTX ISA, "ldmatrix", "stmatrix", "movmatrix", "mma.m16n8k16" and
// "mma.m16n8k8". Lane l holds elements (l / 4, 2 (l % 4)) and the next one of a matrix in one register.
#pragma once

namespace attune::ptx {

// Lanes 8i..8i+7 give the addresses of the eight 16-byte rows of matrix i.
__device__ __forceinline__ void load_matrix_x4(unsigned (&d)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2(unsigned (&d)[2], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared)
               : "memory");
}

// Each matrix transposed: lane l holds elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&d)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2_transposed(unsigned (&d)[2], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared)
               : "memory");
}

// Lanes 8i..8i+7 give the addresses of the eight 16-byte rows of matrix i.
__device__ __forceinline__ void store_matrix_x4(unsigned shared, const unsigned (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
}

// Each matrix transposed: the rows in shared memory are its columns.
__device__ __forceinline__ void store_matrix_x4_transposed(unsigned shared, const unsigned (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(d[0]),
               "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

// Transposes a matrix held in registers.
__device__ __forceinline__ unsigned transpose_matrix(unsigned a) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// c [16, 8] += a [16, 16] b [16, 8] in fp32. a: (row g, columns 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..);
// b: (rows 2t.., column g), (2t + 8.., g); c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), with g = lane / 4, t
// = lane % 4.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c [16, 8] += a [16, 8] b [8, 8] of TF32: fp32 whose lowest 13 bits do not count. a: (row g, column t), (g + 8, t),
// (g, t + 4), (g + 8, t + 4); b: (row t, column g), (t + 4, g); c as above.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace attune::ptx
