// The functions of the package's device.cuh in plain C++, and what CUDA's language has beside C++.
#pragma once
#include <cmath>

#include "fibers.h"

// ---- CUDA ----

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __maxnreg__(registers)
#define __grid_constant__
#define __expf expf
#define __fdividef(x, y) ((x) / (y))
#define __fmaf_rn fmaf
#define rsqrtf(x) (1.f / sqrtf(x))
#define __shared__ static  // one for all programs: of use where they run one after the other

typedef unsigned int uint32;
typedef unsigned short Element;  // its bits

struct uint2 {
  uint32 x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct __align__(16) Word4 {
  uint32 x, y, z, w;
};

static uint2 make_uint2(uint32 x, uint32 y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
static To with_bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

template <class T>
static T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
static T max(T a, T b) {
  return a < b ? b : a;
}

// Rounded by themselves, whatever the compiler makes of operations that do not say so.
static float __fmul_rn(float x, float y) {
  const volatile float product = x * y;
  return product;
}
static float __fadd_rn(float x, float y) {
  const volatile float first = x, second = y;
  return first + second;
}

static float __uint_as_float(uint32 bits) { return with_bits_of<float>(bits); }
static int __popc(uint32 x) { return __builtin_popcount(x); }

template <class T>
static T __ldg(const T* p) {
  return emulator::load_global<T>(p);
}

static int atomicAdd(int* p, int v) {
  const int before = *p;
  *p += v;
  return before;
}

static void __syncthreads() {
  emulator::Barrier& barrier = emulator::current->program->barrier;
  emulator::wait(barrier, emulator::arrive(barrier));
}
static void __syncwarp() {
  emulator::Barrier& barrier = emulator::warp().barrier;
  emulator::wait(barrier, emulator::arrive(barrier));
}

template <class T>
static T __shfl_sync(uint32, T v, int from) {
  return emulator::from_all_lanes(v)[from % 32];
}
template <class T>
static T __shfl_xor_sync(uint32, T v, int by) {
  return emulator::from_all_lanes(v)[threadIdx.x % 32 ^ by];
}
template <class T>
static T __shfl_up_sync(uint32, T v, int by) {
  const int lane = threadIdx.x % 32;
  return emulator::from_all_lanes(v)[lane >= by ? lane - by : lane];
}
static uint32 __ballot_sync(uint32, bool vote) {
  const bool* const votes = emulator::from_all_lanes(vote);
  uint32 mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= (uint32)votes[lane] << lane;
  return mask;
}

static bool __any_sync(uint32 lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }

// ---- dependent launch: there is always one kernel only ----

static void allow_next_kernel() {}
static void wait_for_previous() {}

// ---- numbers ----

#if HALF
static float as_float(Element x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : ldexpf(exponent ? 1024 + fraction : fraction, max(exponent, 1) - 25);
  return x & 0x8000 ? -size : size;
}
static Element as_element(float x) {
  const float size = fabsf(x);
  if (size != size) return 0x7fff;
  const Element sign = std::signbit(x) ? 0x8000 : 0;
  if (size >= 65520.f) return sign | 0x7c00;
  const int exponent = size < ldexpf(1, -14) ? -14 : ilogbf(size);
  return sign | (Element)(((exponent + 14) << 10) + (int)nearbyintf(ldexpf(size, 10 - exponent)));
}
#else
static float as_float(Element x) { return __uint_as_float((uint32)x << 16); }
static Element as_element(float x) {
  if (x != x) return 0x7fff;
  const uint32 bits = with_bits_of<uint32>(x);
  return (Element)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, half to even
}
#endif

static float low(uint32 pair) { return as_float((Element)pair); }
static float high(uint32 pair) { return as_float((Element)(pair >> 16)); }
static uint32 rounded(float low, float high) { return as_element(low) | (uint32)as_element(high) << 16; }
static float exp2_of(float x) { return exp2f(x); }
static float divided(float x, float by) { return x / by; }

// ---- global memory ----

static Word4 load_weight(const void* p) { return emulator::load_global<Word4>(p); }
static Word4 load_weight_now(const void* p) { return emulator::load_global<Word4>(p); }
static int load_kept(const int* p) { return emulator::load_global<int>(p); }
static uint32 load_word(const void* p) { return emulator::load_global<uint32>(p); }
static uint2 load_two_words(const void* p) { return emulator::load_global<uint2>(p); }
static Word4 load_four_words(const void* p) { return emulator::load_global<Word4>(p); }
static int add_in_order(int* counter) { return atomicAdd(counter, 1); }

// ---- kernels run one after the other: what is waited for was said ----

static void say_not_ready(int* place) { *place = 0; }
static void say_ready(int* place) { *place = 1; }
static void wait_until_ready(const int* place) {
  if (emulator::load_global<int>(place) != 1) emulator::fail("its tokens may not be complete");
}

// ---- shared memory; addresses count from the beginning of the cluster's ----

static char* dynamic_shared() { return emulator::current->program->memory; }
static uint32 shared_address(const void* p) { return (uint32)((const char*)p - emulator::cluster_memory); }
static uint32 load_shared(uint32 from) { return *(uint32*)emulator::shared_at(from, 4); }
static void store_shared(uint32 to, uint32 v) { *(uint32*)emulator::shared_at(to, 4) = v; }

// ---- copies: they arrive when waited for, and no sooner ----

static void copy_piece_if(uint32 to, const void* from, bool wanted) {
  emulator::Fiber& fiber = *emulator::current;
  char* const place = emulator::shared_at(to, 16);
  memset(place, emulator::kPoison, 16);
  fiber.copies.push_back({place, wanted ? (const char*)from : nullptr, fiber.copy_groups});
}
static void copy_piece(uint32 to, const void* from) { copy_piece_if(to, from, true); }
static void copy_weight(uint32 to, const void* from) { copy_piece_if(to, from, true); }
static void end_copy_group() { ++emulator::current->copy_groups; }

template <int kLeft>
static void wait_for_copy_groups() {
  emulator::Fiber& fiber = *emulator::current;
  auto copy = fiber.copies.begin();
  for (; copy != fiber.copies.end() && copy->group < fiber.copy_groups - kLeft; ++copy) {
    const Word4 v = copy->from ? emulator::load_global<Word4>(copy->from) : Word4{0, 0, 0, 0};
    memcpy(copy->to, &v, 16);
  }
  fiber.copies.erase(fiber.copies.begin(), copy);
}
static void wait_for_copies() {
  end_copy_group();
  wait_for_copy_groups<0>();
}

// ---- tensor cores: what lane l holds is in PTX's description of the instructions ----

struct Factors {
  uint32 a[4], b[2];
};

static void multiply_add(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  const Factors* const lanes = emulator::from_all_lanes(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int group = threadIdx.x % 32 / 4, in_group = threadIdx.x % 4;
  for (int e = 0; e < 4; ++e) {
    const int half = e / 2, column = in_group * 2 + e % 2;  // row: group + 8 * half
    for (int k = 0; k < 16; k += 2) {
      const uint32 x = lanes[group * 4 + k % 8 / 2].a[half + k / 8 * 2];
      const uint32 y = lanes[column * 4 + k % 8 / 2].b[k / 8];
      d[e] += low(x) * low(y) + high(x) * high(y);
    }
  }
}

// Two neighbours of a row of a block, or of a column of it.
template <class At>
static uint32 two_of(At at, bool is_transposed) {
  const int group = threadIdx.x % 32 / 4, in_group = threadIdx.x % 4;
  if (is_transposed) return at(in_group * 2, group) | (uint32)at(in_group * 2 + 1, group) << 16;
  return at(group, in_group * 2) | (uint32)at(group, in_group * 2 + 1) << 16;
}

static void load_four_blocks(uint32 (&a)[4], uint32 row, bool is_transposed) {
  const uint32* const rows = emulator::from_all_lanes(row);
  for (int block = 0; block < 4; ++block) {
    auto at = [&](int r, int c) { return ((const Element*)emulator::shared_at(rows[block * 8 + r], 16))[c]; };
    a[block] = two_of(at, is_transposed);
  }
}
static void load_blocks(uint32 (&a)[4], uint32 row) { load_four_blocks(a, row, false); }
static void load_transposed_blocks(uint32 (&a)[4], uint32 row) { load_four_blocks(a, row, true); }

static void store_blocks(uint32 row, const uint32 (&a)[4]) {
  const uint32* const rows = emulator::from_all_lanes(row);
  for (int block = 0; block < 4; ++block) {
    const uint32 at = rows[block * 8 + threadIdx.x % 32 / 4];
    emulator::shared_at(at, 16);
    store_shared(at + threadIdx.x % 4 * 4, a[block]);
  }
}

static uint32 transposed(uint32 block) {
  const uint32* const lanes = emulator::from_all_lanes(block);
  auto at = [&](int r, int c) { return (Element)(lanes[r * 4 + c / 2] >> c % 2 * 16); };
  return two_of(at, true);
}

// ---- clusters ----

static uint32 cluster_rank() { return (uint32)(emulator::current->program - emulator::cluster.data()); }

static void arrive_at_cluster() {
  emulator::current->arrived_at_cluster = emulator::arrive(emulator::cluster_barrier);
}
static void wait_for_cluster() {
  emulator::wait(emulator::cluster_barrier, emulator::current->arrived_at_cluster);
  emulator::current->cluster_meetings = emulator::current->arrived_at_cluster + 1;
}

static uint32 remote_address(const void* p, uint32 rank) {
  return shared_address(p) + (rank - cluster_rank()) * (uint32)emulator::program_bytes;
}

// ---- counts of bytes: what is sent arrives when all of it was sent and somebody waits, and no sooner ----

typedef unsigned long long ByteCount;

static emulator::Count& count_at(uint32 address) {
  const auto found = emulator::counts.find(address);
  if (found == emulator::counts.end()) emulator::fail("a count of bytes was not made");
  return found->second;
}
static void make_count(ByteCount* count) {
  emulator::Count& made = emulator::counts[shared_address(count)] = emulator::Count();
  made.meetings_before = emulator::cluster_barrier.openings;
}

static void expect_bytes(ByteCount* count, int bytes) {
  emulator::arrive_at(count_at(shared_address(count)), bytes);
}
static void wait_for_bytes(ByteCount* count, bool odd) {
  emulator::Count& here = count_at(shared_address(count));
  ++here.waiting;
  emulator::deliver_if_complete(here);
  if (here.barrier.openings % 2 == odd) emulator::wait(here.barrier, here.barrier.openings);
  --here.waiting;
}

// That of another program, which must be known to have made it.
static emulator::Count& count_of(uint32 rank, const ByteCount* count) {
  emulator::Count& there = count_at(remote_address(count, rank));
  if (rank != cluster_rank() && emulator::current->cluster_meetings <= there.meetings_before)
    emulator::fail("nothing says that the other program has made its count of bytes");
  return there;
}

template <class T>
static void send_any(const float* p, uint32 rank, const T& v, const ByteCount* count) {
  emulator::Count& there = count_of(rank, count);
  emulator::begin_next_if_complete(there);
  const char* const bytes = (const char*)&v;
  char* const place = emulator::shared_at(remote_address(p, rank), sizeof(T));
  there.sent.push_back({place, std::vector<char>(bytes, bytes + sizeof(T))});
  there.missing -= (int)sizeof(T);
  emulator::deliver_if_complete(there);
}
static void send(const float* p, uint32 rank, float v, const ByteCount* count) { send_any(p, rank, v, count); }
static void send_four(const float* p, uint32 rank, float4 v, const ByteCount* count) {
  send_any(p, rank, v, count);
}
