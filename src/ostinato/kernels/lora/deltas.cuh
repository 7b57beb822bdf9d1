// What adapters add to a linear layer's product (ADAPTED), as another kernel left it.
#pragma once
#include "device.cuh"

// Before the norm's factor: float32 [tokens, rows of the matrix]. There is something only for tokens that have an
// adapter.
struct Deltas {
  const float* rows;
  const int* slots;
  int width;

  __device__ __forceinline__ bool has(int token) const { return ADAPTED && slots[token] >= 0; }
  __device__ __forceinline__ const float* at(int token, int row) const { return rows + (long long)token * width + row; }
  // Read before it is known whether it counts: there is room for it in any case.
  __device__ __forceinline__ float one(int token, int row) const {
    const float delta = __uint_as_float(load_word(at(token, row)));
    return has(token) ? delta : 0.f;
  }
};
