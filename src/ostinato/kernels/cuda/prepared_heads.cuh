// Queries, key and value of a KV head from the QKV projection: norm, rotation, KV write.
#pragma once
#include "work_units.cuh"

constexpr int kNumHeads = GROUP * KV_HEADS;
constexpr int kWords = HEAD_DIM / 4;  // pairs of elements in half a head
constexpr int kWordsEach = (kWords + 31) / 32;
constexpr int kItems = GROUP + 2;     // heads to prepare: queries, key, value
constexpr int kRounds = (kItems + WARPS - 1) / WARPS;

#if PARTS > 1
typedef float Projected;

// Two neighbours of a row: its parts added in their order, and rounded like a product that is not in parts.
__device__ __forceinline__ uint32 load_pair(const Projected* of_token, int pair, int part_stride) {
  float2 parts[PARTS], sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int p = 0; p < PARTS; ++p) parts[p] = as_floats(load_two_words(of_token + (long long)p * part_stride + pair * 2));
#pragma unroll
  for (int p = 0; p < PARTS; ++p) sum = make_float2(sum.x + parts[p].x, sum.y + parts[p].y);
  return rounded(sum.x, sum.y);
}
#else
typedef Element Projected;

__device__ __forceinline__ uint32 load_pair(const Projected* of_token, int pair, int part_stride) {
  return load_word(of_token + pair * 2);
}
#endif

// Item 0 to GROUP - 1 are queries, then the key, then the value; a warp has every WARPS-th.
struct Heads {
  float2 cos[kWordsEach], sin[kWordsEach];
  uint32 x[kRounds][kWordsEach], y[kRounds][kWordsEach];  // first halves, and what turns with them
#if NORM
  uint32 x_weight[kRounds][kWordsEach], y_weight[kRounds][kWordsEach];
#endif

  static __device__ __forceinline__ int item_of(int round) { return round * WARPS + (int)(threadIdx.x / 32); }

  // Surplus threads repeat the last word.
  static __device__ __forceinline__ int word_of(int i) { return min((int)(threadIdx.x % 32) + i * 32, kWords - 1); }
  static __device__ __forceinline__ bool has_word(int i) { return (int)(threadIdx.x % 32) + i * 32 < kWords; }

  static __device__ __forceinline__ bool has_item(int item, const Unit& unit) {
    return item < (unit.has_new ? kItems : GROUP);
  }

  __device__ __forceinline__ void load_constants(const float* rotary, const Element* q_norm, const Element* k_norm,
                                                 int position) {
    const float* turn = rotary + (long long)position * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < kWordsEach; ++i) {
      const int word = word_of(i);
      cos[i] = __ldg((const float2*)(turn + word * 2));
      sin[i] = __ldg((const float2*)(turn + HEAD_DIM / 2 + word * 2));
#if NORM
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const uint32* weight = (const uint32*)(item_of(r) < GROUP ? q_norm : k_norm);
        x_weight[r][i] = __ldg(weight + word);
        y_weight[r][i] = __ldg(weight + kWords + word);
      }
#endif
    }
  }

  __device__ __forceinline__ void load(const Projected* of_token, int part_stride, const Unit& unit) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int item = item_of(r);
      const int head = item < GROUP ? unit.kv_head * GROUP + item
                                    : kNumHeads + (item - GROUP) * KV_HEADS + unit.kv_head;
      if (has_item(item, unit)) {
#pragma unroll
        for (int i = 0; i < kWordsEach; ++i) {
          x[r][i] = load_pair(of_token + head * HEAD_DIM, word_of(i), part_stride);
          y[r][i] = load_pair(of_token + head * HEAD_DIM, kWords + word_of(i), part_stride);
        }
      }
    }
  }

  __device__ __forceinline__ void normalise_and_turn(int r, float eps) {
#if NORM
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kWordsEach; ++i) {
      const float a = low(x[r][i]), b = high(x[r][i]), c = low(y[r][i]), d = high(y[r][i]);
      if (has_word(i)) squares += a * a + b * b + c * c + d * d;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) squares += __shfl_xor_sync(kAll, squares, by);
    const float factor = rsqrtf(squares / HEAD_DIM + eps);
#endif
#pragma unroll
    for (int i = 0; i < kWordsEach; ++i) {
#if NORM
      // Rounded here like a norm that is a step of its own.
      x[r][i] = rounded(low(x[r][i]) * factor * low(x_weight[r][i]),
                        high(x[r][i]) * factor * high(x_weight[r][i]));
      y[r][i] = rounded(low(y[r][i]) * factor * low(y_weight[r][i]),
                        high(y[r][i]) * factor * high(y_weight[r][i]));
#endif
      const float a = low(x[r][i]), b = high(x[r][i]), c = low(y[r][i]), d = high(y[r][i]);
      x[r][i] = rounded(a * cos[i].x - c * sin[i].x, b * cos[i].y - d * sin[i].y);
      y[r][i] = rounded(c * cos[i].x + a * sin[i].x, d * cos[i].y + b * sin[i].y);
    }
  }

  // All into shared memory; key and value also to their places in the caches, from `new_page` on.
  __device__ __forceinline__ void finish(uint32 base, const Unit& unit, char* k_cache, char* v_cache, int new_page,
                                         float eps) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int item = item_of(r);
      if (!has_item(item, unit)) continue;
      if (item <= GROUP) normalise_and_turn(r, eps);
      const uint32 to = base + (item < GROUP ? kQueriesAt + item * kStride : kNewAt + (item - GROUP) * kRowBytes);
      char* const cache = (item == GROUP ? k_cache : v_cache) + (long long)new_page * kPageBytes +
                          unit.position % 16 * kKeyBytes + unit.kv_head * kRowBytes;
#pragma unroll
      for (int i = 0; i < kWordsEach; ++i) {
        if (!has_word(i)) continue;
        store_shared(to + word_of(i) * 4, x[r][i]);
        store_shared(to + (kWords + word_of(i)) * 4, y[r][i]);
        if (item >= GROUP) {
          ((uint32*)cache)[word_of(i)] = x[r][i];
          ((uint32*)cache)[kWords + word_of(i)] = y[r][i];
        }
      }
    }
  }
};
