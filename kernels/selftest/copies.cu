// SPDX-License-Identifier: Apache-2.0
// cp.async.bulk without a tensor map: from global to shared memory, and from shared memory to that of the cluster's
// other block, with mbarriers, in two phases.
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::selftest {

constexpr int kPieces = 5, kGap = 16;  // bytes between copies, which no copy may write
constexpr unsigned kBytes = 16 + 656 + 32 + 1088 + 128, kPaddedBytes = kBytes + kPieces * kGap;
constexpr unsigned kReceived = kPaddedBytes, kFull = 2 * kPaddedBytes, kReceivedFull = kFull + 8;

}  // namespace attune::selftest

// from [2 blocks, 2 phases, kBytes]; to [2 blocks, 2 phases, kPaddedBytes]: the other block's bytes plus 1, with gaps
// of 0xee between the copies.
extern "C" __global__ void __launch_bounds__(32) copies(const unsigned char* from, unsigned char* to) {
  using namespace attune;
  using namespace attune::selftest;
  unsigned char* const memory = ptx::dynamic_shared();
  const unsigned shared = ptx::shared_address(memory), lane = threadIdx.x;
  const int rank = ptx::cluster_rank(), other = 1 - rank;
  constexpr unsigned kPieceBytes[kPieces] = {16, 656, 32, 1088, 128};
  if (lane == 0) {
    ptx::init_barrier(shared + kFull, 1);
    ptx::init_barrier(shared + kReceivedFull, 1);
    ptx::publish_barriers();
  }
  for (unsigned phase = 0; phase < 2; ++phase) {
    for (unsigned i = lane; i < kPaddedBytes; i += 32) memory[i] = 0xee;
    ptx::fence_async_proxy();
    __syncwarp();
    if (ptx::elect()) {
      ptx::arrive_expecting(shared + kFull, kBytes);
      ptx::arrive_expecting(shared + kReceivedFull, kPaddedBytes);
      const unsigned char* piece = from + (2 * rank + phase) * kBytes;
      unsigned place = shared;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        ptx::copy_bytes(place, piece, kPieceBytes[i], shared + kFull);
        piece += kPieceBytes[i], place += kPieceBytes[i] + kGap;
      }
    }
    ptx::wait_phase(shared + kFull, phase);
    for (unsigned i = lane; i < kPaddedBytes; i += 32) memory[i] = static_cast<unsigned char>(memory[i] + 1);
    ptx::fence_async_proxy();
    __syncwarp();
    ptx::cluster_barrier();  // the other block's mbarrier now expects the bytes
    if (ptx::elect()) {
      ptx::copy_to_block(ptx::shared_in_block(shared + kReceived, other), shared, kPaddedBytes,
                         ptx::shared_in_block(shared + kReceivedFull, other));
    }
    ptx::wait_phase(shared + kReceivedFull, phase);
    for (unsigned i = lane; i < kPaddedBytes; i += 32)
      to[(2 * rank + phase) * kPaddedBytes + i] = memory[kReceived + i];
    __syncwarp();
    ptx::cluster_barrier();  // both copies have arrived: shared memory may be reused, or the block may exit
  }
}
