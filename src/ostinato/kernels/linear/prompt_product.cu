// Persistent warp-specialised GEMM for thousands of tokens: one TMA producer, two wgmma consumer warp groups,
// clusters of 2.
//
//     producer           one thread: TMA copies of 64 columns: 128 tokens, 256 rows of the matrix
//     two warp groups    wgmma:      [64 tokens, 64 columns] x [64 columns, 256 rows]  ->  sums [64 tokens, 256 rows]
//     epilogue           each warp rounds its 16 tokens' sums, 64 rows at a time, and stores them by TMA
//
// One CTA per SM takes tile after tile; the next tile's operands are copied during the epilogue of the last one. The
// two CTAs of a cluster have the same rows of the matrix: each copies half of them, to both (multicast).
//
// The second warp group stays kLead steps behind the first, so that one multiplies during the other's epilogue.
//
// GATED: 128 rows of each half of the matrix, so that a thread has gate and up of the same result, which is silu(gate)
// * up, rounded where separate kernels would round. ADDED: results are added to what is there. Sums are float32.
#include "prompt_product_layout.cuh"

constexpr int kLeadMeeting = 1;

// Asks for tiles: one thread.
struct Fetcher {
  Shared& shared;
  const TensorMap &weight, &x;
  int half_of_matrix;  // rows
  int rank;
  Place place;

  __device__ __forceinline__ void expect() { expect_bytes(&shared.are_there[place.at], kTokenBytes + kWeightBytes); }

  // Its share of the matrix, of a gated one a half, to both; the other CTA sends the rest.
  __device__ __forceinline__ void weights(int column, int step) {
    const int row = column + rank * (GATED ? half_of_matrix : kShare);
    char* const to = shared.weights[place.at] + rank * (kShare * 128);
    copy_box_to_all(to, weight, step * 64, row, &shared.are_there[place.at], (1 << kCluster) - 1);
  }

  __device__ __forceinline__ void tokens(int token, int step) {
    copy_box(shared.tokens[place.at], x, step * 64, token + rank * kTokens, &shared.are_there[place.at]);
  }

  __device__ __forceinline__ void all(const Tiles& tiles, int steps) {
    const int clusters = gridDim.x / kCluster;
    int number = blockIdx.x / kCluster, token, column;
    tiles.at(number, token, column);
    const int first_steps = min(kStages, steps);
    for (int step = 0; step < first_steps; ++step) {  // of weights, which are there before the previous kernel ends
      expect();
      weights(column, step);
      place.advance();
    }
    wait_for_previous();
    place = Place{};
    for (int step = 0; step < first_steps; ++step) {
      tokens(token, step);
      place.advance();
    }
    int step = first_steps;
    for (;;) {
      for (; step < steps; ++step) {
        wait_for_bytes_or_fail(&shared.are_read[place.at], !place.odd);
        expect();
        weights(column, step);
        tokens(token, step);
        place.advance();
      }
      number += clusters;
      if (number >= tiles.count()) return;
      tiles.at(number, token, column);
      step = 0;
    }
  }
};

// Two neighbours of the results of a token.
__device__ __forceinline__ uint32 gated(uint32 gate, uint32 up) {
  constexpr float kMinusLog2E = -1.44269502f;
  auto silu = [](float x) { return divided(x, 1.f + exp2_of(x * kMinusLog2E)); };
  const uint32 by = rounded(silu(low(gate)), silu(high(gate)));
  return rounded(low(by) * low(up), high(by) * high(up));
}

struct Team {
  Shared& shared;
  int team;  // its number, the same in all threads of a warp as far as the compiler knows
  Place place;
  float sums[kRows / 2];

  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }

  // To all CTAs of the cluster, for all send to this one's places.
  __device__ __forceinline__ void say_read(int at) const {
    if (threadIdx.x % 128 < kCluster) arrive_at(&shared.are_read[at], threadIdx.x % 128);
  }

  __device__ __forceinline__ void multiply(int steps, bool shows_lead) {
    int before = 0;
    keep_in_order(sums);
    for (int step = 0; step < steps; ++step) {
      if (shows_lead && step == kLead) come_to_meeting(kLeadMeeting, kMultiplying);
      wait_for_bytes_or_fail(&shared.are_there[place.at], place.odd);
      const uint32 tokens = shared_address(shared.tokens[place.at]) + team * (64 * 128);
      const uint32 weights = shared_address(shared.weights[place.at]);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_large_tiles(sums, tokens + k * 32, weights + k * 32, step > 0 || k > 0);
      end_products();
      wait_for_all_but_last();
      if (step > 0) say_read(before);
      before = place.at;
      place.advance();
    }
    wait_for_products(sums);
    say_read(before);
  }

  // What bias adds to the n-th eight columns of a thread's sums.
  __device__ __forceinline__ uint32 bias_of(const Element* bias, int column, int width, int n) const {
    const int half = GATED ? n / (kResults / 8) : 0;
    const int at = column + (n - half * (kResults / 8)) * 8 + lane() % 4 * 2;
    return load_word(bias + half * width + min(at, width - 2));
  }

  // Two neighbours of the n-th eight columns, of the thread's first token or its second.
  __device__ __forceinline__ uint32 two(int n, int second, uint32 by_bias) const {
    const float* const d = sums + n * 4 + second * 2;
    return BIAS ? rounded(d[0] + low(by_bias), d[1] + high(by_bias)) : rounded(d[0], d[1]);
  }

  __device__ __forceinline__ void send(const TensorMap& out, const Element* bias, int token, int column, int width) {
    constexpr int kBlocks = kResults / 64;
    const int first_token = token + warp() * 16;
    const int row = lane() % 16, place_in_row = lane() / 16;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      char* const to = shared.results[warp()][block % 2];
      if (lane() == 0) wait_for_stores_to_read<1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int n = block * 8 + i + j, up = n + kResults / 8;
          const uint32 by_bias = BIAS ? bias_of(bias, column, width, n) : 0;
          const uint32 up_bias = BIAS && GATED ? bias_of(bias, column, width, up) : 0;
#pragma unroll
          for (int second = 0; second < 2; ++second) {
            const uint32 y = two(n, second, by_bias);
            words[j * 2 + second] = GATED ? gated(y, two(GATED ? up : n, second, up_bias)) : y;
          }
        }
        store_blocks(shared_address(to) + row * 128 + ((i + place_in_row) ^ row % 8) * 16, words);
      }
      show_to_copies();
      __syncwarp();
      if (lane() == 0) {
        if (ADDED) add_box(out, column + block * 64, first_token, to);
        else store_box(out, column + block * 64, first_token, to);
        end_store_group();
      }
    }
  }

  __device__ __forceinline__ void all(const Tiles& tiles, const TensorMap& out, const Element* bias, int steps,
                                      int width) {
    const int rank = cluster_rank(), first = blockIdx.x / kCluster;
    const bool leads = steps > kLead;
    if (leads && team == 1) wait_at_meeting(kLeadMeeting, kMultiplying);
    for (int number = first; number < tiles.count(); number += gridDim.x / kCluster) {
      multiply(steps, leads && team == 0 && number == first);
      int token, column;
      tiles.at(number, token, column);
      send(out, bias, token + rank * kTokens, column, width);
    }
    if (lane() == 0) wait_for_stores_to_read<0>();
    __syncwarp();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    multiply(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
             const __grid_constant__ TensorMap out, const Element* __restrict__ bias, int num_tokens, int in_features,
             int width, int together) {
  Shared& shared = *(Shared*)memory_of_tiles();
  const Tiles tiles{(num_tokens + kCluster * kTokens - 1) / (kCluster * kTokens), (width + kResults - 1) / kResults,
                    together};
  const int steps = (in_features + 63) / 64;
  const bool is_fetching = threadIdx.x == kMultiplying;

  allow_next_kernel();
  if (is_fetching) {
    fetch_map(weight);
    fetch_map(x);
    fetch_map(out);
    for (int i = 0; i < kStages; ++i) {
      make_count_of(&shared.are_there[i], 1);
      make_count_of(&shared.are_read[i], kTeams * kCluster);
    }
  }
  __syncwarp();
  arrive_at_cluster();
  wait_for_cluster();
  // Only what others give up can be taken: for more, the warp groups would wait without end.
  static_assert(kTeams * 240 + 24 <= 65536 / kThreads / 8 * 8 * (kTeams + 1), "registers that the launch brings");
  if (threadIdx.x < kMultiplying) {
    take_registers<240>();
    wait_for_previous();
    Team{shared, __shfl_sync(kAll, (int)threadIdx.x / 128, 0)}.all(tiles, out, bias, steps, width);
  } else {
    give_up_registers<24>();
    if (is_fetching) Fetcher{shared, weight, x, width, (int)cluster_rank()}.all(tiles, steps);
    __syncwarp();
  }
  arrive_at_cluster();  // the other may still send to this one, or say what it has read
  wait_for_cluster();
}
