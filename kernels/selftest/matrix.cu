// SPDX-License-Identifier: Apache-2.0
// Warp-level instructions on 16-bit matrices: cp.async, ldmatrix, mma, stmatrix, movmatrix, and conversions of 8-bit
// floats, by two warpgroups of which one gives registers to the other.
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/matrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::selftest {

constexpr unsigned kPitch = 48, kB = 16 * kPitch, kCopy = kB + 16 * 16, kTail = kCopy + 16 * kPitch,
                   kBarrier = kTail + 16;

// codes [512]: for every e4m3 code, then every e5m2 code: its fp16 bits, and in the upper half the code that those are
// converted back to.
__device__ void convert_codes(unsigned* codes) {
  for (unsigned i = threadIdx.x; i < 128; i += 128) {
    const auto pair = static_cast<unsigned short>((2 * i) | (2 * i + 1) << 8);
    const unsigned e4m3 = ptx::e4m3_to_f16(pair), e5m2 = ptx::e5m2_to_f16(pair);
    const auto low = [](unsigned x) { return static_cast<unsigned short>(x & 0xffff); };
    const unsigned e4m3_again = ptx::pack_e4m3(ptx::f16_to_float(low(e4m3)), ptx::f16_to_float(low(e4m3 >> 16)));
    const unsigned e5m2_again = ptx::pack_e5m2(ptx::f16_to_float(low(e5m2)), ptx::f16_to_float(low(e5m2 >> 16)));
    codes[2 * i] = low(e4m3) | (e4m3_again & 0xff) << 16;
    codes[2 * i + 1] = e4m3 >> 16 | (e4m3_again >> 8) << 16;
    codes[256 + 2 * i] = low(e5m2) | (e5m2_again & 0xff) << 16;
    codes[256 + 2 * i + 1] = e5m2 >> 16 | (e5m2_again >> 8) << 16;
  }
}

__device__ void multiply_blocks(unsigned shared, const unsigned short* a, const unsigned short* b, float* c,
                                unsigned short* copy, unsigned short* transposed, unsigned short* tail) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  ptx::copy_async<16>(shared + lane / 2 * kPitch + lane % 2 * 16, a + lane * 8, 16);
  if (lane < 16) ptx::copy_async<16>(shared + kB + lane * 16, b + lane * 8, 16);
  if (lane == 31) ptx::copy_async<16>(shared + kTail, a, 6);  // three elements, then zeros
  ptx::arrive_after_copies(shared + kBarrier);
  ptx::wait_phase(shared + kBarrier, 0);

  unsigned x[4], y[2];
  // the address of row lane % 8 of matrix lane / 8
  const unsigned at = (lane / 8 % 2 * 8 + lane % 8) * kPitch + lane / 16 * 16;
  ptx::load_matrix_x4(x, shared + at);
  ptx::load_matrix_x2_transposed(y, shared + kB + lane % 16 * 16);
  float d[4] = {};
  ptx::mma_bf16(d, x, y);
  for (unsigned i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];

  ptx::store_matrix_x4(shared + kCopy + at, x);
  __syncwarp();
  for (unsigned i = lane; i < 256; i += 32)
    copy[i] = ptx::load_shared_u16(shared + kCopy + i / 16 * kPitch + i % 16 * 2);
  const unsigned turned = ptx::transpose_matrix(x[0]);
  transposed[g * 8 + 2 * t] = static_cast<unsigned short>(turned & 0xffff);
  transposed[g * 8 + 2 * t + 1] = static_cast<unsigned short>(turned >> 16);
  if (lane < 8) tail[lane] = ptx::load_shared_u16(shared + kTail + lane * 2);
}

}  // namespace attune::selftest

// a [16, 16], b [16, 8] in bf16; c [16, 8]; copy: a; transposed: the first [8, 8] of a; tail: its first three numbers,
// and five zeros.
extern "C" __global__ void __launch_bounds__(256, 1)
    matrix(const unsigned short* a, const unsigned short* b, float* c, unsigned short* copy, unsigned short* transposed,
           unsigned short* tail, unsigned* codes) {
  using namespace attune;
  const unsigned shared = ptx::shared_address(ptx::dynamic_shared());
  if (threadIdx.x == 0) {
    ptx::init_barrier(shared + selftest::kBarrier, 32);
    ptx::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::warpgroup_reg_dealloc<40>();
    selftest::convert_codes(codes);
  } else {
    ptx::warpgroup_reg_alloc<232>();
    if (threadIdx.x < 160) selftest::multiply_blocks(shared, a, b, c, copy, transposed, tail);
  }
}
