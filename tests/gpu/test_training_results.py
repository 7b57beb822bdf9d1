"""The contract of `contract/test_training_results.py`, on CUDA."""

from contract.test_training_results import *  # noqa: F403
