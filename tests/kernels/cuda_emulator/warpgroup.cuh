// The functions of the package's warpgroup.cuh in plain C++.
#pragma once
#include "device.cuh"

// What `emulated.py` makes of a TileMap.
struct TensorMap {
  const char* data;
  long long dimensions, sizes[4], strides[4], box[4];  // columns first, then rows; strides in bytes
};

static char* memory_of_tiles() { return dynamic_shared(); }

// ---- copies ----

static void fetch_map(const TensorMap&) {}

// Beginning at these coordinates, the innermost first; to programs that have a bit.
static void copy_any(void* to, const TensorMap& map, std::vector<long long> from, ByteCount* count, int programs) {
  if (map.box[0] != 64) emulator::fail("a row of a tile has 64 elements");
  if (map.dimensions != (long long)from.size()) emulator::fail("a box of as many dimensions as its tensor");
  if (shared_address(to) % 1024 != 0) emulator::fail("a tile begins at a multiple of 1,024 bytes");
  from.resize(4);
  std::vector<char> tile(map.box[1] * map.box[2] * map.box[3] * 128);
  for (size_t r = 0; r < tile.size() / 128; ++r) {
    const long long at[3] = {from[1] + (long long)r % map.box[1], from[2] + (long long)r / map.box[1] % map.box[2],
                             from[3] + (long long)r / map.box[1] / map.box[2]};
    if (at[0] >= map.sizes[1] || at[1] >= map.sizes[2] || at[2] >= map.sizes[3]) continue;
    const char* const row = map.data + at[0] * map.strides[1] + at[1] * map.strides[2] + at[2] * map.strides[3];
    for (int i = 0; i < 8 && from[0] + i * 8 < map.sizes[0]; ++i) {
      const Word4 v = emulator::load_global<Word4>(row + from[0] * map.strides[0] + i * 16);
      memcpy(tile.data() + r * 128 + (i ^ r % 8) * 16, &v, 16);
    }
  }
  for (int rank = 0; programs >> rank; ++rank) {
    if (!(programs >> rank & 1)) continue;
    char* const place = emulator::cluster_memory + remote_address(to, rank);
    memset(place, emulator::kPoison, tile.size());
    emulator::Count& there = count_of(rank, count);
    emulator::begin_next_if_complete(there);
    there.sent.push_back({place, tile});
    there.missing -= (int)tile.size();
    emulator::deliver_if_complete(there);
  }
}
static void copy_box(void* to, const TensorMap& map, int column, int row, ByteCount* count) {
  copy_any(to, map, {column, row}, count, 1 << cluster_rank());
}
static void copy_box_to_all(void* to, const TensorMap& map, int column, int row, ByteCount* count, int programs) {
  copy_any(to, map, {column, row}, count, programs);
}
static void copy_boxes(void* to, const TensorMap& map, int inner, int outer, ByteCount* count) {
  copy_any(to, map, {0, 0, inner, outer}, count, 1 << cluster_rank());
}

static void show_to_copies() {}

// Stores read when they are waited for, and no sooner.
static void store_any(const TensorMap& map, int column, int row, const void* from, bool adds) {
  if (shared_address(from) % 1024 != 0) emulator::fail("a tile begins at a multiple of 1,024 bytes");
  if (map.box[0] != 64 || map.dimensions != 2) emulator::fail("a box of rows of 64 elements");
  emulator::current->open_stores.push_back([&map, column, row, from, adds] {
    for (long long r = 0; r < map.box[1] && row + r < map.sizes[1]; ++r)
      for (long long c = 0; c < 64 && column + c < map.sizes[0]; ++c) {
        const Element x = ((const Element*)from)[r * 64 + (c / 8 ^ r % 8) * 8 + c % 8];
        Element* const to = (Element*)(map.data + (row + r) * map.strides[1]) + column + c;
        *to = adds ? as_element(as_float(*to) + as_float(x)) : x;
      }
  });
}
static void store_box(const TensorMap& map, int column, int row, const void* from) {
  store_any(map, column, row, from, false);
}
static void add_box(const TensorMap& map, int column, int row, const void* from) {
  store_any(map, column, row, from, true);
}
static void end_store_group() {
  emulator::Fiber& fiber = *emulator::current;
  fiber.stores.push_back(std::move(fiber.open_stores));
  fiber.open_stores.clear();
}
template <int kLeft>
static void wait_for_stores_to_read() {
  auto& groups = emulator::current->stores;
  for (; (int)groups.size() > kLeft; groups.erase(groups.begin()))
    for (const auto& store : groups.front()) store();
}

static void copy_to_program(uint32 rank, void* to, const void* from, int bytes, ByteCount* count) {
  if (shared_address(from) % 16 || shared_address(to) % 16 || bytes % 16) emulator::fail("a copy is not aligned");
  emulator::Count& there = count_of(rank, count);
  emulator::begin_next_if_complete(there);
  char* const place = emulator::cluster_memory + remote_address(to, rank);
  there.sent.push_back({place, {}, (const char*)from, (size_t)bytes, emulator::current->program});
  there.missing -= bytes;
  emulator::deliver_if_complete(there);
}

// ---- arrivals ----

static void make_count_of(ByteCount* count, int arrivals) {
  make_count(count);
  count_at(shared_address(count)).members = arrivals;
}
static void arrive_at(const ByteCount* count, uint32 rank) { emulator::arrive_at(count_of(rank, count), 0); }

static void arrive_here(ByteCount* count) { emulator::arrive_at(count_at(shared_address(count)), 0); }

static void wait_for_bytes_or_fail(ByteCount* count, bool odd) { wait_for_bytes(count, odd); }

// ---- tensor cores: tiles are read when a group is waited for, and no sooner ----

static void begin_products() {}
static void end_products() { emulator::current->product_groups.push_back(emulator::current->products.size()); }

static void wait_for_groups_but(int left) {
  emulator::Fiber& fiber = *emulator::current;
  const int groups = (int)fiber.product_groups.size() - left;
  if (groups <= 0) return;
  const size_t number = fiber.product_groups[groups - 1];
  for (size_t i = 0; i < number; ++i) fiber.products[i]();
  fiber.products.erase(fiber.products.begin(), fiber.products.begin() + number);
  fiber.product_groups.erase(fiber.product_groups.begin(), fiber.product_groups.begin() + groups);
  for (size_t& end : fiber.product_groups) end -= number;
}

static void wait_for_all_but_last() { wait_for_groups_but(1); }

template <int kNumber>
static void keep_in_order(float (&)[kNumber]) {}

template <int kNumber>
static void wait_for_products(float (&)[kNumber]) {
  wait_for_groups_but(0);
}

template <int kNumber>
static void wait_for_products_when(float ready, float (&d)[kNumber]) {
  if (ready < 0) emulator::fail("what products wait for is negative");
  wait_for_products(d);
}

// The element of a tile, `first` being where its 16 columns begin.
static float of_tile(uint32 first, int row, int column, uint32 groups) {
  const uint32 tile = first / 1024 * 1024, sixteenth = first % 1024 / 16 + column / 8;
  if (first % 1024 % 32 != 0 || sixteenth > 7) emulator::fail("16 columns of a tile do not begin there");
  const uint32 at = tile + row / 8 * groups + row % 8 * 128;
  const char* const place = emulator::shared_at(at + (sixteenth ^ row % 8) * 16, 16);
  return as_float(((const Element*)place)[column % 8]);
}

template <int kHalf>
static void multiply_tiles(float (&d)[kHalf], uint32 a, uint32 b, uint32 b_groups = 1024) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  emulator::current->products.push_back([&d, a, b, b_groups, lane, warp] {
    for (int i = 0; i < kHalf; ++i) {
      const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) d[i] += of_tile(a, row, k, 1024) * of_tile(b, column, k, b_groups);
    }
  });
}

template <int kHalf>
static void multiply_tiles_anew(float (&d)[kHalf], uint32 a, uint32 b, uint32 b_groups = 1024) {
  emulator::current->products.push_back([&d] {
    for (float& x : d) x = 0;
  });
  multiply_tiles(d, a, b, b_groups);
}

static void multiply_large_tiles(float (&d)[128], uint32 a, uint32 b, bool adds) {
  if (adds) multiply_tiles(d, a, b);
  else multiply_tiles_anew(d, a, b);
}

// The four registers of the lanes that share a thread's rows.
struct RowFactors {
  uint32 a[4];
};

template <int kHalf>
static void multiply_columns(float (&d)[kHalf], const uint32* a, uint32 tile, uint32 groups, uint32 beside) {
  if (tile % 1024 != 0) emulator::fail("16 rows of a tile do not begin there");
  const int lane = threadIdx.x % 32;
  const RowFactors* const lanes = emulator::from_all_lanes(RowFactors{{a[0], a[1], a[2], a[3]}});
  RowFactors quad[4];
  memcpy(quad, lanes + lane / 4 * 4, sizeof(quad));
  emulator::current->products.push_back([&d, quad0 = quad[0], quad1 = quad[1], quad2 = quad[2], quad3 = quad[3],
                                         tile, groups, beside, lane] {
    const RowFactors quad[4] = {quad0, quad1, quad2, quad3};
    for (int i = 0; i < kHalf; ++i) {
      const int half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32 pair = quad[k % 8 / 2].a[half + k / 8 * 2];
        const uint32 row = tile + column / 64 * beside + k / 8 * groups + k % 8 * 128;
        const char* const place = emulator::shared_at(row + (column % 64 / 8 ^ k % 8) * 16, 16);
        d[i] += (k % 2 ? high(pair) : low(pair)) * as_float(((const Element*)place)[column % 8]);
      }
    }
  });
}

// The same with rows of a tile for columns.
template <int kHalf>
static void multiply_held(float (&d)[kHalf], const uint32* a, uint32 tile, uint32 groups) {
  const int lane = threadIdx.x % 32;
  const RowFactors* const lanes = emulator::from_all_lanes(RowFactors{{a[0], a[1], a[2], a[3]}});
  RowFactors quad[4];
  memcpy(quad, lanes + lane / 4 * 4, sizeof(quad));
  emulator::current->products.push_back([&d, quad0 = quad[0], quad1 = quad[1], quad2 = quad[2], quad3 = quad[3],
                                         tile, groups, lane] {
    const RowFactors quad[4] = {quad0, quad1, quad2, quad3};
    for (int i = 0; i < kHalf; ++i) {
      const int half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32 pair = quad[k % 8 / 2].a[half + k / 8 * 2];
        d[i] += (k % 2 ? high(pair) : low(pair)) * of_tile(tile, column, k, groups);
      }
    }
  });
}

template <int kHalf>
static void multiply_held_anew(float (&d)[kHalf], const uint32* a, uint32 tile, uint32 groups) {
  emulator::current->products.push_back([&d] {
    for (float& x : d) x = 0;
  });
  multiply_held(d, a, tile, groups);
}

// ---- threads of a program that work apart ----

template <int kRegisters>
static void give_up_registers() {}
template <int kRegisters>
static void take_registers() {}

static emulator::Barrier& meeting(int number, int threads) {
  emulator::Barrier& found = emulator::current->program->meetings[number];
  if (number < 1 || number > 15) emulator::fail("there is no such meeting");
  if (found.members != threads && found.arrived > 0) emulator::fail("a meeting of several sizes");
  found.members = threads;
  return found;
}
static void wait_at_meeting(int number, int threads) {
  emulator::Barrier& found = meeting(number, threads);
  emulator::wait(found, emulator::arrive(found));
}
static void come_to_meeting(int number, int threads) { emulator::arrive(meeting(number, threads)); }
