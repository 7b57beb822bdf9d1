// A matrix times one token's row, the matrix in registers before the row is known.
//
// A warp owns ROWS rows of the matrix (of a gated one: ROWS of each half) with all their columns, which it fetches
// before it waits for the previous kernel. Then the row of x, and every warp works by itself to the end: nothing
// goes through shared memory, and nobody waits for another warp.
//
//     columns      piece s of lane l: the 8 from (s * 32 + l) * 8 on
//
// NORM: x is to be normalised. The norm's weight is applied to x; its factor, one number, to the results. GATED:
// silu(first half) * second half. Sums are float32 and rounded once.
#include "deltas.cuh"
#include "linear_layer.cuh"

constexpr int kPieces = IN / 256;  // of 8 columns, of a row, of a thread
constexpr int kRows = ROWS * (GATED + 1);

static_assert(IN % 256 == 0, "a warp takes 256 columns at a time");

__device__ __forceinline__ float one(const Element* p) { return low(*p); }

struct Eight {
  float v[8];

  __device__ __forceinline__ explicit Eight(const Word4& w)
      : v{low(w.x), high(w.x), low(w.y), high(w.y), low(w.z), high(w.z), low(w.w), high(w.w)} {}
};

__device__ __forceinline__ float add_product(float sum, const Eight& a, const Eight& b) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(a.v[i], b.v[i], sum);
  return sum;
}

extern "C" __global__ void __maxnreg__(REGISTERS)
    project(const Element* __restrict__ weight, const Element* __restrict__ norm_weight,
            const Element* __restrict__ bias, const Element* x, const Element* residual, Out* out, const float* deltas,
            const int* slots, int out_features, float eps) {
  const int lane = threadIdx.x % 32;
  const int first_row = (int)(blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;

  allow_next_kernel();
  Word4 rows[kRows][kPieces];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int place = first_row + (r < ROWS ? r : out_features + r - ROWS);
    const Element* from = weight + (long long)place * IN + lane * 8;
#pragma unroll
    for (int s = 0; s < kPieces; ++s) rows[r][s] = load_weight_now(from + s * 256);
  }
  Word4 norm[NORM ? kPieces : 1];
  if (NORM) {
#pragma unroll
    for (int s = 0; s < kPieces; ++s) norm[s] = load_weight_now(norm_weight + s * 256 + lane * 8);
  }
  wait_for_previous();

  Word4 tokens[kPieces];
#pragma unroll
  for (int s = 0; s < kPieces; ++s) tokens[s] = load_four_words(x + s * 256 + lane * 8);
  const bool finishes = lane < ROWS;
  const float old = RESIDUAL && finishes ? one(residual + first_row + lane) : 0.f;

  const Deltas added{deltas, slots, out_features * (GATED + 1)};
  const float delta = ADAPTED && finishes ? added.one(0, first_row + lane) : 0.f;
  const float second_delta = ADAPTED && GATED && finishes ? added.one(0, out_features + first_row + lane) : 0.f;

  float sums[kRows + 1] = {};  // the last one: of x's squares
#pragma unroll
  for (int s = 0; s < kPieces; ++s) {
    Eight v(tokens[s]);
    if (NORM) {
      sums[kRows] = add_product(sums[kRows], v, v);
      const Eight by(norm[s]);
#pragma unroll
      for (int i = 0; i < 8; ++i) v.v[i] *= by.v[i];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = add_product(sums[r], Eight(rows[r][s]), v);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
#pragma unroll
    for (int r = 0; r < kRows + NORM; ++r) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], by);
  }

  // Lane l has the sums of row l, and of its other half.
  float y = 0.f, second = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (lane == r) {
      y = sums[r];
      if (GATED) second = sums[ROWS + r];
    }
  }
  if (!finishes) return;
  const int row = first_row + lane;
  const float factor = NORM ? rsqrtf(sums[kRows] / IN + eps) : 1.f;
  if (ADAPTED) y += delta;
  y *= factor;
  if (BIAS) y += one(bias + row);
  if (GATED) {
    if (ADAPTED) second += second_delta;
    second *= factor;
    if (BIAS) second += one(bias + out_features + row);
    y = gate(y, second);
  }
  out[row] = as_out(y + old);
}
