"""The contract of `contract/test_left_in_python.py`, on CUDA."""

from contract.test_left_in_python import *  # noqa: F403
