// Resident weights: all that a CTA multiplies is on the SM before its tokens are known. For small matrices.
//
// The warps share the columns: each fetches its part of all rows before the wait. Of its tiles of 8 rows a thread
// keeps HELD in registers and the others in shared memory.
//
//     columns      | warp 0 | warp 1 | ...        32 at a time; thread lane % 4 has 8 of them
//     [tokens, 32] x [32, 8 rows]  ->  partials [tokens, rows] of each warp  ->  their sum
//
// What a CTA takes of an SM decides how many kernels are in flight at the same time. Two must fit side by side: an
// empty kernel then takes 0.6 us, otherwise 1.5 to 3.
#pragma once

constexpr int kThreads = WARPS * 32;
constexpr int kColumns = IN / SLICES / WARPS;  // of a warp
constexpr int kSteps = kColumns / 32;
constexpr int kRows = ROWS * kHalves;  // of the matrix: those of the first half, then those of the second
constexpr int kTiles = kRows / 8;
constexpr int kItems = (TOKENS * kOwned / 4 + kThreads - 1) / kThreads;  // four results each, of a thread

// Padded so that a warp's partials lie in different banks.
constexpr int kStride = kRows + (TOKENS == 8 ? 4 : kRows % 16 == 0 ? 8 : 0);
constexpr int kStaged = (kTiles - HELD + NORM) * kSteps;

// The staged weights first: copies to places that are not at multiples of 128 bytes are much slower.
struct Shared {
  Word4 staged[kStaged > 0 ? kStaged : 1][kThreads];  // the norm's weight last
  float parts[WARPS][TOKENS][kStride];
  float squares[WARPS][TOKENS];
  float from_cluster[SLICES][TOKENS][SLICES > 1 ? kHalves * kOwned : 4];
  float squares_from_cluster[SLICES][TOKENS];
  ByteCount arrived;
};

static_assert(IN % (SLICES * WARPS * 32) == 0, "columns are shared in blocks of 32");
static_assert(kRows % 8 == 0, "rows come in eights");

__device__ __forceinline__ float4 operator*(float4 a, float b) {
  return make_float4(a.x * b, a.y * b, a.z * b, a.w * b);
}
__device__ __forceinline__ float4 four_of(uint2 v) {
  return make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
}

// Loads a thread's columns of the tokens lane / 4, + 8, ...; zeros behind the last token.
__device__ __forceinline__ void load_tokens(Word4 (&v)[kGroups][kSteps], const Element* x, int num_tokens) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int token = g * 8 + lane / 4;
    const Element* row = x + (long long)token * IN + (lane % 4) * 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      v[g][s] = Word4{0, 0, 0, 0};
      if (token < num_tokens) v[g][s] = load_four_words(row + s * 32);
    }
  }
}

template <int parts, int stride>
__device__ __forceinline__ float4 sum_four(const float* first) {
  float4 sum = *(const float4*)first;
#pragma unroll
  for (int i = 1; i < parts; ++i) sum = sum + *(const float4*)(first + i * stride);
  return sum;
}

template <int parts>
__device__ __forceinline__ float sum_one(const float* first) {
  float sum = *first;
#pragma unroll
  for (int i = 1; i < parts; ++i) sum += first[i * TOKENS];
  return sum;
}
