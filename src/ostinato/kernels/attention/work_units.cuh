// The list of units of work: which part of which context a CTA attends to. See decode_attention.cu.
//
// Every CTA works it out from the positions, so that no kernel before has to. All must come to the same list:
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

// How a request's context is cut: tiles [first, end) into chunks of `each`, the last one maybe shorter.
struct Context {
  int first, end, each, chunks;
};

// What the caller wants of it.
struct Cut {
  int window, chunk_tiles, max_chunks;

  // Of tokens at the positions up to `last`.
  __device__ __forceinline__ Context of(int position, int last) const {
    Context c;
    c.first = window > 0 ? max(0, position - window + 1) / 16 : 0;
    c.end = last / 16 + 1;
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
  int request, row, kv_head;
  int position, count;       // of its first token, and how many there are
  int chunk, chunks;         // which, of how many
  int first_tile, end_tile;  // its tiles
  bool has_new;              // whether any of the tokens is among them

  __device__ __forceinline__ bool has_tile(int tile) const { return tile >= first_tile && tile < end_tile; }
};

struct Units {
  // In shared memory. Segments are of 32 requests.
  struct Shared {
    int table_rows[MAX_TOKENS];       // of the requests, in the page table
    int sums[kSegments];              // chunks of the segments
    unsigned short ends[MAX_TOKENS];  // of a request's chunks, in its segment
  };

  Shared* shared;
  const long long* positions;
  const int* query_lens;
  Cut cut;
  int num_requests;
  int segment_sum, segment_end;  // lane l: chunks of segment l, and of all up to it
  int count;

  __device__ __forceinline__ int position_of(int request) const { return (int)__ldg(positions + request * QUERIES); }

  // Padding has a token, too.
  __device__ __forceinline__ int count_of(int request) const {
    return QUERIES == 1 ? 1 : max(1, __ldg(query_lens + request));
  }

  __device__ __forceinline__ Context context_of(int position, int count) const {
    return cut.of(position, position + count - 1);
  }

  __device__ __forceinline__ void make(const int* token_rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_segments = (num_requests + 31) / 32;
    for (int segment = warp; segment < num_segments; segment += WARPS) {
      const int request = segment * 32 + lane;
      int chunks = 0;
      if (request < num_requests) {
        shared->table_rows[request] = __ldg(token_rows + request * QUERIES);
        chunks = context_of(position_of(request), count_of(request)).chunks;
      }
      const int end = sum_up_to_lane(chunks, lane);
      if (request < num_requests) shared->ends[request] = (unsigned short)end;
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
    const int some_request = segment * 32 + lane;
    const int some_end = before + (some_request < num_requests ? shared->ends[some_request] : 0xffff);
    const int in_segment = __popc(__ballot_sync(kAll, some_end <= chunk));
    const int previous_end = __shfl_sync(kAll, some_end, max(in_segment - 1, 0));
    Unit u;
    u.request = segment * 32 + in_segment;
    u.row = shared->table_rows[u.request];
    u.position = position_of(u.request);
    u.count = count_of(u.request);
    u.kv_head = unit % KV_HEADS;
    u.chunk = chunk - (in_segment > 0 ? previous_end : before);
    const Context context = context_of(u.position, u.count);
    u.chunks = context.chunks;
    u.first_tile = context.first + u.chunk * context.each;
    u.end_tile = min(u.first_tile + context.each, context.end);
    u.has_new = QUERIES == 1 ? u.end_tile == context.end : u.end_tile * 16 > u.position;
    return u;
  }
};
