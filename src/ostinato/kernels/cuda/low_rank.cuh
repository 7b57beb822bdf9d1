// What adapters add to a product of tiles, in the registers of its sums: b [16 rows, ranks] of a slot times what
// shrink.cu left of the tokens.
//
// Each slot that a step has is multiplied with all tokens, and added to the sums of its own: a product that is not
// wanted reaches nobody, whatever a broken adapter makes of it, and sums without an adapter keep their bits.
#pragma once
#include "adapter_rows.cuh"

struct LowRank {
  const float* left;   // [tokens, width]
  const Element* b;    // [slots, rows, room]
  const int* ranks;    // of the slots
  const int* slots;    // of the tokens
  AdapterBlocks blocks;
  int rows, width, room;
  int second, third;  // first rows of these parts
};

constexpr int kSlotsTogether = 4;

// The second matrices of some slots, as a fragment of mma.m16n8k16 has them.
struct SlotWeights {
  int slots[kSlotsTogether];  // -1: none, or not this time
  bool are_last;
  uint32 b[kSlotsTogether][4];

  // Of rows `row` and + 8, from block `first` on; a slot of the block before was there already.
  __device__ __forceinline__ void ask(const LowRank& from, int first, int row, int rank) {
    int of_block[kSlotsTogether + 2];
#pragma unroll
    for (int i = 0; i < kSlotsTogether + 2; ++i) of_block[i] = first + i > 0 ? from.blocks.slot(first + i - 1) : -1;
    are_last = of_block[kSlotsTogether + 1] < 0;
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      slots[i] = of_block[i + 1] == of_block[i] ? -1 : of_block[i + 1];
      if (rank >= 16 && slots[i] >= 0 && rank >= load_int(from.ranks + slots[i])) slots[i] = -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      if (slots[i] < 0) continue;
      const Element* const place =
          from.b + ((long long)slots[i] * from.rows + row) * from.room + rank + (int)threadIdx.x % 4 * 2;
      b[i][0] = load_word(place);
      b[i][1] = load_word(place + 8 * from.room);
      b[i][2] = load_word(place + 8);
      b[i][3] = load_word(place + 8 * from.room + 8);
    }
  }
};

// What a warp adds to sums of 16 rows, as mma.m16n8k16 leaves them, four of each 8 tokens.
template <int kSums>
struct LowRankSums {
  SlotWeights weights;
  int slots[kSums / 4][2];  // of the tokens whose sums a thread has
  int first_row, first_token, tokens_here;

  // What is known before the wait for the previous kernel.
  __device__ __forceinline__ void ask(const LowRank& from, int row, int token, int num_tokens) {
    const int lane = threadIdx.x % 32;
    first_row = row, first_token = token, tokens_here = num_tokens;
    weights.ask(from, 0, first_row + lane / 4, 0);
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int mine = j * 8 + lane % 4 * 2 + odd;
        slots[j][odd] = mine < tokens_here ? load_int(from.slots + first_token + mine) : -1;
      }
    }
  }

  __device__ __forceinline__ void add_to(float (&acc)[kSums], const LowRank& from) {
    const int lane = threadIdx.x % 32;
    const int part = (first_row >= from.second) + (first_row >= from.third);
#pragma unroll 1
    for (int rank = 0; rank < from.room; rank += 16) {
      uint32 left[kSums / 4][2];
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const int token = j * 8 + lane / 4;
        left[j][0] = left[j][1] = 0;
        if (token >= tokens_here) continue;
        const float* const place =
            from.left + (long long)(first_token + token) * from.width + part * from.room + rank + lane % 4 * 2;
        const uint2 v = load_two_words(place), w = load_two_words(place + 8);
        left[j][0] = rounded(__uint_as_float(v.x), __uint_as_float(v.y));
        left[j][1] = rounded(__uint_as_float(w.x), __uint_as_float(w.y));
      }
      bool has_more = true;
#pragma unroll 1
      for (int first = 0; has_more; first += kSlotsTogether) {
        if (rank > 0 || first > 0) weights.ask(from, first, first_row + lane / 4, rank);
        has_more = !weights.are_last;
#pragma unroll
        for (int i = 0; i < kSlotsTogether; ++i) {
          if (weights.slots[i] < 0) continue;
#pragma unroll
          for (int j = 0; j < kSums / 4; ++j) {
            float sums[4] = {};
            multiply_add(sums, weights.b[i], left[j][0], left[j][1]);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (slots[j][k % 2] == weights.slots[i]) acc[j * 4 + k] += sums[k];
            }
          }
        }
      }
    }
  }
};
