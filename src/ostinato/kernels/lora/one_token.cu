// LoRA for one token: b * (a * x), both matrices in registers before x is known.
//
// CTAs come in clusters of 8. The CTAs of a cluster share the columns of a: each multiplies its share of x with
// all ranks, and sends the sums to all of the cluster, so that each has what is left of x. Then a thread has rows of b,
// of which no other CTA has any.
//
//     columns of a     piece s of lane l of CTA c: the 8 from ((s * 8 + c) * 32 + l) * 8 on
//     ranks            warp w has w, w + WARPS, ...
//     rows of b        those of a CTA lie beside each other, one to a thread at a time
//
// NORM: x is multiplied with the norm's weight; its factor is applied to the product and to this alike, by who adds
// them. Nothing is written for a token without an adapter.
#include "adapter_rows.cuh"
#include "linear_layer.cuh"

constexpr int kCluster = 8, kThreads = WARPS * 32;
constexpr int kPieces = (IN + kCluster * 256 - 1) / (kCluster * 256);
constexpr int kRanksOfWarp = WIDTH / WARPS;
constexpr int kHeldRanks = kRanksOfWarp < HELD ? kRanksOfWarp : HELD;  // those before the wait
constexpr int kRows = (OUT + PROGRAMS - 1) / PROGRAMS;                // of a CTA
constexpr int kRowsOfThread = (kRows + kThreads - 1) / kThreads;

static_assert(IN % 8 == 0, "8 columns are loaded at a time");
static_assert(WIDTH % 16 == 0 && ROOM % 16 == 0 && WIDTH % WARPS == 0, "a slot has room for 16 ranks at a time");
static_assert(PROGRAMS % kCluster == 0, "whole clusters");

struct Shared {
  float from_cluster[kCluster][WIDTH];
  float left[WIDTH];
  ByteCount arrived;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");

struct Eight {
  float v[8];

  __device__ __forceinline__ explicit Eight(const Word4& w)
      : v{low(w.x), high(w.x), low(w.y), high(w.y), low(w.z), high(w.z), low(w.w), high(w.w)} {}
};

__device__ __forceinline__ float add_product(float sum, const Word4& a, const Word4& b) {
  const Eight x(a), y(b);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x.v[i], y.v[i], sum);
  return sum;
}

__device__ __forceinline__ float add_product(float sum, const Word4& a, const float* b) {
  const Eight x(a);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x.v[i], b[i], sum);
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_one(const Element* a, const Element* b, const Element* norm_weight, const Element* x, const int* ranks,
            const int* slots, float* deltas, int second, int third) {
  Shared& shared = *(Shared*)dynamic_shared();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int place = (int)cluster_rank();
  const int first_column = (place * 32 + lane) * 8;
  const int first_row = (int)blockIdx.x * kRows, end_row = min(first_row + kRows, OUT);

  allow_next_kernel();
  if (threadIdx.x == 0) make_count(&shared.arrived);
  arrive_at_cluster();
  const int slot = load_kept(slots);
  const int rank = slot >= 0 && ROOM > 16 ? load_kept(ranks + slot) : 16;
  auto has_rank = [&](int r) { return r % ROOM < 16 || r % ROOM / 16 * 16 < rank; };  // a multiple of 16 of them
  auto has_piece = [&](int s) { return IN % (kCluster * 256) == 0 || s * kCluster * 256 + first_column < IN; };
  auto ask = [&](Word4 (&into)[kPieces], const Element* row) {
#pragma unroll
    for (int s = 0; s < kPieces; ++s) {
      into[s] = Word4{0, 0, 0, 0};
      if (has_piece(s)) into[s] = load_weight_now(row + first_column + s * kCluster * 256);
    }
  };
  const Element* const a_of_slot = a + (long long)max(slot, 0) * WIDTH * IN;
  const Element* const b_of_slot = b + (long long)max(slot, 0) * OUT * ROOM;
  Word4 held[kHeldRanks][kPieces], norm[NORM ? kPieces : 1], rows[kRowsOfThread][2];
  if (slot >= 0) {
#pragma unroll
    for (int i = 0; i < kHeldRanks; ++i) {
      if (has_rank(warp + i * WARPS)) ask(held[i], a_of_slot + (long long)(warp + i * WARPS) * IN);
    }
    if (NORM) ask(*(Word4(*)[kPieces])norm, norm_weight);
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = first_row + (int)threadIdx.x + i * kThreads;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (row < end_row) rows[i][half] = load_weight_now(b_of_slot + (long long)row * ROOM + half * 8);
    }
  }
  wait_for_cluster();
  wait_for_previous();
  if (slot < 0) return;

  Word4 v[kPieces];
#pragma unroll
  for (int s = 0; s < kPieces; ++s) {
    v[s] = Word4{0, 0, 0, 0};
    if (has_piece(s)) v[s] = load_four_words(x + first_column + s * kCluster * 256);
  }
  if (NORM) {
#pragma unroll
    for (int s = 0; s < kPieces; ++s) scale(v[s], norm[s]);
  }
  if (threadIdx.x == 0) {
    int num_ranks = 0;
    for (int r = 0; r < WIDTH; r += 16) num_ranks += has_rank(r) ? 16 : 0;
    expect_bytes(&shared.arrived, kCluster * num_ranks * 4);
  }
#pragma unroll
  for (int i = 0; i < kRanksOfWarp; ++i) {
    const int r = warp + i * WARPS;
    if (!has_rank(r)) continue;
    if (i >= kHeldRanks) ask(held[0], a_of_slot + (long long)r * IN);
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < kPieces; ++s) sum = add_product(sum, held[i < kHeldRanks ? i : 0][s], v[s]);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (lane < kCluster) send(&shared.from_cluster[place][r], lane, sum, &shared.arrived);
  }
  wait_for_bytes(&shared.arrived, false);
  for (int r = threadIdx.x; r < WIDTH; r += kThreads) {
    if (!has_rank(r)) continue;
    float sum = shared.from_cluster[0][r];
#pragma unroll
    for (int c = 1; c < kCluster; ++c) sum += shared.from_cluster[c][r];
    shared.left[r] = sum;
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int row = first_row + (int)threadIdx.x + i * kThreads;
    if (row >= end_row) break;
    const float* left = shared.left + ((row >= second) + (row >= third)) * ROOM;
    float sum = add_product(add_product(0.f, rows[i][0], left), rows[i][1], left + 8);
    for (int r = 16; r < rank; r += 8)
      sum = add_product(sum, load_weight_now(b_of_slot + (long long)row * ROOM + r), left + r);
    deltas[row] = sum;
  }
}
