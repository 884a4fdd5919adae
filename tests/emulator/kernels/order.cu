// SPDX-License-Identifier: Apache-2.0
// What follows from the order in which a GPU runs blocks and warps.

// tickets[warp of the grid]: how many warps of its block came before.
extern "C" __global__ void come_in_turn(unsigned* tickets) {
  __shared__ unsigned next;
  const unsigned warp = threadIdx.x / 32;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) tickets[blockIdx.x * (blockDim.x / 32) + warp] = atomicAdd(&next, 1u);
}

// seen[block]: how many blocks ran when this one began, itself among them.
extern "C" __global__ void meet_others(int* running, int* seen) {
  if (threadIdx.x == 0) seen[blockIdx.x] = atomicAdd(running, 1) + 1;
  for (int i = 0; i < 20; ++i) __syncthreads();
  if (threadIdx.x == 0) atomicAdd(running, -1);
}

// sums[block]: of the block's own numbers, which pass through its shared memory again and again.
extern "C" __global__ void keep_own_shared(unsigned* sums) {
  __shared__ unsigned numbers[256], sum;
  if (threadIdx.x == 0) sum = 0;
  for (unsigned round = 0; round < 10; ++round) {
    numbers[threadIdx.x] = blockIdx.x * 1000 + round;
    __syncthreads();
    atomicAdd(&sum, numbers[blockDim.x - 1 - threadIdx.x]);
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
