"""The contract of `contract/test_training_warnings.py`, on CUDA."""

from contract.test_training_warnings import *  # noqa: F403
