"""The contract of `contract/test_outputs.py`, on CUDA."""

from contract.test_outputs import *  # noqa: F403
