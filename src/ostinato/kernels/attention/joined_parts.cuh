// Joining what parts of a context gave: over the warps of a CTA, over the chunks of a request.
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

// Over the chunks of a request, in their order, several pairs of dims at a time: the memory that holds them is far
// away. `parts` are the places of chunk 0 for their heads in the partial results.
template <int kPairs>
__device__ __forceinline__ void join_chunks(const float* partial, const float* partial_sums,
                                            const long long (&parts)[kPairs], const int (&dims)[kPairs], int chunks,
                                            Joined (&joined)[kPairs]) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) joined[p] = Joined{-infinity(), 0.f, 0.f, 0.f};
  for (int first = 0; first < chunks; first += 8) {
    float2 sums[kPairs][8], values[kPairs][8];
#pragma unroll
    for (int p = 0; p < kPairs; ++p)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const long long place = parts[p] + min(first + n, chunks - 1) * kHeads;
        sums[p][n] = as_floats(load_two_words(partial_sums + place * 2));
        values[p][n] = as_floats(load_two_words(partial + place * HEAD_DIM + dims[p]));
      }
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      Joined& to = joined[p];
      float most = to.most;
#pragma unroll
      for (int n = 0; n < 8; ++n) most = fmaxf(most, sums[p][n].x);
      const float base = base_of(most), faded = exp2_of(to.most - base);
      to = Joined{most, to.total * faded, to.a * faded, to.b * faded};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float weight = first + n < chunks ? exp2_of(sums[p][n].x - base) : 0.f;
        to.total += sums[p][n].y * weight;
        to.a += values[p][n].x * weight;
        to.b += values[p][n].y * weight;
      }
    }
  }
}
