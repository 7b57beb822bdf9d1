// Attention of prompts and mixed batches over paged keys and values, which are stored already: persistent,
// warp-specialised, two wgmma warp groups in ping-pong.
//
// A tile has 128 rows: queries of one request times the heads that share a KV head. One CTA per SM draws tiles from a
// list that each works out from the lengths of the requests, so a grid that only fills the GPU serves any mixture.
//
//     producer warp        TMA copies of blocks of keys and of values, page by page, into a ring
//     three warps          bring the queries of the next tile
//     two warp groups      64 rows each:   scores = queries x keys of block b + 1
//                                          sums  += weights x values of block b
//                          softmax weights of the scores during wgmma: the own sums, and the other group's products
//
// The warp groups take turns in issuing wgmma: while one computes softmax weights, the other one's products run.
//
// Where blocks begin follows from the position of a key alone, and a block that a query sees nothing of changes
// nothing: a query's bits depend neither on its company nor on how its prompt was cut into steps.
#include "prompt_units.cuh"

constexpr int kTeamsMeet = 1, kTurns = 1 + kTeams;  // numbers of meetings: of a warp group, and its turn to multiply

// As a score: is not seen.
__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }

// By all threads of a warp.
__device__ __forceinline__ Unit next_unit(Shared& shared, Place<2>& in_ring) {
  wait_for_bytes(&shared.unit_is_there[in_ring.at], in_ring.odd);
  const Unit unit = shared.units[in_ring.at];
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive_here(&shared.unit_is_read[in_ring.at]);
  in_ring.advance();
  return unit;
}

// ---- the warp that asks for keys and values ----

// Keys are asked for before the values of the block before them: they are needed, and their places are free, sooner.
struct Fetcher {
  Shared& shared;
  const TensorMap &keys, &values;            // in boxes of a page
  const TensorMap &many_keys, &many_values;  // of as many pages as a block has
  Place<STAGES> key_place, value_place;
  int box, group, pages;  // of the values that are still to be asked for; 0 pages: none

  // Pages that lie behind the last key are not asked for. Where those of a block lie one behind the other, as they
  // mostly do in a cache that is not full, they come together: that is one more than all of them here.
  __device__ __forceinline__ void block(const Unit& unit, int block, int page) {
    const int lane = threadIdx.x % 32;
    int number = min(kPages, (unit.end - block * KEYS + 15) / 16);
    const bool is_apart = page != __shfl_sync(kAll, page, 0) + lane % kPages;
    if (number == kPages && __ballot_sync(kAll, is_apart) == 0) number = kPages + 1;
    wait_for_bytes(&shared.keys_are_read[key_place.at], !key_place.odd);
    copy(unit.kv_head * kBoxes, page * 2, number, shared.keys[key_place.at], number > kPages ? many_keys : keys,
         &shared.keys_are_there[key_place.at]);
    key_place.advance();
    values_of_last();
    box = unit.kv_head * kBoxes;
    group = page * 2;
    pages = number;
  }

  __device__ __forceinline__ void values_of_last() {
    if (pages == 0) return;
    wait_for_bytes(&shared.values_are_read[value_place.at], !value_place.odd);
    copy(box, group, pages, shared.values[value_place.at], pages > kPages ? many_values : values,
         &shared.values_are_there[value_place.at]);
    value_place.advance();
    pages = 0;
  }

  __device__ __forceinline__ void copy(int box, int group, int pages, char* to, const TensorMap& map,
                                       ByteCount* count) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) expect_bytes(count, min(pages, kPages) * kPageBytes);
    __syncwarp();
    if (lane < (pages > kPages ? 1 : pages)) copy_boxes(to + lane * kPageBytes, map, box, group, count);
  }
};

__device__ __forceinline__ void fetch_all(Shared& shared, const Units& units, Fetcher fetch, const int* page_table,
                                          int page_table_stride, int* counter) {
  const int lane = threadIdx.x % 32;
  const bool draws = units.count > (int)gridDim.x;
  Place<2> in_ring;
  int number = blockIdx.x;
  for (int n = 0;; ++n) {
    const Unit unit = units.at(number);
    wait_for_bytes(&shared.unit_is_read[in_ring.at], !in_ring.odd);
    if (lane == 0) {
      shared.units[in_ring.at] = unit;
      arrive_here(&shared.unit_is_there[in_ring.at]);
    }
    in_ring.advance();
    if (unit.end == 0) {
      fetch.values_of_last();
      if (n == 0) wait_for_previous();  // the next kernel waits for this one only
      return;
    }
    const int* const pages = page_table + (long long)unit.table_row * page_table_stride;
    const int last = (unit.end - 1) / 16;
    int at = unit.first_block * kPages + lane % kPages;  // the page that is this lane's in a block
    int page = at <= last ? __ldg(pages + at) : 0;
    if (n == 0) wait_for_previous();
    int ticket = 0;
    if (draws && lane == 0) ticket = atomicAdd(counter, 1);
    for (int block = unit.first_block; block < unit.end_block; ++block) {
      const int this_page = page;
      at += kPages;
      if (at <= last) page = __ldg(pages + at);  // of the next block, before it is needed
      fetch.block(unit, block, this_page);
    }
    if (!draws) {
      number = units.count;
    } else {
      // Every tile is drawn for once, so the last draw of all is known.
      if (lane == 0 && ticket == units.count - 1) *counter = 0;
      number = (int)gridDim.x + __shfl_sync(kAll, ticket, 0);
    }
  }
}

// ---- the warps that bring queries ----

__device__ __forceinline__ void bring_all(Shared& shared, const Element* q, long long token_stride) {
  constexpr int kPieces = HEAD_DIM / 8;
  const int thread = (int)threadIdx.x - (kThreads - kBringing);
  Place<2> in_ring;
  Place<1> place;
  for (;;) {
    const Unit unit = next_unit(shared, in_ring);
    if (unit.end == 0) return;
    wait_for_bytes(&shared.queries_are_read, !place.odd);
    for (int at = thread; at < kRows * kPieces; at += kBringing) {
      const int row = at / kPieces, number = at % kPieces;
      const bool is_there = is_query(unit, row);
      const Element* const head = is_there ? q + token_of(unit, row) * token_stride + head_of(unit, row) * HEAD_DIM : q;
      copy_piece_if(shared_address(shared.piece(row, number)), head + number * 8, is_there);
    }
    wait_for_copies();
    show_to_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_here(&shared.queries_are_there);
    place.advance();
  }
}

// ---- a warp group ----

struct Team {
  Shared& shared;
  int team;  // its number, the same in all threads of a warp as far as the compiler knows
  Place<1> query_place;
  Place<STAGES> key_place, value_place;
  float sums[HEAD_DIM / 2], scores[KEYS / 2];
  uint32 weights[KEYS / 4];
  uint32 queries[kHolds ? HEAD_DIM / 4 : 1];
  float most[2], total[2];  // of the thread's two rows; of the total, the thread's own columns

  __device__ __forceinline__ int thread() const { return threadIdx.x % 128; }
  __device__ __forceinline__ int first_row() const { return team * 64; }
  __device__ __forceinline__ void meet() const { wait_at_meeting(kTeamsMeet + team, 128); }

  // A thread's rows are this one and that 8 further on.
  __device__ __forceinline__ int own_row() const { return first_row() + thread() / 32 * 16 + thread() % 32 / 4; }

  __device__ __forceinline__ void ask_scores() {
    wait_for_bytes(&shared.keys_are_there[key_place.at], key_place.odd);
    const uint32 keys = shared_address(shared.keys[key_place.at]);
    begin_products();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) multiply_columns_of_keys(k, keys + k / 4 * kKeyBox + k % 4 * 32);
    end_products();
  }

  __device__ __forceinline__ void multiply_columns_of_keys(int k, uint32 columns) {
    if constexpr (kHolds) {
      if (k == 0) multiply_held_anew(scores, queries, columns, kKeyGroup);
      else multiply_held(scores, queries + k * 4, columns, kKeyGroup);
    } else {
      const uint32 rows = shared_address(shared.queries) + first_row() * 128 + k / 4 * kQueryBox + k % 4 * 32;
      if (k == 0) multiply_tiles_anew(scores, rows, columns, kKeyGroup);
      else multiply_tiles(scores, rows, columns, kKeyGroup);
    }
  }

  // Of the next tile. Those that are held make room for the ones behind them at once.
  __device__ __forceinline__ void take_queries() {
    wait_for_bytes(&shared.queries_are_there, query_place.odd);
    query_place.advance();
    if constexpr (kHolds) {
      const int lane = thread() % 32, row = first_row() + thread() / 32 * 16 + lane % 16;
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k)
        load_blocks(*(uint32(*)[4])(queries + k * 4), shared_address(shared.piece(row, k * 2 + lane / 16)));
      say_queries_are_read();
    }
  }

  __device__ __forceinline__ void say_queries_are_read() {
    meet();
    if (thread() == 0) arrive_here(&shared.queries_are_read);
  }

  __device__ __forceinline__ void say_keys_are_read() {
    if (thread() == 0) arrive_here(&shared.keys_are_read[key_place.at]);
    key_place.advance();
  }

  __device__ __forceinline__ void ask_sums() {
    wait_for_bytes(&shared.values_are_there[value_place.at], value_place.odd);
    const uint32 values = shared_address(shared.values[value_place.at]);
    begin_products();
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) multiply_rows_of_values(k, values + k * kPageBytes);
    end_products();
  }

  __device__ __forceinline__ void multiply_rows_of_values(int k, uint32 rows) {
    constexpr int kAtOnce = HEAD_DIM < 128 ? 64 : 128;
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += kAtOnce)
      multiply_columns(*(float(*)[kAtOnce / 2])(sums + column / 2), weights + k * 4, rows + column / 64 * kKeyBox,
                       kKeyGroup, kKeyBox);
  }

  __device__ __forceinline__ void say_values_are_read() {
    if (thread() == 0) arrive_here(&shared.values_are_read[value_place.at]);
    value_place.advance();
  }

  // Values behind the last key are whatever was there; not even a weight of zero would remove a NaN.
  __device__ __forceinline__ void clear_values_behind(int end_in_block) {
    wait_for_bytes(&shared.values_are_there[value_place.at], value_place.odd);
    for (int at = end_in_block * 8 + thread(); at < KEYS * 8; at += 128) {
      char* const row = shared.values[value_place.at] + at / 64 * kKeyGroup + at % 64 * 16;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) *(Word4*)(row + box * kKeyBox) = Word4{0, 0, 0, 0};
    }
    show_to_copies();
    meet();
  }

  __device__ __forceinline__ void hide(const Unit& unit, int block, int window) {
    const int row = own_row(), first_key = block * KEYS + thread() % 4 * 2;
    const int last[2] = {unit.position + row / GROUP, unit.position + (row + 8) / GROUP};
    const int before = window > 0 ? window : 1 << 30;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      const int key = first_key + i / 4 * 8 + i % 2, half = i / 2 % 2;
      const bool is_seen = key <= last[half] && key > last[half] - before;
      scores[i] = is_seen ? scores[i] : nothing();
    }
  }

  // Whether a query of this warp group may not see all of a block.
  __device__ __forceinline__ bool hides(const Unit& unit, int block, int window) const {
    const int first = unit.position + first_row() / GROUP, last = unit.position + (first_row() + 63) / GROUP;
    return (block + 1) * KEYS - 1 > first || (window > 0 && block * KEYS <= last - window);
  }

  // Scores to weights, which stay in their place; by what the sums so far shrink. This is compiled several times: with
  // roundings that are said, all of them give the same bits.
  __device__ __forceinline__ void weigh(float scale, float (&factor)[2]) {
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = most[half];
#pragma unroll
      for (int i = 0; i < KEYS / 8; ++i) now = fmaxf(now, fmaxf(scores[i * 4 + half * 2], scores[i * 4 + half * 2 + 1]));
      now = fmaxf(now, __shfl_xor_sync(kAll, now, 1));
      now = fmaxf(now, __shfl_xor_sync(kAll, now, 2));
      base[half] = now == nothing() ? 0.f : __fmul_rn(now, scale);
      factor[half] = exp2_of(__fmul_rn(most[half], scale) - base[half]);  // exactly 1 where nothing has changed
      most[half] = now;
      total[half] = __fmul_rn(total[half], factor[half]);
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      const int half = i / 2 % 2;
      scores[i] = exp2_of(__fmaf_rn(scores[i], scale, -base[half]));
      total[half] = __fadd_rn(total[half], scores[i]);
    }
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) weights[i] = rounded(scores[i * 2], scores[i * 2 + 1]);
  }

  // Mostly there is nothing to do: the largest score so far is rarely in the last block.
  __device__ __forceinline__ void shrink_sums(const float (&factor)[2]) {
    if (!__any_sync(kAll, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = __fmul_rn(sums[i], factor[i / 2 % 2]);
  }

  // Scores of a block, and sums of the one before it. No branch while products are on their way: the compiler would
  // wait for all of them there.
  template <bool kHides>
  __device__ __forceinline__ void step(const Unit& unit, int block, float scale, int window) {
    float factor[2];
    ask_both();
    if (kHides) hide(unit, block, window);
    weigh(scale, factor);
    wait_for_products_when(total[0] + total[1], sums);
    say_values_are_read();
    shrink_sums(factor);
    round_weights();
  }

  // In turns with the other warp group. The scores are there afterwards.
  __device__ __forceinline__ void ask_both() {
    wait_at_meeting(kTurns + team, kMultiplying);
    ask_scores();
    ask_sums();
    come_to_meeting(kTurns + (team + 1) % kTeams, kMultiplying);
    wait_for_all_but_last();
    keep_in_order(scores);
    say_keys_are_read();
  }

  // The first scores of a tile, which are weighed as if something had been seen before.
  __device__ __forceinline__ void weigh_first(const Unit& unit, float scale, int window) {
    float factor[2];
    most[0] = most[1] = nothing();
    total[0] = total[1] = 0.f;
    hide(unit, unit.first_block, window);
    weigh(scale, factor);
  }

  // The first scores of a first tile.
  __device__ __forceinline__ void begin(const Unit& unit, float scale, int window) {
    take_queries();
    ask_scores();
    wait_for_products(scores);
    say_keys_are_read();
    weigh_first(unit, scale, window);
    round_weights();
    clear_sums();
  }

  // All other scores of a tile, and all sums but the last.
  __device__ __forceinline__ void go_on(const Unit& unit, float scale, int window) {
    for (int block = unit.first_block + 1; block < unit.end_block; ++block) {
      if (hides(unit, block, window)) step<true>(unit, block, scale, window);
      else step<false>(unit, block, scale, window);
    }
    if (unit.end % KEYS != 0) clear_values_behind(unit.end % KEYS);
  }

  // The last sums of a tile, and the first scores of the next one.
  __device__ __forceinline__ void change(const Unit& unit, const Unit& next, Element* out, float scale, int window) {
    if constexpr (!kHolds) {
      end(unit, out);
      begin(next, scale, window);
      return;
    }
    take_queries();
    ask_both();
    const float totals[2] = {total[0], total[1]};
    weigh_first(next, scale, window);
    wait_for_products_when(total[0] + total[1], sums);
    say_values_are_read();
    store(unit, totals, out);
    round_weights();
    clear_sums();
  }

  __device__ __forceinline__ void end(const Unit& unit, Element* out) {
    if constexpr (!kHolds) say_queries_are_read();
    ask_sums();
    wait_for_products(sums);
    say_values_are_read();
    store(unit, total, out);
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.f;
  }

  __device__ __forceinline__ void store(const Unit& unit, const float (&totals)[2], Element* out) const {
    const int lane = thread() % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = totals[half];
      all += __shfl_xor_sync(kAll, all, 1);
      all += __shfl_xor_sync(kAll, all, 2);
      const float share = all > 0.f ? 1.f / all : 0.f;  // rows that are no query's may have seen nothing
      const int row = own_row() + half * 8;
      const bool is_there = is_query(unit, row);
      Element* const to = out + (token_of(unit, row) * (long long)kHeads + head_of(unit, row)) * HEAD_DIM;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; ++i) {
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (i * 4 + j) * 4 + half * 2;
          words[j] = rounded(__fmul_rn(sums[at], share), __fmul_rn(sums[at + 1], share));
        }
        exchange(words);
        if (is_there) *(Word4*)(to + i * 32 + lane % 4 * 8) = Word4{words[0], words[1], words[2], words[3]};
      }
    }
  }

  // The j-th word of the i-th of four lanes becomes the i-th of the j-th, so that 16 bytes of a row are together.
  __device__ __forceinline__ void exchange(uint32 (&words)[4]) const {
    const bool is_odd = thread() & 1, is_high = thread() & 2;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32 other = __shfl_xor_sync(kAll, is_odd ? words[j] : words[j + 1], 1);
      words[j] = is_odd ? other : words[j];
      words[j + 1] = is_odd ? words[j + 1] : other;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32 other = __shfl_xor_sync(kAll, is_high ? words[j] : words[j + 2], 2);
      words[j] = is_high ? other : words[j];
      words[j + 2] = is_high ? words[j + 2] : other;
    }
  }
};

__device__ __forceinline__ void attend_all(Shared& shared, Element* out, float scale, int num_tokens, int window) {
  Team team{shared, __shfl_sync(kAll, (int)threadIdx.x / 128, 0)};
  if (team.team == kTeams - 1) come_to_meeting(kTurns, kMultiplying);
  Place<2> in_ring;
  Unit unit = next_unit(shared, in_ring);
  if (unit.end > 0) {
    team.begin(unit, scale, window);
    for (;;) {
      team.go_on(unit, scale, window);
      const Unit next = next_unit(shared, in_ring);
      if (next.end == 0) break;
      team.change(unit, next, out, scale, window);
      unit = next;
    }
    team.end(unit, out);
  }
  // Padded tokens get zeros.
  constexpr int kPieces = kHeads * HEAD_DIM / 8;
  for (int token = shared.num_tokens + blockIdx.x; token < num_tokens; token += gridDim.x)
    for (int i = threadIdx.x; i < kPieces; i += kMultiplying)
      *(Word4*)(out + ((long long)token * kPieces + i) * 8) = Word4{0, 0, 0, 0};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attend(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
           const __grid_constant__ TensorMap many_keys, const __grid_constant__ TensorMap many_values, const Element* q,
           Element* out, int* counter, const int* __restrict__ page_table, const int* __restrict__ req_rows,
           const int* __restrict__ seq_lens, const int* __restrict__ query_starts,
           const int* __restrict__ query_lens, float scale, int token_stride, int page_table_stride, int num_tokens,
           int num_requests, int window) {
  Shared& shared = *(Shared*)memory_of_tiles();
  const bool is_multiplying = threadIdx.x < kMultiplying, is_fetching = threadIdx.x / 32 == kMultiplying / 32;
  allow_next_kernel();
  Units units{shared, req_rows, seq_lens, query_starts, query_lens, window};
  if (is_fetching) {
    if (threadIdx.x % 32 == 0) {
      fetch_map(keys);
      fetch_map(values);
      fetch_map(many_keys);
      fetch_map(many_values);
      for (int i = 0; i < STAGES; ++i) {
        make_count_of(&shared.keys_are_there[i], 1);
        make_count_of(&shared.keys_are_read[i], kTeams);
        make_count_of(&shared.values_are_there[i], 1);
        make_count_of(&shared.values_are_read[i], kTeams);
      }
      make_count_of(&shared.queries_are_there, kBringing / 32);
      make_count_of(&shared.queries_are_read, kTeams);
      for (int i = 0; i < 2; ++i) {
        make_count_of(&shared.unit_is_there[i], 1);
        make_count_of(&shared.unit_is_read[i], (kMultiplying + kBringing) / 32);
      }
    }
    units.make(num_requests);
  }
  __syncthreads();
  // Only what others give up can be taken: for more, the warp groups would wait without end.
  static_assert(kTeams * 232 + 40 <= 65536 / kThreads / 8 * 8 * (kTeams + 1), "registers that the launch brings");
  if (is_multiplying) {
    take_registers<232>();
    wait_for_previous();
    attend_all(shared, out, scale, num_tokens, window);
  } else {
    give_up_registers<40>();
    if (is_fetching) {
      fetch_all(shared, units, Fetcher{shared, keys, values, many_keys, many_values, {}, {}, 0, 0, 0}, page_table,
                page_table_stride, counter);
    } else {
      wait_for_previous();
      bring_all(shared, q, token_stride);
    }
  }
}
