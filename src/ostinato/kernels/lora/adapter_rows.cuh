// Which adapters the tokens of a step have, as `lora/rows.py` leaves it: blocks of tokens of one slot each.
#pragma once
#include "device.cuh"

struct AdapterBlocks {
  const int* blocks;  // [5, count]: slot, or -1 behind the last; first and last place in the order of tokens; ...
  int count;

  __device__ __forceinline__ int slot(int block) const { return block < count ? load_kept(blocks + block) : -1; }
  __device__ __forceinline__ int begin(int block) const { return load_kept(blocks + count + block); }
  __device__ __forceinline__ int end(int block) const { return load_kept(blocks + 2 * count + block); }

  // Behind all: whether the tokens of the layer that runs are complete.
  __device__ __forceinline__ int* ready() const { return (int*)blocks + 4 * count; }
};
