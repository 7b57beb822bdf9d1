// The list of units of work: which part of which context a program attends to. See decode_attention.cu.
//
// Every program works it out from the positions, so that no kernel before has to. All must come to the same list:
// nothing in it depends on who was first.
#pragma once
#include "decode_layout.cuh"

constexpr int kSegments = MAX_TOKENS / 32;

__device__ __forceinline__ int sum_up_to_lane(int v, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(kAll, v, by);
    if (lane >= by) v += other;
  }
  return v;
}

// How a token's context is cut: tiles [first, end) into chunks of `each`, the last one maybe shorter.
struct Context {
  int first, end, each, chunks;
};

// What the caller wants of it.
struct Cut {
  int window, chunk_tiles, max_chunks;

  __device__ __forceinline__ Context of(int position) const {
    Context c;
    c.first = window > 0 ? max(0, position - window + 1) / 16 : 0;
    c.end = position / 16 + 1;
    c.each = c.end - c.first;
    c.chunks = 1;
    if (c.each > chunk_tiles && max_chunks > 1) {
      const int tiles = c.each;
      const int wanted = min(max_chunks, (tiles + chunk_tiles - 1) / chunk_tiles);
      c.each = (tiles + wanted - 1) / wanted;
      c.chunks = (tiles + c.each - 1) / c.each;
    }
    return c;
  }
};

struct Unit {
  int token, row, position, kv_head;
  int chunk, chunks;         // which, of how many
  int first_tile, end_tile;  // its tiles
  bool has_new;              // whether the token itself is among them
};

struct Units {
  // In shared memory. Segments are of 32 tokens.
  struct Shared {
    int table_rows[MAX_TOKENS];       // of the tokens, in the page table
    int sums[kSegments];              // chunks of the segments
    unsigned short ends[MAX_TOKENS];  // of a token's chunks, in its segment
  };

  Shared* shared;
  const long long* positions;
  Cut cut;
  int num_tokens;
  int segment_sum, segment_end;  // lane l: chunks of segment l, and of all up to it
  int count;

  __device__ __forceinline__ int position_of(int token) const { return (int)__ldg(positions + token); }

  __device__ __forceinline__ void make(const int* token_rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_segments = (num_tokens + 31) / 32;
    for (int segment = warp; segment < num_segments; segment += WARPS) {
      const int token = segment * 32 + lane;
      int chunks = 0;
      if (token < num_tokens) {
        shared->table_rows[token] = __ldg(token_rows + token);
        chunks = cut.of(position_of(token)).chunks;
      }
      const int end = sum_up_to_lane(chunks, lane);
      if (token < num_tokens) shared->ends[token] = (unsigned short)end;
      if (lane == 31) shared->sums[segment] = end;
    }
    __syncthreads();
    segment_sum = lane < num_segments ? shared->sums[lane] : 0;
    segment_end = sum_up_to_lane(segment_sum, lane);
    count = __shfl_sync(kAll, segment_end, 31) * KV_HEADS;
  }

  __device__ __forceinline__ Unit at(int unit) const {
    const int lane = threadIdx.x % 32;
    const int chunk = unit / KV_HEADS;  // in the whole list
    const int segment = __popc(__ballot_sync(kAll, segment_end <= chunk));
    const int before = __shfl_sync(kAll, segment_end - segment_sum, segment);
    const int some_token = segment * 32 + lane;
    const int some_end = before + (some_token < num_tokens ? shared->ends[some_token] : 0xffff);
    const int in_segment = __popc(__ballot_sync(kAll, some_end <= chunk));
    const int previous_end = __shfl_sync(kAll, some_end, max(in_segment - 1, 0));
    Unit u;
    u.token = segment * 32 + in_segment;
    u.row = shared->table_rows[u.token];
    u.position = position_of(u.token);
    u.kv_head = unit % KV_HEADS;
    u.chunk = chunk - (in_segment > 0 ? previous_end : before);
    const Context context = cut.of(u.position);
    u.chunks = context.chunks;
    u.first_tile = context.first + u.chunk * context.each;
    u.end_tile = min(u.first_tile + context.each, context.end);
    u.has_new = u.end_tile == context.end;
    return u;
  }
};
