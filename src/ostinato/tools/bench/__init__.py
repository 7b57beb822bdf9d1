"""Benchmarks: each measures through the public `LLM`, checks what came out and returns one plain result."""
