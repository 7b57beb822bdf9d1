"""The contract of `contract/test_training_wrappers.py`, on CUDA."""

from contract.test_training_wrappers import *  # noqa: F403
