// From sums to results: slices added, norm's factor, bias, gate, residual, and what the next norm needs.
#pragma once
#include "wide_layout.cuh"

constexpr int kItems = (kOwned / 4 * (ROWS / 2) + kThreads - 1) / kThreads;  // four tokens of two rows each
constexpr int kSquares = (IN / 64 + kShares - 1) / kShares;

// Calls `f` with the number, the first of two rows and the first of four tokens of each item of this thread.
template <class F>
__device__ __forceinline__ void for_own_items(int own_tokens, F f) {
#pragma unroll(ADDED ? kItems : 1)  // what was there before stays in registers
  for (int i = 0; i < kItems; ++i) {
    const int item = (int)threadIdx.x + i * kThreads, four = item / (ROWS / 2) * 4;
    if (four < own_tokens) f(i, item % (ROWS / 2) * 2, four);
  }
}

// The squares of the tokens that a CTA finishes: each thread that multiplies has a share of one token's.
struct Squares {
  float asked[SCALED ? kSquares : 1];

  static __device__ __forceinline__ int token() { return (int)threadIdx.x % kOwned; }
  static __device__ __forceinline__ int share() { return (int)threadIdx.x / kOwned; }

  // Loads that nothing waits for yet.
  __device__ __forceinline__ void ask(const float* squares, int num_tokens, const Work& work) {
#pragma unroll
    for (int i = 0; i < kSquares; ++i) {
      const int part = share() + i * kShares;
      asked[i] = 0.f;
      if (token() < work.own_tokens && part < IN / 64)
        asked[i] = __uint_as_float(load_word(squares + part * num_tokens + work.first_own + token()));
    }
  }

  __device__ __forceinline__ void add_up(Shared& shared) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kSquares; ++i) sum += asked[i];
    if (kMultiplying % kOwned == 0 || share() < kShares) shared.squares[share()][token()] = sum;
  }
};

// By one warp, when all shares are there.
__device__ __forceinline__ void make_factors(Shared& shared, float eps) {
#pragma unroll 1
  for (int token = (int)threadIdx.x % 32; token < kOwned; token += 32) {
    float total = 0.f;
    for (int share = 0; share < kShares; ++share) total += shared.squares[share][token];
    shared.factors[token] = rsqrtf(total / IN + eps);
  }
}

// Rows that results are added to, and the weight of the norm behind them.
struct Residual {
  uint32 weight[ADDED ? kItems : 1], old[ADDED ? kItems : 1][4];

  __device__ __forceinline__ void ask_weight(const Element* norm_weight, const Work& work) {
    for_own_items(work.own_tokens, [&](int i, int row, int) { weight[i] = load_word(norm_weight + work.first_row + row); });
  }

  __device__ __forceinline__ void ask(const Out* rows, int width, const Work& work) {
    for_own_items(work.own_tokens, [&](int i, int row, int four) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (four + k < work.own_tokens)
          old[i][k] = load_word(rows + (long long)(work.first_own + four + k) * width + work.first_row + row);
      }
    });
  }
};

struct Results {
  Out* out;
  Element* scaled;  // sums times the norm's weight, and their squares: where results are added to something
  float* squares;
  const Element* bias;
  int num_tokens, width;
};

__device__ __forceinline__ void finish(Shared& shared, const Work& work, const Residual& residual, const Results& to) {
  for_own_items(work.own_tokens, [&](int i, int pair, int four) {
    const int row = work.first_row + pair;
    float y[4][2], by[4][2];  // of two rows, for each of four tokens
    auto take = [&](float (&into)[4][2], int half) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int place = place_of(half, pair + odd) * kStride + four;
        auto sums_of = [&](int s) {
          const float* const from = s == work.slice ? shared.sums_for(s) : shared.sums_from(s, work.slice);
          return *(const float4*)(from + place);
        };
        float4 v = sums_of(0);
#pragma unroll
        for (int s = 1; s < SLICES; ++s) v = v + sums_of(s);
        into[0][odd] = v.x, into[1][odd] = v.y, into[2][odd] = v.z, into[3][odd] = v.w;
      }
    };
    take(y, 0);
    if (GATED) take(by, 1);
    float added[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int token = four + k;
      const float factor = SCALED ? shared.factors[token] : 1.f;
      auto scale_and_shift = [&](float (&v)[2], int half) {
        const uint32 two = BIAS ? *(const uint32*)(to.bias + half * to.width + row) : 0;
        v[0] = v[0] * factor + low(two);
        v[1] = v[1] * factor + high(two);
      };
      scale_and_shift(y[k], 0);
      if (GATED) {
        scale_and_shift(by[k], 1);
        y[k][0] = gate(y[k][0], by[k][0]);
        y[k][1] = gate(y[k][1], by[k][1]);
      }
      if (token >= work.own_tokens) continue;
      const long long place = (long long)(work.first_own + token) * to.width + row;
      if (ADDED) {
        const uint32 old = residual.old[i][k], weight = residual.weight[i];
        const uint32 total = rounded(y[k][0] + low(old), y[k][1] + high(old));
        *(uint32*)(to.out + place) = total;
        *(uint32*)(to.scaled + place) = rounded(low(total) * low(weight), high(total) * high(weight));
        added[k] = low(total) * low(total) + high(total) * high(total);
      } else {
        store_two(to.out + place, y[k][0], y[k][1]);
      }
    }
    if (ADDED) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) added[k] += __shfl_xor_sync(0xffffffffu, added[k], lanes);
        if (threadIdx.x % 32 == k && four + k < work.own_tokens)
          to.squares[row / 64 * to.num_tokens + work.first_own + four + k] = added[k];
      }
    }
  });
}
