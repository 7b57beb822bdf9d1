"""Tools that look at engine and runtime from outside: benchmarks, the choice of kernels, a demonstration."""
