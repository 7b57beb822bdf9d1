"""Adapters at random again on CUDA, where a step is launched before the tokens of the last one are read."""

from engine.test_lora_properties import *  # noqa: F403
