"""The contract of `contract/test_training_optimizers.py`, on CUDA."""

from contract.test_training_optimizers import *  # noqa: F403
