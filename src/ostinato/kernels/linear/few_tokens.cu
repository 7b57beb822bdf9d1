// A linear layer of 2 to 16 tokens with its neighbours: norm before, gate and residual after.
//
// Reading the weights is all that takes time, so they go from memory to the operands of mma.m16n8k16 without a
// detour. Nothing says which columns are the 16 of a fragment as long as both factors agree: a thread takes 8
// neighbours for two fragments, in one load of 16 bytes that no other thread needs. The first loads are issued
// before the wait for the previous kernel, when the tokens are not known yet. There are two ways to hold weights:
//
//   resident   all weights of the CTA, in registers and shared memory, before the wait (resident_weights.cuh)
//   STREAMED   a ring in shared memory, AHEAD steps before the product (streamed_weights.cuh)
//
// A CTA owns ROWS rows of the matrix (GATED: ROWS of each half). With SLICES > 1 the CTAs of a cluster split the
// columns: each sends its split-K partials to the CTA that finishes those rows, which counts the bytes that come.
//
//     columns      | CTA 0 of the cluster | CTA 1 | ...
//     rows         finished by CTA 0: kOwned rows | by CTA 1 | ...
//
// NORM: the norm's weight is applied to x; its factor, one number per token, to the results. GATED: silu(first half)
// * second half. Sums are float32 and rounded once.
#include "low_rank.cuh"
#include "linear_layer.cuh"

constexpr int kGroups = TOKENS / 8;
constexpr int kHalves = GATED + 1;
constexpr int kOwned = ROWS / SLICES;  // rows that this CTA of the cluster finishes

static_assert(kGroups == 1 || kGroups == 2, "tokens are the 8 or the 16 rows of a fragment");
static_assert(ROWS % (4 * SLICES) == 0, "partials are sent in fours");

#if STREAMED
#include "streamed_weights.cuh"
#else
#include "resident_weights.cuh"
#endif

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");

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
#if STREAMED
  const int tile = (int)threadIdx.x / 32 % kTiles, share = (int)threadIdx.x / 32 / kTiles;
#else
  const int warp = threadIdx.x / 32;
#endif
  const int rank = SLICES > 1 ? (int)cluster_rank() : 0;
  const int first_row = (int)(blockIdx.x / SLICES) * ROWS;
#if STREAMED
  const int first_column = rank * kSlice;
  const int first_chunk = (int)(blockIdx.x / SLICES) % kChunks;
#else
  const int first_column = rank * (IN / SLICES) + warp * kColumns;
#endif

  allow_next_kernel();
  if (SLICES > 1) {
    if (threadIdx.x == 0) make_count(&shared.arrived);
    arrive_at_cluster();
  }

  // The prologue: what of the weights is in flight before the wait.
#if STREAMED
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
#else
  Word4 held[HELD > 0 ? HELD : 1][kSteps];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = t * 8 + lane / 4;
    const int place = first_row + (row < ROWS ? row : out_features + row - ROWS);
    const Element* from = weight + (long long)place * IN + first_column + (lane % 4) * 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      // With a cluster to meet in between, loads of constants stay before the wait, too.
      if (t < HELD) held[t][s] = SLICES > 1 ? load_weight(from + s * 32) : load_weight_now(from + s * 32);
      else copy_weight(shared_address(&shared.staged[(t - HELD) * kSteps + s][threadIdx.x]), from + s * 32);
    }
  }
  if (NORM) {
    const Element* from = norm_weight + first_column + (lane % 4) * 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      copy_weight(shared_address(&shared.staged[(kTiles - HELD) * kSteps + s][threadIdx.x]), from + s * 32);
  }
#endif
  if (SLICES > 1) wait_for_cluster();
  wait_for_previous();

  // The product: partials of this CTA's columns.
#if STREAMED
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
#else
  auto weights = [&](int tile, int step) {
    if (tile >= kTiles) return Word4{0, 0, 0, 0};
    return tile < HELD ? held[tile][step] : shared.staged[(tile - HELD) * kSteps + step][threadIdx.x];
  };
  Word4 v[kGroups][kSteps];
  load_tokens(v, x + first_column, num_tokens);
#if RESIDUAL
  uint2 old[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = threadIdx.x + i * kThreads, token = item / (kOwned / 4);
    const int row = first_row + rank * kOwned + item % (kOwned / 4) * 4;
    if (token < num_tokens)
      old[i] = load_two_words(residual + (long long)token * out_features + row);
  }
#endif
  wait_for_copies();

#if NORM
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float squares = 0.f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
      squares += scale(v[g][s], shared.staged[(kTiles - HELD) * kSteps + s][threadIdx.x]);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    if (lane % 4 == 0) shared.squares[warp][g * 8 + lane / 4] = squares;
  }
#endif
#if TOKENS == 8
  // The rows of the matrix as the 16 rows of a fragment.
  float acc[(kTiles + 1) / 2][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      const Word4 a = weights(t, s), c = weights(t + 1, s), b = v[0][s];
      multiply_add(acc[t / 2], {a.x, c.x, a.y, c.y}, b.x, b.y);
      multiply_add(acc[t / 2], {a.z, c.z, a.w, c.w}, b.z, b.w);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    float* part = &shared.parts[warp][lane % 4 * 2][t * 8 + lane / 4];
    part[0] = acc[t / 2][t % 2 * 2];
    part[kStride] = acc[t / 2][t % 2 * 2 + 1];
  }
#else
  float acc[kTiles][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const Word4 a = v[0][s], c = v[1][s], b = weights(t, s);
      multiply_add(acc[t], {a.x, c.x, a.y, c.y}, b.x, b.y);
      multiply_add(acc[t], {a.z, c.z, a.w, c.w}, b.z, b.w);
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float* from = acc[t] + g * 2;
      *(float2*)&shared.parts[warp][g * 8 + lane / 4][t * 8 + lane % 4 * 2] = make_float2(from[0], from[1]);
    }
  }
#endif
  __syncthreads();
#endif

  // The exchange: partials go to the CTA of the cluster that finishes their rows.
#if !STREAMED
  constexpr int kPartStride = TOKENS * kStride, kRankStride = TOKENS * kHalves * kOwned;
#endif
  if (SLICES > 1) {
    if (threadIdx.x == 0)
      expect_bytes(&shared.arrived, SLICES * 4 * (num_tokens * kHalves * kOwned + (NORM ? TOKENS : 0)));
#if STREAMED
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
#else
    for (int item = threadIdx.x; item < num_tokens * (kRows / 4); item += kThreads) {
      const int token = item / (kRows / 4), row = item % (kRows / 4) * 4;
      const int half = row / ROWS, place = row % ROWS;
      send_four(&shared.from_cluster[rank][token][half * kOwned + place % kOwned], place / kOwned,
                sum_four<WARPS, kPartStride>(&shared.parts[0][token][row]), &shared.arrived);
    }
    if (NORM) {
      for (int item = threadIdx.x; item < TOKENS * SLICES; item += kThreads) {
        const float sum = sum_one<WARPS>(&shared.squares[0][item / SLICES]);
        send(&shared.squares_from_cluster[rank][item / SLICES], item % SLICES, sum, &shared.arrived);
      }
    }
#endif
    wait_for_bytes(&shared.arrived, false);
  }
#if STREAMED
  if (NORM) {
    if (threadIdx.x < TOKENS) {
      float sum = 0.f;
      for (int s = 0; s < SLICES; ++s) sum += shared.squares_from_cluster[s][threadIdx.x];
      shared.factors[threadIdx.x] = rsqrtf(sum / IN + eps);
    }
    __syncthreads();
  }
#endif

  // The epilogue: LoRA, norm's factor, bias, gate, residual.
#if ADAPTED
  const LowRank added{shrunk, b,    ranks,       slots,     {blocks, num_blocks}, out_features * kHalves,
                      width, room, second_part, third_part};
#endif
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#if STREAMED
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
#else
    const int item = threadIdx.x + i * kThreads;
    const int token = item / (kOwned / 4), own = item % (kOwned / 4) * 4;
    const int row = first_row + rank * kOwned + own;
    if (token >= num_tokens) break;
    float4 y, second = make_float4(0.f, 0.f, 0.f, 0.f);
    if (SLICES > 1) {
      y = sum_four<SLICES, kRankStride>(&shared.from_cluster[0][token][own]);
      if (GATED) second = sum_four<SLICES, kRankStride>(&shared.from_cluster[0][token][kOwned + own]);
    } else {
      y = sum_four<WARPS, kPartStride>(&shared.parts[0][token][own]);
      if (GATED) second = sum_four<WARPS, kPartStride>(&shared.parts[0][token][ROWS + own]);
    }
#if ADAPTED
    float more[4];
    added.of_rows(more, token, row);
    y = y + make_float4(more[0], more[1], more[2], more[3]);
    if (GATED) {
      added.of_rows(more, token, out_features + row);
      second = second + make_float4(more[0], more[1], more[2], more[3]);
    }
#endif
#if NORM
    const float squares = SLICES > 1 ? sum_one<SLICES>(&shared.squares_from_cluster[0][token])
                                     : sum_one<WARPS>(&shared.squares[0][token]);
    const float factor = rsqrtf(squares / IN + eps);
    y = y * factor;
    if (GATED) second = second * factor;
#endif
#if BIAS
    y = y + four_of(*(const uint2*)(bias + row));
    if (GATED) second = second + four_of(*(const uint2*)(bias + out_features + row));
#endif
    if (GATED) {
      y = make_float4(gate(y.x, second.x), gate(y.y, second.y), gate(y.z, second.z), gate(y.w, second.w));
    }
#if RESIDUAL
    y = y + four_of(old[i]);
#endif
    store_four(out + (long long)token * out_features + row, y);
#endif
  }
}
