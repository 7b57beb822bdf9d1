// Attention of a warp to its tiles of 16 keys, by tensor cores.
//
// Products have keys or dims as rows and the heads of the group as columns, of one token after another:
//
//     scores [16 keys, heads] = K [16, D] * Qt [D, heads]      out [D, heads] += Vt [D, 16] * P [16, heads]
//
// A thread has the scores of keys lane / 4 and + 8 and dims alike, of heads 2 * (lane % 4) and the next one.
#pragma once
#include "decode_layout.cuh"

constexpr int kColumns = (kHeads + 7) / 8;  // blocks of 8 heads
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kHeadStride = HEAD_DIM + 4;  // of a warp's results: what threads store at a time is in different banks
constexpr int kSumsAt = kHeads * kHeadStride;
constexpr bool kHoldsQueries = kColumns <= 2;  // in registers; more are read from shared memory as they are needed
constexpr int kHeld = kHoldsQueries ? kColumns : 1;

static_assert(HEAD_DIM % 16 == 0 && GROUP >= 1 && kHeads <= 32 && QUERIES <= 16, "what the tensor cores are given");
static_assert((kSumsAt + 2 * kHeads) * 4 <= kRingBytes, "a warp's result fits its ring");

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// What scores are compared with. Of several tokens one may see no key at all, and the best of none is -infinity.
__device__ __forceinline__ float base_of(float most) { return QUERIES > 1 && most == -infinity() ? 0.f : most; }

// Scores are in powers of two.
struct Attention {
  uint32 queries;  // where a thread's part of them lies
  uint32 q[kHeld][kSteps][2];
  float best[kColumns][2], total[kColumns][2], acc[kColumns][kSteps][4];
  uint32 weights[kColumns][2];  // of the tile whose keys were looked at, as factors of its values

  __device__ __forceinline__ void begin(uint32 queries_at) {
    const int lane = threadIdx.x % 32;
    queries = kHoldsQueries ? queries_at + lane % 4 * 4 : queries_at + lane / 8 * 16;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int head = c * 8 + lane / 4;
      const uint32 from = queries + head * kStride;
      best[c][0] = best[c][1] = -infinity();
      total[c][0] = total[c][1] = 0.f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (kHoldsQueries) {
          q[c % kHeld][s][0] = head < kHeads ? load_shared(from + s * 32) : 0;
          q[c % kHeld][s][1] = head < kHeads ? load_shared(from + s * 32 + 16) : 0;
        }
        acc[c][s][0] = acc[c][s][1] = acc[c][s][2] = acc[c][s][3] = 0.f;
      }
    }
  }

  // Scores of 16 keys, not yet scaled.
  __device__ __forceinline__ void look_at(uint32 keys, float (&scores)[kColumns][4]) {
    // Two sums: half as many products that wait for each other, as far as there are registers.
    constexpr int kSums = kColumns <= 3 ? 2 : 1;
    float parts[kColumns][kSums][4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) parts[c][0][e] = parts[c][kSums - 1][e] = 0.f;
    const int lane = threadIdx.x % 32;
    const uint32 from = keys + (lane % 16) * kStride + lane / 16 * 16;
    if (kHoldsQueries) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32 a[4];
        load_blocks(a, from + s * 32);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          multiply_add(parts[c][s % kSums], a, q[c % kHeld][s][0], q[c % kHeld][s][1]);
      }
    } else {  // queries of two steps at a time, behind the last one some of no use; the last head stands for surplus ones
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        const bool has_next = s + 1 < kSteps;
        uint32 a[2][4], b[4];
        load_blocks(a[0], from + s * 32);
        if (has_next) load_blocks(a[1], from + s * 32 + 32);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int row = c * 8 + 8 <= kHeads ? lane % 8 : min(lane % 8, kHeads - 1 - c * 8);
          load_blocks(b, queries + (c * 8 + row) * kStride + s * 32);
          multiply_add(parts[c][0], a[0], b[0], b[1]);
          if (has_next) multiply_add(parts[c][kSums - 1], a[1], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[c][e] = kSums == 1 ? parts[c][0][e] : parts[c][0][e] + parts[c][kSums - 1][e];
  }

  // Keys are first to first + 15, of which the first token sees those in [seen_from, position], and each of `count`
  // one further on; a single one sees at least one of them.
  __device__ __forceinline__ void weigh(float (&scores)[kColumns][4], float scale, int first, int seen_from,
                                        int position, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float (&v)[4] = scores[c];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] *= scale;
      if (first + 16 > position || first < seen_from + QUERIES - 1) {
        const int key = first + lane / 4;
        if (QUERIES == 1) {
          if (key < seen_from || key > position) v[0] = v[1] = -infinity();
          if (key + 8 < seen_from || key + 8 > position) v[2] = v[3] = -infinity();
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int behind = min((c * 8 + lane % 4 * 2 + h) / GROUP, count - 1);
            if (key < seen_from + behind || key > position + behind) v[h] = -infinity();
            if (key + 8 < seen_from + behind || key + 8 > position + behind) v[h + 2] = -infinity();
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = fmaxf(v[h], v[h + 2]);
#pragma unroll
        for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, by));
        most = fmaxf(best[c][h], most);
        const float base = base_of(most);
        const float faded = exp2_of(best[c][h] - base);
        best[c][h] = most;
        v[h] = exp2_of(v[h] - base);
        v[h + 2] = exp2_of(v[h + 2] - base);
        total[c][h] = total[c][h] * faded + v[h] + v[h + 2];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          acc[c][s][h] *= faded;
          acc[c][s][h + 2] *= faded;
        }
      }
      weights[c][0] = transposed(rounded(v[0], v[1]));
      weights[c][1] = transposed(rounded(v[2], v[3]));
    }
  }

  __device__ __forceinline__ void add(uint32 values) {
    const int lane = threadIdx.x % 32;
    const uint32 from = values + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 16;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32 a[4];
      load_transposed_blocks(a, from + s * 32);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) multiply_add(acc[c][s], a, weights[c][0], weights[c][1]);
    }
  }

  // As floats: acc [head][kHeadStride], then of each head the best score and the total.
  __device__ __forceinline__ void store(float* result) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int head = c * 8 + lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int by = 4; by < 32; by *= 2) total[c][h] += __shfl_xor_sync(kAll, total[c][h], by);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (head + h < kHeads) {
          float* const to = result + (head + h) * kHeadStride + lane / 4;
#pragma unroll
          for (int s = 0; s < kSteps; ++s) to[s * 16] = acc[c][s][h], to[s * 16 + 8] = acc[c][s][h + 2];
          if (lane < 4) *(float2*)(result + kSumsAt + (head + h) * 2) = make_float2(best[c][h], total[c][h]);
        }
      }
    }
  }
};
