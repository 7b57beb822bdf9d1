"""The contract of `contract/test_training_numbers.py`, on CUDA."""

from contract.test_training_numbers import *  # noqa: F403
