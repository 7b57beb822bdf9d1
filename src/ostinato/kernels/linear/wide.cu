// Warp-specialised GEMM for dozens of tokens: one TMA producer, wgmma consumer warp groups, split-K in a cluster.
//
// A CTA owns ROWS rows of the matrix (GATED: ROWS of each half) and TOKENS tokens. The producer thread copies tiles of
// COLUMNS columns into rings of WEIGHT_SLOTS and TOKEN_SLOTS; the first weights before the wait for the previous
// kernel. Each warp group multiplies 64 of the rows with all tokens.
//
//     [64 rows, COLUMNS] x [COLUMNS, TOKENS]  ->  sums [rows, tokens]
//
// Copies bound the time: weights once, but the tokens again for every CTA. With SLICES > 1 the CTAs of a cluster split
// the columns, and so can have more rows each: they send their split-K partials to the CTA that finishes those tokens,
// which counts the bytes that come.
//
// A norm may be deferred between two of these kernels. ADDED: results are added to rows that are there; the next layer
// multiplies these sums times the norm's weight, and the sums' squares are added up for every 64 rows of the matrix.
// SCALED: the tokens come like that, and the norm's factor, one number per token, is applied to the results.
//
// ADAPTED: LoRA is added to the sums of the first slice (low_rank.cuh) when half of the columns are multiplied:
// shrink.cu runs meanwhile, and the tiles of the other half are in flight. GATED: silu(first half) * second half. Sums
// are float32 and rounded once.
#include "low_rank.cuh"
#include "wide_results.cuh"

static_assert(!ADAPTED || ROWS % 16 == 0, "a warp has rows of one half");
constexpr int kStepsBefore = ADAPTED ? kSteps / 2 : 0;  // adapters add
constexpr bool kSendsFromRegisters = SLICES > 1 && TOKENS <= 32;  // little: each thread by itself

// Asks for tiles: the thread that fetches.
struct Fetcher {
  Shared& shared;
  const Work& work;
  const TensorMap &weight, &x;
  int half_of_matrix;  // rows

  __device__ __forceinline__ void weights(int step) const {
    const int slot = step % WEIGHT_SLOTS, column = work.column_of(step);
    ByteCount* const count = &shared.weights_are_there[slot];
    expect_bytes(count, kWeightBytes);
    for (int box = 0; box < kBoxes; ++box)
      for (int half = 0; half < kHalves; ++half)
        copy_box(shared.weights(slot) + box * kWeightBox + half * (ROWS * 128), weight, column + box * 64,
                 half * half_of_matrix + work.first_row, count);
  }

  __device__ __forceinline__ void tokens(int step) const {
    const int slot = step % TOKEN_SLOTS, column = work.column_of(step);
    ByteCount* const count = &shared.tokens_are_there[slot];
    expect_bytes(count, kTokenBytes);
    for (int box = 0; box < kBoxes; ++box)
      copy_box(shared.tokens(slot) + box * kTokenBox, x, column + box * 64, work.first_token, count);
  }

  // All tiles of tokens, and the weights behind those that were asked for before the wait.
  __device__ __forceinline__ void all_others() const {
    for (int step = 0; step < min(TOKEN_SLOTS, kSteps); ++step) tokens(step);
    for (int step = 0; step < kSteps; ++step) {  // what follows in the places of this one
      if (step + WEIGHT_SLOTS < kSteps) {
        wait_for_bytes(&shared.weights_are_read[step % WEIGHT_SLOTS], step / WEIGHT_SLOTS % 2);
        weights(step + WEIGHT_SLOTS);
      }
      if (step + TOKEN_SLOTS < kSteps) {
        wait_for_bytes(&shared.tokens_are_read[step % TOKEN_SLOTS], step / TOKEN_SLOTS % 2);
        tokens(step + TOKEN_SLOTS);
      }
    }
  }
};

__device__ __forceinline__ void make_counts(Shared& shared) {
  for (int i = 0; i < WEIGHT_SLOTS; ++i) {
    make_count_of(&shared.weights_are_there[i], 1);
    make_count_of(&shared.weights_are_read[i], kGroups);
  }
  for (int i = 0; i < TOKEN_SLOTS; ++i) {
    make_count_of(&shared.tokens_are_there[i], 1);
    make_count_of(&shared.tokens_are_read[i], kGroups);
  }
  make_count_of(&shared.sums_are_there, 1);
}

// To those who wait for it, and to nobody who may have ended.
__device__ __forceinline__ void say_read(Shared& shared, const Work& work, int step) {
  if (threadIdx.x % 128 != 0) return;
  if (step + WEIGHT_SLOTS < kSteps) arrive_at(&shared.weights_are_read[step % WEIGHT_SLOTS], work.slice);
  if (step + TOKEN_SLOTS < kSteps) arrive_at(&shared.tokens_are_read[step % TOKEN_SLOTS], work.slice);
}

template <int kFrom, int kTo>
__device__ __forceinline__ void multiply_steps(float (&acc)[TOKENS / 2], Shared& shared, const Work& work) {
  const uint32 own_rows = (int)threadIdx.x / 128 * (64 * 128);
  keep_in_order(acc);
  for (int step = kFrom; step < kTo; ++step) {
    const int weight_slot = step % WEIGHT_SLOTS, token_slot = step % TOKEN_SLOTS;
    wait_for_bytes(&shared.weights_are_there[weight_slot], step / WEIGHT_SLOTS % 2);
    wait_for_bytes(&shared.tokens_are_there[token_slot], step / TOKEN_SLOTS % 2);
    const uint32 weights = shared_address(shared.weights(weight_slot)) + own_rows;
    const uint32 tokens = shared_address(shared.tokens(token_slot));
    begin_products();
#pragma unroll
    for (int k = 0; k < kBoxes * 4; ++k)
      multiply_tiles(acc, weights + k / 4 * kWeightBox + k % 4 * 32, tokens + k / 4 * kTokenBox + k % 4 * 32);
    end_products();
    wait_for_all_but_last();
    if (step > kFrom) say_read(shared, work, step - 1);
  }
  wait_for_products(acc);
  if (kFrom < kTo) say_read(shared, work, kTo - 1);
}

// The sums of a thread to where they are finished, or to where they are sent from.
__device__ __forceinline__ void put_sums(const float (&acc)[TOKENS / 2], Shared& shared, const Work& work) {
  const int lane = threadIdx.x % 32;
  const bool is_odd = lane % 2;
  const int row = (int)threadIdx.x / 32 * 16 + is_odd * 8 + lane / 4;
  const int place = place_of(row / ROWS, row % ROWS);
#pragma unroll
  for (int j = 0; j < TOKENS / 8; ++j) {
    // A pair of threads has two rows of two tokens each: now one has four of a row, the other four of the other.
    const float* const d = acc + j * 4;
    const float y = __shfl_xor_sync(0xffffffffu, is_odd ? d[0] : d[2], 1);
    const float z = __shfl_xor_sync(0xffffffffu, is_odd ? d[1] : d[3], 1);
    const float4 four = is_odd ? make_float4(y, z, d[2], d[3]) : make_float4(d[0], d[1], y, z);
    const int token = j * 8 + lane % 4 / 2 * 4, owner = token / kOwned;
    const int to = place * kStride + token % kOwned;
    if (!kSendsFromRegisters || owner == work.slice) {
      *(float4*)(shared.sums_for(owner) + to) = four;
    } else if (token < work.tokens_here) {
      send_four(shared.sums_from(work.slice, owner) + to, owner, four, &shared.sums_are_there);
    }
  }
  if (SLICES > 1 && !kSendsFromRegisters) show_to_copies();
}

// By one thread: what comes from the other slices, and what goes to them.
__device__ __forceinline__ void exchange_sums(Shared& shared, const Work& work) {
  const int each = kSendsFromRegisters ? kMatrixRows * ((work.own_tokens + 3) / 4) * 16 : kPart * 4;
  if (work.own_tokens > 0) expect_bytes(&shared.sums_are_there, (SLICES - 1) * each);
  for (int s = 0; s < SLICES && !kSendsFromRegisters; ++s) {
    if (s != work.slice && s * kOwned < work.tokens_here)
      copy_to_program(s, shared.sums_from(work.slice, s), shared.sums_for(s), kPart * 4,
                      &shared.sums_are_there);
  }
}

#if ADAPTED && TOKENS <= 32 && ROWS * (GATED + 1) >= 256
#define LIMITED __maxnreg__(72)  // CTAs of shrink.cu should fit beside these
#else
#define LIMITED __launch_bounds__(kThreads)
#endif

extern "C" __global__ void LIMITED
    multiply(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
             const Element* __restrict__ bias, const float* squares, const Element* __restrict__ norm_weight, Out* out,
             Element* scaled, float* new_squares,
#if ADAPTED
             const float* left, const Element* b, const int* ranks, const int* slots, const int* blocks, int num_blocks,
             int room, int width, int second, int third,
#endif
             int num_tokens, int out_features, float eps) {
  Shared& shared = *(Shared*)memory_of_tiles();
  const Work work(num_tokens);
  const Fetcher fetch{shared, work, weight, x, out_features};
  const bool is_multiplying = threadIdx.x < kMultiplying, is_fetching = threadIdx.x == kMultiplying;

  if (!ADAPTED) allow_next_kernel();
  if (is_fetching) {
    fetch_map(weight);
    fetch_map(x);
    make_counts(shared);
    for (int step = 0; step < min(WEIGHT_SLOTS, kSteps); ++step) fetch.weights(step);
  }
  __syncwarp();
  Residual residual;
  if (ADDED) residual.ask_weight(norm_weight, work);
#if ADAPTED
  const LowRank low_rank{left, b, ranks, slots, {blocks, num_blocks}, out_features * kHalves, width, room, second, third};
  const bool may_adapt = is_multiplying && work.slice == 0;
  const int row_of_warp = (int)threadIdx.x / 32 * 16;
  const int matrix_row = row_of_warp / ROWS * out_features + work.first_row + row_of_warp % ROWS;
  SlotWeights of_slots;
  if (may_adapt) of_slots.ask(low_rank, 0, matrix_row + (int)threadIdx.x % 32 / 4, 0);
#endif
  if (SLICES > 1) {
    arrive_at_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
#if ADAPTED
  if (is_fetching) {
    wait_until_ready(low_rank.blocks.ready());
    allow_next_kernel();  // which may say that its own tokens are not
  }
#else
  wait_for_previous();
#endif

  float acc[TOKENS / 2] = {};
  Squares of_tokens;
  if (is_multiplying) {
#if ADAPTED
    multiply_steps<0, kStepsBefore>(acc, shared, work);
    wait_for_previous();
    if (may_adapt && of_slots.slots[0] >= 0)
      add_low_rank(acc, of_slots, low_rank, matrix_row, work.first_token, work.tokens_here);
#endif
    if (SCALED) of_tokens.ask(squares, num_tokens, work);
    multiply_steps<kStepsBefore, kSteps>(acc, shared, work);
  } else {
    if (is_fetching) fetch.all_others();
    __syncwarp();
    if (ADAPTED) wait_for_previous();
  }
  if (ADDED) residual.ask(out, out_features, work);
  if (SCALED && is_multiplying) of_tokens.add_up(shared);
  __syncthreads();  // no tile is needed any more
  if (is_multiplying) {
    put_sums(acc, shared, work);
  } else if (SCALED) {
    make_factors(shared, eps);
  }
  __syncthreads();

  if (SLICES > 1) {
    if (is_fetching) exchange_sums(shared, work);
    __syncwarp();
    if (work.own_tokens > 0) wait_for_bytes(&shared.sums_are_there, false);
    if (!kSendsFromRegisters) arrive_at_cluster();
  }
  finish(shared, work, residual, {out, scaled, new_squares, bias, num_tokens, out_features});
  if (SLICES > 1 && !kSendsFromRegisters) wait_for_cluster();  // the copies of this CTA's memory have arrived
}
