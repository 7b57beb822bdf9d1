"""The contract of `contract/test_words_of_memory.py`, on CUDA."""

from contract.test_words_of_memory import *  # noqa: F403
