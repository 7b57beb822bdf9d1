"""The contract of `contract/test_addresses.py`, on CUDA."""

from contract.test_addresses import *  # noqa: F403
