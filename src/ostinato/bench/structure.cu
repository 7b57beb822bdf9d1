// Kernels for `structure.py`: what a step could be made of instead of dependent launches.
#include "device.cuh"

// Does nothing, as part of a chain of dependent launches.
extern "C" __global__ void nothing() {
  allow_next_kernel();
  wait_for_previous();
}

// All programs meet `times` times. `count` is 0 at first, and again at the end.
extern "C" __global__ void meet(int* count, int times) {
  for (int i = 1; i <= times; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      add_in_order(count);
      int arrived = 0;
      while (arrived < i * (int)gridDim.x)
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(count) : "memory");
    }
    __syncthreads();
  }
  if (threadIdx.x == 0 && add_in_order(count) == (times + 1) * (int)gridDim.x - 1) *count = 0;
}

// Asks for memory into L2, PIECE bytes a thread.
extern "C" __global__ void fetch(const char* from, int pieces) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < pieces)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + (long long)i * PIECE), "r"(PIECE) : "memory");
}
