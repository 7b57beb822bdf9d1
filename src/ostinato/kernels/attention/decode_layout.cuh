// How keys, values and heads lie in the caches and in shared memory, for decode_attention.cu.
//
//     caches          [pages][16 keys][KV_HEADS][HEAD_DIM]
//     shared memory   rings [WARPS][SLOTS][16 rows]; queries [kHeads rows]; new keys [QUERIES rows] and values;
//                     `Units::Shared`
#pragma once
#include "device.cuh"

constexpr int kThreads = WARPS * 32;
constexpr int kHeads = QUERIES * GROUP;  // of a request's tokens, one token after another: all that see a KV head
constexpr int kRowBytes = HEAD_DIM * 2;
constexpr int kKeyBytes = KV_HEADS * kRowBytes;  // from a position to the next in a cache
constexpr int kPageBytes = 16 * kKeyBytes;

constexpr int kStride = kRowBytes + 16;  // of a row in shared memory: no two of eight rows in the same banks
constexpr int kSlotBytes = 16 * kStride;
constexpr int kRingBytes = SLOTS * kSlotBytes;
constexpr int kQueriesAt = WARPS * kRingBytes;
constexpr int kNewAt = kQueriesAt + kHeads * kStride;
constexpr int kListAt = kNewAt + 2 * QUERIES * kRowBytes;

constexpr uint32 kAll = 0xffffffffu;  // lanes

__device__ __forceinline__ float2 as_floats(uint2 v) {
  return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}
