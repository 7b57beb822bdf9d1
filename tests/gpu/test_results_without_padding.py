"""The contract of `contract/test_results_without_padding.py`, on CUDA."""

from contract.test_results_without_padding import *  # noqa: F403
