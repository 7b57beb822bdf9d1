// Attention of single tokens over paged keys and values, from the QKV projection: norm and rotation
// of the heads, the KV write, and attention to everything up to the token itself.
//
// A unit of work is a KV head of a token and a chunk of its context. Programs take units from a list that each
// works out from the positions, so a grid that only fills the GPU serves any mixture of lengths:
//
//     tokens       |      0      |    1    | 2 | ...    if the longest are first, programs end at about the
//     chunks       | 0 1 2 3 4 5 | 0 1 2 3 | 0 | ...    same time
//     unit         chunk in this list * KV_HEADS + KV head
//
// A token's context is cut into equal chunks; their number follows from its position alone. In a unit, tiles of
// 16 keys (a page) go to the warps in turn.
//
// The projection may come as PARTS parts whose sum it is, each of all tokens.
//
// What earlier kernels of the step do not write is asked for before the wait: positions, pages, old KV. The new
// key and value go into their row of the last tile when its copy has arrived.
#include "joined_parts.cuh"
#include "kv_stream.cuh"
#include "prepared_heads.cuh"
#include "tile_attention.cuh"
#include "work_units.cuh"

static_assert(kListAt + sizeof(Units::Shared) <= SHARED_BYTES, "the launch knows of less");

extern "C" __global__ void __launch_bounds__(kThreads, MIN_PROGRAMS)
    attend(const Projected* qkv, const Element* __restrict__ q_norm, const Element* __restrict__ k_norm,
           const float* __restrict__ rotary, char* k_cache, char* v_cache, Element* out, float* partial,
           float* partial_sums, int* counters, const int* __restrict__ page_table,
           const int* __restrict__ token_rows, const long long* __restrict__ positions, float scale, float eps,
           int token_stride, int page_table_stride, int num_tokens, int window, int chunk_tiles,
           int max_chunks) {
  char* const shared = dynamic_shared();
  __shared__ int for_all;
  const int warp = threadIdx.x / 32;
  const uint32 base = shared_address(shared);
  const uint32 ring = base + warp * kRingBytes;
  allow_next_kernel();

  Units units;
  units.shared = (Units::Shared*)(shared + kListAt);
  units.positions = positions;
  units.cut = Cut{window, chunk_tiles, max_chunks};
  units.num_tokens = num_tokens;
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
    heads.load_constants(rotary, q_norm, k_norm, unit.position);
    const int new_page = unit.has_new ? __ldg(pages + unit.position / 16) : 0;
    if (is_first) wait_for_previous();
    int ticket = 0;
    if (units.count > gridDim.x && threadIdx.x == 0) ticket = atomicAdd(counters, 1);
    heads.load(qkv + (long long)unit.token * token_stride, num_tokens * token_stride, unit);
    heads.finish(base, unit, k_cache, v_cache, new_page, eps);
    __syncthreads();

    Attention attention;
    attention.begin(base + kQueriesAt);
    slot = ring;
    for (int j = 0; j < stream.count; ++j) {
      const int start = (stream.first + j * WARPS) * 16;
      const bool is_last = start + 16 > unit.position;  // the token's own
      float scores[kColumns][4];
      wait_for_oldest();
      if (is_last) put_new_row(slot, unit.position - start, base + kNewAt);
      attention.look_at(slot, scores);
      __syncwarp();
      stream.ask<SLOTS % 2 == 1>(slot, j + SLOTS / 2);
      slot = next_slot(slot, ring);
      attention.weigh(scores, scale, start, stream.seen_from, unit.position);
      wait_for_oldest();
      if (is_last) put_new_row(slot, unit.position - start, base + kNewAt + kRowBytes);
      attention.add(slot);
      __syncwarp();
      stream.ask<SLOTS % 2 == 0>(slot, j + (SLOTS + 1) / 2);
      slot = next_slot(slot, ring);
    }
    // Nothing is on its way into the ring any more.
    __syncwarp();
    attention.store((float*)(shared + warp * kRingBytes));
    __syncthreads();

    const long long pair = (long long)unit.token * KV_HEADS + unit.kv_head;
    uint32* const out_pairs = (uint32*)(out + pair * (GROUP * HEAD_DIM));
    for (int e = threadIdx.x; e < GROUP * HEAD_DIM / 2; e += kThreads) {
      const int head = e / (HEAD_DIM / 2), dim = e % (HEAD_DIM / 2) * 2;
      const Joined joined = join_warps(shared, head, dim);
      if (unit.chunks == 1) {
        out_pairs[e] = rounded(joined.a / joined.total, joined.b / joined.total);
      } else {
        const long long part = (pair * max_chunks + unit.chunk) * GROUP + head;
        *(float2*)(partial + part * HEAD_DIM + dim) = make_float2(joined.a, joined.b);
        if (dim == 0) *(float2*)(partial_sums + part * 2) = make_float2(joined.most, joined.total);
      }
    }
    // The program that ends last joins the chunks. Counters are 0 before and after.
    if (unit.chunks > 1) {
      int* const counter = counters + 1 + pair;
      __syncthreads();
      if (threadIdx.x == 0) for_all = add_in_order(counter);
      __syncthreads();
      if (for_all == unit.chunks - 1) {
        if (threadIdx.x == 0) *counter = 0;
        for (int e = threadIdx.x; e < GROUP * HEAD_DIM / 2; e += kThreads) {
          const int head = e / (HEAD_DIM / 2), dim = e % (HEAD_DIM / 2) * 2;
          const long long part = pair * max_chunks * GROUP + head;
          const Joined joined = join_chunks(partial, partial_sums, part, dim, unit.chunks);
          out_pairs[e] = rounded(joined.a / joined.total, joined.b / joined.total);
        }
      }
    }

    // The next unit. Every program draws until there is none left, so the last draw of all is known.
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
