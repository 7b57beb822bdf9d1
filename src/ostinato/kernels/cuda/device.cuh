// The GPU's instructions, as functions: dependent launch, numbers, memory, tensor cores, clusters. The only file
// with PTX, so no headers of a toolkit are needed; tests put another one in its place that runs on a CPU.
//
// Elements are bfloat16, or float16 where HALF is set.
#pragma once

typedef unsigned int uint32;
typedef unsigned short Element;  // its bits

struct __align__(16) Word4 {
  uint32 x, y, z, w;
};

// ---- dependent launch: see dependent_launch.py ----

__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- numbers ----

#if HALF
#define ELEMENT "f16"
__device__ __forceinline__ float low(uint32 pair) {
  float x;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(x) : "r"(pair));
  return x;
}
__device__ __forceinline__ float high(uint32 pair) {
  float x;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(pair));
  return x;
}
#else
#define ELEMENT "bf16"
__device__ __forceinline__ float low(uint32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32 pair) { return __uint_as_float(pair & 0xffff0000u); }
#endif

// Two elements, `low` in the lower half.
__device__ __forceinline__ uint32 rounded(float low, float high) {
  uint32 pair;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// As Triton divides.
__device__ __forceinline__ float divided(float x, float by) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(by));
  return y;
}

// ---- global memory ----

// 16 bytes of a weight, which nothing writes while kernels run; read once, so not worth a place in L1.
__device__ __forceinline__ Word4 load_weight(const void* p) {
  Word4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same where nothing else keeps it before the wait: the compiler moves loads of constants behind it.
__device__ __forceinline__ Word4 load_weight_now(const void* p) {
  Word4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// What nothing writes while the layers of a step run and many threads read: worth a place in L1.
__device__ __forceinline__ int load_kept(const int* p) {
  int v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// What other CTAs wrote, of this kernel or an earlier one: from L2, where all of them write to.
__device__ __forceinline__ uint32 load_word(const void* p) {
  uint32 v;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_two_words(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ Word4 load_four_words(const void* p) {
  Word4 v;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Adds 1 and returns what was there. What this CTA stored before is seen by those that add later.
__device__ __forceinline__ int add_in_order(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// ---- a kernel tells the next one, which waits for it later, that all before both of them is complete ----

// By one thread, before it allows the next kernel.
__device__ __forceinline__ void say_not_ready(int* place) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], 0; fence.acq_rel.gpu;" ::"l"(place) : "memory");
}

// By one thread that has waited for the previous kernel.
__device__ __forceinline__ void say_ready(int* place) {
  asm volatile("st.release.gpu.global.b32 [%0], 1;" ::"l"(place) : "memory");
}

// Then copies by tensor maps, too, read what is complete.
__device__ __forceinline__ void wait_until_ready(const int* place) {
  int said = 0;
  for (int i = 0; !said; ++i) {
    if (i > 1 << 25) asm volatile("trap;");  // seconds
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(said) : "l"(place) : "memory");
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- shared memory ----

// As much as the launch asked for.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ Word4 memory[];
  return (char*)memory;
}

__device__ __forceinline__ uint32 shared_address(const void* p) { return (uint32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint32 load_shared(uint32 from) {
  uint32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32 to, uint32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// ---- copies of 16 bytes from global to shared memory, arrived when the thread has waited for them ----

// With as much of a weight around it as is worth asking for.
__device__ __forceinline__ void copy_weight(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void copy_piece(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Zeros instead unless `wanted`.
__device__ __forceinline__ void copy_piece_if(uint32 to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}

// The copies since the last call are a group.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// For all groups but the last `kLeft`.
template <int kLeft>
__device__ __forceinline__ void wait_for_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- tensor cores ----

// d [16, 8] += a [16, 16] * b [16, 8]. Of a, a thread holds rows lane / 4 and + 8, columns 2 * (lane % 4) and
// + 8; of b the same columns as rows, and column lane / 4; of d rows as of a and columns 2 * (lane % 4).
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four blocks [8, 8] of elements; lane l gives the address of row l % 8 of block l / 8.
__device__ __forceinline__ void load_blocks(uint32 (&a)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_transposed_blocks(uint32 (&a)[4], uint32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}

// The way back: four blocks as `load_blocks` gives them.
__device__ __forceinline__ void store_blocks(uint32 row, const uint32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a[0]), "r"(a[1]),
               "r"(a[2]), "r"(a[3])
               : "memory");
}

__device__ __forceinline__ uint32 transposed(uint32 block) {
  uint32 t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(block));
  return t;
}

// ---- clusters ----

__device__ __forceinline__ uint32 cluster_rank() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// After the wait, all threads of the cluster have arrived. What they stored before need not be visible: a
// barrier that promised it would wait for everything that is on its way.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Where another CTA of the cluster has what is at `p` here.
__device__ __forceinline__ uint32 remote_address(const void* p, uint32 rank) {
  uint32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  return remote;
}

// ---- counts of bytes that CTAs of a cluster send each other ----

typedef unsigned long long ByteCount;

// By one thread, before it arrives at the cluster.
__device__ __forceinline__ void make_count(ByteCount* count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(count)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// So many come for the next wait. By one thread; they may have come already.
__device__ __forceinline__ void expect_bytes(ByteCount* count, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(count)), "r"(bytes)
               : "memory");
}

// Until all of the n-th lot are there, and can be read: what was counted, and nothing else that others stored, for
// which L1 would have to be emptied. `odd`: whether n, from 0 on, is.
__device__ __forceinline__ void wait_for_bytes(ByteCount* count, bool odd) {
  uint32 are_there = 0;
  while (!are_there)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(are_there)
        : "r"(shared_address(count)), "r"((uint32)odd)
        : "memory");
}

// To `p` of another CTA, or of this one, and to its count.
__device__ __forceinline__ void send(const float* p, uint32 rank, float v, const ByteCount* count) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   remote_address(p, rank)),
               "f"(v), "r"(remote_address(count, rank))
               : "memory");
}

__device__ __forceinline__ void send_four(const float* p, uint32 rank, float4 v, const ByteCount* count) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          remote_address(p, rank)),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote_address(count, rank))
      : "memory");
}
