"""10,000 tokens of prompt over a ladder of 4,096 on CUDA, prefill piecewise and whole."""

from engine.test_engine_long_prompt import *  # noqa: F403
