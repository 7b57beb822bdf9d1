"""Tools that look at the runtime from outside: benchmarks now; profile, inspect and doctor later."""
