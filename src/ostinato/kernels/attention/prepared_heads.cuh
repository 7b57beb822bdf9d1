// Queries, keys and values of a KV head from the QKV projection of a request's tokens: norm, rotation, KV write.
#pragma once
#include "work_units.cuh"

constexpr int kNumHeads = GROUP * KV_HEADS;
constexpr int kWords = HEAD_DIM / 4;  // pairs of elements in half a head
constexpr int kWordsEach = (kWords + 31) / 32;
constexpr int kItemsEach = GROUP + 2;  // heads of a token to prepare: queries, key, value
constexpr int kItems = QUERIES * kItemsEach;
constexpr int kRounds = (kItems + WARPS - 1) / WARPS;
constexpr int kTurns = QUERIES == 1 ? 1 : kRounds;  // positions that a warp's items have

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

// The pages of a unit's new keys: two, where they begin in one and end in the next.
struct NewPages {
  int first, last;

  __device__ __forceinline__ void load(const Unit& unit, const int* pages) {
    first = unit.has_new ? __ldg(pages + unit.position / 16) : 0;
    last = QUERIES > 1 && unit.has_new ? __ldg(pages + (unit.position + unit.count - 1) / 16) : first;
  }

  __device__ __forceinline__ int of(const Unit& unit, int position) const {
    return QUERIES == 1 || position / 16 == unit.position / 16 ? first : last;
  }
};

// Of each token, items 0 to GROUP - 1 are queries, then the key, then the value; a warp has every WARPS-th.
struct Heads {
  float2 cos[kTurns][kWordsEach], sin[kTurns][kWordsEach];
  uint32 x[kRounds][kWordsEach], y[kRounds][kWordsEach];  // first halves, and what turns with them
#if NORM
  uint32 x_weight[kRounds][kWordsEach], y_weight[kRounds][kWordsEach];
#endif

  static __device__ __forceinline__ int item_of(int round) { return round * WARPS + (int)(threadIdx.x / 32); }
  static __device__ __forceinline__ int token_of(int item) { return QUERIES == 1 ? 0 : item / kItemsEach; }
  static __device__ __forceinline__ int part_of(int item) { return QUERIES == 1 ? item : item % kItemsEach; }

  // Surplus threads repeat the last word.
  static __device__ __forceinline__ int word_of(int i) { return min((int)(threadIdx.x % 32) + i * 32, kWords - 1); }
  static __device__ __forceinline__ bool has_word(int i) { return (int)(threadIdx.x % 32) + i * 32 < kWords; }

  // A place without a token has queries, which nobody looks at, and neither key nor value.
  static __device__ __forceinline__ bool has_item(int item, const Unit& unit) {
    if (QUERIES == 1) return item < (unit.has_new ? kItems : GROUP);
    return item < kItems && (part_of(item) < GROUP || (unit.has_new && token_of(item) < unit.count));
  }

  __device__ __forceinline__ void load_constants(const float* rotary, const Element* q_norm, const Element* k_norm,
                                                 const Unit& unit) {
#pragma unroll
    for (int i = 0; i < kWordsEach; ++i) {
      const int word = word_of(i);
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        const int position = unit.position + min(token_of(item_of(t)), unit.count - 1);
        const float* turn = rotary + (long long)position * HEAD_DIM;
        cos[t][i] = __ldg((const float2*)(turn + word * 2));
        sin[t][i] = __ldg((const float2*)(turn + HEAD_DIM / 2 + word * 2));
      }
#if NORM
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const uint32* weight = (const uint32*)(part_of(item_of(r)) < GROUP ? q_norm : k_norm);
        x_weight[r][i] = __ldg(weight + word);
        y_weight[r][i] = __ldg(weight + kWords + word);
      }
#endif
    }
  }

  __device__ __forceinline__ void load(const Projected* of_request, int token_stride, int part_stride,
                                       const Unit& unit) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int item = item_of(r), part = part_of(item);
      const Projected* const of_token = of_request + (long long)token_of(item) * token_stride;
      const int head = part < GROUP ? unit.kv_head * GROUP + part
                                    : kNumHeads + (part - GROUP) * KV_HEADS + unit.kv_head;
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
      const float2 cosine = cos[r % kTurns][i], sine = sin[r % kTurns][i];
      x[r][i] = rounded(a * cosine.x - c * sine.x, b * cosine.y - d * sine.y);
      y[r][i] = rounded(c * cosine.x + a * sine.x, d * cosine.y + b * sine.y);
    }
  }

  // All into shared memory; keys and values also to their places in the caches, those of the unit's own tiles.
  __device__ __forceinline__ void finish(uint32 base, const Unit& unit, char* k_cache, char* v_cache,
                                         const NewPages& pages, float eps) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int item = item_of(r), part = part_of(item), token = token_of(item);
      if (!has_item(item, unit)) continue;
      if (part <= GROUP) normalise_and_turn(r, eps);
      const uint32 to = base + (part < GROUP ? kQueriesAt + (token * GROUP + part) * kStride
                                             : kNewAt + ((part - GROUP) * QUERIES + token) * kRowBytes);
      const int position = unit.position + token;
      const bool is_kept = part >= GROUP && (QUERIES == 1 || unit.has_tile(position / 16));
      char* const cache = (part == GROUP ? k_cache : v_cache) + (long long)pages.of(unit, position) * kPageBytes +
                          position % 16 * kKeyBytes + unit.kv_head * kRowBytes;
#pragma unroll
      for (int i = 0; i < kWordsEach; ++i) {
        if (!has_word(i)) continue;
        store_shared(to + word_of(i) * 4, x[r][i]);
        store_shared(to + (kWords + word_of(i)) * 4, y[r][i]);
        if (is_kept) {
          ((uint32*)cache)[word_of(i)] = x[r][i];
          ((uint32*)cache)[kWords + word_of(i)] = y[r][i];
        }
      }
    }
  }
};
