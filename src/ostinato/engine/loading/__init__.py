"""Everything before the first step: load weights, size the KV cache, compile kernels, divide the memory."""
