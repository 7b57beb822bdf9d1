"""The contract of `contract/test_safe_results.py`, on CUDA."""

from contract.test_safe_results import *  # noqa: F403
