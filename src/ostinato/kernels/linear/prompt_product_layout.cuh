// What CTAs of prompt_product.cu work on, in which order, and their shared memory.
#pragma once
#include "warpgroup.cuh"

constexpr int kCluster = 2;                    // CTAs
constexpr int kTeams = 2;                      // of four warps, which multiply 64 tokens each
constexpr int kTokens = kTeams * 64;           // of a CTA
constexpr int kRows = 256;                     // of the matrix; of a gated one 128 of each half
constexpr int kShare = kRows / kCluster;       // of these, what a CTA asks for
constexpr int kResults = kRows / (GATED + 1);  // columns of a CTA's results
constexpr int kStages = 4;                     // tiles of 64 columns that are there or on their way
constexpr int kLead = 2;                       // steps that the first warp group is ahead
constexpr int kMultiplying = kTeams * 128;     // threads
constexpr int kThreads = kMultiplying + 128;   // of the others one asks for copies
constexpr int kWarps = kMultiplying / 32;
constexpr int kTokenBytes = kTokens * 128, kWeightBytes = kRows * 128;
constexpr int kResultBytes = 16 * 128;         // 64 columns of a warp's results
constexpr uint32 kAll = 0xffffffffu;           // lanes

struct Shared {
  char tokens[kStages][kTokenBytes];
  char weights[kStages][kWeightBytes];
  char results[kWarps][2][kResultBytes];
  ByteCount are_there[kStages], are_read[kStages];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");

// Which of a ring's places is next, and whether it has been used an odd number of times.
struct Place {
  int at = 0;
  bool odd = false;

  __device__ __forceinline__ void advance() {
    if (++at == kStages) {
      at = 0;
      odd = !odd;
    }
  }
};

// The tiles of a product, in the order in which clusters take them, each every `clusters`-th: down a few tiles of
// tokens, then the next rows of the matrix, so that what runs at a time reads few tokens and few weights.
struct Tiles {
  int down, across, together;  // tiles of tokens, of the matrix, and of tokens that go together

  __device__ __forceinline__ int count() const { return down * across; }

  // The tokens of a cluster and the results' columns.
  __device__ __forceinline__ void at(int number, int& token, int& column) const {
    const int group = number / (together * across), first = group * together;
    const int height = min(together, down - first), in_group = number - first * across;
    token = (first + in_group % height) * (kCluster * kTokens);
    column = in_group / height * kResults;
  }
};
