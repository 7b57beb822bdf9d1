"""Numbers that kernels and their callers must agree on. Imports nothing: not every process needs torch."""

PAGE_SIZE = 16
"""Tokens of a page of the KV cache."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are taken as 0: dividing by them would only overflow."""
