// A matrix times some tokens, its weights on the chip, as the tensor cores take them, before the tokens are known.
//
// A program owns ROWS rows of the matrix (of a gated one: ROWS of each half). Its warps share the columns: each
// fetches its part of all rows before it waits for the previous kernel. Nothing says which columns are the 16 of
// a fragment of mma.m16n8k16 as long as both factors agree, so a thread takes 8 neighbours for two fragments:
// one load of 16 bytes, and no other thread needs them. Of its tiles of 8 rows it keeps HELD in registers and
// the others in shared memory.
//
//     columns      | warp 0 | warp 1 | ...        32 at a time; thread lane % 4 has 8 of them
//     [tokens, 32] x [32, 8 rows]  ->  parts [tokens, rows] of each warp  ->  their sum
//
// After the wait come the tokens, up to TOKENS (8 or 16), and every result is the sum over the warps. With
// SLICES > 1 the programs of a cluster share the columns too: each sends its parts to the one that finishes those
// rows, which counts the bytes that come.
//
// NORM: the rows of x are to be normalised. The norm's weight is applied to x; its factor, one number per token,
// to the results. GATED: silu(first half) * second half. Sums are float32 and rounded once.
//
// What a program takes of a multiprocessor decides how many kernels are on their way at the same time. Two must
// fit side by side: an empty kernel then takes 0.6 us, otherwise 1.5 to 3.
#include "low_rank.cuh"
#include "linear_layer.cuh"

constexpr int kThreads = WARPS * 32;
constexpr int kColumns = IN / SLICES / WARPS;  // of a warp
constexpr int kSteps = kColumns / 32;
constexpr int kGroups = TOKENS / 8;
constexpr int kHalves = GATED + 1;
constexpr int kRows = ROWS * kHalves;  // of the matrix: those of the first half, then those of the second
constexpr int kTiles = kRows / 8;
constexpr int kOwned = ROWS / SLICES;  // rows that this program of the cluster finishes
constexpr int kItems = (TOKENS * kOwned / 4 + kThreads - 1) / kThreads;  // four results each, of a thread

// Padded so that a warp's parts lie in different banks.
constexpr int kStride = kRows + (TOKENS == 8 ? 4 : kRows % 16 == 0 ? 8 : 0);
constexpr int kStaged = (kTiles - HELD + NORM) * kSteps;

// The staged weights first: copies to places that are not at multiples of 128 bytes are much slower.
struct Shared {
  Word4 staged[kStaged > 0 ? kStaged : 1][kThreads];  // the norm's weight last
  float parts[WARPS][TOKENS][kStride];
  float squares[WARPS][TOKENS];
  float from_cluster[SLICES][TOKENS][SLICES > 1 ? kHalves * kOwned : 4];
  float squares_from_cluster[SLICES][TOKENS];
  ByteCount arrived;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");
static_assert(IN % (SLICES * WARPS * 32) == 0, "columns are shared in blocks of 32");
static_assert(kGroups == 1 || kGroups == 2, "tokens are the 8 or the 16 rows of a fragment");
static_assert(kRows % 8 == 0 && ROWS % (4 * SLICES) == 0, "rows come in eights, results in fours");

__device__ __forceinline__ float4 operator*(float4 a, float b) {
  return make_float4(a.x * b, a.y * b, a.z * b, a.w * b);
}
__device__ __forceinline__ float4 four_of(uint2 v) {
  return make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
}

// A thread's columns of the tokens lane / 4, + 8, ...; zeros where there is no token.
__device__ __forceinline__ void load_tokens(Word4 (&v)[kGroups][kSteps], const Element* x, int num_tokens) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int token = g * 8 + lane / 4;
    const Element* row = x + (long long)token * IN + (lane % 4) * 8;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      v[g][s] = Word4{0, 0, 0, 0};
      if (token < num_tokens) v[g][s] = load_four_words(row + s * 32);
    }
  }
}

template <int parts, int stride>
__device__ __forceinline__ float4 sum_four(const float* first) {
  float4 sum = *(const float4*)first;
#pragma unroll
  for (int i = 1; i < parts; ++i) sum = sum + *(const float4*)(first + i * stride);
  return sum;
}

template <int parts>
__device__ __forceinline__ float sum_one(const float* first) {
  float sum = *first;
#pragma unroll
  for (int i = 1; i < parts; ++i) sum += first[i * TOKENS];
  return sum;
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
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = SLICES > 1 ? (int)cluster_rank() : 0;
  const int first_row = (int)(blockIdx.x / SLICES) * ROWS;
  const int first_column = rank * (IN / SLICES) + warp * kColumns;

  allow_next_kernel();
  if (SLICES > 1) {
    if (threadIdx.x == 0) make_count(&shared.arrived);
    arrive_at_cluster();
  }
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
  if (SLICES > 1) wait_for_cluster();
  wait_for_previous();

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

  constexpr int kPartStride = TOKENS * kStride, kRankStride = TOKENS * kHalves * kOwned;
  if (SLICES > 1) {
    if (threadIdx.x == 0)
      expect_bytes(&shared.arrived, SLICES * 4 * (num_tokens * kHalves * kOwned + (NORM ? TOKENS : 0)));
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
    wait_for_bytes(&shared.arrived, false);
  }

#if ADAPTED
  const LowRank added{shrunk, b,    ranks,       slots,     {blocks, num_blocks}, out_features * kHalves,
                      width, room, second_part, third_part};
#endif
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
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
  }
}
