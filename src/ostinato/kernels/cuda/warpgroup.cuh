// More of the GPU's instructions as functions: copies of whole tiles, and the tensor cores of four warps together,
// which take both factors from shared memory. With device.cuh the only file with PTX.
//
// A tile in shared memory has rows of 64 elements, 128 bytes, and begins at a multiple of 1,024. The 16 bytes that
// are the i-th of row r lie at place i ^ r % 8 of that row: so the copies leave them, so the tensor cores look for
// them, and neighbours in a column are in different banks.
#pragma once
#include "device.cuh"

// Where a tensor lies and in what boxes it is copied. The launch makes it: see `compiled.TileMap`.
struct __align__(64) TensorMap {
  char hidden[128];
};

// As much shared memory as the launch asked for, for tiles to begin with.
__device__ __forceinline__ char* memory_of_tiles() {
  extern __shared__ __align__(1024) char tiles[];
  return tiles;
}

// ---- copies; one thread asks for them, and they arrive at a count of bytes ----

__device__ __forceinline__ void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box that begins at this column and row of a matrix; zeros where the matrix has ended.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, int column, int row, ByteCount* count) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(count))
      : "memory");
}

// The same to the same place in each CTA of the cluster that has its bit in `CTAs`, and to its count there.
__device__ __forceinline__ void copy_box_to_all(void* to, const TensorMap& map, int column, int row, ByteCount* count,
                                                int programs) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(count)), "h"((unsigned short)programs)
      : "memory");
}

// The same of a tensor of four dimensions; these are the two outer ones, of the inner two a box has all.
__device__ __forceinline__ void copy_boxes(void* to, const TensorMap& map, int inner, int outer, ByteCount* count) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(inner), "r"(outer), "r"(shared_address(count))
      : "memory");
}

// What this thread stored in shared memory before, copies read afterwards.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A box back to where it begins in a matrix, but for what lies outside; or added to what is there, element by element
// and each sum rounded. The thread that asks for them waits for them, in groups.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(shared_address(from))
               : "memory");
}
__device__ __forceinline__ void add_box(const TensorMap& map, int column, int row, const void* from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(column), "r"(row), "r"(shared_address(from))
               : "memory");
}

// The stores since the last call are a group.
__device__ __forceinline__ void end_store_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all groups but the last `kLeft` have been read, and their place can be used again.
template <int kLeft>
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// From here to `to` in another CTA of the cluster and to its count. This one may not end before it has arrived.
__device__ __forceinline__ void copy_to_program(uint32 rank, void* to, const void* from, int bytes, ByteCount* count) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          remote_address(to, rank)),
      "r"(shared_address(from)), "r"(bytes), "r"(remote_address(count, rank))
      : "memory");
}

// ---- arrivals at a count, beside bytes ----

// By one thread; a lot is complete when so many arrivals have come, and all bytes that these expect.
__device__ __forceinline__ void make_count_of(ByteCount* count, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(count)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// At the count of another CTA, or of this one. What was stored before need not be visible to the others: an
// arrival that promised it would wait for everything that is on its way.
__device__ __forceinline__ void arrive_at(const ByteCount* count, uint32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(count, rank)) : "memory");
}

// At one of this CTA. What was stored before is visible to those who have waited.
__device__ __forceinline__ void arrive_here(ByteCount* count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(count)) : "memory");
}

// As `wait_for_bytes`, and the end of the launch after ten seconds, where a GPU would stand still without end.
__device__ __forceinline__ void wait_for_bytes_or_fail(ByteCount* count, bool odd) {
  const uint32 address = shared_address(count);
  auto are_there = [&] {
    uint32 answer;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(answer)
        : "r"(address), "r"((uint32)odd)
        : "memory");
    return answer != 0;
  };
  auto nanoseconds = [] {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  };
  if (are_there()) return;
  const unsigned long long began = nanoseconds();
  while (!are_there())
    if (nanoseconds() - began > 10000000000ull) asm volatile("trap;");
}

// ---- tensor cores: products of tiles are asked for in groups and waited for ----

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// For all groups but the last one: its tiles have been read.
__device__ __forceinline__ void wait_for_all_but_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// What was done to d stays before this, and what is done to it behind: nothing else tells the compiler that products
// change it while they are on their way.
template <int kNumber>
__device__ __forceinline__ void keep_in_order(float (&d)[kNumber]) {
#pragma unroll
  for (int i = 0; i < kNumber; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// For all groups: d can be used.
template <int kNumber>
__device__ __forceinline__ void wait_for_products(float (&d)[kNumber]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep_in_order(d);
}

// The same, when `ready`, which is never negative, has been worked out, and no sooner. The assembler moves a wait up to
// where nothing stands in its way, and work that should be done in the meantime behind it.
template <int kNumber>
__device__ __forceinline__ void wait_for_products_when(float ready, float (&d)[kNumber]) {
  asm volatile(
      "{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; vote.sync.any.pred p, p, 0xffffffff; @p trap; }" ::"f"(ready)
      : "memory");
  wait_for_products(d);
}

// `groups`: bytes from 8 rows to the next 8; `beside`: from 64 columns to the next 64, where columns are taken for
// rows. Both are multiples of 1,024.
__device__ __forceinline__ unsigned long long described(uint32 tile, uint32 groups, uint32 beside = 16) {
  constexpr unsigned long long kOrder128 = 1;  // how 16 bytes lie
  return (tile & 0x3ffff) >> 4 | (unsigned long long)(beside >> 4) << 16 | (unsigned long long)(groups >> 4) << 32 |
         kOrder128 << 62;
}

#define EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_20 NAMES_16 ", %16, %17, %18, %19"
#define NAMES_24 NAMES_20 ", %20, %21, %22, %23"
#define NAMES_32 \
  NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                              \
  NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
           "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MULTIPLY_TILES(name, adds, columns, names, a_and_b, ...)                                              \
  __device__ __forceinline__ void name(float (&d)[columns / 2], uint32 a, uint32 b, uint32 b_groups = 1024) { \
    asm volatile("{ .reg .pred adds; setp.eq.u32 adds, " adds ", 1; wgmma.mma_async.sync.aligned.m64n" #columns \
                 "k16.f32." ELEMENT "." ELEMENT " {" names "}, " a_and_b ", adds, 1, 1, 0, 0; }"              \
                 : __VA_ARGS__                                                                                \
                 : "l"(described(a, 1024)), "l"(described(b, b_groups)));                                     \
  }
#define MULTIPLY_COLUMNS(columns, names, a0, a1, a2, a3, b, ...)                                              \
  __device__ __forceinline__ void multiply_columns(float (&d)[columns / 2], const uint32* a, uint32 tile,     \
                                                   uint32 groups, uint32 beside) {                            \
    asm volatile("{ .reg .pred adds; setp.eq.u32 adds, 1, 1; wgmma.mma_async.sync.aligned.m64n" #columns      \
                 "k16.f32." ELEMENT "." ELEMENT " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b          \
                 ", adds, 1, 1, 1; }"                                                                         \
                 : __VA_ARGS__                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described(tile, groups, beside)));         \
  }

// d [64, columns] += a [64, 16] * b [columns, 16]^T, 16 elements of the rows of two tiles from where a and b point
// to: the tile's beginning and 32 bytes for each 16 elements on. Of d, a warp has 16 rows; a thread has, of each 8
// columns, those at 2 * (lane % 4) and + 1 of rows lane / 4 and + 8. `b_groups`: from 8 rows of b to the next 8.
MULTIPLY_TILES(multiply_tiles, "1", 16, NAMES_8, "%8, %9", EIGHT(0))
MULTIPLY_TILES(multiply_tiles, "1", 32, NAMES_16, "%16, %17", EIGHT(0), EIGHT(8))
MULTIPLY_TILES(multiply_tiles, "1", 40, NAMES_20, "%20, %21", EIGHT(0), EIGHT(8), FOUR(16))
MULTIPLY_TILES(multiply_tiles, "1", 48, NAMES_24, "%24, %25", EIGHT(0), EIGHT(8), EIGHT(16))
MULTIPLY_TILES(multiply_tiles, "1", 64, NAMES_32, "%32, %33", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
MULTIPLY_TILES(multiply_tiles, "1", 128, NAMES_64, "%64, %65", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32),
               EIGHT(40), EIGHT(48), EIGHT(56))

// The same, of which d is the first: whatever was in it.
MULTIPLY_TILES(multiply_tiles_anew, "0", 64, NAMES_32, "%32, %33", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
MULTIPLY_TILES(multiply_tiles_anew, "0", 128, NAMES_64, "%64, %65", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24),
               EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56))

#define NAMES_128                                                                                               \
  NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
           "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
           "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "  \
           "%121, %122, %123, %124, %125, %126, %127"

// The same with 256 columns; unless it `adds`, d is the first.
__device__ __forceinline__ void multiply_large_tiles(float (&d)[128], uint32 a, uint32 b, bool adds) {
  asm volatile("{ .reg .pred adds; setp.ne.u32 adds, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT
               "." ELEMENT " {" NAMES_128 "}, %128, %129, adds, 1, 1, 0, 0; }"
               : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64),
                 EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
               : "l"(described(a, 1024)), "l"(described(b, 1024)), "r"((uint32)adds));
}

// d [64, columns] += a [64, 16] * b [16, columns]: 16 rows of a tile from where it points to, a multiple of 1,024; 8
// rows on it is `groups` bytes further, 64 columns on `beside`. Of a, a warp has 16 rows; a thread has columns 2 * (lane % 4) and
// + 1 of rows lane / 4 and + 8, then columns 8 further on. They must stay until the products were waited for.
MULTIPLY_COLUMNS(64, NAMES_32, "%32", "%33", "%34", "%35", "%36", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
MULTIPLY_COLUMNS(128, NAMES_64, "%64", "%65", "%66", "%67", "%68", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24),
                 EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56))

#define MULTIPLY_HELD(name, adds, columns, names, a0, a1, a2, a3, b, ...)                                      \
  __device__ __forceinline__ void name(float (&d)[columns / 2], const uint32* a, uint32 tile, uint32 groups) { \
    asm volatile("{ .reg .pred adds; setp.eq.u32 adds, " adds ", 1; wgmma.mma_async.sync.aligned.m64n" #columns \
                 "k16.f32." ELEMENT "." ELEMENT " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b           \
                 ", adds, 1, 1, 0; }"                                                                          \
                 : __VA_ARGS__                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described(tile, groups)));                  \
  }

// d [64, columns] += a [64, 16] * b [columns, 16]^T: a as above, b as of `multiply_tiles`.
MULTIPLY_HELD(multiply_held, "1", 64, NAMES_32, "%32", "%33", "%34", "%35", "%36", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
MULTIPLY_HELD(multiply_held, "1", 128, NAMES_64, "%64", "%65", "%66", "%67", "%68", EIGHT(0), EIGHT(8), EIGHT(16),
              EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56))
MULTIPLY_HELD(multiply_held_anew, "0", 64, NAMES_32, "%32", "%33", "%34", "%35", "%36", EIGHT(0), EIGHT(8), EIGHT(16),
              EIGHT(24))
MULTIPLY_HELD(multiply_held_anew, "0", 128, NAMES_64, "%64", "%65", "%66", "%67", "%68", EIGHT(0), EIGHT(8), EIGHT(16),
              EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56))

// ---- threads of a CTA that work apart ----

// All of four warps give registers up, or take them, so that they have so many each.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A meeting, by its number from 1 on, of so many threads: it is over for those who wait when all have come.
__device__ __forceinline__ void wait_at_meeting(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void come_to_meeting(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
