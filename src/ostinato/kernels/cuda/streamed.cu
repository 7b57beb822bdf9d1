// A matrix larger than the chip times some tokens: the weights stream by, and the tensor cores take all tokens at
// once.
//
// A program owns ROWS rows of the matrix (of a gated one: ROWS of each half). A warp takes 16 of them (8 of each
// half) and walks along its share of their columns, 32 at a time. What it will need AHEAD steps later is on its way
// into shared memory meanwhile; the first of that is asked for before the wait for the previous kernel. Nothing says
// which columns are the 16 of a fragment of mma.m16n8k16 as long as both factors agree, so a thread takes 8
// neighbours for two fragments, which no other thread needs: copies of weights are waited for by those who asked for
// them, and by nobody else.
//
//     columns      | share 0 | share 1 | ...      SHARES of them, each CHUNK columns at a time
//     [16 rows, 32 columns] x [32 columns, 8 tokens], for each 8 of TOKENS  ->  sums over the shares
//
// With SLICES > 1 the programs of a cluster share the columns, too, so that each reads only its slice of the tokens:
// it sends its sums to the one that finishes those rows, which counts the bytes that come.
//
// The tokens come in chunks, too, which serve all warps of the program; SLOTS chunks are there or on their way.
// Programs begin with different chunks and go round: in step, all would ask the same few channels of the memory.
//
// NORM: the rows of x are to be normalised. The norm's weight is applied to a chunk by the threads that copied it;
// the norm's factor, one number per token, to the results. GATED: silu(first half) * second half. Sums are float32
// and rounded once.
#include "low_rank.cuh"
#include "linear_layer.cuh"

constexpr int kTileRows = GATED ? 8 : 16;  // results of a warp
constexpr int kTiles = ROWS / kTileRows;
constexpr int kThreads = kTiles * SHARES * 32;
constexpr int kSlice = IN / SLICES;        // columns of a program
constexpr int kColumns = kSlice / SHARES;  // of a warp
constexpr int kChunks = kColumns / CHUNK;
constexpr int kSteps = CHUNK / 32;
constexpr int kGroups = TOKENS / 8;
constexpr int kWorkers = kThreads / TOKENS;  // threads that copy the chunks of a token
constexpr int kHalves = GATED + 1;
constexpr int kOwned = ROWS / SLICES;  // rows that this program of the cluster finishes
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

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");
static_assert(ROWS % kTileRows == 0 && ROWS % (4 * SLICES) == 0, "rows are shared evenly");
static_assert(IN % (SLICES * SHARES * CHUNK) == 0, "columns are shared evenly");
static_assert(CHUNK % 64 == 0 && AHEAD <= kColumns / 32, "there is so much to ask for");
static_assert((SLOTS - 1) * kSteps >= AHEAD, "a chunk comes as early as the weights that are multiplied with it");

// Calls `f` with the share and the column within its chunk of every 8 columns that this thread copies.
template <class F>
__device__ __forceinline__ void for_own_pieces(F f) {
  constexpr int kPieces = CHUNK / 8;
  for (int i = threadIdx.x % kWorkers; i < SHARES * kPieces; i += kWorkers) f(i / kPieces, i % kPieces * 8);
}

extern "C" __global__ void __maxnreg__(REGISTERS)
    project(const Element* __restrict__ weight, const Element* __restrict__ norm_weight,
            const Element* __restrict__ bias, const Element* x, const Element* residual, Out* out,
#if ADAPTED
            const float* shrunk, const Element* b, const int* ranks, const int* slots, const int* blocks, int num_blocks,
            int room, int width, int second_part, int third_part,
#endif
            int num_tokens, int out_features, float eps) {
  Shared& shared = *(Shared*)dynamic_shared();
  const int lane = threadIdx.x % 32;
  const int tile = (int)threadIdx.x / 32 % kTiles, share = (int)threadIdx.x / 32 / kTiles;
  const int rank = SLICES > 1 ? (int)cluster_rank() : 0;
  const int first_row = (int)(blockIdx.x / SLICES) * ROWS;
  const int first_column = rank * kSlice;
  const int first_chunk = (int)(blockIdx.x / SLICES) % kChunks;

  allow_next_kernel();
  if (SLICES > 1) {
    if (threadIdx.x == 0) make_count(&shared.arrived);
    arrive_at_cluster();
  }
  // Rows lane / 4 and + 8 of a fragment.
  const Element* const first = weight + (long long)(first_row + tile * kTileRows + lane / 4) * IN +
                               first_column + share * kColumns + lane % 4 * 8;
  const Element* const second = first + (long long)(GATED ? out_features : 8) * IN;
  int next_column = first_chunk * CHUNK;
  auto copy_weights = [&](int slot) {
    copy_weight(shared_address(&shared.streams.weights[slot][0][threadIdx.x]), first + next_column);
    copy_weight(shared_address(&shared.streams.weights[slot][1][threadIdx.x]), second + next_column);
    next_column = next_column + 32 == kColumns ? 0 : next_column + 32;
  };
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) copy_weights(a);
  if (NORM) {
    for (int i = threadIdx.x; i < kSlice / 8; i += kThreads)
      copy_weight(shared_address(&shared.norm[i * 8]), norm_weight + first_column + i * 8);
  }
  if (SLICES > 1) wait_for_cluster();
  wait_for_previous();

  const int own_token = (int)threadIdx.x / kWorkers;
  const Element* const own_x = x + (long long)(own_token < num_tokens ? own_token : 0) * IN + first_column;
  auto copy_chunk = [&](int chunk) {
    const int column = (first_chunk + chunk) % kChunks * CHUNK;
    for_own_pieces([&](int s, int c) {
      copy_piece_if(shared_address(&shared.tokens[chunk % SLOTS][s][own_token][c]),
                    own_x + s * kColumns + column + c, own_token < num_tokens);
    });
  };
#pragma unroll
  for (int c = 0; c < SLOTS - 1; ++c) {
    if (c < kChunks) copy_chunk(c);
  }
  uint32 old[RESIDUAL ? kItems : 1];
  if (RESIDUAL) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = threadIdx.x + i * kThreads, token = item / kPairs;
      if (token < num_tokens)
        old[i] = load_word(residual + (long long)token * out_features + first_row + rank * kOwned + item % kPairs * 2);
    }
  }
  wait_for_copies();
  if (NORM) __syncthreads();  // all of its weight is there

  // From here on each step ends a group of copies: the weights of AHEAD steps later, and at times a chunk.
  float acc[kGroups][4] = {};
  float squares = 0.f;
  int slot = 0, left = kColumns / 32 - AHEAD;
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (NORM) {
      const int column = (first_chunk + chunk) % kChunks * CHUNK;
      for_own_pieces([&](int s, int c) {
        Word4* const piece = (Word4*)&shared.tokens[chunk % SLOTS][s][own_token][c];
        Word4 v = *piece;
        squares += scale(v, *(const Word4*)&shared.norm[s * kColumns + column + c]);
        *piece = v;
      });
    }
    __syncthreads();  // the chunk is there, and that in whose place the next one comes has been read
    if (chunk + SLOTS - 1 < kChunks) copy_chunk(chunk + SLOTS - 1);
    const Element* const tokens = &shared.tokens[chunk % SLOTS][share][lane / 4][lane % 4 * 8];
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) {
      const Word4 w = shared.streams.weights[slot][0][threadIdx.x], u = shared.streams.weights[slot][1][threadIdx.x];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const Word4 v = *(const Word4*)(tokens + g * 8 * kStride + step * 32);
        multiply_add(acc[g], {w.x, u.x, w.y, u.y}, v.x, v.y);
        multiply_add(acc[g], {w.z, u.z, w.w, u.w}, v.z, v.w);
      }
      if (left-- > 0) copy_weights(slot);
      end_copy_group();
      slot = slot + 1 == AHEAD ? 0 : slot + 1;
      wait_for_copy_groups<AHEAD - 1>();  // what the next step needs; before the first of a chunk, the chunk
    }
  }

  if (NORM) shared.squares[threadIdx.x] = squares;
  __syncthreads();  // nobody reads weights any more
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float* const part = &shared.streams.parts[share][g * 8 + lane % 4 * 2][tile * kTileRows + lane / 4];
    part[0] = acc[g][0];
    part[kPartStride] = acc[g][1];
    part[GATED ? ROWS : 8] = acc[g][2];
    part[kPartStride + (GATED ? ROWS : 8)] = acc[g][3];
  }
  if (NORM) {
    for (int i = threadIdx.x; i < TOKENS * 4; i += kThreads) {  // four threads a token
      float sum = 0.f;
      for (int j = i % 4; j < kWorkers; j += 4) sum += shared.squares[i / 4 * kWorkers + j];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (i % 4 == 0) shared.squares_from_cluster[SLICES > 1 ? rank : 0][i / 4] = sum;
    }
  }
  __syncthreads();

  if (SLICES > 1) {
    if (threadIdx.x == 0)
      expect_bytes(&shared.arrived, SLICES * 4 * (num_tokens * kHalves * kOwned + (NORM ? TOKENS : 0)));
    constexpr int kFours = kHalves * ROWS / 4;
    for (int item = threadIdx.x; item < num_tokens * kFours; item += kThreads) {
      const int token = item / kFours, place = item % kFours * 4, half = place / ROWS, row = place % ROWS;
      float4 sum = *(const float4*)&shared.streams.parts[0][token][place];
#pragma unroll
      for (int s = 1; s < SHARES; ++s) sum = sum + *(const float4*)&shared.streams.parts[s][token][place];
      send_four(&shared.from_cluster[rank][token][half * kOwned + row % kOwned], row / kOwned, sum, &shared.arrived);
    }
    if (NORM) {
      for (int i = threadIdx.x; i < TOKENS * SLICES; i += kThreads)
        send(&shared.squares_from_cluster[rank][i / SLICES], i % SLICES, shared.squares_from_cluster[rank][i / SLICES],
             &shared.arrived);
    }
    wait_for_bytes(&shared.arrived, false);
  }
  if (NORM) {
    if (threadIdx.x < TOKENS) {
      float sum = 0.f;
      for (int s = 0; s < SLICES; ++s) sum += shared.squares_from_cluster[s][threadIdx.x];
      shared.factors[threadIdx.x] = rsqrtf(sum / IN + eps);
    }
    __syncthreads();
  }

#if ADAPTED
  const LowRank added{shrunk, b,    ranks,       slots,     {blocks, num_blocks}, out_features * kHalves,
                      width, room, second_part, third_part};
#endif
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = threadIdx.x + i * kThreads, token = item / kPairs, own = item % kPairs * 2;
    if (token >= num_tokens) break;
    const int row = first_row + rank * kOwned + own;
    auto sum = [&](int half) {
      float2 y = make_float2(0.f, 0.f);
#pragma unroll
      for (int s = 0; s < (SLICES > 1 ? SLICES : SHARES); ++s) {
        const float* const part = SLICES > 1 ? &shared.from_cluster[s][token][half * kOwned + own]
                                             : &shared.streams.parts[s][token][half * ROWS + own];
        y = make_float2(y.x + part[0], y.y + part[1]);
      }
#if ADAPTED
      float more[2];
      added.of_rows(more, token, row + half * out_features);
      y = make_float2(y.x + more[0], y.y + more[1]);
#endif
      const float factor = NORM ? shared.factors[token] : 1.f;
      const uint32 added = BIAS ? *(const uint32*)(bias + row + half * out_features) : 0;
      return make_float2(y.x * factor + low(added), y.y * factor + high(added));
    };
    float2 y = sum(0);
    if (GATED) {
      const float2 by = sum(1);
      y = make_float2(gate(y.x, by.x), gate(y.y, by.y));
    }
    if (RESIDUAL) y = make_float2(y.x + low(old[i]), y.y + high(old[i]));
    store_two(out + (long long)token * out_features + row, y.x, y.y);
  }
}
