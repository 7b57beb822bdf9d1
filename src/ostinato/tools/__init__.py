"""Tools that use engine and runtime from outside: benchmarks, kernel tuning, a demonstration."""
