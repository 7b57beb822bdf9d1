"""The contract of `contract/test_training_programs.py`, on CUDA."""

from contract.test_training_programs import *  # noqa: F403
