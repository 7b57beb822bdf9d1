"""The contract of `contract/test_copies.py`, on CUDA."""

from contract.test_copies import *  # noqa: F403
