"""Before the first step: weights, KV cache, kernels compiled, memory divided."""
