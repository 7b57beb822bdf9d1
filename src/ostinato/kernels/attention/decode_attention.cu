// Attention of a few tokens of each request over paged keys and values, from the QKV projection: norm and rotation
// of the heads, the KV write, and attention to everything up to the token itself.
//
// A request has places for QUERIES tokens, request r from r * QUERIES on, and tokens in the first `query_lens[r]` of
// them, at positions that follow each other. What a place without a token gets is finite, and of no use.
//
// A unit of work is a KV head of a request and a chunk of its context. CTAs take units from a list that each
// works out from the positions, so a grid that only fills the GPU serves any mixture of lengths:
//
//     requests     |      0      |    1    | 2 | ...    if the longest are first, CTAs end at about the
//     chunks       | 0 1 2 3 4 5 | 0 1 2 3 | 0 | ...    same time
//     unit         chunk in this list * KV_HEADS + KV head
//
// A context is cut into equal chunks; their number follows from its length alone. In a unit, tiles of 16 keys (a
// page) go to the warps in turn.
//
// The projection may come as PARTS parts whose sum it is, each of all tokens.
//
// What earlier kernels of the step do not write is asked for before the wait: positions, pages, old KV. New keys and
// values go into their rows of the last tiles when the copies of these have arrived.
#include "joined_parts.cuh"
#include "kv_stream.cuh"
#include "prepared_heads.cuh"
#include "tile_attention.cuh"
#include "work_units.cuh"

constexpr int kOutEach = GROUP * HEAD_DIM;  // results of a token for a KV head

constexpr int kPairs = kHeads * HEAD_DIM / 2;  // of results of a unit

// Chunks of so many of a thread's pairs are asked for at a time.
constexpr int kJoinedAtOnce = QUERIES == 1 ? 1 : kPairs <= 2 * kThreads ? 2 : kPairs <= 3 * kThreads ? 3 : 4;

// Where a pair of results of a unit lies behind its first one.
__device__ __forceinline__ int out_pair(int e) {
  return QUERIES == 1 ? e : e % (kOutEach / 2) + e / (kOutEach / 2) * (KV_HEADS * kOutEach / 2);
}

static_assert(kListAt + sizeof(Units::Shared) <= SHARED_BYTES, "the launch knows of less");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_PROGRAMS)
    attend(const Projected* qkv, const Element* __restrict__ q_norm, const Element* __restrict__ k_norm,
           const float* __restrict__ rotary, char* k_cache, char* v_cache, Element* out, float* partial,
           float* partial_sums, int* counters, const int* __restrict__ page_table,
           const int* __restrict__ token_rows, const long long* __restrict__ positions,
           const int* __restrict__ query_lens, float scale, float eps, int token_stride, int page_table_stride,
           int num_requests, int window, int chunk_tiles, int max_chunks) {
  char* const shared = dynamic_shared();
  __shared__ int for_all;
  const int warp = threadIdx.x / 32;
  const uint32 base = shared_address(shared);
  const uint32 ring = base + warp * kRingBytes;
  allow_next_kernel();

  Units units;
  units.shared = (Units::Shared*)(shared + kListAt);
  units.positions = positions;
  units.query_lens = query_lens;
  units.cut = Cut{window, chunk_tiles, max_chunks};
  units.num_requests = num_requests;
  units.make(token_rows);

  bool is_first = true;
  for (int number = blockIdx.x; number < units.count;) {
    const Unit unit = units.at(number);
    const int* const pages = page_table + (long long)unit.row * page_table_stride;
    Stream stream;
    stream.begin(unit, pages, window, k_cache, v_cache);
    uint32 slot = ring;
#pragma unroll
    for (int n = 0; n < SLOTS; ++n, slot += kSlotBytes) {
      if (n % 2) stream.ask<true>(slot, n / 2);
      else stream.ask<false>(slot, n / 2);
    }
    Heads heads;
    heads.load_constants(rotary, q_norm, k_norm, unit);
    NewPages new_pages;
    new_pages.load(unit, pages);
    if (is_first) wait_for_previous();
    int ticket = 0;
    if (units.count > gridDim.x && threadIdx.x == 0) ticket = atomicAdd(counters, 1);
    heads.load(qkv + (long long)unit.request * QUERIES * token_stride, token_stride,
               num_requests * QUERIES * token_stride, unit);
    heads.finish(base, unit, k_cache, v_cache, new_pages, eps);
    __syncthreads();

    Attention attention;
    attention.begin(base + kQueriesAt);
    slot = ring;
    for (int j = 0; j < stream.count; ++j) {
      const int start = (stream.first + j * WARPS) * 16;
      const bool has_new = start + 16 > unit.position;  // keys of the tokens themselves
      float scores[kColumns][4];
      wait_for_oldest();
      if (has_new) put_new_rows(slot, unit.position - start, unit.count, base + kNewAt);
      attention.look_at(slot, scores);
      __syncwarp();
      stream.ask<SLOTS % 2 == 1>(slot, j + SLOTS / 2);
      slot = next_slot(slot, ring);
      attention.weigh(scores, scale, start, stream.seen_from, unit.position, unit.count);
      wait_for_oldest();
      if (has_new) put_new_rows(slot, unit.position - start, unit.count, base + kNewAt + QUERIES * kRowBytes);
      attention.add(slot);
      __syncwarp();
      stream.ask<SLOTS % 2 == 0>(slot, j + (SLOTS + 1) / 2);
      slot = next_slot(slot, ring);
    }
    // Nothing is on its way into the ring any more.
    __syncwarp();
    attention.store((float*)(shared + warp * kRingBytes));
    __syncthreads();

    const long long pair = (long long)unit.request * KV_HEADS + unit.kv_head;
    uint32* const out_pairs = (uint32*)(out + (unit.request * (long long)(QUERIES * KV_HEADS) + unit.kv_head) * kOutEach);
    for (int e = threadIdx.x; e < kPairs; e += kThreads) {
      const int head = e / (HEAD_DIM / 2), dim = e % (HEAD_DIM / 2) * 2;
      const Joined joined = join_warps(shared, head, dim);
      if (unit.chunks == 1) {
        out_pairs[out_pair(e)] = rounded(joined.a / joined.total, joined.b / joined.total);
      } else {
        const long long part = (pair * max_chunks + unit.chunk) * kHeads + head;
        *(float2*)(partial + part * HEAD_DIM + dim) = make_float2(joined.a, joined.b);
        if (dim == 0) *(float2*)(partial_sums + part * 2) = make_float2(joined.most, joined.total);
      }
    }
    // The CTA that ends last joins the chunks. Counters are 0 before and after.
    if (unit.chunks > 1) {
      int* const counter = counters + 1 + pair;
      __syncthreads();
      if (threadIdx.x == 0) for_all = add_in_order(counter);
      __syncthreads();
      if (for_all == unit.chunks - 1) {
        if (threadIdx.x == 0) *counter = 0;
        for (int begin = threadIdx.x; begin < kPairs; begin += kThreads * kJoinedAtOnce) {
          long long parts[kJoinedAtOnce];
          int dims[kJoinedAtOnce];
          Joined joined[kJoinedAtOnce];
#pragma unroll
          for (int n = 0; n < kJoinedAtOnce; ++n) {
            const int e = min(begin + n * kThreads, kPairs - 1);
            parts[n] = pair * max_chunks * kHeads + e / (HEAD_DIM / 2);
            dims[n] = e % (HEAD_DIM / 2) * 2;
          }
          join_chunks(partial, partial_sums, parts, dims, unit.chunks, joined);
#pragma unroll
          for (int n = 0; n < kJoinedAtOnce; ++n) {
            const int e = begin + n * kThreads;
            const float total = joined[n].total;
            if (e < kPairs) out_pairs[out_pair(e)] = rounded(joined[n].a / total, joined[n].b / total);
          }
        }
      }
    }

    // The next unit. Every CTA draws until there is none left, so the last draw of all is known.
    if (units.count <= gridDim.x) break;
    is_first = false;
    __syncthreads();
    if (threadIdx.x == 0) {
      if (ticket == units.count - 1) counters[0] = 0;
      for_all = (int)gridDim.x + ticket;
    }
    __syncthreads();
    number = for_all;
  }
}
