"""The contract of `contract/test_bad_input.py`, on CUDA."""

from contract.test_bad_input import *  # noqa: F403
