"""The contract of `contract/test_padding.py`, on CUDA."""

from contract.test_padding import *  # noqa: F403
