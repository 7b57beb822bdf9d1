"""The contract of `contract/test_segments.py`, on CUDA."""

from contract.test_segments import *  # noqa: F403
