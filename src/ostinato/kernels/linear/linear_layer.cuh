// What kernels of linear layers have in common beside the product: the norm's weight before it, the gate after it,
// and results in float32 (OUT_FLOAT) or as elements.
#pragma once
#include "device.cuh"

#if OUT_FLOAT
typedef float Out;
__device__ __forceinline__ Out as_out(float y) { return y; }
__device__ __forceinline__ void store_two(Out* p, float y, float z) { *(float2*)p = make_float2(y, z); }
__device__ __forceinline__ void store_four(Out* p, float4 y) { *(float4*)p = y; }
#else
typedef Element Out;
__device__ __forceinline__ Out as_out(float y) { return (Element)rounded(y, 0.f); }
__device__ __forceinline__ void store_two(Out* p, float y, float z) { *(uint32*)p = rounded(y, z); }
__device__ __forceinline__ void store_four(Out* p, float4 y) {
  *(uint2*)p = make_uint2(rounded(y.x, y.y), rounded(y.z, y.w));
}
#endif

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
