"""The contract of `contract/test_seams.py`, on CUDA."""

from contract.test_seams import *  # noqa: F403
