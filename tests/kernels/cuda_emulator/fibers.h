// A kernel's threads on one thread of a CPU: each is a fiber that runs until it waits for others.
//
// Programs run one after the other, those of a cluster together. What can be seen to be wrong ends the launch:
// threads that wait for each other for ever, accesses that are not aligned or outside of what there is.
#pragma once
#include <ucontext.h>

#include <cstring>
#include <functional>
#include <map>
#include <vector>

struct Dimensions {
  unsigned x, y, z;
};
static Dimensions threadIdx, blockIdx, gridDim;  // of the fiber that runs

namespace emulator {

constexpr int kStackBytes = 64 << 10;
constexpr int kPoison = 0xff;  // as bytes of any number: NaN, or -1

// Opens for all when the last of its members has arrived, and counts how often.
struct Barrier {
  int members = 0, arrived = 0, openings = 0;
};

// What the lanes of a warp show each other; in turns, for some may be a step ahead.
struct Warp {
  Barrier barrier{32};
  alignas(16) char shown[2][32 * 32];
};

// Global memory that the kernel may read.
struct Tensor {
  const char *begin, *end;
};

struct Program {
  Dimensions place;
  char* memory;
  Barrier barrier;
  std::vector<Warp> warps;
  unsigned running;  // of its threads
  std::map<int, Barrier> meetings{};
};

// Of 16 bytes, or zeros instead of them.
struct Copy {
  char* to;
  const char* from;
  int group;
};

struct Fiber {
  ucontext_t context;
  Program* program;
  unsigned thread;
  bool has_ended = false;
  const Barrier* waits_for = nullptr;  // until it has opened more than `openings` times
  int openings = 0;
  int arrived_at_cluster = 0;  // when that barrier had opened so often
  int cluster_meetings = 0;    // that it knows of
  std::vector<Copy> copies;    // that have not arrived
  int copy_groups = 0;
  std::vector<std::function<void()>> products;  // that were asked for and not waited for
  std::vector<size_t> product_groups;           // how many there were at the end of each group
  std::vector<std::function<void()>> open_stores;           // that are of no group yet
  std::vector<std::vector<std::function<void()>>> stores;   // groups that were not waited for
};

// What was sent to a program of the cluster and is not there yet.
struct Sent {
  char* to;
  std::vector<char> bytes;
  const char* from = nullptr;  // instead: so many bytes of a program's memory, read when they arrive
  size_t size = 0;
  const Program* source = nullptr;
};
struct Count {
  int members = 1, arrived = 0;
  Barrier barrier{1};       // opens when all have arrived and no byte is missing
  int meetings_before = 0;  // of the cluster, when it was made
  int missing = 0;          // less than 0 where bytes came before they were expected
  int waiting = 0;          // fibers
  std::vector<Sent> sent;
};

static Fiber* current;
static ucontext_t scheduler;
static void (*body)();  // of every fiber
static const char* failure;
static std::vector<Tensor> tensors;
static Barrier cluster_barrier;
static std::vector<Program> cluster;
static std::map<unsigned, Count> counts;  // by their address in the cluster's memory
static char* cluster_memory;
static size_t program_bytes;

static void go_to_scheduler() { swapcontext(&current->context, &scheduler); }

static void fail(const char* what) {
  failure = what;
  go_to_scheduler();
}

static int arrive(Barrier& barrier) {
  const int before = barrier.openings;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.openings;
  }
  return before;
}

static void wait(const Barrier& barrier, int openings) {
  if (barrier.openings > openings) return;
  current->waits_for = &barrier;
  current->openings = openings;
  go_to_scheduler();
}

static bool is_complete(const Count& count) { return count.arrived == count.members && count.missing == 0; }

static void deliver(Count& count) {
  for (const Sent& sent : count.sent) {
    if (sent.from) memcpy(sent.to, sent.from, sent.size);
    else memcpy(sent.to, sent.bytes.data(), sent.bytes.size());
  }
  count.sent.clear();
  count.arrived = 0;
  arrive(count.barrier);
}

// As late as can be: when somebody waits for it.
static void deliver_if_complete(Count& count) {
  if (count.waiting > 0 && is_complete(count)) deliver(count);
}

// What comes now is of the next lot.
static void begin_next_if_complete(Count& count) {
  if (is_complete(count)) deliver(count);
}

// One more, which expects so many bytes.
static void arrive_at(Count& count, int bytes) {
  begin_next_if_complete(count);
  if (count.arrived == count.members) fail("more arrive at a count than it waits for");
  ++count.arrived;
  count.missing += bytes;
  deliver_if_complete(count);
}

static Warp& warp() { return current->program->warps[threadIdx.x / 32]; }

// What all lanes of the warp show, until the thread's next wait.
template <class T>
const T* from_all_lanes(const T& mine) {
  static_assert(sizeof(T) <= 32);
  Barrier& barrier = warp().barrier;
  T* const shown = (T*)warp().shown[barrier.openings % 2];
  shown[threadIdx.x % 32] = mine;
  wait(barrier, arrive(barrier));
  return shown;
}

// Where a shared address is, if an access of so many bytes is allowed there.
static char* shared_at(unsigned address, unsigned bytes) {
  if (address % bytes != 0) fail("an access to shared memory is not aligned");
  if (address + bytes > cluster.size() * program_bytes) fail("an access to shared memory is outside of it");
  return cluster_memory + address;
}

template <class T>
T load_global(const void* p) {
  if ((size_t)p % sizeof(T) != 0) fail("a load from global memory is not aligned");
  for (const Tensor& tensor : tensors)
    if (p >= tensor.begin && (const char*)p + sizeof(T) <= tensor.end) return *(const T*)p;
  fail("a load from global memory is outside of all tensors");
  return T();
}

static void run_fiber() {
  body();
  current->has_ended = true;
  if (!current->stores.empty() || !current->open_stores.empty()) failure = "a thread has ended that did not wait for its stores";
  if (--current->program->running > 0) return;
  for (const auto& [address, count] : counts)
    for (const Sent& sent : count.sent)
      if (sent.source == current->program) failure = "a program has ended whose memory is being copied";
}

// All fibers, until they have ended or nothing can go on.
static void run(std::vector<Fiber>& fibers) {
  for (bool all_ended = false; !all_ended && !failure;) {
    bool has_one_run = false;
    all_ended = true;
    for (Fiber& fiber : fibers) {
      if (fiber.has_ended || failure) continue;
      all_ended = false;
      if (fiber.waits_for && fiber.waits_for->openings <= fiber.openings) continue;
      has_one_run = true;
      fiber.waits_for = nullptr;
      current = &fiber;
      threadIdx = {fiber.thread, 0, 0};
      blockIdx = fiber.program->place;
      swapcontext(&scheduler, &fiber.context);
    }
    if (!all_ended && !has_one_run) failure = "threads wait for each other for ever";
  }
}

// The programs from number `first` on, one after the other in x, then y, then z.
static void run_cluster(unsigned first, unsigned programs, unsigned threads, std::vector<char>& stacks) {
  memset(cluster_memory, kPoison, programs * program_bytes);
  cluster_barrier = Barrier{(int)(programs * threads)};
  cluster.resize(programs);
  counts.clear();
  std::vector<Fiber> fibers(programs * threads);
  for (unsigned n = 0; n < programs; ++n) {
    const unsigned number = first + n;
    const Dimensions place{number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
    cluster[n] = Program{place, cluster_memory + n * program_bytes, Barrier{(int)threads},
                         std::vector<Warp>(threads / 32), threads};
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[n * threads + t];
      fiber.program = &cluster[n];
      fiber.thread = t;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.data() + (size_t)(n * threads + t) * kStackBytes;
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, run_fiber, 0);
    }
  }
  run(fibers);
  for (const auto& [address, count] : counts)
    if (!failure && !is_complete(count) && (count.arrived > 0 || !count.sent.empty()))
      failure = "bytes are on their way to a program that has ended";
}

// What went wrong, or null.
static const char* run_grid(Dimensions grid, unsigned threads, size_t shared_bytes, unsigned programs) {
  std::vector<char> stacks((size_t)programs * threads * kStackBytes);
  program_bytes = (shared_bytes + 1023) / 1024 * 1024;
  std::vector<char> memory(programs * program_bytes + 1024);
  cluster_memory = memory.data() + (1024 - (size_t)memory.data() % 1024) % 1024;
  gridDim = grid;
  failure = nullptr;
  for (unsigned first = 0; first < grid.x * grid.y * grid.z && !failure; first += programs)
    run_cluster(first, programs, threads, stacks);
  return failure;
}

}  // namespace emulator
