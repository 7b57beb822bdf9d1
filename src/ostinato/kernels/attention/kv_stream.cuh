// A warp's tiles of keys and values on their way through its ring in shared memory.
//
//     half tiles   K0 V0 K1 V1 K2 V2 ...   the n-th in slot n % SLOTS, asked for SLOTS half tiles ahead
//
// The slots are the warp's own, so nothing in its loop waits for other warps. Rows of a tile that no token sees are
// zeros in shared memory: whatever lies there could be NaN, and 0 * NaN too.
#pragma once
#include "work_units.cuh"

constexpr int kPieces = HEAD_DIM / 8;  // 16 bytes each, of a row
constexpr int kCopies = kPieces / 2;   // of a thread, for 16 rows

struct Stream {
  const char *k, *v;      // of the head, in page 0
  const int* pages;       // of the warp's first tile
  int count;              // tiles of the warp
  int first;              // the first of them; then every WARPS-th
  int position;           // the first token's: what is older is copied,
  int seen_from;          // from here on
  int known, known_next;  // lane l: page of tile base + l, and of base + 32 + l, while tiles base ... are asked for
  int page;               // of the tile whose keys were asked for last

  __device__ __forceinline__ void begin(const Unit& unit, const int* pages_of_token, int window, const char* k_cache,
                                        const char* v_cache) {
    first = unit.first_tile + (int)(threadIdx.x / 32);
    count = max(0, (unit.end_tile - first + WARPS - 1) / WARPS);
    pages = pages_of_token + first;
    known = load_pages(0);
    known_next = load_pages(32);
    position = unit.position;
    seen_from = window > 0 ? position - window + 1 : 1 - QUERIES;  // every later token sees from one further on
    k = k_cache + unit.kv_head * kRowBytes;
    v = v_cache + unit.kv_head * kRowBytes;
  }

  __device__ __forceinline__ int load_pages(int from) const {
    const int j = from + (int)(threadIdx.x % 32);
    return j < count ? __ldg(pages + j * WARPS) : 0;
  }

  // Ask for the keys or the values of the warp's tile j; in order, keys before values.
  template <bool kIsValue>
  __device__ __forceinline__ void ask(uint32 slot, int j) {
    if (j < count) {
      if (!kIsValue) {
        if (j > 0 && j % 32 == 0) {
          known = known_next;
          known_next = load_pages(j + 32);
        }
        page = __shfl_sync(kAll, known, j % 32);
      }
      const char* from = (kIsValue ? v : k) + (long long)page * kPageBytes;
      const int lane = threadIdx.x % 32;
      const int start = (first + j * WARPS) * 16;
      const int least = seen_from - start, end = position - start;
      if (least <= 0 && end >= 16) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) copy_piece(slot + to(i, lane), from + of(i, lane));
      } else {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          const int row = row_of(i, lane);
          copy_piece_if(slot + to(i, lane), from + of(i, lane), row >= least && row < end);
        }
      }
    }
    end_copy_group();
  }

  // Thread's i-th piece of a tile: which row, where it lies in a page and in a slot.
  static __device__ __forceinline__ int row_of(int i, int lane) {
    return 32 % kPieces == 0 ? lane / kPieces + i * (32 / kPieces) : (i * 32 + lane) / kPieces;
  }
  static __device__ __forceinline__ int piece_of(int i, int lane) {
    return 32 % kPieces == 0 ? lane % kPieces : (i * 32 + lane) % kPieces;
  }
  static __device__ __forceinline__ int of(int i, int lane) {
    return row_of(i, lane) * kKeyBytes + piece_of(i, lane) * 16;
  }
  static __device__ __forceinline__ int to(int i, int lane) {
    return row_of(i, lane) * kStride + piece_of(i, lane) * 16;
  }
};

__device__ __forceinline__ uint32 next_slot(uint32 slot, uint32 ring) {
  slot += kSlotBytes;
  return slot == ring + kRingBytes ? ring : slot;
}

// The oldest of SLOTS half tiles has arrived.
__device__ __forceinline__ void wait_for_oldest() {
  wait_for_copy_groups<SLOTS - 1>();
  __syncwarp();
}

// New keys or values into their rows of a tile; the first one's row may lie before it.
__device__ __forceinline__ void put_new_rows(uint32 slot, int first_row, int count, uint32 from) {
  for (int i = 0; i < (QUERIES == 1 ? 1 : count); ++i) {
    const int row = first_row + i;
    if (QUERIES > 1 && (row < 0 || row >= 16)) continue;
#pragma unroll
    for (int j = threadIdx.x % 32; j < HEAD_DIM / 2; j += 32)
      store_shared(slot + row * kStride + j * 4, load_shared(from + i * kRowBytes + j * 4));
  }
  __syncwarp();
}
