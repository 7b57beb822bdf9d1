"""The contract of `contract/test_fresh_results.py`, on CUDA."""

from contract.test_fresh_results import *  # noqa: F403
