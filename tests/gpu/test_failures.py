"""The contract of `contract/test_failures.py`, on CUDA."""

from contract.test_failures import *  # noqa: F403
