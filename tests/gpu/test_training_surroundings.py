"""The contract of `contract/test_training_surroundings.py`, on CUDA."""

from contract.test_training_surroundings import *  # noqa: F403
