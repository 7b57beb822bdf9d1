"""The contract of `contract/test_random_programs.py`, on CUDA."""

from contract.test_random_programs import *  # noqa: F403
