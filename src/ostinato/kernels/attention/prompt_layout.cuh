// What a CTA of prompt_attention.cu works on, and its shared memory.
//
//     caches          [pages][16 keys][KV_HEADS][HEAD_DIM]
//     shared memory   queries [boxes][kRows][64 elements], keys and values [STAGES][KEYS / 8][boxes][8][64 elements]:
//                     so a page is one copy, and 8 rows and the next 8 are always as far from each other
#pragma once
#include "warpgroup.cuh"

constexpr int kTeams = 2;                           // of four warps, which multiply
constexpr int kRows = kTeams * 64;                  // of a tile
constexpr int kQueries = kRows / GROUP;             // of a tile, each with the heads that share a KV head
constexpr int kMultiplying = kTeams * 128;          // threads
constexpr int kThreads = kMultiplying + 128;        // of the others one warp asks for keys, three bring queries
constexpr int kBringing = 96;
constexpr bool kHolds = HEAD_DIM <= 128;            // queries are held in registers
constexpr int kBoxes = HEAD_DIM / 64;               // beside each other
constexpr int kPages = KEYS / 16;                   // of a block of keys
constexpr int kQueryBox = kRows * 128;
constexpr int kKeyBox = 1024, kKeyGroup = kBoxes * kKeyBox;  // 8 rows of a box, of all boxes
constexpr int kPageBytes = 2 * kKeyGroup;           // of one KV head
constexpr int kBlockBytes = kPages * kPageBytes;
constexpr int kHeads = GROUP * KV_HEADS;
constexpr int kSegments = MAX_REQUESTS / 32;
constexpr uint32 kAll = 0xffffffffu;                // lanes

static_assert(HEAD_DIM % 64 == 0 && KEYS % 64 == 0 && MAX_REQUESTS % 32 == 0, "whole boxes and segments");
static_assert(GROUP <= kRows, "a tile has a query at least");
static_assert(kPages <= 32, "a lane asks for a page");

// A tile of queries of one request, and the blocks of keys that one of them at least can see.
struct Unit {
  int table_row, kv_head;
  int first_token, position, num_queries;  // position: of the first query
  int first_block, end_block;
  int end;  // behind the last key that any of them sees; 0: there are no more units
};

struct Shared {
  char queries[kBoxes * kQueryBox];
  char keys[STAGES][kBlockBytes];
  char values[STAGES][kBlockBytes];
  ByteCount keys_are_there[STAGES], keys_are_read[STAGES];
  ByteCount values_are_there[STAGES], values_are_read[STAGES];
  ByteCount queries_are_there, queries_are_read;
  ByteCount unit_is_there[2], unit_is_read[2];
  Unit units[2];
  int ends[MAX_REQUESTS];  // tiles of requests up to each, with it
  int num_tokens;          // of all requests

  // 16 bytes of a row of queries, as tiles lie.
  __device__ __forceinline__ char* piece(int row, int number) {
    return queries + number / 8 * kQueryBox + row * 128 + (number % 8 ^ row % 8) * 16;
  }
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch knows of less");

// The heads of a row of a tile, in a tensor of all tokens; rows that are no query's have none.
__device__ __forceinline__ bool is_query(const Unit& unit, int row) { return row / GROUP < unit.num_queries; }
__device__ __forceinline__ int token_of(const Unit& unit, int row) { return unit.first_token + row / GROUP; }
__device__ __forceinline__ int head_of(const Unit& unit, int row) { return unit.kv_head * GROUP + row % GROUP; }

// Which of a ring's places is next, and whether it has been used an odd number of times.
template <int kPlaces>
struct Place {
  int at = 0;
  bool odd = false;

  __device__ __forceinline__ void advance() {
    if (++at == kPlaces) {
      at = 0;
      odd = !odd;
    }
  }
};
