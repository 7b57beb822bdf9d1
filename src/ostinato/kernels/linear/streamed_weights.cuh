// Streamed weights: a ring in shared memory, for matrices that are larger than the SMs.
//
// A warp takes 16 of the CTA's rows (8 of each half) and walks along its share of their columns, 32 at a time. The
// weights of AHEAD steps later are on their way into shared memory meanwhile; the first of them are issued before
// the wait. Each thread copies what it multiplies: copies of weights are waited for by those who issued them, and
// by nobody else.
//
//     columns      | share 0 | share 1 | ...      SHARES of them, each CHUNK columns at a time
//     [16 rows, 32 columns] x [32 columns, 8 tokens], for each 8 of TOKENS  ->  sums over the shares
//
// The tokens come in chunks, which serve all warps of the CTA; SLOTS chunks are there or on their way. CTAs begin
// with different chunks and go round: in step, all would access the same few channels of the memory.
#pragma once

constexpr int kTileRows = GATED ? 8 : 16;  // results of a warp
constexpr int kTiles = ROWS / kTileRows;
constexpr int kThreads = kTiles * SHARES * 32;
constexpr int kSlice = IN / SLICES;        // columns of a CTA
constexpr int kColumns = kSlice / SHARES;  // of a warp
constexpr int kChunks = kColumns / CHUNK;
constexpr int kSteps = CHUNK / 32;
constexpr int kWorkers = kThreads / TOKENS;  // threads that copy the chunks of a token
constexpr int kPairs = kOwned / 2;     // results that are finished together, of a token
constexpr int kItems = (TOKENS * kPairs + kThreads - 1) / kThreads;

// Padded so that what a warp reads, or writes, at once lies in different banks.
constexpr int kStride = CHUNK + 32;
constexpr int kPartStride = kTiles * 16 + 4;

union Streams {
  Word4 weights[AHEAD][2][kThreads];
  float parts[SHARES][TOKENS][kPartStride];  // when all weights have been read
};

struct Shared {
  Streams streams;
  Element norm[NORM ? kSlice : 8];
  Element tokens[SLOTS][SHARES][TOKENS][kStride];
  float from_cluster[SLICES > 1 ? SLICES : 1][TOKENS][SLICES > 1 ? kHalves * kOwned : 4];
  float squares[kThreads];
  float squares_from_cluster[SLICES][TOKENS];
  float factors[TOKENS];
  ByteCount arrived;
};

static_assert(ROWS % kTileRows == 0, "rows are shared evenly");
static_assert(IN % (SLICES * SHARES * CHUNK) == 0, "columns are shared evenly");
static_assert(CHUNK % 64 == 0 && AHEAD <= kColumns / 32, "there is so much to copy");
static_assert((SLOTS - 1) * kSteps >= AHEAD, "a chunk comes as early as the weights that are multiplied with it");

// Calls `f` with the share and the column within its chunk of every 8 columns that this thread copies.
template <class F>
__device__ __forceinline__ void for_own_pieces(F f) {
  constexpr int kPieces = CHUNK / 8;
  for (int i = threadIdx.x % kWorkers; i < SHARES * kPieces; i += kWorkers) f(i / kPieces, i % kPieces * 8);
}
