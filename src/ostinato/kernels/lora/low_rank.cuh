// What adapters add to a product: b [rows, ranks] of a slot times what shrink.cu left of the tokens.
//
// To few results of a thread it is added one by one (`of_rows`). To sums of tiles in registers (`add_low_rank`) by the
// tensor cores: each slot that a step has is multiplied with all tokens, and added to the sums of its own: a product that is not
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

  __device__ __forceinline__ int part_of(int row) const { return (row >= second) + (row >= third); }

  // For rows of one part, from `row` on, of a token that may have an adapter.
  template <int kRows>
  __device__ __forceinline__ void of_rows(float (&sums)[kRows], int token, int row) const {
#pragma unroll
    for (int k = 0; k < kRows; ++k) sums[k] = 0.f;
    const int slot = load_kept(slots + token);
    if (slot < 0) return;
    const int rank = room > 16 ? load_kept(ranks + slot) : 16;
    const float* const of_token = left + (long long)token * width + part_of(row) * room;
    const Element* const of_row = b + ((long long)slot * rows + row) * room;
#pragma unroll 1
    for (int r = 0; r < rank || r < 16; r += 8) {
      const Word4 v = load_four_words(of_token + r), w = load_four_words(of_token + r + 4);
      const uint32 by[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const Word4 p = load_weight_now(of_row + k * room + r);
        const uint32 pairs[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[k] = fmaf(low(pairs[i]), __uint_as_float(by[i * 2]), sums[k]);
          sums[k] = fmaf(high(pairs[i]), __uint_as_float(by[i * 2 + 1]), sums[k]);
        }
      }
    }
  }
};

constexpr int kSlotsTogether = 4, kGroupsTogether = 4;  // as many as registers allow

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
      if (rank >= 16 && slots[i] >= 0 && rank >= load_kept(from.ranks + slots[i])) slots[i] = -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotsTogether; ++i) {
      if (slots[i] < 0) continue;
      const Element* const place =
          from.b + ((long long)slots[i] * from.rows + row) * from.room + rank + (int)threadIdx.x % 4 * 2;
      b[i][0] = (uint32)load_kept((const int*)(place));
      b[i][1] = (uint32)load_kept((const int*)(place + 8 * from.room));
      b[i][2] = (uint32)load_kept((const int*)(place + 8));
      b[i][3] = (uint32)load_kept((const int*)(place + 8 * from.room + 8));
    }
  }
};

// A warp adds to sums of 16 rows from `first_row` on, as mma.m16n8k16 leaves them: four of each 8 tokens, of the
// `tokens_here` from `first_token` on. `weights`: the first ones, asked for before the wait for the previous kernel.
template <int kSums>
__device__ __forceinline__ void add_low_rank(float (&acc)[kSums], SlotWeights weights, const LowRank& from,
                                             int first_row, int first_token, int tokens_here) {
  constexpr int kGroups = kSums / 4, kTogether = kGroups < kGroupsTogether ? kGroups : kGroupsTogether;
  const int lane = threadIdx.x % 32;
  const int part = from.part_of(first_row);
#pragma unroll
  for (int group = 0; group < kGroups; group += kTogether) {
#pragma unroll 1
    for (int rank = 0; rank < from.room; rank += 16) {
      uint32 left[kTogether][2];
      int slots[kTogether][2];  // of the tokens whose sums this thread has
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int token = (group + j) * 8 + lane / 4, own = (group + j) * 8 + lane % 4 * 2;
        left[j][0] = left[j][1] = 0;
        if (token < tokens_here) {
          const float* const place =
              from.left + (long long)(first_token + token) * from.width + part * from.room + rank + lane % 4 * 2;
          const uint2 v = load_two_words(place), w = load_two_words(place + 8);
          left[j][0] = rounded(__uint_as_float(v.x), __uint_as_float(v.y));
          left[j][1] = rounded(__uint_as_float(w.x), __uint_as_float(w.y));
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
          slots[j][odd] = own + odd < tokens_here ? load_kept(from.slots + first_token + own + odd) : -1;
      }
      if (group > 0 || rank > 0) weights.ask(from, 0, first_row + lane / 4, rank);
      bool has_more = true;
#pragma unroll 1
      for (int first = 0; has_more; first += kSlotsTogether) {
        if (first > 0) weights.ask(from, first, first_row + lane / 4, rank);
        has_more = !weights.are_last;
#pragma unroll
        for (int i = 0; i < kSlotsTogether; ++i) {
          if (weights.slots[i] < 0) continue;
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            float sums[4] = {};
            multiply_add(sums, weights.b[i], left[j][0], left[j][1]);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (slots[j][k % 2] == weights.slots[i]) acc[(group + j) * 4 + k] += sums[k];
            }
          }
        }
      }
    }
  }
}
