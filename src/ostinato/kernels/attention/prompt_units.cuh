// The list of tiles of queries: see prompt_attention.cu. One warp works it out from the lengths of the requests.
//
// The last tiles come first, because late queries of a prompt see most keys, and so the longest work begins first. Of
// long contexts, only some KV heads at a time, whose keys and values stay in L2.
#pragma once
#include "prompt_layout.cuh"

constexpr int kKeptInL2 = 24 << 20;  // bytes

__device__ __forceinline__ int sum_up_to_lane(int v, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(kAll, v, by);
    if (lane >= by) v += other;
  }
  return v;
}

struct Units {
  Shared& shared;
  const int *req_rows, *seq_lens, *query_starts, *query_lens;
  int window, num_tiles, count;
  int heads;  // KV heads at a time

  __device__ __forceinline__ void make(int num_requests) {
    const int lane = threadIdx.x % 32;
    int lengths[kSegments], longest = 1;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const int request = s * 32 + lane;
      lengths[s] = request < num_requests ? __ldg(query_lens + request) : 0;
      longest = max(longest, request < num_requests ? __ldg(seq_lens + request) : 0);
    }
    for (int by = 1; by < 32; by *= 2) longest = max(longest, __shfl_xor_sync(kAll, longest, by));
    heads = KV_HEADS;
    while (heads % 2 == 0 && (long long)longest * heads * (HEAD_DIM * 4) > kKeptInL2) heads /= 2;
    int tiles = 0, tokens = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const int ends = tiles + sum_up_to_lane((lengths[s] + kQueries - 1) / kQueries, lane);
      shared.ends[s * 32 + lane] = ends;
      tiles = __shfl_sync(kAll, ends, 31);
      tokens += lengths[s];
    }
    tokens = __shfl_sync(kAll, sum_up_to_lane(tokens, lane), 31);
    if (lane == 0) shared.num_tokens = tokens;
    __syncwarp();
    num_tiles = tiles;
    count = tiles * KV_HEADS;
  }

  __device__ __forceinline__ Unit at(int number) const {
    Unit u;
    u.end = 0;
    if (number >= count) return u;
    const int lane = threadIdx.x % 32;
    const int in_section = number % (num_tiles * heads);
    u.kv_head = number / (num_tiles * heads) * heads + in_section % heads;
    const int tile = num_tiles - 1 - in_section / heads;
    int request = 0, before = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const int end = shared.ends[s * 32 + lane];
      const int passed = __popc(__ballot_sync(kAll, end <= tile));
      if (passed > 0) before = __shfl_sync(kAll, end, passed - 1);
      request += passed;
    }
    const int first_query = (tile - before) * kQueries;
    const int query_len = __ldg(query_lens + request), seq_len = __ldg(seq_lens + request);
    u.table_row = __ldg(req_rows + request);
    u.first_token = __ldg(query_starts + request) + first_query;
    u.position = seq_len - query_len + first_query;
    u.num_queries = min(kQueries, query_len - first_query);
    u.end = u.position + u.num_queries;
    u.first_block = window > 0 ? max(0, u.position - window + 1) / KEYS : 0;
    u.end_block = (u.end + KEYS - 1) / KEYS;
    return u;
  }
};
