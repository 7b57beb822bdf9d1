"""The contract of `contract/test_no_trace.py`, on CUDA."""

from contract.test_no_trace import *  # noqa: F403
