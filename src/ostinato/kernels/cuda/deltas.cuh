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
  __device__ __forceinline__ float2 two(int token, int row) const {
    if (!has(token)) return make_float2(0.f, 0.f);
    const uint2 v = load_two_words(at(token, row));
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
  }
  __device__ __forceinline__ float4 four(int token, int row) const {
    if (!has(token)) return make_float4(0.f, 0.f, 0.f, 0.f);
    const Word4 v = load_four_words(at(token, row));
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  }
};
