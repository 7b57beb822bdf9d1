// LoRA's `a`: from the width of a layer to a few ranks, for tokens grouped by slot.
//
// A cluster of SLICES CTAs takes 8 ranks and a block of up to TOKENS (8 or 16) tokens that have the same slot. Its
// warps split the columns, 32 at a time, as those of resident_weights.cuh do; the weights of the first block are in
// registers before the wait for the previous kernel.
//
//     columns      | slice 0: warp 0 | warp 1 | ... | slice 1: warp 0 | ...     32 each, and round again
//     [16 tokens, 32] x [32, 8 ranks]  ->  partials [tokens, ranks] of each warp  ->  of each slice  ->  their sum
//
// NORM: x is multiplied with the norm's weight; its factor is applied with `b`. Ranks that an adapter does not
// have are left out, beyond the first 16. What a token gets depends on no other token.
//
// A GEMM launched behind this kernel starts on its tokens as soon as this kernel flags them as complete, and waits for
// this kernel's results in its middle (dependent_launch.py).
#include "adapter_rows.cuh"
#include "linear_layer.cuh"

constexpr int kThreads = WARPS * 32;
constexpr int kRanks = 8, kTokens = TOKENS, kHalves = TOKENS / 8;
constexpr int kColumnsTogether = SLICES * WARPS * 32;
constexpr int kSteps = (IN + kColumnsTogether - 1) / kColumnsTogether;
constexpr bool kEven = IN % kColumnsTogether == 0;
constexpr int kOwned = kTokens / SLICES;  // tokens of a block that this CTA of the cluster finishes

static_assert(IN % 32 == 0, "columns are taken in blocks of 32");
static_assert(kThreads >= kTokens * kRanks, "a thread for each sum");

struct Shared {
  float parts[WARPS][kTokens][kRanks];
  float from_cluster[SLICES][kOwned][kRanks];
  ByteCount arrived;
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");

// A block of tokens, and the weights of its slot that are this thread's.
struct Work {
  int slot, begin, end;
  bool has_ranks;  // these; all have the first 16
  int tokens[kHalves];  // lane / 4 and + 8 of the block's; -1 where there is none
  Word4 weights[kSteps];

  __device__ __forceinline__ static bool has_column(int step, int column) {
    return kEven || step + 1 < kSteps || step * kColumnsTogether + column < IN;
  }

  __device__ __forceinline__ void find(const AdapterBlocks& blocks, const int* order, int block, const int* ranks,
                                       int rank_in_room) {
    const int lane = threadIdx.x % 32;
    slot = blocks.slot(block);
    if (slot < 0) return;
    has_ranks = rank_in_room < 16 || rank_in_room / 16 * 16 < load_kept(ranks + slot);
    begin = blocks.begin(block), end = blocks.end(block);
#pragma unroll
    for (int g = 0; g < kHalves; ++g) {
      const int place = begin + g * 8 + lane / 4;
      tokens[g] = place < end ? load_kept(order + place) : -1;
    }
  }

  __device__ __forceinline__ void ask(const Element* a, int width, int first_rank, int column) {
    if (slot < 0 || !has_ranks) return;
    const int lane = threadIdx.x % 32;
    const Element* row = a + ((long long)slot * width + first_rank + lane / 4) * IN + column;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      weights[s] = Word4{0, 0, 0, 0};
      if (has_column(s, column)) weights[s] = load_weight_now(row + s * kColumnsTogether);
    }
  }
};

extern "C" __global__ void __maxnreg__(REGISTERS)
    shrink(const Element* a, const Element* norm_weight, const Element* x, const int* ranks, const int* order,
           const int* all_blocks, float* shrunk, int num_blocks, int x_stride, int width, int room) {
  Shared& shared = *(Shared*)dynamic_shared();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slice = SLICES > 1 ? (int)cluster_rank() : 0;
  const int first_rank = (int)(blockIdx.x / SLICES) * kRanks;
  const int column = (slice * WARPS + warp) * 32 + lane % 4 * 8;
  const AdapterBlocks blocks{all_blocks, num_blocks};

  const bool is_speaking = blockIdx.x == 0 && blockIdx.y == 0;
  if (is_speaking && threadIdx.x == 0) say_not_ready(blocks.ready());
  if (!is_speaking || threadIdx.x == 0) allow_next_kernel();
  if (SLICES > 1) {
    if (threadIdx.x == 0) make_count(&shared.arrived);
    arrive_at_cluster();
  }
  Work work;
  work.find(blocks, order, blockIdx.y, ranks, first_rank % room);
  work.ask(a, width, first_rank, column);
  Word4 norm[NORM ? kSteps : 1];
  if (NORM) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      norm[s] = Word4{0, 0, 0, 0};
      if (Work::has_column(s, column)) norm[s] = load_weight_now(norm_weight + s * kColumnsTogether + column);
    }
  }
  if (SLICES > 1) wait_for_cluster();
  wait_for_previous();
  if (is_speaking && threadIdx.x == 0) say_ready(blocks.ready());

  // Blocks without tokens are the last ones; all CTAs of a cluster have the same.
  int lot = 0;
  for (int block = blockIdx.y; work.slot >= 0; block += gridDim.y) {
    if (work.has_ranks) {
      Word4 v[kHalves][kSteps];
#pragma unroll
      for (int g = 0; g < kHalves; ++g) {
        const Element* row = x + (long long)work.tokens[g] * x_stride + column;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          v[g][s] = Word4{0, 0, 0, 0};
          if (work.tokens[g] >= 0 && Work::has_column(s, column)) v[g][s] = load_four_words(row + s * kColumnsTogether);
        }
      }
      float acc[4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if (NORM) {
#pragma unroll
          for (int g = 0; g < kHalves; ++g) scale(v[g][s], norm[s]);
        }
        const Word4 p = v[0][s], b = work.weights[s];
        const Word4 q = kHalves > 1 ? v[kHalves - 1][s] : Word4{0, 0, 0, 0};
        multiply_add(acc, {p.x, q.x, p.y, q.y}, b.x, b.y);
        multiply_add(acc, {p.z, q.z, p.w, q.w}, b.z, b.w);
      }
#pragma unroll
      for (int g = 0; g < kHalves; ++g)
        *(float2*)&shared.parts[warp][g * 8 + lane / 4][lane % 4 * 2] = make_float2(acc[g * 2], acc[g * 2 + 1]);
      __syncthreads();

      const int token = threadIdx.x / kRanks, rank = threadIdx.x % kRanks;
      const bool is_there = token < work.end - work.begin;
      float sum = 0.f;
      if (is_there) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += shared.parts[w][token][rank];
      }
      float* const to = shrunk + first_rank + rank;
      if (SLICES > 1) {
        const int own_tokens = min(kOwned, work.end - work.begin - slice * kOwned);
        if (own_tokens > 0 && threadIdx.x == 0) expect_bytes(&shared.arrived, SLICES * own_tokens * kRanks * 4);
        if (is_there) send(&shared.from_cluster[slice][token % kOwned][rank], token / kOwned, sum, &shared.arrived);
        if (own_tokens > 0) wait_for_bytes(&shared.arrived, lot % 2);
        if (token < own_tokens) {
          sum = shared.from_cluster[0][token][rank];
#pragma unroll
          for (int s = 1; s < SLICES; ++s) sum += shared.from_cluster[s][token][rank];
          to[(long long)load_kept(order + work.begin + slice * kOwned + token) * width] = sum;
        }
        lot += own_tokens > 0;
      } else if (is_there) {
        to[(long long)load_kept(order + work.begin + token) * width] = sum;
      }
    }
    work.find(blocks, order, block + gridDim.y, ranks, first_rank % room);
    if (work.slot >= 0) {
      work.ask(a, width, first_rank, column);
      // Nobody sends or puts sums where others are still being read.
      if (SLICES > 1) {
        arrive_at_cluster();
        wait_for_cluster();
      } else {
        __syncthreads();
      }
    }
  }
}
