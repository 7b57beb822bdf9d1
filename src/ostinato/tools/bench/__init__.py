"""Benchmarks: each measures through the public `LLM`, checks the outputs and returns one plain result."""
