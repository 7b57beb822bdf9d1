"""The contract of `contract/test_steady_calls.py`, on CUDA."""

from contract.test_steady_calls import *  # noqa: F403
