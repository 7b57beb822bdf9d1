// What a CTA of wide.cu works on, and its shared memory.
#pragma once
#include "linear_layer.cuh"
#include "warpgroup.cuh"

constexpr int kHalves = GATED + 1;
constexpr int kMatrixRows = ROWS * kHalves;
constexpr int kGroups = kMatrixRows / 64;  // of four warps
constexpr int kMultiplying = kGroups * 128;  // threads
constexpr int kThreads = kMultiplying + 32;
constexpr int kBoxes = COLUMNS / 64;  // beside each other, of a tile
constexpr int kSteps = IN / SLICES / COLUMNS;
constexpr int kOwned = (TOKENS + SLICES * 4 - 1) / (SLICES * 4) * 4;  // tokens that a CTA of the cluster finishes
constexpr int kWeightBox = kMatrixRows * 128, kTokenBox = TOKENS * 128;
constexpr int kWeightBytes = kBoxes * kWeightBox, kTokenBytes = kBoxes * kTokenBox;
constexpr int kRingBytes = WEIGHT_SLOTS * kWeightBytes + TOKEN_SLOTS * kTokenBytes;
constexpr int kStride = kOwned + (kOwned % 8 == 0 ? 4 : 0);  // what a warp reads at once is in different banks
constexpr int kPart = kMatrixRows * kStride;                 // sums for one CTA to finish
constexpr int kShares = kMultiplying / kOwned;               // threads for the squares of a token

struct Shared {
  // Sums take the place of tiles when all have been multiplied; those of others may come before.
  char rings[SLICES * kPart * 4 > kRingBytes ? SLICES * kPart * 4 : kRingBytes];
  float from_cluster[SLICES > 1 ? (SLICES - 1) * kPart : 4];
  float squares[SCALED ? kShares : 1][SCALED ? kOwned : 2], factors[SCALED ? kOwned : 2];
  ByteCount weights_are_there[WEIGHT_SLOTS], weights_are_read[WEIGHT_SLOTS];
  ByteCount tokens_are_there[TOKEN_SLOTS], tokens_are_read[TOKEN_SLOTS];
  ByteCount sums_are_there;

  __device__ __forceinline__ char* weights(int slot) { return rings + slot * kWeightBytes; }
  __device__ __forceinline__ char* tokens(int slot) { return rings + WEIGHT_SLOTS * kWeightBytes + slot * kTokenBytes; }

  // Sums of this CTA's columns, for the CTA that finishes those tokens.
  __device__ __forceinline__ float* sums_for(int owner) { return (float*)rings + owner * kPart; }

  // Where a CTA finds the sums of another slice's columns for its own tokens.
  __device__ __forceinline__ float* sums_from(int slice, int owner) {
    return from_cluster + (slice - (slice > owner)) * kPart;
  }
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");
static_assert(kMatrixRows % 64 == 0, "each four warps take 64 rows");
static_assert(IN % (SLICES * COLUMNS) == 0, "columns are shared evenly");
static_assert(WEIGHT_SLOTS > 1 && TOKEN_SLOTS > 1, "a place is free again when the next tiles are multiplied");
static_assert(kOwned * (SLICES - 1) < TOKENS, "every program of the cluster finishes some");
static_assert(!ADDED || ROWS % 64 == 0, "squares are added by warps");

// Which of the work is this CTA's.
struct Work {
  int slice;  // its number in the cluster
  int first_row, first_column, first_step;
  int first_token, tokens_here;
  int first_own, own_tokens;  // of the tokens that it finishes; none if the number is not positive

  __device__ __forceinline__ explicit Work(int num_tokens) {
    const int cluster = (int)blockIdx.x / SLICES;
    slice = SLICES > 1 ? (int)cluster_rank() : 0;
    first_row = cluster * ROWS;
    first_column = slice * kSteps * COLUMNS;
    first_step = cluster % kSteps;
    first_token = (int)blockIdx.y * TOKENS;
    tokens_here = min(TOKENS, num_tokens - first_token);
    first_own = first_token + slice * kOwned;
    own_tokens = min(kOwned, tokens_here - slice * kOwned);
  }

  // CTAs begin with different columns and go round: in step, all would ask the same channels of the memory.
  __device__ __forceinline__ int column_of(int step) const {
    return first_column + (first_step + step) % kSteps * COLUMNS;
  }
};

// Where the sums of a row are among those of a CTA: odd rows apart, so that pairs are read without conflicts.
__device__ __forceinline__ int place_of(int half, int row) { return half * ROWS + row % 2 * (ROWS / 2) + row / 2; }
