"""The contract of `contract/test_strangers_code.py`, on CUDA."""

from contract.test_strangers_code import *  # noqa: F403
