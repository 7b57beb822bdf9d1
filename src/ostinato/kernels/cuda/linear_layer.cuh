// What kernels of linear layers have in common beside the product: the norm's weight before it, the gate after it.
#pragma once
#include "device.cuh"

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float gate(float y, float by) { return __fdividef(y, 1.f + __expf(-y)) * by; }

__device__ __forceinline__ float scale_pair(uint32& pair, uint32 by) {
  const float a = low(pair), b = high(pair);
  pair = rounded(a * low(by), b * high(by));
  return a * a + b * b;
}

// Multiplies by the norm's weight; returns the sum of the squares before.
__device__ __forceinline__ float scale(Word4& v, const Word4& by) {
  return scale_pair(v.x, by.x) + scale_pair(v.y, by.y) + scale_pair(v.z, by.z) + scale_pair(v.w, by.w);
}
