"""The contract of `contract/test_block.py`, on CUDA."""

from contract.test_block import *  # noqa: F403
