// Joining what parts of a context gave: over the warps of a program, over the chunks of a request.
#pragma once
#include "tile_attention.cuh"

// Two dims of a head, from several parts of the context.
struct Joined {
  float most, total, a, b;
};

// Over the warps, whose results lie at the beginning of their rings.
__device__ __forceinline__ Joined join_warps(const char* rings, int head, int dim) {
  float2 sums[WARPS];
  Joined joined{-infinity(), 0.f, 0.f, 0.f};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    sums[w] = *(const float2*)(rings + w * kRingBytes + (kSumsAt + head * 2) * 4);
    joined.most = fmaxf(joined.most, sums[w].x);
  }
  const float base = base_of(joined.most);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float2 two = *(const float2*)((const float*)(rings + w * kRingBytes) + head * kHeadStride + dim);
    const float faded = exp2_of(sums[w].x - base);
    joined.total += sums[w].y * faded;
    joined.a += two.x * faded;
    joined.b += two.y * faded;
  }
  return joined;
}

// Over the chunks of a request, in their order. `part` is the place of chunk 0 for this head in the partial results.
__device__ __forceinline__ Joined join_chunks(const float* partial, const float* partial_sums, long long part,
                                              int dim, int chunks) {
  Joined joined{-infinity(), 0.f, 0.f, 0.f};
  for (int first = 0; first < chunks; first += 8) {
    float2 sums[8], parts[8];
    float most = joined.most;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const long long place = part + min(first + n, chunks - 1) * kHeads;
      sums[n] = as_floats(load_two_words(partial_sums + place * 2));
      parts[n] = as_floats(load_two_words(partial + place * HEAD_DIM + dim));
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) most = fmaxf(most, sums[n].x);
    const float base = base_of(most), faded = exp2_of(joined.most - base);
    joined = Joined{most, joined.total * faded, joined.a * faded, joined.b * faded};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float weight = first + n < chunks ? exp2_of(sums[n].x - base) : 0.f;
      joined.total += sums[n].y * weight;
      joined.a += parts[n].x * weight;
      joined.b += parts[n].y * weight;
    }
  }
  return joined;
}
